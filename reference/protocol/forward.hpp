// One row of a forward, as a policy tells it: the tokens of a request that all layers of the model
// run over, and the slots of its KV and of its states.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "reference/base/ids.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep {

/// KV slots in the order of the tokens whose keys and values they hold.
using KvSlots = std::span<const std::uint32_t>;

/// KV slots that belong together, in token order: a slice of a shared array of slot numbers. Rows,
/// nodes and the free list pass runs to each other, so that thousands of slots change hands at the
/// cost of one.
struct KvRun {
  std::shared_ptr<const std::uint32_t[]> array;
  std::uint32_t begin = 0;
  std::uint32_t size = 0;

  KvSlots slots() const { return {array.get() + begin, size}; }
};

/// Calls `act(slots, place)` for each piece of the runs within places [first, last): its slots, and
/// the place of the first of them, counted from the start of the runs.
template <class Act>
void for_slots(std::span<const KvRun> runs, std::uint32_t first, std::uint32_t last, Act act) {
  std::uint32_t place = 0;
  for (const KvRun& run : runs) {
    if (place >= last) return;
    const std::uint32_t from = std::max(first, place);
    const std::uint32_t to = std::min(last, place + run.size);
    if (from < to) act(run.slots().subspan(from - place, to - from), from);
    place += run.size;
  }
}

/// The two halves of a state slot. Different kernels move them: the recurrence and the convolution
/// in front of it, which keeps its last inputs.
enum class StatePart : std::uint8_t { recurrent, conv };
inline constexpr StatePart kStateParts[] = {StatePart::recurrent, StatePart::conv};

/// A choice of these halves.
struct StateParts {
  bool recurrent = true, conv = true;

  bool has(StatePart part) const { return part == StatePart::recurrent ? recurrent : conv; }
  bool all() const { return recurrent && conv; }
};
inline constexpr StateParts kNoParts{false, false};

/// A state that the forward leaves in another slot on its way.
struct StateTake {
  std::uint32_t after;  ///< tokens of the request that the state has seen
  StateSlot target;
  StateParts parts{};
};

/// A decode step over a state that is written once in a window: a ring beside the slot holds, for
/// each token since, what the step added to the state. The slot's recurrent part stands for
/// tokens[0, begin - live), entry j of the ring for the token begin - live + j.
struct RingStep {
  StateSlot slot{};                      ///< the slot whose ring it is
  std::uint32_t live = 0;                ///< entries that the step reads
  std::optional<std::uint32_t> entry{};  ///< the place that the token's own entry gets
  bool writes_state = false;  ///< the recurrent part stands for tokens[0, begin + 1) afterwards
};

/// The forward computes tokens [begin, end) of a request. A token's position is its index; that of
/// a draft in a tree is the number of tokens on its way from the first one. Spans live as long as
/// the call that is given the row.
struct ForwardRow {
  Name request;
  const Tokens& tokens;  ///< the known ones, then the drafts
  std::uint32_t begin, end;
  /// The last tokens of the row are drafts. If there are any, the row is a verification: its states
  /// after each token are left in `takes` or, where there are none, beside the slot for
  /// commit_state().
  std::uint32_t drafts = 0;
  /// By draft, its parent: 0 for the last known token, k for the k-th draft. Parents come before
  /// their children. Empty: the drafts are a chain.
  std::span<const std::int64_t> parents{};

  StateSlot state{};   ///< stands for tokens[0, begin), with its ring; none: attention alone
  StateParts keeps{};  ///< the parts that stand for tokens[0, end) afterwards; others stay
  std::span<const StateTake> takes{};  ///< in the order of their tokens, each within [begin, end]
  std::optional<RingStep> ring{};  ///< of a row of one token; `keeps.recurrent` is of no use then

  /// KV by place: slot i is that of token i, those of drafts included, also in a tree. The row
  /// reads places [0, end) and writes [begin, end).
  std::span<const KvRun> kv{};
  bool writes_kv = true;          ///< false: the slots of [begin, end) keep what they hold
  std::uint32_t padded_to = 0;    ///< where above `end`: so many places are written, with token 0
  std::span<const KvRun> also{};  ///< a second memory that KV is written to, by the same places

  // By layer, the distance of its slots from those that are named above. Empty: a slot has the same
  // number in all layers.
  std::span<const std::uint32_t> state_layers{}, kv_layers{};

  std::uint32_t known() const { return end - drafts; }
  /// Places whose KV is written or read.
  std::uint32_t places() const { return std::max(end, padded_to); }
};

}  // namespace lockstep
