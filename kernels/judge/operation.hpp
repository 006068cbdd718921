// An operation that can be judged: its cases, its definition (the reference), and known mistakes,
// each as a definition of its own. A new operation is a new file in kernels/judge/operations/.
#pragma once

#include <functional>
#include <map>
#include <optional>

#include "kernels/judge/tensor.hpp"
#include "reference/base/judged.hpp"
#include "reference/tensors/eigen.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::judging {

/// Descriptions of a case's tokens and slots, from which a finding says where something is wrong.
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
  bool read = false;  ///< a row reads it, whether or not one writes it
  CaseToken token;    ///< written: the token after which the state is stored there
};

struct Case {
  std::string name;
  std::string about;            ///< one line with the case's sizes
  std::vector<Tensor> tensors;  ///< in the order of the schema; absent arguments are left out
  std::vector<Scalar> scalars;
  std::vector<CaseToken> tokens;
  std::vector<CaseSlot> slots;
  std::int64_t heads_per_group = 1;
  bool timed = false;
  std::int64_t bytes = 0;  ///< bytes that any implementation must read and write

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

/// A case that is not built yet. Cases that the request's filter leaves out are never built.
struct CasePlan {
  std::string name;
  bool timed = false;  ///< has CaseOptions::batch rows
  std::function<Case(const CaseOptions&)> make;
  bool large = false;  ///< rows or memory beyond what a small case has; on a CPU to be asked for
};

/// Values of the states and outputs, by name, last dimension fastest.
using Answer = std::map<std::string, std::vector<double>>;

/// A stage of the computation, flattened, that a Python candidate returned beside its output.
struct NamedStage {
  std::vector<double> values;
};
using NamedStages = std::map<std::string, NamedStage>;

struct Mistake {
  std::string_view id;
  std::string_view sentence;  ///< continues "it agrees with the definition ..."
};

struct JudgedKernel {
  std::string_view name;
  std::string_view summary;
  std::vector<std::string> positional;  ///< arguments of the schema before the `*`
  bool returns = true;                  ///< whether the schema returns `out`
  bool exact = false;                   ///< results are copies, so bits are compared
  std::string default_types;
  std::vector<CasePlan> (*plans)();  ///< made when they are asked for: some are of a MiB
  std::int64_t row_elements = 0;     ///< elements of the state pool per row of the timed cases
  std::function<Answer(const Case&, std::string_view mistake)> truth;      ///< in double
  std::function<Answer(const Case&, std::string_view mistake)> yardstick;  ///< in float, rounded
  std::vector<Mistake> mistakes;
  /// Finds the wrong stage of the computation from the states and outputs of a wrong answer; an
  /// empty text if they do not tell.
  std::function<std::string(const Case&, const Answer& candidate, const Answer& truth)> stages;
  /// Finds the wrong stage among the stages that the candidate has returned.
  std::function<std::string(const Case&, const NamedStages&)> named_stages;
};

Result<JudgeReport> judge_operation(const JudgedKernel& operation, const JudgeRequest& request);

/// All registered operations, for tests that hold of each.
std::vector<const JudgedKernel*>& judged_kernels();

/// The registration of an operation file's constant kOperation.
template <const JudgedKernel& kOperation>
JudgedOperation judged() {
  judged_kernels().push_back(&kOperation);
  return {kOperation.name, kOperation.summary,
          [](const JudgeRequest& request) { return judge_operation(kOperation, request); }};
}

// --- Parts of cases ------------------------------------------------------------------------------

/// Rows of a batch over the slots of a pool. Slots are permuted. The first and the last slot belong
/// to no row, so that a padding entry that is taken for slot 0, or wraps around, shows.
struct Batch {
  std::vector<std::int64_t> lengths;       ///< tokens per row
  std::int64_t behind = 0;                 ///< padding tokens after the last row
  std::int64_t columns = 0;                ///< columns of a table of state indices; 0: a list
  std::vector<std::int64_t> padding_rows;  ///< rows whose entries name no slot
  std::int32_t pad_slot_id = -1;
  bool packed = false;          ///< query_start_loc is given
  bool apart = false;           ///< state_out_indices: states go to other slots than they come from
  bool in_order = false;        ///< no state_indices: row i has slot i
  bool with_accepted = true;    ///< num_accepted_tokens beside a table
  bool writes = true;           ///< false: states go to snapshots, and slots are only read
  std::int64_t first_slot = 0;  ///< slots below it belong to no row
  bool one_slot_per_row = false;  ///< only the table's first column is used (convolution)
  std::uint64_t seed = 1;

  std::int64_t rows() const { return static_cast<std::int64_t>(lengths.size()); }
  std::int64_t tokens() const;
  std::int64_t slot_count() const;
  bool is_padding(std::int64_t row) const;

  std::vector<std::int32_t> starts() const;
  std::vector<std::int32_t> indices() const;      ///< [rows, max(columns, 1)]
  std::vector<std::int32_t> out_indices() const;  ///< [rows]
  std::vector<std::int32_t> accepted() const;     ///< [rows]

  /// Adds query_start_loc, state_indices and so on to the case as arguments, and fills its tokens
  /// and slots.
  void describe(Case& into) const;

 private:
  std::vector<std::int32_t> order() const;
};

/// A kind of batch. Rows have one token each or are packed, name their slots by a list or a table,
/// and are many or one alone. Packed kinds have the lengths for which kernels take paths of their
/// own: live rows of one token (before another row, and last), a padding row of one token, and
/// empty rows.
struct RowKind {
  std::string name;
  Batch batch;
  bool snapshots = false;
};

/// All kinds, which operations cross with every layout of their states. `drafts` is the name of the
/// kind with a verification by a table.
std::vector<RowKind> row_kinds(const std::string& drafts);
/// The kinds for a recurrence, with those whose states go to other slots than they come from.
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

/// Makes the tensors of a case: random numbers on the grid (reference/tensors/grid.hpp), each
/// tensor from a random stream of its own.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : seed_(seed) {}
  Tensor operator()(std::string name, ElementType type, const Extents& extents,
                    std::vector<std::string> axes = {});
  static Tensor output(std::string name, ElementType type, const Extents& extents,
                       std::vector<std::string> axes);
  /// States that the operation writes outside of its pool, such as snapshots; NaN before.
  static Tensor states(std::string name, ElementType type, const Extents& extents,
                       std::vector<std::string> axes);

 private:
  std::uint64_t seed_;
  std::uint64_t stream_ = 0;
};

Tensor indices(std::string name, const Extents& extents, const std::vector<std::int32_t>& values,
               std::vector<std::string> axes = {});

/// Adds has_initial_state [rows], false for the rows of `fresh`, whose states begin as zero
/// whatever their slots hold. Called after Batch::describe().
void add_fresh_rows(Case& c, std::int64_t rows, const std::vector<std::int64_t>& fresh);

/// Writes NaN to the tokens of padding rows and after the last row; dimension 0 is the token.
void poison_padding(Tensor& tensor, const Case& of);
/// Writes NaN to the slots that no row reads; dimension 0 is the slot.
void poison_unread(Tensor& tensor, const Case& of);

/// Makes holes between a tensor's rows, by larger strides.
void spread(Tensor& tensor, std::size_t dimension, std::int64_t gap);
/// Exchanges the last two dimensions in memory.
void swap_last_two(Tensor& tensor);

/// Gives states in float32 digits that bfloat16, float16 and TF32 do not have, so that a kernel
/// which rounds a state that it reads shows in a single step.
Case with_fine_states(Case c, std::uint64_t seed);

/// Plans that build make(spec, options), for all of `parts` in order.
template <class CaseSpec, class Make>
std::vector<CasePlan> planned(const std::vector<std::vector<CaseSpec>>& parts, Make make) {
  std::vector<CasePlan> plans;
  for (const std::vector<CaseSpec>& part : parts)
    for (const CaseSpec& spec : part)
      plans.push_back({spec.name, spec.timed, [spec, make](const CaseOptions& options) {
                         return with_fine_states(make(spec, options), options.seed);
                       }});
  return plans;
}

/// More rows than fit into the second and third dimension of a grid.
constexpr std::int64_t kWideRows = 65'537;

/// Rows of one token each; row 64 is padding.
inline Batch one_token_rows(std::int64_t rows) {
  return {.lengths = std::vector<std::int64_t>(static_cast<std::size_t>(rows), 1),
          .padding_rows = {64}};
}

/// The plans, and after them those of kWideRows rows and, as far-offsets, the one `far` with
/// its states (or its cache) so far apart that their offsets exceed 2^31 elements.
std::vector<CasePlan> with_large(std::vector<CasePlan> plans, const std::vector<CasePlan>& wide,
                                 std::string_view far = "");

/// The timed cases: one with a list of slots, and one whose row i has slot i.
template <class CaseSpec>
std::vector<CaseSpec> listed_and_in_order(const CaseSpec& listed) {
  CaseSpec in_order = listed;
  in_order.name += "-in-order";
  in_order.batch.in_order = true;
  return {listed, in_order};
}

/// The rows of a case of an update; a timed case has options.batch rows.
template <class CaseSpec>
Batch rows_of(const CaseSpec& spec, const CaseOptions& options) {
  Batch batch = spec.batch;
  batch.seed = options.seed;
  batch.writes = !spec.snapshots;
  if (spec.timed) batch.lengths.assign(static_cast<std::size_t>(options.batch), 1);
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

/// Applies a mistake of slots that all recurrences share: "row-slots", "first-column",
/// "next-column".
void change_slots(HostRows& rows, std::string_view mistake, std::int64_t tokens);

/// The mistake `from-zero`: every row starts from a zero state. Elements that no row may read (NaN)
/// stay.
template <class S, std::size_t Rank>
void start_from_zero(Array<S, Rank>& state) {
  for (S& s : state)
    if (!std::isnan(s)) s = S{0};
}

/// States whose memory [.., R, C] is read as [.., C, R]. The function is its own inverse.
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

/// Groups [T, G, N] expanded to `heads` heads by a mistake: head h takes group h % G
/// ("group-modulo"), or group 0.
template <class S>
Array<S, 3> regrouped(const Array<S, 3>& groups, std::int64_t heads, std::string_view mistake) {
  Array<S, 3> wide({groups.extent(0), heads, groups.extent(2)});
  for (std::int64_t t = 0; t < groups.extent(0); ++t)
    for (std::int64_t h = 0; h < heads; ++h)
      mapped(at(wide.view(), t, h)) =
          mapped(at(groups.view(), t, mistake == "group-modulo" ? h % groups.extent(1) : 0));
  return wide;
}

/// An array's elements as doubles.
template <class S, std::size_t Rank>
std::vector<double> as_values(const Array<S, Rank>& array) {
  return {array.begin(), array.end()};
}

/// The storage points of the yardstick: rounds where a kernel stores, if `rounded`.
StoragePoints storage_of(const Case& of, std::string_view state, bool rounded);

}  // namespace lockstep::judging
