// Weights of a hybrid model, drawn by name and index: element i of a tensor is a function of the
// seed, the tensor's name and i, so that another unit changes no weight of this one. The embedding
// of a token is drawn from all of its 64 bits: tokens that differ have different embeddings.
//
// The draws make a model remember. Careless weights (standard deviation 0.02, A = 1, 2, 3, …,
// dt_bias = 1) forget within a few tokens, and a wrong state then changes no logit that anybody
// would see; properties/reference/models/hybrid/hybrid_sensitivity_test.cpp measures both.
//
//   tensor                            law (u uniform in [0, 1), n of mean 0 and deviation 1)
//   embedding                         n
//   norms                             1 + 0.1 n
//   projections into a mixer          1.5 n / sqrt(in)
//   projections out of a mixer        2 n / sqrt(in)
//   router                            1.5 n / sqrt(in)
//   head                              4 n / sqrt(in)
//   other matrices                    n / sqrt(in)
//   conv1d.weight, conv1d.bias        0.5 + 0.3 n, 0.2 n: old columns count as much as new ones
//   A_log                             ln(rate / 0.2); rates log-spaced over heads, 0.01 … 0.08
//   dt_bias                           -2 + u: softplus gives about 0.2, so that half of a state
//                                     lasts 9 to 70 tokens
//   D                                 0.5 + 0.5 u
//   e_score_correction_bias           0.1 n
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reference/models/hybrid/hybrid_config.hpp"

namespace lockstep::reference {

struct HybridTensor {
  std::vector<std::int64_t> shape;
  std::vector<double> values;  ///< contiguous, the last dimension fastest
};

struct HybridWeights {
  std::uint64_t seed = 1;      ///< of the embedding
  double embedding_scale = 1;  ///< standard deviation of the embedding's elements
  HybridTensor embedding{};    ///< rows of the first tokens; other tokens are drawn
  std::map<std::string, HybridTensor> tensors{};
};

/// A number of mean 0 and deviation 1, uniform, as a function of (seed, name, index).
double drawn_number(std::uint64_t seed, std::string_view name, std::uint64_t index);

/// Writes the embedding of a token, of as many elements as `out` has.
void embed(const HybridWeights& weights, std::uint64_t token, std::span<double> out);

/// Weights by the laws above.
HybridWeights drawn_hybrid(const HybridConfig& config, std::uint64_t seed);
inline HybridWeights drawn_hybrid(const HybridConfig& config) {
  return drawn_hybrid(config, config.seed);
}

/// The stored weights of a configuration, and by the laws above what they lack.
HybridWeights hybrid_weights(const HybridConfig& config);

/// The rows of an embedding table for tokens 0 … vocabulary - 1, as a checkpoint has it.
HybridTensor embedding_table(const HybridConfig& config, const HybridWeights& weights);

}  // namespace lockstep::reference
