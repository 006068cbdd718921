// The rows of operators of a layer's step between its projections, and their checks: one token of
// each row, or with query_start_loc a verification of several, with a table of slots.
#pragma once

#include "kernels/torch/operator.hpp"

namespace lockstep::torch_ops {

struct LayerRows {
  Tensor x, z, conv_state, state;  // [T, D], [T, heads, ...], [slots, D, C], [slots, ...]
  MaybeTensor state_indices, query_start_loc, num_accepted_tokens;
  std::int64_t pad_slot_id;

  bool verifies() const { return query_start_loc.has_value(); }
  StateSlots slots() const { return slots_of(state_indices, {}, num_accepted_tokens, pad_slot_id); }
  std::optional<IndexView> starts() const { return indices_of(query_start_loc, "query_start_loc"); }

  /// Checks rows, convolution and windows for both devices. `letters` say D.
  void check(const Tensor& conv_weight, const MaybeTensor& conv_bias,
             const std::string& letters) const {
    const std::int64_t D = x.size(1), slot_count = state.size(0);
    expect_rank(conv_weight, "conv_weight", 2);
    const std::int64_t W = conv_weight.size(1);
    expect(2 <= W && W <= 4, "conv_weight", "[" + letters + ", W] with W from 2 to 4",
           conv_weight.sizes());
    expect_shape(conv_weight, "conv_weight", ("[" + letters + ", W]").c_str(), {D, W});
    expect_shape(conv_bias, "conv_bias", ("[" + letters + "]").c_str(), {D});
    expect_float(x, "x");
    expect_type(z, x.scalar_type(), "z");
    expect_contiguous_rows(x, "x");
    expect_contiguous_rows(z, "z");
    expect_float(conv_state, "conv_state");
    if (conv_bias) expect_float(*conv_bias, "conv_bias");
    const StateSlots s = slots();
    expect(s.table.has_value() == verifies() && s.num_accepted.has_value() == verifies(),
           "state_indices beside query_start_loc and num_accepted_tokens",
           "a table [N, 1 + drafts] of a verification, or [T] without both", "other ones");
    check_rows(query_start_loc, s, x.size(0));
    const std::string shape = "[slots, " + letters;
    if (!verifies())
      return expect_shape(conv_state, "conv_state", (shape + ", W - 1]").c_str(),
                          {slot_count, D, W - 1});
    expect_rank(conv_state, "conv_state", 3);
    expect_shape(conv_state, "conv_state", (shape + ", C]").c_str(),
                 {slot_count, D, conv_state.size(2)});
    expect(conv_state.size(2) >= W - 2 + s.table->extent(1), "conv_state",
           shape + ", C] with C at least W - 1 + drafts", conv_state.sizes());
  }

  /// Calls step(window, states, out) with the states in float, and gives the results, in the type
  /// of x.
  template <class Step>
  Tensor on_host(Step step) const {
    check_host();
    const HostTensor<3> window(conv_state, "conv_state"), out = host_output<3>(z);
    const HostTensor<4> states(state, "state");
    step(window.out(), states.out(), out.out());
    window.write_back();
    states.write_back();
    return out.as(x.scalar_type());
  }

  /// Checks the values of indices, on the CPU; called after check().
  void check_host() const {
    const std::int64_t T = x.size(0);
    check_host_slots({.tokens = T, .query_start_loc = starts(), .slots = slots()}, state.size(0),
                     false);
    if (!verifies()) return;
    const std::int64_t columns = state_indices->size(1);
    for (std::int64_t row = 0; row < row_count(starts(), T); ++row)
      expect(row_range(starts(), row, T).size() <= columns, "query_start_loc",
             "rows of at most " + std::to_string(columns) + " tokens, which have slots",
             row_range(starts(), row, T).size());
  }

#ifdef LOCKSTEP_HAS_CUDA
  /// Calls launch(S()) for states of S, float or Bf16, or refuses types that no kernel takes.
  template <class Launch>
  void by_state(Launch launch) const {
    expect_type(x, at::kBFloat16, "x on a GPU");
    expect_type(conv_state, at::kBFloat16, "conv_state on a GPU");
    expect(state.scalar_type() == at::kFloat || state.scalar_type() == at::kBFloat16,
           "state on a GPU", "float32 or bfloat16", state.scalar_type());
    if (state.scalar_type() == at::kFloat)
      launch(float());
    else
      launch(kernels::Bf16());
  }
#endif
};

}  // namespace lockstep::torch_ops
