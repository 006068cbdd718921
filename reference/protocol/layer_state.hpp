// LayerState: the memory of states and KV that a policy decides about, kept as labels (digests of
// the tokens that a slot stands for). Each call stands for a forward or a copy that a server would
// launch.
#pragma once

#include <cstdint>
#include <span>

#include "reference/base/ids.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep {

/// KV slots in the order of the tokens whose keys and values they hold.
using KvSlots = std::span<const std::uint32_t>;

/// The two halves of a state slot. Different kernels move them: the recurrence and the convolution
/// in front of it, which keeps its last inputs.
enum class StatePart : std::uint8_t { recurrent, conv };
inline constexpr StatePart kStateParts[] = {StatePart::recurrent, StatePart::conv};

/// One row of a verification: the request's tokens from `begin` on, which the slot's state has not
/// seen, and the drafts after them.
struct VerifiedRow {
  const Tokens& known;
  std::uint32_t begin;
  const Tokens& drafts;
  /// By draft, what it stands after: 0 the last known token, k the k-th draft, which comes before
  /// it. Empty: each draft stands after the one before it.
  std::span<const std::int64_t> parents;

  std::uint32_t inputs() const { return known.size() - begin; }
  std::uint32_t size() const { return inputs() + drafts.size(); }
  std::uint32_t parent_of(std::uint32_t draft) const {
    return parents.empty() ? draft - 1 : static_cast<std::uint32_t>(parents[draft - 1]);
  }
};

class LayerState {
 public:
  virtual ~LayerState() = default;

  /// A state slot leaves the free list. Its content is whatever its last owner left: only zero()
  /// cleans it.
  virtual void allocate_state(StateSlot slot) = 0;
  /// That part of the slot becomes that of the empty prefix.
  virtual void zero_state(StateSlot slot, StatePart part) = 0;
  virtual void copy_state(StateSlot source, StateSlot target, StatePart part) = 0;
  /// The layer runs over tokens[begin, end) from what that part of the slot holds, which should
  /// stand for tokens[0, begin).
  virtual void advance_state(StateSlot slot, StatePart part, const Tokens& tokens,
                             std::uint32_t begin, std::uint32_t end) = 0;

  // The same of both parts.
  virtual void zero_state(StateSlot slot) {
    for (const StatePart part : kStateParts) zero_state(slot, part);
  }
  virtual void copy_state(StateSlot source, StateSlot target) {
    for (const StatePart part : kStateParts) copy_state(source, target, part);
  }
  virtual void advance_state(StateSlot slot, const Tokens& tokens, std::uint32_t begin,
                             std::uint32_t end) {
    for (const StatePart part : kStateParts) advance_state(slot, part, tokens, begin, end);
  }
  /// The slot goes back to the free list.
  virtual void free_state(StateSlot slot) = 0;

  /// The layer verifies a row. That part of the slot stays as it is; what it would be after each
  /// of the row's tokens is left beside the slot until its next verification.
  virtual void verify_state(StateSlot slot, StatePart part, const VerifiedRow& row) = 0;
  /// That part of the target becomes what the verification of `verified` has left behind the row's
  /// token `at`, counted from 0.
  virtual void commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                            StatePart part) = 0;
  /// That part of the slot is written by a transfer from another server, where it stood for
  /// tokens[0, size).
  virtual void receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                             std::uint32_t size) = 0;
  /// A row of nobody runs over the slot: padding of a captured graph, or the dummy row of a rank
  /// without work. Slot 0 is there for such rows.
  virtual void run_padding_row(StateSlot slot) = 0;

  /// False where write_kv() would have no effect, so that nobody has to collect the slots for it.
  virtual bool keeps_kv() const { return true; }
  virtual void allocate_kv(KvSlots slots) = 0;
  /// The forward writes the KV of tokens[begin, begin + slots.size()).
  virtual void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) = 0;
  virtual void free_kv(KvSlots slots) = 0;
  /// Slot by slot, in order: a source that an earlier pair has overwritten gives what was written.
  virtual void copy_kv(KvSlots sources, KvSlots targets) = 0;

  /// Lengths that the slot's labels stand for; `expected` where the fidelity keeps no labels.
  struct Lengths {
    std::int64_t recurrent;
    std::int64_t conv;
  };
  virtual Lengths state_lengths(StateSlot slot, std::int64_t expected) const = 0;
};

}  // namespace lockstep
