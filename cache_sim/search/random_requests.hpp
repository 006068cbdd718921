// Random traces at scheduler level: requests that arrive, with aborts, retractions and partial runs
// between them.
#pragma once

#include <vector>

#include "cache_sim/search/swarm.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

/// The statements of one trace. They end with a `run` without limits, a flush and a check.
std::vector<Statement> random_requests(const Swarm& swarm, Draw& draw);

}  // namespace lockstep::cache_sim
