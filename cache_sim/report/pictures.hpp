// The pictures of a report. Colours are classes of the style sheet, and no picture depends on
// colour alone.
#pragma once

#include <string>

#include "cache_sim/report/json_field.hpp"

namespace lockstep::cache_sim {

/// The idea of the project: policy, oracle and server are sent the same operations, and a checker
/// compares.
std::string idea_picture();

/// A box of the tree picture, for the legend: `kind` is state, tombstone, kv or locked.
std::string legend_box(std::string_view kind);

/// The tree of the cache at the end of the run: /traces/…/runs/…/tree.
std::string tree_picture(const JsonField& tree);

/// The used part of the pools after each event. `run` is /traces/…/runs/….
std::string pools_picture(const JsonField& run);

/// The copies between the device and the host that were in flight after each event.
std::string copies_picture(const JsonField& run);

/// A row for each request: waiting, prefill, decode, retractions.
std::string requests_picture(const JsonField& run);

/// Hit ratios of the policies of a workload: /workloads/….
std::string hit_ratio_picture(const JsonField& workload);

}  // namespace lockstep::cache_sim
