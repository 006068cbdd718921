// Tokens of quantised MLA caches as bytes (FlashMLA, SGLang): the latent in e4m3 with a scale for
// each tile, and the rotary part in bf16.
//
// The 656-byte token, tiles of 128:
//
//   offset  size  contents
//   0       512   e4m3: the latent divided by its tile's scale
//   512      16   four float32 scales, little-endian
//   528     128   64 bf16, little-endian
//
// The 584-byte token (FlashMLA's MODEL1): the latent has 448 elements in 7 tiles of 64, whose
// scales are powers of two in one byte (e8m0: 2^(byte - 127)). A block of n tokens holds first all
// values, then all scales, and is padded to a multiple of 576 bytes:
//
//   offset           size  contents
//   576 i            448   e4m3 of token i
//   576 i + 448      128   64 bf16
//   576 n + 8 i        7   e8m0 scales of token i, and one byte of padding
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "reference/tensors/fp8.hpp"

namespace lockstep::reference {

constexpr std::int64_t kLatent = 512, kRotary = 64, kTile = 128, kTokenBytes = 656;
using LatentToken = std::array<std::uint8_t, kTokenBytes>;

/// The scale of a tile: rounded up to a power of two, as in FlashMLA's reference; or amax / 448, as
/// in SGLang. A tile of zeros stays zero with both.
enum class TileScale { power_of_two, exact };

inline float tile_scale(double amax, TileScale kind) {
  if (kind == TileScale::exact) return amax > 0 ? static_cast<float>(amax / 448) : 1.0f;
  return static_cast<float>(std::exp2(std::ceil(std::log2(std::max(amax / 448, 1e-4)))));
}

namespace latent_detail {

/// Writes the lower `size` bytes of `bits`, little-endian.
inline void put(std::uint8_t* bytes, std::uint32_t bits, int size) {
  for (int i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(bits >> (8 * i));
}

inline std::uint32_t get(const std::uint8_t* bytes, int size) {
  std::uint32_t bits = 0;
  for (int i = 0; i < size; ++i) bits |= std::uint32_t{bytes[i]} << (8 * i);
  return bits;
}

/// Writes a tile, divided by its scale, in e4m3.
template <class S>
void put_tile(std::uint8_t* bytes, const Vector<S>& tile, double scale) {
  for (std::int64_t i = 0; i < tile.size(); ++i)
    bytes[i] = encode_e4m3(static_cast<double>(tile(i)) / scale);
}

template <class S>
void put_bf16(std::uint8_t* bytes, const Vector<S>& values) {
  for (std::int64_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<float>(rounded(values(i), Format::bf16));
    put(bytes + 2 * i, std::bit_cast<std::uint32_t>(value) >> 16, 2);
  }
}

template <class S>
S bf16_at(const std::uint8_t* bytes) {
  return static_cast<S>(std::bit_cast<float>(get(bytes, 2) << 16));
}

template <class S>
double amax_of(const Vector<S>& tile) {
  return static_cast<double>(tile.cwiseAbs().maxCoeff());
}

}  // namespace latent_detail

/// The 656-byte token of x [576] = [latent; rotary part].
template <class S>
LatentToken packed_token(const Vector<S>& x, TileScale kind) {
  using namespace latent_detail;
  require(x.size() == kLatent + kRotary, "a latent token has 576 values");
  LatentToken bytes{};
  for (std::int64_t tile = 0; tile < kLatent / kTile; ++tile) {
    const Vector<S> part = x.segment(tile * kTile, kTile);
    const float scale = tile_scale(amax_of(part), kind);
    put(bytes.data() + kLatent + 4 * tile, std::bit_cast<std::uint32_t>(scale), 4);
    put_tile<S>(bytes.data() + tile * kTile, part, static_cast<double>(scale));
  }
  put_bf16<S>(bytes.data() + kLatent + 16, x.tail(kRotary));
  return bytes;
}

template <class S>
Vector<S> unpacked_token(const LatentToken& bytes) {
  using namespace latent_detail;
  Vector<S> x(kLatent + kRotary);
  for (std::int64_t i = 0; i < kLatent; ++i) {
    const auto scale = std::bit_cast<float>(get(bytes.data() + kLatent + 4 * (i / kTile), 4));
    x(i) = static_cast<S>(decode_e4m3(bytes[static_cast<std::size_t>(i)])) * static_cast<S>(scale);
  }
  for (std::int64_t i = 0; i < kRotary; ++i)
    x(kLatent + i) = bf16_at<S>(bytes.data() + kLatent + 16 + 2 * i);
  return x;
}

constexpr std::int64_t kShortLatent = 448, kShortTile = 64, kValueBytes = 576, kScaleBytes = 8;

/// Bytes of a block of 584-byte tokens.
constexpr std::int64_t latent_block_size(std::int64_t tokens) {
  const std::int64_t bytes = tokens * (kValueBytes + kScaleBytes);
  return (bytes + kValueBytes - 1) / kValueBytes * kValueBytes;
}

/// Packs tokens [n, 512] = [latent; rotary part] into one block.
template <class S>
std::vector<std::uint8_t> packed_block(const TensorView<const S, 2>& tokens) {
  using namespace latent_detail;
  require(tokens.extent(1) == kShortLatent + kRotary, "a token of a block has 512 values");
  const std::int64_t n = tokens.extent(0);
  std::vector<std::uint8_t> block(static_cast<std::size_t>(latent_block_size(n)), 0);
  for (std::int64_t t = 0; t < n; ++t) {
    const Vector<S> x = as_vector(at(tokens, t));
    std::uint8_t* const values = block.data() + t * kValueBytes;
    std::uint8_t* const scales = block.data() + n * kValueBytes + t * kScaleBytes;
    for (std::int64_t tile = 0; tile < kShortLatent / kShortTile; ++tile) {
      const Vector<S> part = x.segment(tile * kShortTile, kShortTile);
      const float scale = tile_scale(amax_of(part), TileScale::power_of_two);
      scales[tile] = static_cast<std::uint8_t>(std::ilogb(scale) + 127);
      put_tile<S>(values + tile * kShortTile, part, static_cast<double>(scale));
    }
    put_bf16<S>(values + kShortLatent, x.tail(kRotary));
  }
  return block;
}

/// The values of token t in a block of n tokens.
template <class S>
Vector<S> unpacked_from_block(const std::vector<std::uint8_t>& block, std::int64_t n,
                              std::int64_t t) {
  using namespace latent_detail;
  require(static_cast<std::int64_t>(block.size()) == latent_block_size(n) && 0 <= t && t < n,
          "a block has its size, and the token is in it");
  const std::uint8_t* const values = block.data() + t * kValueBytes;
  const std::uint8_t* const scales = block.data() + n * kValueBytes + t * kScaleBytes;
  Vector<S> x(kShortLatent + kRotary);
  for (std::int64_t i = 0; i < kShortLatent; ++i)
    x(i) = static_cast<S>(std::ldexp(decode_e4m3(values[i]), scales[i / kShortTile] - 127));
  for (std::int64_t i = 0; i < kRotary; ++i)
    x(kShortLatent + i) = bf16_at<S>(values + kShortLatent + 2 * i);
  return x;
}

}  // namespace lockstep::reference
