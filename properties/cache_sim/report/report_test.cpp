// The report: every figure of a page stands in its data, verdicts are those of the runs, and bad
// input writes nothing.
#include "cache_sim/report/collect.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cache_sim/report/junit.hpp"
#include "cache_sim/report/kernels.hpp"
#include "cache_sim/report/page.hpp"
#include "cache_sim/report/run_document.hpp"
#include "cache_sim/trace/public_reports.hpp"
#include "properties/support/program.hpp"

namespace lockstep::cache_sim {
namespace {

namespace fs = std::filesystem;
using testing_support::read_text;
using testing_support::ScratchFolder;

// --- Fixtures of the test's own ------------------------------------------------------------------

constexpr std::string_view kFinishKeepsItsState =
    R"(# run: lockstep replay %s --subject sglang-no-buffer
# run: lockstep replay %s --defect sglang-no-buffer:frees-donated-slot
# finds: freed-slot-in-use
# A finished request's state stands for prompt + output - 1 tokens.
# Reported as sglang #22935, with tests in #38597.
config chunked_prefill=8192 kv_tokens=65536 page=1 state_slots=16
request id=first tokens=a1000 output=b8
run
request id=again tokens=a1000 output=b8
run
expect id=again
----
cached=0
request id=continued tokens=a1000+b8+c50 output=8
run
----
violations=0
expect id=continued
----
cached=1007
)";

constexpr std::string_view kRetraction = R"(# run: lockstep replay %s
# run: lockstep replay %s --subject oracle:sglang-no-buffer
# run: lockstep replay %s --subject radix --subject oracle
# A retracted request comes back.
config kv_tokens=4096 state_slots=4 chunked_prefill=256
request id=left tokens=a700 output=b40
request id=right tokens=a300+c500 output=d20 at=2ms
run steps=9
retract id=right
run
expect id=right
----
finish=stop
)";

constexpr std::string_view kSplit = R"(# run: lockstep replay %s
# run: lockstep replay %s --defect sglang-no-buffer:split-moves-state
# finds: wrong-state-prefix
# A split leaves the state with the longer half.
config kv_tokens=64 state_slots=8
alloc as=s1
advance slot=s1 tokens=a4
insert slot=s1 tokens=a4
alloc as=s2
advance slot=s2 tokens=a2+b3
insert slot=s2 tokens=a2+b3
lock tokens=a2+b3 as=r1
check
----
violations=0
)";

/// A folder of fixtures that goes away with the test.
class FixtureFolder {
 public:
  FixtureFolder() { fs::create_directories(fixtures() + "/traces"); }

  FixtureFolder& with(const std::string& name, std::string_view text,
                      const std::string& kind = "traces") {
    fs::create_directories(fixtures() + "/" + kind);
    folder_.write("fixtures/" + kind + "/" + name + ".trace", std::string(text));
    return *this;
  }
  std::string fixtures() const { return folder_.path("fixtures"); }
  std::string out() const { return folder_.path("out"); }

 private:
  ScratchFolder folder_;
};

/// Reads a run line as the program's parser does, as far as these tests need it.
Result<std::vector<ReplayRequest>> read_run_line(const std::vector<std::string>& words) {
  ReplayRequest request;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (!words[i].starts_with("--")) {
      request.file = words[i];
      continue;
    }
    if (i + 1 == words.size()) return fail(words[i] + " needs a value");
    if (words[i] == "--subject")
      request.subjects.push_back(words[i + 1]);
    else if (words[i] == "--defect")
      request.defect = words[i + 1];
    else if (words[i] == "--config")
      request.config = words[i + 1];
    else
      return fail("there is no option " + words[i]);
    ++i;
  }
  return std::vector<ReplayRequest>{request};
}

ReportOptions options_of(const FixtureFolder& folder, const std::string& workload = "") {
  return {.fixtures = folder.fixtures(),
          .workload = workload,
          .policies = {"radix", "sglang-no-buffer", "sglang-extra-buffer", "sglang-legacy"},
          .read_run_line = read_run_line};
}

Report collected(const FixtureFolder& folder, const std::string& workload = "") {
  Result<Report> report = collect_report(options_of(folder, workload));
  require(report.has_value(), report ? "" : report.error().text);
  return std::move(*report);
}

/// A small comparison of two capacities.
ComparisonPlan small_comparison() {
  return {.title = "Chats",
          .about = "A few chats.",
          .request = {.workload = "sessions:requests=60,seats=4",
                      .policies = {"kv-bound", "state-at-end-and-branch", "state-at-end", "belady",
                                   "lru", "radix", "sglang-no-buffer"},
                      .capacities = {std::int64_t{1} << 30, std::int64_t{4} << 30}}};
}

constexpr std::string_view kEvidence = R"({"operation": "state_copy", "sources": "0",
 "sanitizer": {"memcheck": 0},
 "chips": [{"gpu": "NVIDIA A1", "driver": "1", "cuda": "13.0", "copy_gbps": 4000, "read_gbps": 4100,
  "matmul_tflops": 700, "commit": "0", "date": "2026-01-01",
  "accuracy": [{"case": "out", "error": 1e-3, "yardstick": 4e-3, "cases": 7, "worst": "none"}],
  "speed": [{"case": "B=1 <small>", "time_us": 3.5, "bytes": 1000, "gbps": 400, "limit_share": 0.5,
             "peer": "another", "peer_time_us": 7.0, "peer_run": "recorded"},
            {"case": "B=2", "time_us": 2500.4, "bytes": 1000, "gbps": 4000, "limit_share": 0.97}]}]
 })";

/// The evidence of a layer of which nobody asks for its speed.
std::string untimed(std::string_view evidence) {
  Json json = Json::parse(evidence);
  json["operation"] = "rms_norm";
  json["chips"][0]["speed"] = Json::array();
  return json.dump();
}

/// The evidence with a second card, whose times are twice as long, and which has one case less.
std::string on_two_cards(std::string_view evidence) {
  Json json = Json::parse(evidence);
  json["operation"] = "on_two_cards";
  Json chip = json["chips"][0];
  chip["gpu"] = "B2";
  chip["speed"].erase(1);
  chip["speed"][0]["time_us"] = 14.0;
  json["chips"].push_back(chip);
  return json.dump();
}

Report report_of_everything() {
  FixtureFolder folder;
  folder.with("finish_keeps_its_state", kFinishKeepsItsState).with("retraction", kRetraction);
  folder.with("split", kSplit, "regressions");
  ReportOptions options = options_of(folder, "sglang-w1:requests=80");
  options.comparisons = {small_comparison()};
  const ScratchFolder measured;
  std::filesystem::create_directory(measured.path("kernels"));
  measured.write("kernels/state_copy.json", std::string(kEvidence));
  measured.write("kernels/rms_norm.json", untimed(kEvidence));
  measured.write("kernels/on_two_cards.json", on_two_cards(kEvidence));
  measured.write("pending.json", R"({"state_copy": "its chunks became longer"})");
  options.kernels = measured.path("kernels");
  Result<Report> report = collect_report(options);
  require(report.has_value(), report ? "" : report.error().text);
  return std::move(*report);
}

// --- Reading a page ------------------------------------------------------------------------------

struct Element {
  std::string tag;
  std::map<std::string, std::string> attributes;
  std::string text;           ///< its own and that of everything inside
  bool inside_place = false;  ///< it or one around it names a place in the data
};

std::string unescaped(std::string_view markup) {
  constexpr std::pair<std::string_view, char> kEntities[] = {
      {"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&#39;", '\''}};
  std::string text;
  while (!markup.empty()) {
    const auto* const entity = std::ranges::find_if(
        kEntities, [&](const auto& one) { return markup.starts_with(one.first); });
    if (entity == std::end(kEntities)) {
      require(markup[0] != '&', "every & begins an entity");
      text += markup[0];
      markup.remove_prefix(1);
    } else {
      text += entity->second;
      markup.remove_prefix(entity->first.size());
    }
  }
  return text;
}

/// Reads markup in which every tag is closed, and throws where one is not.
class Markup {
 public:
  explicit Markup(std::string_view text) : rest_(text) {
    while (!rest_.empty()) {
      if (rest_[0] != '<')
        take_text();
      else if (rest_.starts_with("<!") || rest_.starts_with("<?"))
        take_until(">");
      else if (rest_.starts_with("</"))
        take_end();
      else
        take_start();
    }
    require(open_.empty(), "every element is closed at the end");
  }

  const std::vector<Element>& elements() const { return elements_; }
  /// Text with digits that belongs to no place of the data.
  const std::vector<std::string>& loose_figures() const { return loose_figures_; }

 private:
  std::string take_until(std::string_view end) {
    const std::size_t at = rest_.find(end);
    require(at != std::string_view::npos, fmt::format("`{}` follows", end));
    std::string taken(rest_.substr(0, at));
    rest_.remove_prefix(at + end.size());
    return taken;
  }

  void take_text() {
    const std::size_t end = std::min(rest_.find('<'), rest_.size());
    const std::string text = unescaped(rest_.substr(0, end));
    rest_.remove_prefix(end);
    for (const std::size_t i : open_) elements_[i].text += text;
    if (open_.empty() || elements_[open_.back()].inside_place) return;
    if (std::ranges::any_of(text, [](char c) { return c >= '0' && c <= '9'; }))
      loose_figures_.push_back(text);
  }

  void take_end() {
    const std::string tag = take_until(">").substr(2);
    require(!open_.empty() && elements_[open_.back()].tag == tag,
            fmt::format("</{}> closes what was opened last", tag));
    open_.pop_back();
  }

  void take_start() {
    std::string tag = take_until(">").substr(1);
    const bool closed = tag.ends_with('/');
    if (closed) tag.pop_back();
    Element element;
    std::string_view fields = tag;
    element.tag = fields.substr(0, std::min(fields.find(' '), fields.size()));
    fields.remove_prefix(element.tag.size());
    while (!fields.empty()) {
      const std::size_t equals = fields.find("=\"");
      const std::size_t end =
          equals == std::string_view::npos ? equals : fields.find('"', equals + 2);
      require(fields[0] == ' ' && end != std::string_view::npos,
              "attributes are name=\"value\": " + tag);
      const std::string name(fields.substr(1, equals - 1));
      const std::string value = unescaped(fields.substr(equals + 2, end - equals - 2));
      require(element.attributes.emplace(name, value).second, "an attribute stands once");
      fields.remove_prefix(end + 1);
    }
    element.inside_place = element.attributes.contains("data-path") ||
                           (!open_.empty() && elements_[open_.back()].inside_place);
    elements_.push_back(std::move(element));
    // Text between these tags is no markup.
    for (const std::string_view raw : {"style", "script"})
      if (elements_.back().tag == raw) {
        elements_.back().text = take_until(fmt::format("</{}>", raw));
        return;
      }
    if (!closed) open_.push_back(elements_.size() - 1);
  }

  std::string_view rest_;
  std::vector<Element> elements_;
  std::vector<std::size_t> open_;
  std::vector<std::string> loose_figures_;
};

/// Whether the text shows this number of nanoseconds, to within its last digit.
bool shows_time(const std::string& text, std::int64_t nanoseconds) {
  const std::map<std::string, double> units{{"s", 1e9}, {"ms", 1e6}, {"µs", 1e3}, {"ns", 1}};
  std::istringstream words(text);
  double value = -1;
  std::string unit;
  words >> value >> unit;
  return units.contains(unit) &&
         std::abs(value * units.at(unit) - static_cast<double>(nanoseconds)) <=
             0.0501 * units.at(unit);
}

std::string without_ticks(std::string text) {
  std::erase(text, '`');
  return text;
}

bool shows(const Element& element, const Json& value) {
  const auto as = element.attributes.find("data-as");
  if (value.is_string()) {
    const std::string whole = value.get<std::string>();
    if (as == element.attributes.end()) return element.text == whole;
    if (as->second == "code") return element.text == without_ticks(whole);
    constexpr std::string_view kCut = "…";
    return as->second == "shortened" && element.text.ends_with(kCut) &&
           whole.starts_with(element.text.substr(0, element.text.size() - kCut.size()));
  }
  if (!value.is_number()) return false;
  const std::string attribute = element.tag == "data" ? "value" : "data-value";
  if (!element.attributes.contains(attribute) || element.attributes.at(attribute) != value.dump())
    return false;
  if (as == element.attributes.end()) {
    std::string digits = element.text;
    digits.erase(std::remove(digits.begin(), digits.end(), ','), digits.end());
    return digits == value.dump();
  }
  if (as->second == "time") return shows_time(element.text, value.get<std::int64_t>());
  return as->second == "percent" && element.text.ends_with(" %") &&
         std::abs(std::stod(element.text) - 100 * value.get<double>()) <= 0.0501;
}

/// Everything on the page that is not what the data say.
std::vector<std::string> complaints(const std::string& page, const Json& document) {
  const Markup markup(page);
  std::vector<std::string> found = markup.loose_figures();
  for (const Element& element : markup.elements()) {
    const auto path = element.attributes.find("data-path");
    if (path == element.attributes.end()) {
      if (element.tag == "data") found.push_back("a figure without a source: " + element.text);
      continue;
    }
    const Json::json_pointer pointer(path->second);
    if (!document.contains(pointer))
      found.push_back("no such place: " + path->second);
    else if (!shows(element, document.at(pointer)))
      found.push_back(path->second + " is not " + element.text);
  }
  return found;
}

/// One page of the report of a document.
std::string page_named(const Json& document, const std::string& path) {
  for (Page& page : report_pages(document))
    if (page.path == path) return std::move(page.markup);
  throw std::runtime_error("no page " + path);
}

/// The same of every page.
std::vector<std::string> all_complaints(const Json& document) {
  std::vector<std::string> found;
  for (const Page& page : report_pages(document))
    for (const std::string& complaint : complaints(page.markup, document))
      found.push_back(page.path + ": " + complaint);
  return found;
}

std::size_t place_count(const std::string& page) {
  const Markup markup(page);
  return static_cast<std::size_t>(std::ranges::count_if(
      markup.elements(),
      [](const Element& element) { return element.attributes.contains("data-path"); }));
}

void erase_timing(Json& json) {
  if (json.is_object()) json.erase("timing");
  if (json.is_structured())
    for (Json& inner : json) erase_timing(inner);
}

// --- The page ------------------------------------------------------------------------------------

// A reader who doubts a figure finds it in the data; a figure that came from anywhere else would be
// a rumour.
TEST(Report, everyFigureOfThePageIsOneOfItsData) {
  const Report report = report_of_everything();
  EXPECT_EQ(all_complaints(report.document), std::vector<std::string>{});
  std::size_t places = 0;
  for (const Page& page : report_pages(report.document)) places += place_count(page.markup);
  EXPECT_GT(places, 500u);
}

// The check above would be worth nothing if it let a wrong page pass.
TEST(Report, aDamagedPageIsNoticed) {
  const Report report = report_of_everything();
  const auto damaged = [&](const std::string& path, std::string_view old_text,
                           std::string_view new_text) {
    std::string copy = page_named(report.document, path);
    const std::size_t at = copy.find(old_text);
    require(at != std::string::npos, fmt::format("the page holds {}", old_text));
    return complaints(copy.replace(at, old_text.size(), new_text), report.document);
  };
  const std::string index = "index.html";
  const std::string trace = "traces/finish_keeps_its_state.html";
  EXPECT_FALSE(
      damaged(index, "data-path=\"/summary/runs\">11<", "data-path=\"/summary/runs\">10<").empty());
  EXPECT_FALSE(damaged(index, "value=\"11\" data-path=\"/summary/runs\"",
                       "value=\"8\" data-path=\"/summary/runs\"")
                   .empty());
  EXPECT_FALSE(damaged(index, "/summary/traces", "/summary/nothing").empty());
  EXPECT_FALSE(
      damaged(index, "What this report is made of</h2>", "What 7 pages are made of</h2>").empty());
  EXPECT_FALSE(damaged(trace, "a1000+b8+c50 output", "a1000+b8+c51 output").empty());
  EXPECT_THROW(damaged(trace, "</section>", ""), std::exception);
}

// The page is made from the data alone: other data, another page.
TEST(Report, figuresFollowTheData) {
  Report report = report_of_everything();
  report.document["summary"]["runs"] = 987654;
  report.document["traces"][0]["runs"][0]["run"]["requests"][0]["cached_tokens"] = 1234567;
  const std::string trace = report.document["traces"][0]["page"];
  EXPECT_NE(page_named(report.document, "index.html").find(">987,654<"), std::string::npos);
  EXPECT_NE(page_named(report.document, trace).find(">1,234,567<"), std::string::npos);
  EXPECT_EQ(all_complaints(report.document), std::vector<std::string>{});
}

TEST(Report, everyTraceHasAPageAndEveryLinkLeadsSomewhere) {
  const Report report = report_of_everything();
  std::map<std::string, std::set<std::string>> names;  // of each page's places
  std::map<std::string, int> tags;
  const std::vector<Page> pages = report_pages(report.document);
  for (const Page& page : pages)
    for (const Markup markup(page.markup); const Element& element : markup.elements()) {
      ++tags[element.tag];
      names[page.path];
      if (element.attributes.contains("id")) {
        EXPECT_TRUE(names[page.path].insert(element.attributes.at("id")).second);
      }
    }
  for (const auto& [page, place] : std::vector<std::pair<std::string, std::string>>{
           {"index.html", "figures"},
           {"index.html", "traces"},
           {"index.html", "kinds"},
           {"index.html", "making"},
           {"reading.html", "idea"},
           {"reading.html", "legend"},
           {"policies.html", "workloads"},
           {"traces/retraction.html", "traces-retraction"},
           {"traces/finish_keeps_its_state.html", "traces-finish_keeps_its_state-run-2"},
           {"traces/regressions-split.html", "regressions-split"}})
    EXPECT_TRUE(names[page].contains(place)) << page << "#" << place;
  EXPECT_EQ(tags["section"], 3);
  EXPECT_EQ(tags["article"], 7);  // one for each run of a file
  EXPECT_GT(tags["svg"], 10);
  std::size_t followed = 0;
  for (const Page& page : pages)
    for (const Markup markup(page.markup); const Element& element : markup.elements()) {
      if (element.tag != "a" || element.attributes.at("href").starts_with("https://")) continue;
      const std::string link = element.attributes.at("href");
      const std::string file = link.substr(0, link.find('#'));
      if (!file.empty() && !file.ends_with(".html")) continue;  // data, written beside the pages
      const std::string target =
          file.empty() ? page.path
                       : (fs::path(page.path).parent_path() / file).lexically_normal().string();
      ASSERT_TRUE(names.contains(target)) << page.path << ": " << link;
      const std::size_t place = link.find('#');
      EXPECT_TRUE(place == std::string::npos || names[target].contains(link.substr(place + 1)))
          << page.path << ": " << link;
      ++followed;
    }
  EXPECT_GT(followed, 20u);
}

// It is read on machines without a network, and tells nobody that it is read.
TEST(Report, pagesLoadNothingFromElsewhere) {
  const std::vector<Page> pages = report_pages(report_of_everything().document);
  std::size_t reports = 0;
  for (const Page& page : pages) {
    EXPECT_EQ(page.markup.find("http://"), std::string::npos);
    EXPECT_EQ(page.markup.find("@import"), std::string::npos);
    EXPECT_EQ(page.markup.find("url("), std::string::npos);
    for (const Markup markup(page.markup); const Element& element : markup.elements()) {
      EXPECT_FALSE(element.attributes.contains("src"));
      EXPECT_NE(element.tag, "link");
      EXPECT_NE(element.tag, "iframe");
      const auto target = element.attributes.find("href");
      if (target == element.attributes.end() || target->second.find("//") == std::string::npos)
        continue;
      // A public report is read where it is, if the reader asks for it.
      EXPECT_TRUE(element.tag == "a" && target->second.starts_with("https://github.com/"));
      ++reports;
    }
  }
  EXPECT_GT(reports, 0u);
}

// Even where a text gets past the escaping, the browser runs the page's own script alone. The
// policy names it by its digest.
TEST(Report, pageAllowsItsOwnScriptAlone) {
  const std::string page = page_named(report_of_everything().document, "index.html");
  const auto between = [&](const std::string& begin, const std::string& end) {
    const std::size_t at = page.find(begin) + begin.size();
    return page.substr(at, page.find(end, at) - at);
  };
  EXPECT_LT(page.find("Content-Security-Policy"), page.find("<style"));
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  const std::string script = between("<script>", "</script>");
  EXPECT_EQ(page.find("<script"), page.rfind("<script"));
  const ScratchFolder folder;
  const std::string command =
      "python3 -c 'import base64, hashlib, sys; print(end=base64.b64encode(hashlib.sha256(open("
      "sys.argv[1], \"rb\").read()).digest()).decode())' '" +
      folder.write("script", script) + "' >'" + folder.path("digest") + "'";
  ASSERT_EQ(std::system(command.c_str()), 0);  // NOLINT(cert-env33-c)
  EXPECT_EQ(between("'sha256-", "'"), read_text(folder.path("digest")));
}

// A file's name can hold what a URL gives a meaning of its own.
TEST(Report, linksToTimelinesLeadToTheirFiles) {
  const Report report = collected(FixtureFolder().with("50% of #1? é", "check\n"));
  const std::string name = "50%25%20of%20%231%3F%20%C3%A9";
  EXPECT_NE(page_named(report.document, "traces/50% of #1? é.html")
                .find("href=\"../timelines/" + name + "-1.json\""),
            std::string::npos);
  EXPECT_NE(page_named(report.document, "index.html").find("href=\"traces/" + name + ".html\""),
            std::string::npos);
  EXPECT_EQ(report.timelines[0].path, "timelines/50% of #1? é-1.json");
}

TEST(Report, textFromAFileIsNeverMarkup) {
  const Report report = collected(FixtureFolder().with(
      "angry",
      "# <script>alert('1 & 2')</script> \"quoted\"\n# sglang #12 </code><b>bold\nalloc "
      "as=<i>\ncheck\n"));
  for (const Page& page : report_pages(report.document))
    for (const char* const markup : {"<script>alert", "<b>", "<i>"})
      EXPECT_EQ(page.markup.find(markup), std::string::npos) << page.path;
  EXPECT_EQ(all_complaints(report.document), std::vector<std::string>{});
  EXPECT_NO_THROW(Markup(report_junit(report.document)));
}

// A command of the page can be pasted into a shell: a word that needs quotes has them.
TEST(Report, commandsQuoteTheWordsOfARunLine) {
  FixtureFolder folder;
  folder.with("page of 1", "# run: lockstep replay %s\ncheck\n");
  const Report report = collected(folder);
  EXPECT_EQ(report.document["traces"][0]["runs"][0]["command"],
            "lockstep replay '" + folder.fixtures() + "/traces/page of 1.trace'");
}

// A comment can hold any bytes; JSON holds text.
TEST(Report, bytesThatAreNoTextAreReplaced) {
  const Report report = collected(FixtureFolder().with("bytes", "# caf\xE9 and \xFF\xFE\ncheck\n"));
  EXPECT_NO_THROW(report.document.dump());
  EXPECT_EQ(all_complaints(report.document), std::vector<std::string>{});
}

// --- The data ------------------------------------------------------------------------------------

TEST(Report, sameFixturesGiveTheSameBytes) {
  FixtureFolder folder;
  folder.with("finish_keeps_its_state", kFinishKeepsItsState).with("retraction", kRetraction);
  Report first = collected(folder, "sglang-w1:requests=80");
  Report second = collected(folder, "sglang-w1:requests=80");
  const std::vector<Page> pages = report_pages(first.document);
  const std::vector<Page> again = report_pages(second.document);
  ASSERT_EQ(pages.size(), again.size());
  for (std::size_t i = 0; i < pages.size(); ++i) EXPECT_EQ(pages[i].markup, again[i].markup);
  erase_timing(first.document);
  erase_timing(second.document);
  EXPECT_EQ(first.document.dump(), second.document.dump());
  ASSERT_EQ(first.timelines.size(), 5u);
  for (std::size_t i = 0; i < first.timelines.size(); ++i)
    EXPECT_EQ(first.timelines[i].timeline, second.timelines[i].timeline);
}

// The heading of a trace is whole sentences, whether or not its comment is wrapped within one.
TEST(Report, headingsEndWithTheirSentence) {
  const std::string run = "# run: lockstep replay %s\nrequest id=a tokens=a4 output=2\nrun\n";
  const std::string wrapped =
      "# A prefill is cut at a block's end, because kernels have a state there alone; the rest of "
      "it is\n"
      "# the next step's. Nothing is lost.\n";
  const std::string two =
      "# A prefill is cut at a block's end. Kernels of version 0.33 have a state there alone, and "
      "the\n"
      "# rest is computed in the next step.\n";
  const Report report = collected(FixtureFolder()
                                      .with("a_short", "# Two requests\n# share a prefix.\n" + run)
                                      .with("b_wrapped", wrapped + run)
                                      .with("c_two", two + run));
  const Json& traces = report.document["traces"];
  EXPECT_EQ(traces[0]["title"], "Two requests");
  EXPECT_EQ(traces[0]["paragraph"], Json::array({"share a prefix."}));
  EXPECT_EQ(
      traces[1]["title"],
      "A prefill is cut at a block's end, because kernels have a state there alone; the rest of "
      "it is the next step's.");
  EXPECT_EQ(traces[1]["paragraph"], Json::array({"Nothing is lost."}));
  EXPECT_EQ(traces[2]["title"], "A prefill is cut at a block's end.");
  EXPECT_EQ(traces[2]["paragraph"],
            Json::array({"Kernels of version 0.33 have a state there alone, and the",
                         "rest is computed in the next step."}));
}

TEST(Report, dataSayWhatEachRunFound) {
  const Report report =
      collected(FixtureFolder().with("finish_keeps_its_state", kFinishKeepsItsState));
  EXPECT_EQ(report.status, kExitPass);
  const Json& trace = report.document["traces"][0];
  EXPECT_EQ(trace["title"], "A finished request's state stands for prompt + output - 1 tokens.");
  EXPECT_EQ(trace["references"], (Json{"sglang #22935", "sglang #38597"}));
  EXPECT_EQ(trace["runs"][0]["found"], nullptr);
  EXPECT_EQ(trace["runs"][1]["found"], "freed-slot-in-use");
  EXPECT_EQ(trace["runs"][1]["defect"]["name"], "sglang-no-buffer:frees-donated-slot");
  const Json& requests = trace["runs"][0]["run"]["requests"];
  EXPECT_EQ(requests[1]["cached_tokens"], 0);
  EXPECT_EQ(requests[2]["cached_tokens"], 1007);
  const Json& summary = report.document["summary"];
  EXPECT_EQ(summary["runs"], 2);
  EXPECT_EQ(summary["as_expected"], 2);
  EXPECT_EQ(summary["defects_shown"], 1);
  EXPECT_EQ(summary["kinds_shown"], 1);
  EXPECT_EQ(summary["requests"].get<int>(), 4);
}

// Without a run line a file is replayed as `lockstep replay FILE` does it.
TEST(Report, fileWithoutRunLineIsReplayed) {
  const Report report =
      collected(FixtureFolder()
                    .with("plain", "# A plain file.\nadmit id=r tokens=a10\ncheck\n", "regressions")
                    .with("other", "check\n"));
  EXPECT_EQ(report.document["summary"]["traces"], 2);
  EXPECT_EQ(report.document["summary"]["regressions"], 1);
  EXPECT_EQ(report.document["traces"][1]["runs"][0]["subjects"],
            (Json{"sglang-no-buffer", "oracle:sglang-no-buffer"}));
}

TEST(Report, eventsOnThePageAreThoseAroundTheFinding) {
  std::string text = "config kv_tokens=4096 state_slots=200\n";
  for (int i = 0; i < 100; ++i) text += fmt::format("match tokens=a{}\n", i + 1);
  const std::string plain = text;
  text += "----\nstate=7\n";
  for (int i = 0; i < 30; ++i) text += "match tokens=b1\n";
  const Report report =
      collected(FixtureFolder()
                    .with("long", "# run: lockstep replay %s\n# finds: answer-differs\n" + text)
                    .with("plain", plain)
                    .with("short", "check\n"));
  const auto window = [&](int trace) {
    return report.document["traces"][trace]["runs"][0]["window"];
  };
  EXPECT_EQ(report.document["traces"][0]["runs"][0]["run"]["findings"][0]["event"], 100);
  EXPECT_EQ(window(0),
            (Json{{"first", 70}, {"last", 109}, {"cut", true}, {"before", Json::array()}}));
  EXPECT_EQ(window(1),
            (Json{{"first", 1}, {"last", 40}, {"cut", true}, {"before", Json::array()}}));
  EXPECT_EQ(window(2),
            (Json{{"first", 1}, {"last", 1}, {"cut", false}, {"before", Json::array()}}));
  EXPECT_EQ(all_complaints(report.document), std::vector<std::string>{});
}

// The finding is about one node; the reader need not look for it.
TEST(Report, treeMarksTheNodeThatTheFindingIsAbout) {
  const Report report =
      collected(FixtureFolder().with("finish_keeps_its_state", kFinishKeepsItsState));
  const Json& runs = report.document["traces"][0]["runs"];
  EXPECT_EQ(runs[1]["run"]["findings"][0]["text"],
            "state slot 1 is free and belongs to the node at a1000+b7 (1007 tokens)");
  std::vector<std::string> marked;
  for (const Json& node : runs[1]["tree"]["nodes"])
    if (node["guilty"])
      marked.push_back(
          fmt::format("{} {}", node["edge"].get<std::string>(), node["state_slot"].get<int>()));
  EXPECT_EQ(marked, std::vector<std::string>{"b7 1"});
  for (const Json& node : runs[0]["tree"]["nodes"]) EXPECT_FALSE(node["guilty"]);
  EXPECT_NE(page_named(report.document, "traces/finish_keeps_its_state.html").find("guilty"),
            std::string::npos);
}

// A wrong number that a request was admitted with is far above the event that shows it.
TEST(Report, eventsOnThePageBeginWithTheAdmissionOfTheFindingsRequest) {
  std::string text = "config kv_tokens=4096 state_slots=200\nadmit id=r tokens=a100\n";
  for (int i = 0; i < 60; ++i) text += fmt::format("match tokens=a{}\n", i + 1);
  text += "extend id=r n=100\nstep ids=r\nfinish id=r\n----\nlength=7\n";
  const Report report = collected(
      FixtureFolder().with("late", "# run: lockstep replay %s\n# finds: answer-differs\n" + text));
  const Json& run = report.document["traces"][0]["runs"][0];
  EXPECT_GT(run["window"]["first"], 1);
  EXPECT_EQ(run["window"]["before"], Json::array({1}));
  EXPECT_EQ(all_complaints(report.document), std::vector<std::string>{});
}

// Nodes that are not drawn are counted where they would hang.
TEST(Report, everyNodeOfABigTreeIsDrawnOrCounted) {
  std::string text = "config kv_tokens=8192 state_slots=200\n";
  for (int i = 0; i < 60; ++i)
    text += fmt::format(
        "alloc as=s{0}\nadvance slot=s{0} tokens=a{1}+[{0},7]\ninsert slot=s{0} "
        "tokens=a{1}+[{0},7]\n",
        i, 2 + i % 9);
  for (int i = 60; i < 90; ++i)
    text += fmt::format(
        "alloc as=s{0}\nadvance slot=s{0} tokens=[{0},1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]\n"
        "insert slot=s{0} tokens=[{0},1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]\n",
        i);
  const Report report = collected(FixtureFolder().with("big", text));
  const Json& tree = report.document["traces"][0]["runs"][0]["tree"];
  const auto node_count = tree["node_count"].get<std::int64_t>();
  EXPECT_EQ(node_count, 99);
  EXPECT_EQ(tree["shown_count"], 40);
  std::int64_t counted =
      tree["shown_count"].get<std::int64_t>() + tree["hidden_at_root"].get<std::int64_t>();
  for (const Json& node : tree["nodes"]) counted += node.value("hidden_below", std::int64_t{0});
  EXPECT_EQ(counted, node_count);
  EXPECT_GT(tree["hidden_at_root"], 0);
  EXPECT_EQ(all_complaints(report.document), std::vector<std::string>{});
}

TEST(Report, referencesAreReadFromComments) {
  EXPECT_EQ(public_references({"SGLang #16067, #21404 (merged) and vLLM #45100: see sglang #16067.",
                               "also #7 and PR 12"}),
            (std::vector<std::string>{"sglang #16067", "sglang #21404", "vllm #45100"}));
  EXPECT_EQ(public_references({"#123 stands alone"}), std::vector<std::string>{"#123"});
  EXPECT_TRUE(public_references({"nothing here"}).empty());
}

// --- Verdicts ------------------------------------------------------------------------------------

struct Outcome {
  std::string directives;
  ExitStatus status;
};

// A fixture that stops showing its bug is as much of a failure as a policy that breaks.
TEST(Report, firstUnexpectedOutcomeDecidesTheStatus) {
  const std::string defect =
      "# run: lockstep replay %s --defect sglang-no-buffer:frees-donated-slot\n";
  const std::string none = "# run: lockstep replay %s\n";
  const std::string found = "# finds: freed-slot-in-use\n";
  const std::string other = "# finds: answer-differs\n";
  const Outcome outcomes[] = {
      {none, kExitPass},
      {none + defect + found, kExitPass},
      {defect, kExitInvariant},          // found where nothing is expected
      {none + found, kExitDiffers},      // expected and not found
      {defect + other, kExitInvariant},  // found, and another was expected
      {none + found + defect, kExitDiffers},
      {defect + none + found, kExitInvariant},
  };
  for (const Outcome& outcome : outcomes) {
    FixtureFolder folder;
    const std::string body(kFinishKeepsItsState.substr(kFinishKeepsItsState.find("# A finished")));
    folder.with("case", outcome.directives + body);
    const Report report = collected(folder);
    EXPECT_EQ(report.status, outcome.status) << outcome.directives;
    EXPECT_EQ(report.document["summary"]["status"], static_cast<int>(outcome.status));
    EXPECT_EQ(report.document["summary"]["not_as_expected"] == 0, outcome.status == kExitPass);
    for (const std::string page : {"index.html", "traces/case.html"})
      EXPECT_EQ(page_named(report.document, page).find("✗") == std::string::npos,
                outcome.status == kExitPass)
          << outcome.directives;
    EXPECT_EQ(all_complaints(report.document), std::vector<std::string>{});
  }
}

TEST(Report, wrongAnswerInAFileIsNotAsExpected) {
  const Report report = collected(
      FixtureFolder().with("wrong", "# A wrong answer.\nadmit id=r tokens=a10\n----\ncached=3\n"));
  EXPECT_EQ(report.status, kExitDiffers);
  EXPECT_EQ(report.document["traces"][0]["runs"][0]["found"], "answer-differs");
}

/// The data of the page of `lockstep replay FILE --html` for one run of a file.
Json document_of_run(const ReplayRequest& request) {
  std::vector<ReplayOutcome> outcomes;
  Result<ReplayOutcome> outcome = replay(request);
  require(outcome.has_value(), outcome ? "" : outcome.error().text);
  outcomes.push_back(std::move(*outcome));
  return runs_document({request}, outcomes);
}

std::string page_of_run(const ReplayRequest& request) {
  return runs_page(document_of_run(request));
}

std::size_t times_in(const std::string& page, std::string_view text) {
  std::size_t times = 0;
  for (std::size_t at = page.find(text); at != std::string::npos; at = page.find(text, at + 1))
    ++times;
  return times;
}

// A copy is in flight from the event that queues it to the one by which it has landed.
TEST(Report, pageShowsTheCopiesInFlight) {
  const ReplayRequest request{.file = std::string(LOCKSTEP_SOURCE_DIR) +
                                      "/fixtures/traces/a_demoted_state_stays_on_the_host.trace",
                              .keep_events = true};
  const Json document = document_of_run(request);
  EXPECT_EQ(document["traces"][0]["runs"][0]["copies"],
            Json::parse(R"([{"to": "host", "kv_tokens": 4, "states": 1,
                             "text": "4 KV, 1 state to the host", "queued": 3, "landed": 4},
                            {"to": "device", "kv_tokens": 4, "states": 2,
                             "text": "4 KV, 2 states to the device", "queued": 7}])"));
  const std::string page = runs_page(document);
  EXPECT_GE(times_in(page, "4 KV, 1 state to the host"), 1u);
  EXPECT_GE(times_in(page, "4 KV, 2 states to the device"), 1u);
  EXPECT_EQ(page_of_run({.file = std::string(LOCKSTEP_SOURCE_DIR) +
                                 "/fixtures/traces/finish_keeps_its_state.trace",
                         .keep_events = true})
                .find("copies in flight"),
            std::string::npos);
}

// The page of a finding shows the finding, once and in red; a planted defect that was found as its
// file asks is no alarm.
TEST(Report, pageOfAFindingBeginsWithItsSentenceInRed) {
  FixtureFolder folder;
  folder.with("wrong",
              "# run: lockstep replay %s\n# finds: answer-differs\ncheck\n----\nviolations=1\n");
  ReplayRequest request{.file = folder.fixtures() + "/traces/wrong.trace", .keep_events = true};
  const std::string wrong = page_of_run(request);
  const std::size_t main = wrong.find("<main>");
  const std::size_t banner = wrong.find("<div class=\"banner\"><h1>✗ ");
  ASSERT_NE(banner, std::string::npos) << wrong.substr(main, 2000);
  EXPECT_EQ(wrong.substr(main, banner - main).find("<p"), std::string::npos);
  EXPECT_EQ(times_in(wrong, "/runs/0/run/findings/0/text\""), 1u);
  EXPECT_NE(wrong.find("chip bad"), std::string::npos);
  EXPECT_EQ(wrong.find("<span class=\"chip found"), std::string::npos);

  folder.with("split", kSplit);
  request.file = folder.fixtures() + "/traces/split.trace";
  request.defect = "sglang-no-buffer:split-moves-state";
  const std::string planted = page_of_run(request);
  EXPECT_EQ(planted.find("class=\"banner\""), std::string::npos);
  EXPECT_NE(planted.find("<span class=\"chip found"), std::string::npos);
  request.defect = "";
  EXPECT_NE(page_of_run(request).find("<span class=\"chip pass"), std::string::npos);
}

// A search that finds nothing says what was done, and what was left out.
TEST(Report, pageOfASearchWithoutAFindingSaysWhatWasSearched) {
  const Json search = {{"traces_run", 300},
                       {"operations", 30650},
                       {"seed", 7},
                       {"findings", 0},
                       {"digest", "cd07"},
                       {"command", "lockstep explore --seed 7"},
                       {"subjects", {"radix", "oracle:radix"}},
                       {"unsupported", {{{"operation", "evict"}, {"text", "it answers <no>"}}}},
                       {"marks_missed", {"split.locked"}}};
  const Json document = {{"traces", Json::array()}, {"search", search}};
  const std::string page = runs_page(document);
  EXPECT_EQ(complaints(page, document), std::vector<std::string>{});
  for (const char* const text :
       {"<h1>✓ Nothing found</h1>", ">30,650<", "oracle:radix", "./<span",
        "lockstep explore --seed 7", "it answers &lt;no&gt;", "split.locked", ">cd07<"})
    EXPECT_NE(page.find(text), std::string::npos) << text;
}

TEST(Report, junitCountsWhatTheDataCount) {
  const Report report =
      collected(FixtureFolder()
                    .with("finish_keeps_its_state", kFinishKeepsItsState)
                    .with("wrong", "# Wrong <answer>.\nadmit id=r tokens=a10\n----\ncached=3\n"),
                "sglang-w1:requests=20");
  const Markup junit(report_junit(report.document));
  int cases = 0;
  int failures = 0;
  int cases_of_suites = 0;
  int failures_of_suites = 0;
  for (const Element& element : junit.elements()) {
    if (element.tag == "testsuites") {
      EXPECT_EQ(element.attributes.at("tests"), report.document["summary"]["runs"].dump());
      EXPECT_EQ(element.attributes.at("failures"),
                report.document["summary"]["not_as_expected"].dump());
    } else if (element.tag == "testsuite") {
      cases_of_suites += std::stoi(element.attributes.at("tests"));
      failures_of_suites += std::stoi(element.attributes.at("failures"));
    } else if (element.tag == "testcase") {
      ++cases;
    } else if (element.tag == "failure") {
      ++failures;
      EXPECT_NE(element.text.find("the answer should carry cached=3"), std::string::npos)
          << element.text;
    }
  }
  EXPECT_EQ(cases, 7);
  EXPECT_EQ(failures, 1);
  EXPECT_EQ(cases_of_suites, cases);
  EXPECT_EQ(failures_of_suites, failures);
}

TEST(Report, workloadStandsBesideItsOracle) {
  const Report report =
      collected(FixtureFolder().with("plain", "check\n"), "sglang-w1:requests=80");
  const Json& runs = report.document["workloads"][0]["runs"];
  ASSERT_EQ(runs.size(), 4u);
  for (const Json& run : runs) {
    EXPECT_TRUE(run["as_expected"].get<bool>());
    EXPECT_EQ(run["request_count"], 80);
    EXPECT_EQ(run["run"]["subjects"][0]["totals"], run["run"]["subjects"][1]["totals"]);
    EXPECT_GT(run["run"]["totals"]["hit_tokens"], 0);
  }
}

// Decisions that a server's own cache was recorded to take are what a policy has to decide.
TEST(Report, decisionsAreComparedWithTheRecord) {
  for (const bool same : {true, false}) {
    FixtureFolder folder;
    folder.with("plain", "check\n");
    const std::string workload = "sglang-w1:requests=20";
    const Report without = collected(folder, workload);
    const std::string digest =
        without.document["workloads"][0]["runs"][0]["run"]["decision_digest"];
    fs::create_directories(fs::path(folder.fixtures()) / "workloads");
    std::ofstream(fs::path(folder.fixtures()) / "workloads" / "recorded_decisions.json")
        << Json{{"workload", workload},
                {"records",
                 {{{"policy", "radix"},
                   {"of", "a server"},
                   {"decision_digest", same ? digest : "0123456789abcdef"},
                   {"hit_tokens", 1}}}}};
    const Report report = collected(folder, workload);
    EXPECT_EQ(report.status, same ? kExitPass : kExitDiffers);
    const Json& run = report.document["workloads"][0]["runs"][0];
    EXPECT_EQ(run["as_expected"], same);
    EXPECT_TRUE(run.contains("recorded"));
    EXPECT_FALSE(report.document["workloads"][0]["runs"][1].contains("recorded"));
  }
}

// The command above a comparison repeats it: bytes that are no whole GiB, config fields and the
// model.
TEST(Report, theCommandOfAComparisonHasEverythingThatWasAsked) {
  const CompareRequest request{.workload = "sessions:requests=20,seats=2",
                               .policies = {"radix"},
                               .capacities = {std::int64_t{512} << 20},
                               .config = "page=16",
                               .model = "nemotron-h",
                               .limit = 10};
  const Result<Json> shown = comparison_of({.title = "Chats", .about = "", .request = request});
  ASSERT_TRUE(shown.has_value()) << shown.error().text;
  EXPECT_EQ((*shown)["command"],
            "lockstep compare sessions:requests=20,seats=2 --policies radix --capacity 536870912 "
            "--config page=16 --model nemotron-h --limit 10");
}

// Host tiers that are compared are the axis and the columns; a policy without one is a line.
TEST(Report, hostTiersAreTheAxisOfTheirComparison) {
  constexpr std::int64_t kGib = std::int64_t{1} << 30;
  const CompareRequest request{
      .workload = "sessions:requests=60,seats=4",
      .policies = {"radix", "sglang-no-buffer@host_share=200", "sglang-no-buffer@host_share=800"},
      .capacities = {kGib},
      .hosts = {kGib, 4 * kGib}};
  const Result<Json> shown = comparison_of({.title = "Hosts", .about = "", .request = request});
  ASSERT_TRUE(shown.has_value()) << shown.error().text;
  EXPECT_NE((*shown)["command"].get<std::string>().find("--capacity 1GiB --host 1GiB --host 4GiB"),
            std::string::npos);
  EXPECT_NE((*shown)["conclusions"][0].get<std::string>().find("With 1 GiB on the host "),
            std::string::npos);
  const std::string page = comparisons_page({{"comparisons", Json::array({*shown})}});
  EXPECT_NE(page.find("against the bytes of the host tier"), std::string::npos);
  EXPECT_NE(page.find("hit ratio with a host tier of"), std::string::npos);
  EXPECT_NE(page.find("no host tier"), std::string::npos);
  EXPECT_NE(page.find(" of host"), std::string::npos);
  EXPECT_EQ(page.find("unlimited"), std::string::npos);
}

// A comparison's rows are those of the command that stands above it, and what is concluded from
// them follows them.
TEST(Report, comparisonsAreThoseOfTheirCommand) {
  const Report report = report_of_everything();
  const Json& comparison = report.document["comparisons"][0];
  EXPECT_EQ(comparison["command"],
            "lockstep compare sessions:requests=60,seats=4 --policies "
            "kv-bound,state-at-end-and-branch,state-at-end,belady,lru,radix,sglang-no-buffer "
            "--capacity 1GiB --capacity 4GiB");
  const Result<Comparison> again = compare(small_comparison().request);
  ASSERT_TRUE(again.has_value());
  ASSERT_EQ(comparison["policies"].size(), 11u);
  for (std::size_t i = 0; i < 11; ++i)
    EXPECT_EQ(comparison["policies"][i]["hit_tokens"], again->policies[i].measures.hit_tokens);
  const std::string bound =
      fmt::format("{:.1f} %", 100 * comparison["policies"][0]["hit_ratio"].get<double>());
  EXPECT_NE(comparison["conclusions"][0].get<std::string>().find(bound), std::string::npos);
  const std::string page = page_named(report.document, "policies.html");
  EXPECT_NE(page.find("data-path=\"/comparisons/0/policies/10/hit_ratio\""), std::string::npos);
}

// The project's own report compares what a file names; a mistake in it is an error with its place.
TEST(Report, comparisonsAreReadFromAFile) {
  const ScratchFolder folder;
  const auto read = [&](const std::string& capacities, const std::string& hosts) {
    folder.write("report.json", R"({"workload": "w", "policies": "a,b", "comparisons": [
      {"title": "T", "about": "A.", "workload": "x", "policies": "radix,lru", "capacities": ")" +
                                    capacities + R"(", "hosts": ")" + hosts + R"("}]})");
    ReportOptions options;
    const Result<void> done = read_contents(folder.path("report.json"), options);
    return std::pair(done ? "" : done.error().text, options);
  };
  const auto [none, options] = read("1GiB,inf", "2GiB");
  EXPECT_EQ(none, "");
  EXPECT_EQ(options.workload, "w");
  EXPECT_EQ(options.policies, (std::vector<std::string>{"a", "b"}));
  ASSERT_EQ(options.comparisons.size(), 1u);
  EXPECT_EQ(options.comparisons[0].request.policies, (std::vector<std::string>{"radix", "lru"}));
  EXPECT_EQ(options.comparisons[0].request.capacities[0], std::int64_t{1} << 30);
  EXPECT_EQ(options.comparisons[0].request.hosts, std::vector{std::int64_t{2} << 30});
  const std::string error = read("1GB", "2GiB").first;
  EXPECT_NE(error.find("report.json:1: field comparisons[0].capacities"), std::string::npos)
      << error;
  const std::string of_hosts = read("1GiB", "inf").first;
  EXPECT_NE(of_hosts.find("report.json:1: field comparisons[0].hosts"), std::string::npos)
      << of_hosts;
  ReportOptions real;
  const auto own = read_contents(LOCKSTEP_SOURCE_DIR "/fixtures/report.json", real);
  EXPECT_TRUE(own.has_value()) << own.error().text;
}

// The page says how much memory is enough where more gains nothing.
TEST(Report, conclusionsFollowTheFigures) {
  const auto row = [](const std::string& policy, std::int64_t gib, std::int64_t hits) {
    ComparedPolicy one{.policy = policy, .capacity = gib << 30};
    one.scheduled = true;
    one.measures.input_tokens = 1000;
    one.measures.hit_tokens = hits;
    one.measures.evicted_tokens = 1;
    return one;
  };
  Comparison comparison{
      .policies = {row("sglang-no-buffer", 1, 100), row("sglang-no-buffer", 2, 290),
                   row("sglang-no-buffer", 4, 300)},
      .model = **find_model("tiny-hybrid")};
  EXPECT_EQ(
      conclusions_of(comparison).of_policies,
      std::vector<std::string>{"sglang-no-buffer hits 10.0 % with 1 GiB and 30.0 % with "
                               "4 GiB; 2 GiB already give nearly all of it. With 4 GiB it "
                               "still evicts; --policies kv-bound,… says what more can add."});
  comparison.policies.back().measures.hit_tokens = 600;
  const auto says = [&](const std::string& text) {
    auto [all, of_policies] = conclusions_of(comparison);
    all.insert(all.end(), of_policies.begin(), of_policies.end());
    return std::ranges::any_of(
        all, [&](const std::string& sentence) { return sentence.find(text) != std::string::npos; });
  };
  EXPECT_TRUE(says("each step of memory still pays: the last one, from 2 GiB, adds 31.0 points."));
  ComparedPolicy bound{.policy = "kv-bound"};
  bound.measures.input_tokens = 1000;
  bound.measures.hit_tokens = 650;
  comparison.policies.push_back(bound);
  EXPECT_TRUE(says("More than 4 GiB can add 5.0 points at most, up to kv-bound."));
  comparison.policies[2].measures.evicted_tokens = 0;
  EXPECT_TRUE(says("With 4 GiB nothing was evicted: more memory would add nothing."));
  comparison.policies[2].tells_contents = false;  // nobody has counted what it evicted
  EXPECT_FALSE(says("nothing was evicted"));
  EXPECT_TRUE(says("More than 4 GiB can add 5.0 points at most, up to kv-bound."));
  comparison.policies[2].tells_contents = true;
  // A policy with pages of one token can hit what the bound, in blocks of the workload, leaves.
  EXPECT_FALSE(says("stands above kv-bound"));
  comparison.policies.back().measures.hit_tokens = 599;
  EXPECT_FALSE(says("stands above kv-bound")) << "blocks of one token round nothing";
  comparison.block = 512;
  EXPECT_TRUE(says("stands above kv-bound (60.0000 % against 59.9000 %)"));
}

// Steps in which requests only decode are one line that unfolds; what the finding is about is not
// among them.
TEST(Report, runsOfDecodeStepsFold) {
  const Report report = collected(
      FixtureFolder().with("decode",
                           "# run: lockstep replay %s --subject radix --subject oracle:radix\n"
                           "request id=first tokens=a10 output=8\nrun\n"
                           "request id=second tokens=b10 output=1\nrun\n"
                           "expect id=second\n----\ncached=3\n"));
  const Json& run = report.document["traces"][0]["runs"][0];
  ASSERT_EQ(run["folds"].size(), 1u) << run["events"].dump(1);
  const Json& fold = run["folds"][0];
  EXPECT_EQ(fold["steps"], 6);
  std::int64_t steps = 0;
  for (std::int64_t event = fold["first"]; event <= fold["last"]; ++event)
    steps += run["events"][event - 1]["operation"].get<std::string>().starts_with("step ") ? 1 : 0;
  EXPECT_EQ(steps, 6);
  const std::int64_t wrong = run["run"]["findings"][0]["event"];
  EXPECT_EQ(wrong, 20);
  EXPECT_EQ(fold["last"], 17) << "a step and the events before the wrong one stay";
  const std::string page = page_named(report.document, "traces/decode.html");
  EXPECT_EQ(times_in(page, "<tbody class=\"fold\">"), 1u);
  EXPECT_NE(page.find("/folds/0/steps"), std::string::npos);
}

// The best policy depends on the memory: a sentence for each capacity, its cell marked in the
// table.
TEST(Report, eachCapacityHasItsBestPolicy) {
  const auto row = [](const std::string& policy, std::int64_t gib, std::int64_t hits) {
    ComparedPolicy one{.policy = policy, .capacity = gib << 30, .scheduled = true};
    one.measures.input_tokens = 1000;
    one.measures.hit_tokens = hits;
    one.ttft = TimeSummary{.mean = gib * 1'000'000};
    return one;
  };
  Comparison comparison{
      .policies = {row("radix", 1, 900), row("radix", 2, 900), row("sglang-no-buffer", 1, 100),
                   row("sglang-no-buffer", 2, 600), row("vllm-align", 1, 200),
                   row("vllm-align", 2, 500), row("marconi", 1, 200), row("marconi", 2, 0)},
      .model = **find_model("tiny-hybrid")};
  comparison.policies[4].block = comparison.policies[5].block = 1056;
  const std::vector<std::string> general = conclusions_of(comparison).general;
  EXPECT_EQ(general[0],
            "With 1 GiB vllm-align and marconi reuse the most among hybrid policies: 20.0 % of the "
            "input tokens; then sglang-no-buffer with 10.0 %.");
  EXPECT_EQ(
      general[1],
      "With 2 GiB sglang-no-buffer reuses the most among hybrid policies: 60.0 % of the input "
      "tokens; then vllm-align with 50.0 %.");
  EXPECT_NE(general.back().find("vllm-align looks prompts up in whole blocks of 1056 tokens"),
            std::string::npos);
  const Json shown = shown_comparison({}, comparison);
  std::vector<std::size_t> best;
  for (std::size_t i = 0; i < shown["policies"].size(); ++i)
    if (shown["policies"][i]["is_best"]) best.push_back(i);
  EXPECT_EQ(best, (std::vector<std::size_t>{3, 4, 6}));
  EXPECT_EQ(shown["policies"][3]["hit_text"], "sglang-no-buffer, 2 GiB: 60.0 %");
  EXPECT_EQ(shown["policies"][3]["ttft_text"], "sglang-no-buffer, 2 GiB: 2 ms");
  EXPECT_EQ(shown["ttft_ticks"], (Json{1'000'000, 2'000'000}));
  const std::string page = comparisons_page({{"comparisons", Json::array({shown})}});
  EXPECT_EQ(times_in(page, "<strong>"), 3u);
  EXPECT_EQ(times_in(page, "<svg role=\"img\" aria-label=\"time to the first token"), 1u);
  EXPECT_EQ(times_in(page, "data-part=\"3\""), 3u) << "a curve in each picture, and its box";
}

// --- Files ---------------------------------------------------------------------------------------

TEST(Report, theWrittenReportIsTheCollectedOne) {
  FixtureFolder folder;
  folder.with("finish_keeps_its_state", kFinishKeepsItsState).with("split", kSplit, "regressions");
  int progress = 0;
  ReportOptions options = options_of(folder);
  options.progress = [&](const ReportProgress& done) { progress += done.as_expected ? 1 : 0; };
  const Result<Report> report = make_report(options, folder.out());
  ASSERT_TRUE(report.has_value()) << report.error().text;
  EXPECT_EQ(progress, 4);
  EXPECT_EQ(Json::parse(read_text(folder.out() + "/report.json")), report->document);
  for (const Page& page : report_pages(report->document))
    EXPECT_EQ(read_text(folder.out() + "/" + page.path), page.markup);
  EXPECT_EQ(read_text(folder.out() + "/junit.xml"), report_junit(report->document));
  std::set<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder.out()))
    if (entry.is_regular_file())
      files.insert(fs::path(entry.path()).lexically_relative(folder.out()).string());
  EXPECT_EQ(files,
            (std::set<std::string>{
                "index.html", "report.json", "junit.xml", "timelines/finish_keeps_its_state-1.json",
                "timelines/finish_keeps_its_state-2.json", "timelines/regressions-split-1.json",
                "timelines/regressions-split-2.json", "reading.html",
                "traces/finish_keeps_its_state.html", "traces/regressions-split.html"}));
  for (const TimelineFile& file : report->timelines)
    EXPECT_EQ(Json::parse(read_text(folder.out() + "/" + file.path)), file.timeline);
}

TEST(Report, badInputIsAnErrorAndWritesNothing) {
  const std::pair<std::string, std::string> bad[] = {
      {"fly away=1\n", "bad.trace:1:"},
      {"", "empty"},
      {"# run: lockstep replay %s --sideways 1\ncheck\n",
       "bad.trace:1: there is no option --sideways"},
      {"# run: lockstep explore\ncheck\n", "bad.trace:1: a # run: line that is"},
      {"# run: lockstep replay %s --defect nobody:knows\ncheck\n", "nobody:knows"},
      {"# run: lockstep replay %s --subject nobody\ncheck\n", "nobody"},
      {"# finds: leak\ncheck\n", "bad.trace:1:"},
      {"finish id=nobody\n", "bad.trace:1:"},
  };
  for (const auto& [text, says] : bad) {
    FixtureFolder folder;
    folder.with("a_good_one", "check\n").with("bad", text);
    const Result<Report> report = make_report(options_of(folder), folder.out());
    ASSERT_FALSE(report.has_value()) << text;
    EXPECT_NE(report.error().text.find(says), std::string::npos) << report.error().text;
    EXPECT_EQ(report.error().status, kExitBadInput) << text;
    EXPECT_FALSE(fs::exists(folder.out())) << text;
  }
}

// Bugs of servers stand on the index with who meets them; a page that does not say so is refused.
TEST(Report, bugsOfServersStandOnTheIndex) {
  FixtureFolder folder;
  folder.with("a_good_one", "check\n");
  const ScratchFolder found;
  found.write("README.md", "not a bug");
  found.write(
      "a_bug.md",
      "# a server: it `ends` <early>\n\n**Status.** `--flag` alone, as [#7](http://x/7).\nMore.\n");
  ReportOptions options = options_of(folder);
  options.found = found.path("");
  options.version = "9.8.7";
  options.date = "2026-01-02";
  options.command = "./lockstep report";
  const Result<Report> report = make_report(options, folder.out());
  ASSERT_TRUE(report.has_value()) << report.error().text;
  EXPECT_EQ(all_complaints(report->document), std::vector<std::string>{});
  const std::string index = page_named(report->document, "index.html");
  for (const char* const text : {"a server: it ends &lt;early&gt;", ">--flag alone, as #7. More.<",
                                 ">9.8.7<", ">2026-01-02<", ">./lockstep report<"})
    EXPECT_NE(index.find(text), std::string::npos) << text;
  EXPECT_LT(index.find("id=\"bugs\""), index.find("id=\"traces\""));
  found.write("b_bug.md", "# a server: another\n\n**What happens.** Nothing.\n");
  const Result<Report> refused = make_report(options, folder.out());
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().text.find("b_bug.md:3: the first paragraph begins with **Status.**"),
            std::string::npos)
      << refused.error().text;
}

// A run that is not as expected says its sentence on the index.
TEST(Report, indexShowsTheSentenceOfEachUnexpectedOutcome) {
  const Report report = collected(
      FixtureFolder().with("wrong", "# A wrong answer.\nadmit id=r tokens=a10\n----\ncached=3\n"));
  const std::string index = page_named(report.document, "index.html");
  EXPECT_LT(index.find("/traces/0/runs/0/run/findings/0/text"), index.find("id=\"figures\""));
}

// A reader looks for the number of a public report: traces that retell one stand first.
TEST(Report, indexListsTracesOfPublicReportsFirst) {
  FixtureFolder folder;
  folder.with("a_plain_one", "check\n");
  folder.with("b_reported", "# SGLang #21379.\ncheck\n");
  const std::string index = page_named(collected(folder).document, "index.html");
  EXPECT_LT(index.find("b_reported"), index.find("a_plain_one"));
}

TEST(Report, foldersWithoutTracesAreErrors) {
  FixtureFolder folder;
  EXPECT_FALSE(make_report(options_of(folder), folder.out()).has_value());
  ReportOptions options = options_of(folder);
  options.fixtures += "/nowhere";
  EXPECT_FALSE(make_report(options, folder.out()).has_value());
  EXPECT_FALSE(fs::exists(folder.out()));
}

#ifdef LOCKSTEP_PROGRAM
int run_program(const std::string& folder, const std::string& words) {
  const std::string command =
      fmt::format("cd '{}' && '{}' {} >/dev/null 2>&1", folder, LOCKSTEP_PROGRAM, words);
  return WEXITSTATUS(std::system(command.c_str()));  // NOLINT(cert-env33-c)
}

// A newcomer runs this first: all of the project's own fixtures, from anywhere in the checkout.
TEST(Report, ownFixturesEndAsTheyPromise) {
  FixtureFolder folder;
  EXPECT_EQ(
      run_program(std::string(LOCKSTEP_SOURCE_DIR) + "/cache_sim", "report --out " + folder.out()),
      kExitPass);
  const Json document = Json::parse(read_text(folder.out() + "/report.json"));
  EXPECT_EQ(document["summary"]["not_as_expected"], 0);
  EXPECT_EQ(document["workloads"][0]["runs"].size(), 4u);
  EXPECT_EQ(document["comparisons"].size(), 7u);
  for (const auto& page : fs::recursive_directory_iterator(folder.out()))
    if (page.path().extension() == ".html") {
      EXPECT_EQ(complaints(read_text(page.path()), document), std::vector<std::string>{})
          << page.path();
    }
}

TEST(Report, programSaysWhatIsWrongByItsStatus) {
  FixtureFolder folder;
  EXPECT_EQ(run_program("/", "report --out " + folder.out()), kExitBadInput);
  EXPECT_EQ(run_program("/", "report --fixtures " + folder.fixtures() + " --out " + folder.out()),
            kExitBadInput);
  EXPECT_FALSE(fs::exists(folder.out()));
  folder.with("wrong", "# run: lockstep replay %s\n# finds: leak\ncheck\n");
  EXPECT_EQ(run_program("/", "report --fixtures " + folder.fixtures() + " --out " + folder.out()),
            kExitDiffers);
  EXPECT_TRUE(fs::exists(folder.out() + "/index.html"));
}
#endif

// A kernel's figures stand beside the peer's; one whose sources changed since says so.
TEST(Report, showsKernelsBesidePeersAndSaysWhichArePending) {
  const std::string page = page_named(report_of_everything().document, "kernels.html");
  for (const char* const text :
       {"state_copy", "3.50 µs", "7.00 µs (another, recorded)", ">0.50<", "2500 µs", "97 %",
        "its chunks became longer", "1.00e-03 of at most 4.00e-03", "B=1 &lt;small&gt;"})
    EXPECT_NE(page.find(text), std::string::npos) << text;
}

// Each card of a kernel has a row among the verdicts and figures of its own, with those that the
// other card has of the same case.
TEST(Report, showsTheCardsOfAKernelApartAndSideBySide) {
  const Report report = report_of_everything();
  const std::string page = page_named(report.document, "kernels.html");
  for (const char* const text :
       {"<a href=\"#on_two_cards\">", "<a href=\"#on_two_cards-2\">", "<h2 id=\"on_two_cards\"",
        "<h2 id=\"on_two_cards-2\"", "NVIDIA A1, driver 1", "B2, driver 1"})
    EXPECT_EQ(times_in(page, text), std::string_view(text) == "NVIDIA A1, driver 1" ? 3u : 1u)
        << text;
  std::map<std::string, Json> cards;
  for (const Json& kernel : report.document["kernels"])
    if (kernel["operation"] == "on_two_cards") cards[kernel["card"]] = kernel;
  ASSERT_EQ(cards.size(), 2u);
  EXPECT_EQ(cards["A1"]["gpu"], "NVIDIA A1");
  EXPECT_EQ(cards["A1"]["sources"], "0");
  EXPECT_EQ(cards["A1"]["summary"]["median_text"], "0.50");
  EXPECT_EQ(cards["B2"]["summary"]["median_text"], "2.00");
  const auto other = [](const char* card, const char* time, const char* ratio) {
    return Json::array({{{"card", card}, {"time_text", time}, {"ratio_text", ratio}}});
  };
  EXPECT_EQ(cards["A1"]["speed"][0]["other_cards"], other("B2", "14.00 µs", "2.00"));
  EXPECT_EQ(cards["B2"]["speed"][0]["other_cards"], other("A1", "3.50 µs", "0.50"));
  EXPECT_FALSE(cards["A1"]["speed"][1].contains("other_cards")) << "the case is one card's alone";
}

// A plain layer is measured for accuracy alone.
TEST(Report, showsPlainLayersWithoutSpeed) {
  const std::string page = page_named(report_of_everything().document, "kernels.html");
  const std::size_t layer = page.find("<h2 id=\"rms_norm\"");
  ASSERT_NE(layer, std::string::npos);
  const std::string section = page.substr(layer);
  EXPECT_NE(section.find("A plain layer: its time is not measured."), std::string::npos);
  EXPECT_NE(section.find("1.00e-03 of at most 4.00e-03"), std::string::npos);
  EXPECT_EQ(section.find("<figure>"), std::string::npos);
  EXPECT_EQ(times_in(page, "A plain layer: its time is not measured."), 1u);
}

// The page begins with a verdict: how each kernel stands beside its peers, the best of them first.
TEST(Report, kernelsPageBeginsWithATableOfHowEachStandsBesideItsPeers) {
  const auto evidence = [](const std::string& name, const std::vector<double>& times) {
    Json json = Json::parse(kEvidence);
    json["operation"] = name;
    Json& speed = json["chips"][0]["speed"];
    Json row = speed[0];
    speed.erase(0);  // the other case has no peer
    for (const double time : times) {
      row["time_us"] = time;
      row["peer_time_us"] = 10.0;
      row["case"] = fmt::format("takes {}", time);
      speed.push_back(row);
    }
    return json.dump();
  };
  const ScratchFolder measured;
  std::filesystem::create_directory(measured.path("kernels"));
  measured.write("kernels/a.json", evidence("behind", {12, 9.9, 10.1, 11}));
  measured.write("kernels/b.json", evidence("ahead", {5, 9.79, 10.21}));
  measured.write("kernels/c.json", evidence("alone", {}));
  measured.write("kernels/d.json", untimed(kEvidence));
  const Result<Json> kernels = kernels_of(measured.path("kernels"));
  ASSERT_TRUE(kernels.has_value()) << kernels.error().text;
  std::vector<std::string> order;
  for (const Json& kernel : *kernels) order.push_back(kernel["operation"]);
  EXPECT_EQ(order, (std::vector<std::string>{"ahead", "behind", "alone", "rms_norm"}));
  const auto summary = [&](std::size_t i) { return (*kernels)[i]["summary"]; };
  EXPECT_EQ(summary(0)["faster"], 2);
  EXPECT_EQ(summary(0)["slower"], 1);
  EXPECT_EQ(summary(0)["median_text"], "0.98");
  EXPECT_EQ(summary(1)["faster"], 0);
  EXPECT_EQ(summary(1)["slower"], 2);
  EXPECT_EQ(summary(1)["median_text"], "1.06");
  EXPECT_EQ(summary(1)["worst_text"], "1.20");
  EXPECT_EQ(summary(1)["worst_case"], "takes 12");
  EXPECT_TRUE(summary(2).is_null());
  EXPECT_EQ(kernel_totals(*kernels),
            (Json{{"noise", 0.02}, {"shapes", 7}, {"faster", 2}, {"slower", 3}}));
  const std::string page = page_named(report_of_everything().document, "kernels.html");
  EXPECT_LT(page.find("class=\"verdicts\""), page.find("<h2"));
}

TEST(Report, refusesEvidenceThatLacksAField) {
  const ScratchFolder measured;
  std::filesystem::create_directory(measured.path("kernels"));
  for (const auto& [content, field] :
       {std::pair(R"({"operation": "broken", "chips": [{"speed": [{"case": "B=1"}]}]})", "time_us"),
        std::pair(R"({"operation": "broken", "gpu": "A1", "speed": []})", "chips")}) {
    measured.write("kernels/broken.json", content);
    const Result<Json> kernels = kernels_of(measured.path("kernels"));
    ASSERT_FALSE(kernels.has_value());
    EXPECT_NE(kernels.error().text.find("broken.json"), std::string::npos) << kernels.error().text;
    EXPECT_NE(kernels.error().text.find(field), std::string::npos) << kernels.error().text;
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
