#include "cache_sim/report/run_view.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <vector>

#include "cache_sim/report/pictures.hpp"
#include "cache_sim/report/svg.hpp"
#include "cache_sim/trace/public_reports.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kMostLines = 150;  // of a trace
constexpr std::size_t kMostLineCharacters = 400;
constexpr std::size_t kMostRequests = 30;
constexpr std::size_t kMostFindings = 4;

// --- The file ------------------------------------------------------------------------------------

/// The failed runs with a finding in this line, each kind once.
View marks_of_line(const JsonField& trace, std::size_t line) {
  View marks = list_view();
  std::vector<std::string> seen;
  const JsonField runs = trace.at("runs");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const JsonField findings = runs.item(i).at("run").at("findings");
    if (findings.size() == 0 ||
        findings.item(0).at("line").integer() != static_cast<std::int64_t>(line))
      continue;
    const std::string kind = findings.item(0).at("kind").text();
    if (std::ranges::find(seen, kind) != seen.end()) continue;
    seen.push_back(kind);
    View mark = object_view();
    mark.set("run", run_anchor(trace, i));
    mark.set("kind", view_of(findings.item(0).at("kind")));
    marks.push_back(mark);
  }
  return marks;
}

View line_view(const JsonField& trace, std::size_t i, bool& answer_is_next) {
  const JsonField line = trace.at("text").item(i);
  const std::string text = line.text();
  const std::string style = answer_is_next          ? "answer"
                            : text.starts_with('#') ? "comment"
                            : text == "----"        ? "rule"
                                                    : "verb";
  answer_is_next = text == "----";
  const View marks = marks_of_line(trace, i + 1);
  View view = object_view();
  view.set("style", style + (marks.is_non_empty_list() ? " wrong" : ""));
  view.set("marks", marks);
  view.set("text", code(line, kMostLineCharacters));
  return view;
}

/// The number of comment lines at the head of the file: the page shows them as title, text,
/// commands and verdicts.
std::size_t head_lines(const JsonField& trace) {
  const JsonField text = trace.at("text");
  std::size_t count = 0;
  while (count < text.size() && text.item(count).text().starts_with('#')) ++count;
  return count;
}

View lines_view(const JsonField& trace, std::size_t first) {
  bool answer_is_next = false;
  View lines = list_view();
  const JsonField text = trace.at("text");
  for (std::size_t i = first; i < std::min(text.size(), first + kMostLines); ++i)
    lines.push_back(line_view(trace, i, answer_is_next));
  return lines;
}
// --- A run ---------------------------------------------------------------------------------------

View finding_view(const JsonField& findings) {
  if (findings.size() == 0) return View(false);
  View view = view_of(findings.item(0));
  view.set("meaning", meaning_of(findings.item(0).at("kind")));
  View more = list_view();
  for (std::size_t i = 1; i < std::min(findings.size(), kMostFindings); ++i)
    more.push_back(view_of(findings.item(i)));
  view.set("has_more", more.is_non_empty_list());
  view.set("more", more);
  return view;
}

/// The events of the run's window, preceded by those that led to the finding.
View events_view(const JsonField& run) {
  const JsonField events = run.at("events");
  if (events.size() == 0) return View(false);
  const JsonField window = run.at("window");
  const JsonField findings = run.at("run").at("findings");
  const std::int64_t wrong = findings.size() == 0 ? 0 : findings.item(0).at("event").integer();
  const JsonField folds = run.at("folds");
  View groups = list_view(), rows = list_view();
  const auto close_group = [&](const View& fold) {
    if (!rows.is_non_empty_list()) return;
    View group = object_view();
    group.set("fold", fold);
    group.set("rows", rows);
    groups.push_back(group);
    rows = list_view();
  };
  const auto add = [&](std::int64_t event, bool gap) {
    View row = view_of(events.item(static_cast<std::size_t>(event - 1)));
    row.set("wrong", event == wrong);
    if (!events.item(static_cast<std::size_t>(event - 1)).has("numbers"))
      row.set("numbers", View(false));
    row.set("gap", gap);
    rows.push_back(row);
  };
  const std::int64_t first = window.at("first").integer();
  const JsonField before = window.at("before");
  for (std::size_t i = 0; i < before.size(); ++i) {
    const std::int64_t event = before.item(i).integer();
    const std::int64_t next = i + 1 < before.size() ? before.item(i + 1).integer() : first;
    add(event, next != event + 1);
  }
  const auto last = std::min(window.at("last").integer(), static_cast<std::int64_t>(events.size()));
  std::size_t next = 0;
  for (std::int64_t event = first; event <= last; ++event) {
    while (next < folds.size() && folds.item(next).at("last").integer() < event) ++next;
    const bool is_whole = next < folds.size() && folds.item(next).at("first").integer() >= first &&
                          folds.item(next).at("last").integer() <= last;
    if (is_whole && folds.item(next).at("first").integer() == event) close_group(View(false));
    add(event, false);
    if (is_whole && folds.item(next).at("last").integer() == event)
      close_group(view_of(folds.item(next)));
  }
  close_group(View(false));
  View view = view_of(window, {"before"});
  view.set("open", findings.size() > 0);
  view.set("has_time", run.at("end_ns").integer() > 0);
  view.set("has_pools", run.has("pools"));
  view.set("groups", groups);
  return view;
}

View tree_view(const JsonField& run) {
  if (!run.has("tree")) return View(false);
  const JsonField tree = run.at("tree");
  View view = view_of(tree, {"nodes"});
  view.set("is_cut", tree.at("shown_count").integer() < tree.at("node_count").integer());
  bool has_guilty = false;
  for (std::size_t i = 0; i < tree.at("nodes").size(); ++i)
    has_guilty = has_guilty || tree.at("nodes").item(i).at("guilty").flag();
  view.set("has_guilty", has_guilty);
  view.set("tree_picture",
           tree.at("node_count").integer() == 0 ? View(false) : View(tree_picture(tree)));
  return view;
}

View span_keys(const JsonField& spans) {
  View keys = list_view();
  for (const std::string name : {"queued", "prefill", "decode", "retracted"}) {
    bool is_there = false;
    for (std::size_t i = 0; i < spans.size(); ++i)
      is_there = is_there || spans.item(i).at("name").text() == name;
    if (!is_there) continue;
    View key = object_view();
    key.set("name", name);
    key.set("says", name == "queued" ? "waiting" : name);
    keys.push_back(key);
  }
  return keys;
}

/// The index of the first run that is not as expected, which the banner of the page is about;
/// otherwise the number of runs.
std::size_t run_in_banner(const JsonField& trace) {
  const JsonField runs = trace.at("runs");
  std::size_t i = 0;
  while (i < runs.size() && runs.item(i).at("as_expected").flag()) ++i;
  return i;
}

/// The red banner of the page: a finding, or the missing finding.
View banner_view(const JsonField& trace, std::size_t i) {
  if (i == trace.at("runs").size()) return View(false);
  const JsonField run = trace.at("runs").item(i);
  const JsonField findings = run.at("run").at("findings");
  View view = object_view();
  view.set("anchor", run_anchor(trace, i));
  view.set("finding", findings.size() == 0 ? View(false) : view_of(findings.item(0)));
  view.set("text",
           view_of(findings.size() == 0 ? run.at("complaint") : findings.item(0).at("text")));
  return view;
}

/// Whether the heading of the file says more than the banner.
bool has_title(const JsonField& trace, std::size_t in_banner) {
  if (in_banner == trace.at("runs").size()) return true;
  const JsonField findings = trace.at("runs").item(in_banner).at("run").at("findings");
  const std::string title = trace.at("title").text();
  return findings.size() == 0 ||
         (title != findings.item(0).at("text").text() + "." && title != trace.at("name").text());
}

View run_view(const JsonField& trace, std::size_t i) {
  const JsonField run = trace.at("runs").item(i);
  const JsonField requests = run.at("run").at("requests");
  View view = object_view();
  for (const char* const key : {"as_expected", "found", "defect", "command"})
    view.set(key, view_of(run.at(key)));
  // If nothing should have been found, the banner says it already.
  const bool complains = run.has("complaint") && (run.has("finds") || i != run_in_banner(trace));
  view.set("complaint", complains ? view_of(run.at("complaint")) : View(false));
  view.set("anchor", run_anchor(trace, i));
  view.set("in_banner", i == run_in_banner(trace));
  view.set("subjects", views_of(run.at("subjects"), [](const JsonField& subject, std::size_t at) {
             View name = view_of(subject);
             name.set("first", at == 0);
             return name;
           }));
  view.set("event_count", count(run.at("run").at("events")));
  view.set("digest", view_of(run.at("run").at("digest")));
  view.set("finding", finding_view(run.at("run").at("findings")));
  view.set("event_table", events_view(run));
  view.set("tree_figure", tree_view(run));
  const bool has_pools = run.has("pools") && run.at("events").size() > 0;
  view.set("pools_picture", has_pools ? View(pools_picture(run)) : View(false));
  view.set("copies_picture", run.at("copies").size() > 0 ? View(copies_picture(run)) : View(false));
  const bool has_spans = run.at("spans").size() > 0;
  view.set("requests_picture", has_spans ? View(requests_picture(run)) : View(false));
  view.set("keys", span_keys(run.at("spans")));
  view.set("requests_cut", requests.size() > kMostRequests);
  view.set("has_requests", requests.size() > 0);
  view.set("requests", views_of(
                           requests,
                           [](const JsonField& request, std::size_t) {
                             View row = object_view();
                             for (const char* const key : {"id", "prompt_tokens", "cached_tokens",
                                                           "output_tokens", "finish"})
                               row.set(key, view_of(request.at(key)));
                             return row;
                           },
                           kMostRequests));
  view.set("timeline_link", run.has("timeline")
                                ? View("../" + encoded_link(run.at("timeline").text()))
                                : View(false));
  return view;
}

}  // namespace

std::string trace_anchor(const JsonField& trace) {
  std::string name = trace.at("folder").text() + "-" + trace.at("name").text();
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_') c = '-';
  return name;
}

std::string run_anchor(const JsonField& trace, std::size_t i) {
  return fmt::format("{}-run-{}", trace_anchor(trace), i + 1);
}

std::string meaning_of(const JsonField& kind) {
  const std::optional<FindingKind> known = finding_kind_from(kind.text());
  return std::string(known ? meaning(*known) : "");
}

View references_view(const JsonField& trace) {
  return views_of(trace.at("references"), [](const JsonField& reference, std::size_t) {
    View view = view_of(reference);
    const std::string url = reference_url(reference.text());
    view.set("url", url.empty() ? View(false) : View(url));
    return view;
  });
}

View trace_view(const JsonField& trace) {
  View view = object_view();
  for (const char* const key : {"title", "file", "line_count"})
    view.set(key, view_of(trace.at(key)));
  view.set("anchor", trace_anchor(trace));
  view.set("references", references_view(trace));
  view.set("has_paragraph", trace.at("paragraph").size() > 0);
  view.set("paragraph", view_of(trace.at("paragraph")));
  const std::size_t head = head_lines(trace);
  view.set("has_lines", trace.at("text").size() > head);
  view.set("head_lines", std::to_string(head));
  view.set("lines", lines_view(trace, head));
  view.set("lines_cut", trace.at("text").size() > head + kMostLines);
  const std::size_t in_banner = run_in_banner(trace);
  view.set("banner", banner_view(trace, in_banner));
  view.set("has_title", has_title(trace, in_banner));
  view.set("has_outcomes", trace.at("runs").size() > 1);
  View runs = list_view();
  for (std::size_t i = 0; i < trace.at("runs").size(); ++i) runs.push_back(run_view(trace, i));
  view.set("runs", runs);
  return view;
}

}  // namespace lockstep::cache_sim
