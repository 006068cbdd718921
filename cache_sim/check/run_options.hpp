// What a run is asked for: which subjects, over which configuration, checked how far.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/check/children.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/defect.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

enum class CheckLevel { off, labels, all };

struct RunOptions {
  std::vector<std::string>
      subjects;  ///< names as on the command line; the first one's replies drive the run
  Config config;
  ConfigFields fixed;  ///< fields that a search neither draws nor shrinks, whatever their value
  const Defect* defect = nullptr;  ///< planted into the policy that it belongs to
  std::string_view defect_name;
  CheckLevel check = CheckLevel::all;
  std::chrono::milliseconds timeout{10'000};
  std::string file;          ///< named in findings
  bool keep_events = false;  ///< every event's text and the pools after it, for reports
  /// Sees every operation and the first subject's reply; for whoever measures.
  std::function<void(const Operation&, const Reply&)> watch{};
  /// An operation that every subject refuses as bad input is left out.
  bool skip_illegal = false;
  /// Copies of these options share their children: what a search starts once, and what it has
  /// learned about them.
  std::shared_ptr<Children> children = std::make_shared<Children>();
};

}  // namespace lockstep::cache_sim
