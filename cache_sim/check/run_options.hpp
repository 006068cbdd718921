// The options of a run: its subjects, their configuration, and how much is checked.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/check/children.hpp"
#include "cache_sim/check/outcomes.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/defect.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

enum class CheckLevel { off, labels, all };

struct RunOptions {
  /// Names as on the command line. The replies of the first subject drive the run.
  std::vector<std::string> subjects;
  Config config;
  ConfigFields fixed;              ///< fields whose value a search neither draws nor shrinks
  const Defect* defect = nullptr;  ///< planted into the policy that it belongs to
  std::string_view defect_name;
  CheckLevel check = CheckLevel::all;
  std::chrono::milliseconds timeout{10'000};
  std::string file;          ///< the name of the file in findings
  bool keep_events = false;  ///< keeps every event's text and the pools after it, for reports
  /// Called with every operation and the first subject's reply, for measurements.
  std::function<void(const Operation&, const Reply&)> watch{};
  /// Called with each request of a workload that has ended, or has not at the end of the run; it is
  /// then forgotten, and its name taken again. Not with CheckLevel::all, whose oracles remember.
  std::function<void(const RequestOutcome&)> ended{};
  /// An operation that every subject refuses as bad input is left out, and the run goes on.
  bool skip_illegal = false;
  /// Copies of these options share their children: a search starts each child once, and remembers
  /// which operations it does not support.
  std::shared_ptr<Children> children = std::make_shared<Children>();
};

}  // namespace lockstep::cache_sim
