// Batches of rows over pools of tensors, and sentences about their numbers.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/numbers/torch/tensor_model.hpp"
#include "cache_sim/numbers/torch/tensor_truth.hpp"
#include "reference/base/finding.hpp"

namespace lockstep::cache_sim {

bool same_bits(const at::Tensor& a, const at::Tensor& b);

/// NaN whose payload in float32 is `number` plus one; the numbers of bfloat16 have no room for it.
void poison(const at::Tensor& numbers, std::uint32_t number);
/// The same for each slot of a pool, [slots, ...], with its own number.
void poison_each(const at::Tensor& pool);

/// The same for blocks from `first` on, [blocks, ...] int32, that hold numbers of both types.
void poison_blocks(const at::Tensor& blocks, at::ScalarType activations, std::uint32_t first);

/// Says where wrong numbers come from, if they are poison; else empty. `kind`: "state slot".
std::string origin(const at::Tensor& numbers, std::string_view kind);

/// The numbers of one sampled token, or of its right row.
std::vector<double> logits_of(std::span<const float> all, std::int64_t token,
                              std::int64_t vocabulary);

/// Says by how much the first wrong one of the row's logits is off; nothing where all of them have
/// the bits of the row alone.
std::optional<std::string> moved_logits(const TensorRow& row, std::span<const float> logits,
                                        const RowTruth& truth, std::int64_t vocabulary);
inline constexpr std::string_view kReadsRight =
    "all that it read is right, so its numbers depend on the batch, the slots or padding";

/// Runs batches: decodes in buckets, and some batches with each call judged.
class TensorBatches {
 public:
  explicit TensorBatches(const TensorModel& model) : model_(model) {}

  /// Slot 0 of each pool has to be no row's.
  TensorResults run(std::span<const TensorRow* const> rows, TensorMemory& memory,
                    Findings& findings);
  /// Tokens that were computed in rows.
  std::int64_t computed() const { return computed_; }

 private:
  TensorResults decode(std::span<const TensorRow* const> rows, TensorMemory& memory,
                       Findings& findings) const;

  const TensorModel& model_;
  std::int64_t computed_ = 0, forwards_ = 0;
};

}  // namespace lockstep::cache_sim
