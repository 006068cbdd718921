// One run as the pages show it: its events, its tree, its pools and its requests.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// The kind of the run's first finding.
std::optional<FindingKind> found_by(const ReplayOutcome& outcome);
std::string kind_text(std::optional<FindingKind> kind);  ///< `nothing` if there is none

/// The verdict of a run in the document: whether it found the expected kind.
Json verdict_json(const std::string& command, const ReplayRequest& request,
                  const ReplayOutcome& outcome, std::optional<FindingKind> finds);

/// The verdict with the JSON of the run and the data of the pages. The request must keep events.
Json shown_run_json(const std::string& command, const ReplayRequest& request,
                    const ReplayOutcome& outcome, std::optional<FindingKind> finds);

/// The entry of a file in the document, without its runs.
Json trace_json(const std::string& file, const std::string& folder, const Trace& trace);

/// Replaces bytes that are not UTF-8: names, comments and answers of a child can contain some, a
/// document must not.
void make_text(Json& json);

/// The document of runs_page(): these runs, grouped by file.
Json runs_document(const std::vector<ReplayRequest>& requests,
                   const std::vector<ReplayOutcome>& outcomes);

}  // namespace lockstep::cache_sim
