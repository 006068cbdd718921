// Shared by the judged operations of Mamba2: the inputs of their cases, and the inputs of their
// definitions with the mistakes that both can have.
#pragma once

#include "kernels/judge/operation.hpp"
#include "reference/recurrent/mamba2.hpp"

namespace lockstep::judging::mamba2 {

enum class Layout { plain, n_first, strided };

template <class CaseSpec>
void add_state(Case& c, Draw& draw, const CaseSpec& w, std::int64_t slots, ElementType type) {
  Tensor state = draw("state", type, {slots, w.H, w.P, w.N}, {"slot", "head", "channel", "column"});
  state.role = Role::state;
  if (w.layout == Layout::n_first) swap_last_two(state);
  if (w.layout == Layout::strided) spread(state, 0, 160);
  c.tensors.push_back(std::move(state));
}

/// Adds x, dt, A, B and C to a case.
template <class CaseSpec>
void add_inputs(Case& c, Draw& draw, const CaseSpec& w, std::int64_t T, ElementType type) {
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
  if (w.layout == Layout::strided)  // a token's x, B and C lie side by side
    for (Tensor& one : c.tensors)
      if (one.name == "x" || one.name == "B" || one.name == "C")
        one.strides[0] = w.H * w.P + 2 * w.G * w.N;
}

/// Adds D, z, dt_bias and the options of dt; called after the batch is described.
template <class CaseSpec>
void add_options(Case& c, Draw& draw, const CaseSpec& w, std::int64_t T, ElementType type) {
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
    c.scalars.push_back({"dt_min", 0.25});  // time steps range from 0.02
    c.scalars.push_back({"dt_max", 0.5});   // to at least 0.69, so both limits bind
  }
}

inline const std::vector<Mistake> kSharedMistakes{
    {"no-softplus", "without the softplus of dt"},
    {"always-softplus", "with a softplus of dt that was not asked for"},
    {"no-dt-bias", "without dt_bias"},
    {"bias-after", "with dt_bias added after the softplus"},
    {"no-limits", "without dt_min and dt_max"},
    {"no-dt-min", "without dt_min"},
    {"no-dt-max", "without dt_max"},
    {"no-D", "without D x"},
    {"no-z", "without the gate z"},
    {"z-no-silu", "with z as it came, without its silu"},
    {"z-sigmoid", "with sigmoid(z) for silu(z)"},
    {"z-before-D", "with the gate z applied before D x instead of after it"},
    {"no-decay", "without the decay"},
    {"decay-after", "with the decay applied after the update instead of before it"},
    {"log-A", "with -exp(A) for A (A taken for A_log)"},
    {"grow", "with A's sign turned around"},
    {"no-dt-on-B", "without dt in the update (B x for dt B x)"},
    {"swapped-BC", "with B and C swapped"},
    {"out-before", "with the output read before the state's update"},
    {"group-modulo", "with head h on group h % G instead of h // (H / G)"},
    {"first-group", "with every head on group 0"},
    {"transposed", "with the state transposed ([N, P] for [P, N])"},
    {"row-slots", "with row i on slot i, without state_indices"},
    {"from-zero", "with every row started from a zero state"},
};
/// The shared mistakes, followed by `more`.
inline std::vector<Mistake> with_shared(std::vector<Mistake> more) {
  more.insert(more.begin(), kSharedMistakes.begin(), kSharedMistakes.end());
  return more;
}

/// The tensor `name`, [H] or [T, H], expanded to `shape`.
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
    const auto limit = [&](const char* name, std::string_view without) -> std::optional<S> {
      const auto given = c.number(name);
      if (!given || mistake == "no-limits" || mistake == without) return std::nullopt;
      return static_cast<S>(*given);
    };
    dt_min = limit("dt_min", "no-dt-min");
    dt_max = limit("dt_max", "no-dt-max");
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

/// One number per head, as chunks and rings want them: of stride 0 along the other dimensions.
template <class S>
struct HeadHost : Host<S> {
  HeadHost(const Case& c, std::string_view mistake)
      : Host<S>(c, mistake),
        dt_of_head({this->x.extent(0), this->x.extent(1)}),
        a_of_head(Shape<1>{this->x.extent(1)}) {
    const std::int64_t T = dt_of_head.extent(0), H = dt_of_head.extent(1);
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t h = 0; h < H; ++h) dt_of_head(t, h) = this->dt(t, h, 0);
    for (std::int64_t h = 0; h < H; ++h) a_of_head(h) = this->A(h, 0, 0);
    if (!this->bias) return;
    bias_of_head.emplace(Shape<1>{H});
    for (std::int64_t h = 0; h < H; ++h) (*bias_of_head)(h) = (*this->bias)(h, 0);
  }

  reference::Mamba2Inputs<S> inputs(const Case& c, bool rounded) const {
    const std::int64_t P = this->x.extent(2), N = this->B.extent(2);
    reference::Mamba2Inputs<S> in = Host<S>::inputs(c, rounded);
    in.dt = repeat(dt_of_head.view(), P);
    in.A = repeat(repeat(a_of_head.view(), P), N);
    if (bias_of_head) in.dt_bias = repeat(bias_of_head->view(), P);
    return in;
  }

  Array<S, 2> dt_of_head;
  Array<S, 1> a_of_head;
  std::optional<Array<S, 1>> bias_of_head;
};

template <class S>
S gated(std::string_view mistake, S y, S skip, S z) {
  if (mistake == "z-no-silu") return (y + skip) * z;
  if (mistake == "z-sigmoid") return (y + skip) * reference::sigmoid(z);
  if (mistake == "z-before-D") return y * reference::silu(z) + skip;
  return (y + skip) * reference::silu(z);
}

/// One token with a mistake of order or of the gate.
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

inline bool is_step_mistake(std::string_view mistake) {
  for (const std::string_view one :
       {"z-no-silu", "z-sigmoid", "z-before-D", "decay-after", "no-dt-on-B", "out-before"})
    if (mistake == one) return true;
  return false;
}

}  // namespace lockstep::judging::mamba2
