// Every trace file does what its own head says: each `# run:` line, executed by the program a user
// runs, ends with the finding of its `# finds:` line, or with none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string>
#include <vector>

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/trace/trace.hpp"
#include "properties/support/program.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace testing_support;

/// Paths from the root of the sources, sorted.
std::vector<std::string> trace_files() {
  std::vector<std::string> files;
  for (const char* const folder : {"fixtures/traces", "fixtures/regressions"}) {
    const std::filesystem::path root = LOCKSTEP_SOURCE_DIR;
    if (!std::filesystem::is_directory(root / folder)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(root / folder))
      if (entry.path().extension() == ".trace")
        files.push_back((std::filesystem::path(folder) / entry.path().filename()).string());
  }
  std::ranges::sort(files);
  return files;
}

Trace read(const std::string& file) {
  Result<Trace> trace = read_trace(std::string(LOCKSTEP_SOURCE_DIR) + "/" + file);
  EXPECT_TRUE(trace.has_value()) << trace.error().text;
  return trace ? std::move(*trace) : Trace{};
}

class Fixtures : public testing::TestWithParam<std::string> {};

TEST_P(Fixtures, endsAsItsHeadSays) {
  const Trace trace = read(GetParam());
  EXPECT_FALSE(trace.title.empty()) << "a trace says in one sentence what it shows";
  EXPECT_FALSE(trace.runs.empty()) << "a trace has a `# run:` line";
  for (const RunDirective& directive : trace.runs) {
    SCOPED_TRACE(directive.command);
    const ProgramRun run = run_program(directive_words(directive, GetParam()));
    EXPECT_EQ(run.err, "");
    EXPECT_EQ(run.status, directive.finds ? exit_status(*directive.finds) : kExitPass) << run.out;
    ASSERT_NE(run.out, "");
    const std::string first = lines_of(run.out).front();
    const std::string last = lines_of(run.out).back();
    EXPECT_EQ(last.rfind("digest=", 0), 0u) << last;
    if (directive.finds) {
      const std::string kind = ": " + std::string(to_string(*directive.finds)) + " at event ";
      EXPECT_EQ(first.rfind(GetParam() + ":", 0), 0u) << first;
      EXPECT_NE(first.find(kind), std::string::npos) << first;
    } else {
      EXPECT_NE(run.out.find("nothing found"), std::string::npos) << run.out;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Traces, Fixtures, testing::ValuesIn(trace_files()),
                         [](const testing::TestParamInfo<std::string>& info) {
                           std::string name = std::filesystem::path(info.param).stem().string();
                           for (char& c : name)
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           return info.param.starts_with("fixtures/regressions")
                                      ? "regression_" + name
                                      : name;
                         });

// A defect that no trace shows proves nothing about the harness.
TEST(Defects, eachHasATraceThatShowsIt) {
  std::vector<std::string> shown;
  for (const std::string& file : trace_files())
    for (const RunDirective& directive : read(file).runs) {
      const std::vector<std::string> words = directive_words(directive, file);
      const auto flag = std::ranges::find(words, "--defect");
      if (directive.finds && flag != words.end() && flag + 1 != words.end())
        shown.push_back(*(flag + 1));
    }
  const std::vector<DefectEntry> defects = Registry<DefectEntry>::all();
  EXPECT_GE(defects.size(), 10u);
  for (const DefectEntry& defect : defects)
    EXPECT_NE(std::ranges::find(shown, defect.name), shown.end())
        << defect.name << ": " << defect.sentence;
}

}  // namespace
}  // namespace lockstep::cache_sim
