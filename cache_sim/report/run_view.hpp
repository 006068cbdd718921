// What the templates traces.html and run.html see of a trace and its runs.
#pragma once

#include <string>

#include "cache_sim/report/view.hpp"

namespace lockstep::cache_sim {

/// A file's name as the name of a place on a page, and that of its run `i`, counted from 0.
std::string trace_anchor(const JsonField& trace);
std::string run_anchor(const JsonField& trace, std::size_t i);

/// What a kind of finding means, in a sentence; empty where it is none.
std::string meaning_of(const JsonField& kind);

/// Public reports that a trace's comment names, with a link where the number's project is known.
View references_view(const JsonField& trace);

/// /traces/…: the file's text, what it is about, and each run.
View trace_view(const JsonField& trace);

}  // namespace lockstep::cache_sim
