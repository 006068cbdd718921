// LayerState with the numbers of a hybrid model in its slots: each row is run, and its logits and
// the state from which it starts are compared, bit by bit, with those of a run without a cache
// (truth.hpp). A label says that a slot stands for another prefix; a number says that somebody read
// it.
//
// Fresh and freed slots hold a quiet NaN whose payload is the slot's number, and so do state slot 0
// and the slots of KV page 0 before each launch, so that a difference names the slot it came from.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/model/label_state.hpp"
#include "cache_sim/numbers/row_slots.hpp"
#include "cache_sim/numbers/truth.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/zeroed_array.hpp"
#include "reference/protocol/layer_state.hpp"

namespace lockstep::cache_sim {

class NumberState final : public NumberedPools {
 public:
  /// The state slots are 1 … states, the KV slots 0 … kv_end - 1; those below `page` are page 0.
  /// `labels`, where they are kept beside the numbers, say whether a wrong KV slot has a wrong
  /// label, too; then the finding is the label's.
  NumberState(std::shared_ptr<Truth> truth, std::int64_t states, std::int64_t kv_end,
              std::int64_t page = 1, const LabelState* labels = nullptr);

  /// Rows run together at launch(), or before any other call that names a slot of theirs. A row
  /// that shares a slot with another row of its batch runs after it. A row that names a slot
  /// outside of the pools is reported and does not run. Requires that a row with slots of its own
  /// in each layer has as many layers as the model.
  void forward(const ForwardRow& row) override;
  void launch(std::span<const StateSlot> padding) override;

  void allocate_state(StateSlot slot) override;
  void zero_state(StateSlot slot, StatePart part) override;
  void copy_state(StateSlot source, StateSlot target, StatePart part) override;
  /// A slot that belongs to no row runs over the KV of a run without a cache. The state from which
  /// it starts is compared.
  void advance_state(StateSlot slot, StatePart part, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override;
  void zero_state(StateSlot slot) override;
  void copy_state(StateSlot source, StateSlot target) override;
  void advance_state(StateSlot slot, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override;
  void free_state(StateSlot slot) override;
  void verify_state(StateSlot slot, StatePart part, const VerifiedRow& row) override;
  void commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                    StatePart part) override;
  /// That part of the slot becomes what its last verification left after `end` - `begin` tokens.
  void replay_state(StateSlot slot, StatePart part, const Tokens&, std::uint32_t begin,
                    std::uint32_t end) override {
    if (end > begin) commit_state(slot, end - begin - 1, slot, part);
  }
  /// A ring's entry is what the units with a state were given for its token, and the window before
  /// it. The state of a slot and its ring is that of a scan over the entries, in the bits of the
  /// forwards that wrote them.
  void fold_ring(StateSlot slot, std::uint32_t live, const Tokens& tokens,
                 std::uint32_t size) override;
  void rewind_conv(StateSlot slot) override;
  void receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                     std::uint32_t size) override;
  void run_padding_row(StateSlot slot) override;
  void allocate_kv(KvSlots slots) override;
  /// KV that no row told: it is that of a run without a cache.
  void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override;
  void free_kv(KvSlots slots) override;
  void copy_kv(KvSlots sources, KvSlots targets) override;
  Lengths state_lengths(StateSlot, std::int64_t expected) const override {
    return {expected, expected};
  }

  /// Compares a state that is handed out for tokens[0, size).
  void compare_state(StateSlot slot, const Tokens& tokens, std::uint32_t size);

  Findings drain(bool completes) override;
  /// Tokens that were computed in rows.
  std::int64_t computed() const { return computed_; }

 private:
  /// A row that has been told and not run. Its vectors are kept from batch to batch.
  struct OpenRow {
    Name request;
    Tokens text;
    std::uint32_t begin, end, drafts;
    std::vector<Token> tokens;
    std::vector<std::int64_t> parents;
    std::vector<std::uint32_t> kv, also;
    std::vector<std::uint32_t> state_layers, kv_layers;
    std::uint32_t state;
    std::uint32_t padding;
    bool has_state, writes_kv, verifies;
    StateParts keeps;
    std::vector<reference::HybridTake> takes;
    std::optional<RingStep> ring;
    std::vector<double> written;         ///< of a ring: the slot's own recurrent part
    std::vector<double> entry;           ///< of a ring: the row's own
    std::optional<Finding> wrong_label;  ///< of the state from which it started
    std::vector<double> before;          ///< the state from which it started
    std::vector<double> after;           ///< of a verification: the states after each token
  };
  struct Half {  // see advance_state() of one part
    std::uint32_t slot, begin, end;
    std::vector<double> after;
  };

  std::uint32_t state_index(StateSlot slot) const;
  std::uint32_t kv_index(std::uint32_t slot) const;
  std::span<double> state_at(std::uint32_t index);
  std::span<double> kv_at(std::uint32_t index);
  std::span<double> part_of(std::span<double> state, StatePart part) const;
  /// The state of a slot that a call names: a batch in which it is open runs first.
  std::span<double> named(StateSlot slot);
  std::span<double> named_kv(std::uint32_t slot);
  bool is_open(std::uint32_t state) const;
  void open(const ForwardRow& row, OpenRow& kept);
  void verify_without_root(const ForwardRow& row);
  void run();
  reference::HybridRow told(OpenRow& row);
  std::span<double> ring_entry(StateSlot slot, std::uint32_t at);
  void scan_ring(StateSlot ring, std::uint32_t live, std::span<double> state);
  void leave_ring(const OpenRow& row);
  std::span<double> held_state(const OpenRow& row, const reference::HybridPart& part,
                               std::uint32_t slot);
  std::span<double> held_kv(const OpenRow& row, const reference::HybridPart& part,
                            std::uint32_t slot);
  void leave_takes(const OpenRow& row);
  void compare(const OpenRow& row, std::span<const double> logits);
  void compare_parts(StateSlot slot, StateParts parts, const Tokens& tokens, std::uint32_t size,
                     std::string_view use);
  void report(const OpenRow& row, const std::string& moved, Truth::Node base);
  std::string first_difference(const OpenRow& row, Truth::Node base);

  std::shared_ptr<Truth> truth_;
  const LabelState* labels_;
  const reference::HybridModel& model_;
  std::size_t state_slots_, kv_slots_;  ///< the last slot of each stands for impossible numbers
  std::uint32_t page_;
  std::size_t kv_layers_ = 0, state_layers_ = 0;  // units of the model with KV, and with a state
  ZeroedArray<double> states_, kv_;
  ZeroedArray<char> state_used_, kv_used_;  // 0: not yet poisoned
  ZeroedArray<std::uint32_t> kv_open_;      // the batch in which the slot is open
  std::uint32_t batch_ = 1;
  RowSlots told_;  // of the row that forward() is given
  std::vector<OpenRow> rows_;
  std::size_t open_ = 0;  // of rows_
  std::vector<std::uint32_t> open_states_;
  std::map<std::uint32_t, std::vector<double>> left_;   // by slot: the states of its verification
  std::map<std::uint32_t, std::vector<double>> rings_;  // by slot: entries, one behind the other
  std::optional<Half> half_;
  std::vector<double> logits_;
  Findings findings_;
  std::int64_t computed_ = 0;
};

}  // namespace lockstep::cache_sim
