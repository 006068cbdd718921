// The report's comparisons: hit ratio against capacity for a few workloads, and what to conclude.
// The data are collected here; pages are made from them alone (cache_sim/report/page.hpp).
#pragma once

#include <string>
#include <vector>

#include "cache_sim/compare/compare.hpp"
#include "cache_sim/report/view.hpp"

namespace lockstep::cache_sim {

/// One workload of the report.
struct ComparisonPlan {
  std::string title;
  std::string about;  ///< what the workload is, in a sentence
  CompareRequest request;
};

/// A comparison as the report's document holds it: comparison_json(), with `title`, `about`,
/// `command`, the axes of its pictures, and what to conclude.
Result<Json> comparison_of(const ComparisonPlan& plan);
/// The same of a comparison that was made already.
Json shown_comparison(const ComparisonPlan& plan, const Comparison& comparison);

/// Sentences made from the figures.
struct Conclusions {
  std::vector<std::string> general;      ///< which policy for each capacity, and what bounds all
  std::vector<std::string> of_policies;  ///< what memory and states are worth to each
};
Conclusions conclusions_of(const Comparison& comparison);

/// /comparisons/… for the template comparison.html.
View comparison_view(const JsonField& comparison);

}  // namespace lockstep::cache_sim
