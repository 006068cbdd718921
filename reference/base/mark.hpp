// Marks count how often a rare path was taken, so that a search can say what it never reached.
#pragma once

#include <cstdint>
#include <string_view>

#include "reference/base/registry.hpp"

namespace lockstep {

struct MarkEntry {
  std::string_view name;
  const std::uint64_t* count;
};

/// LOCKSTEP_MARK("split.tombstone") on a path: listed by `lockstep list marks` from program start,
/// counted when reached. Counts belong to a thread's runs; they are read when no run is under way.
template <std::size_t N>
struct MarkName {
  char text[N];
  constexpr MarkName(const char (&literal)[N]) {
    for (std::size_t i = 0; i < N; ++i) text[i] = literal[i];
  }
};

template <MarkName name>
struct Mark {
  static inline std::uint64_t count = 0;
  static inline const Registration<MarkEntry> registration{{name.text, &count}};
  static void reach() {
    (void)&registration;  // odr-use, or the registration is never made
    ++count;
  }
};

#define LOCKSTEP_MARK(name) ::lockstep::Mark<name>::reach()

}  // namespace lockstep
