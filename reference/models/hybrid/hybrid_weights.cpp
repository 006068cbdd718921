#include "reference/models/hybrid/hybrid_weights.hpp"

#include <algorithm>
#include <cmath>

#include "reference/base/mix.hpp"
#include "reference/base/philox.hpp"

namespace lockstep::reference {
namespace {

/// FNV-1a of a name.
std::uint64_t stream_of(std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash;
}

double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

/// Uniform in [-sqrt(3), sqrt(3)), whose deviation is 1.
double spread(double u) {
  return (2 * u - 1) * 1.7320508075688772;
}

bool contains_one_of(std::string_view name, std::initializer_list<std::string_view> words) {
  return std::ranges::any_of(
      words, [&](std::string_view word) { return name.find(word) != std::string_view::npos; });
}

/// The factor of n / sqrt(in) in a matrix.
double gain_of(std::string_view name) {
  if (name == "lm_head.weight") return 4;
  if (contains_one_of(name, {"out_proj", "o_proj"})) return 2;
  if (contains_one_of(name, {"in_proj", "q_proj", "k_proj", "q_b_proj", "kv_b_proj"})) return 1.5;
  if (name.ends_with(".gate.weight")) return 1.5;
  return 1;
}

/// Element i of a tensor by the laws of the header.
double element(const HybridTensorName& tensor, double u, std::size_t i) {
  const std::string_view name = tensor.name;
  const double n = spread(u);
  if (name.ends_with("A_log")) {
    const auto last = static_cast<double>(std::max<std::int64_t>(tensor.shape[0] - 1, 1));
    const double rate = 0.01 * std::pow(8.0, static_cast<double>(i) / last);
    return std::log(rate / 0.2);
  }
  if (name.ends_with("dt_bias")) return -2 + u;
  if (name.ends_with(".D")) return 0.5 + 0.5 * u;
  if (name.find("norm") != std::string_view::npos) return 1 + 0.1 * n;
  if (name.ends_with("correction_bias")) return 0.1 * n;
  if (name.ends_with("conv1d.weight")) return 0.5 + 0.3 * n;
  if (name.ends_with("conv1d.bias")) return 0.2 * n;
  return gain_of(name) * n / std::sqrt(static_cast<double>(tensor.shape.back()));
}

HybridTensor drawn_tensor(const HybridTensorName& tensor, std::uint64_t seed) {
  std::size_t count = 1;
  for (const std::int64_t extent : tensor.shape) count *= static_cast<std::size_t>(extent);
  HybridTensor drawn{tensor.shape, std::vector<double>(count)};
  const std::uint64_t stream = stream_of(tensor.name);
  for (std::size_t i = 0; i < count; ++i)
    drawn.values[i] = element(tensor, uniform(seed, stream, i), i);
  return drawn;
}

}  // namespace

double drawn_number(std::uint64_t seed, std::string_view name, std::uint64_t index) {
  return spread(uniform(seed, stream_of(name), index));
}

void embed(const HybridWeights& weights, std::uint64_t token, std::span<double> out) {
  if (token < weights.embedding.values.size() / out.size()) {
    std::ranges::copy(std::span(weights.embedding.values).subspan(token * out.size(), out.size()),
                      out.begin());
    return;
  }
  static const std::uint64_t kStream = stream_of("embedding");
  const std::uint64_t stream = mix64(kStream ^ mix64(token));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = weights.embedding_scale * spread(uniform(weights.seed, stream, i));
}

HybridWeights drawn_hybrid(const HybridConfig& config, std::uint64_t seed) {
  HybridWeights weights{.seed = seed};
  for (const HybridTensorName& tensor : hybrid_tensors(config))
    weights.tensors[tensor.name] = drawn_tensor(tensor, seed);
  return weights;
}

HybridWeights hybrid_weights(const HybridConfig& config) {
  if (config.stored == nullptr) return drawn_hybrid(config);
  HybridWeights weights = *config.stored;
  for (const HybridTensorName& tensor : hybrid_tensors(config))
    if (!weights.tensors.contains(tensor.name))
      weights.tensors[tensor.name] = drawn_tensor(tensor, config.seed);
  return weights;
}

HybridTensor embedding_table(const HybridConfig& config, const HybridWeights& weights) {
  const auto V = static_cast<std::size_t>(config.vocabulary);
  const auto D = static_cast<std::size_t>(config.hidden);
  HybridTensor table{{config.vocabulary, config.hidden}, std::vector<double>(V * D)};
  for (std::size_t token = 0; token < V; ++token)
    embed(weights, token, std::span(table.values).subspan(token * D, D));
  return table;
}

}  // namespace lockstep::reference
