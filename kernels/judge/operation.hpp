// An operation that can be judged: its cases, its definition (the reference), and known mistakes,
// each as a definition of its own. A new operation is a new file.
#pragma once

#include <functional>
#include <map>
#include <optional>

#include "kernels/judge/tensor.hpp"
#include "reference/base/judged.hpp"
#include "reference/tensors/eigen.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::judging {

/// What a token or a slot is to its case, for the sentence that says where something is wrong.
struct CaseToken {
  std::int64_t row = -1;  ///< -1: after the last row
  std::int64_t position = 0;
  std::int64_t row_size = 1;
  bool padding = false;  ///< the row's slot names none, or there is no row
  std::int64_t accepted = 1;
};
enum class SlotUse : std::uint8_t { unused, read, written };
struct CaseSlot {
  SlotUse use = SlotUse::unused;
  bool read = false;  ///< also where it is written
  CaseToken token;    ///< after which its state is left there
};

struct Case {
  std::string name;
  std::string about;            ///< one line: its sizes
  std::vector<Tensor> tensors;  ///< in the order of the schema; what is absent is not given
  std::vector<Scalar> scalars;
  std::vector<CaseToken> tokens;
  std::vector<CaseSlot> slots;
  std::int64_t heads_per_group = 1;
  bool timed = false;
  std::int64_t bytes = 0;  ///< the least that has to be read and written

  const Tensor* find(std::string_view name) const;
  const Tensor& tensor(std::string_view name) const;
  bool flag(std::string_view name) const;
  std::optional<double> number(std::string_view name) const;
  std::string text(std::string_view name) const;
};

struct CaseOptions {
  ElementType activations = ElementType::bf16;
  ElementType states = ElementType::float32;
  std::int64_t batch = 4;  ///< rows of the timed cases
  std::uint64_t seed = 1;
};

/// A case before it has numbers: what is not asked for by name is never built.
struct CasePlan {
  std::string name;
  bool timed = false;  ///< its rows are CaseOptions::batch
  std::function<Case(const CaseOptions&)> make;
  bool wide = false;  ///< has more rows than a grid's y and z; on a CPU it is to be asked for
};

/// Values of the states and outputs, by name, last dimension fastest.
using Answer = std::map<std::string, std::vector<double>>;

/// A stage of the computation that a Python candidate gave back beside its output, flattened.
struct NamedStage {
  std::vector<double> values;
};
using NamedStages = std::map<std::string, NamedStage>;

struct Mistake {
  std::string_view id;
  std::string_view sentence;  ///< goes on from "it agrees with the definition …"
};

struct JudgedKernel {
  std::string_view name;
  std::string_view summary;
  std::vector<std::string> positional;  ///< arguments of the schema in front of the `*`
  bool returns = true;                  ///< `out`
  bool exact = false;                   ///< results are copies: bits are compared
  std::string default_types;
  std::vector<CasePlan> plans;
  std::int64_t row_elements = 0;  ///< of the state pool, that a row of the timed cases brings
  std::function<Answer(const Case&, std::string_view mistake)> truth;      ///< in double
  std::function<Answer(const Case&, std::string_view mistake)> yardstick;  ///< in float, rounded
  std::vector<Mistake> mistakes;
  /// What the states and outputs of a wrong answer say of the stage that is wrong; empty: nothing.
  std::function<std::string(const Case&, const Answer& candidate, const Answer& truth)> stages;
  /// Likewise of the stages that the candidate names itself.
  std::function<std::string(const Case&, const NamedStages&)> named_stages;
};

Result<JudgeReport> judge_operation(const JudgedKernel& operation, const JudgeRequest& request);

/// The operations that are registered, for tests that hold of each.
std::vector<const JudgedKernel*>& judged_kernels();

/// What registers a constant of an operation's file.
template <const JudgedKernel& kOperation>
JudgedOperation judged() {
  judged_kernels().push_back(&kOperation);
  return {kOperation.name, kOperation.summary,
          [](const JudgeRequest& request) { return judge_operation(kOperation, request); }};
}

// --- What cases are made of ----------------------------------------------------------------------

/// Rows of a batch over the slots of a pool. Slots are permuted; the first and the last one are
/// nobody's, so that a padding entry that is taken for slot 0, or wraps around, shows.
struct Batch {
  std::vector<std::int64_t> lengths;       ///< tokens per row
  std::int64_t behind = 0;                 ///< tokens after the last row
  std::int64_t columns = 0;                ///< of a table of state indices; 0: a list
  std::vector<std::int64_t> padding_rows;  ///< their entries name no slot
  std::int32_t pad_slot_id = -1;
  bool packed = false;          ///< query_start_loc is given
  bool apart = false;           ///< state_out_indices: states go to other slots than they come from
  bool in_order = false;        ///< no state_indices: row i has slot i
  bool with_accepted = true;    ///< num_accepted_tokens beside a table
  bool writes = true;           ///< false: states go to snapshots, and slots are only read
  std::int64_t first_slot = 0;  ///< slots below it are nobody's
  bool one_slot_per_row = false;  ///< the table's first column alone is used (convolution)
  std::uint64_t seed = 1;

  std::int64_t rows() const { return static_cast<std::int64_t>(lengths.size()); }
  std::int64_t tokens() const;
  std::int64_t slot_count() const;
  bool is_padding(std::int64_t row) const;

  std::vector<std::int32_t> starts() const;
  std::vector<std::int32_t> indices() const;      ///< [rows, max(columns, 1)]
  std::vector<std::int32_t> out_indices() const;  ///< [rows]
  std::vector<std::int32_t> accepted() const;     ///< [rows]

  /// query_start_loc, state_indices and so on as arguments; tokens and slots of the case.
  void describe(Case& into) const;

 private:
  std::vector<std::int32_t> order() const;
};

/// How rows come: a token each or packed, resumed from lists or tables of slots, many or one alone,
/// and in each the lengths that kernels take a path of their own for: live rows of one token, in
/// front of another row and last, a padding row of one token, rows without any.
struct RowKind {
  std::string name;
  Batch batch;
  bool snapshots = false;
};

/// Every kind. Operations cross them with every layout of their states. `drafts` is what a
/// verification by a table is called.
std::vector<RowKind> row_kinds(const std::string& drafts);
/// Those of a recurrence, whose states may go to other slots than they come from.
std::vector<RowKind> recurrence_row_kinds();

/// The index arguments of a case as the references take them.
struct HostRows {
  explicit HostRows(const Case& from);
  std::optional<IndexView> query_start_loc() const;
  std::optional<IndexView> parents() const;
  StateSlots slots() const;

  std::optional<Array<std::int32_t, 1>> starts, indices, out_indices, accepted, tree;
  std::optional<Array<std::int32_t, 2>> table;
  std::int32_t pad_slot_id = -1;
};

/// Makes the tensors of a case: numbers on the grid (reference/tensors/grid.hpp), a stream for
/// each.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : seed_(seed) {}
  Tensor operator()(std::string name, ElementType type, const Extents& extents,
                    std::vector<std::string> axes = {});
  static Tensor output(std::string name, ElementType type, const Extents& extents,
                       std::vector<std::string> axes);
  /// States that the operation writes beside its pool: NaN until then.
  static Tensor states(std::string name, ElementType type, const Extents& extents,
                       std::vector<std::string> axes);

 private:
  std::uint64_t seed_;
  std::uint64_t stream_ = 0;
};

Tensor indices(std::string name, const Extents& extents, const std::vector<std::int32_t>& values,
               std::vector<std::string> axes = {});

/// has_initial_state [rows], false for those of `fresh`: whatever their slots hold counts as zero.
/// After Batch::describe().
void add_fresh_rows(Case& c, std::int64_t rows, const std::vector<std::int64_t>& fresh);

/// NaN in the tokens of padding rows and after the last row; dimension 0 is the token.
void poison_padding(Tensor& tensor, const Case& of);
/// NaN in the slots that no row reads; dimension 0 is the slot.
void poison_unread(Tensor& tensor, const Case& of);

/// Every stride but the last dimension's grows: holes between a tensor's rows.
void spread(Tensor& tensor, std::size_t dimension, std::int64_t gap);
/// The last two dimensions of memory change places.
void swap_last_two(Tensor& tensor);

/// A plan of make(wanted, options) for each that is wanted, one list after the other.
template <class Wanted, class Make>
std::vector<CasePlan> planned(const std::vector<std::vector<Wanted>>& parts, Make make) {
  std::vector<CasePlan> plans;
  for (const std::vector<Wanted>& part : parts)
    for (const Wanted& wanted : part)
      plans.push_back({wanted.name, wanted.timed, [wanted, make](const CaseOptions& options) {
                         return make(wanted, options);
                       }});
  return plans;
}

/// More rows than fit into the second and third dimension of a grid.
constexpr std::int64_t kWideRows = 65'537;

/// The plans, and after them those of kWideRows rows.
inline std::vector<CasePlan> with_wide(std::vector<CasePlan> plans,
                                       const std::vector<CasePlan>& wide) {
  for (const CasePlan& plan : wide) {
    plans.push_back(plan);
    plans.back().wide = true;
  }
  return plans;
}

/// The timed cases: one with a list of slots, and one whose row i has slot i.
template <class Wanted>
std::vector<Wanted> listed_and_in_order(const Wanted& listed) {
  Wanted in_order = listed;
  in_order.name += "-in-order";
  in_order.batch.in_order = true;
  return {listed, in_order};
}

/// The rows of a case of an update; those of a timed case are as many as the options say.
template <class Wanted>
Batch rows_of(const Wanted& wanted, const CaseOptions& options) {
  Batch batch = wanted.batch;
  batch.seed = options.seed;
  batch.writes = !wanted.snapshots;
  if (wanted.timed) batch.lengths.assign(static_cast<std::size_t>(options.batch), 1);
  return batch;
}

template <class S, std::size_t Rank>
Array<S, Rank> array_of(const Case& from, std::string_view name) {
  const Tensor& tensor = from.tensor(name);
  return array_of<S, Rank>(tensor, tensor.values);
}
template <class S, std::size_t Rank>
std::optional<Array<S, Rank>> maybe_array_of(const Case& from, std::string_view name) {
  return from.find(name) == nullptr ? std::nullopt : std::optional(array_of<S, Rank>(from, name));
}
template <class S, std::size_t Rank>
std::optional<TensorView<S, Rank>> maybe_view(std::optional<Array<S, Rank>>& array) {
  return array ? std::optional(array->view()) : std::nullopt;
}

/// The mistakes of slots that all recurrences share: "row-slots", "first-column", "next-column".
void change_slots(HostRows& rows, std::string_view mistake, std::int64_t tokens);

/// States whose memory [.., R, C] is read as [.., C, R], and their way back.
template <class S>
Array<S, 4> as_if_turned(Array<S, 4>& states) {
  const Shape<4> s = states.shape();
  Array<S, 4> turned(s);
  const auto from = make_view(states.data(), Shape<4>{s[0], s[1], s[3], s[2]});
  for_each_element(turned.view(), [&](const auto& i, S& e) { e = from(i[0], i[1], i[3], i[2]); });
  return turned;
}
template <class S>
Array<S, 4> turned_back(Array<S, 4>& turned) {
  const Shape<4> s = turned.shape();
  Array<S, 4> states(s);
  const auto to = make_view(states.data(), Shape<4>{s[0], s[1], s[3], s[2]});
  for_each_element(turned.view(), [&](const auto& i, S& e) { to(i[0], i[1], i[3], i[2]) = e; });
  return states;
}

/// Groups [T, G, N] as so many heads see them with head h on group h % G ("group-modulo"), or each
/// on group 0.
template <class S>
Array<S, 3> regrouped(const Array<S, 3>& groups, std::int64_t heads, std::string_view mistake) {
  Array<S, 3> wide({groups.extent(0), heads, groups.extent(2)});
  for (std::int64_t t = 0; t < groups.extent(0); ++t)
    for (std::int64_t h = 0; h < heads; ++h)
      mapped(at(wide.view(), t, h)) =
          mapped(at(groups.view(), t, mistake == "group-modulo" ? h % groups.extent(1) : 0));
  return wide;
}

/// An array's elements as an answer.
template <class S, std::size_t Rank>
std::vector<double> as_values(const Array<S, Rank>& array) {
  return {array.begin(), array.end()};
}

/// Rounded where a kernel stores: the yardstick's storage points.
StoragePoints storage_of(const Case& of, std::string_view state, bool rounded);

}  // namespace lockstep::judging
