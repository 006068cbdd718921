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

#include "cache_sim/numbers/truth.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/zeroed_array.hpp"
#include "reference/protocol/layer_state.hpp"

namespace lockstep::cache_sim {

/// A choice of the halves of a state.
struct NumberParts {
  bool recurrent = true, conv = true;
};

/// A state that a row leaves in another slot on its way.
struct NumberTake {
  std::uint32_t after;  ///< tokens of the request that the state has seen
  StateSlot target;
  NumberParts parts{};
};

/// One row of a forward: tokens [begin, end) of a request. Spans live as long as the call that is
/// given the row.
struct NumberRow {
  const Tokens& tokens;  ///< the known ones, then the drafts
  std::uint32_t begin, end;
  /// The last tokens of the row are drafts. If there are any, the row is a verification: its states
  /// after each token are left in `takes` or, where there are none, beside the slot for
  /// commit_state().
  std::uint32_t drafts = 0;
  std::span<const std::int64_t> parents{};  ///< by draft, as VerifiedRow's
  StateSlot state{};                        ///< none: attention alone
  NumberParts keeps{};  ///< parts that are stored at the end; none by a verification without takes
  std::span<const NumberTake> takes{};  ///< in the order of their tokens, within [begin, end]
  KvSlots kv{};                         ///< by place: [0, begin) are read, [begin, end) written
  bool writes_kv = true;                ///< false: [begin, end) keep what they hold
  std::uint32_t padded_to = 0;  ///< where above `end`: so many places are written, with token 0
  KvSlots also{};               ///< a second memory that KV is written to, by the same places
  /// By layer, the distance of its slots from those that are named above. Empty: a slot has the
  /// same number in all layers.
  std::span<const std::uint32_t> state_layers{}, kv_layers{};
};

class NumberState final : public LayerState {
 public:
  /// The state slots are 1 … states, the KV slots 0 … kv_end - 1; those below `page` are page 0.
  NumberState(std::shared_ptr<Truth> truth, std::int64_t states, std::int64_t kv_end,
              std::int64_t page = 1);

  /// A row of the batch. Rows run together at launch(), or before any other call that names a slot
  /// of theirs. A row that shares a state slot with another row of its batch, or writes KV that the
  /// other one reads or writes, runs after it. A row that names a slot outside of the pools is
  /// reported and does not run.
  void forward(const NumberRow& row);
  /// The batch is complete. Beside its rows, rows of padding run over these slots.
  void launch(std::span<const StateSlot> padding);

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
  void replay_state(StateSlot slot, StatePart part, std::uint32_t begin, std::uint32_t end) {
    if (end > begin) commit_state(slot, end - begin - 1, slot, part);
  }
  void receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                     std::uint32_t size) override;
  void run_padding_row(StateSlot slot) override;
  void allocate_kv(KvSlots slots) override;
  /// KV that no row told: it is that of a run without a cache.
  void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override;
  void receive_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) {
    write_kv(slots, tokens, begin);
  }
  void free_kv(KvSlots slots) override;
  void copy_kv(KvSlots sources, KvSlots targets) override;
  Lengths state_lengths(StateSlot, std::int64_t expected) const override {
    return {expected, expected};
  }

  /// Compares a state that is handed out for tokens[0, size).
  void compare_state(StateSlot slot, const Tokens& tokens, std::uint32_t size);

  /// The findings since the last call of drain(). Rows that have not run yet come later.
  Findings drain();
  /// Tokens that were computed in rows.
  std::int64_t computed() const { return computed_; }

 private:
  /// A row that has been told and not run. Its vectors are kept from batch to batch.
  struct OpenRow {
    Tokens text;
    std::uint32_t begin, end, drafts;
    std::vector<Token> tokens;
    std::vector<std::int64_t> parents;
    std::vector<std::uint32_t> kv, also;
    std::vector<std::uint32_t> state_layers, kv_layers;
    std::uint32_t state;
    std::uint32_t padding;
    bool has_state, writes_kv, verifies;
    NumberParts keeps;
    std::vector<reference::HybridTake> takes;
    std::vector<double> before;  ///< the state from which it started
    std::vector<double> after;   ///< of a verification: the states after each token
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
  bool exists(const NumberRow& row) const;
  void open(const NumberRow& row, OpenRow& kept);
  void run();
  reference::HybridRow told(OpenRow& row);
  std::span<double> held_state(const OpenRow& row, const reference::HybridPart& part,
                               std::uint32_t slot);
  std::span<double> held_kv(const OpenRow& row, const reference::HybridPart& part,
                            std::uint32_t slot);
  void leave_takes(const OpenRow& row);
  void compare(const OpenRow& row, std::span<const double> logits);
  void compare_parts(StateSlot slot, NumberParts parts, const Tokens& tokens, std::uint32_t size,
                     std::string_view use);
  void report(const OpenRow& row, std::uint32_t size, double far, Truth::Node base);
  std::string first_difference(const OpenRow& row, Truth::Node base);

  std::shared_ptr<Truth> truth_;
  const reference::HybridModel& model_;
  std::size_t state_slots_, kv_slots_;  ///< the last slot of each stands for impossible numbers
  std::uint32_t page_;
  std::size_t kv_layers_ = 0, state_layers_ = 0;  // units of the model with KV, and with a state
  ZeroedArray<double> states_, kv_;
  ZeroedArray<char> state_used_, kv_used_;  // 0: not yet poisoned
  ZeroedArray<std::uint32_t> kv_open_;      // the batch in which the slot is open
  std::uint32_t batch_ = 1;
  std::vector<OpenRow> rows_;
  std::size_t open_ = 0;  // of rows_
  std::vector<std::uint32_t> open_states_;
  std::map<std::uint32_t, std::vector<double>> left_;  // by slot: the states of its verification
  std::optional<Half> half_;
  std::vector<double> logits_;
  Findings findings_;
  std::int64_t computed_ = 0;
};

}  // namespace lockstep::cache_sim
