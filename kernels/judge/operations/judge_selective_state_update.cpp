// The cases of selective_state_update, its definition, and common mistakes of implementations.
#include <fmt/format.h>

#include "kernels/judge/operations/mamba2.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_selective_state_update {
namespace {

using namespace mamba2;

constexpr std::string_view kName = "selective_state_update";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  std::int64_t H, G, P, N;
  Batch batch{};
  bool dt_per_channel = false;  ///< dt, A, D and dt_bias differ within a head, as in Mamba1
  bool D = true, z = false, dt_bias = true, softplus = true;
  bool limits = false;  ///< dt_min and dt_max are given
  Layout layout = Layout::plain;
  bool snapshots = false;
  bool steep = false;  ///< time steps far from 0, where softplus is 0 or linear
  bool timed = false;
};

Case make(const CaseSpec& w, const CaseOptions& options) {
  const Batch batch = rows_of(w, options);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 173 + T * 5 + w.N)));
  Case c{.name = w.name, .heads_per_group = w.H / w.G, .timed = w.timed};
  add_state(c, draw, w, slots, options.states);
  add_inputs(c, draw, w, T, options.activations);
  if (w.steep)
    for (double& x : c.tensors[2].values) x *= 128;
  batch.describe(c);
  add_options(c, draw, w, T, options.activations);
  for (const std::size_t i : {1, 2, 4, 5}) poison_padding(c.tensors[i], c);
  poison_unread(c.tensors[0], c);
  if (w.snapshots)
    c.tensors.push_back(Draw::states("snapshots", options.states, {T, w.H, w.P, w.N},
                                     {"token", "head", "channel", "column"}));
  c.tensors.push_back(
      Draw::output("out", options.activations, {T, w.H, w.P}, {"token", "head", "channel"}));
  c.bytes = 2 * c.tensors[0].bytes() / std::max<std::int64_t>(slots, 1) * batch.rows();
  for (const std::string_view name : {"x", "dt", "B", "C", "out"})
    c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, {}, H={} G={} P={} N={}", counted(batch.rows(), "row"),
                        counted(T, "token"), w.H, w.G, w.P, w.N);
  return c;
}

/// Cases of every kind of row in every layout of the state.
std::vector<CaseSpec> every_layout() {
  const std::vector<std::pair<std::string, Layout>> layouts{
      {"", Layout::plain}, {"-n-first", Layout::n_first}, {"-strided", Layout::strided}};
  std::vector<CaseSpec> all;
  for (const auto& [suffix, layout] : layouts)
    for (const RowKind& kind : recurrence_row_kinds())
      all.push_back({.name = kind.name + suffix,
                     .H = 8,
                     .G = 2,
                     .P = 64,
                     .N = 128,
                     .batch = kind.batch,
                     .z = kind.name == "packed-rows",
                     .layout = layout,
                     .snapshots = kind.snapshots});
  return all;
}

std::vector<CaseSpec> other_decodes() {
  const std::vector<std::int64_t> nine(9, 1), four(4, 1);
  return {
      {.name = "decode-no-padding",
       .H = 8,
       .G = 2,
       .P = 64,
       .N = 64,
       .batch = {.lengths = {1, 1, 1}},
       .z = true},
      {.name = "decode-bare",
       .H = 4,
       .G = 4,
       .P = 16,
       .N = 65,
       .batch = {.lengths = nine, .padding_rows = {0}},
       .D = false,
       .dt_bias = false,
       .softplus = false},
      {.name = "decode-limits",
       .H = 6,
       .G = 3,
       .P = 63,
       .N = 17,
       .batch = {.lengths = four},
       .z = true,
       .limits = true},
      {.name = "decode-ones", .H = 3, .G = 1, .P = 1, .N = 1, .batch = {.lengths = {1}}, .z = true},
      {.name = "decode-mamba1",
       .H = 2,
       .G = 1,
       .P = 65,
       .N = 16,
       .batch = {.lengths = four, .padding_rows = {1}},
       .dt_per_channel = true},
      {.name = "decode-steep-steps",
       .H = 8,
       .G = 2,
       .P = 64,
       .N = 128,
       .batch = {.lengths = nine},
       .steep = true},
      {.name = "decode-many-rows", .H = 2, .G = 1, .P = 8, .N = 16, .batch = one_token_rows(130)},
      {.name = "decode-high-slots",
       .H = 1,
       .G = 1,
       .P = 4,
       .N = 4,
       .batch = {.lengths = {1, 1, 1}, .padding_rows = {1}, .first_slot = 33000}},
      {.name = "decode-pad-slot-0",
       .H = 8,
       .G = 2,
       .P = 64,
       .N = 128,
       .batch = {.lengths = nine, .padding_rows = {1, 8}, .pad_slot_id = 0}},
  };
}

std::vector<CaseSpec> wide_rows() {
  return {
      {.name = "rows-65537", .H = 1, .G = 1, .P = 8, .N = 16, .batch = one_token_rows(kWideRows)}};
}

const CaseSpec kServed{.name = "serving", .H = 128, .G = 8, .P = 64, .N = 128, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes = with_shared({
    {"first-column", "with the first column of the table read, without num_accepted_tokens"},
    {"next-column", "with num_accepted_tokens taken for the column instead of the count"},
    {"no-running-state", "with every token of a row started from the row's old state"},
});

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded) {
  Host<S> host(c, mistake);
  change_slots(host.rows, mistake, host.x.extent(0));
  if (mistake == "transposed") host.state = as_if_turned(host.state);
  if (mistake == "from-zero") start_from_zero(host.state);
  const reference::Mamba2Inputs<S> in = host.inputs(c, rounded);
  Array<S, 3> out(host.x.shape(), S{0});
  std::optional<Array<S, 4>> snapshots = maybe_array_of<S, 4>(c, "snapshots");
  const std::optional<TensorView<S, 4>> shots = maybe_view(snapshots);
  if (!is_step_mistake(mistake) && mistake != "no-running-state") {
    reference::selective_state_update<S>(in, host.state.view(), out.view(), host.rows.parents(),
                                         shots);
  } else {
    const Array<S, 4> old = host.state;
    run_update(
        in.rows, host.state.view(), host.rows.parents(), shots,
        [&](std::int64_t t, std::int64_t h, Matrix<S>& s) {
          if (mistake == "no-running-state")
            s = as_matrix(at(old.view(),
                             source_slot(in.rows.slots, c.tokens[static_cast<std::size_t>(t)].row,
                                         old.extent(0)),
                             h));
          wrong_step(mistake, in, t, h, s, out.view());
        });
  }
  if (mistake == "transposed") host.state = turned_back(host.state);
  Answer answer{{"out", as_values(out)}, {"state", as_values(host.state)}};
  if (snapshots) answer["snapshots"] = as_values(*snapshots);
  return answer;
}

const JudgedKernel kOperation{
    .name = kName,
    .summary = "decode and verification of Mamba2 (and Mamba1): 35 cases, 27 known mistakes",
    .positional = {"state", "x", "dt", "A", "B", "C"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(
              planned<CaseSpec>({every_layout(), other_decodes(), listed_and_in_order(kServed)},
                                make),
              planned<CaseSpec>({wide_rows()}, make), "decode");
        },
    .row_elements = kServed.H * kServed.P * kServed.N,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_selective_state_update
