// Assertions about the project's own code; for bad files and children that die see result.hpp.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace lockstep {

/// Thrown where a caller broke a function's contract. An exception, not an abort, so that
/// RapidCheck can shrink it.
class ContractViolation : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// States what holds here. `sentence` is the contract, so that the failure reads as one.
/// The place comes from builtins: clang 14 cannot evaluate libstdc++ 12's std::source_location.
[[noreturn, gnu::cold, gnu::noinline]] inline void violated(std::string_view sentence,
                                                            std::string_view file, int line) {
  file.remove_prefix(file.find_last_of('/') + 1);  // npos + 1 is 0
  throw ContractViolation(std::string(sentence) + " (" + std::string(file) + ":" +
                          std::to_string(line) + ")");
}

inline void require(bool condition, std::string_view sentence, const char* file = __builtin_FILE(),
                    int line = __builtin_LINE()) {
  if (!condition) [[unlikely]]
    violated(sentence, file, line);
}

}  // namespace lockstep
