// LayerState with the tensors of a hybrid model in its slots: the rows of a batch run together
// through the operators, over the slots that the policy names. Each row's logits, and the state
// from which it starts, are compared bit by bit with those of the same operators over the row alone
// (tensor_truth.hpp).
//
// Fresh and freed slots hold NaN; in float32 its payload is the slot's number plus one.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/model/label_state.hpp"
#include "cache_sim/numbers/row_slots.hpp"
#include "cache_sim/numbers/torch/tensor_batch.hpp"
#include "cache_sim/numbers/torch/tensor_truth.hpp"
#include "cache_sim/numbers/truth.hpp"

namespace lockstep::cache_sim {

/// Likeliest tokens beside those of the model in double. They are counted and never judged: where
/// two logits are close, rounding decides.
struct GreedyTokens {
  std::int64_t compared = 0, different = 0;
};

class TensorState final : public NumberedPools {
 public:
  /// The state slots are 1 … states, the KV slots 0 … kv_end - 1; those below `page` are page 0.
  /// `labels`, where they are kept beside, explain a wrong number. `reference`, where it is not
  /// null, tells the likeliest tokens in double.
  TensorState(std::shared_ptr<TensorTruth> truth, std::int64_t states, std::int64_t kv_end,
              std::int64_t page = 1, const LabelState* labels = nullptr,
              std::shared_ptr<Truth> reference = nullptr);

  /// As NumberState's.
  void forward(const ForwardRow& row) override;
  void launch(std::span<const StateSlot> padding) override;

  void allocate_state(StateSlot slot) override { close_state(slot); }
  void zero_state(StateSlot slot, StatePart part) override;
  void copy_state(StateSlot source, StateSlot target, StatePart part) override;
  /// A slot that belongs to no row gets what a run without a cache leaves. The state from which it
  /// starts is compared.
  void advance_state(StateSlot slot, StatePart part, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override;
  void free_state(StateSlot slot) override;
  void verify_state(StateSlot slot, StatePart part, const VerifiedRow& row) override;
  void commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                    StatePart part) override;
  void replay_state(StateSlot slot, StatePart part, const Tokens&, std::uint32_t begin,
                    std::uint32_t end) override {
    if (end > begin) commit_state(slot, end - begin - 1, slot, part);
  }
  void receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                     std::uint32_t size) override;
  void run_padding_row(StateSlot slot) override { free_state(slot); }
  void allocate_kv(KvSlots slots) override;
  void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override;
  void free_kv(KvSlots slots) override;
  void copy_kv(KvSlots sources, KvSlots targets) override;
  Lengths state_lengths(StateSlot, std::int64_t expected) const override {
    return {expected, expected};
  }

  Findings drain(bool completes) override;
  const GreedyTokens& greedy() const { return greedy_; }
  /// Batches of decodes that ran in a bucket of the memory, those of earlier owners included.
  std::int64_t replays() const { return memory_->replays; }
  /// Tokens that were computed in rows.
  std::int64_t computed() const { return batches_.computed(); }

 private:
  /// A row that has been told and not run.
  struct OpenRow {
    Name request;
    TensorRow row;
    Tokens text;
    std::vector<std::uint32_t> also;
    std::optional<Finding> wrong_label;  ///< of the state from which it started
    std::string wrong_state;             ///< the part from which it started and that differs
    const RowTruth* truth;
    RowStart start;
  };
  /// The states that a verification has left beside a slot.
  struct Left {
    std::vector<at::Tensor> states;  ///< by part, [tokens, ...]
    std::vector<History> histories;
  };

  std::uint32_t state_index(StateSlot slot) const;
  std::uint32_t kv_index(std::uint32_t slot) const;
  bool is_open(std::uint32_t state) const;
  std::uint32_t close_state(StateSlot slot);
  std::uint32_t close_kv(std::uint32_t slot);
  void poison_kv(std::uint32_t slot);
  /// Calls act(index, part) for the parts of the model that belong to that part of a state.
  template <class Act>
  void for_parts(StatePart part, const Act& act) const;
  History& history(std::uint32_t slot, PoolKind kind) {
    return state_histories_[slot][kind == PoolKind::conv ? 1 : 0];
  }
  void set_state(std::uint32_t slot, StatePart part, History history);
  void run();
  void begin(OpenRow& open);
  void end(const OpenRow& open, const std::vector<at::Tensor>& states_after);
  void leave(const OpenRow& open, const std::vector<at::Tensor>& states_after);
  void compare(const OpenRow& open, std::span<const float> logits);
  std::string wrong_kv(const OpenRow& open) const;
  void compare_likeliest(const OpenRow& open, std::span<const float> logits);
  void compare_start(std::uint32_t slot, StatePart part, const Tokens& tokens, std::uint32_t size);

  std::shared_ptr<TensorTruth> truth_;
  const LabelState* labels_;
  std::shared_ptr<Truth> reference_;
  const TensorModel& model_;
  TensorBatches batches_;
  std::uint32_t state_slots_, kv_slots_;  ///< the last slot of each stands for impossible numbers
  std::uint32_t page_;
  std::size_t kv_layers_ = 0, state_layers_ = 0;
  std::shared_ptr<TensorMemory> memory_;
  const TensorPools& pools_;
  std::vector<std::array<History, 2>> state_histories_;  // by slot: recurrent, conv
  std::vector<History> kv_histories_;
  std::vector<std::uint32_t> kv_open_;  // the batch in which the slot is open
  std::uint32_t batch_ = 1;
  RowSlots told_;  // of the row that forward() is given
  std::vector<OpenRow> rows_;
  std::vector<std::uint32_t> open_states_;
  std::map<std::uint32_t, Left> left_;
  Findings findings_;
  GreedyTokens greedy_;
};

}  // namespace lockstep::cache_sim
