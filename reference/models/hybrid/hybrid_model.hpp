// A hybrid model in double precision over pools: it runs a packed batch of rows, whose KV and
// states lie in slots. The units are those of reference/recurrent, attention and layers.
//
// A row's bits depend on its own tokens alone: not on the batch, and not on how a text is cut into
// prefills, decodes and verifications, since prefills scan. So a cache can be compared, bit by bit,
// with a run that has none.
//
//   here      shape                                   unit
//   kv        [slots, kv_size()]                      doubles: of all layers, [k | v] or latents
//   states    [slots, state_size()]                   recurrent parts of all layers, then conv
//   parts logits    [sampled rows and tokens, vocabulary]
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "reference/models/hybrid/hybrid_config.hpp"
#include "reference/models/hybrid/hybrid_weights.hpp"

namespace lockstep::reference {

/// Slots of equal size, one behind the other.
struct SlotPool {
  double* first = nullptr;
  std::size_t size = 0;  ///< doubles of a slot

  double* at(std::size_t slot) const { return first + slot * size; }
  std::span<double> slot(std::size_t i) const { return {at(i), size}; }
};

/// A state that a row leaves in another slot on its way, after `after` tokens of the text.
struct HybridTake {
  std::int64_t after;
  std::uint32_t slot;
  bool recurrent = true, conv = true;
};

/// Tokens [begin, begin + tokens.size()) of a text. A token's position is its place in the text;
/// that of a draft in a tree is the depth of its path.
struct HybridRow {
  /// Those that the text has, then the drafts or the padding; not empty.
  std::span<const std::uint64_t> tokens;
  std::int64_t begin = 0;
  std::optional<std::int64_t> position{};  ///< of the first token, where it is not its place
  /// KV slots by place: the row reads places [0, begin) and writes those of its tokens. Draft k of
  /// a tree (from 1) is token `tokens.size() - drafts + k - 1` of the row.
  std::span<const std::uint32_t> kv;
  /// [units with KV, kv.size()]: the address of the unit's KV at each place, for memories that are
  /// no pool of slots. Then place i has number i in `kv`.
  std::span<double* const> kv_places{};
  bool writes_kv = true;     ///< false: the slots of its own tokens keep what they hold
  std::int64_t padding = 0;  ///< the last tokens: nothing of them is kept but their KV
  std::uint32_t state = 0;   ///< slot; of no use where no unit has a state
  /// By unit that has a state, or KV, the distance of its slots from those that the row names.
  /// Empty: a slot has the same number in all units.
  std::span<const std::uint32_t> state_layers{}, kv_layers{};
  bool keeps_recurrent = true, keeps_conv = true;  ///< false: that part of the slot stays as it was
  std::span<const HybridTake> takes{};  ///< in the order of their tokens; no verification
  /// [tokens, state_input_size()], or null: what each unit with a state is given, for replay().
  double* state_inputs = nullptr;

  /// [tokens, state_size()]: a verification. The state after each of the row's tokens goes there,
  /// and the slot stays as it was.
  double* states_after = nullptr;
  std::int64_t drafts = 0;
  /// By draft, its parent: 0 for the last token before the drafts, k for draft k. Empty: a chain.
  std::span<const std::int64_t> parents{};

  /// [tokens, hidden], of a draft module: what stands beside the embedding of each token, which
  /// comes after the token whose place this is. Null in any other model.
  const double* hidden = nullptr;
  /// [tokens, hidden], or null: what the head is given of each token goes there.
  double* hidden_after = nullptr;

  std::int64_t inputs() const {
    return static_cast<std::int64_t>(tokens.size()) - drafts - padding;
  }
  /// Every token of a verification is sampled, the last one of any other row, and no padding.
  std::size_t sampled() const {
    return states_after == nullptr ? 1 : tokens.size() - static_cast<std::size_t>(padding);
  }
};

/// One part of a unit's state or KV inside a slot.
struct HybridPart {
  std::int64_t unit;  ///< index into HybridConfig::units
  std::size_t layer;  ///< place among the units that have KV, or among those that have a state
  const char* name;   ///< "recurrent", "conv", "KV"
  std::size_t first, size;
};

class HybridModel {
 public:
  HybridModel(HybridConfig config, HybridWeights weights);
  ~HybridModel();
  HybridModel(const HybridModel&) = delete;
  HybridModel& operator=(const HybridModel&) = delete;

  const HybridConfig& config() const;
  const HybridWeights& weights() const;
  std::size_t kv_size() const;           ///< doubles of a token's KV
  std::size_t recurrent_size() const;    ///< doubles of a state's recurrent parts, which come first
  std::size_t state_size() const;        ///< doubles of a state
  std::size_t state_input_size() const;  ///< doubles of a token for all units with a state
  std::size_t vocabulary() const { return static_cast<std::size_t>(config().vocabulary); }
  /// The parts of a slot of states and of a slot of KV, in the order of the units.
  const std::vector<HybridPart>& parts() const;

  /// Runs the batch. All rows write a layer's KV before any of them reads it; all states are read
  /// before any is written. The caller sees to it that no two rows write one slot. `logits` has
  /// vocabulary() numbers for each sampled token, in the order of the rows. May run in several
  /// threads at once.
  void forward(std::span<const HybridRow> rows, const SlotPool& kv, const SlotPool& states,
               std::span<double> logits) const;

  /// Runs the units that have a state over one more token of a text that has begun, from what a row
  /// has left of it in `state_inputs`. `state` is moved on, by the bits of that row.
  void replay(std::span<const double> inputs, std::span<double> state) const;

 private:
  struct Inside;
  std::unique_ptr<const Inside> inside_;
};

}  // namespace lockstep::reference
