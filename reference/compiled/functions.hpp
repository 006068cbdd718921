// The references for float and double, compiled once. A program that links the part `compiled` and
// reads this header precompiled compiles none of these functions again: tests of recurrences and
// the judge take half the time. They are the functions that more than one of their files call.
#pragma once

// First: it calls its one_head without a namespace, and mla_attention.hpp has another.
#include "reference/recurrent/mamba1_decode.hpp"

#include "reference/attention/latent_token.hpp"
#include "reference/attention/mla_attention.hpp"
#include "reference/attention/mla_rope_decode.hpp"
#include "reference/attention/softmax_attention.hpp"
#include "reference/attention/static_kv_update.hpp"
#include "reference/layers/batched_product.hpp"
#include "reference/layers/moe_router.hpp"
#include "reference/layers/product.hpp"
#include "reference/layers/rms_norm.hpp"
#include "reference/layers/rope.hpp"
#include "reference/layers/swiglu.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/gated_delta_net.hpp"
#include "reference/recurrent/gated_delta_net_decode.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"
#include "reference/recurrent/mamba2.hpp"
#include "reference/recurrent/mamba_mixer.hpp"
#include "reference/recurrent/replay_rings.hpp"
#include "reference/recurrent/replay_state.hpp"
#include "reference/recurrent/scaled_state.hpp"
#include "reference/tensors/grid.hpp"
#include "reference/tensors/yardstick.hpp"

/// X(function<types>) for each function of the recurrences, S being float or double.
#define LOCKSTEP_RECURRENT_FUNCTIONS(X, S)  \
  X(reference::causal_conv1d<S>)            \
  X(reference::causal_conv1d_padded<S>)     \
  X(reference::causal_conv1d_update<S>)     \
  X(reference::decays_from_start<S>)        \
  X(reference::flush<S>)                    \
  X(reference::gated_delta_chunk<S>)        \
  X(reference::gated_delta_chunk_of<S>)     \
  X(reference::gated_delta_gates<S>)        \
  X(reference::gated_delta_net<S>)          \
  X(reference::gated_delta_net_decode<S>)   \
  X(reference::gated_delta_projections<S>)  \
  X(reference::gated_delta_ring_flush<S>)   \
  X(reference::gated_delta_ring_update<S>)  \
  X(reference::gated_delta_rule_prefill<S>) \
  X(reference::gated_delta_rule_replay<S>)  \
  X(reference::gated_delta_rule_scan<S>)    \
  X(reference::gated_delta_rule_update<S>)  \
  X(reference::l2_normalised<S>)            \
  X(reference::mamba2_replay<S>)            \
  X(reference::mamba2_ring_flush<S>)        \
  X(reference::mamba2_ring_update<S>)       \
  X(reference::mamba2_stash<S>)             \
  X(reference::mamba_mixer<S>)              \
  X(reference::materialised<S>)             \
  X(reference::replay_accept<S>)            \
  X(reference::replay_read<S>)              \
  X(reference::segment_decays<S>)           \
  X(reference::selective_scan<S>)           \
  X(reference::selective_state_update<S>)   \
  X(reference::ssd_prefill<S>)              \
  X(reference::store_scaled<S>)

/// As LOCKSTEP_RECURRENT_FUNCTIONS, for attention, layers and comparisons.
#define LOCKSTEP_OTHER_FUNCTIONS(X, S)    \
  X(reference::apply_rope<S>)             \
  X(reference::attend<S>)                 \
  X(reference::attention_row<S>)          \
  X(reference::batched_product<S>)        \
  X(reference::gated_rms_norm<S>)         \
  X(reference::grouped_product<S>)        \
  X(reference::merge_attention<S>)        \
  X(reference::mla_absorbed<S>)           \
  X(reference::mla_chunked_prefix<S>)     \
  X(reference::mla_decode<S>)             \
  X(reference::mla_normal<S>)             \
  X(reference::mla_project<S>)            \
  X(reference::mla_rope_decode<S>)        \
  X(reference::packed_token<S>)           \
  X(reference::paged_attention<S>)        \
  X(reference::plain_rope<S>)             \
  X(reference::product<S>)                \
  X(reference::rms_norm<S>)               \
  X(reference::rms_norm_with_residual<S>) \
  X(reference::route<S>)                  \
  X(reference::softmax_attention<S>)      \
  X(reference::static_kv_attention<S>)    \
  X(reference::swiglu<S>)                 \
  X(reference::unpacked_token<S>)         \
  X(reference::write_latents<S>)          \
  X(reference::yarn_rope<S>)              \
  X(judge<float, S, double, 2>)           \
  X(judge<float, S, double, 3>)           \
  X(judge<float, S, double, 4>)           \
  X(on_grid<S, 2>)                        \
  X(on_grid<S, 3>)                        \
  X(on_grid<S, 4>)

#define LOCKSTEP_COMPILED(...) template decltype(__VA_ARGS__) __VA_ARGS__;
#define LOCKSTEP_COMPILED_ELSEWHERE(...) extern template decltype(__VA_ARGS__) __VA_ARGS__;

namespace lockstep {

LOCKSTEP_RECURRENT_FUNCTIONS(LOCKSTEP_COMPILED_ELSEWHERE, float)
LOCKSTEP_RECURRENT_FUNCTIONS(LOCKSTEP_COMPILED_ELSEWHERE, double)
LOCKSTEP_OTHER_FUNCTIONS(LOCKSTEP_COMPILED_ELSEWHERE, float)
LOCKSTEP_OTHER_FUNCTIONS(LOCKSTEP_COMPILED_ELSEWHERE, double)

}  // namespace lockstep
