// The project's digest step: splitmix64's finaliser with its increment. Steele, Lea, Flood 2014,
// "Fast Splittable Pseudorandom Number Generators", fig. 16. mix64(0) = e220a8397b1dcdaf.
#pragma once

#include <cstdint>

namespace lockstep {

constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// A rolling digest over numbers; printed as %016x.
struct Digest {
  std::uint64_t value = 0;
  constexpr void add(std::uint64_t x) { value = mix64(value ^ x); }
};

}  // namespace lockstep
