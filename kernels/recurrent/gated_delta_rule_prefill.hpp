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

/// The forms of a prefill. All give the same numbers up to rounding. All chunked forms but
/// in_segments give the same bits, also for a prompt that is cut at multiples of 64 tokens and
/// resumed; in_segments adds in another order.
///
/// A chunked form first prepares the chunks (all work that needs no state), then runs chains: a
/// chain takes 64 rows of a state through the chunks of a row.
enum class PrefillForm {
  automatic,    ///< the form that is expected to be fastest
  whole_rows,   ///< the fastest form other than in_segments
  overlapped,   ///< chunked; chunks are prepared on processors that the chains leave idle
  followed,     ///< overlapped; second chains on those processors compute the first chunks' outputs
  in_turns,     ///< chunked; all chunks are prepared before the chains begin
  by_heads,     ///< in_turns, with 128 rows of a state in a block instead of 64
  in_segments,  ///< chunked; segments of a row run side by side: for few heads and long rows
  sequential    ///< token by token, for every shape and type
};

template <class T, class S>
struct GatedDeltaRulePrefill {
  GatedDeltaTokens<T> tokens;               ///< without query_start_loc all tokens are one sequence
  std::optional<TensorView<S, 4>> state{};  ///< absent: states begin as 0 and are not stored
  TensorView<T, 3> out;                     // [T, HV, V]
  StateSlots slots{};                       ///< no table
  std::optional<TensorView<const bool, 1>> has_initial_state{};  ///< [N]; false: from 0
  MixedView<1> A_log{};  ///< [HV]: gates are computed from the raw a and b, with dt_bias [HV]
  MixedView<1> dt_bias{};
  std::optional<float> scale{};  ///< of q; K^-0.5 by default
  bool use_qk_l2norm = false;
  /// Receives the states after every boundary_every tokens of a sequence, sequence after sequence.
  std::optional<TensorView<S, 4>> boundary_states{};
  std::int64_t boundary_every = 0;
  PrefillForm form = PrefillForm::automatic;
  /// Scratch memory of the chunked forms: prefill_workspace().bytes bytes at a multiple of 128, not
  /// shared by calls that run at the same time. Its first prefill_workspace().zeros bytes must be 0
  /// before the first call; each call leaves them 0.
  std::optional<TensorView<unsigned char, 1>> workspace{};
};

/// Sizes in bytes; 0 where a call runs token by token.
struct PrefillWorkspace {
  std::int64_t bytes = 0;
  std::int64_t zeros = 0;  ///< leading bytes that must be 0 before the first call
};
template <class T, class S>
PrefillWorkspace prefill_workspace(const GatedDeltaRulePrefill<T, S>& in);

/// Whether a form can take these arguments. Chunked forms need T = bf16, K = 128, V a multiple of
/// 64 (by_heads, followed and in_segments: of 128), vectors at multiples of 16 bytes, and
/// boundaries at multiples of 64 tokens.
template <class T, class S>
bool can_run(const GatedDeltaRulePrefill<T, S>& in, PrefillForm form);

/// Computes the outputs of all tokens, and replaces the states of the rows' slots. No two sequences
/// of a call may have the same slot. Outputs of rows without a slot and of tokens after the last
/// row are 0. The running state is float32 and is rounded once per store. Throws ArgumentError.
template <class T, class S>
void gated_delta_rule_prefill(const GatedDeltaRulePrefill<T, S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
