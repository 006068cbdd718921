#include "cache_sim/replay/timeline.hpp"

#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

namespace lockstep::cache_sim {

std::vector<CopySpan> copy_spans(const std::vector<KeptEvent>& events) {
  std::vector<CopySpan> spans;
  std::map<std::uint64_t, std::size_t> flying;  // by id, the place in `spans`
  for (std::size_t i = 0; i < events.size(); ++i) {
    const auto event = static_cast<std::int64_t>(i) + 1;
    std::map<std::uint64_t, std::size_t> still;
    for (const SnapshotHost::InFlight& copy : events[i].copies) {
      const auto known = flying.find(copy.id);
      still[copy.id] = known == flying.end() ? spans.size() : known->second;
      if (known == flying.end()) spans.push_back({copy, event, 0});
    }
    for (const auto& [id, place] : flying)
      if (!still.contains(id)) spans[place].landed = event;
    flying = std::move(still);
  }
  return spans;
}

namespace {

double microseconds(Nanoseconds time) {
  return static_cast<double>(time) / 1000.0;
}

Json thread_name(std::size_t row, std::string_view name) {
  return {
      {"ph", "M"}, {"name", "thread_name"}, {"pid", 1}, {"tid", row}, {"args", {{"name", name}}}};
}

/// Two events of a copy: when it is queued and, where it has landed, when. `moment`: the time of an
/// event's number.
template <class Moment>
void add_copies(Json& events, const std::vector<KeptEvent>& kept, const Moment& moment) {
  for (const CopySpan& span : copy_spans(kept))
    for (const bool begins : {true, false})
      if (begins || span.landed != 0)
        events.push_back(
            {{"ph", begins ? "b" : "e"},
             {"cat", "copy"},
             {"id", span.copy.id},
             {"name", span.copy.to_host ? "to the host" : "to the device"},
             {"pid", 1},
             {"tid", 0},
             {"ts", moment(begins ? span.queued : span.landed)},
             {"args",
              {{"kv_tokens", span.copy.what.kv_tokens}, {"states", span.copy.what.states}}}});
}

}  // namespace

Json timeline_json(const ReplayOutcome& outcome) {
  Json events = Json::array();
  const ReplaySession& run = *outcome.run;
  std::size_t row = 0;
  std::vector<std::size_t> row_of;
  for (const RequestOutcome& request : run.outcomes()) {
    ++row;
    if (row_of.size() <= request.id.index()) row_of.resize(request.id.index() + 1);
    row_of[request.id.index()] = row;
    events.push_back(thread_name(row, request.id.text()));
  }
  for (const Span& span : run.spans())
    events.push_back({{"ph", "X"},
                      {"name", span.name},
                      {"pid", 1},
                      {"tid", row_of[span.request.index()]},
                      {"ts", microseconds(span.begin)},
                      {"dur", microseconds(span.end - span.begin)}});
  const bool has_clock = !run.spans().empty();
  if (!run.kept_events().empty()) events.push_back(thread_name(0, "operations"));
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
  const auto moment = [&](std::int64_t event) {
    return has_clock ? microseconds(run.kept_events()[static_cast<std::size_t>(event - 1)].time)
                     : static_cast<double>(event - 1);
  };
  add_copies(events, run.kept_events(), moment);
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
