// Turns the block ids of a public trace into tokens: token j of the block with id h is (h, j).
// Tokens after the last id, and the output, belong to the request alone.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>

#include "cache_sim/base/json_documents.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/request.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

class BlockTokens {
 public:
  /// `chained`: an id stands for the whole prompt up to the end of its block, so it has one parent.
  BlockTokens(std::uint32_t block, bool chained) : block_(block), chained_(chained) {}

  /// The prompt and the output of one request; ids.size() * block may exceed the input by less than
  /// a block. The error is a sentence about the ids, without a place.
  Result<Tokens> of(std::span<const std::int64_t> ids, std::int64_t input_length,
                    std::int64_t output_length, std::int64_t request);

  /// Forgets all ids: the next ones are new, even if they were seen before.
  void forget() { known_.clear(); }

 private:
  struct Known {
    std::uint32_t number;
    std::int64_t parent;
  };
  std::uint32_t block_;
  bool chained_;
  std::uint32_t count_ = 0;  // number of blocks so far, including forgotten ones
  std::unordered_map<std::int64_t, Known> known_;
  std::vector<DocumentSlice> slices_;
};

/// The fields that the lines of Mooncake's and Bailian's traces share, apart from units:
/// `timestamp`, `input_length`, `output_length` and chained `hash_ids`, one for each block of the
/// prompt.
class BlockLines {
 public:
  /// `unit`: the nanoseconds of one unit of a timestamp. Ids are at least `lowest_id`.
  BlockLines(std::uint32_t block, Nanoseconds unit, std::int64_t lowest_id)
      : block_(block), unit_(unit), lowest_id_(lowest_id), blocks_(block, true) {}

  /// The request of the next line, without its session. The error names the field.
  Result<RequestSpec> read(const Record& record);

 private:
  std::uint32_t block_;
  Nanoseconds unit_;
  std::int64_t lowest_id_;
  BlockTokens blocks_;
  std::int64_t count_ = 0;
  Nanoseconds latest_ = 0;
};

/// The number of ids that an input of this length has.
constexpr std::int64_t block_count(std::int64_t length, std::int64_t block) {
  return (length + block - 1) / block;
}

}  // namespace lockstep::cache_sim
