// Pages say what is there, and nothing else: every verb, field, refusal, kind of finding, command,
// option with its default, workload, model, policy and field of the JSON has its row in the page
// that describes it, and every row is of something that is there.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache_sim/check/exec_subject.hpp"
#include "cache_sim/model/model.hpp"
#include "cache_sim/policies/ideal/ideal_policy.hpp"
#include "cache_sim/trace/scheduler_verbs.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "properties/support/program.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/judged.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/subject.hpp"
#include "reference/protocol/vocabulary.hpp"

namespace lockstep {
namespace {

using Names = std::set<std::string>;
using namespace testing_support;

const std::string kRoot = LOCKSTEP_SOURCE_DIR "/";
const std::string kGrammar = "cache_sim/trace/grammar.md";
const std::string kCommands = "cache_sim/program/commands.md";
const std::string kWorkloads = "cache_sim/workloads/workloads.md";
const std::string kJson = "cache_sim/replay/json.md";

// --- Tables of a page ----------------------------------------------------------------------------

/// A row of a table: its cells, without the blanks around them.
using Row = std::vector<std::string>;

std::string trimmed(const std::string& text) {
  const std::size_t from = text.find_first_not_of(' ');
  return from == std::string::npos ? "" : text.substr(from, text.find_last_not_of(' ') - from + 1);
}

Row cells_of(const std::string& line) {
  Row cells;
  std::string cell;
  bool in_code = false;
  for (const char c : line.substr(1)) {
    if (c == '`') in_code = !in_code;
    if (c == '|' && !in_code)
      cells.push_back(trimmed(std::exchange(cell, "")));
    else
      cell += c;
  }
  return cells;
}

/// The texts between backquotes.
std::vector<std::string> code_in(const std::string& cell) {
  static const std::regex code("`([^`]+)`");
  std::vector<std::string> found;
  for (std::sregex_iterator i(cell.begin(), cell.end(), code), end; i != end; ++i)
    found.push_back((*i)[1]);
  return found;
}

/// The rows of the tables of a section whose first column is called `column`; of every section
/// where `heading` is empty. A section goes on to the next heading of any level.
std::vector<Row> rows_of(const std::string& page, const std::string& heading,
                         const std::string& column) {
  std::vector<Row> rows;
  bool in_section = heading.empty();
  bool in_table = false;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("#"))
      in_section = heading.empty() || line.substr(line.find_first_not_of('#')) == " " + heading;
    if (!line.starts_with("|")) {
      in_table = false;
    } else if (const Row cells = cells_of(line); cells[0] == column) {
      in_table = in_section;
    } else if (in_table && !cells[0].starts_with("---")) {
      rows.push_back(cells);
    }
  }
  return rows;
}

/// The first word of each piece of code in the first cells: `--seed N` is --seed.
Names first_words(const std::vector<Row>& rows) {
  Names names;
  for (const Row& row : rows)
    for (const std::string& code : code_in(row[0])) names.insert(code.substr(0, code.find(' ')));
  return names;
}

// --- Claims --------------------------------------------------------------------------------------

/// The names in one table, and those of the program.
struct Claim {
  std::string page;
  std::string section;
  std::string column;  ///< the head of the first column
  std::function<Names(const std::vector<Row>&)> told;
  Names there;
};

/// A sentence for each name that only one of the two has.
std::vector<std::string> differences(const Claim& claim, const std::string& page) {
  const Names told = claim.told(rows_of(page, claim.section, claim.column));
  std::vector<std::string> sentences;
  const std::string place = claim.page + ", \"" + claim.section + "\"";
  for (const std::string& name : claim.there)
    if (!told.contains(name)) sentences.push_back(fmt::format("{} lacks a row: {}", place, name));
  for (const std::string& name : told)
    if (!claim.there.contains(name))
      sentences.push_back(fmt::format("{} tells of what is not there: {}", place, name));
  return sentences;
}

/// A verb as a page and the program tell it: `admit id= [salt=] → cached= [state=]`, sorted.
std::string spelled(const std::string& verb, const std::set<std::pair<std::string, bool>>& fields,
                    const std::set<std::pair<std::string, bool>>& answer) {
  std::string text = verb;
  const auto add = [&](const auto& list) {
    for (const auto& [name, required] : list)
      text += required ? " " + name + "=" : " [" + name + "=]";
  };
  add(fields);
  text += " →";
  add(answer);
  return text;
}

/// `id= n=N [tokens=]`: names, and whether they are required.
std::set<std::pair<std::string, bool>> fields_in(const std::string& code) {
  std::set<std::pair<std::string, bool>> fields;
  std::istringstream words(code);
  for (std::string word; words >> word;) {
    const std::size_t from = word.starts_with("[") ? 1 : 0;
    if (const std::size_t equals = word.find('='); equals != std::string::npos)
      fields.emplace(word.substr(from, equals - from), from == 0);
  }
  return fields;
}

Names verbs_told(const std::vector<Row>& rows) {
  Names verbs;
  for (const Row& row : rows) {
    const std::vector<std::string> line = code_in(row[0]);
    const std::vector<std::string> answer = code_in(row[1]);
    verbs.insert(spelled(line.at(0).substr(0, line[0].find(' ')), fields_in(line[0]),
                         fields_in(answer.empty() ? "" : answer[0])));
  }
  return verbs;
}

Names verbs_there(const std::function<bool(Verb)>& chosen) {
  const auto listed = [](const std::vector<FieldName>& list) {
    std::set<std::pair<std::string, bool>> fields;
    for (const FieldName& field : list) fields.emplace(field.name, field.required);
    return fields;
  };
  Names verbs;
  for (std::size_t i = 0; i < kVerbCount; ++i) {
    const auto verb = static_cast<Verb>(i);
    if (chosen(verb))
      verbs.insert(spelled(std::string(to_string(verb)), listed(fields_of(verb)),
                           listed(answer_fields_of(verb))));
  }
  return verbs;
}

Names scheduler_verbs_there() {
  Names verbs;
  for (const cache_sim::SchedulerVerb& verb : cache_sim::scheduler_verbs()) {
    std::set<std::pair<std::string, bool>> fields, answer;
    for (const std::string_view name : verb.required) fields.emplace(name, true);
    for (const std::string_view name : verb.optional) fields.emplace(name, false);
    for (const ReplyField field : verb.answer) answer.emplace(to_string(field), true);
    verbs.insert(spelled(std::string(verb.name), fields, answer));
  }
  return verbs;
}

/// Each row's name and the code of its second cell.
Names with_second_code(const std::vector<Row>& rows) {
  Names names;
  for (const Row& row : rows) {
    const std::vector<std::string> second = code_in(row[1]);
    names.insert(code_in(row[0]).at(0) + " " + (second.empty() ? "" : second[0]));
  }
  return names;
}

template <class Entry>
Names registered() {
  Names names;
  for (const Entry& entry : Registry<Entry>::all()) names.emplace(entry.name);
  return names;
}

/// Words of an answer's `key=` without what stands after it.
Names keys_of(std::span<const std::string_view> words) {
  Names names;
  for (const std::string_view word : words) names.emplace(word.substr(0, word.find('=')));
  return names;
}

Names before_equals(const std::vector<Row>& rows) {
  Names names;
  for (const std::string& word : first_words(rows)) names.insert(word.substr(0, word.find('=')));
  return names;
}

// --- The program's own help ----------------------------------------------------------------------

/// Commands of `lockstep --help`.
Names commands() {
  Names names;
  bool in_list = false;
  for (const std::string& line : lines_of(run_program({"--help"}).out)) {
    static const std::regex command("^  ([a-z-]+) .*");
    std::smatch found;
    if (line.starts_with("Subcommands:")) in_list = true;
    if (in_list && std::regex_match(line, found, command)) names.insert(found[1]);
  }
  return names;
}

/// Options of a command's help, with ` default` after those whose help shows one as TEXT=default.
Names options_of(const std::string& command) {
  Names names;
  for (const std::string& line : lines_of(run_program({command, "--help"}).out)) {
    static const std::regex option("^ +(?:-\\w,)?(--[a-z][a-z-]*)(?: [A-Z][^ =]*)?(?:=(\\S+))?.*");
    std::smatch found;
    if (std::regex_match(line, found, option) && found[1] != "--help")
      names.insert(found[1].str() + (found[2].matched ? " " + found[2].str() : ""));
  }
  return names;
}

/// The same of a page: a default is a cell that is one piece of code and nothing else.
Names options_told(const std::vector<Row>& rows) {
  Names names;
  for (const Row& row : rows) {
    const std::string name = code_in(row[0]).at(0);
    const std::vector<std::string> fallback = code_in(row[1]);
    const bool is_shown = fallback.size() == 1 && row[1] == "`" + fallback[0] + "`";
    names.insert(name.substr(0, name.find(' ')) + (is_shown ? " " + fallback[0] : ""));
  }
  return names;
}

/// The words that a positional of a command can be.
Names choices_of(const std::string& command, const std::string& positional) {
  const std::string said = run_program({command, "--help"}).out;
  const std::regex set(positional + " [^{]*\\{([a-z,]+)\\}");
  std::smatch found;
  if (!std::regex_search(said, found, set)) return {};
  Names names;
  std::istringstream words(found[1]);
  for (std::string word; std::getline(words, word, ',');) names.insert(word);
  return names;
}

// --- The tables and what they tell ---------------------------------------------------------------

std::vector<Claim> grammar() {
  const auto is_tree = [](Verb verb) { return capability_of(verb) == Capability::tree; };
  const auto is_sequence = [](Verb verb) { return capability_of(verb) == Capability::sequences; };
  const auto is_of_tiers = [](Verb verb) { return capability_of(verb) == Capability::tiers; };
  const auto is_of_two = [](Verb verb) {
    return capability_of(verb) == Capability::disaggregation;
  };
  std::vector<Claim> all = {
      {kGrammar, "Scheduler verbs", "Verb", verbs_told, scheduler_verbs_there()},
      {kGrammar, "Request verbs", "Verb", verbs_told, verbs_there([&](Verb verb) {
         return !is_tree(verb) && !is_sequence(verb) && !is_of_tiers(verb) && !is_of_two(verb);
       })},
      {kGrammar, "Verbs of a host tier", "Verb", verbs_told, verbs_there(is_of_tiers)},
      {kGrammar, "Verbs of two servers", "Verb", verbs_told, verbs_there(is_of_two)},
      {kGrammar, "Sequence verbs", "Verb", verbs_told, verbs_there(is_sequence)},
      {kGrammar, "Tree verbs", "Verb", verbs_told, verbs_there(is_tree)},
  };
  Names config, refusals;
  for (const auto& [name, value] : Config{}.fields())
    config.insert(fmt::format("{} {}", name, value));
  for (auto refusal = Refusal::no_kv; refusal <= Refusal::unsupported;
       refusal = static_cast<Refusal>(static_cast<int>(refusal) + 1))
    refusals.emplace(to_string(refusal));
  all.push_back({kGrammar, "Config fields", "Field", with_second_code, config});
  all.push_back({kGrammar, "Request verbs", "Refusal", first_words, refusals});
  return all;
}

std::vector<Claim> protocol_and_findings() {
  Names kinds;
  for (auto kind = FindingKind::read_before_landed; kind <= FindingKind::nondeterministic;
       kind = static_cast<FindingKind>(static_cast<int>(kind) + 1))
    kinds.insert(std::string(to_string(kind)) + " " + std::to_string(exit_status(kind)) + " " +
                 std::string(meaning(kind)));
  const auto told = [](const std::vector<Row>& rows) {
    Names names;
    for (const Row& row : rows)
      names.insert(code_in(row[0]).at(0) + " " + row.at(1) + " " + row.at(2));
    return names;
  };
  Names beside = keys_of(cache_sim::child_fields());
  beside.insert({"output", "unsupported"});
  Names greeting = keys_of(cache_sim::greeting_fields());
  greeting.erase("protocol");  // may be said again, and says nothing
  const std::string protocol = "cache_sim/check/protocol.md";
  return {{"cache_sim/check/findings.md", "Kinds", "Kind", told, kinds},
          {protocol, "The greeting", "Field", before_equals, greeting},
          {protocol, "Answers", "Field", before_equals, beside}};
}

std::vector<Claim> program() {
  std::vector<Claim> all;
  for (const std::string& command : commands())
    if (command != "list" && command != "completion")
      all.push_back({kCommands, command, "Option", options_told, options_of(command)});
  all.push_back({kCommands, "list", "WHAT", first_words, choices_of("list", "WHAT")});
  all.push_back({kCommands, "completion", "SHELL", first_words, choices_of("completion", "SHELL")});
  return all;
}

std::vector<Claim> registries() {
  Names generators;
  for (const auto& one : Registry<cache_sim::GeneratedWorkload>::all()) {
    std::string words;
    for (const char c : one.parameters)
      if (c == ',')
        words += ' ';
      else if (c != '=')
        words += c;
    generators.insert(std::string(one.name) + " " + words);
  }
  return {{kWorkloads, "Files", "Format", first_words, registered<cache_sim::WorkloadFormat>()},
          {kWorkloads, "Generators", "Generator", with_second_code, generators},
          {kWorkloads, "Models", "Model", first_words, registered<cache_sim::Model>()},
          {"cache_sim/compare/comparing.md", "Ideal policies", "Policy", first_words,
           registered<cache_sim::IdealEntry>()},
          {"kernels/judge/judge.md", "What is tried", "Operation", first_words,
           registered<JudgedOperation>()}};
}

void expect_true(const std::vector<Claim>& claims) {
  for (const Claim& claim : claims)
    for (const std::string& sentence : differences(claim, read_text(kRoot + claim.page)))
      ADD_FAILURE() << sentence;
}

TEST(PagesAndSources, haveEveryVerbFieldAndRefusal) {
  expect_true(grammar());
}

TEST(PagesAndSources, haveEveryKindOfFindingAndWordOfAChild) {
  expect_true(protocol_and_findings());
}

TEST(PagesAndSources, haveEveryOptionOfEveryCommand) {
  expect_true(program());
  Names sections;
  for (const std::string& line : lines_of(read_text(kRoot + kCommands)))
    if (line.starts_with("## ")) sections.insert(line.substr(3));
  EXPECT_EQ(sections, commands());
}

TEST(PagesAndSources, haveEveryWorkloadModelAndOperation) {
  expect_true(registries());
}

// The rule can fail: without any of its rows, and with one more, a page is not true.
TEST(PagesAndSources, aRemovedRowAndAnInventedRowAreNoticed) {
  std::size_t removed = 0;
  for (const auto& claims : {grammar(), protocol_and_findings(), program(), registries()})
    for (const Claim& claim : claims) {
      const std::string page = read_text(kRoot + claim.page);
      const std::vector<std::string> lines = lines_of(page);
      const auto rows = rows_of(page, claim.section, claim.column);
      ASSERT_FALSE(rows.empty()) << claim.section << ", " << claim.column;
      for (std::size_t i = 0; i < lines.size(); ++i) {
        if (!lines[i].starts_with("|") || std::ranges::find(rows, cells_of(lines[i])) == rows.end())
          continue;
        std::string without, with;
        for (std::size_t k = 0; k < lines.size(); ++k) {
          if (k != i) without += lines[k] + "\n";
          with += lines[k] + "\n";
          const std::size_t name = lines[k].find('`');
          if (k == i) with += lines[k].substr(0, name + 1) + "x" + lines[k].substr(name + 1) + "\n";
        }
        // The same words may stand in a table of another section.
        if (rows_of(without, claim.section, claim.column).size() == rows.size()) continue;
        ++removed;
        EXPECT_FALSE(differences(claim, without).empty()) << "without " << lines[i];
        EXPECT_FALSE(differences(claim, with).empty()) << "invented beside " << lines[i];
      }
    }
  EXPECT_GT(removed, 150u);
}

// A field that has no effect without another one says so: `with host_kv=`, `with disk=1`.
TEST(PagesAndSources, sayWhichFieldsAFieldNeeds) {
  std::map<std::string, std::string> meaning;
  for (const Row& row : rows_of(read_text(kRoot + kGrammar), "Config fields", "Field"))
    meaning[code_in(row[0]).front()] = row[2].substr(0, row[2].find(','));
  for (const auto& [field, value] : Config{}.fields())
    for (const std::string& needed : needs_of(field))
      EXPECT_TRUE(meaning[field].starts_with("with ") &&
                  meaning[field].find("`" + needed + "=") != std::string::npos)
          << field << " without " << needed;
}

// --- What each policy was held against -----------------------------------------------------------

// The table has every policy; whatever else stands in its first column is an option of one.
TEST(PagesAndSources, sayWhatEachPolicyWasHeldAgainst) {
  const std::vector<Row> rows = rows_of(read_text(kRoot + "cache_sim/policies/README.md"),
                                        "What each policy was held against", "Policy, option");
  Names policies = registered<PolicyEntry>();
  for (const char* const of_session_test : {"told", "told-too"}) policies.erase(of_session_test);
  policies.merge(registered<cache_sim::IdealEntry>());
  Names options;
  for (const auto& [name, value] : Config{}.fields()) options.insert(name);
  for (const cache_sim::SchedulerVerb& verb : cache_sim::scheduler_verbs())
    if (verb.name == "request") options.merge(keys_of(verb.optional));
  Names told;
  for (const std::string& word : before_equals(rows)) {
    if (policies.contains(word))
      told.insert(word);
    else
      EXPECT_TRUE(options.contains(word)) << word << " is neither a policy nor an option";
  }
  EXPECT_EQ(told, policies);
}

// --- The JSON ------------------------------------------------------------------------------------

/// Names of all fields, those of a configuration aside.
void collect(const nlohmann::json& json, Names& names) {
  if (json.is_array())
    for (const nlohmann::json& one : json) collect(one, names);
  if (!json.is_object()) return;
  for (const auto& [key, value] : json.items()) {
    names.insert(key);
    if (key != "config") collect(value, names);
  }
}

TEST(PagesAndSources, haveEveryFieldOfTheJson) {
  const testing_support::ScratchFolder scratch;
  const std::string trace =
      scratch.write("x.trace",
                    "# a title\nconfig kv_tokens=64 state_slots=4\nrequest id=a tokens=a8 "
                    "output=2\nrun\nexpect id=a\n----\ncached=1\n");
  const std::vector<std::vector<std::string>> commands = {
      {"replay", trace, "--subject", "radix", "--defect", "radix:match-forgets-time"},
      {"replay", "sglang-w1:requests=20", "--check", "off"},
      {"compare", "sessions:requests=30", "--policies",
       "radix,kv-bound,vllm-align,marconi@alpha=best", "--capacity", "1GiB", "--limit", "20"},
      {"compare", "sessions:requests=30", "--policies", "radix", "--config", "ranks=2"},
      {"compare", "sessions:requests=30", "--policies",
       "sglang-no-buffer@host_kv=9000@host_states=9"},
      {"compare", "sessions:requests=10", "--policies", "sglang-no-buffer", "--host", "4GiB"},
      {"compare", "sessions:requests=10", "--policies", "radix", "--cost", "measured:H200"},
      {"explore", "--defect", "sglang-no-buffer:frees-donated-slot", "--out",
       scratch.path("found")},
  };
  Names written;
  for (std::vector<std::string> words : commands) {
    const std::string file = scratch.path(words[0] + std::to_string(written.size()) + ".json");
    words.insert(words.end(), {"--json", file});
    const auto run = run_program(words);
    const nlohmann::json json = nlohmann::json::parse(read_text(file), nullptr, false);
    ASSERT_TRUE(json.is_object()) << words[0] << ": " << run.err;
    collect(json, written);
  }
  const std::string page = read_text(kRoot + kJson);
  const std::string tables = page.substr(0, page.find("## A report"));
  const auto words_of = [](const std::string& text, Names& names) {
    for (const std::string& code : code_in(text)) {
      std::istringstream words(code);
      for (std::string word; words >> word;) names.insert(word);
    }
  };
  Names told, mentioned;  // in first cells; anywhere, in a list of names too
  for (const Row& row : rows_of(tables, "", "Field")) words_of(row[0], told);
  for (const std::string& line : lines_of(tables)) words_of(line, mentioned);
  for (const std::string& name : written)
    EXPECT_TRUE(told.contains(name) || mentioned.contains(name)) << kJson << " lacks " << name;
  told.erase("unsupported");  // of a child that leaves an operation out
  for (const std::string& name : told)
    EXPECT_TRUE(written.contains(name)) << kJson << " tells of " << name << ", which nobody wrote";
}

// --- Citations -----------------------------------------------------------------------------------

/// The rules of a page: `1.2` of a heading, `1.2, 5` of a list under it or of its table's rows.
Names rules_of(const std::string& page) {
  static const std::regex section("^## (\\d+\\.\\d+) .*"), item("^(\\d+)\\. .*"),
      row("^\\| (I\\d+) .*");
  Names rules;
  std::string within;
  for (const std::string& line : lines_of(page)) {
    std::smatch found;
    if (line.starts_with("#")) within = "";
    if (std::regex_match(line, found, section)) rules.insert(within = found[1]);
    if (std::regex_match(line, found, item) || std::regex_match(line, found, row))
      rules.insert(within.empty() ? found[1].str() : within + ", " + found[1].str());
  }
  return rules;
}

/// Rules of pages that a source cites, as `sglang.md, 1.2, 5` or `marconi.md, 7`.
std::vector<std::pair<std::string, std::string>> cited_in(const std::string& source) {
  static const std::regex line_end("\n *//+ ?"),
      citation("(sglang|vllm|marconi|edge_llm|static_kv)\\.md, (\\d+(\\.\\d+)?(, I?\\d+)?)");
  const std::string text = std::regex_replace(source, line_end, " ");
  std::vector<std::pair<std::string, std::string>> found;
  for (std::sregex_iterator i(text.begin(), text.end(), citation), end; i != end; ++i)
    found.emplace_back((*i)[1].str() + ".md", (*i)[2]);
  return found;
}

// A comment that names a rule of a policy leads to it.
TEST(PagesAndSources, haveTheRulesThatCommentsCite) {
  std::size_t citations = 0;
  for (const char* const folder : {"reference", "cache_sim", "properties"})
    for (const auto& entry : std::filesystem::recursive_directory_iterator(kRoot + folder)) {
      const std::string suffix = entry.path().extension().string();
      if (suffix != ".cpp" && suffix != ".hpp") continue;
      if (entry.path().filename() == "pages_test.cpp") continue;
      for (const auto& [page, rule] : cited_in(read_text(entry.path()))) {
        ++citations;
        EXPECT_TRUE(
            rules_of(read_text(fmt::format("{}reference/caches/{}", kRoot, page))).contains(rule))
            << entry.path() << " cites " << page << ", " << rule;
      }
    }
  EXPECT_GT(citations, 12u);
  const auto wrong = cited_in("// as in sglang.md,\n// 1.2, 9, and marconi.md, 7");
  ASSERT_EQ(wrong.size(), 2u);
  EXPECT_EQ(wrong[0].second, "1.2, 9");
  EXPECT_FALSE(rules_of(read_text(kRoot + "reference/caches/sglang.md")).contains("1.2, 9"));
  EXPECT_TRUE(rules_of(read_text(kRoot + "reference/caches/sglang.md")).contains("1.9, I11"));
}

// --- Examples ------------------------------------------------------------------------------------

// The examples that teach the grammar end as their run lines say.
TEST(PagesAndSources, examplesOfTheGrammarPlay) {
  const testing_support::ScratchFolder scratch;
  std::filesystem::create_directories(scratch.path("traces"));
  static const std::regex block("```trace\n([^`]*)```");
  const std::string page = read_text(kRoot + kGrammar);
  int count = 0, runs = 0;
  for (std::sregex_iterator i(page.begin(), page.end(), block), end; i != end; ++i) {
    const std::string text = (*i)[1];
    scratch.write("traces/example_" + std::to_string(++count) + ".trace", text);
    for (const std::string& line : lines_of(text)) runs += line.starts_with("# run:");
  }
  EXPECT_EQ(count, 7);
  const auto run =
      run_program({"report", "--fixtures", scratch.path(""), "--out", scratch.path("html")});
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  const nlohmann::json report =
      nlohmann::json::parse(read_text(scratch.path("html") + "/report.json"));
  EXPECT_EQ(report["summary"]["traces"], count);
  EXPECT_EQ(report["summary"]["as_expected"], runs);
}

}  // namespace
}  // namespace lockstep
