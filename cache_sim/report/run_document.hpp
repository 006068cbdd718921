// One run as the pages show it: its events, its tree, its pools, what its requests did.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// The kind of a run's first finding.
std::optional<FindingKind> found_by(const ReplayOutcome& outcome);
std::string kind_text(std::optional<FindingKind> kind);  ///< `nothing` where there is none

/// What every run of a document says of itself: whether it found what it should.
Json verdict_json(const std::string& command, const ReplayRequest& request,
                  const ReplayOutcome& outcome, std::optional<FindingKind> finds);

/// The same with the run's JSON and what the pages draw. The request kept its events.
Json shown_run_json(const std::string& command, const ReplayRequest& request,
                    const ReplayOutcome& outcome, std::optional<FindingKind> finds);

/// A file of a document, with no run in it yet.
Json trace_json(const std::string& file, const std::string& folder, const Trace& trace);

/// Names, comments and a child's answers can hold bytes that are no text; a document holds text
/// alone.
void make_text(Json& json);

/// The document of runs_page(): these runs, those of the same file together.
Json runs_document(const std::vector<ReplayRequest>& requests,
                   const std::vector<ReplayOutcome>& outcomes);

}  // namespace lockstep::cache_sim
