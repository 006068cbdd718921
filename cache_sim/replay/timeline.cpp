#include "cache_sim/replay/timeline.hpp"

#include <vector>

namespace lockstep::cache_sim {

Json timeline_json(const ReplayOutcome& outcome) {
  Json events = Json::array();
  const ReplaySession& run = *outcome.run;
  const auto microseconds = [](Nanoseconds time) { return static_cast<double>(time) / 1000.0; };
  std::size_t row = 0;
  std::vector<std::size_t> row_of;
  for (const RequestOutcome& request : run.outcomes()) {
    ++row;
    if (row_of.size() <= request.id.index()) row_of.resize(request.id.index() + 1);
    row_of[request.id.index()] = row;
    events.push_back({{"ph", "M"},
                      {"name", "thread_name"},
                      {"pid", 1},
                      {"tid", row},
                      {"args", {{"name", request.id.text()}}}});
  }
  for (const Span& span : run.spans())
    events.push_back({{"ph", "X"},
                      {"name", span.name},
                      {"pid", 1},
                      {"tid", row_of[span.request.index()]},
                      {"ts", microseconds(span.begin)},
                      {"dur", microseconds(span.end - span.begin)}});
  if (run.spans().empty()) {
    std::int64_t at = 0;
    for (const KeptEvent& event : run.kept_events())
      events.push_back({{"ph", "X"},
                        {"name", event.operation},
                        {"pid", 1},
                        {"tid", 0},
                        {"ts", at++},
                        {"dur", 1},
                        {"args", {{"reply", event.reply}, {"line", event.line}}}});
  }
  for (const LocatedFinding& located : run.findings())
    events.push_back({{"ph", "i"},
                      {"s", "g"},
                      {"name", to_string(located.finding.kind)},
                      {"pid", 1},
                      {"tid", 0},
                      {"ts", run.spans().empty() ? static_cast<double>(located.event - 1)
                                                 : microseconds(run.now())},
                      {"args", {{"text", located.finding.text}}}});
  return {{"displayTimeUnit", "ms"}, {"traceEvents", events}};
}

}  // namespace lockstep::cache_sim
