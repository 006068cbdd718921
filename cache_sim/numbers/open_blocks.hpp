// Rows of a block cache that have been told and not run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cache_sim/model/block_memory.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/zeroed_array.hpp"
#include "reference/models/hybrid/hybrid_config.hpp"

namespace lockstep::cache_sim {

/// Tokens that the convolution of a unit sees; 0 where it has none.
std::int64_t conv_width(const reference::HybridUnit& unit);

/// A row that computes tokens which it does not have.
std::optional<Finding> outside_of_tokens(const BlockRow& row);

/// The lengths after which the row stores a state, in order; none of a verification, which has a
/// state after each of its tokens.
std::vector<std::int64_t> sizes_stored(const BlockRow& row);

/// The blocks of a batch, so that a row which has to run after others of it is seen.
class OpenBlocks {
 public:
  explicit OpenBlocks(const BlockGroups& pool);

  /// Whether the row writes what a row of the batch reads or writes, or begins with a state that
  /// such a row stores.
  bool shares(const BlockRow& row) const;
  void mark(const BlockRow& row);
  /// The batch has run.
  void close() { ++batch_; }

 private:
  std::size_t place_index(BlockId number, std::int64_t place) const {
    return number * most_tokens_ + static_cast<std::size_t>(place);
  }

  std::size_t most_tokens_;  // of a block
  // The batch in which an open row has this block for KV, stores a state in it, has this place.
  ZeroedArray<std::uint32_t> kv_, state_, place_;
  std::uint32_t batch_ = 1;
};

}  // namespace lockstep::cache_sim
