// Searches as tests ask for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache_sim/search/explore.hpp"
#include "cache_sim/search/rewrites.hpp"

namespace lockstep::testing_support {

/// A search of a policy beside its oracle; of a policy drawn by each trace where `policy` is empty.
cache_sim::ExploreOutcome searched(const std::string& policy, const std::string& config,
                                   std::uint64_t seed, std::int64_t traces);

/// The defect's policy, damaged, beside its oracle.
cache_sim::RunOptions run_with_defect(const std::string& defect);

/// Holds a search to finding the defect within so many traces and to shrinking it to at most
/// kMostShrunkLines. Three or four are usual; reports/shrinking.md says what takes a dozen.
void search_for(const std::string& defect, std::uint64_t seed, std::int64_t traces);
inline constexpr std::size_t kMostShrunkLines = 12;

/// A trace's form, and the lines of one, one after another.
cache_sim::TraceForm form_of(const std::string& text);
std::string text_of(const cache_sim::TraceForm& form);

std::vector<std::string> policies_with_oracle();
std::vector<std::string> all_defects();

std::vector<std::string> one_defect_in_eight();

/// As GoogleTest allows it.
std::string test_name(std::string text);

}  // namespace lockstep::testing_support
