// The division of a batch's keys between the parts of mla_decode. Every block computes it for its
// own part, on the device, from the lengths: a captured launch is right for any lengths. FlashMLA's
// rule, for comparison: reference/attention/split_schedule.hpp.
//
// A part computes a run of tiles of 64 keys: for example the last tiles of one request, some whole
// requests, and the first tiles of another. There are three ways to divide; share() takes the one
// whose fullest part has the least work:
//   chunks   each part has one piece of one request; the largest piece is as short as the number of
//            parts allows. For requests of similar length
//   whole    each part has the same number of whole requests, so nothing is merged
//   ranges   all tiles in a row, cut into equal runs
#pragma once

#include "kernels/base/device.cuh"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels::mla {

constexpr int kTokens = 64;      ///< tokens of a tile
constexpr int kSwitchTiles = 2;  ///< cost of starting a request, in tiles
constexpr int kRangeTiles = 5;   ///< cost of ranges by more starts and merges, in tiles: the other
                                 ///< ways are preferred up to so much more work

/// The parts that divide a request: `count` of them, from first_part on. count = 1: undivided.
struct Split {
  int first_part = 0, count = 1;
};

/// A part's run; empty if last < first.
struct Share {
  int first = 0, last = -1;  ///< the first and the last request
  int first_tile = 0;        ///< first tile of the first request
  int end_tile = 0;          ///< end of the tiles of the last request
  Split of_first, of_last;
};

struct Lengths {
  const std::int32_t* data;
  std::int64_t stride;
  int count;    ///< number of requests
  int longest;  ///< tokens that the block table has room for; longer lengths are cut

  __device__ int of(int request) const { return min(max(data[request * stride], 0), longest); }
  /// A request without keys counts as one tile: its outputs must be written.
  __device__ int tiles(int request) const { return max(1, (of(request) + kTokens - 1) / kTokens); }
};

/// The sum of `own` over the lanes before the calling one.
__device__ inline int sum_before(int own, int lane) {
  int sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += before;
  }
  return sum - own;
}

/// Finds the share of a part; one warp runs it. Loops stay rolled: the code runs once per launch,
/// and fetching its instructions takes longer than running them.
class Scheduler {
 public:
  __device__ Scheduler(const Lengths& lengths, int parts, int part)
      : lengths_(lengths), parts_(parts), part_(part), lane_(static_cast<int>(threadIdx.x % 32)) {}

  /// A piece has at least `fewest` x sqrt(all tiles) tiles, since shorter ones cost more in merging
  /// than they save.
  __device__ Share share(float fewest) const {
    const auto least_of = [&](int tiles) {
      return max((tiles + parts_ - 1) / parts_,
                 static_cast<int>(ceilf(fewest * sqrtf(static_cast<float>(tiles)))));
    };
    if (lengths_.count == 1) {  // nothing to search: a shorter way to the first copy
      const int tiles = lengths_.tiles(0), least = least_of(tiles);
      const Split split{0, (tiles + least - 1) / least};
      return part_ < split.count ? piece(0, tiles, split) : Share{};
    }
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
    const int least = least_of(total), chunk = smallest_chunk(least, longest);
    return chunk <= least + kRangeTiles || parts_ == 1 ? chunks(chunk) : ranges(total);
  }

 private:
  /// The smallest chunk, at least `least` tiles, that cuts all requests into at most parts_ pieces;
  /// by bisection.
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

  /// The share if each request is cut into ceil(tiles / chunk) pieces of nearly equal length, one
  /// per part.
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
        return piece(base + found, __shfl_sync(0xffffffffu, tiles, found),
                     {__shfl_sync(0xffffffffu, at, found), __shfl_sync(0xffffffffu, own, found)});
      }
      before = __shfl_sync(0xffffffffu, at + own, 31);
    }
    return {};
  }

  /// This part's piece of a request of `tiles` tiles that is divided in this way.
  __device__ Share piece(int request, int tiles, const Split& split) const {
    const int count = split.count, number = part_ - split.first_part;
    const int whole = tiles / count, rest = tiles - whole * count;  // keeps products in 32 bits
    Share share;
    share.first = share.last = request;
    share.first_tile = whole * number + rest * number / count;
    share.end_tile = whole * (number + 1) + rest * (number + 1) / count;
    share.of_first = share.of_last = split;
    return share;
  }

  /// The share if each part has `each` whole requests.
  __device__ Share whole(int each) const {
    Share share;
    share.first = part_ * each;
    share.last = min(share.first + each, lengths_.count) - 1;
    if (share.first <= share.last) share.end_tile = lengths_.tiles(share.last);
    return share;
  }

  /// The share if all tiles, with kSwitchTiles added before each request, are cut into equal runs.
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
      const int at = before + sum_before(cost, lane_) + kSwitchTiles;  // place of the first tile
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
