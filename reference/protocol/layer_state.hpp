// LayerState: the memory of states and KV that a policy decides about, kept as labels (digests of
// the tokens that a slot stands for). Each call stands for a forward or a copy that a server would
// launch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/base/ids.hpp"
#include "reference/protocol/forward.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep {

/// One row of a verification: the request's tokens from `begin` on, which the slot's state has not
/// seen, and the drafts after them.
struct VerifiedRow {
  const Tokens& known;
  std::uint32_t begin;
  const Tokens& drafts;
  std::span<const std::int64_t> parents;  ///< as ForwardRow's

  std::uint32_t inputs() const { return known.size() - begin; }
  std::uint32_t size() const { return inputs() + drafts.size(); }
  std::uint32_t parent_of(std::uint32_t draft) const {
    return parents.empty() ? draft - 1 : static_cast<std::uint32_t>(parents[draft - 1]);
  }
};

/// A copy between memories, whose slots have different numbers: of KV slots, in order, and of
/// states.
struct TierCopy {
  struct States {
    StateSlot source, target;
  };
  /// Channels of conv states: as many of the sources, from the first one on, go to the targets.
  struct Channels {
    std::uint32_t source, target, count;
  };
  std::vector<KvRun> kv_sources, kv_targets;  ///< of as many slots
  std::vector<States> states;
  bool index_keys = true;  ///< brings what stands beside the KV for a sparse attention, too
  /// The tensors of keys and of values, layer by layer: numbers of the sources' and of those of the
  /// targets that they go to. Empty: each goes to its own.
  std::vector<Channels> kv_tensors;
  /// One of several copies that bring the same targets: a slice of each KV slot and of each
  /// recurrent state, and these of `channels` channels of each conv state.
  std::uint32_t slice = 0, slices = 1;
  std::vector<Channels> conv;
  std::uint32_t channels = 0;
};

class LayerState {
 public:
  virtual ~LayerState() = default;

  /// A row of the batch. The default body turns it into calls of the functions below: write_kv(),
  /// then advance_state() and copy_state() from take to take, or verify_state(). Labels need no
  /// more.
  virtual void forward(const ForwardRow& row);
  /// The batch is complete: the rows since the last launch run together, and beside them, over
  /// these slots, rows of padding. A batch without a launch is complete when a slot of it is named
  /// by any other call.
  virtual void launch(std::span<const StateSlot> padding) {
    for (const StateSlot slot : padding) run_padding_row(slot);
  }

  /// A state slot leaves the free list. Its content is whatever its last owner left: only zero()
  /// cleans it.
  virtual void allocate_state(StateSlot slot) = 0;
  /// Sets that part of the slot to the state of the empty prefix.
  virtual void zero_state(StateSlot slot, StatePart part) = 0;
  virtual void copy_state(StateSlot source, StateSlot target, StatePart part) = 0;
  /// Runs the layer over tokens[begin, end), starting from that part of the slot, which should
  /// stand for tokens[0, begin). Policies call it for a slot of no request, which has no KV; for
  /// the slots of a row, forward() does.
  virtual void advance_state(StateSlot slot, StatePart part, const Tokens& tokens,
                             std::uint32_t begin, std::uint32_t end) = 0;

  // The same for both parts.
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

  /// Runs the layer over a row of a verification. That part of the slot stays as it is; its states
  /// after each of the row's tokens are kept beside the slot until the slot's next verification.
  virtual void verify_state(StateSlot slot, StatePart part, const VerifiedRow& row) = 0;
  /// Copies into that part of the target the state that the verification of slot `verified` has
  /// kept for the row's token `at`, counted from 0.
  virtual void commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                            StatePart part) = 0;
  /// That part of the slot, which a verification from `begin` on has left as it was, runs again
  /// over the accepted tokens [begin, end), from inputs that the verification has kept.
  virtual void replay_state(StateSlot slot, StatePart part, const Tokens& tokens,
                            std::uint32_t begin, std::uint32_t end) {
    advance_state(slot, part, tokens, begin, end);
  }
  /// The recurrent half of a decode step over tokens[0, begin + 1) with a ring. The step that
  /// writes entry 0 keeps the conv part that it finds for rewind_conv(), so it comes before the
  /// conv half.
  virtual void step_ring(StateSlot slot, const RingStep& step, const Tokens& tokens,
                         std::uint32_t begin);
  /// The recurrent part of the slot becomes what it and the first `live` entries of its ring stand
  /// for: tokens[0, size).
  virtual void fold_ring(StateSlot slot, std::uint32_t live, const Tokens& tokens,
                         std::uint32_t size);
  /// The conv part of the slot becomes what it was before its ring's first entry was written.
  virtual void rewind_conv(StateSlot slot);
  /// Writes that part of the slot with the state that another server sends for tokens[0, size).
  virtual void receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                             std::uint32_t size) = 0;
  /// A row that belongs to no request runs over the slot: padding of a captured graph, or the dummy
  /// row of a rank without work. Slot 0 exists for such rows.
  virtual void run_padding_row(StateSlot slot) = 0;

  /// False if write_kv() has no effect, so that a policy need not collect the slots for it.
  virtual bool keeps_kv() const { return true; }
  virtual void allocate_kv(KvSlots slots) = 0;
  /// A forward writes the KV of tokens[begin, begin + slots.size()).
  virtual void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) = 0;
  /// A forward reads the KV of tokens[begin, begin + slots.size()), of layers that do not read all
  /// that is before them: forward() does not know of these. Slot 0 stands for a token without KV.
  virtual void read_kv(KvSlots /*slots*/, const Tokens& /*tokens*/, std::uint32_t /*begin*/) {}
  /// The same KV comes from elsewhere: another server has computed it, or a trace inserts it.
  virtual void receive_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) {
    write_kv(slots, tokens, begin);
  }
  virtual void free_kv(KvSlots slots) = 0;
  /// Slot by slot, in order: a source that an earlier pair has overwritten gives what was written.
  virtual void copy_kv(KvSlots sources, KvSlots targets) = 0;

  /// From now to its landing the copy's targets hold nothing, and neither they nor its sources may
  /// be freed or written.
  virtual void queue_copy(const TierCopy& /*copy*/) {}
  /// The copy reads its sources and writes its targets.
  virtual void land_copy(const TierCopy& copy);
  /// The copy has ended, and its targets hold nothing that can be told.
  virtual void fail_copy(const TierCopy& /*copy*/) {}
  /// Nobody needs any more what the copy brings: its sources may be freed and written. Until it
  /// ends, by fail_copy() without sources, it writes its targets.
  virtual void abandon_copy(const TierCopy& /*copy*/) {}

  /// Lengths that the slot's labels stand for; `expected` where the fidelity keeps no labels.
  struct Lengths {
    std::int64_t recurrent;
    std::int64_t conv;
  };
  virtual Lengths state_lengths(StateSlot slot, std::int64_t expected) const = 0;
};

}  // namespace lockstep
