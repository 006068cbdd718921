// The cases of mamba2_mixer_decode, its definition, and common mistakes of implementations.
#include <fmt/format.h>

#include "kernels/judge/layers/verification.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/recurrent/mamba2_mixer_verify.hpp"

namespace lockstep::judging::of_mamba2_mixer_decode {
namespace {

constexpr std::string_view kName = "mamba2_mixer_decode";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  std::int64_t H, G, P = 16, N = 128;
  Batch batch{};
  bool bias = true;
  bool apart = false;  ///< x and z lie in rows with holes, as parts of what in_proj leaves
  bool timed = false;
  std::int64_t inner() const { return H * P; }
  std::int64_t channels() const { return H * P + 2 * G * N; }
};

/// Adds the inputs of tokens: x, z and dt.
void add_tokens(Case& c, Draw& draw, const CaseSpec& w, std::int64_t T, ElementType type) {
  c.tensors.push_back(draw("x", type, {T, w.channels()}, {"token", "channel"}));
  c.tensors.push_back(draw("z", type, {T, w.H, w.P}, {"token", "head", "channel"}));
  c.tensors.push_back(draw("dt", type, {T, w.H}, {"token", "head"}));
  if (!w.apart) return;
  for (Tensor& one : c.tensors) one.strides[0] = w.inner() + w.channels() + w.H;
}

/// Adds the layer's weights. A is negative, and the norm's weights are around 1.
void add_weights(Case& c, Draw& draw, const CaseSpec& w, ElementType type) {
  c.tensors.push_back(draw("conv_weight", type, {w.channels(), kTaps}));
  for (const char* const name : {"A", "D", "dt_bias"})
    c.tensors.push_back(draw(name, ElementType::float32, {w.H}));
  for (Tensor& one : c.tensors)
    for (double& a : one.values)
      if (one.name == "A") a = -1.0 / 64 - std::abs(a);
  c.tensors.push_back(draw("norm_weight", type, {w.inner()}));
  for (double& a : c.tensors.back().values) a += 1;
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  Batch batch = w.batch;
  batch.seed = options.seed;
  if (w.timed) batch.lengths.assign(static_cast<std::size_t>(options.batch), 1);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  const ElementType type = options.activations;
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 167 + T * 7 + w.H)));
  Case c{.name = w.name, .timed = w.timed};
  add_tokens(c, draw, w, T, type);
  c.tensors.push_back(draw("conv_state", type, {slots, w.channels(), columns_of_windows(batch)},
                           {"slot", "channel", "column"}));
  c.tensors.push_back(
      draw("state", options.states, {slots, w.H, w.P, w.N}, {"slot", "head", "channel", "column"}));
  add_weights(c, draw, w, type);
  batch.describe(c);
  for (const std::size_t i : {0, 1, 2}) poison_padding(c.tensors[i], c);
  for (const std::size_t i : {3, 4}) c.tensors[i].role = Role::state;
  poison_windows(c.tensors[3], c);
  poison_unread(c.tensors[4], c);
  if (w.bias) c.tensors.push_back(draw("conv_bias", type, {w.channels()}));
  c.scalars.push_back({"eps", 0.25});  // so large that it changes a result
  c.tensors.push_back(Draw::output("out", type, {T, w.H, w.P}, {"token", "head", "channel"}));
  for (const std::string_view name : {"state", "conv_state"})
    c.bytes += c.tensor(name).bytes() / std::max<std::int64_t>(slots, 1) * (batch.rows() + T);
  for (const std::string_view name : {"x", "z", "dt", "conv_weight", "norm_weight", "out"})
    c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, {}, H={} G={} P={} N={}", counted(batch.rows(), "row"),
                        counted(T, "token"), w.H, w.G, w.P, w.N);
  return c;
}

std::vector<CaseSpec> decodes() {
  const std::vector<std::int64_t> nine(9, 1), four(4, 1);
  return {
      {.name = "decode", .H = 8, .G = 2, .batch = {.lengths = nine, .padding_rows = {2}}},
      {.name = "decode-64-wide-heads", .H = 4, .G = 1, .P = 64, .batch = {.lengths = four}},
      {.name = "decode-80-wide-heads", .H = 4, .G = 2, .P = 80, .batch = {.lengths = four}},
      {.name = "decode-128-wide-heads", .H = 2, .G = 1, .P = 128, .batch = {.lengths = four}},
      {.name = "decode-parts-of-rows",
       .H = 8,
       .G = 2,
       .batch = {.lengths = four, .padding_rows = {3}},
       .apart = true},
      {.name = "decode-no-bias", .H = 6, .G = 3, .batch = {.lengths = four}, .bias = false},
      {.name = "decode-in-order", .H = 4, .G = 2, .batch = {.lengths = four, .in_order = true}},
      {.name = "decode-ones", .H = 1, .G = 1, .batch = {.lengths = {1}}},
      {.name = "decode-many-rows", .H = 2, .G = 1, .batch = one_token_rows(130)},
      {.name = "decode-pad-slot-0",
       .H = 4,
       .G = 4,
       .batch = {.lengths = nine, .padding_rows = {1, 8}, .pad_slot_id = 0}},
      {.name = "verify", .H = 8, .G = 2, .batch = verified({4, 1, 2, 4, 1, 0, 3}, 4, {3, 4})},
      {.name = "verify-no-bias",
       .H = 4,
       .G = 1,
       .P = 64,
       .batch = verified({2, 1, 2, 2}, 2),
       .bias = false},
      {.name = "verify-eight",
       .H = 6,
       .G = 3,
       .batch = verified({8, 5, 7, 8}, 8, {1}),
       .apart = true},
      {.name = "verify-one-row", .H = 4, .G = 2, .P = 80, .batch = verified({3}, 4)},
  };
}

const CaseSpec kServed{.name = "serving", .H = 128, .G = 8, .P = 64, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-conv-bias", "without the convolution's bias"},
    {"reversed-taps", "with the convolution's taps in the other order"},
    {"window-stays", "with the windows left as they were"},
    {"vectors-stay", "with the windows of B and C left as they were"},
    {"window-at-0", "with the history at column 0 of a window, without num_accepted_tokens"},
    {"first-column", "with the state and the history of one accepted token"},
    {"next-column", "with the state and the history one accepted token further"},
    {"no-dt-bias", "without dt_bias"},
    {"no-D", "without D x"},
    {"no-decay", "without the decay"},
    {"log-A", "with -exp(A) for A (A taken for A_log)"},
    {"grow", "with A's sign turned around"},
    {"swapped-BC", "with B and C swapped"},
    {"last-state", "with the state after a row's last token for those after the others too"},
    {"no-z", "without the gate z"},
    {"z-sigmoid", "with sigmoid(z) for silu(z)"},
    {"z-after-norm", "with the gate z behind the norm"},
    {"one-norm", "with one norm over the channels of all groups"},
    {"head-norms", "with a norm of each head"},
    {"no-norm-weight", "without the norm's weight"},
    {"no-eps", "with the usual eps of the norm, 1e-5"},
    {"row-slots", "with row i on slot i, without state_indices"},
    {"from-zero", "with every row started from a zero state"},
};

template <class S>
struct Host : LayerHost<S> {
  Host(const Case& c, std::string_view mistake)
      : LayerHost<S>(c, mistake, S(1e-5)),
        dt(array_of<S, 2>(c, "dt")),
        A(array_of<S, 1>(c, "A")),
        D(array_of<S, 1>(c, "D")) {
    if (mistake == "swapped-BC") swap_vectors();
    if (mistake == "no-D") fill(D.view(), S{0});
    for (S& a : A) {
      if (mistake == "no-decay") a = S{0};
      if (mistake == "log-A") a = -std::exp(a);
      if (mistake == "grow") a = -a;
    }
  }

  void swap_vectors() {
    const std::int64_t inner = this->norm_weight.extent(0);
    const std::int64_t width = (this->x.extent(1) - inner) / 2;
    for (std::int64_t i = inner; i < inner + width; ++i) {
      for (std::int64_t t = 0; t < this->x.extent(0); ++t)
        std::swap(this->x(t, i), this->x(t, i + width));
      for (std::int64_t k = 0; k < this->weight.extent(1); ++k)
        std::swap(this->weight(i, k), this->weight(i + width, k));
      if (this->bias) std::swap((*this->bias)(i), (*this->bias)(i + width));
      swap_windows(i, i + width);
    }
  }
  void swap_windows(std::int64_t a, std::int64_t b) {
    for (std::int64_t slot = 0; slot < this->window.extent(0); ++slot)
      for (std::int64_t k = 0; k < this->window.extent(2); ++k)
        std::swap(this->window(slot, a, k), this->window(slot, b, k));
  }

  reference::Mamba2MixerDecode<S> inputs(const Case& c, bool rounded) const {
    return this->with_inputs(reference::Mamba2MixerDecode<S>{.dt = dt, .A = A, .D = D}, c, rounded);
  }

  Array<S, 2> dt;
  Array<S, 1> A, D;
};

/// Mistakes inside of the layer, which is then run as convolution, update and norm.
bool is_inside(std::string_view mistake) {
  for (const std::string_view one :
       {"window-at-0", "z-sigmoid", "z-after-norm", "one-norm", "head-norms"})
    if (mistake == one) return true;
  return false;
}

/// The layer as convolution, update and norm, with a mistake inside.
template <class S>
void run_inside(Host<S>& host, const Case& c, std::string_view mistake, Array<S, 3>& out) {
  reference::Mamba2MixerDecode<S> in = host.inputs(c, false);
  const std::int64_t T = host.x.extent(0), channels = host.x.extent(1);
  const std::int64_t H = host.state.extent(1), P = host.state.extent(2), N = host.state.extent(3);
  const std::int64_t inner = H * P, G = (channels - inner) / (2 * N);
  const Array<S, 2> mixed = convolved<S>(in, host.rows, mistake, host.window);
  const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
    return make_view<const S>(mixed.data() + first, Shape<3>{T, count, width},
                              Shape<3>{channels, width, 1});
  };
  Array<S, 3> y(out.shape());
  reference::selective_state_update<S>(
      {.x = heads(0, H, P),
       .dt = repeat(in.dt, P),
       .A = repeat(repeat(in.A, P), N),
       .B = heads(inner, G, N),
       .C = heads(inner + G * N, G, N),
       .D = repeat(in.D, P),
       .dt_bias = repeat(in.dt_bias, P),
       .dt_softplus = true,
       .rows = {.tokens = T, .query_start_loc = host.rows.query_start_loc(), .slots = in.slots}},
      host.state.view(), y.view());
  in.slots = {};  // padding is zeroed here
  reference::mixer_norm<S>(
      in, y, T,
      mistake == "z-after-norm" ? reference::GateOrder::after_norm
                                : reference::GateOrder::before_norm,
      mistake == "z-sigmoid" ? reference::Gate::sigmoid : reference::Gate::silu,
      mistake == "one-norm"     ? 1
      : mistake == "head-norms" ? H
                                : G,
      out.view());
  for (std::int64_t t = 0; t < T; ++t)
    if (c.tokens[static_cast<std::size_t>(t)].padding) fill(at(out.view(), t), S{0});
}

/// Mistakes in what is left in the windows and the states.
template <class S>
void change_results(Host<S>& host, const Case& c, std::string_view mistake,
                    const Array<S, 3>& window) {
  const std::int64_t inner = host.norm_weight.extent(0);
  const std::int64_t width = (host.x.extent(1) - inner) / 2;
  if (mistake == "swapped-BC")
    for (std::int64_t i = inner; i < inner + width; ++i) host.swap_windows(i, i + width);
  if (mistake == "window-stays") host.window = window;
  if (mistake == "vectors-stay")
    for_each_element(host.window.view(), [&](const auto& i, S& w) {
      if (i[1] >= inner) w = window(i[0], i[1], i[2]);
    });
  if (mistake == "last-state") leave_last_states(host.state, host.rows, c);
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded_stores) {
  Host<S> host(c, mistake);
  const Array<S, 3> before = host.window;
  const reference::Mamba2MixerDecode<S> in = host.inputs(c, rounded_stores);
  require(!host.rows.table || host.rows.starts, "a table of slots has rows of several tokens");
  Array<S, 3> out(host.z.shape(), S{0});
  if (is_inside(mistake))
    run_inside(host, c, mistake, out);
  else if (host.rows.starts)
    reference::mamba2_mixer_verify<S>(in, *host.rows.query_start_loc(), host.window.view(),
                                      host.state.view(), out.view());
  else
    reference::mamba2_mixer_decode<S>(in, host.window.view(), host.state.view(), out.view());
  change_results(host, c, mistake, before);
  return host.answer(out);
}

const JudgedKernel kOperation{
    .name = kName,
    .summary =
        "a step of a Mamba2 layer between its projections, and its verification: 19 cases, 23 "
        "known mistakes",
    .positional = {"x", "z", "dt", "conv_state", "state", "conv_weight", "A", "D", "dt_bias",
                   "norm_weight"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(
              planned<CaseSpec>({decodes(), listed_and_in_order(kServed)}, make),
              planned<CaseSpec>(
                  {{{.name = "rows-65537", .H = 1, .G = 1, .batch = one_token_rows(kWideRows)},
                    {.name = "decode-high-slots",
                     .H = 1,
                     .G = 1,
                     .N = 64,
                     .batch = {.lengths = {1, 1, 1}, .padding_rows = {1}, .first_slot = 33000}}}},
                  make),
              "decode");
        },
    .row_elements = kServed.H * kServed.P * kServed.N,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_mamba2_mixer_decode
