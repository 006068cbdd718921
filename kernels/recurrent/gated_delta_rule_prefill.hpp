// Gated delta rule over whole prompts: packed sequences of any length, by chunks of 64 tokens.
// Equations and names: reference/recurrent/gated_delta_rule.hpp; slots:
// reference/tensors/slots.hpp.
//
//   here              vLLM, FLA                        shape, all in device memory
//   q, k              q, k                             [T, H, K]
//   v, out            v, o                             [T, HV, V]
//   g, beta           g, beta; or raw: a, b            [T, HV]
//   state             initial_state and final_state    [slots, HV, V, K], any strides
//   boundary_states   state_checkpoints                [sum of floor(len / every), HV, V, K]
#pragma once

#include "kernels/recurrent/gated_delta_rule_update.hpp"

namespace lockstep::kernels {

/// How a prefill runs. All forms give the same numbers but for rounding. Those of the chunked ones
/// are equal bit by bit, and so are prompts that are cut at multiples of 64 tokens and resumed, but
/// for in_segments, which adds up in another order.
enum class PrefillForm {
  automatic,   ///< whichever is expected to be fastest
  whole_rows,  ///< the same, of those with equal bits
  overlapped,  ///< chunks; what needs no state is prepared on processors that the chains leave idle
  followed,    ///< the same, and second chains on those make the outputs of the first chunks
  in_turns,    ///< chunks; all is prepared before the chains begin
  by_heads,    ///< the same, with 128 rows of a state in a block instead of 64
  in_segments,  ///< chunks; segments of a row run side by side: for a few heads and long rows
  sequential    ///< token by token, for every shape and type
};

template <class T, class S>
struct GatedDeltaRulePrefill {
  GatedDeltaTokens<T> tokens;               ///< without query_start_loc all tokens are one sequence
  std::optional<TensorView<S, 4>> state{};  ///< absent: sequences begin with 0 and leave nothing
  TensorView<T, 3> out;                     // [T, HV, V]
  StateSlots slots{};                       ///< no table
  std::optional<TensorView<const bool, 1>> has_initial_state{};  ///< [N]; false: from 0
  MixedView<1> A_log{};  ///< [HV]: gates are computed from the raw a and b, with dt_bias [HV]
  MixedView<1> dt_bias{};
  std::optional<float> scale{};  ///< of q; K^-0.5 by default
  bool use_qk_l2norm = false;
  /// States after every boundary_every tokens of a sequence, those of earlier sequences first.
  std::optional<TensorView<S, 4>> boundary_states{};
  std::int64_t boundary_every = 0;
  PrefillForm form = PrefillForm::automatic;
  /// Of the chunked forms: what prefill_workspace() says, at a multiple of 128 bytes, for one call
  /// at a time. Its first bytes are 0 before the first call; each call leaves them so.
  std::optional<TensorView<unsigned char, 1>> workspace{};
};

/// Sizes in bytes; 0 where a call runs token by token.
struct PrefillWorkspace {
  std::int64_t bytes = 0;
  std::int64_t zeros = 0;  ///< of which so many at the beginning have to be 0
};
template <class T, class S>
PrefillWorkspace prefill_workspace(const GatedDeltaRulePrefill<T, S>& in);

/// Whether a form can take these arguments: the chunked ones need T in bf16, K = 128, V in
/// multiples of 64 (by heads, followed and in segments: of 128), vectors at multiples of 16 bytes,
/// and boundaries in multiples of 64 tokens.
template <class T, class S>
bool can_run(const GatedDeltaRulePrefill<T, S>& in, PrefillForm form);

/// Sequences of the same slot may not be in one call. Rows without a slot give 0; tokens after the
/// last row too. The running state is float32 and rounded once per store. Throws ArgumentError.
template <class T, class S>
void gated_delta_rule_prefill(const GatedDeltaRulePrefill<T, S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
