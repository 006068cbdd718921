// Latents stored as bytes come back within the error of their format.
#include "reference/attention/latent_token.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

// The bounds of field measurements: 16/448 of a tile's largest with float scales, 1/17 with powers
// of two; the rotary part is lossless in bf16, and zeros stay zeros.
RC_GTEST_PROP(LatentToken, isWithinItsFormatsError, ()) {
  using reference::TileScale;
  const TileScale kind = *rc::gen::element(TileScale::exact, TileScale::power_of_two);
  const double size = *rc::gen::element(0.0, 1e-3, 1.0, 300.0);
  const auto x = on_grid<double>(Shape<1>{576}, {.seed = draw_seed(), .limit = 2});
  Vector<double> token = as_vector(x.view());
  token.head(512) *= size;
  const Vector<double> back =
      reference::unpacked_token<double>(reference::packed_token(token, kind));
  for (std::int64_t tile = 0; tile < 4; ++tile) {
    const double amax = token.segment(tile * 128, 128).cwiseAbs().maxCoeff();
    const double bound = kind == TileScale::exact ? 0.0358 * amax : std::max(amax / 16.9, 0x1p-23);
    RC_ASSERT((back - token).segment(tile * 128, 128).cwiseAbs().maxCoeff() <= bound);
  }
  RC_ASSERT(back.tail(64) == token.tail(64));
}

// The 584-byte token: every tile within the error of e4m3 under a power of two, the rotary part
// lossless, and a block of any size padded to whole multiples of 576 bytes.
RC_GTEST_PROP(LatentBlock, isWithinItsFormatsError, ()) {
  const std::int64_t n = *rc::gen::element<std::int64_t>(1, 2, 3, 64);
  const double size = *rc::gen::element(0.0, 1e-3, 1.0, 300.0);
  auto tokens = on_grid<double>(Shape<2>{n, 512}, {.seed = draw_seed(), .limit = 2});
  for (std::int64_t t = 0; t < n; ++t)
    for (std::int64_t i = 0; i < 448; ++i)
      tokens(t, i) *= size * (i / 64 == 3 ? 1e-2 : 1) * (t % 2 ? 1 : 20);
  const auto block = reference::packed_block<double>(tokens);
  RC_ASSERT(block.size() % 576 == 0u && block.size() >= static_cast<std::size_t>(584 * n));
  RC_ASSERT(block.size() < static_cast<std::size_t>(584 * n + 576));
  for (std::int64_t t = 0; t < n; ++t) {
    const Vector<double> token = as_vector(at(tokens.view(), t));
    const Vector<double> back = reference::unpacked_from_block<double>(block, n, t);
    for (std::int64_t tile = 0; tile < 7; ++tile) {
      const double amax = token.segment(tile * 64, 64).cwiseAbs().maxCoeff();
      RC_ASSERT((back - token).segment(tile * 64, 64).cwiseAbs().maxCoeff() <=
                std::max(amax / 16.9, 0x1p-23));
    }
    RC_ASSERT(back.tail(64) == token.tail(64));
  }
}

// Places of the bytes: values of all tokens first, then eight bytes of scales per token.
TEST(LatentBlock, layoutIsFlashMlas) {
  Array<double, 2> tokens(Shape<2>{2, 512}, 0.0);
  tokens(1, 64) = 448 * 4;  // tile 1 of token 1: its scale is 4
  tokens(1, 448) = -1.5;    // its first rotary value
  const auto block = reference::packed_block<double>(tokens);
  EXPECT_EQ(block.size(), 3u * 576);
  EXPECT_EQ(decode_e4m3(block[576 + 64]), 448);
  EXPECT_EQ(block[2 * 576 + 8 + 1], 127 + 2);
  EXPECT_EQ(block[2 * 576 + 7], 0) << "padding of token 0's scales";
  EXPECT_EQ(block[576 + 448] | block[576 + 449] << 8, 0xBFC0) << "-1.5 in bf16";
  EXPECT_EQ(reference::latent_block_size(64), 65 * 576);
  EXPECT_EQ(reference::latent_block_size(72), 73 * 576) << "nothing is left over";
  EXPECT_EQ(reference::latent_block_size(73), 75 * 576);
  EXPECT_EQ(reference::latent_block_size(1), 2 * 576);
  EXPECT_THROW(reference::unpacked_from_block<double>(block, 2, 2), ContractViolation);
  EXPECT_THROW(reference::unpacked_from_block<double>(block, 1, 0), ContractViolation);
}

// And of the 656-byte token: e4m3, four scales, then bf16, all little-endian.
TEST(LatentToken, layoutIsFlashMlas) {
  Vector<double> x = Vector<double>::Zero(576);
  x(128) = 448 * 0.5;
  x(575) = 3;
  const auto bytes = reference::packed_token(x, reference::TileScale::exact);
  EXPECT_EQ(bytes.size(), 656u);
  EXPECT_EQ(decode_e4m3(bytes[128]), 448);
  EXPECT_EQ(bytes[512 + 7], 0x3F) << "0.5f is 3F000000";
  EXPECT_EQ(bytes[512 + 4] | bytes[512 + 5] | bytes[512 + 6], 0);
  EXPECT_EQ(bytes[512 + 3], 0x3F) << "a tile of zeros has scale 1";
  EXPECT_EQ(bytes[655] << 8 | bytes[654], 0x4040) << "3 in bf16";
  const auto rounded_up = reference::packed_token(x, reference::TileScale::power_of_two);
  EXPECT_EQ(rounded_up[512 + 7], 0x3F);
  Vector<double> odd = x;
  odd(128) = 448 * 0.6;
  const auto up = reference::unpacked_token<double>(
      reference::packed_token(odd, reference::TileScale::power_of_two));
  EXPECT_NEAR(up(128), 448 * 0.6, 16) << "scale 1";
  EXPECT_EQ(reference::tile_scale(448 * 0.6, reference::TileScale::power_of_two), 1);
  EXPECT_EQ(reference::tile_scale(0, reference::TileScale::power_of_two), 0x1p-13f);
  EXPECT_THROW(reference::packed_token<double>(x.head(512), reference::TileScale::exact),
               ContractViolation);
}

TEST(LatentToken, scalesAreTheTilesLargestOverTheFormats) {
  using reference::tile_scale;
  using reference::TileScale;
  EXPECT_EQ(tile_scale(448, TileScale::exact), 1.0f);
  EXPECT_EQ(tile_scale(3, TileScale::exact), static_cast<float>(3.0 / 448));
  EXPECT_EQ(tile_scale(0, TileScale::exact), 1.0f);
  EXPECT_EQ(tile_scale(448, TileScale::power_of_two), 1.0f);
  EXPECT_EQ(tile_scale(448.5, TileScale::power_of_two), 2.0f);
  EXPECT_EQ(tile_scale(447.5, TileScale::power_of_two), 1.0f);
  EXPECT_EQ(tile_scale(448 * 1.2e-4, TileScale::power_of_two), 0x1p-13f);
  EXPECT_EQ(tile_scale(448 * 1.3e-4, TileScale::power_of_two), 0x1p-12f);
}

// Every tile has a scale of its own, in its own four bytes.
TEST(LatentToken, scalesStandInOrder) {
  Vector<double> x = Vector<double>::Zero(576);
  for (std::int64_t tile = 0; tile < 4; ++tile)
    x(tile * 128 + 127) = 448 * std::ldexp(1.0, static_cast<int>(tile) + 3);
  x(512) = 7;
  const auto bytes = reference::packed_token(x, reference::TileScale::exact);
  for (std::int64_t tile = 0; tile < 4; ++tile) {
    std::uint32_t bits = 0;
    for (std::int64_t i = 3; i >= 0; --i)
      bits = bits << 8 | bytes[static_cast<std::size_t>(512 + 4 * tile + i)];
    EXPECT_EQ(std::bit_cast<float>(bits), std::ldexp(1.0f, static_cast<int>(tile) + 3));
  }
  EXPECT_EQ(reference::unpacked_token<double>(bytes), x);
}

}  // namespace
}  // namespace lockstep
