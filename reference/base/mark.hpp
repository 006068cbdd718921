// Marks count how often rare paths of the code are taken, so that a search can list those that it
// never reached.
#pragma once

#include <cstdint>
#include <string_view>

#include "reference/base/registry.hpp"

namespace lockstep {

struct MarkEntry {
  std::string_view name;
  const std::uint64_t* count;
};

/// LOCKSTEP_MARK("split.tombstone") marks a path: `lockstep list marks` lists it from program
/// start, and reaching it counts. Each thread has its own counts, which are read between runs.
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
    (void)&registration;  // an odr-use, without which the registration is not instantiated
    ++count;
  }
};

#define LOCKSTEP_MARK(name) ::lockstep::Mark<name>::reach()

}  // namespace lockstep
