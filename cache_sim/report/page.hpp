// The pages of a report, made from its document and cache_sim/report/templates/. Each page is one
// HTML file that needs no network and no other file.
#pragma once

#include <string>
#include <vector>

#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

struct Page {
  std::string path;  ///< relative to the folder of the report
  std::string markup;
};

/// index.html, a page for each trace, and pages on policies, kernels and reading. The pages use the
/// document alone. Each figure and each text of a run carries its JSON pointer in `data-path`, and
/// `data-as` if it is shown in another form (percent, time, shortened), so that a reader and a test
/// can compare it with the document.
std::vector<Page> report_pages(const Json& document);

/// Runs on one page: `traces` of the document as in a report, without timelines, and `search` if
/// the runs are the findings of a search.
std::string runs_page(const Json& document);

/// `comparisons` of the document on one page.
std::string comparisons_page(const Json& document);

}  // namespace lockstep::cache_sim
