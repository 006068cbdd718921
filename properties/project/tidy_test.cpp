// Rules of the sources that no compiler knows: who may include whom, what would make a run depend
// on the machine, and how a line looks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "properties/support/program.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/config.hpp"

namespace lockstep {
namespace {

struct Source {
  std::string path;  ///< from the root of the sources
  std::string text;
  std::vector<std::string> lines;
};

const std::vector<Source>& sources() {
  static const std::vector<Source> all = [] {
    std::vector<Source> found;
    const std::filesystem::path root = LOCKSTEP_SOURCE_DIR;
    for (const char* const folder : {"reference", "cache_sim", "kernels", "properties", "bench"}) {
      if (!std::filesystem::is_directory(root / folder)) continue;
      for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
        const std::string suffix = entry.path().extension().string();
        if (suffix != ".hpp" && suffix != ".cpp" && suffix != ".cu" && suffix != ".cuh") continue;
        const std::string text = testing_support::read_text(entry.path());
        found.push_back({std::filesystem::relative(entry.path(), root).string(), text,
                         testing_support::lines_of(text)});
      }
    }
    std::ranges::sort(found, {}, &Source::path);
    return found;
  }();
  return all;
}

bool in(std::string_view path, std::string_view folder) {
  return path.starts_with(folder);
}

/// Every place where a line breaks a rule; `rule` gives the sentence, or nothing.
void hold(const std::function<std::string(const Source&, const std::string& line)>& rule) {
  for (const Source& source : sources())
    for (std::size_t i = 0; i < source.lines.size(); ++i)
      if (const std::string broken = rule(source, source.lines[i]); !broken.empty())
        ADD_FAILURE() << source.path << ":" << i + 1 << ": " << broken;
}

TEST(Sources, areFound) {
  EXPECT_GT(sources().size(), 50u);
}

/// A folder and the folders that its files may include, beside itself. Every arrow points to a
/// folder that stands further up, so there is no circle.
struct Folder {
  std::string path;
  std::vector<std::string> may_include;
};

const std::vector<Folder>& folders() {
  static const std::vector<Folder> all = [] {
    const std::string base = "reference/base";
    const std::string tensors = "reference/tensors";
    const std::vector<std::string> operations = {"reference/layers", "reference/recurrent",
                                                 "reference/attention"};
    std::vector<Folder> list = {
        {base, {}},
        {tensors, {base}},
        {"reference/protocol", {base}},
        {"reference/caches", {base, "reference/protocol"}},
        {"reference/caches/sglang_pd", {base, "reference/protocol", "reference/caches"}},
        {"reference/layers", {base, tensors}},
        {"reference/recurrent", {base, tensors, "reference/layers"}},
        {"reference/attention", {base, tensors, "reference/layers"}},
        {"reference/compiled", {tensors}},
        {"reference/models", {base, tensors}},
        {"reference/models/hybrid", {base, tensors, "reference/models"}},
        {"kernels/base", {base, tensors}},
        {"kernels/recurrent", {base, tensors, "kernels/base"}},
        {"kernels/replay", {base, tensors, "kernels/base"}},
        {"kernels/attention", {base, tensors, "kernels/base"}},
        {"kernels/layers", {base, tensors, "kernels/base"}},
        {"kernels/models",
         {base, tensors, "kernels/base", "kernels/attention", "kernels/layers",
          "kernels/recurrent"}},
        {"kernels/torch",
         {base, tensors, "kernels/base", "kernels/recurrent", "kernels/replay", "kernels/attention",
          "kernels/layers", "kernels/models"}},
        {"kernels/torch/static_kv", {base, tensors, "reference/models"}},
        {"kernels/judge", {base, tensors, "kernels/base"}},
        {"kernels/judge/operations", {base, tensors, "kernels/judge"}},
        {"kernels/judge/layers", {base, tensors, "kernels/judge"}},
    };
    for (Folder& folder : list)
      if (folder.path.starts_with("reference/models") || folder.path == "reference/compiled" ||
          folder.path.starts_with("kernels/torch") || folder.path.starts_with("kernels/judge/"))
        folder.may_include.insert(folder.may_include.end(), operations.begin(), operations.end());
    // The way of a trace line: a file of one row knows those of the rows above, and none beside it.
    const std::vector<std::vector<std::string>> rows = {
        {"base"},
        {"trace", "model", "draw"},
        {"workloads", "check", "logs"},
        {"policies", "server", "numbers"},
        {"policies/vllm/tiers"},
        {"numbers/torch", "policies/sglang", "policies/ideal", "policies/vllm", "policies/marconi",
         "policies/edge_llm", "policies/static_kv"},
        {"server/sglang", "server/vllm", "policies/sglang/audit", "policies/vllm/audit"},
        {"replay", "search", "policies/sglang/pd"},
        {"compare"},
        {"report"},
        {"program"},
    };
    std::vector<std::string> above = {base, "reference/protocol"};
    for (const std::vector<std::string>& row : rows) {
      for (const std::string& name : row) list.push_back({"cache_sim/" + name, above});
      for (const std::string& name : row) above.push_back("cache_sim/" + name);
    }
    list.back().may_include.push_back("kernels/judge");  // the command `judge`
    for (Folder& folder : list)
      if (folder.path == "cache_sim/numbers")
        folder.may_include.push_back("reference/models/hybrid");
      else if (folder.path == "cache_sim/numbers/torch")
        for (const char* const one :
             {"reference/tensors", "reference/layers", "reference/models/hybrid", "kernels/base",
              "kernels/layers", "kernels/attention", "kernels/judge"})
          folder.may_include.emplace_back(one);
    return list;
  }();
  return all;
}

std::string folder_of(const std::string& path) {
  return path.substr(0, path.find_last_of('/'));
}

bool is_in_the_table(const std::string& folder) {
  return std::ranges::any_of(folders(), [&](const Folder& known) { return known.path == folder; });
}

/// Tests of X/Y/ stand in properties/X/Y/. Three more folders belong to no single one of the
/// sources.
bool is_room_of_tests(const std::string& folder) {
  constexpr std::string_view kProperties = "properties/";
  for (const char* const own : {"support", "project", "consumer"})
    if (folder == std::string(kProperties) + own) return true;
  return in(folder, kProperties) && is_in_the_table(folder.substr(kProperties.size()));
}

bool may_include(const std::string& path, const std::string& file) {
  if (in(path, "bench/"))
    return in(file, "reference/") || in(file, "cache_sim/") || in(file, "kernels/") ||
           in(file, "bench/support/");
  if (in(path, "properties/"))
    return in(file, "reference/") || in(file, "cache_sim/") || in(file, "kernels/") ||
           in(file, "properties/");
  const std::string from = folder_of(path);
  const std::string to = folder_of(file);
  if (from == to) return true;
  for (const Folder& folder : folders())
    if (folder.path == from)
      return std::ranges::find(folder.may_include, to) != folder.may_include.end();
  return false;
}

std::string included(const std::string& line, char open, char close) {
  if (!line.starts_with("#include")) return "";
  const std::size_t begin = line.find(open, 8);
  if (begin == std::string::npos) return "";
  return line.substr(begin + 1, line.find(close, begin + 1) - begin - 1);
}

// A reference includes nothing that approximates it, and no folder includes one that uses it.
TEST(Sources, includeOnlyWhatTheTableOfFoldersAllows) {
  hold([](const Source& source, const std::string& line) -> std::string {
    const std::string file = included(line, '"', '"');
    return file.empty() || may_include(source.path, file) ? "" : "includes " + file;
  });
}

// The rule can fail: one arrow turned round, an oracle that a policy looks at, a circle.
TEST(Sources, aReversedIncludeIsSeen) {
  const auto turned = [](const std::string& path, const std::string& file) {
    EXPECT_TRUE(may_include(path, file)) << path << " includes " << file;
    EXPECT_FALSE(may_include(file, path)) << file << " includes " << path;
  };
  turned("reference/recurrent/mamba2.hpp", "reference/tensors/slots.hpp");
  turned("cache_sim/server/scheduler.hpp", "cache_sim/model/step_cost.hpp");
  turned("cache_sim/replay/replay.cpp", "cache_sim/check/session.hpp");
  turned("kernels/recurrent/state_copy.cu", "kernels/base/device.cuh");
  EXPECT_FALSE(may_include("cache_sim/policies/sglang/sglang_policy.cpp",
                           "reference/caches/sglang_oracle.hpp"));
  EXPECT_FALSE(may_include("reference/caches/sglang_oracle.cpp", "reference/layers/rope.hpp"));
  for (std::size_t i = 0; i < folders().size(); ++i)
    for (const std::string& known : folders()[i].may_include)
      EXPECT_TRUE(std::ranges::any_of(folders(),
                                      [&](const Folder& folder) {
                                        return folder.path == known &&
                                               !may_include(known + "/x.hpp",
                                                            folders()[i].path + "/x.hpp");
                                      }))
          << folders()[i].path << " and " << known << " know each other";
}

// A reader finds a file by its folder, so no folder has more files than can be seen at a glance.
TEST(Sources, standInFoldersOfFewFiles) {
  constexpr std::size_t kMostStems = 18;
  std::map<std::string, std::set<std::string>> stems;
  for (const Source& source : sources()) {
    if (in(source.path, "bench/")) continue;
    const std::string folder = folder_of(source.path);
    const std::string name = source.path.substr(folder.size() + 1);
    stems[folder].insert(name.substr(0, name.find('.')));
    EXPECT_TRUE(in(source.path, "properties/") ? is_room_of_tests(folder) : is_in_the_table(folder))
        << source.path << ": its folder, or that of its subject, has no row in the table";
  }
  for (const auto& [folder, names] : stems)
    EXPECT_LE(names.size(), kMostStems) << folder << " has too many files: split it";
  EXPECT_FALSE(is_room_of_tests("properties")) << "the rule can fail";
  EXPECT_FALSE(is_room_of_tests("properties/reference/mistyped"));
}

TEST(Sources, knowFrameworksOnlyWhereTheyBelong) {
  const std::regex test_framework("^(gtest|gmock|rapidcheck)(/.*|\\.h)$");
  const std::regex torch("^(torch|ATen|c10)/.*$");
  hold([&](const Source& source, const std::string& line) -> std::string {
    const std::string file = included(line, '<', '>');
    if (std::regex_match(file, test_framework) && !in(source.path, "properties/"))
      return "includes a test framework";
    const bool may = in(source.path, "properties/") || in(source.path, "bench/") ||
                     in(source.path, "kernels/torch/") ||
                     in(source.path, "cache_sim/numbers/torch/");
    if (std::regex_match(file, torch) && !may) return "includes LibTorch";
    return "";
  });
}

/// A word that must not stand in the code (comments may speak of it).
struct Ban {
  std::string pattern;
  std::string reason;
  std::vector<std::string> allowed;  ///< paths, or folders that end with a slash
};

const std::vector<Ban>& bans() {
  const std::vector<std::string> clocks = {"reference/base/child_process.cpp",
                                           "cache_sim/replay/replay.cpp",
                                           "cache_sim/compare/compare.cpp",
                                           "cache_sim/search/explore.cpp",
                                           "cache_sim/report/collect.cpp",
                                           "cache_sim/program/progress.cpp",
                                           "kernels/judge/",
                                           "bench/"};
  static const std::vector<Ban> list = {
      {"\\brandom_device\\b", "a run depends on its seed alone", {}},
      {"\\bstd::\\w+_distribution\\b", "standard distributions differ between libraries", {}},
      {"\\b(mt19937|default_random_engine|minstd_rand)", "random numbers are Philox", {}},
      {"\\bstd::(shuffle|random_shuffle|sample)\\b", "its result differs between libraries", {}},
      {"\\bstd::hash\\b", "its values differ between libraries", {}},
      {"(^|[^\\w:.>])s?rand\\(", "random numbers are Philox", {}},
      {"\\bsystem_clock\\b", "time is the virtual clock", {}},
      {"\\b(steady|high_resolution)_clock\\b", "time is the virtual clock", clocks},
      {"\\b(clock_gettime|gettimeofday)\\b", "time is the virtual clock", clocks},
      {"/(work|root|home)/", "paths of a machine do not belong into sources", {}},
  };
  return list;
}

bool is_allowed(const Ban& ban, const std::string& path) {
  return std::ranges::any_of(ban.allowed, [&](const std::string& place) {
    return place.ends_with("/") ? in(path, place) : path == place;
  });
}

std::string broken_ban(const std::string& path, const std::string& line) {
  if (path.ends_with("/tidy_test.cpp")) return "";  // the list itself
  const std::string code = line.substr(0, line.find("//"));
  static std::vector<std::regex> patterns;
  if (patterns.empty())
    for (const Ban& ban : bans()) patterns.emplace_back(ban.pattern);
  for (std::size_t i = 0; i < patterns.size(); ++i)
    if (std::regex_search(code, patterns[i]) && !is_allowed(bans()[i], path))
      return bans()[i].reason;
  return "";
}

TEST(Sources, nameNothingThatDependsOnTheMachine) {
  hold([](const Source& source, const std::string& line) { return broken_ban(source.path, line); });
}

// The rule itself can fail.
TEST(Sources, bannedWordsAreSeen) {
  for (const std::string line :
       {"std::random_device seed;", "std::uniform_int_distribution<int> d;", "x = rand();",
        "srand(1);", "std::shuffle(a, b, c);", "std::hash<int>{}(1)", "std::mt19937 g;",
        "std::chrono::system_clock::now()", "std::chrono::steady_clock::now()",
        "open(\"/root/x\")"})
    EXPECT_NE(broken_ban("reference/x.cpp", line), "") << line;
  for (const std::string line : {"// std::random_device is banned", "operand(1)", "grand(2)",
                                 "generator.rand()", "hashed(x)"})
    EXPECT_EQ(broken_ban("reference/x.cpp", line), "") << line;
  EXPECT_EQ(broken_ban("bench/x.cpp", "std::chrono::steady_clock::now()"), "");
  EXPECT_EQ(included("#include \"cache_sim/check/session.hpp\"", '"', '"'),
            "cache_sim/check/session.hpp");
  EXPECT_EQ(included("#include <vector>", '"', '"'), "");
}

/// Names of a file's unordered containers, and where a loop runs over one.
std::vector<std::size_t> loops_over_unordered(const std::vector<std::string>& lines,
                                              const std::vector<std::string>& declarations) {
  static const std::regex declares("std::unordered_\\w+<.*>[&\\s]+(\\w+)\\s*(\\{.*\\})?[;,)=(]?");
  std::set<std::string> names;
  for (const std::string& line : declarations) {
    std::smatch found;
    if (std::regex_search(line, found, declares)) names.insert(found[1]);
  }
  static const std::regex loop("for \\(.* : (?:\\w+\\.|\\w+->)*(\\w+)\\)");
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::smatch over;
    if (std::regex_search(lines[i], over, loop) && names.contains(over[1])) found.push_back(i + 1);
  }
  return found;
}

// Their order differs between libraries.
TEST(Sources, doNotLoopOverUnorderedContainers) {
  for (const Source& source : sources()) {
    if (source.path.ends_with("/tidy_test.cpp")) continue;  // the rule itself
    std::vector<std::string> declarations = source.lines;
    const std::string header = source.path.substr(0, source.path.find_last_of('.')) + ".hpp";
    for (const Source& other : sources())
      if (other.path == header)
        declarations.insert(declarations.end(), other.lines.begin(), other.lines.end());
    for (const std::size_t line : loops_over_unordered(source.lines, declarations))
      ADD_FAILURE() << source.path << ":" << line << ": loops over an unordered container";
  }
  const std::vector<std::string> wrong = {"  std::unordered_map<int, std::string> names_;",
                                          "  for (const auto& [key, name] : names_)"};
  EXPECT_EQ(loops_over_unordered(wrong, wrong), std::vector<std::size_t>{2}) << "it can fail";
  const std::vector<std::string> right = {"  std::map<int, std::string> names_;", wrong[1]};
  EXPECT_TRUE(loops_over_unordered(right, right).empty());
}

/// A line of C++ or CUDA, divided at `//` outside of literals. `comment` is the text after the
/// slashes and their sign (`///`, `///<`), without leading blanks.
struct DividedLine {
  std::string code, comment;
  bool is_whole = false;  ///< nothing stands before the comment
};

DividedLine divided(const std::string& line) {
  char quote = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote != 0) {
      if (c == '\\') ++i;
      if (c == quote) quote = 0;
      continue;
    }
    const bool separates_digits = c == '\'' && i > 0 && std::isalnum(line[i - 1]) != 0;
    if (c == '"' || (c == '\'' && !separates_digits)) quote = c;
    if (c != '/' || i + 1 == line.size() || line[i + 1] != '/') continue;
    const std::size_t text = std::min(line.find_first_not_of("/!<", i), line.size());
    const std::size_t begin = std::min(line.find_first_not_of(' ', text), line.size());
    const std::string code = line.substr(0, i);
    return {code, line.substr(begin), code.find_first_not_of(' ') == std::string::npos};
  }
  return {line, "", false};
}

// --- Families keep their words -------------------------------------------------------------------

/// Folders, and beginnings of file names, in which a family of servers may be named: its policies,
/// scheduler, oracles, and its workload, driver and format of logs.
std::vector<std::string> places_of_families() {
  std::vector<std::string> places;
  for (const std::string family : {"sglang", "vllm", "marconi", "edge_llm", "static_kv"}) {
    places.push_back("cache_sim/policies/" + family + "/");
    places.push_back("cache_sim/server/" + family + "/");
    places.push_back("reference/caches/" + family);
    for (const char* const room : {"workloads", "replay", "logs"})
      places.push_back("cache_sim/" + std::string(room) + "/" + family + "_");
  }
  return places;
}

/// The server that a text names, or nothing. `static_kv` is also the name of operators, so it
/// counts in the rooms of caches alone.
std::string server_in(const std::string& text, bool is_about_caches) {
  static const std::regex servers(
      "sglang|vllm|marconi|edge[-_]?llm|llama|lmdeploy|tensorrt|(^|[^a-z])trt([^a-z]|$)",
      std::regex::icase);
  static const std::regex static_kv("static[-_]?kv", std::regex::icase);
  std::smatch found;
  if (std::regex_search(text, found, servers)) return found.str();
  if (is_about_caches && std::regex_search(text, found, static_kv)) return found.str();
  return "";
}

/// An option that a family has registered and that the code asks a policy or its config about.
std::string option_in(const std::string& code) {
  static const std::regex asks("\\b(contains|has|find|number|text)\\(\"(\\w+)\"\\)");
  for (std::sregex_iterator i(code.begin(), code.end(), asks), end; i != end; ++i)
    if (std::string name = (*i)[2]; Registry<ConfigOption>::find(name) != nullptr) return name;
  return "";
}

/// The sentence for a line of a general file that names a server. Examples in help texts may: they
/// are arguments of end_help() in cache_sim/program/. Comments of reference/ may outside the rooms
/// of caches, because the table at the head of a reference has a column of a peer's names.
std::string names_a_server(const std::string& path, const std::string& line, bool is_example) {
  if (!in(path, "cache_sim/") && !in(path, "reference/")) return "";
  for (const std::string& place : places_of_families())
    if (in(path, place)) return "";
  if (is_example && in(path, "cache_sim/program/")) return "";
  bool is_about_caches = in(path, "cache_sim/");
  for (const char* const room : {"reference/base/", "reference/protocol/", "reference/caches/"})
    is_about_caches |= in(path, room);
  const std::string code = divided(line).code;
  const std::string server = server_in(is_about_caches ? line : code, is_about_caches);
  if (!server.empty()) return "names the server " + server + " in a general file";
  const std::string option = is_about_caches ? option_in(code) : "";
  return option.empty() ? "" : "asks for the option " + option + " of a family in a general file";
}

/// The lines of each call of end_help(), whose last argument is an example.
std::vector<bool> lines_of_examples(const std::vector<std::string>& lines) {
  std::vector<bool> is_example(lines.size());
  bool inside = false;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    inside |= lines[i].find("end_help(") != std::string::npos;
    is_example[i] = inside;
    if (lines[i].ends_with(");")) inside = false;
  }
  return is_example;
}

TEST(Sources, nameServersOnlyInTheirFamilysFiles) {
  for (const Source& source : sources()) {
    const std::vector<bool> is_example = lines_of_examples(source.lines);
    for (std::size_t i = 0; i < source.lines.size(); ++i)
      if (const std::string broken = names_a_server(source.path, source.lines[i], is_example[i]);
          !broken.empty())
        ADD_FAILURE() << source.path << ":" << i + 1 << ": " << broken;
  }
  const std::string templates = "cache_sim/report/templates/";
  const std::filesystem::path folder = std::filesystem::path(LOCKSTEP_SOURCE_DIR) / templates;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string path = templates + entry.path().filename().string();
    for (const std::string& line :
         testing_support::lines_of(testing_support::read_text(entry.path())))
      EXPECT_EQ(names_a_server(path, line, false), "") << path << ": " << line;
  }
}

// The rule can fail: names planted in general files are seen, those in a family's files pass.
TEST(Sources, aServerNamedInAGeneralFileIsSeen) {
  const auto seen = [](const std::string& path, const std::string& line, bool is_example = false) {
    return !names_a_server(path, line, is_example).empty();
  };
  for (const std::string line :
       {"  if (policy.name == \"sglang-no-buffer\") return 1;", "// as vLLM does", "Marconi tree;",
        "#include \"cache_sim/policies/edge_llm/edge_llm_policy.hpp\"", "// TensorRT's chunks",
        "const bool is_static = name == \"static-kv\";", "llama_cache();", "// lmdeploy #12",
        "{\"trt-edge\", 1}", "options.number(\"hash_block\")",
        "policy->config_fields.contains(\"pool_bytes\") || x.contains(\"blocks\")"})
    for (const std::string path : {"cache_sim/search/x.cpp", "cache_sim/policies/x.hpp",
                                   "cache_sim/server/x.cpp", "reference/protocol/x.hpp"})
      EXPECT_TRUE(seen(path, line)) << path << ": " << line;
  for (const std::string path :
       {"cache_sim/policies/vllm/x.cpp", "cache_sim/server/sglang/x.hpp",
        "reference/caches/marconi_oracle.cpp", "cache_sim/workloads/vllm_w1.cpp",
        "cache_sim/replay/sglang_w1_driver.cpp", "cache_sim/logs/vllm_log.cpp", "bench/x.cpp"})
    EXPECT_FALSE(seen(path, "// vLLM: config.number(\"hash_block\")")) << path;
  EXPECT_TRUE(seen("reference/recurrent/x.hpp", "enum { vllm };"));
  EXPECT_FALSE(seen("reference/recurrent/x.hpp", "//   here   paper   vLLM"));
  EXPECT_FALSE(seen("reference/attention/x.hpp", "void static_kv_attention();"));
  EXPECT_FALSE(seen("cache_sim/base/x.hpp", "int sort(int startrt); config.number(\"drafts\");"));
  EXPECT_TRUE(seen("cache_sim/base/x.hpp", "end_help({\"--subject vllm-all\"});", true));
  EXPECT_FALSE(seen("cache_sim/program/x.cpp", "end_help({\"--subject vllm-all\"});", true));
  EXPECT_TRUE(seen("cache_sim/program/x.cpp", "add(\"--subject vllm-all\");"));
  EXPECT_EQ(lines_of_examples({"  a();", "  end_help(b,", "           \"c\");", "  d();"}),
            (std::vector<bool>{false, true, true, false}));
}

// --- Comments ------------------------------------------------------------------------------------

std::string begins_with_an_interrogative(const std::string& line) {
  static const std::regex interrogative("^(What|Who|Where|How)\\b");
  std::smatch found;
  const std::string comment = divided(line).comment;
  if (!std::regex_search(comment, found, interrogative)) return "";
  return "a line of a comment begins with " + found.str() + ": begin with what it is about";
}

TEST(Sources, haveCommentsThatBeginWithTheirSubject) {
  hold([](const Source&, const std::string& line) { return begins_with_an_interrogative(line); });
}

TEST(Sources, aCommentThatBeginsWithAnInterrogativeIsSeen) {
  for (const std::string line :
       {"// What a step reads.", "  /// Who asks for it.", "//! Where nothing is checked",
        "int a;  ///< How long it takes", "f(\"x\");  // What's left", "char c = '\"';  // Who"})
    EXPECT_NE(begins_with_an_interrogative(line), "") << line;
  for (const std::string line :
       {"// Whatever it is.", "/// The caller says what it reads.", "int a;  ///< where it stands",
        "call(\"// What a text\");", "What();", "// The Whole", "// However"})
    EXPECT_EQ(begins_with_an_interrogative(line), "") << line;
}

bool exists(const std::string& path) {
  return std::filesystem::exists(std::filesystem::path(LOCKSTEP_SOURCE_DIR) / path);
}

/// The paths in a comment that name no file: those below a folder of the sources, and every other
/// path of a C++ or CUDA source that has a folder, because paths begin at the root.
std::vector<std::string> lost_paths(const std::string& line) {
  static const std::regex path("[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)+\\.([a-z]+)\\b");
  static const std::regex ours(
      "^(reference|kernels|cache_sim|fixtures|properties|bench|reports)/.*");
  static const std::regex source(".*\\.(cpp|hpp|cu|cuh)$");
  std::vector<std::string> lost;
  const std::string comment = divided(line).comment;
  for (std::sregex_iterator i(comment.begin(), comment.end(), path), end; i != end; ++i) {
    const std::string cited = i->str();
    if ((std::regex_match(cited, ours) || std::regex_match(cited, source)) && !exists(cited))
      lost.push_back(cited);
  }
  return lost;
}

TEST(Sources, citeFilesThatExist) {
  for (const Source& source : sources()) {
    if (source.path.ends_with("/tidy_test.cpp")) continue;  // the rule itself
    for (std::size_t i = 0; i < source.lines.size(); ++i)
      for (const std::string& path : lost_paths(source.lines[i]))
        ADD_FAILURE() << source.path << ":" << i + 1 << ": there is no file " << path;
  }
}

TEST(Sources, aPathThatIsGoneIsSeen) {
  using Paths = std::vector<std::string>;
  EXPECT_EQ(lost_paths("// See cache_sim/check/gone.hpp and README.md."),
            Paths{"cache_sim/check/gone.hpp"});
  EXPECT_EQ(lost_paths("int a;  ///< by base/tree.hpp, reference/recurrent/tree.hpp"),
            Paths{"base/tree.hpp"});
  EXPECT_EQ(lost_paths("/// (fixtures/traces/gone.trace)."), Paths{"fixtures/traces/gone.trace"});
  for (const std::string line :
       {"// cache_sim/check/session.hpp: the run", "// reports/kernels/*.json, kernels/torch/",
        "// vllm/v1/core/sched/scheduler.py", "// https://a.org/b.html",
        "#include \"cache_sim/gone.hpp\"", "// properties/NAME_test.{cpp,hpp}"})
    EXPECT_EQ(lost_paths(line), Paths{}) << line;
}

TEST(Sources, fitInto100Columns) {
  hold([](const Source&, const std::string& line) -> std::string {
    const auto width = std::ranges::count_if(line, [](char c) {
      return (static_cast<unsigned char>(c) & 0xC0) != 0x80;  // not the rest of a code point
    });
    return width > 100 ? std::to_string(width) + " columns" : "";
  });
}

TEST(Sources, haveNoTabsAndNoBlanksAtTheEndsOfLines) {
  hold([](const Source&, const std::string& line) -> std::string {
    if (line.find('\t') != std::string::npos) return "a tab";
    if (line.find('\r') != std::string::npos) return "a carriage return";
    return !line.empty() && line.back() == ' ' ? "a blank at the end" : "";
  });
}

TEST(Sources, endWithANewlineAndHeadersBeginWithAComment) {
  for (const Source& source : sources()) {
    EXPECT_TRUE(source.text.ends_with("\n") && !source.text.ends_with("\n\n")) << source.path;
    const bool is_header = source.path.ends_with(".hpp") || source.path.ends_with(".cuh");
    const bool once = std::ranges::count(source.lines, "#pragma once") == 1;
    EXPECT_EQ(once, is_header) << source.path;
    if (is_header) {
      EXPECT_TRUE(source.text.starts_with("// ")) << source.path << ": a header says what it is";
    }
  }
}

}  // namespace
}  // namespace lockstep
