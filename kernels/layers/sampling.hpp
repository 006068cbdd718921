// The next token: the likeliest one, or one drawn among the likeliest. The steps, which a draw
// repeats bit by bit: reference/layers/sampling.hpp.
//
//   here          vLLM, SGLang     shape, all in device memory
//   logits        logits           [N, V] float32, rows contiguous
//   tokens        sampled          [N]
//   temperature   temperature      [N]      0 or less: the likeliest token
//   top_k         top_k            [N]      0 or less: all tokens
//   top_p         top_p            [N]      1 or more: all tokens
//   seeds         seed             [N]      of the request
//   positions                      [N]      of the token to be drawn in its request, from 0
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

struct GreedyTokens {
  TensorView<const float, 2> logits;
  TensorView<std::int32_t, 1> tokens;
};

struct SampledTokens {
  TensorView<const float, 2> logits;
  TensorView<const float, 1> temperature;
  std::optional<IndexView> top_k{};                   ///< absent: all tokens
  std::optional<TensorView<const float, 1>> top_p{};  ///< absent: all tokens
  TensorView<const std::int64_t, 1> seeds;
  IndexView positions;
  TensorView<std::int32_t, 1> tokens;
};

/// Throw ArgumentError.
void greedy_tokens(const GreedyTokens& in, cudaStream_t stream);
void sampled_tokens(const SampledTokens& in, cudaStream_t stream);

}  // namespace lockstep::kernels
