// Random numbers as a pure function of (seed, stream, index): Philox4x32-10.
// Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
#pragma once

#include <array>
#include <cstdint>

namespace lockstep {

using PhiloxBlock = std::array<std::uint32_t, 4>;

/// Ten rounds of the bijection on `counter` under `key`.
constexpr PhiloxBlock philox4x32_10(PhiloxBlock counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product_0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t product_1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(product_1 >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(product_1),
               static_cast<std::uint32_t>(product_0 >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(product_0)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

/// 64 random bits that depend on the arguments alone, so that a value stays the same when a test
/// case is shrunk around it.
constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const PhiloxBlock block =
      philox4x32_10({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                     static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)},
                    {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return block[0] | std::uint64_t{block[1]} << 32;
}

/// A uniform number in 0 ... bound - 1, by multiplication (bias below bound / 2^64). bound >= 1.
constexpr std::uint64_t random_below(std::uint64_t bound, std::uint64_t seed, std::uint64_t stream,
                                     std::uint64_t index) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(Wide{random_bits(seed, stream, index)} * bound >> 64);
}

}  // namespace lockstep
