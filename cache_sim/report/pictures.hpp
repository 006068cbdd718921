// The pictures of a report's page. Colours are classes of its style sheet, and no picture tells by
// colour alone.
#pragma once

#include <string>

#include "cache_sim/report/json_field.hpp"

namespace lockstep::cache_sim {

/// The same operations go to policy, oracle and server; a checker compares.
std::string idea_picture();

/// One box of the tree's picture, for the legend: `kind` is state, tombstone, kv or locked.
std::string legend_box(std::string_view kind);

/// The cache's tree when the run ended: /traces/…/runs/…/tree.
std::string tree_picture(const JsonField& tree);

/// How much of the pools is in use after each event. `run` is /traces/…/runs/….
std::string pools_picture(const JsonField& run);

/// A row for each request: waiting, prefill, decode, retractions.
std::string requests_picture(const JsonField& run);

/// Hit ratios of a workload's policies: /workloads/….
std::string hit_ratio_picture(const JsonField& workload);

}  // namespace lockstep::cache_sim
