#include "cache_sim/replay/timeline.hpp"

#include <nlohmann/json.hpp>
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
  const bool has_clock = !run.spans().empty();
  if (!run.kept_events().empty())
    events.push_back({{"ph", "M"},
                      {"name", "thread_name"},
                      {"pid", 1},
                      {"tid", 0},
                      {"args", {{"name", "operations"}}}});
  const auto count = [&](const char* name, double at, std::int64_t before, std::int64_t now) {
    if (now != before)
      events.push_back(
          {{"ph", "C"}, {"name", name}, {"pid", 1}, {"ts", at}, {"args", {{"in use", now}}}});
  };
  KeptEvent before{};
  std::int64_t number = 0;
  for (const KeptEvent& event : run.kept_events()) {
    const double at = has_clock ? microseconds(event.time) : static_cast<double>(number);
    Json operation = {
        {"ph", has_clock ? "i" : "X"},
        {"name", event.operation},
        {"pid", 1},
        {"tid", 0},
        {"ts", at},
        {"args", {{"event", ++number}, {"reply", event.reply}, {"line", event.line}}}};
    operation[has_clock ? "s" : "dur"] = has_clock ? Json("t") : Json(1);
    events.push_back(std::move(operation));
    count("KV tokens", at, before.kv_used, event.kv_used);
    count("state slots", at, before.states_used, event.states_used);
    before = event;
  }
  for (const LocatedFinding& located : run.findings())
    events.push_back(
        {{"ph", "i"},
         {"s", "g"},
         {"name", to_string(located.finding.kind)},
         {"pid", 1},
         {"tid", 0},
         {"ts", has_clock ? microseconds(run.now()) : static_cast<double>(located.event - 1)},
         {"args", {{"text", located.finding.text}}}});
  return {{"displayTimeUnit", "ms"}, {"traceEvents", events}};
}

}  // namespace lockstep::cache_sim
