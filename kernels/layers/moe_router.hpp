// Selects the experts of each token, and their weights. Equations: reference/layers/moe_router.hpp.
//
//   here      DeepSeek, SGLang          shape, all in device memory
//   logits    router_logits             [T, E], E <= 1024
//   bias      e_score_correction_bias   [E]      added for the selection, not for the weights
//   experts   topk_ids                  [T, k]   by falling score; ties go to the lower number
//   weights   topk_weights              [T, k] float32
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"

namespace lockstep::kernels {

struct MoeRouter {
  MixedView<2> logits;
  MixedView<1> bias{};
  TensorView<std::int32_t, 2> experts;
  TensorView<float, 2> weights;
  bool sigmoid = false;          ///< scores are sigmoids; else a softmax
  std::int64_t groups = 1;       ///< experts stand in groups of E / groups, at most 64
  std::int64_t groups_kept = 1;  ///< groups are kept by the sum of their two best experts
  bool normalise = true;         ///< the k weights sum to 1 before the scale
  float scale = 1;
};

/// Writes experts and weights. Throws ArgumentError.
void moe_router(const MoeRouter& in, cudaStream_t stream);

}  // namespace lockstep::kernels
