// Laws of rows and state slots that a server's batches need of an update, each named by a public
// report of a kernel or runner that broke it. A law is asked of the reference, of a kernel, and of
// either called with the mistake of the report, which must break it.
#pragma once

#include <functional>
#include <string>

#include "properties/support/recurrences.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep::testing_support {

/// A call of gated_delta_rule_update over tokens [begin, end) of a run.
struct SlotCall {
  std::int64_t begin = 0, end = 0;
  std::optional<Array<std::int32_t, 1>> starts{}, indices{}, accepted{};
  std::optional<Array<std::int32_t, 2>> table{};  // [N, 1 + drafts]
  std::int32_t pad_slot_id = -1;
  bool snapshots = false;

  StateSlots slots() const {
    StateSlots all{.pad_slot_id = pad_slot_id};
    if (indices) all.indices = indices->view();
    if (table) all.table = table->view();
    if (accepted) all.num_accepted = accepted->view();
    return all;
  }
};

/// The results of a call: out [end - begin, HV, V] and the pool [slots, HV, V, K].
struct SlotResult {
  Array<double, 3> out;
  Array<double, 4> states;
};

using SlotRun = GatedDeltaRun<double>;
using SlotUpdate =
    std::function<SlotResult(const SlotRun&, const SlotCall&, const Array<double, 4>& states)>;

/// The reference in double.
inline SlotResult reference_update(const SlotRun& run, const SlotCall& call,
                                   const Array<double, 4>& states) {
  SlotResult result{Array<double, 3>({call.end - call.begin, run.HV, run.V}), states};
  Array<double, 4> snapshots({call.end - call.begin, run.HV, run.V, run.K});
  auto in = run.inputs(call.begin, call.end);
  if (call.starts) in.rows.query_start_loc = call.starts->view();
  in.rows.slots = call.slots();
  SlotRun::update(in, result.states.view(), result.out.view(), {},
                  call.snapshots ? std::optional(snapshots.view()) : std::nullopt);
  return result;
}

inline Array<std::int32_t, 2> one_row(const Sizes& slots) {
  Array<std::int32_t, 2> table(Shape<2>{1, static_cast<std::int64_t>(slots.size())}, 0);
  for (std::size_t i = 0; i < slots.size(); ++i)
    table(0, static_cast<std::int64_t>(i)) = static_cast<std::int32_t>(slots[i]);
  return table;
}

struct SlotLaw {
  std::string report;  ///< of the bug, as a name of a test
  std::string says;
  bool (*holds)(const SlotUpdate&);
  SlotCall (*mistake)(SlotCall);  ///< the call as the report's server made it
};

/// The update of a server with the law's mistake.
inline SlotUpdate with_mistake(const SlotLaw& law, const SlotUpdate& update) {
  return [&law, update](const SlotRun& run, const SlotCall& call, const Array<double, 4>& states) {
    return update(run, law.mistake(call), states);
  };
}

namespace slot_laws_detail {

/// A kernel's outputs may be in bf16, which rounds by 0.2 %.
template <AnyView A, AnyView B>
bool near(const A& a, const B& b) {
  const Difference found = difference(a, b);
  return found.misplaced == 0 && found.relative() < 5e-3;
}
inline bool slot_is_kept(const SlotResult& result, const Array<double, 4>& before,
                         std::int64_t slot) {
  return same_bits(at(result.states.view(), slot), at(before.view(), slot));
}

/// One request in slots 3, 0, 2, 1: a step of four tokens of which some are accepted, then one of
/// `size` tokens. Whether the second step's first output is that of the accepted prefix.
inline bool resumes_behind(const SlotUpdate& update, std::int64_t accepted, std::int64_t size) {
  const SlotRun run(8, 4, 7);
  const SlotCall first{
      .end = 4, .starts = starts_of({4}), .accepted = ints({1}), .table = one_row({3, 0, 2, 1})};
  const SlotCall second{.begin = accepted,
                        .end = accepted + size,
                        .starts = starts_of({size}),
                        .accepted = ints({accepted}),
                        .table = first.table};
  const SlotResult states = reference_update(run, first, run.states());
  const SlotResult found = update(run, second, states.states);
  auto pool = run.states();
  Array<double, 3> expected({accepted + 1, run.HV, run.V});
  SlotRun::scan(run.inputs(0, accepted + 1), cut(pool.view(), 3, 4), expected.view());
  return near(at(found.out.view(), 0), at(expected.view(), accepted));
}

}  // namespace slot_laws_detail

// NOLINTNEXTLINE(readability-function-size): 86 lines, each law with its mistake
inline const std::vector<SlotLaw>& slot_laws() {
  using namespace slot_laws_detail;
  static const std::vector<SlotLaw> laws = {
      {"sglang27325", "a finished request that is still in the batch writes nothing",
       [](const SlotUpdate& update) {
         const SlotRun run(2, 3, 4);
         const SlotCall call{.end = 2, .indices = ints({-1, 2})};
         return slot_is_kept(update(run, call, run.states()), run.states(), 0);
       },
       [](SlotCall call) {
         for (std::int32_t& slot : *call.indices) slot = std::max(slot, 0);
         return call;
       }},
      {"sglang23975", "states are indexed by the request's slot, not by its row",
       [](const SlotUpdate& update) {
         const SlotRun run(2, 3, 5);
         const SlotCall call{.end = 2, .indices = ints({2, 1})};
         const SlotResult expected = reference_update(run, call, run.states());
         const SlotResult found = update(run, call, run.states());
         return near(found.out.view(), expected.out.view()) &&
                near(found.states.view(), expected.states.view());
       },
       [](SlotCall call) {
         call.indices.reset();
         return call;
       }},
      {"vllm39064", "a row whose slot is the number of padding writes nothing",
       [](const SlotUpdate& update) {
         const SlotRun run(2, 3, 6);
         const SlotCall call{.end = 2, .indices = ints({1, 0}), .pad_slot_id = 0};
         return slot_is_kept(update(run, call, run.states()), run.states(), 0);
       },
       [](SlotCall call) {
         call.pad_slot_id = -1;
         return call;
       }},
      {"vllm39273", "a step without drafts behind an accepting one reads the accepted column",
       [](const SlotUpdate& update) { return resumes_behind(update, 2, 1); },
       [](SlotCall call) {
         call.accepted = ints({1});
         return call;
       }},
      {"vllm45100", "accepted counts belong to their row and step",
       [](const SlotUpdate& update) { return resumes_behind(update, 1, 2); },
       [](SlotCall call) {
         call.accepted = ints({4});
         return call;
       }},
      {"vllm50021", "an accepted count of 0 reads the row's first column",
       [](const SlotUpdate& update) {
         const SlotRun run(2, 4, 14);
         SlotCall call{.end = 2, .starts = starts_of({1, 1}), .accepted = ints({0, 0})};
         call.table = Array<std::int32_t, 2>(Shape<2>{2, 2}, 0);
         for (std::int32_t i = 0; i < 4; ++i) call.table->data()[i] = i;
         SlotCall by_list{.end = 2, .starts = call.starts, .indices = ints({0, 2})};
         return near(update(run, call, run.states()).out.view(),
                     reference_update(run, by_list, run.states()).out.view());
       },
       [](SlotCall call) {  // entry row * columns - 1: the last one of the row before
         for (std::int64_t row = 1; row < call.table->extent(0); ++row)
           (*call.table)(row, 0) = (*call.table)(row - 1, 1);
         return call;
       }},
      {"vllm28202", "tokens behind the last row belong to no row",
       [](const SlotUpdate& update) {
         const SlotRun run(4, 4, 9);
         const SlotCall call{.end = 4, .starts = starts_of({1, 1})};
         const SlotResult found = update(run, call, run.states());
         return slot_is_kept(found, run.states(), 2) && slot_is_kept(found, run.states(), 3);
       },
       [](SlotCall call) {
         call.starts = starts_of({1, 1, 1, 1});
         return call;
       }},
      {"sglang19415", "a verification with snapshots leaves the state as it is",
       [](const SlotUpdate& update) {
         const SlotRun run(3, 1, 3);
         const SlotCall call{.end = 3, .starts = starts_of({3}), .snapshots = true};
         return slot_is_kept(update(run, call, run.states()), run.states(), 0);
       },
       [](SlotCall call) {
         call.snapshots = false;
         return call;
       }},
  };
  return laws;
}

}  // namespace lockstep::testing_support
