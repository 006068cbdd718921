// The verdicts of a report as a JUnit file.
#pragma once

#include <string>

#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// The document's runs, one test case each, in a suite per trace or workload.
std::string report_junit(const Json& document);

}  // namespace lockstep::cache_sim
