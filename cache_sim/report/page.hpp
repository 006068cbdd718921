// The pages of a report, made from its document and cache_sim/report/templates/. Each is one file
// of HTML that needs no network and no file beside it.
#pragma once

#include <string>
#include <vector>

#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

struct Page {
  std::string path;  ///< below the report's folder
  std::string markup;
};

/// index.html, a page for each trace, and those on policies, kernels and how to read it all. Pages
/// know the document and nothing else. Each figure and each text of a run carries the JSON pointer
/// of what it shows in `data-path`, and `data-as` where it is shown in another form (percent, time,
/// shortened); so a reader, and a test, can hold every one of them to the document.
std::vector<Page> report_pages(const Json& document);

/// Runs alone, on one page: `traces` of the document as in a report, each run without a timeline;
/// and `search` where they are the findings of one.
std::string runs_page(const Json& document);

/// `comparisons` of the document alone, on one page.
std::string comparisons_page(const Json& document);

}  // namespace lockstep::cache_sim
