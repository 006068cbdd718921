#include "cache_sim/report/page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <vector>

#include "cache_sim/report/comparison.hpp"
#include "cache_sim/report/json_field.hpp"
#include "cache_sim/report/kernels.hpp"
#include "cache_sim/report/pictures.hpp"
#include "cache_sim/report/style.hpp"
#include "cache_sim/report/svg.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kMostLines = 150;  // of a trace
constexpr std::size_t kMostLineCharacters = 400;
constexpr std::size_t kMostRequests = 30;

// --- Words that stand on every page --------------------------------------------------------------

constexpr std::string_view kOpening = R"html(
<h1>Lockstep report</h1>
<p>Lockstep is a test harness for the caches of language-model servers: the part of a server that
keeps what it has computed for one prompt, so that the next prompt with the same beginning need
not compute it again. It gives the same operations to a cache policy, to a plain definition of
that policy (its oracle) and, where there is one, to a real server, and after each operation it
holds every reply and every slot inside to what must be true. When something goes wrong, it names
the first wrong event in one sentence.</p>
<p>This page replays every trace of the project. Many of them retell a bug that somebody reported
in public. Each trace runs against the policy as it should be, where nothing may be found, and
against the same policy with one rule broken on purpose (a planted defect), where the checker
must find what is wrong, and as what.</p>
)html";

constexpr std::string_view kWhy = R"html(
<h2 id="idea">The idea</h2>
<p>An attention layer stores keys and values (KV) for each token, so any beginning of a prompt
can be reused. A recurrent layer (Mamba, gated delta rule) stores one state instead, which stands
for one exact sequence of tokens. Hand it to a request that starts with anything else, and the
server answers fluently and wrongly. So each state slot here carries a label, the digest and
length of the tokens that it stands for, and the checker compares the label with what the request
asked for.</p>
)html";

constexpr std::string_view kWords = R"html(
<dl class="words">
<dt>trace</dt><dd>A text file of operations in order, with the answers that are due. Tokens are
written by document: <code>a</code> followed by a length is that many first tokens of a text
called <code>a</code>. An output of which only the length was given is a text with a longer,
made-up name.</dd>
<dt>event</dt><dd>One operation and its reply.</dd>
<dt>KV token, state slot</dt><dd>The two things that a cache hands out: memory for the keys and
values of one token, and memory for the recurrent state of one request or of one stored
prefix.</dd>
<dt>tree</dt><dd>How the policies store prefixes: each node continues its parent by the tokens on
its edge, and may hold a state for exactly the tokens from the root to its end.</dd>
<dt>lock</dt><dd>A running request locks the prefix that it reads. What is locked may not be
evicted.</dd>
<dt>eviction</dt><dd>Making room: the least recently used states and leaves go first.</dd>
</dl>
)html";

/// On paper everything is open.
constexpr std::string_view kPrintScript =
    "addEventListener(\"beforeprint\", function () { "
    "document.querySelectorAll(\"details\").forEach(function (part) { part.open = true; }); });";

/// The page loads nothing and runs this one script, named by its SHA-256, even where a text of a
/// run were taken for markup.
constexpr std::string_view kContentPolicy =
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
    "style-src 'unsafe-inline'; script-src 'sha256-eyc05qYjHw8ppOl8mw1uCw8XQtAHhu0FU6ckGZmGkMc='; "
    "base-uri 'none'; form-action 'none'\"/>\n";

constexpr std::string_view kMeasured = R"html(
<h2 id="kernels">Kernels on the GPU</h2>
<p>Medians of launches with a cold cache, replayed in a CUDA graph, ours and the peers' in turn.
An accuracy is an error against the reference in double, beside what the yardstick allows.
<code>bench/on_gpu.sh</code> measures them.</p>
)html";

constexpr std::string_view kComparing = R"html(
<h2 id="comparisons">Which policy for which workload</h2>
<p>The same requests under several policies, at several amounts of memory. <code>kv-bound</code>,
<code>state-at-end</code>, <code>state-at-end-and-branch</code>, <code>belady</code>,
<code>belady-states</code> and <code>lru</code> are ideal: they take the requests one after the
other and have no running requests to hold memory for; <code>belady</code> and
<code>belady-states</code> know the future. <code>kv-bound</code>, <code>belady</code> and
<code>lru</code> are about attention alone, in whole blocks of the workload. The others are a
server’s policies behind a scheduler on a virtual clock; those for hybrid models cut the memory as
their servers do: SGLang’s into KV and states, Marconi’s by the byte, vLLM’s into blocks whose KV is
as large as a state. A state that was never hit and dead KV, which no state makes reachable, are
memory spent for nothing.</p>
)html";

// --- Small pieces --------------------------------------------------------------------------------

std::string_view meaning_of(const JsonField& kind) {
  const std::optional<FindingKind> known = finding_kind_from(kind.text());
  return known ? meaning(*known) : "";
}

/// A file's name as the name of a place on the page.
std::string anchor(const JsonField& trace) {
  std::string name = trace.at("folder").text() + "-" + trace.at("name").text();
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_') c = '-';
  return name;
}

std::string run_anchor(const JsonField& trace, std::size_t run) {
  return fmt::format("{}-run-{}", anchor(trace), run + 1);
}

bool as_expected(const JsonField& run) {
  return run.at("as_expected").flag();
}

std::string chip(const JsonField& run) {
  if (!as_expected(run)) return "<span class=\"chip bad\">✗ not as expected</span>";
  if (run.has("found"))
    return fmt::format("<span class=\"chip found\">◆ {}</span>", code(run.at("found")));
  return "<span class=\"chip pass\">✓ nothing found</span>";
}

std::string references(const JsonField& trace) {
  std::string chips;
  const JsonField all = trace.at("references");
  for (std::size_t i = 0; i < all.size(); ++i)
    chips += fmt::format("{}<span class=\"chip public\">{}</span>", i == 0 ? "" : " ",
                         words(all.item(i)));
  return chips;
}

std::string plural(const JsonField& field, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count(field), field.integer() == 1 ? one : many);
}

// --- The head of the page ------------------------------------------------------------------------

std::string tile(const JsonField& field, std::string_view name, std::string_view style = "") {
  return fmt::format("<li{}>{}<span>{}</span></li>\n",
                     style.empty() ? std::string() : fmt::format(" class=\"{}\"", style),
                     count(field), name);
}

std::string tiles(const JsonField& summary) {
  const bool bad = summary.at("not_as_expected").integer() > 0;
  return "<ul class=\"tiles\" id=\"figures\">\n" + tile(summary.at("traces"), "traces") +
         tile(summary.at("runs"), "runs") + tile(summary.at("as_expected"), "runs as expected") +
         tile(summary.at("not_as_expected"), "not as expected", bad ? "bad" : "") +
         tile(summary.at("defects_shown"),
              "planted defects found, of " + count(summary.at("defects_known"))) +
         tile(summary.at("kinds_shown"), "kinds of finding shown") +
         tile(summary.at("events"), "events checked") + "</ul>\n";
}

/// Every run that is not as it should be, before anything else.
std::string banner(const JsonField& document) {
  std::string items;
  const auto add = [&](const JsonField& run, const std::string& target) {
    if (as_expected(run)) return;
    items += fmt::format("<li><a href=\"#{}\">{}</a>: {}</li>\n", target, code(run.at("command")),
                         words(run.at("complaint")));
  };
  const JsonField traces = document.at("traces");
  for (std::size_t i = 0; i < traces.size(); ++i)
    for (std::size_t k = 0; k < traces.item(i).at("runs").size(); ++k)
      add(traces.item(i).at("runs").item(k), run_anchor(traces.item(i), k));
  const JsonField workloads = document.at("workloads");
  for (std::size_t i = 0; i < workloads.size(); ++i)
    for (std::size_t k = 0; k < workloads.item(i).at("runs").size(); ++k)
      add(workloads.item(i).at("runs").item(k), "workloads");
  if (items.empty())
    return "<p class=\"banner all\">✓ Every run ended as it should: the policies keep every rule, "
           "and every planted defect was found as the kind that its file names.</p>\n";
  return "<div class=\"banner\"><p>✗ Some runs did not end as they should:</p><ul>\n" + items +
         "</ul></div>\n";
}

std::string legend() {
  struct Entry {
    std::string_view kind, sentence;
  };
  constexpr std::array kEntries{
      Entry{"state", "A node with a state: a request can resume where it ends."},
      Entry{
          "tombstone",
          "A tombstone: the KV is there, the state is gone or never was; nothing can resume here."},
      Entry{"locked", "Locked: a running request reads it or something below it."},
      Entry{"kv", "A node of a cache without states: any of its tokens can be reused."}};
  std::string items;
  for (const Entry& entry : kEntries)
    items += fmt::format("<li>{}<span>{}</span></li>\n", legend_box(entry.kind), entry.sentence);
  return "<h2 id=\"legend\">How to read the pictures</h2>\n<ul class=\"legend\">\n" + items +
         "</ul>\n";
}

// --- The table of all traces ---------------------------------------------------------------------

std::vector<std::size_t> runs_with_defect(const JsonField& runs, bool with) {
  std::vector<std::size_t> picked;
  for (std::size_t i = 0; i < runs.size(); ++i)
    if (runs.item(i).has("defect") == with) picked.push_back(i);
  return picked;
}

std::string undamaged_cell(const JsonField& trace) {
  const JsonField runs = trace.at("runs");
  std::string lines;
  for (const std::size_t i : runs_with_defect(runs, false))
    lines += fmt::format(
        "<div><a href=\"#{}\">{}</a> {}</div>", run_anchor(trace, i), chip(runs.item(i)),
        runs.item(i).at("subjects").size() == 0 ? ""
                                                : code(runs.item(i).at("subjects").item(0), 40));
  return lines.empty() ? "<span class=\"dim\">not run</span>" : lines;
}

/// The right half of a row: a planted defect, what it was found as, at which event and in which
/// line of the file.
std::string defect_cells(const JsonField& trace, std::size_t i) {
  const JsonField run = trace.at("runs").item(i);
  const JsonField findings = run.at("run").at("findings");
  std::string cells =
      fmt::format("<td><a href=\"#{}\">{}</a></td><td>{}</td>", run_anchor(trace, i),
                  code(run.at("defect").at("name")), chip(run));
  if (findings.size() == 0)
    return cells + "<td class=\"number dim\">–</td><td class=\"number dim\">–</td>";
  const JsonField line = findings.item(0).at("line");
  return cells + fmt::format("<td class=\"number\">{}</td><td class=\"number\">{}</td>",
                             count(findings.item(0).at("event")),
                             line.integer() > 0 ? count(line) : "end");
}

std::string summary_rows(const JsonField& trace) {
  const std::vector<std::size_t> damaged = runs_with_defect(trace.at("runs"), true);
  const std::size_t rows = std::max<std::size_t>(damaged.size(), 1);
  const std::string span = rows == 1 ? "" : fmt::format(" rowspan=\"{}\"", rows);
  std::string html = fmt::format(
      "<tr><td{0}><a href=\"#{1}\">{2}</a>{3}</td><td{0} class=\"report\">{4}</td><td{0}>{5}</td>",
      span, anchor(trace), words(trace.at("title")), code(trace.at("name")), references(trace),
      undamaged_cell(trace));
  if (damaged.empty()) return html + "<td class=\"dim\">–</td><td></td><td></td><td></td></tr>\n";
  for (std::size_t i = 0; i < damaged.size(); ++i)
    html += (i == 0 ? "" : "<tr>") + defect_cells(trace, damaged[i]) + "</tr>\n";
  return html;
}

std::string summary_table(const JsonField& traces) {
  std::string rows;
  for (std::size_t i = 0; i < traces.size(); ++i) rows += summary_rows(traces.item(i));
  return "<h2 id=\"summary\">All traces</h2>\n<div class=\"scroll\"><table "
         "class=\"summary\">\n<thead><tr><th>trace</th>"
         "<th>public report</th><th>undamaged policy</th><th>planted defect</th><th>found as</th>"
         "<th class=\"number\">at event</th><th "
         "class=\"number\">line</th></tr></thead>\n<tbody>\n" +
         rows + "</tbody></table></div>\n";
}

std::string kinds_section(const JsonField& document) {
  const JsonField kinds = document.at("kinds");
  std::string rows;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const JsonField kind = kinds.item(i);
    rows += fmt::format("<tr><td>{}</td><td>{}</td><td class=\"number\">{}</td></tr>\n",
                        code(kind.at("kind")), meaning_of(kind.at("kind")), count(kind.at("runs")));
  }
  std::string html = "<h2 id=\"kinds\">What was found, by kind</h2>\n";
  if (rows.empty()) return html + "<p>No run found what its file names.</p>\n";
  html +=
      "<div class=\"scroll\"><table>\n<thead><tr><th>kind</th><th>what it means</th>"
      "<th class=\"number\">runs that show it</th></tr></thead>\n<tbody>\n" +
      rows + "</tbody></table></div>\n";
  const JsonField missing = document.at("defects_not_shown");
  if (missing.size() == 0) return html;
  html += "<p class=\"dim\">Planted defects that no trace shows yet: ";
  for (std::size_t i = 0; i < missing.size(); ++i)
    html += (i == 0 ? "" : ", ") + code(missing.item(i));
  return html + ".</p>\n";
}

// --- One trace -----------------------------------------------------------------------------------

/// The runs that went wrong in this line, as marks behind it.
std::string marks_of_line(const JsonField& trace, std::size_t line) {
  std::string marks;
  std::vector<std::string> seen;
  const JsonField runs = trace.at("runs");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const JsonField findings = runs.item(i).at("run").at("findings");
    if (findings.size() == 0 ||
        findings.item(0).at("line").integer() != static_cast<std::int64_t>(line))
      continue;
    const std::string kind = findings.item(0).at("kind").text();
    if (std::find(seen.begin(), seen.end(), kind) != seen.end()) continue;
    seen.push_back(kind);
    marks += fmt::format("<a class=\"here\" href=\"#{}\">◀ {}</a>", run_anchor(trace, i),
                         code(findings.item(0).at("kind")));
  }
  return marks;
}

std::string trace_text(const JsonField& trace) {
  const JsonField lines = trace.at("text");
  std::string items;
  bool answer_is_next = false;
  const std::size_t shown = std::min(lines.size(), kMostLines);
  for (std::size_t i = 0; i < shown; ++i) {
    const std::string text = lines.item(i).text();
    std::string style = answer_is_next          ? "answer"
                        : text.starts_with('#') ? "comment"
                        : text == "----"        ? "rule"
                                                : "verb";
    answer_is_next = text == "----";
    const std::string marks = marks_of_line(trace, i + 1);
    if (!marks.empty()) style += " wrong";
    items += fmt::format("<li class=\"{}\">{}{}</li>\n", style,
                         code(lines.item(i), kMostLineCharacters), marks);
  }
  const std::string cut =
      shown == lines.size()
          ? ""
          : fmt::format("<p class=\"dim\">The page stops here: the file has {}.</p>\n",
                        plural(trace.at("line_count"), "line", "lines"));
  return "<ol class=\"trace\">\n" + items + "</ol>\n" + cut;
}

std::string finding_box(const JsonField& run, const JsonField& findings) {
  const JsonField finding = findings.item(0);
  std::string where =
      "At event " + count(finding.at("event")) + " of " + count(run.at("run").at("events"));
  where += finding.at("line").integer() > 0 ? ", line " + count(finding.at("line"))
                                            : ", at the end of the file";
  if (!finding.at("request").text().empty())
    where += ", request " + code(finding.at("request"), 60);
  if (!finding.at("subject").text().empty()) where += ", in " + code(finding.at("subject"), 60);
  where += fmt::format(". {}: {}", code(finding.at("kind")), meaning_of(finding.at("kind")));
  std::string more;
  for (std::size_t i = 1; i < std::min<std::size_t>(findings.size(), 4); ++i)
    more += fmt::format("<li>{}: {}</li>\n", code(findings.item(i).at("kind")),
                        words(findings.item(i).at("text"), Medium::html, 300));
  if (!more.empty())
    more = "<p class=\"where\">Found with it:</p><ul class=\"where\">" + more + "</ul>";
  return fmt::format(
      "<div class=\"finding\">\n<p "
      "class=\"sentence\">{}</p>\n<dl><div><dt>expected</dt><dd>{}</dd></div>"
      "<div><dt>actual</dt><dd>{}</dd></div></dl>\n<p class=\"where\">{}</p>\n{}</div>\n",
      words(finding.at("text"), Medium::html, 600), code(finding.at("expected"), 200),
      code(finding.at("actual"), 200), where, more);
}

std::string event_row(const JsonField& event, bool wrong, bool has_time, bool has_pools) {
  std::string row = fmt::format("<tr{}><td class=\"number\">{}</td><td class=\"number\">{}</td>",
                                wrong ? " class=\"wrong\"" : "", count(event.at("event")),
                                count(event.at("line")));
  if (has_time) row += fmt::format("<td class=\"number\">{}</td>", moment(event.at("time_ns")));
  row += fmt::format("<td class=\"operation\">{}</td><td>{}{}</td>",
                     code(event.at("operation"), 240), code(event.at("reply"), 240),
                     wrong ? " <strong>◀ first wrong event</strong>" : "");
  if (has_pools)
    row += fmt::format("<td class=\"number\">{}</td><td class=\"number\">{}</td>",
                       count(event.at("kv_used")), count(event.at("states_used")));
  return row + "</tr>\n";
}

std::string events_table(const JsonField& run, bool open) {
  const JsonField events = run.at("events");
  if (events.size() == 0) return "";
  const JsonField window = run.at("window");
  const auto first = static_cast<std::size_t>(window.at("first").integer());
  const auto last = std::min(static_cast<std::size_t>(window.at("last").integer()), events.size());
  const JsonField findings = run.at("run").at("findings");
  const std::int64_t wrong = findings.size() == 0 ? 0 : findings.item(0).at("event").integer();
  const bool has_time = run.at("end_ns").integer() > 0;
  const bool has_pools = run.has("pools");
  std::string rows;
  for (std::size_t i = first; i <= last; ++i)
    rows +=
        event_row(events.item(i - 1), static_cast<std::int64_t>(i) == wrong, has_time, has_pools);
  const std::string which =
      window.at("cut").flag()
          ? fmt::format("Events {} to {} of {}; the rest is in the data of this report",
                        count(window.at("first")), count(window.at("last")),
                        count(run.at("run").at("events")))
          : plural(run.at("run").at("events"), "event", "events");
  return fmt::format(
      "<details{}><summary>{}</summary>\n<div class=\"scroll\"><table "
      "class=\"events\">\n<thead><tr><th class=\"number\">event</th>"
      "<th "
      "class=\"number\">line</th>{}<th>operation</th><th>reply</th>{}</tr></thead>\n<tbody>\n{}</"
      "tbody></table></div></details>\n",
      open ? " open=\"open\"" : "", which, has_time ? "<th class=\"number\">time</th>" : "",
      has_pools ? "<th class=\"number\">KV in use</th><th class=\"number\">states in use</th>" : "",
      rows);
}

std::string tree_figure(const JsonField& tree) {
  std::string caption =
      "The tree when the run ended: " + plural(tree.at("node_count"), "node", "nodes");
  if (tree.at("has_states").flag())
    caption += ", " + plural(tree.at("state_count"), "state", "states") + ", " +
               plural(tree.at("tombstone_count"), "tombstone", "tombstones");
  caption += ", " + count(tree.at("locked_count")) + " locked.";
  if (tree.at("shown_count").integer() < tree.at("node_count").integer())
    caption += " The picture shows the first " + count(tree.at("shown_count")) + ".";
  if (tree.at("node_count").integer() == 0)
    return "<figure><figcaption>The tree is empty when the run ends.</figcaption></figure>\n";
  return "<figure class=\"wide\"><figcaption>" + caption + "</figcaption><div class=\"scroll\">" +
         tree_picture(tree) + "</div></figure>\n";
}

std::string requests_figure(const JsonField& run) {
  std::string keys;
  for (const std::string_view name : {"queued", "prefill", "decode", "retracted"}) {
    const JsonField spans = run.at("spans");
    bool is_there = false;
    for (std::size_t i = 0; i < spans.size(); ++i)
      is_there = is_there || spans.item(i).at("name").text() == name;
    const std::string_view says = name == "queued" ? "waiting" : name;
    if (is_there) keys += fmt::format("<li><i class=\"{}\"></i>{}</li>", name, says);
  }
  const JsonField requests = run.at("run").at("requests");
  const std::string caption = requests.size() > kMostRequests
                                  ? "What the first requests did over time; in a gap one waits."
                                  : "What each request did over time; in a gap it waits.";
  return "<figure><figcaption>" + caption + "</figcaption><div class=\"chart\">" +
         requests_picture(run) + "</div><ul class=\"keys\">" + keys + "</ul></figure>\n";
}

std::string pictures(const JsonField& run) {
  std::string figures;
  if (run.has("tree")) figures += tree_figure(run.at("tree"));
  if (run.has("pools") && run.at("events").size() > 0)
    figures += "<figure><figcaption>The pools after each event.</figcaption><div class=\"chart\">" +
               pools_picture(run) + "</div></figure>\n";
  if (run.at("spans").size() > 0) figures += requests_figure(run);
  if (!run.has("tree"))
    figures +=
        "<p class=\"where\">This subject shows nothing of its inside, so there is no picture of "
        "it.</p>\n";
  return "<div class=\"pictures\">\n" + figures + "</div>\n";
}

std::string requests_table(const JsonField& run) {
  const JsonField requests = run.at("run").at("requests");
  if (requests.size() == 0) return "";
  std::string rows;
  for (std::size_t i = 0; i < std::min(requests.size(), kMostRequests); ++i) {
    const JsonField request = requests.item(i);
    rows += fmt::format(
        "<tr><td>{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td "
        "class=\"number\">{}</td><td>{}</td></tr>\n",
        code(request.at("id"), 40), count(request.at("prompt_tokens")),
        count(request.at("cached_tokens")), count(request.at("output_tokens")),
        words(request.at("finish")));
  }
  const std::string title = requests.size() > kMostRequests ? "The first requests" : "Requests";
  return "<details open=\"open\"><summary>" + title +
         "</summary>\n<div class=\"scroll\"><table "
         "class=\"requests\">\n<thead><tr><th>request</th><th class=\"number\">prompt "
         "tokens</th><th class=\"number\">of them cached</th><th class=\"number\">output "
         "tokens</th><th>ended</th></tr></thead>\n"
         "<tbody>\n" +
         rows + "</tbody></table></div></details>\n";
}

/// What ran, in words.
std::string run_name(const JsonField& run) {
  if (run.has("defect")) return "With a planted defect: " + code(run.at("defect").at("name"));
  std::string name = "Undamaged:";
  for (std::size_t i = 0; i < run.at("subjects").size(); ++i)
    name += (i == 0 ? " " : " beside ") + code(run.at("subjects").item(i), 60);
  return name;
}

std::string run_card(const JsonField& trace, std::size_t i) {
  const JsonField run = trace.at("runs").item(i);
  const JsonField findings = run.at("run").at("findings");
  std::string html = fmt::format(
      "<article class=\"run{}\" id=\"{}\">\n<header><h3>{}</h3>{}</header>\n<p "
      "class=\"command\">{}</p>\n",
      as_expected(run) ? "" : " bad", run_anchor(trace, i), run_name(run), chip(run),
      code(run.at("command")));
  if (!as_expected(run)) html += "<p class=\"banner\">✗ " + words(run.at("complaint")) + "</p>\n";
  if (run.has("defect"))
    html += "<p><strong>The rule that is broken here:</strong> " +
            words(run.at("defect").at("sentence")) + ".</p>\n";
  if (findings.size() > 0) html += finding_box(run, findings);
  html += events_table(run, findings.size() > 0) + pictures(run) + requests_table(run);
  html += fmt::format(
      "<p class=\"where\">digest {} · <a href=\"{}\">timeline of this run</a> for chrome://tracing "
      "or Perfetto</p>\n",
      code(run.at("run").at("digest")), escaped(encoded_link(run.at("timeline").text())));
  return html + "</article>\n";
}

std::string trace_section(const JsonField& trace) {
  std::string text;
  const JsonField description = trace.at("description");
  for (std::size_t i = 1; i < description.size(); ++i)
    text += (i == 1 ? "" : " ") + words(description.item(i));
  std::string html = fmt::format(
      "<section id=\"{}\">\n<h2><a class=\"up\" href=\"#summary\">↑ all traces</a>{}</h2>\n<p>{} "
      "{}</p>\n",
      anchor(trace), words(trace.at("title")), code(trace.at("file")), references(trace));
  if (!text.empty()) html += "<p>" + text + "</p>\n";
  html += trace_text(trace);
  for (std::size_t i = 0; i < trace.at("runs").size(); ++i) html += run_card(trace, i);
  return html + "</section>\n";
}

// --- Workloads -----------------------------------------------------------------------------------

std::string workload_row(const JsonField& run) {
  const JsonField all = run.at("run");
  const JsonField oracle = all.at("subjects").item(1);
  std::string recorded = "<span class=\"dim\">not recorded</span>";
  if (run.has("recorded"))
    recorded = run.at("recorded").at("decision_digest").text() == all.at("decision_digest").text()
                   ? "✓ the same"
                   : "✗ " + code(run.at("recorded").at("decision_digest"));
  return fmt::format(
      "<tr><td>{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td "
      "class=\"number\">{}</td><td class=\"number\">{}</td>"
      "<td class=\"number\">{}</td><td "
      "class=\"number\">{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
      code(run.at("policy")), count(run.at("request_count")), count(all.at("events")),
      count(all.at("totals").at("input_tokens")), count(all.at("totals").at("hit_tokens")),
      percent(all.at("totals").at("hit_ratio")), count(oracle.at("totals").at("hit_tokens")),
      code(all.at("decision_digest")), recorded, chip(run));
}

std::string workload_section(const JsonField& workload) {
  std::string rows;
  for (std::size_t i = 0; i < workload.at("runs").size(); ++i)
    rows += workload_row(workload.at("runs").item(i));
  return fmt::format(
      "<h3>{}</h3>\n<p>Conversations of several turns, made from a seed, under each policy beside "
      "its oracle, with every check on. "
      "The decision digest is over every hit and every eviction; where SGLang’s own cache was "
      "recorded on the same workload, "
      "the digests must be the same.</p>\n<div class=\"scroll\"><table "
      "class=\"workload\">\n<thead><tr><th>policy</th><th class=\"number\">requests</th>"
      "<th class=\"number\">events</th><th class=\"number\">input tokens</th><th "
      "class=\"number\">hit tokens</th>"
      "<th class=\"number\">hit ratio</th><th class=\"number\">hit tokens of the "
      "oracle</th><th>decision digest</th><th>SGLang’s own</th>"
      "<th>verdict</th></tr></thead>\n<tbody>\n{}</tbody></table></div>\n<figure><figcaption>Hit "
      "ratio: input tokens that came from the "
      "cache, of all.</figcaption><div class=\"chart\">{}</div></figure>\n",
      code(workload.at("workload")), rows, hit_ratio_picture(workload));
}

// --- The foot of the page ------------------------------------------------------------------------

std::string digests_table(const JsonField& document) {
  std::string rows;
  const auto add = [&](const JsonField& runs) {
    for (std::size_t i = 0; i < runs.size(); ++i)
      rows += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", code(runs.item(i).at("command")),
                          code(runs.item(i).at("run").at("digest")));
  };
  for (std::size_t i = 0; i < document.at("traces").size(); ++i)
    add(document.at("traces").item(i).at("runs"));
  for (std::size_t i = 0; i < document.at("workloads").size(); ++i)
    add(document.at("workloads").item(i).at("runs"));
  return "<details><summary>The digest of every run</summary>\n<div "
         "class=\"scroll\"><table>\n<thead><tr><th>command</th><th>digest"
         "</th></tr></thead>\n<tbody>\n" +
         rows + "</tbody></table></div></details>\n";
}

std::string making(const JsonField& document) {
  return "<h2 id=\"making\">What this page is made of</h2>\n<p>One command makes it, and each run "
         "on it can be repeated alone by "
         "the command that stands above it:</p>\n<pre><code>./lockstep report\n./lockstep replay "
         "FILE --defect ID\n"
         "./lockstep list defects</code></pre>\n<p>Commit " +
         code(document.at("commit")) +
         ". The same commit gives the same page, byte for byte. Every figure and every text of a "
         "run is taken from "
         "<a href=\"report.json\">report.json</a>, and names its place there in the page’s source; "
         "the verdicts stand in "
         "<a href=\"junit.xml\">junit.xml</a> as well.</p>\n" +
         digests_table(document);
}

std::string navigation(const JsonField& document) {
  std::string html =
      "<nav><a href=\"#summary\">All traces</a><a href=\"#kinds\">Kinds of finding</a><a "
      "href=\"#idea\">The idea</a>"
      "<a href=\"#legend\">How to read the pictures</a>";
  if (document.at("workloads").size() > 0)
    html += "<a href=\"#workloads\">Policies on a workload</a>";
  if (document.at("comparisons").size() > 0)
    html += "<a href=\"#comparisons\">Which policy for which workload</a>";
  if (document.at("kernels").size() > 0) html += "<a href=\"#kernels\">Kernels</a>";
  return html + "<a href=\"#making\">What this page is made of</a></nav>\n";
}

}  // namespace

std::string report_page(const Json& data) {
  const JsonField document(data);
  std::string html = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n";
  html += kContentPolicy;
  html +=
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>Lockstep "
      "report</title>\n<style>";
  html += kReportStyle;
  html += "</style>\n</head>\n<body>\n<main>\n";
  html += kOpening;
  html += banner(document) + tiles(document.at("summary")) + navigation(document);
  html += kWhy;
  html += "<div class=\"scroll\">" + idea_picture() + "</div>\n";
  html += kWords;
  html += legend() + summary_table(document.at("traces")) + kinds_section(document);
  for (std::size_t i = 0; i < document.at("traces").size(); ++i)
    html += trace_section(document.at("traces").item(i));
  if (document.at("workloads").size() > 0)
    html += "<h2 id=\"workloads\">Policies on a workload</h2>\n";
  for (std::size_t i = 0; i < document.at("workloads").size(); ++i)
    html += workload_section(document.at("workloads").item(i));
  if (document.at("comparisons").size() > 0) html += kComparing;
  for (std::size_t i = 0; i < document.at("comparisons").size(); ++i)
    html += comparison_section(document.at("comparisons").item(i));
  if (document.at("kernels").size() > 0) html += kMeasured;
  for (std::size_t i = 0; i < document.at("kernels").size(); ++i)
    html += kernel_section(document.at("kernels").item(i));
  html += making(document);
  html += fmt::format("<script>{}</script>\n</main>\n</body>\n</html>\n", kPrintScript);
  return html;
}

}  // namespace lockstep::cache_sim
