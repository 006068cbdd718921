// Shared by all runs of a search: child processes that can be greeted again, so that a server that
// takes seconds to start plays many traces; the operations that a child has called unsupported; and
// what its user should know and is no finding.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "reference/base/child_process.hpp"

namespace lockstep::cache_sim {

class Children {
 public:
  /// A running process of this command that waits for its next `hello`; null where there is none.
  std::unique_ptr<ChildProcess> take(const std::string& command);
  void give_back(const std::string& command, std::unique_ptr<ChildProcess> process);

  /// Forms of operations (operation_form) that a child answered with `unsupported`, each with the
  /// sentence that says so. What a scheduler asks for is told apart from what a trace of operations
  /// does, which may be nothing that a server ever does. No later run that is driven so sends them
  /// to any subject.
  using Unsupported = std::map<std::string, std::string>;
  enum class Driver { operations, scheduler };
  Unsupported unsupported(Driver driver) const;
  Unsupported unsupported() const;  ///< of both
  void note_unsupported(Driver driver, const std::string& form, const std::string& sentence);

  /// Sentences about what a child says and nobody compares, each once. They change no verdict.
  std::set<std::string> remarks() const;
  void remark(const std::string& sentence);

 private:
  mutable std::mutex guard_;
  std::multimap<std::string, std::unique_ptr<ChildProcess>> idle_;  // by command
  std::map<Driver, Unsupported> unsupported_;
  std::set<std::string> remarks_;
};

}  // namespace lockstep::cache_sim
