// Numbers with their nouns, for sentences.
#pragma once

#include <fmt/format.h>

#include <concepts>
#include <string>
#include <string_view>

namespace lockstep {

/// "1 token", "2 tokens"; a noun whose plural is not its s more gives it, as ("entry", "entries").
std::string counted(std::integral auto count, std::string_view noun, std::string_view plural = {}) {
  if (count == 1) return fmt::format("1 {}", noun);
  return plural.empty() ? fmt::format("{} {}s", count, noun) : fmt::format("{} {}", count, plural);
}

/// The verb behind it.
constexpr std::string_view is_or_are(std::integral auto count) {
  return count == 1 ? "is" : "are";
}

}  // namespace lockstep
