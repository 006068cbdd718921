// Shared by the judged operations of the gated delta rule: the inputs of their cases, and the
// inputs of their definitions with the mistakes that both can have.
#pragma once

#include "kernels/judge/operation.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"

namespace lockstep::judging::gated_delta {

enum class Layout { v_major, k_major, strided };

struct Shapes {
  std::int64_t H, HV, K, V;
};

/// Adds q, k, v, g, beta and state as tensors 0 to 5 of a case, and with raw gates A_log and
/// dt_bias after them. In a strided layout a token's q, k and v lie side by side, as in the output
/// of a fused projection.
template <class CaseSpec>
void add_inputs(Case& c, Draw& draw, const CaseSpec& spec, std::int64_t T, std::int64_t slots,
                const CaseOptions& options) {
  const auto [H, HV, K, V] = spec.shapes;
  const ElementType type = options.activations;
  const ElementType gate = spec.raw_gates ? type : ElementType::float32;
  c.tensors.push_back(draw("q", type, {T, H, K}, {"token", "key head", "column"}));
  c.tensors.push_back(draw("k", type, {T, H, K}, {"token", "key head", "column"}));
  c.tensors.push_back(draw("v", type, {T, HV, V}, {"token", "value head", "value column"}));
  c.tensors.push_back(draw("g", gate, {T, HV}, {"token", "value head"}));
  c.tensors.push_back(draw("beta", gate, {T, HV}, {"token", "value head"}));
  if (!spec.raw_gates)
    for (const std::size_t i : {3, 4})
      for (double& x : c.tensors[i].values) x = i == 3 ? -std::abs(x) : std::abs(x);
  Tensor state = draw("state", options.states, {slots, HV, V, K},
                      {"slot", "value head", "value column", "key column"});
  state.role = Role::state;
  if (spec.layout == Layout::k_major) swap_last_two(state);
  if (spec.layout == Layout::strided) {
    spread(state, 0, 192);
    for (const std::size_t i : {0, 1, 2}) c.tensors[i].strides[0] = 2 * H * K + HV * V;
  }
  c.tensors.push_back(std::move(state));
  if (!spec.raw_gates) return;
  c.tensors.push_back(draw("A_log", ElementType::float32, {HV}, {"value head"}));
  c.tensors.push_back(draw("dt_bias", ElementType::float32, {HV}, {"value head"}));
}

/// A batch's tensors for the definition, changed if the mistake is one of the inputs.
template <class S>
struct Host {
  Host(const Case& c, std::string_view mistake)
      : rows(c),
        q(array_of<S, 3>(c, "q")),
        k(array_of<S, 3>(c, "k")),
        v(array_of<S, 3>(c, "v")),
        state(array_of<S, 4>(c, "state")),
        gates{array_of<S, 2>(c, "g"), array_of<S, 2>(c, "beta")},
        l2norm(c.flag("use_qk_l2norm")) {
    if (c.find("A_log") != nullptr) {
      Array<S, 1> A_log = array_of<S, 1>(c, "A_log"), bias = array_of<S, 1>(c, "dt_bias");
      if (mistake == "no-dt-bias") fill(bias.view(), S{0});
      if (mistake == "no-exp-a-log")
        for (S& x : A_log) x = std::log(std::abs(x));
      const Array<S, 2> a = gates.g, b = gates.beta;
      gates = reference::gated_delta_gates<S>(a.view(), b.view(), std::as_const(A_log).view(),
                                              std::as_const(bias).view());
      for (std::int64_t t = 0; t < a.extent(0); ++t)
        for (std::int64_t h = 0; h < a.extent(1); ++h) {
          if (mistake == "no-softplus") gates.g(t, h) = -std::exp(A_log(h)) * (a(t, h) + bias(h));
          if (mistake == "raw-beta") gates.beta(t, h) = b(t, h);
        }
      // A GPU's exp and log1p are off by a unit each, and exp(g) by |g| times as much: the host's
      // are exact to half a unit, so the yardstick's g is moved by one.
      if constexpr (std::is_same_v<S, float>)
        for (S& x : gates.g) x = std::nextafter(x, -std::numeric_limits<S>::infinity());
    }
    if (const auto given = c.number("scale")) scale = static_cast<S>(*given);
    change_gates(mistake);
    change_directions(mistake);
  }

  void change_gates(std::string_view mistake) {
    for (S& x : gates.beta) {
      if (mistake == "no-beta") x = S{1};
      if (mistake == "beta-twice") x *= x;
    }
    for (S& x : gates.g) {
      if (mistake == "no-decay") x = S{0};
      if (mistake == "grow") x = -x;
    }
  }

  void normalise(Array<S, 3>& x) {
    for (std::int64_t t = 0; t < x.extent(0); ++t)
      for (std::int64_t h = 0; h < x.extent(1); ++h)
        mapped(at(x.view(), t, h)) = reference::l2_normalised<S>(as_vector(at(x.view(), t, h)));
  }

  void change_directions(std::string_view mistake) {
    const S usual = S{1} / std::sqrt(static_cast<S>(q.extent(2)));
    if (mistake == "no-scale") scale = S{1};
    if (mistake == "scale-twice") scale = scale.value_or(usual) * scale.value_or(usual);
    if (mistake == "default-scale") scale.reset();
    if (mistake == "no-l2norm") l2norm = false;
    if (mistake == "always-l2norm") l2norm = true;
    if (l2norm && (mistake == "no-l2norm-q" || mistake == "no-l2norm-k")) {
      l2norm = false;
      normalise(mistake == "no-l2norm-q" ? k : q);
    }
    if (mistake == "group-modulo" || mistake == "first-key-head")
      q = regrouped(q, v.extent(1), mistake), k = regrouped(k, v.extent(1), mistake);
  }

  reference::GatedDeltaRuleInputs<S> inputs(const StoragePoints& storage) const {
    return {.q = q,
            .k = k,
            .v = v,
            .g = gates.g,
            .beta = gates.beta,
            .scale = scale,
            .use_qk_l2norm = l2norm,
            .rows = {.tokens = q.extent(0),
                     .query_start_loc = rows.query_start_loc(),
                     .slots = rows.slots(),
                     .storage = storage}};
  }

  HostRows rows;
  Array<S, 3> q, k, v;
  Array<S, 4> state;
  reference::GatedDeltaGates<S> gates;
  std::optional<S> scale;
  bool l2norm;
};

/// One token with a mistake of order.
template <class S>
void wrong_step(std::string_view mistake, const reference::GatedDeltaRuleInputs<S>& in,
                std::int64_t t, std::int64_t h, Matrix<S>& state, const TensorView<S, 3>& out) {
  using reference::gated_delta_detail::direction;
  const Vector<S> k = direction(in, in.k, t, h), v = as_vector(at(in.v, t, h));
  const Vector<S> q = direction(in, in.q, t, h) * reference::gated_delta_detail::scale_of(in);
  const S decay = std::exp(in.g(t, h)), beta = in.beta(t, h);
  const Matrix<S> before = state;
  if (mistake == "decay-after") {
    state += (beta * (v - before * k) * k.transpose()).eval();
    state *= decay;
  } else if (mistake == "read-undecayed") {
    state = decay * before + beta * (v - before * k) * k.transpose();
  } else if (mistake == "no-delta") {
    state = decay * before + beta * v * k.transpose();
  } else {
    state *= decay;
    state += (beta * (v - state * k) * k.transpose()).eval();
  }
  const Vector<S> o = mistake == "out-before" ? Vector<S>(before * q) : Vector<S>(state * q);
  mapped(at(out, t, h)) = rounded_each(o, in.rows.storage.output);
}

}  // namespace lockstep::judging::gated_delta
