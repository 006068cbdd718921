// Selects the next token: the likeliest one, or one drawn from the likeliest. A draw repeats the
// steps of reference/layers/sampling.hpp bit by bit.
//
//   here          vLLM, SGLang     shape, all in device memory
//   logits        logits           [N, V] float32, rows contiguous
//   tokens        sampled          [N]
//   temperature   temperature      [N]      0 or less: the likeliest token
//   top_k         top_k            [N]      0 or less: all tokens
//   top_p         top_p            [N]      1 or more: all tokens
//   seeds         seed             [N]      seed of the request
//   positions                      [N]      position in the request of the drawn token, from 0
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

/// Both throw ArgumentError.
void greedy_tokens(const GreedyTokens& in, cudaStream_t stream);
void sampled_tokens(const SampledTokens& in, cudaStream_t stream);

}  // namespace lockstep::kernels
