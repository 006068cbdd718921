// A comparison as JSON (cache_sim/replay/json.md, "A comparison").
#pragma once

#include "cache_sim/compare/compare.hpp"
#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// The object of one policy at one capacity.
Json compared_json(const ComparedPolicy& policy, const Model& model);

/// The object of a whole comparison.
Json comparison_json(const CompareRequest& request, const Comparison& comparison);

}  // namespace lockstep::cache_sim
