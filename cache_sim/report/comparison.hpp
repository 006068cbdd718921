// The comparisons of a report: hit ratio against capacity for a few workloads, and conclusions.
// This file collects the data; pages are made from the data alone (cache_sim/report/page.hpp).
#pragma once

#include <string>
#include <vector>

#include "cache_sim/compare/compare.hpp"
#include "cache_sim/report/view.hpp"

namespace lockstep::cache_sim {

/// One workload of the report.
struct ComparisonPlan {
  std::string title;
  std::string about;  ///< a sentence about the workload
  CompareRequest request;
};

/// A comparison in the report's document: comparison_json(), with `title`, `about`, `command`, the
/// axes of its pictures, and conclusions.
Result<Json> comparison_of(const ComparisonPlan& plan);
/// The same for a comparison that was made before.
Json shown_comparison(const ComparisonPlan& plan, const Comparison& comparison);

/// Sentences about the figures.
struct Conclusions {
  std::vector<std::string> general;      ///< the best policy at each capacity, and the bounds
  std::vector<std::string> of_policies;  ///< for each policy, the use of memory and states
};
Conclusions conclusions_of(const Comparison& comparison);

/// The view of /comparisons/… for the template comparison.html.
View comparison_view(const JsonField& comparison);

}  // namespace lockstep::cache_sim
