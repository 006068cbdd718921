// LayerState: what a policy moves when it moves state. The policy decides; a LayerState is the
// memory it decides about, at one of three fidelities (labels, Eigen, CUDA). Every call says what
// the server's forward or copy would do.
#pragma once

#include <cstdint>
#include <span>

#include "reference/base/ids.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep {

/// KV slots in the order of the tokens whose keys and values they hold.
using KvSlots = std::span<const std::uint32_t>;

class LayerState {
 public:
  virtual ~LayerState() = default;

  /// A state slot leaves the free list. Its content is whatever its last owner left: only zero()
  /// cleans it.
  virtual void allocate_state(StateSlot slot) = 0;
  /// The slot's conv and recurrent state become those of the empty prefix.
  virtual void zero_state(StateSlot slot) = 0;
  virtual void copy_state(StateSlot source, StateSlot target) = 0;
  /// The recurrence runs over tokens[begin, end) from what the slot holds; the slot should stand
  /// for tokens[0, begin).
  virtual void advance_state(StateSlot slot, const Tokens& tokens, std::uint32_t begin,
                             std::uint32_t end) = 0;
  /// The slot goes back to the free list.
  virtual void free_state(StateSlot slot) = 0;

  /// False where write_kv() would have no effect, so that nobody has to collect the slots for it.
  virtual bool keeps_kv() const { return true; }
  virtual void allocate_kv(KvSlots slots) = 0;
  /// The forward writes the KV of tokens[begin, begin + slots.size()).
  virtual void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) = 0;
  virtual void free_kv(KvSlots slots) = 0;

  /// Lengths that the slot's labels stand for; `expected` where the fidelity keeps no labels.
  struct Lengths {
    std::int64_t recurrent;
    std::int64_t conv;
  };
  virtual Lengths state_lengths(StateSlot slot, std::int64_t expected) const = 0;
};

}  // namespace lockstep
