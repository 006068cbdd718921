// LayerState at label fidelity: a slot holds no numbers but what they would stand for. Copy copies,
// advance extends, free poisons, and allocation without zeroing keeps the old label
// (reference/contract.md, Labels).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/base/finding.hpp"
#include "reference/base/layer_state.hpp"

namespace lockstep {

/// The exact prefix that a state stands for. Two labels are equal where their prefixes are.
struct Label {
  std::uint64_t digest = 0;
  std::uint32_t size = 0;
  bool poisoned = false;
  bool operator==(const Label&) const = default;
  std::string text() const;
};

inline Label label_of(const Tokens& tokens, std::uint32_t size) {
  return {tokens.digest(size), size};
}

class LabelState final : public LayerState {
 public:
  /// State slots 1 … states and KV slots up to kv_end - 1 exist.
  LabelState(std::int64_t states, std::int64_t kv_end);

  void allocate_state(StateSlot slot) override;
  void zero_state(StateSlot slot) override;
  void copy_state(StateSlot source, StateSlot target) override;
  void advance_state(StateSlot slot, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override;
  void free_state(StateSlot slot) override;
  void allocate_kv(std::span<const KvExtent> extents) override;
  void write_kv(std::span<const KvExtent> extents, const Tokens& tokens, std::uint32_t begin,
                std::uint32_t end) override;
  void free_kv(std::span<const KvExtent> extents) override;
  Lengths state_lengths(StateSlot slot, std::int64_t expected) const override;

  bool state_exists(StateSlot slot) const { return slot.value >= 1 && slot.value < states_.size(); }
  bool state_in_use(StateSlot slot) const { return states_[slot.value].in_use; }
  const Label& recurrent(StateSlot slot) const { return states_[slot.value].recurrent; }
  const Label& conv(StateSlot slot) const { return states_[slot.value].conv; }
  bool kv_exists(KvExtent extent) const {
    return std::uint64_t{extent.begin} + extent.size <= kv_.size();
  }
  bool kv_in_use(std::uint32_t slot) const { return kv_[slot].in_use; }
  /// Digest of the prefix that ends with the token whose KV the slot holds.
  std::uint64_t kv_digest(std::uint32_t slot) const { return kv_[slot].digest; }

  /// What the calls themselves did wrong since the last drain.
  Findings drain();

 private:
  struct StateCell {
    Label recurrent;
    Label conv;
    bool in_use = false;
  };
  struct KvCell {
    std::uint64_t digest : 61 = 0;  // the digest's field is 2^61 - 1
    std::uint64_t in_use : 1 = 0;
  };

  bool usable(StateSlot slot, const char* what);
  void report(FindingKind kind, std::string text, std::string expected, std::string actual);

  std::vector<StateCell> states_;
  std::vector<KvCell> kv_;
  Findings findings_;
  std::vector<std::uint64_t> digests_;  // scratch of write_kv
};

/// Where nothing is checked: no memory, no work.
class NoLayerState final : public LayerState {
 public:
  void allocate_state(StateSlot) override {}
  void zero_state(StateSlot) override {}
  void copy_state(StateSlot, StateSlot) override {}
  void advance_state(StateSlot, const Tokens&, std::uint32_t, std::uint32_t) override {}
  void free_state(StateSlot) override {}
  void allocate_kv(std::span<const KvExtent>) override {}
  void write_kv(std::span<const KvExtent>, const Tokens&, std::uint32_t, std::uint32_t) override {}
  void free_kv(std::span<const KvExtent>) override {}
  Lengths state_lengths(StateSlot, std::int64_t expected) const override {
    return {expected, expected};
  }
};

}  // namespace lockstep
