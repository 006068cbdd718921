// Numbers with their nouns, for sentences.
#pragma once

#include <fmt/format.h>

#include <concepts>
#include <string>
#include <string_view>

namespace lockstep {

/// "1 token", "2 tokens". `plural` is for nouns whose plural is not noun + s: ("entry", "entries").
std::string counted(std::integral auto count, std::string_view noun, std::string_view plural = {}) {
  if (count == 1) return fmt::format("1 {}", noun);
  return plural.empty() ? fmt::format("{} {}s", count, noun) : fmt::format("{} {}", count, plural);
}

/// The verb that follows counted().
constexpr std::string_view is_or_are(std::integral auto count) {
  return count == 1 ? "is" : "are";
}

}  // namespace lockstep
