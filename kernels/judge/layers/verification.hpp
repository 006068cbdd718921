// Cases of layers' verifications: their rows and windows, and a mistake in the states.
#pragma once

#include "kernels/judge/operation.hpp"
#include "reference/recurrent/causal_conv1d.hpp"

namespace lockstep::judging {

constexpr std::int64_t kTaps = 4;

/// Rows of a verification: of every length up to the table's columns, with padding among them.
inline Batch verified(std::vector<std::int64_t> lengths, std::int64_t columns,
                      std::vector<std::int64_t> padding_rows = {}) {
  return {.lengths = std::move(lengths),
          .behind = 1,
          .columns = columns,
          .padding_rows = std::move(padding_rows),
          .packed = true};
}

/// Columns of a window: those of a token's history, and those of drafts.
inline std::int64_t columns_of_windows(const Batch& batch) {
  return kTaps - 1 + std::max<std::int64_t>(batch.columns, 1) - 1;
}

/// Writes NaN to what of the windows no row reads: a row's history lies in the slot of its table's
/// first column, from column accepted - 1 on.
inline void poison_windows(Tensor& window, const Case& c) {
  const HostRows rows(c);
  const std::int64_t slots = window.extents[0], C = window.extents[2];
  const std::int64_t inner = window.extents[1] * C;
  std::vector<std::int64_t> first(static_cast<std::size_t>(slots), -1);
  StateSlots homes = reference::conv_detail::first_slots(rows.slots());
  for (const CaseToken& token : c.tokens)
    if (!token.padding)
      first[static_cast<std::size_t>(source_slot(homes, token.row, slots))] = token.accepted - 1;
  for (std::int64_t i = 0; i < slots * inner; ++i) {
    const std::int64_t begin = first[static_cast<std::size_t>(i / inner)], column = i % C;
    if (begin < 0 || column < begin || column >= begin + kTaps - 1)
      window.values[static_cast<std::size_t>(i)] = std::numeric_limits<double>::quiet_NaN();
  }
}

/// Leaves the state after a row's last token in the slots of those after the others too.
template <class S>
void leave_last_states(Array<S, 4>& state, const HostRows& rows, const Case& c) {
  if (!rows.table) return;
  const StateSlots named = rows.slots();
  for (const CaseToken& token : c.tokens) {
    if (token.padding) continue;
    const auto target = [&](std::int64_t i) {
      return target_slot(named, token.row, i, token.row_size, state.extent(0));
    };
    const auto last = at(state.view(), target(token.row_size - 1));
    for_each_element(at(state.view(), target(token.position)),
                     [&](const auto& i, S& s) { s = last(i[0], i[1], i[2]); });
  }
}

/// Inputs of a step between a layer's projections, with the mistakes that all such layers know.
template <class S>
struct LayerHost {
  LayerHost(const Case& c, std::string_view mistake, S usual_eps)
      : rows(c),
        x(array_of<S, 2>(c, "x")),
        weight(array_of<S, 2>(c, "conv_weight")),
        z(array_of<S, 3>(c, "z")),
        window(array_of<S, 3>(c, "conv_state")),
        state(array_of<S, 4>(c, "state")),
        dt_bias(array_of<S, 1>(c, "dt_bias")),
        norm_weight(array_of<S, 1>(c, "norm_weight")),
        bias(maybe_array_of<S, 1>(c, "conv_bias")),
        eps(static_cast<S>(c.number("eps").value_or(static_cast<double>(usual_eps)))) {
    change_slots(rows, mistake, x.extent(0));
    if (mistake == "no-conv-bias") bias.reset();
    if (mistake == "reversed-taps")
      for (std::int64_t d = 0; d < weight.extent(0); ++d)
        std::reverse(&weight(d, 0), &weight(d, 0) + weight.extent(1));
    if (mistake == "no-dt-bias") fill(dt_bias.view(), S{0});
    if (mistake == "no-z") fill(z.view(), S(1.2784645427610738));  // silu is 1 there
    if (mistake == "no-norm-weight") fill(norm_weight.view(), S{1});
    if (mistake == "no-eps") eps = usual_eps;
    if (mistake == "from-zero") start_from_zero(state);
  }

  /// Fills in what every such layer takes; `rounded`: states and windows as the tensors store them.
  template <class Layer>
  Layer with_inputs(Layer in, const Case& c, bool rounded) const {
    in.x = x;
    in.z = z;
    in.conv_weight = weight;
    in.dt_bias = dt_bias;
    in.norm_weight = norm_weight;
    in.slots = rows.slots();
    in.eps = eps;
    in.storage = storage_of(c, "state", rounded);
    if (bias) in.conv_bias = bias->view();
    if (rounded) in.window = storage_of(c, "conv_state", rounded).state;
    return in;
  }

  Answer answer(const Array<S, 3>& out) const {
    return {
        {"out", as_values(out)}, {"conv_state", as_values(window)}, {"state", as_values(state)}};
  }

  HostRows rows;
  Array<S, 2> x, weight;
  Array<S, 3> z, window;
  Array<S, 4> state;
  Array<S, 1> dt_bias, norm_weight;
  std::optional<Array<S, 1>> bias;
  S eps;
};

/// The layer's convolution alone, [T, channels]; the mistake `window-at-0` reads each window from
/// its first column on.
template <class S, class Layer>
Array<S, 2> convolved(const Layer& in, const HostRows& rows, std::string_view mistake,
                      Array<S, 3>& window) {
  const std::int64_t T = in.x.extent(0);
  Array<std::int32_t, 1> ones(Shape<1>{row_count(rows.query_start_loc(), T)}, 1);
  reference::CausalConv1dInputs<S> conv{.x = in.x,
                                        .weight = in.conv_weight,
                                        .bias = in.conv_bias,
                                        .query_start_loc = rows.query_start_loc(),
                                        .slots = in.slots,
                                        .activation = reference::Activation::silu};
  if (mistake == "window-at-0" && rows.accepted)
    conv.slots.num_accepted = std::as_const(ones).view();
  Array<S, 2> mixed(Shape<2>{T, in.x.extent(1)});
  reference::causal_conv1d_update<S>(conv, window.view(), mixed.view());
  return mixed;
}

}  // namespace lockstep::judging
