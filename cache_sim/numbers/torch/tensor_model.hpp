// A hybrid model (reference/models/hybrid) over pools of tensors: one code path for tensors of a
// CPU and of a GPU. Recurrences, convolutions and latent attention run through
// torch.ops.lockstep.*, with lists of slots; other layers are those of TensorLayers. Weights are
// the presets', by name and index.
//
// A row is prefilled, decoded (one token behind others) or verified; a row that leaves a state on
// its way is cut there into several calls. Rows of one kind are one call of an operator. A row's
// bits depend on the row and its cuts alone.
//
//   pool        shape of a slot               type
//   recurrent   [H, P, N] or [HV, V, K]       float32
//   conv        [channels, width - 1]         that of the activations
//   KV          [2, HKV, d], or [1, latent]   that of the activations
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/numbers/torch/tensor_layers.hpp"
#include "reference/models/hybrid/hybrid_model.hpp"
#include "reference/models/hybrid/hybrid_weights.hpp"

namespace lockstep::cache_sim {

enum class PoolKind : std::uint8_t { recurrent, conv, kv };

/// The pool of one unit's states, or of its KV.
struct PoolPart {
  std::int64_t unit;  ///< index into HybridConfig::units
  std::size_t layer;  ///< place among the units that have KV, or among those that have a state
  PoolKind kind;
  std::vector<std::int64_t> shape;  ///< of a slot
  at::ScalarType type;

  const char* name() const {
    return kind == PoolKind::kv ? "KV" : kind == PoolKind::conv ? "conv" : "recurrent";
  }
};

/// At least `count`, of few sizes, so that what was made for one count serves others.
inline std::int64_t room_for(std::int64_t count) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
}

/// By part of the model, [slots, ...].
using TensorPools = std::vector<at::Tensor>;

/// As reference::HybridRow, with memory of its own.
struct TensorRow {
  std::vector<std::uint64_t> tokens{};  ///< not empty; the drafts, then the padding, come last
  std::int64_t begin = 0;
  std::vector<std::uint32_t> kv{};  ///< by place, [begin + tokens]
  /// Instead of `kv`, slots of each layer's own: by layer with KV, by place.
  std::vector<std::vector<std::uint32_t>> kv_by_layer{};
  bool writes_kv = true;
  std::int64_t drafts = 0, padding = 0;
  bool verifies = false;
  std::vector<std::int64_t> parents{};  ///< by draft; empty: a chain
  bool has_state = true;
  std::uint32_t state = 0;
  bool starts_from_nothing = false;  ///< the state counts as zero, whatever the slot holds
  bool keeps_recurrent = true, keeps_conv = true;
  std::vector<reference::HybridTake> takes{};  ///< of a verification, the caller stores them
  std::vector<std::uint32_t> state_layers{}, kv_layers{};
  bool is_padding = false;    ///< nobody's row of a bucket: NaN, and it sees nothing
  std::int32_t no_slot = -1;  ///< what is told where the row has no slot to write

  std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t inputs() const { return size() - drafts - padding; }
  /// All tokens of a verification are sampled, and the last one of any other row; no padding.
  std::int64_t sampled() const { return verifies ? size() - padding : 1; }
  std::uint32_t state_slot(std::uint32_t slot, std::size_t layer) const {
    return slot + (state_layers.empty() ? 0 : state_layers[layer]);
  }
  std::uint32_t kv_slot(std::uint32_t slot, std::size_t layer) const {
    return slot + (kv_layers.empty() ? 0 : kv_layers[layer]);
  }
  std::uint32_t kv_at(std::int64_t place, std::size_t layer) const {
    const auto at = static_cast<std::size_t>(place);
    return kv_by_layer.empty() ? kv_slot(kv[at], layer) : kv_by_layer[layer][at];
  }
  /// Of a verification, by token of the row: the token that it follows; -1 for the first one.
  std::vector<std::int32_t> tree() const;
};

struct TensorResults {
  at::Tensor logits;  ///< [sampled tokens of all rows, vocabulary] float32, on the CPU
  /// By row and part, the states after each of its tokens, [tokens, ...]; of verifications alone.
  std::vector<std::vector<at::Tensor>> states_after;
};

/// Rules of decodes in buckets: a batch is filled up with rows of padding to a power of two, its
/// lists are copied to where the bucket's captured launches read them, and these are run again. A
/// test makes one rule wrong, each a mistake that servers have made.
struct BucketRules {
  bool refreshes_lists = true;      ///< else the bucket runs over the slots of its first batch
  bool refreshes_lengths = true;    ///< else over its lengths
  std::int32_t padding_slot = -1;   ///< where a row of padding writes: nowhere
  bool warms_up_on_padding = true;  ///< else the first batch runs twice
};

/// Pools, and the buckets that were captured over them.
struct TensorMemory {
  explicit TensorMemory(TensorPools own);
  ~TensorMemory();
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  struct Bucket;
  TensorPools pools;
  at::Tensor blocks{};  ///< of a block cache, what pools of KV are views of
  std::map<std::pair<std::size_t, std::int64_t>, std::shared_ptr<Bucket>> buckets{};
  std::int64_t replays = 0;
};

class TensorModel {
 public:
  TensorModel(reference::HybridConfig config, const reference::HybridWeights& weights,
              std::shared_ptr<const TensorLayers> layers, at::ScalarType activations,
              BucketRules buckets = {});
  ~TensorModel();
  TensorModel(const TensorModel&) = delete;
  TensorModel& operator=(const TensorModel&) = delete;

  const reference::HybridConfig& config() const;
  const std::vector<PoolPart>& parts() const;
  at::Device device() const;
  at::ScalarType activations() const;
  bool has_states() const;

  /// Pools of NaN.
  TensorPools pools(std::int64_t states, std::int64_t kv) const;

  /// Runs the batch. Requires that no two rows write one slot. `pads` adds rows of padding, which
  /// have no slot and are NaN, until each group of decodes is a power of two.
  TensorResults forward(std::span<const TensorRow* const> rows, const TensorPools& pools,
                        bool pads) const;

  /// Whether the rows are one token each behind others, and keep their states in place.
  static bool fits_bucket(std::span<const TensorRow* const> rows);
  /// The same for such rows, in a bucket of the memory; on a GPU a captured graph.
  TensorResults decode(std::span<const TensorRow* const> rows, TensorMemory& memory) const;

  struct Inside;

 private:
  std::unique_ptr<const Inside> inside_;
};

}  // namespace lockstep::cache_sim
