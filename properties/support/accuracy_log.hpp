// The evidence of a kernel's accuracy, gathered by the tests that compare it with the references.
#pragma once

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "reference/tensors/yardstick.hpp"

namespace lockstep::testing_support {

/// Of each operation and case, the comparison whose error was the largest part of its bound, and
/// how many there were.
class AccuracyLog {
 public:
  /// The program's log. It is written at the program's end to the file that LOCKSTEP_ACCURACY
  /// names, if it names one.
  static AccuracyLog& get() {
    static struct Written : AccuracyLog {
      ~Written() {
        if (const char* const file = std::getenv("LOCKSTEP_ACCURACY"))
          std::ofstream(file) << entries().dump(1) << '\n';
      }
    } log;
    return log;
  }

  void add(const std::string& operation, const std::string& what, const Verdict& verdict) {
    Entry& entry = entries_[operation][what];
    if (entry.cases++ > 0 && verdict.share <= entry.worst.share) return;
    entry.worst = verdict;
  }

  /// A comparison by bits.
  void add_bits(const std::string& operation, const std::string& what, bool same) {
    const double wrong = same ? 0 : 1;
    add(operation, what, {.pass = same, .error = wrong, .share = wrong});
  }

  /// {operation: [{case, error, yardstick, cases, worst}]}, as reports/evidence.py merges it.
  nlohmann::json entries() const {
    nlohmann::json all;
    for (const auto& [operation, entries] : entries_)
      for (const auto& [what, entry] : entries)
        all[operation].push_back({{"case", what},
                                  {"error", entry.worst.error},
                                  {"yardstick", entry.worst.bound},
                                  {"cases", entry.cases},
                                  {"worst", entry.worst.text}});
    return all;
  }

 private:
  struct Entry {
    long cases = 0;
    Verdict worst;
  };
  std::map<std::string, std::map<std::string, Entry>> entries_;
};

}  // namespace lockstep::testing_support
