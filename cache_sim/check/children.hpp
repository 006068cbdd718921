// State that all runs of a search share: child processes that can be greeted again, so that a
// server that takes seconds to start plays many traces; the operations that a child has called
// unsupported; and remarks for the user that are no findings.
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
  /// sentence that says so. No later run with the same driver sends these forms to any subject. The
  /// two drivers are kept apart, because a trace of operations may contain operations that no
  /// scheduler ever asks for.
  using Unsupported = std::map<std::string, std::string>;
  enum class Driver { operations, scheduler };
  Unsupported unsupported(Driver driver) const;
  Unsupported unsupported() const;  ///< of both drivers
  void note_unsupported(Driver driver, const std::string& form, const std::string& sentence);

  /// Sentences about answers of a child that nothing is compared with, each kept once. They change
  /// no verdict.
  std::set<std::string> remarks() const;
  void remark(const std::string& sentence);

 private:
  mutable std::mutex guard_;
  std::multimap<std::string, std::unique_ptr<ChildProcess>> idle_;  // by command
  std::map<Driver, Unsupported> unsupported_;
  std::set<std::string> remarks_;
};

}  // namespace lockstep::cache_sim
