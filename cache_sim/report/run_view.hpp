// The data of the templates traces.html and run.html: a trace and its runs.
#pragma once

#include <string>

#include "cache_sim/report/view.hpp"

namespace lockstep::cache_sim {

/// The anchor of a file on a page, and the anchor of its run `i`, counted from 0.
std::string trace_anchor(const JsonField& trace);
std::string run_anchor(const JsonField& trace, std::size_t i);

/// The meaning of a kind of finding, in a sentence; empty for an unknown kind.
std::string meaning_of(const JsonField& kind);

/// The public reports that the comment of a trace names, with links for known projects.
View references_view(const JsonField& trace);

/// The view of /traces/…: the text of the file, its description, and its runs.
View trace_view(const JsonField& trace);

}  // namespace lockstep::cache_sim
