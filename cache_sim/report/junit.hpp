// The runs of a report as a JUnit file.
#pragma once

#include <string>

#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// One test case for each run of the document, in a suite for each trace or workload.
std::string report_junit(const Json& document);

}  // namespace lockstep::cache_sim
