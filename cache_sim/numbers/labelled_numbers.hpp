// The pools of a policy as labels and as numbers: each call goes to both, so that a finding can say
// both that a slot stands for another prefix and by how much that moves an output.
#pragma once

#include <memory>
#include <string>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/model/label_state.hpp"
#include "cache_sim/numbers/truth.hpp"

namespace lockstep::cache_sim {

/// The model that a configuration names, or the one that the policy has otherwise.
std::string model_name(const PolicyEntry& policy, const Config& config);

/// The model of that name: a preset, or the checkpoint in a folder, which has a slash in its path.
/// The error is a sentence that names the field.
Result<reference::HybridConfig> named_model(const std::string& name);

/// Whether there is such a model and the policy has slots for its layers; the error is a sentence
/// that names the field.
Result<void> check_model(const PolicyEntry& policy, const Config& config);

/// The truth of the model with that name. The runs of a thread share it: it remembers prefixes, and
/// no run changes their numbers. Each takes up to some 100 MB, so few are kept.
std::shared_ptr<Truth> shared_truth(const std::string& name, const reference::HybridConfig& config);

class LabelledNumbers final : public NumberedPools {
 public:
  /// `labels` outlive it.
  LabelledNumbers(LabelState& labels, std::unique_ptr<NumberedPools> numbers)
      : labels_(labels), numbers_(std::move(numbers)) {}

  Findings drain(bool completes) override;
  void tell_rows() override { numbers_->tell_rows(); }
  std::vector<std::string> rows() override { return numbers_->rows(); }

  void forward(const ForwardRow& row) override { numbers_->forward(row), labels_.forward(row); }
  void launch(std::span<const StateSlot> padding) override {
    numbers_->launch(padding), labels_.launch(padding);
  }
  void allocate_state(StateSlot slot) override {
    numbers_->allocate_state(slot), labels_.allocate_state(slot);
  }
  void zero_state(StateSlot slot, StatePart part) override {
    numbers_->zero_state(slot, part), labels_.zero_state(slot, part);
  }
  void copy_state(StateSlot source, StateSlot target, StatePart part) override {
    numbers_->copy_state(source, target, part), labels_.copy_state(source, target, part);
  }
  void advance_state(StateSlot slot, StatePart part, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override {
    numbers_->advance_state(slot, part, tokens, begin, end);
    labels_.advance_state(slot, part, tokens, begin, end);
  }
  void zero_state(StateSlot slot) override { numbers_->zero_state(slot), labels_.zero_state(slot); }
  void copy_state(StateSlot source, StateSlot target) override {
    numbers_->copy_state(source, target), labels_.copy_state(source, target);
  }
  void advance_state(StateSlot slot, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override {
    numbers_->advance_state(slot, tokens, begin, end);
    labels_.advance_state(slot, tokens, begin, end);
  }
  void free_state(StateSlot slot) override { numbers_->free_state(slot), labels_.free_state(slot); }
  void verify_state(StateSlot slot, StatePart part, const VerifiedRow& row) override {
    numbers_->verify_state(slot, part, row), labels_.verify_state(slot, part, row);
  }
  void commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                    StatePart part) override {
    numbers_->commit_state(verified, at, target, part);
    labels_.commit_state(verified, at, target, part);
  }
  void replay_state(StateSlot slot, StatePart part, const Tokens& tokens, std::uint32_t begin,
                    std::uint32_t end) override {
    numbers_->replay_state(slot, part, tokens, begin, end);
    labels_.replay_state(slot, part, tokens, begin, end);
  }
  void fold_ring(StateSlot slot, std::uint32_t live, const Tokens& tokens,
                 std::uint32_t size) override {
    numbers_->fold_ring(slot, live, tokens, size);
    labels_.fold_ring(slot, live, tokens, size);
  }
  void rewind_conv(StateSlot slot) override {
    numbers_->rewind_conv(slot), labels_.rewind_conv(slot);
  }
  void receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                     std::uint32_t size) override {
    numbers_->receive_state(slot, part, tokens, size);
    labels_.receive_state(slot, part, tokens, size);
  }
  void run_padding_row(StateSlot slot) override {
    numbers_->run_padding_row(slot), labels_.run_padding_row(slot);
  }
  void allocate_kv(KvSlots slots) override {
    numbers_->allocate_kv(slots), labels_.allocate_kv(slots);
  }
  void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override {
    numbers_->write_kv(slots, tokens, begin), labels_.write_kv(slots, tokens, begin);
  }
  void read_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override {
    labels_.read_kv(slots, tokens, begin);
  }
  void receive_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override {
    numbers_->receive_kv(slots, tokens, begin), labels_.receive_kv(slots, tokens, begin);
  }
  void free_kv(KvSlots slots) override { numbers_->free_kv(slots), labels_.free_kv(slots); }
  void copy_kv(KvSlots sources, KvSlots targets) override {
    numbers_->copy_kv(sources, targets), labels_.copy_kv(sources, targets);
  }
  void queue_copy(const TierCopy& copy) override {
    numbers_->queue_copy(copy), labels_.queue_copy(copy);
  }
  void land_copy(const TierCopy& copy) override {
    numbers_->land_copy(copy), labels_.land_copy(copy);
  }
  Lengths state_lengths(StateSlot slot, std::int64_t expected) const override {
    return labels_.state_lengths(slot, expected);
  }

 private:
  LabelState& labels_;
  std::unique_ptr<NumberedPools> numbers_;
};

}  // namespace lockstep::cache_sim
