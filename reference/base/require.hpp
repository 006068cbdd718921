// Assertions about the project's own code. Errors of the outside world: result.hpp.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace lockstep {

/// Thrown when a caller breaks a function's contract. It is an exception instead of an abort so
/// that RapidCheck can shrink the case.
class ContractViolation : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Throws ContractViolation with `sentence`, the contract that does not hold, and the place. The
/// place comes from builtins, since clang 14 cannot evaluate libstdc++ 12's std::source_location.
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
