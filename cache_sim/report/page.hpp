// The page of a report: one string of HTML without a script that it needs, without a file beside it
// and without the network.
#pragma once

#include <string>

#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// The page knows the document and nothing else. Each figure and each text of a run carries the
/// JSON pointer of what it shows in `data-path`, and `data-as` where it is shown in another form
/// (percent, time, shortened); so a reader, and a test, can hold every one of them to the document.
std::string report_page(const Json& document);

}  // namespace lockstep::cache_sim
