// A set of the values of an enumeration, as bits of a word.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace lockstep {

/// `Enum` counts from 0 and has at most 64 values.
template <class Enum>
class EnumSet {
 public:
  constexpr EnumSet() = default;
  constexpr EnumSet(std::initializer_list<Enum> values) {
    for (const Enum value : values) bits_ |= bit(value);
  }
  constexpr bool contains(Enum value) const { return (bits_ & bit(value)) != 0; }
  constexpr bool contains(EnumSet other) const { return (other.bits_ & ~bits_) == 0; }
  constexpr void add(Enum value) { bits_ |= bit(value); }
  constexpr void remove(EnumSet other) { bits_ &= ~other.bits_; }
  constexpr EnumSet operator&(EnumSet other) const { return EnumSet(bits_ & other.bits_); }
  constexpr EnumSet operator|(EnumSet other) const { return EnumSet(bits_ | other.bits_); }
  constexpr EnumSet& operator&=(EnumSet other) { return *this = *this & other; }
  constexpr EnumSet& operator|=(EnumSet other) { return *this = *this | other; }
  constexpr bool operator==(const EnumSet&) const = default;

 private:
  constexpr explicit EnumSet(std::uint64_t bits) : bits_(bits) {}
  static constexpr std::uint64_t bit(Enum value) {
    return std::uint64_t{1} << static_cast<unsigned>(value);
  }
  std::uint64_t bits_ = 0;
};

}  // namespace lockstep
