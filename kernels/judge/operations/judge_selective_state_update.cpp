// The cases of selective_state_update, its definition, and the mistakes that people make with it.
#include <fmt/format.h>

#include "kernels/judge/operation.hpp"
#include "reference/base/mix.hpp"
#include "reference/recurrent/mamba2.hpp"

namespace lockstep::judging {
namespace {

constexpr std::string_view kName = "selective_state_update";

// --- Cases ---------------------------------------------------------------------------------------

enum class Layout { plain, n_first, strided };

struct Wanted {
  std::string name;
  std::int64_t H, G, P, N;
  Batch batch{};
  bool dt_per_channel = false;  ///< dt, A, D and dt_bias of [H, P] and [H, P, N]: Mamba1
  bool D = true, z = false, dt_bias = true, softplus = true;
  bool limits = false;  ///< dt_min and dt_max
  Layout layout = Layout::plain;
  bool snapshots = false;
  bool timed = false;
};

void add_inputs(Case& c, Draw& draw, const Wanted& w, std::int64_t T, ElementType type) {
  const Extents tokens = w.dt_per_channel ? Extents{T, w.H, w.P} : Extents{T, w.H};
  const Extents decay = w.dt_per_channel ? Extents{w.H, w.P, w.N} : Extents{w.H};
  c.tensors.push_back(draw("x", type, {T, w.H, w.P}, {"token", "head", "channel"}));
  c.tensors.push_back(draw("dt", type, tokens, {"token", "head", "channel"}));
  if (!w.softplus)
    for (double& x : c.tensors.back().values) x = std::abs(x);
  c.tensors.push_back(draw("A", ElementType::float32, decay));
  for (double& x : c.tensors.back().values) x = -1.0 / 64 - std::abs(x);
  c.tensors.push_back(draw("B", type, {T, w.G, w.N}, {"token", "group", "column"}));
  c.tensors.push_back(draw("C", type, {T, w.G, w.N}, {"token", "group", "column"}));
}

void add_options(Case& c, Draw& draw, const Wanted& w, std::int64_t T, ElementType type) {
  const Extents heads = w.dt_per_channel ? Extents{w.H, w.P} : Extents{w.H};
  if (w.D) c.tensors.push_back(draw("D", ElementType::float32, heads));
  if (w.z) {
    Tensor z = draw("z", type, {T, w.H, w.P}, {"token", "head", "channel"});
    poison_padding(z, c);
    c.tensors.push_back(std::move(z));
  }
  if (w.dt_bias) c.tensors.push_back(draw("dt_bias", ElementType::float32, heads));
  if (w.softplus) c.scalars.push_back({"dt_softplus", true});
  if (w.limits) {
    c.scalars.push_back({"dt_min", 0.5});
    c.scalars.push_back({"dt_max", 0.875});
  }
}

Case make(const Wanted& w, const CaseOptions& options) {
  const Batch batch = rows_of(w, options);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 173 + T * 5 + w.N)));
  Case c{.name = w.name, .heads_per_group = w.H / w.G, .timed = w.timed};
  const std::vector<std::string> axes{"slot", "head", "channel", "column"};
  Tensor state = draw("state", options.states, {slots, w.H, w.P, w.N}, axes);
  state.role = Role::state;
  if (w.layout == Layout::n_first) swap_last_two(state);
  if (w.layout == Layout::strided) spread(state, 0, 160);
  c.tensors.push_back(std::move(state));
  add_inputs(c, draw, w, T, options.activations);
  if (w.layout == Layout::strided)  // x, B and C side by side in one tensor of a token
    for (const std::size_t i : {1, 4, 5}) c.tensors[i].strides[0] = w.H * w.P + 2 * w.G * w.N;
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
  c.about =
      fmt::format("{} rows, {} tokens, H={} G={} P={} N={}", batch.rows(), T, w.H, w.G, w.P, w.N);
  return c;
}

/// Every kind of row in every layout of the state.
std::vector<Wanted> every_layout() {
  const std::vector<std::pair<std::string, Layout>> layouts{
      {"", Layout::plain}, {"-n-first", Layout::n_first}, {"-strided", Layout::strided}};
  std::vector<Wanted> all;
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

std::vector<Wanted> other_decodes() {
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
      {.name = "decode-pad-slot-0",
       .H = 8,
       .G = 2,
       .P = 64,
       .N = 128,
       .batch = {.lengths = nine, .padding_rows = {1, 8}, .pad_slot_id = 0}},
  };
}

const Wanted kServed{.name = "serving", .H = 128, .G = 8, .P = 64, .N = 128, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-softplus", "without the softplus of dt"},
    {"always-softplus", "with a softplus of dt that was not asked for"},
    {"no-dt-bias", "without dt_bias"},
    {"bias-after", "with dt_bias added behind the softplus"},
    {"no-limits", "without dt_min and dt_max"},
    {"no-D", "without D x"},
    {"no-z", "without the gate z"},
    {"z-no-silu", "with z as it came, without its silu"},
    {"z-sigmoid", "with sigmoid(z) for silu(z)"},
    {"z-before-D", "with the gate z applied before D x instead of behind it"},
    {"no-decay", "without the decay"},
    {"decay-after", "with the decay applied behind the update instead of before it"},
    {"log-A", "with -exp(A) for A (A taken for A_log)"},
    {"grow", "with A's sign turned around"},
    {"no-dt-on-B", "without dt in the update (B x for dt B x)"},
    {"swapped-BC", "with B and C swapped"},
    {"out-before", "with the output read before the state's update"},
    {"group-modulo", "with head h on group h % G instead of h // (H / G)"},
    {"first-group", "with every head on group 0"},
    {"transposed", "with the state transposed ([N, P] for [P, N])"},
    {"row-slots", "with row i on slot i, without state_indices"},
    {"first-column", "with the first column of the table read, without num_accepted_tokens"},
    {"next-column", "with num_accepted_tokens taken for the column instead of the count"},
    {"from-zero", "with every row started from a zero state"},
    {"no-running-state", "with every token of a row started from the row's old state"},
};

/// [H] or [T, H] as the wider shape.
template <class S, std::size_t Rank>
Array<S, Rank> widened(const Case& c, std::string_view name, const Shape<Rank>& shape) {
  const Tensor& tensor = c.tensor(name);
  Array<S, Rank> wide(shape);
  std::int64_t inner = 1;
  for (std::size_t i = tensor.extents.size(); i < Rank; ++i) inner *= shape[i];
  for (std::int64_t i = 0; i < wide.size(); ++i)
    wide.data()[i] = static_cast<S>(tensor.values[static_cast<std::size_t>(i / inner)]);
  return wide;
}

template <class S>
struct Host {
  Host(const Case& c, std::string_view mistake)
      : rows(c),
        x(array_of<S, 3>(c, "x")),
        B(array_of<S, 3>(c, mistake == "swapped-BC" ? "C" : "B")),
        C(array_of<S, 3>(c, mistake == "swapped-BC" ? "B" : "C")),
        state(array_of<S, 4>(c, "state")) {
    const std::int64_t H = x.extent(1), P = x.extent(2), N = B.extent(2);
    dt = widened<S, 3>(c, "dt", x.shape());
    A = widened<S, 3>(c, "A", {H, P, N});
    if (c.find("D") && mistake != "no-D") D = widened<S, 2>(c, "D", {H, P});
    if (c.find("dt_bias") && mistake != "no-dt-bias") bias = widened<S, 2>(c, "dt_bias", {H, P});
    if (c.find("z") && mistake != "no-z") z = array_of<S, 3>(c, "z");
    for (S& a : A) {
      if (mistake == "no-decay") a = S{0};
      if (mistake == "log-A") a = -std::exp(a);
      if (mistake == "grow") a = -a;
    }
    if (mistake == "group-modulo" || mistake == "first-group")
      B = regrouped(B, H, mistake), C = regrouped(C, H, mistake);
    softplus = (c.flag("dt_softplus") && mistake != "no-softplus") || mistake == "always-softplus";
    if (mistake != "no-limits" && c.number("dt_min")) dt_min = static_cast<S>(*c.number("dt_min"));
    if (mistake != "no-limits" && c.number("dt_max")) dt_max = static_cast<S>(*c.number("dt_max"));
    if (mistake == "bias-after" && bias && softplus) {
      for (std::int64_t t = 0; t < x.extent(0); ++t)
        for (std::int64_t h = 0; h < H; ++h)
          for (std::int64_t p = 0; p < P; ++p)
            dt(t, h, p) = reference::softplus(dt(t, h, p)) + (*bias)(h, p);
      softplus = false;
      bias.reset();
    }
  }

  reference::Mamba2Inputs<S> inputs(const Case& c, bool rounded) const {
    reference::Mamba2Inputs<S> in{.x = x,
                                  .dt = dt,
                                  .A = A,
                                  .B = B,
                                  .C = C,
                                  .dt_softplus = softplus,
                                  .dt_min = dt_min,
                                  .dt_max = dt_max,
                                  .rows = {.tokens = x.extent(0),
                                           .query_start_loc = rows.query_start_loc(),
                                           .slots = rows.slots(),
                                           .storage = storage_of(c, "state", rounded)}};
    if (D) in.D = D->view();
    if (z) in.z = z->view();
    if (bias) in.dt_bias = bias->view();
    return in;
  }

  HostRows rows;
  Array<S, 3> x, dt, A, B, C;
  Array<S, 4> state;
  std::optional<Array<S, 2>> D, bias;
  std::optional<Array<S, 3>> z;
  std::optional<S> dt_min, dt_max;
  bool softplus = false;
};

template <class S>
S gated(std::string_view mistake, S y, S skip, S z) {
  if (mistake == "z-no-silu") return (y + skip) * z;
  if (mistake == "z-sigmoid") return (y + skip) * reference::sigmoid(z);
  if (mistake == "z-before-D") return y * reference::silu(z) + skip;
  return (y + skip) * reference::silu(z);
}

/// A token as the mistakes of order and of the gate have it.
template <class S>
void wrong_step(std::string_view mistake, const reference::Mamba2Inputs<S>& in, std::int64_t t,
                std::int64_t h, Matrix<S>& state, const TensorView<S, 3>& out) {
  const std::int64_t g = reference::mamba2_detail::group_of(in, h);
  const Vector<S> B = as_vector(at(in.B, t, g)), C = as_vector(at(in.C, t, g));
  for (std::int64_t p = 0; p < state.rows(); ++p) {
    const S dt = reference::mamba2_detail::time_step(in, t, h, p), x = in.x(t, h, p);
    const Vector<S> decay = (as_vector(at(in.A, h, p)) * dt).array().exp();
    const Vector<S> old = state.row(p).transpose();
    const Vector<S> added = B * (mistake == "no-dt-on-B" ? x : dt * x);
    const Vector<S> next = mistake == "decay-after" ? Vector<S>((old + added).cwiseProduct(decay))
                                                    : Vector<S>(old.cwiseProduct(decay) + added);
    state.row(p) = next.transpose();
    const S y = (mistake == "out-before" ? old : next).dot(C);
    const S skip = in.D ? (*in.D)(h, p) * x : S{0};
    out(t, h, p) = rounded(in.z ? gated(mistake, y, skip, (*in.z)(t, h, p)) : y + skip,
                           in.rows.storage.output);
  }
}

bool is_step_mistake(std::string_view mistake) {
  for (const std::string_view one :
       {"z-no-silu", "z-sigmoid", "z-before-D", "decay-after", "no-dt-on-B", "out-before"})
    if (mistake == one) return true;
  return false;
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded) {
  Host<S> host(c, mistake);
  change_slots(host.rows, mistake, host.x.extent(0));
  if (mistake == "transposed") host.state = as_if_turned(host.state);
  if (mistake == "from-zero")
    for (S& x : host.state)
      if (!std::isnan(x)) x = S{0};
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
    .summary = "decode and verification of Mamba2 (and Mamba1): 32 cases, 25 known mistakes",
    .positional = {"state", "x", "dt", "A", "B", "C"},
    .default_types = "bfloat16/float32",
    .plans = planned<Wanted>({every_layout(), other_decodes(), listed_and_in_order(kServed)}, make),
    .row_elements = kServed.H * kServed.P * kServed.N,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging
