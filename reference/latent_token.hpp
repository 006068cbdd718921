// The 656-byte token of a sparse MLA cache (FlashMLA, SGLang): the latent in e4m3 with a scale for
// every tile of 128, and the rotary part as it is in bf16.
//
//   offset  size  holds
//   0       512   e4m3, the latent divided by its tile's scale
//   512      16   four float32 scales, little-endian
//   528     128   64 bf16, little-endian
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "reference/base/fp8.hpp"

namespace lockstep::reference {

constexpr std::int64_t kLatent = 512, kRotary = 64, kTile = 128, kTokenBytes = 656;
using LatentToken = std::array<std::uint8_t, kTokenBytes>;

/// FlashMLA's reference rounds scales up to powers of two; SGLang's are amax / 448. Ours keeps a
/// tile of zeros zero in both.
enum class TileScale { power_of_two, exact };

inline float tile_scale(double amax, TileScale kind) {
  if (kind == TileScale::exact) return amax > 0 ? static_cast<float>(amax / 448) : 1.0f;
  return static_cast<float>(std::exp2(std::ceil(std::log2(std::max(amax / 448, 1e-4)))));
}

/// x [576] = [latent; rotary part]
template <class S>
LatentToken packed_token(const Vector<S>& x, TileScale kind) {
  require(x.size() == kLatent + kRotary, "a latent token has 576 values");
  LatentToken bytes{};
  const auto put = [&](std::int64_t offset, std::uint32_t bits, int size) {
    for (int i = 0; i < size; ++i)
      bytes[static_cast<std::size_t>(offset + i)] = static_cast<std::uint8_t>(bits >> (8 * i));
  };
  for (std::int64_t tile = 0; tile < kLatent / kTile; ++tile) {
    const Vector<S> part = x.segment(tile * kTile, kTile);
    const float scale = tile_scale(static_cast<double>(part.cwiseAbs().maxCoeff()), kind);
    put(kLatent + 4 * tile, std::bit_cast<std::uint32_t>(scale), 4);
    for (std::int64_t i = 0; i < kTile; ++i)
      bytes[static_cast<std::size_t>(tile * kTile + i)] =
          encode_e4m3(static_cast<double>(part(i)) / static_cast<double>(scale));
  }
  for (std::int64_t i = 0; i < kRotary; ++i) {
    const auto value = static_cast<float>(rounded(x(kLatent + i), Format::bf16));
    put(kLatent + 16 + 2 * i, std::bit_cast<std::uint32_t>(value) >> 16, 2);
  }
  return bytes;
}

template <class S>
Vector<S> unpacked_token(const LatentToken& bytes) {
  const auto get = [&](std::int64_t offset, int size) {
    std::uint32_t bits = 0;
    for (int i = 0; i < size; ++i)
      bits |= std::uint32_t{bytes[static_cast<std::size_t>(offset + i)]} << (8 * i);
    return bits;
  };
  Vector<S> x(kLatent + kRotary);
  for (std::int64_t i = 0; i < kLatent; ++i) {
    const float scale = std::bit_cast<float>(get(kLatent + 4 * (i / kTile), 4));
    x(i) = static_cast<S>(decode_e4m3(bytes[static_cast<std::size_t>(i)])) * static_cast<S>(scale);
  }
  for (std::int64_t i = 0; i < kRotary; ++i)
    x(kLatent + i) = static_cast<S>(std::bit_cast<float>(get(kLatent + 16 + 2 * i, 2) << 16));
  return x;
}

}  // namespace lockstep::reference
