// LayerState with labels instead of numbers: a slot holds the label of the exact prefix that its
// numbers would stand for. Copy copies the label, advance extends it, free poisons it, and an
// allocation without zeroing keeps the old one (cache_sim/check/findings.md, "Labels").
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reference/base/finding.hpp"
#include "reference/base/zeroed_array.hpp"
#include "reference/protocol/layer_state.hpp"

namespace lockstep {

std::string_view to_string(StatePart part);

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
  /// Elements between the beginnings of two slots in the tensor of a layer; 0: offsets are not
  /// checked.
  struct Strides {
    std::int64_t kv = 0, state = 0;
  };
  /// The state slots are 1 … states, the KV slots 0 … kv_end - 1. With strides, the allocation of a
  /// slot that holds elements from 2^31 on is a finding: a kernel that multiplies slot and stride
  /// in 32 bits would address other memory.
  LabelState(std::int64_t states, std::int64_t kv_end, Strides strides);
  LabelState(std::int64_t states, std::int64_t kv_end) : LabelState(states, kv_end, Strides{}) {}

  /// Each KV slot has an index key from now on, which is written and copied with its KV.
  void keep_index_keys() { index_keys_.emplace(kv_fingerprint_.size()); }

  void allocate_state(StateSlot slot) override;
  void zero_state(StateSlot slot, StatePart part) override;
  void copy_state(StateSlot source, StateSlot target, StatePart part) override;
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
  void step_ring(StateSlot slot, const RingStep& step, const Tokens& tokens,
                 std::uint32_t begin) override;
  void fold_ring(StateSlot slot, std::uint32_t live, const Tokens& tokens,
                 std::uint32_t size) override;
  void rewind_conv(StateSlot slot) override;
  void receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                     std::uint32_t size) override;
  void run_padding_row(StateSlot slot) override;
  void allocate_kv(KvSlots slots) override;
  void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override;
  void read_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override;
  void free_kv(KvSlots slots) override;
  void copy_kv(KvSlots sources, KvSlots targets) override;
  void forward(const ForwardRow& row) override;
  void queue_copy(const TierCopy& copy) override;
  void land_copy(const TierCopy& copy) override;
  void fail_copy(const TierCopy& copy) override;
  void abandon_copy(const TierCopy& copy) override;
  Lengths state_lengths(StateSlot slot, std::int64_t expected) const override;

  bool state_exists(StateSlot slot) const { return slot.value >= 1 && slot.value < states_.size(); }
  bool state_in_use(StateSlot slot) const { return states_[slot.value].use != 0; }
  /// Whether a copy in flight writes the slot.
  bool state_awaited(StateSlot slot) const { return (states_[slot.value].use & kAwaited) != 0; }
  const Label& label(StateSlot slot, StatePart part) const {
    return states_[slot.value].labels[static_cast<std::size_t>(part)];
  }
  const Label& recurrent(StateSlot slot) const { return label(slot, StatePart::recurrent); }
  const Label& conv(StateSlot slot) const { return label(slot, StatePart::conv); }
  /// The first of a slot's recurrent part and the `live` entries of a ring that does not stand for
  /// its own prefix of tokens[0, size); none where together they stand for tokens[0, size).
  struct WrongRing {
    std::string what, expected, actual;
  };
  std::optional<WrongRing> wrong_ring(StateSlot slot, StateSlot ring, std::uint32_t live,
                                      const Tokens& tokens, std::uint32_t size) const;
  bool kv_exists(std::uint32_t slot) const { return slot < kv_use_.size(); }
  bool kv_in_use(std::uint32_t slot) const { return kv_use_[slot] != 0; }
  bool kv_awaited(std::uint32_t slot) const { return (kv_use_[slot] & kAwaited) != 0; }
  /// Fingerprint of the prefix that ends with the token whose KV the slot holds.
  std::uint64_t kv_fingerprint(std::uint32_t slot) const { return kv_fingerprint_[slot]; }

  /// The findings since the last call of drain().
  Findings drain();

 private:
  /// The ring beside a slot: an entry's label is that of the prefix which ends with its token.
  struct Ring {
    std::vector<Label> entries;
    Label conv_before;  ///< the conv part where the first entry was written
  };
  /// A channel of a conv state: the prefix that it stands for, and the channel that it is.
  struct Channel {
    Label label;
    std::uint32_t number;
    bool operator==(const Channel&) const = default;
  };
  /// A state slot, and a KV slot, that several copies bring slice by slice.
  struct AwaitedState {
    std::uint32_t left;                 ///< copies that have not ended
    std::vector<Label> recurrent;       ///< the slices that have landed
    std::vector<Channel> conv;          ///< by channel of the slot
    std::vector<std::uint32_t> landed;  ///< how often each channel was brought
  };
  struct AwaitedKv {
    std::uint32_t left;
    std::vector<std::uint64_t> landed;  ///< fingerprints of the slices
  };
  // The use of a slot: free (0) or in use, awaited where a copy in flight writes it, and for each
  // copy in flight that reads it kRead more.
  using Use = std::uint8_t;
  static constexpr Use kInUse = 1, kAwaited = 2, kRead = 4;
  /// The slot's copy has ended.
  static void arrive(Use& use) { use = static_cast<Use>(use & ~kAwaited); }
  enum class Access : std::uint8_t { read, write, both };
  struct StateCell {
    std::array<Label, 2> labels;  // by StatePart
    Use use;
    bool was_used;  // false: never allocated, so its content is arbitrary, as in freed memory
  };
  Label& label_at(StateSlot slot, StatePart part) {
    return states_[slot.value].labels[static_cast<std::size_t>(part)];
  }
  bool usable(StateSlot slot, Access access, const char* what) {
    const bool plain = state_exists(slot) && states_[slot.value].use == kInUse;
    return plain || usable_in_copy(slot, access, what);
  }
  [[gnu::cold]] bool usable_in_copy(StateSlot slot, Access access, const char* what);
  void report_copy(const std::string& slot, Use use, Access access, const char* what);
  bool stands_for(StateSlot slot, StatePart part, const Label& before, const Tokens& tokens,
                  std::uint32_t end);
  bool advance(StateSlot slot, StatePart part, const Label& before, const Tokens& tokens,
               std::uint32_t end);
  void report_offset(const char* what, std::uint32_t slot, std::int64_t stride);
  [[gnu::cold]] void report_kv(FindingKind kind, std::uint32_t slot, const char* what);
  void report(FindingKind kind, std::string text, std::string expected, std::string actual);
  bool begins_to_await(const TierCopy& copy, StateSlot target);
  void land_slice(const TierCopy& copy, StateSlot source, StateSlot target);
  void land_kv_slice(const TierCopy& copy, std::uint32_t source, std::uint32_t target);
  void end_slice(StateSlot target, std::uint32_t slices);
  void end_kv_slice(std::uint32_t target, std::uint32_t slices);
  void release_sources(const TierCopy& copy);
  void check_index_keys(const ForwardRow& row);

  ZeroedArray<StateCell> states_;
  /// By slot and part: the labels that its last verification has left, one for each token of the
  /// row.
  std::map<std::uint32_t, std::array<std::vector<Label>, 2>> verified_;
  std::map<std::uint32_t, Ring> rings_;  // by slot
  ZeroedArray<std::uint64_t> kv_fingerprint_;
  ZeroedArray<Use> kv_use_;
  std::int64_t flying_ = 0;                          // copies
  std::map<std::uint32_t, AwaitedState> in_slices_;  // by state slot
  std::map<std::uint32_t, AwaitedKv> kv_in_slices_;  // by KV slot
  /// Fingerprints of the index keys, where there are any.
  std::optional<ZeroedArray<std::uint64_t>> index_keys_;
  Strides strides_;
  // Slots after these hold elements from 2^31 on.
  std::uint32_t last_narrow_kv_, last_narrow_state_;
  Findings findings_;
  std::vector<std::uint64_t> fingerprints_;  // buffer of write_kv(), kept between calls
};

/// A LayerState without memory and without work, for runs that check nothing.
class NoLayerState final : public LayerState {
 public:
  void forward(const ForwardRow&) override {}
  void launch(std::span<const StateSlot>) override {}
  void allocate_state(StateSlot) override {}
  void zero_state(StateSlot, StatePart) override {}
  void copy_state(StateSlot, StateSlot, StatePart) override {}
  void advance_state(StateSlot, StatePart, const Tokens&, std::uint32_t, std::uint32_t) override {}
  void zero_state(StateSlot) override {}
  void copy_state(StateSlot, StateSlot) override {}
  void advance_state(StateSlot, const Tokens&, std::uint32_t, std::uint32_t) override {}
  void free_state(StateSlot) override {}
  void verify_state(StateSlot, StatePart, const VerifiedRow&) override {}
  void commit_state(StateSlot, std::uint32_t, StateSlot, StatePart) override {}
  void step_ring(StateSlot, const RingStep&, const Tokens&, std::uint32_t) override {}
  void fold_ring(StateSlot, std::uint32_t, const Tokens&, std::uint32_t) override {}
  void rewind_conv(StateSlot) override {}
  void receive_state(StateSlot, StatePart, const Tokens&, std::uint32_t) override {}
  void run_padding_row(StateSlot) override {}
  bool keeps_kv() const override { return false; }
  void allocate_kv(KvSlots) override {}
  void write_kv(KvSlots, const Tokens&, std::uint32_t) override {}
  void free_kv(KvSlots) override {}
  void copy_kv(KvSlots, KvSlots) override {}
  Lengths state_lengths(StateSlot, std::int64_t expected) const override {
    return {expected, expected};
  }
};

}  // namespace lockstep
