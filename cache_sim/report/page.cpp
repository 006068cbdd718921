#include "cache_sim/report/page.hpp"

#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/sha.h>

#include <array>

#include "cache_sim/report/comparison.hpp"
#include "cache_sim/report/json_field.hpp"
#include "cache_sim/report/kernels.hpp"
#include "cache_sim/report/pictures.hpp"
#include "cache_sim/report/run_view.hpp"
#include "cache_sim/report/svg.hpp"
#include "cache_sim/report/view.hpp"

namespace lockstep::cache_sim {
namespace {

/// The SHA-256 of a script in base 64, as a content security policy names it.
std::string script_digest(std::string_view script) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(script.data()), script.size(), digest.data());
  std::array<unsigned char, 4 * (SHA256_DIGEST_LENGTH + 2) / 3 + 1> text{};
  const int size = EVP_EncodeBlock(text.data(), digest.data(), static_cast<int>(digest.size()));
  return {text.begin(), text.begin() + size};
}

/// Puts the content of a template into the frame of a page. The page loads nothing, and its content
/// security policy allows its own script alone, even if a text of a run were taken for markup.
/// `title` is an element.
std::string page_of(std::string_view name, View view, const std::string& title) {
  View frame = object_view();
  const std::string_view script = report_templates().at("page.js");
  frame.set("head_title", title);
  frame.set("style", std::string(report_templates().at("style.css")));
  frame.set("script", std::string(script));
  frame.set("script_digest", script_digest(script));
  frame.set("body", filled_template(name, std::move(view)));
  return filled_template("frame.html", std::move(frame));
}

std::string plain_title(std::string_view text) {
  return fmt::format("<title>{}</title>", text);
}

/// The data for the links of a page: the existing pages, and the path from the page to index.html.
View page_view(const JsonField& document, std::string_view root) {
  View view = object_view();
  view.set("root", std::string(root));
  view.set("is_index", false);
  const auto filled = [&](std::string_view key) {
    return document.has(key) && document.at(key).size() > 0;
  };
  view.set("has_policies", filled("comparisons") || filled("workloads"));
  view.set("has_comparisons", filled("comparisons"));
  view.set("has_kernels", filled("kernels"));
  return view;
}

// --- The index -----------------------------------------------------------------------------------

View row_of_run(const JsonField& trace, std::size_t i) {
  const JsonField run = trace.at("runs").item(i);
  View view = object_view();
  view.set("link", encoded_link(trace.at("page").text()) + "#" + run_anchor(trace, i));
  view.set("as_expected", run.at("as_expected").flag());
  view.set("found", view_of(run.at("found")));
  if (run.has("defect")) view.set("name", code(run.at("defect").at("name")));
  view.set("subject", run.at("subjects").size() == 0 ? "" : code(run.at("subjects").item(0), 40));
  return view;
}

View row_of_trace(const JsonField& trace) {
  View view = object_view();
  view.set("anchor", trace_anchor(trace));
  view.set("link", encoded_link(trace.at("page").text()));
  view.set("title", view_of(trace.at("title")));
  view.set("name", view_of(trace.at("name")));
  view.set("references", references_view(trace));
  View sound = list_view();
  View damaged = list_view();
  for (std::size_t i = 0; i < trace.at("runs").size(); ++i)
    (trace.at("runs").item(i).has("defect") ? damaged : sound).push_back(row_of_run(trace, i));
  view.set("has_sound", sound.is_non_empty_list());
  view.set("has_damaged", damaged.is_non_empty_list());
  view.set("sound", sound);
  view.set("damaged", damaged);
  return view;
}

/// Rows of traces; those that reproduce a public report come first, because readers look for its
/// number.
View rows_of_traces(const JsonField& traces) {
  View rows = list_view();
  for (const bool is_public : {true, false})
    for (std::size_t i = 0; i < traces.size(); ++i)
      if ((traces.item(i).at("references").size() > 0) == is_public)
        rows.push_back(row_of_trace(traces.item(i)));
  return rows;
}

/// All runs that are not as expected.
View complaints_view(const JsonField& document) {
  View list = list_view();
  const auto add = [&](const JsonField& run, const std::string& link) {
    if (run.at("as_expected").flag()) return;
    View view = object_view();
    view.set("link", link);
    view.set("command", view_of(run.at("command")));
    view.set("complaint", view_of(run.at("complaint")));
    const JsonField findings = run.at("run").at("findings");
    view.set("sentence", findings.size() == 0 ? View(false) : view_of(findings.item(0).at("text")));
    list.push_back(view);
  };
  const JsonField traces = document.at("traces");
  for (std::size_t i = 0; i < traces.size(); ++i)
    for (std::size_t k = 0; k < traces.item(i).at("runs").size(); ++k)
      add(traces.item(i).at("runs").item(k),
          encoded_link(traces.item(i).at("page").text()) + "#" + run_anchor(traces.item(i), k));
  const JsonField workloads = document.at("workloads");
  for (std::size_t i = 0; i < workloads.size(); ++i)
    for (std::size_t k = 0; k < workloads.item(i).at("runs").size(); ++k)
      add(workloads.item(i).at("runs").item(k), "policies.html#workloads");
  return list;
}

std::string index_page(const JsonField& document) {
  View view = page_view(document, "");
  view.set("is_index", true);
  const View complaints = complaints_view(document);
  view.set("has_complaints", complaints.is_non_empty_list());
  view.set("complaints", complaints);
  view.set("summary", view_of(document.at("summary")));
  for (const char* const key : {"commit", "version", "made_by", "date", "found_bugs"})
    view.set(key, view_of(document.at(key)));
  view.set("has_bugs", document.at("found_bugs").size() > 0);
  view.set("traces", rows_of_traces(document.at("traces")));
  view.set("has_kinds", document.at("kinds").size() > 0);
  view.set("kinds", views_of(document.at("kinds"), [](const JsonField& kind, std::size_t) {
             View row = view_of(kind);
             row.set("meaning", meaning_of(kind.at("kind")));
             return row;
           }));
  view.set("has_missing", document.at("defects_not_shown").size() > 0);
  view.set("defects_not_shown", view_of(document.at("defects_not_shown")));
  return page_of("index.html", std::move(view), plain_title("Lockstep report"));
}

// --- A page for each trace -----------------------------------------------------------------------

View neighbour(const JsonField& traces, std::size_t i) {
  if (i >= traces.size()) return View(false);  // also if i was 0 - 1
  View view = object_view();
  view.set("link", "../" + encoded_link(traces.item(i).at("page").text()));
  view.set("name", code(traces.item(i).at("name"), 60));
  return view;
}

std::string trace_page(const JsonField& document, std::size_t i) {
  const JsonField traces = document.at("traces");
  View view = page_view(document, "../");
  view.set("in_report", true);
  view.set("has_data", true);
  view.set("previous", neighbour(traces, i - 1));
  view.set("next", neighbour(traces, i + 1));
  View list = list_view();
  list.push_back(trace_view(traces.item(i)));
  view.set("traces", list);
  return page_of("traces.html", std::move(view), hover_title(traces.item(i).at("title")));
}

// --- Policies, kernels, how to read --------------------------------------------------------------

View workload_view(const JsonField& workload) {
  View view = object_view();
  view.set("workload", view_of(workload.at("workload")));
  view.set("picture", hit_ratio_picture(workload));
  view.set("runs", views_of(workload.at("runs"), [](const JsonField& run, std::size_t) {
             View row = view_of(run, {"run", "recorded"});
             const JsonField all = run.at("run");
             row.set("run", view_of(all, {"subjects", "findings"}));
             row.set("oracle_hits",
                     count(all.at("subjects").item(1).at("totals").at("hit_tokens")));
             View recorded(false);
             if (run.has("recorded")) {
               recorded = view_of(run.at("recorded"));
               recorded.set("same", run.at("recorded").at("decision_digest").text() ==
                                        all.at("decision_digest").text());
             }
             row.set("recorded", recorded);
             return row;
           }));
  return view;
}

View comparisons_view(const JsonField& document) {
  return views_of(document.at("comparisons"), [](const JsonField& comparison, std::size_t) {
    return comparison_view(comparison);
  });
}

std::string policies_page(const JsonField& document) {
  View view = page_view(document, "");
  view.set("comparisons", comparisons_view(document));
  view.set("workloads",
           views_of(document.at("workloads"), [](const JsonField& workload, std::size_t) {
             return workload_view(workload);
           }));
  return page_of("policies.html", std::move(view), plain_title("Which policy for which workload"));
}

std::string kernels_page(const JsonField& document) {
  View view = page_view(document, "");
  view.set("kernels", views_of(document.at("kernels"), [](const JsonField& kernel, std::size_t) {
             return kernel_view(kernel);
           }));
  view.set("kernel_totals", view_of(document.at("kernel_totals")));
  return page_of("kernels.html", std::move(view), plain_title("Kernels on the GPU"));
}

std::string reading_page(const JsonField& document) {
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
  View view = page_view(document, "");
  view.set("idea_picture", idea_picture());
  View legend = list_view();
  for (const Entry& entry : kEntries) {
    View item = object_view();
    item.set("box", legend_box(entry.kind));
    item.set("sentence", std::string(entry.sentence));
    legend.push_back(item);
  }
  view.set("legend", legend);
  view.set("open_terms", true);
  return page_of("reading.html", std::move(view), plain_title("How to read this report"));
}

View search_view(const JsonField& search) {
  View view = view_of(search, {"subjects"});
  const auto filled = [&](std::string_view key) { return search.at(key).size() > 0; };
  view.set("has_subjects", filled("subjects"));
  view.set("has_unsupported", filled("unsupported"));
  view.set("has_missed", filled("marks_missed"));
  view.set("subjects", views_of(search.at("subjects"), [](const JsonField& subject, std::size_t i) {
             View name = view_of(subject);
             name.set("first", i == 0);
             return name;
           }));
  return view;
}

}  // namespace

std::vector<Page> report_pages(const Json& data) {
  const JsonField document(data);
  std::vector<Page> pages;
  for (std::size_t i = 0; i < document.at("traces").size(); ++i)
    pages.push_back({document.at("traces").item(i).at("page").text(), trace_page(document, i)});
  if (document.at("comparisons").size() + document.at("workloads").size() > 0)
    pages.push_back({"policies.html", policies_page(document)});
  if (document.at("kernels").size() > 0) pages.push_back({"kernels.html", kernels_page(document)});
  pages.push_back({"reading.html", reading_page(document)});
  // the last page, because it links to all others
  pages.push_back({"index.html", index_page(document)});
  return pages;
}

std::string runs_page(const Json& data) {
  const JsonField document(data);
  View view = object_view();
  view.set("traces", views_of(document.at("traces"), [](const JsonField& trace, std::size_t) {
             return trace_view(trace);
           }));
  if (document.has("search")) view.set("search", search_view(document.at("search")));
  return page_of("traces.html", std::move(view), plain_title("Lockstep"));
}

std::string comparisons_page(const Json& data) {
  View view = object_view();
  const JsonField document(data);
  view.set("comparisons", comparisons_view(document));
  return page_of("comparisons.html", std::move(view), plain_title("Lockstep compare"));
}

}  // namespace lockstep::cache_sim
