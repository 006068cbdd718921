// How mla_decode divides the keys of a batch between parts, computed by every block for its own
// part from the lengths: a captured launch is right for any lengths. Compare
// reference/attention/split_schedule.hpp, FlashMLA's rule.
//
// A part computes a run of tiles of 64 keys: the last of one request, some whole ones, the first of
// another. Three ways to divide, by which leaves the fullest part least:
//   chunks   each part has one piece of one request, and no piece is longer than a number of tiles
//            that is as small as the parts allow: for requests of like length
//   whole    as many whole requests for each part: nothing to merge
//   ranges   requests one after the other, cut into equal runs
#pragma once

#include "kernels/base/device.cuh"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels::mla {

constexpr int kTokens = 64;      ///< of a tile
constexpr int kSwitchTiles = 2;  ///< what a request's start costs
constexpr int kRangeTiles = 5;  ///< what ranges cost by more starts and merges: others may waste it

/// The parts that divide a request: `count` of them, from first_part on. 1: undivided.
struct Split {
  int first_part = 0, count = 1;
};

/// A part's run. No request where last < first.
struct Share {
  int first = 0, last = -1;  ///< requests
  int first_tile = 0;        ///< of the first request
  int end_tile = 0;          ///< of the last one, exclusive
  Split of_first, of_last;
};

struct Lengths {
  const std::int32_t* data;
  std::int64_t stride;
  int count;    ///< requests
  int longest;  ///< that the block table has room for

  __device__ int of(int request) const { return min(max(data[request * stride], 0), longest); }
  /// A request without keys counts as one tile: its outputs must be written.
  __device__ int tiles(int request) const { return max(1, (of(request) + kTokens - 1) / kTokens); }
};

__device__ inline int sum_before(int own, int lane) {
  int sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += before;
  }
  return sum - own;
}

/// One warp's search for the share of a part. Loops stay loops: it runs once, and instructions that
/// were not fetched yet take longer than they run.
class Scheduler {
 public:
  __device__ Scheduler(const Lengths& lengths, int parts, int part)
      : lengths_(lengths), parts_(parts), part_(part), lane_(static_cast<int>(threadIdx.x % 32)) {}

  /// `fewest`: a piece has at least so many tiles, times the root of all tiles: what merging costs.
  __device__ Share share(float fewest) const {
    int total = 0, longest = 0;
#pragma unroll 1
    for (int b = lane_; b < lengths_.count; b += 32) {
      const int tiles = lengths_.tiles(b);
      total += tiles;
      longest = max(longest, tiles);
    }
    total = __reduce_add_sync(0xffffffffu, total);
    longest = __reduce_max_sync(0xffffffffu, longest);
    const int mean = (total + parts_ - 1) / parts_;
    if (lengths_.count > parts_) {
      const int each = (lengths_.count + parts_ - 1) / parts_;
      return each * longest <= mean + kRangeTiles ? whole(each) : ranges(total);
    }
    const int least = max(mean, static_cast<int>(ceilf(fewest * sqrtf(static_cast<float>(total)))));
    const int chunk = smallest_chunk(least, longest);
    return chunk <= least + kRangeTiles || parts_ == 1 ? chunks(chunk) : ranges(total);
  }

 private:
  __device__ int smallest_chunk(int least, int longest) const {
    int low = least, high = max(least, longest), tried = least;
#pragma unroll 1
    while (low < high) {
      int pieces = 0;
#pragma unroll 1
      for (int b = lane_; b < lengths_.count; b += 32)
        pieces += (lengths_.tiles(b) + tried - 1) / tried;
      pieces = __reduce_add_sync(0xffffffffu, pieces);
      if (pieces <= parts_)
        high = tried;
      else
        low = tried + 1;
      tried = (low + high) / 2;
    }
    return low;
  }

  __device__ Share chunks(int chunk) const {
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < lengths_.count; base += 32) {
      const int b = base + lane_;
      const int tiles = b < lengths_.count ? lengths_.tiles(b) : 0;
      const int own = (tiles + chunk - 1) / chunk, at = before + sum_before(own, lane_);
      const unsigned here = __ballot_sync(0xffffffffu, at <= part_ && part_ < at + own);
      if (here != 0) {
        const int found = __ffs(static_cast<int>(here)) - 1;
        const int first_part = __shfl_sync(0xffffffffu, at, found);
        const int count = __shfl_sync(0xffffffffu, own, found);
        const int all = __shfl_sync(0xffffffffu, tiles, found), piece = part_ - first_part;
        const int whole = all / count, rest = all - whole * count;  // so that 32 bits suffice
        Share share;
        share.first = share.last = base + found;
        share.first_tile = whole * piece + rest * piece / count;
        share.end_tile = whole * (piece + 1) + rest * (piece + 1) / count;
        share.of_first = share.of_last = {first_part, count};
        return share;
      }
      before = __shfl_sync(0xffffffffu, at + own, 31);
    }
    return {};
  }

  __device__ Share whole(int each) const {
    Share share;
    share.first = part_ * each;
    share.last = min(share.first + each, lengths_.count) - 1;
    if (share.first <= share.last) share.end_tile = lengths_.tiles(share.last);
    return share;
  }

  __device__ Share ranges(int total) const {
    const int run = (total + lengths_.count * kSwitchTiles + parts_ - 1) / parts_;
    const int begin = part_ * run, end = begin + run;
    Share share;
    bool found = false;
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < lengths_.count; base += 32) {
      const int b = base + lane_;
      const bool is = b < lengths_.count;
      const int tiles = is ? lengths_.tiles(b) : 0, cost = is ? tiles + kSwitchTiles : 0;
      const int at = before + sum_before(cost, lane_) + kSwitchTiles;  // the request's first tile
      const int first_part = at / run, pieces = (at + max(tiles, 1) - 1) / run - first_part + 1;
      const auto split_of = [&](int lane) {
        return Split{__shfl_sync(0xffffffffu, first_part, lane),
                     __shfl_sync(0xffffffffu, pieces, lane)};
      };
      const unsigned ends_behind = __ballot_sync(0xffffffffu, is && at + tiles > begin);
      if (!found && ends_behind != 0) {
        found = true;
        const int lane = __ffs(static_cast<int>(ends_behind)) - 1;
        share.first = base + lane;
        share.first_tile = max(0, begin - __shfl_sync(0xffffffffu, at, lane));
        share.of_first = split_of(lane);
      }
      const unsigned begins_before = __ballot_sync(0xffffffffu, is && at < end);
      if (begins_before != 0) {
        const int lane = 31 - __clz(static_cast<int>(begins_before));
        share.last = base + lane;
        share.end_tile =
            min(__shfl_sync(0xffffffffu, tiles, lane), end - __shfl_sync(0xffffffffu, at, lane));
        share.of_last = split_of(lane);
      }
      before = __shfl_sync(0xffffffffu, at - kSwitchTiles + cost, 31);
    }
    if (!found) share.last = share.first - 1;
    return share;
  }

  const Lengths& lengths_;
  int parts_, part_, lane_;
};

}  // namespace lockstep::kernels::mla
