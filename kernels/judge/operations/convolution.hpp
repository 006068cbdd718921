// Shared by the judged operations of the short convolution: the tensors of their cases, and the
// inputs of their definitions with the mistakes that both can have.
#pragma once

#include <algorithm>

#include "kernels/judge/operation.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/tensors/array.hpp"

namespace lockstep::judging::convolution {

enum class Layout { channels_first, columns_first, strided };

/// Adds x, conv_state, weight and bias; in a strided case x is a part of a wider projection.
template <class CaseSpec>
void add_inputs(Case& c, Draw& draw, const CaseSpec& w, std::int64_t T, std::int64_t slots,
                const CaseOptions& options) {
  c.tensors.push_back(draw("x", options.activations, {T, w.D}, {"token", "channel"}));
  Tensor state =
      draw("conv_state", options.states, {slots, w.D, w.C}, {"slot", "channel", "column"});
  state.role = Role::state;
  if (w.layout == Layout::columns_first) swap_last_two(state);
  if (w.layout == Layout::strided) {
    spread(state, 0, 96);
    c.tensors[0].strides[0] += 2 * w.D;
  }
  c.tensors.push_back(std::move(state));
  c.tensors.push_back(draw("weight", options.activations, {w.D, w.W}, {"channel", "tap"}));
  if (w.bias) c.tensors.push_back(draw("bias", options.activations, {w.D}, {"channel"}));
}

inline const std::vector<Mistake> kSharedMistakes{
    {"no-bias", "without the bias"},
    {"no-silu", "without the activation"},
    {"always-silu", "with a silu that was not asked for"},
    {"sigmoid", "with a sigmoid for the silu"},
    {"silu-before-bias", "with the silu in front of the bias instead of after it"},
    {"weights-reversed", "with the taps of the weight reversed (a true convolution)"},
    {"history-reversed", "with the state's columns taken from newest to oldest"},
    {"oldest-columns", "with the state's first W - 1 columns taken for the history"},
    {"state-not-updated", "with the state left as it was"},
    {"state-shifted-twice", "with the state shifted one column too far"},
    {"row-slots", "with row i on slot i, without state_indices"},
    {"from-zero", "with every row started from a zero state"},
};

/// The shared mistakes, followed by an operation's own.
inline std::vector<Mistake> with_shared(std::vector<Mistake> own) {
  own.insert(own.begin(), kSharedMistakes.begin(), kSharedMistakes.end());
  return own;
}

template <class S>
struct Host {
  explicit Host(const Case& c)
      : rows(c),
        x(array_of<S, 2>(c, "x")),
        weight(array_of<S, 2>(c, "weight")),
        state(array_of<S, 3>(c, "conv_state")),
        bias(maybe_array_of<S, 1>(c, "bias")),
        silu(c.text("activation") == "silu") {}

  reference::CausalConv1dInputs<S> inputs(const Case& c, bool rounded) const {
    reference::CausalConv1dInputs<S> in{
        .x = x,
        .weight = weight,
        .query_start_loc = rows.query_start_loc(),
        .slots = rows.slots(),
        .activation = silu ? reference::Activation::silu : reference::Activation::none,
        .storage = storage_of(c, "conv_state", rounded)};
    if (bias) in.bias = bias->view();
    return in;
  }

  HostRows rows;
  Array<S, 2> x, weight;
  Array<S, 3> state;
  std::optional<Array<S, 1>> bias;
  bool silu;
};

template <class S>
void reverse_columns(Array<S, 3>& state) {
  for (std::int64_t s = 0; s < state.extent(0); ++s)
    for (std::int64_t d = 0; d < state.extent(1); ++d) {
      S* const row = &state(s, d, 0);
      std::reverse(row, row + state.extent(2));
    }
}

/// Applies a shared mistake of the inputs.
template <class S>
void change(Host<S>& host, std::string_view mistake) {
  change_slots(host.rows, mistake, host.x.extent(0));
  if (mistake == "no-bias") host.bias.reset();
  if (mistake == "no-silu") host.silu = false;
  if (mistake == "always-silu") host.silu = true;
  if (mistake == "from-zero") start_from_zero(host.state);
  const std::int64_t W = host.weight.extent(1), C = host.state.extent(2);
  if (mistake == "weights-reversed")
    for (std::int64_t d = 0; d < host.weight.extent(0); ++d)
      std::reverse(&host.weight(d, 0), &host.weight(d, 0) + W);
  if (mistake == "history-reversed") reverse_columns(host.state);
  if (mistake == "oldest-columns" && C == W)
    for (std::int64_t s = 0; s < host.state.extent(0); ++s)
      for (std::int64_t d = 0; d < host.state.extent(1); ++d) {
        S* const row = &host.state(s, d, 0);
        std::copy_backward(row, row + C - 1, row + C);
      }
}

/// Whether the mistake is one of the activation; spoil() then needs outputs without activation.
inline bool needs_linear_outputs(std::string_view mistake) {
  return mistake == "sigmoid" || mistake == "silu-before-bias";
}

/// Applies a shared mistake of the results; `plain` are the outputs without activation.
template <class S>
void spoil(const Case& c, Host<S>& host, const Array<S, 3>& before, const Array<S, 2>& plain,
           std::string_view mistake, Array<S, 2>& out) {
  const std::int64_t C = host.state.extent(2);
  if (mistake == "state-not-updated") host.state = before;
  if (mistake == "state-shifted-twice")
    for (std::int64_t s = 0; s < host.state.extent(0); ++s) {
      if (c.slots[static_cast<std::size_t>(s)].use != SlotUse::written) continue;
      for (std::int64_t d = 0; d < host.state.extent(1); ++d) {
        S* const row = &host.state(s, d, 0);
        std::copy(row + 1, row + C, row);
      }
    }
  if (mistake == "history-reversed") reverse_columns(host.state);
  if (!needs_linear_outputs(mistake) || !host.silu) return;
  for (std::int64_t t = 0; t < out.extent(0); ++t) {
    if (c.tokens[static_cast<std::size_t>(t)].padding) continue;
    for (std::int64_t d = 0; d < out.extent(1); ++d) {
      if (mistake == "sigmoid") out(t, d) = reference::sigmoid(plain(t, d));
      if (mistake == "silu-before-bias" && host.bias)
        out(t, d) = reference::silu(plain(t, d) - (*host.bias)(d)) + (*host.bias)(d);
    }
  }
}

}  // namespace lockstep::judging::convolution
