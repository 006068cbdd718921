// Shared by the operators over latents: caches of latents, values on the CPU, rotation.
#pragma once

#include "kernels/torch/lanes.hpp"
#include "reference/attention/latent_token.hpp"
#include "reference/layers/rope.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/base/dtype.hpp"
#endif

namespace lockstep::torch_ops {

constexpr double kEps = 1e-6;  ///< epsilon of DeepSeek's norms

inline bool in_e4m3(const Tensor& x) {
  return x.scalar_type() == at::kFloat8_e4m3fn;
}

/// The values of a matrix, or of a batch of matrices, in float.
template <std::size_t Rank>
HostTensor<Rank> host_values(const Tensor& x, const char* argument) {
  expect_rank(x, argument, Rank);
  return HostTensor<Rank>(MaybeTensor(x));
}

/// Checks a cache of latents: floating-point values, numbers in e4m3, or tokens of 656 bytes.
/// `width` is that of a latent with its rotary part; without it any width is taken.
inline void check_cache(const Tensor& cache, std::optional<std::int64_t> width,
                        const MaybeTensor& kv_scale) {
  expect_rank(cache, "kv_cache", 3);
  const bool bytes = cache.scalar_type() == at::kByte;
  if (!bytes) expect_float_or_e4m3(cache, "kv_cache");
  expect(cache.size(1) >= 1, "kv_cache", "[pages, page, width] with a token in each page",
         cache.sizes());
  expect_shape(cache, "kv_cache", bytes ? "[pages, page, 656] in bytes" : "[pages, page, width]",
               {cache.size(0), cache.size(1),
                bytes ? reference::kTokenBytes : width.value_or(cache.size(2))});
  expect_contiguous_rows(cache, "kv_cache");
  expect_kv_scale(kv_scale, cache);
}

inline float scale_of(const MaybeTensor& kv_scale) {
  return kv_scale ? kv_scale->item<float>() : 1.0f;
}

/// The place of a slot in a cache [pages, page, ...]; nothing if the number is no slot.
inline MaybeTensor place_of(const Tensor& cache, std::int64_t slot) {
  if (slot < 0 || slot >= cache.size(0) * cache.size(1)) return {};
  return cache[slot / cache.size(1)][slot % cache.size(1)];
}

/// Writes latents [T, width] to their slots.
inline void store(const Tensor& latents, const IndexView& slots, const Tensor& cache,
                  const MaybeTensor& kv_scale, bool power_of_two) {
  for (std::int64_t t = 0; t < latents.size(0); ++t) {
    const MaybeTensor place = place_of(cache, slots(t));
    if (!place) continue;
    if (cache.scalar_type() == at::kByte) {
      const auto row = view_of<const float, 1>(latents[t], "latent");
      const reference::LatentToken token = reference::packed_token<float>(
          as_vector(row),
          power_of_two ? reference::TileScale::power_of_two : reference::TileScale::exact);
      place->copy_(at::from_blob(const_cast<std::uint8_t*>(token.data()), {reference::kTokenBytes},
                                 at::kByte));
    } else if (in_e4m3(cache)) {
      place->copy_((latents[t] / scale_of(kv_scale)).clamp(-448, 448).to(cache.scalar_type()));
    } else {
      place->copy_(latents[t]);
    }
  }
}

/// Reads the values of a token's place into `row` [width].
inline void load(const Tensor& place, const MaybeTensor& kv_scale, const Tensor& row) {
  if (place.scalar_type() != at::kByte) {
    row.copy_(place.to(at::kFloat) * scale_of(kv_scale));
    return;
  }
  const Tensor bytes = place.contiguous();
  reference::LatentToken token;
  std::copy_n(bytes.data_ptr<std::uint8_t>(), token.size(), token.begin());
  const Vector<float> x = reference::unpacked_token<float>(token);
  std::copy(x.begin(), x.end(), row.data_ptr<float>());
}

/// The place of token i of request r in a cache [pages, page, ...].
inline Tensor cached_place(const Tensor& cache, const IndexTable& table, std::int64_t r,
                           std::int64_t i) {
  const std::int64_t page = cache.size(1), number = table(r, i / page);
  expect(0 <= number && number < cache.size(0), "block_table", "pages before a request's end",
         number);
  return cache[number][i % page];
}

inline reference::Rope<float> rope_of(const Tensor& frequencies, double magnitude) {
  const HostTensor<1> of(MaybeTensor(frequencies), "frequencies");
  return {as_vector(of.in()), static_cast<float>(magnitude)};
}
inline reference::RopePairs pairs_of(bool interleaved) {
  return interleaved ? reference::RopePairs::interleaved : reference::RopePairs::half_split;
}

#ifdef LOCKSTEP_HAS_CUDA
/// Calls run(C{}) with C the type that kernels use for the cache.
template <class Run>
auto of_cache(const Tensor& cache, Run run) {
  if (in_e4m3(cache)) return run(kernels::E4m3());
  if (cache.scalar_type() == at::kByte) return run(std::uint8_t());
  expect_type(cache, at::kBFloat16, "kv_cache");
  return run(kernels::Bf16());
}

inline std::optional<TensorView<const float, 1>> scale_view(const MaybeTensor& kv_scale) {
  if (!kv_scale) return {};
  return view_of<const float, 1>(kv_scale->reshape({1}), "kv_scale");
}
#endif

}  // namespace lockstep::torch_ops
