// The cases of gated_delta_net_decode, its definition, and common mistakes of implementations.
#include <fmt/format.h>

#include "kernels/judge/layers/verification.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/recurrent/gated_delta_net_verify.hpp"

namespace lockstep::judging::of_gated_delta_net_decode {
namespace {

constexpr std::string_view kName = "gated_delta_net_decode";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  std::int64_t H, HV, width = 128;  ///< K and V
  Batch batch{};
  bool bias = false;
  bool apart = false;  ///< x and z lie in rows with holes, as parts of what a projection leaves
  bool timed = false;
  std::int64_t channels() const { return (2 * H + HV) * width; }
  /// Columns of a window: those of a token's history, and those of drafts.
  std::int64_t columns() const { return columns_of_windows(batch); }
};

void add_tokens(Case& c, Draw& draw, const CaseSpec& w, std::int64_t T, ElementType type) {
  c.tensors.push_back(draw("x", type, {T, w.channels()}, {"token", "channel"}));
  c.tensors.push_back(draw("z", type, {T, w.HV, w.width}, {"token", "value head", "value column"}));
  if (w.apart)
    for (Tensor& one : c.tensors) one.strides[0] = w.channels() + w.HV * w.width;
  for (const char* const name : {"a", "b"})
    c.tensors.push_back(draw(name, type, {T, w.HV}, {"token", "value head"}));
}

void add_weights(Case& c, Draw& draw, const CaseSpec& w, ElementType type) {
  c.tensors.push_back(draw("conv_weight", type, {w.channels(), kTaps}));
  for (const char* const name : {"A_log", "dt_bias"})
    c.tensors.push_back(draw(name, ElementType::float32, {w.HV}));
  c.tensors.push_back(draw("norm_weight", type, {w.width}));
  for (double& a : c.tensors.back().values) a += 1;
  if (w.bias) c.tensors.push_back(draw("conv_bias", type, {w.channels()}));
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  Batch batch = w.batch;
  batch.seed = options.seed;
  if (w.timed) batch.lengths.assign(static_cast<std::size_t>(options.batch), 1);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  const ElementType type = options.activations;
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 181 + T * 7 + w.HV)));
  Case c{.name = w.name, .heads_per_group = w.HV / w.H, .timed = w.timed};
  add_tokens(c, draw, w, T, type);
  c.tensors.push_back(
      draw("conv_state", type, {slots, w.channels(), w.columns()}, {"slot", "channel", "column"}));
  c.tensors.push_back(draw("state", options.states, {slots, w.HV, w.width, w.width},
                           {"slot", "value head", "value column", "key column"}));
  add_weights(c, draw, w, type);
  batch.describe(c);
  for (const std::size_t i : {0, 1, 2, 3}) poison_padding(c.tensors[i], c);
  for (const std::size_t i : {4, 5}) c.tensors[i].role = Role::state;
  poison_windows(c.tensors[4], c);
  poison_unread(c.tensors[5], c);
  c.scalars.push_back({"eps", 0.002});  // about the mean square of what is normed
  c.tensors.push_back(
      Draw::output("out", type, {T, w.HV, w.width}, {"token", "value head", "value column"}));
  c.bytes = c.tensor("state").bytes() / std::max<std::int64_t>(slots, 1) * (batch.rows() + T);
  for (const std::string_view name : {"x", "z", "conv_weight", "out"})
    c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, {}, H={} HV={} K=V={}", counted(batch.rows(), "row"),
                        counted(T, "token"), w.H, w.HV, w.width);
  return c;
}

std::vector<CaseSpec> decodes() {
  const std::vector<std::int64_t> nine(9, 1), four(4, 1);
  return {
      {.name = "decode", .H = 2, .HV = 4, .batch = {.lengths = nine, .padding_rows = {2}}},
      {.name = "decode-bias", .H = 1, .HV = 3, .batch = {.lengths = four}, .bias = true},
      {.name = "decode-parts-of-rows",
       .H = 2,
       .HV = 2,
       .batch = {.lengths = four, .padding_rows = {3}},
       .apart = true},
      {.name = "decode-in-order", .H = 1, .HV = 2, .batch = {.lengths = four, .in_order = true}},
      {.name = "decode-ones", .H = 1, .HV = 1, .batch = {.lengths = {1}}},
      {.name = "decode-pad-slot-0",
       .H = 1,
       .HV = 4,
       .batch = {.lengths = nine, .padding_rows = {1, 8}, .pad_slot_id = 0}},
      {.name = "verify", .H = 2, .HV = 4, .batch = verified({4, 1, 2, 4, 1, 0, 3}, 4, {3, 4})},
      {.name = "verify-bias", .H = 1, .HV = 2, .batch = verified({2, 1, 2, 2}, 2), .bias = true},
      {.name = "verify-eight",
       .H = 1,
       .HV = 3,
       .batch = verified({8, 5, 7, 8}, 8, {1}),
       .apart = true},
      {.name = "verify-one-row", .H = 2, .HV = 2, .batch = verified({3}, 4)},
  };
}

const CaseSpec kServed{.name = "serving", .H = 16, .HV = 32, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-conv-bias", "without the convolution's bias"},
    {"reversed-taps", "with the convolution's taps in the other order"},
    {"window-stays", "with the windows left as they were"},
    {"keys-stay", "with the windows of q and k left as they were"},
    {"window-at-0", "with the history at column 0 of a window, without num_accepted_tokens"},
    {"first-column", "with the state and the history of one accepted token"},
    {"next-column", "with the state and the history one accepted token further"},
    {"swapped-qk", "with q and k swapped"},
    {"no-l2norm", "without the L2 norm of q and k"},
    {"no-scale", "without the scale of q"},
    {"no-dt-bias", "without dt_bias"},
    {"no-decay", "without the decay"},
    {"raw-beta", "with b for sigmoid(b)"},
    {"last-state", "with the state after a row's last token for those after the others too"},
    {"no-z", "without the gate z"},
    {"z-sigmoid", "with sigmoid(z) for silu(z)"},
    {"z-before-norm", "with the gate z in front of the norm"},
    {"one-norm", "with one norm over the value heads of a token"},
    {"no-norm-weight", "without the norm's weight"},
    {"no-eps", "with the usual eps of the norm, 1e-6"},
    {"row-slots", "with row i on slot i, without state_indices"},
    {"from-zero", "with every row started from a zero state"},
};

template <class S>
struct Host : LayerHost<S> {
  Host(const Case& c, std::string_view mistake)
      : LayerHost<S>(c, mistake, S(1e-6)),
        a(array_of<S, 2>(c, "a")),
        b(array_of<S, 2>(c, "b")),
        A_log(array_of<S, 1>(c, "A_log")) {
    if (mistake == "no-decay") fill(A_log.view(), S(-1000));
  }

  std::int64_t keys() const {
    return (this->x.extent(1) - this->state.extent(1) * this->state.extent(2)) / 2;
  }

  reference::GatedDeltaNetDecode<S> inputs(const Case& c, bool rounded) const {
    return this->with_inputs(reference::GatedDeltaNetDecode<S>{.a = a, .b = b, .A_log = A_log}, c,
                             rounded);
  }

  Array<S, 2> a, b;
  Array<S, 1> A_log;
};

/// Mistakes inside of the layer, which is then run as convolution, rule and norm.
bool is_inside(std::string_view mistake) {
  for (const std::string_view one : {"window-at-0", "swapped-qk", "no-l2norm", "no-scale",
                                     "raw-beta", "z-sigmoid", "z-before-norm", "one-norm"})
    if (mistake == one) return true;
  return false;
}

template <class S>
void norm(const reference::GatedDeltaNetDecode<S>& in, const Array<S, 3>& o, const Case& c,
          std::string_view mistake, Array<S, 3>& out) {
  const std::int64_t HV = o.extent(1), V = o.extent(2);
  const bool one_norm = mistake == "one-norm";
  const Shape<2> shape = one_norm ? Shape<2>{1, HV * V} : Shape<2>{HV, V};
  Array<S, 1> weight(Shape<1>{shape[1]});
  for (std::int64_t i = 0; i < shape[1]; ++i) weight(i) = in.norm_weight(i % V);
  for (std::int64_t t = 0; t < o.extent(0); ++t) {
    if (c.tokens[static_cast<std::size_t>(t)].padding) continue;
    Array<S, 2> normed(shape);
    reference::gated_rms_norm<S>(
        make_view<const S>(&o(t, 0, 0), shape), make_view<const S>(&in.z(t, 0, 0), shape), weight,
        in.eps,
        mistake == "z-before-norm" ? reference::GateOrder::before_norm
                                   : reference::GateOrder::after_norm,
        1, normed, mistake == "z-sigmoid" ? reference::Gate::sigmoid : reference::Gate::silu);
    std::copy(normed.begin(), normed.end(), &out(t, 0, 0));
  }
}

/// The layer as convolution, rule and norm, with a mistake inside.
template <class S>
void run_inside(Host<S>& host, const Case& c, std::string_view mistake, Array<S, 3>& out) {
  const reference::GatedDeltaNetDecode<S> in = host.inputs(c, false);
  const std::int64_t T = host.x.extent(0), D = host.x.extent(1);
  const std::int64_t HV = host.state.extent(1), V = host.state.extent(2), K = host.state.extent(3);
  const std::int64_t keys = host.keys(), H = keys / K;
  const Array<S, 2> mixed = convolved<S>(in, host.rows, mistake, host.window);
  const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
    return make_view<const S>(mixed.data() + first, Shape<3>{T, count, width},
                              Shape<3>{D, width, 1});
  };
  reference::GatedDeltaGates<S> gates =
      reference::gated_delta_gates<S>(in.a, in.b, in.A_log, in.dt_bias);
  if (mistake == "raw-beta") gates.beta = host.b;
  const bool swapped = mistake == "swapped-qk";
  reference::GatedDeltaRuleInputs<S> rule{
      .q = heads(swapped ? keys : 0, H, K),
      .k = heads(swapped ? 0 : keys, H, K),
      .v = heads(2 * keys, HV, V),
      .g = gates.g,
      .beta = gates.beta,
      .use_qk_l2norm = mistake != "no-l2norm",
      .rows = {.tokens = T, .query_start_loc = host.rows.query_start_loc(), .slots = in.slots}};
  if (mistake == "no-scale") rule.scale = S{1};
  Array<S, 3> o(out.shape());
  reference::gated_delta_rule_update<S>(rule, host.state.view(), o.view());
  norm(in, o, c, mistake, out);
}

/// Mistakes in what is left in the windows and the states.
template <class S>
void change_results(Host<S>& host, const Case& c, std::string_view mistake,
                    const Array<S, 3>& window) {
  const std::int64_t keys = 2 * host.keys();
  if (mistake == "window-stays") host.window = window;
  if (mistake == "keys-stay")
    for_each_element(host.window.view(), [&](const auto& i, S& w) {
      if (i[1] < keys) w = window(i[0], i[1], i[2]);
    });
  if (mistake == "last-state") leave_last_states(host.state, host.rows, c);
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded_stores) {
  Host<S> host(c, mistake);
  const Array<S, 3> before = host.window;
  Array<S, 3> out(host.z.shape(), S{0});
  const reference::GatedDeltaNetDecode<S> in = host.inputs(c, rounded_stores);
  require(!host.rows.table || host.rows.starts, "a table of slots has rows of several tokens");
  if (is_inside(mistake))
    run_inside(host, c, mistake, out);
  else if (host.rows.starts)
    reference::gated_delta_net_verify<S>(in, *host.rows.query_start_loc(), host.window.view(),
                                         host.state.view(), out.view());
  else
    reference::gated_delta_net_decode<S>(in, host.window.view(), host.state.view(), out.view());
  change_results(host, c, mistake, before);
  return host.answer(out);
}

const JudgedKernel kOperation{
    .name = kName,
    .summary =
        "a step of a gated-delta-net layer between its projections, and its verification: "
        "14 cases, 22 known mistakes",
    .positional = {"x", "z", "a", "b", "conv_state", "state", "conv_weight", "conv_bias", "A_log",
                   "dt_bias", "norm_weight"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(planned<CaseSpec>({decodes(), listed_and_in_order(kServed)}, make),
                            planned<CaseSpec>({{{.name = "rows-65537",
                                                 .H = 1,
                                                 .HV = 1,
                                                 .width = 16,
                                                 .batch = one_token_rows(kWideRows)}}},
                                              make),
                            "decode");
        },
    .row_elements = kServed.HV * kServed.width * kServed.width,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_gated_delta_net_decode
