#include "cache_sim/workloads/block_tokens.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "cache_sim/workloads/workload.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kNoParent = -1;

}  // namespace

Result<Tokens> BlockTokens::of(std::span<const std::int64_t> ids, std::int64_t input_length,
                               std::int64_t output_length, std::int64_t request) {
  slices_.clear();
  std::int64_t parent = kNoParent;
  std::int64_t left = input_length;
  for (const std::int64_t id : ids) {
    const auto [found, fresh] = known_.try_emplace(id, Known{count_, parent});
    if (fresh && ++count_ > kMostBlocks) return fail("holds more than 2^28 different blocks");
    if (chained_ && found->second.parent != parent) {
      const auto name = [](std::int64_t one) {
        return one == kNoParent ? "the beginning" : fmt::format("block {}", one);
      };
      return fail(fmt::format("block {} follows {} here and {} before: an id has one parent", id,
                              name(parent), name(found->second.parent)));
    }
    const auto size = static_cast<std::uint32_t>(std::min<std::int64_t>(left, block_));
    slices_.push_back({kBlockDocuments + found->second.number, 0, size});
    left -= size;
    parent = id;
  }
  // Tokens after the last id belong to this request alone; its output follows them.
  slices_.push_back({kOutputDocuments + static_cast<Document>(request), 0,
                     static_cast<std::uint32_t>(left + output_length)});
  return Tokens::of_slices(slices_);
}

Result<RequestSpec> BlockLines::read(const Record& record) {
  const auto arrival = record.time("timestamp", unit_);
  if (!arrival) return tl::unexpected(arrival.error());
  if (*arrival < latest_) return record.error("timestamp", "is before that of an earlier line");
  const auto input = record.integer("input_length", 1, Tokens::kMaxSize - 1);
  if (!input) return tl::unexpected(input.error());
  const auto output = record.integer("output_length", 0, Tokens::kMaxSize - *input);
  if (!output) return tl::unexpected(output.error());
  const auto ids =
      record.integers("hash_ids", lowest_id_, std::numeric_limits<std::int64_t>::max());
  if (!ids) return tl::unexpected(ids.error());
  if (static_cast<std::int64_t>(ids->size()) != block_count(*input, block_))
    return record.error("hash_ids",
                        fmt::format("{} for {}, which are {} of {}", counted(ids->size(), "id"),
                                    counted(*input, "token"),
                                    counted(block_count(*input, block_), "block"), block_));
  // A request samples at least one token.
  Result<Tokens> tokens = blocks_.of(*ids, *input, std::max<std::int64_t>(*output, 1), count_);
  if (!tokens) return record.error("hash_ids", tokens.error().text);
  latest_ = *arrival;
  return RequestSpec{.number = count_++,
                     .tokens = std::move(*tokens),
                     .prompt_size = static_cast<std::uint32_t>(*input),
                     .at = *arrival};
}

}  // namespace lockstep::cache_sim
