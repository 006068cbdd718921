#include "cache_sim/report/run_document.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cache_sim/replay/timeline.hpp"
#include "cache_sim/trace/public_reports.hpp"

namespace lockstep::cache_sim {
namespace {

/// The largest number of entries in a picture or a list.
constexpr std::size_t kMostNodes = 40;
constexpr std::int64_t kMostEvents = 40;
constexpr std::int64_t kEventsAfter = 9;  // of the shown events, those after the wrong one

Json events_json(const ReplaySession& run) {
  Json events = Json::array();
  for (const KeptEvent& event : run.kept_events()) {
    events.push_back({{"event", events.size() + 1},
                      {"line", event.line},
                      {"time_ns", event.time},
                      {"operation", event.operation},
                      {"reply", event.reply},
                      {"kv_used", event.kv_used},
                      {"states_used", event.states_used}});
    if (!event.rows.empty()) events.back()["numbers"] = event.rows;
  }
  return events;
}

/// The request of a finding: the one that it names, or that of its event.
std::string request_of(const LocatedFinding& located) {
  if (!located.request.empty()) return located.request;
  constexpr std::string_view kId = " id=";
  const std::size_t at = located.operation.find(kId);
  if (at == std::string::npos) return "";
  const std::size_t begin = at + kId.size();
  return located.operation.substr(begin, located.operation.find(' ', begin) - begin);
}

/// The event before `first` that explains the run's first finding: the admission of its request.
Json events_before(const ReplaySession& run, std::int64_t first) {
  Json before = Json::array();
  const std::string request = run.findings().empty() ? "" : request_of(run.findings().front());
  if (request.empty()) return before;
  const std::string admitted = "admit id=" + request + " ";
  for (std::int64_t event = 1; event < first; ++event)
    if (run.kept_events()[static_cast<std::size_t>(event - 1)].operation.starts_with(admitted))
      before.push_back(event);
  return before;
}

/// The events that a page shows: those around the first finding, or the first events.
Json window_json(const ReplaySession& run) {
  const std::int64_t count = run.event_count();
  std::int64_t last = std::min(count, kMostEvents);
  if (!run.findings().empty())
    last = std::clamp(run.findings().front().event + kEventsAfter, last, count);
  const std::int64_t first = std::max<std::int64_t>(1, last - kMostEvents + 1);
  return {{"first", first},
          {"last", last},
          {"cut", first != 1 || last != count},
          {"before", events_before(run, first)}};
}

/// Whether an event belongs to a step that only decodes, with an ordinary reply.
bool only_decodes(const KeptEvent& event) {
  const std::string_view operation = event.operation, reply = event.reply;
  if (operation.starts_with("step ") || operation.starts_with("complete ")) return true;
  const bool decodes =
      operation.starts_with("extend ") && operation.find(" n=1 tokens=") != operation.npos;
  const auto is_zero = [&](std::string_view field) {
    const std::size_t at = reply.find(field);
    return at == reply.npos || reply.substr(at + field.size(), 1) == "0";
  };
  return decodes && reply.find("n=1") != reply.npos && is_zero("evicted_kv=") &&
         is_zero("evicted_states=");
}

/// Ranges of events to fold: at least three steps that only decode. The event of the first finding
/// and the two before it are not folded.
Json folds_json(const ReplaySession& run) {
  const std::vector<KeptEvent>& events = run.kept_events();
  const std::int64_t wrong = run.findings().empty() ? 0 : run.findings().front().event;
  Json folds = Json::array();
  std::int64_t first = 1, steps = 0;
  const auto close = [&](std::int64_t end) {
    if (steps >= 3) folds.push_back({{"first", first}, {"last", end - 1}, {"steps", steps}});
    first = end + 1;
    steps = 0;
  };
  const auto count = static_cast<std::int64_t>(events.size());
  for (std::int64_t i = 1; i <= count; ++i) {
    const KeptEvent& event = events[static_cast<std::size_t>(i - 1)];
    if (!only_decodes(event) || (i <= wrong && i > wrong - 3))
      close(i);
    else if (event.operation.starts_with("step "))
      ++steps;
  }
  close(count + 1);
  return folds;
}

Json pools_json(const ReplaySession& run) {
  const std::optional<Snapshot> content = run.snapshot(0);
  if (!content) return nullptr;
  std::int64_t kv_most = 0;
  std::int64_t states_most = 0;
  for (const KeptEvent& event : run.kept_events()) {
    kv_most = std::max(kv_most, event.kv_used);
    states_most = std::max(states_most, event.states_used);
  }
  return {{"kv_total", content->kv_total},
          {"kv_used_max", kv_most},
          {"states_total", content->states_total},
          {"states_used_max", states_most}};
}

/// For each node that is shown, the number of hidden nodes below it; the last entry is for the
/// root.
std::vector<std::int64_t> hidden_below(const std::vector<SnapshotNode>& nodes) {
  const std::size_t shown = std::min(nodes.size(), kMostNodes);
  std::vector<std::int64_t> hidden(shown + 1);
  for (std::size_t i = shown; i < nodes.size(); ++i) {
    int above = nodes[i].parent;
    while (above >= static_cast<int>(shown)) above = nodes[static_cast<std::size_t>(above)].parent;
    ++hidden[above < 0 ? shown : static_cast<std::size_t>(above)];
  }
  return hidden;
}

/// Whether a sentence contains these words, and not as the beginning of a longer number or path.
bool mentions(std::string_view text, std::string_view words) {
  for (std::size_t at = text.find(words); at != std::string_view::npos;
       at = text.find(words, at + 1)) {
    const std::size_t end = at + words.size();
    if (end == text.size() || std::string_view(" ,.;").find(text[end]) != std::string_view::npos)
      return true;
  }
  return false;
}

/// Whether the first finding is about the node or its state.
bool is_guilty(const ReplaySession& run, const SnapshotNode& node) {
  if (run.findings().empty()) return false;
  const std::string& text = run.findings().front().finding.text;
  return (!node.path.empty() && mentions(text, "the node at " + node.path)) ||
         (node.state_slot > 0 && mentions(text, fmt::format("state slot {}", node.state_slot)));
}

/// The tree at the end of the run. Parents precede children, so the first nodes are the top of the
/// tree.
Json tree_json(const ReplaySession& run) {
  const std::optional<Snapshot> content = run.snapshot(0);
  if (!content) return nullptr;
  const std::vector<SnapshotNode>& nodes = content->nodes;
  const auto count = [&](auto what) { return std::ranges::count_if(nodes, what); };
  const std::vector<std::int64_t> hidden = hidden_below(nodes);
  Json tree = {{"has_states", content->states_total > 0},
               {"node_count", nodes.size()},
               {"state_count", count([](const SnapshotNode& node) { return node.has_state; })},
               {"tombstone_count", content->states_total > 0 ? count([](const SnapshotNode& node) {
                  return !node.has_state;
                })
                                                             : 0},
               {"locked_count", count([](const SnapshotNode& node) { return node.locked; })},
               {"shown_count", hidden.size() - 1},
               {"hidden_at_root", hidden.back()},
               {"nodes", Json::array()}};
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const SnapshotNode& node = nodes[i];
    Json one = {{"parent", node.parent}, {"edge", node.edge},
                {"depth", node.depth},   {"state", node.has_state},
                {"locked", node.locked}, {"guilty", is_guilty(run, node)}};
    if (node.state_slot > 0) one["state_slot"] = node.state_slot;
    if (i + 1 < hidden.size()) one["hidden_below"] = hidden[i];
    tree["nodes"].push_back(std::move(one));
  }
  return tree;
}

Json spans_json(const ReplaySession& run) {
  Json spans = Json::array();
  for (const Span& span : run.spans())
    spans.push_back({{"request", span.request.text()},
                     {"name", span.name},
                     {"begin_ns", span.begin},
                     {"end_ns", span.end}});
  return spans;
}

Json copies_json(const ReplaySession& run) {
  Json copies = Json::array();
  for (const CopySpan& span : copy_spans(run.kept_events())) {
    const SnapshotHost::Copied& what = span.copy.what;
    const std::string_view tier = span.copy.to_host ? "host" : "device";
    Json copy = {{"to", tier},
                 {"kv_tokens", what.kv_tokens},
                 {"states", what.states},
                 {"text", fmt::format("{} KV, {} state{} to the {}", what.kv_tokens, what.states,
                                      what.states == 1 ? "" : "s", tier)},
                 {"queued", span.queued}};
    if (span.landed != 0) copy["landed"] = span.landed;
    copies.push_back(std::move(copy));
  }
  return copies;
}

Json defect_json(const std::string& name) {
  const DefectEntry* const entry = Registry<DefectEntry>::find(name);
  if (entry == nullptr) return nullptr;
  return {{"name", name}, {"sentence", entry->sentence}};
}

Json kind_json(std::optional<FindingKind> kind) {
  return kind ? Json(to_string(*kind)) : Json(nullptr);
}

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

/// The end of the first or of the last sentence of a text; npos if no sentence ends.
enum class Which { first, last };
std::size_t sentence_end(std::string_view text, Which which) {
  const bool ends = !text.empty() && std::string_view(".?)").find(text.back()) != text.npos;
  if (which == Which::last && ends) return text.size();
  std::size_t end = std::string_view::npos;
  for (std::size_t i = 0; i + 1 < text.size(); ++i)
    if ((text[i] == '.' || text[i] == '?') && text[i + 1] == ' ') {
      end = i + 1;
      if (which == Which::first) return end;
    }
  return end == std::string_view::npos && ends ? text.size() : end;
}

/// A heading from the beginning of the comment, and the rest of the comment.
struct Heading {
  std::string title;
  std::vector<std::string> paragraph;
};

/// The heading is the first line of the comment, without a sentence that continues in the next
/// line. If the first sentence is wrapped, it is that whole sentence.
Heading heading_of(std::vector<std::string> comment) {
  constexpr std::size_t kWrapped = 70;  // a shorter line was ended by its author
  if (comment.empty()) return {};
  std::string title = comment.front();
  comment.erase(comment.begin());
  std::size_t end = sentence_end(title, Which::last);
  if (title.size() < kWrapped || comment.empty()) end = title.size();
  while (end == std::string::npos && !comment.empty()) {
    title += ' ' + comment.front();
    comment.erase(comment.begin());
    end = sentence_end(title, Which::first);
  }
  if (end < title.size()) comment.insert(comment.begin(), title.substr(end + 1));
  return {title.substr(0, end), std::move(comment)};
}

/// The kind that the file's run line expects for this planted defect. Without a planted defect
/// nothing should be found: a `# finds:` that a search has written is then the fault.
std::optional<FindingKind> asked_for(const ReplayRequest& request, const ReplayOutcome& outcome) {
  if (request.defect.empty() || !outcome.trace) return std::nullopt;
  for (const RunDirective& directive : outcome.trace->runs) {
    const std::vector<std::string> words = directive_words(directive, request.file);
    const auto option = std::ranges::find(words, "--defect");
    if (option != words.end() && option + 1 != words.end() && option[1] == request.defect)
      return directive.finds;
  }
  return std::nullopt;
}

}  // namespace

std::optional<FindingKind> found_by(const ReplayOutcome& outcome) {
  const std::vector<LocatedFinding>& findings = outcome.run->findings();
  if (findings.empty()) return std::nullopt;
  return findings.front().finding.kind;
}

std::string kind_text(std::optional<FindingKind> kind) {
  return std::string(kind ? to_string(*kind) : "nothing");
}

Json verdict_json(const std::string& command, const ReplayRequest& request,
                  const ReplayOutcome& outcome, std::optional<FindingKind> finds) {
  const std::optional<FindingKind> found = found_by(outcome);
  Json subjects = Json::array();
  for (std::size_t i = 0; i < outcome.run->subject_count(); ++i)
    subjects.push_back(outcome.run->subject_name(i));
  Json json = {{"command", command},
               {"finds", kind_json(finds)},
               {"found", kind_json(found)},
               {"as_expected", found == finds}};
  if (found != finds)
    json["complaint"] = fmt::format("The run found {} and should have found {}.", kind_text(found),
                                    kind_text(finds));
  json["subjects"] = subjects;
  json["defect"] = defect_json(request.defect);
  return json;
}

Json shown_run_json(const std::string& command, const ReplayRequest& request,
                    const ReplayOutcome& outcome, std::optional<FindingKind> finds) {
  const ReplaySession& run = *outcome.run;
  Json json = verdict_json(command, request, outcome, finds);
  json["run"] = run_json(request, outcome);
  json["end_ns"] = run.now();
  json["events"] = events_json(run);
  json["window"] = window_json(run);
  json["folds"] = folds_json(run);
  json["pools"] = pools_json(run);
  json["copies"] = copies_json(run);
  json["tree"] = tree_json(run);
  json["spans"] = spans_json(run);
  return json;
}

Json trace_json(const std::string& file, const std::string& folder, const Trace& trace) {
  const std::string stem = std::filesystem::path(file).stem().string();
  const std::vector<std::string> lines = lines_of(file);
  const Heading heading = heading_of(trace.description);
  return {{"file", file},
          {"name", stem},
          {"folder", folder},
          {"title", heading.title.empty() ? stem : heading.title},
          {"paragraph", heading.paragraph},
          {"references", public_references(trace.description)},
          {"text", lines},
          {"line_count", lines.size()},
          {"runs", Json::array()}};
}

void make_text(Json& json) {
  if (json.is_structured()) {
    for (Json& inner : json) make_text(inner);
    return;
  }
  if (!json.is_string()) return;
  std::string text = json.get<std::string>();
  for (char& c : text)
    if ((static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7F) c = '?';
  constexpr auto kReplace = nlohmann::detail::error_handler_t::replace;
  json = Json::parse(Json(text).dump(-1, ' ', false, kReplace)).get<std::string>();
}

Json runs_document(const std::vector<ReplayRequest>& requests,
                   const std::vector<ReplayOutcome>& outcomes) {
  Json traces = Json::array();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::string& file = requests[i].file;
    if (traces.empty() || traces.back()["file"] != file)
      traces.push_back(trace_json(file, "run", outcomes[i].trace.value_or(Trace{.path = file})));
    traces.back()["runs"].push_back(shown_run_json(replay_command(requests[i]).substr(2),
                                                   requests[i], outcomes[i],
                                                   asked_for(requests[i], outcomes[i])));
  }
  Json document = {{"traces", std::move(traces)}};
  make_text(document);
  return document;
}

}  // namespace lockstep::cache_sim
