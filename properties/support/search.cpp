#include "properties/support/search.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "cache_sim/trace/trace.hpp"
#include "cache_sim/trace/trace_writer.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::testing_support {

using namespace cache_sim;

ExploreOutcome searched(const std::string& policy, const std::string& config, std::uint64_t seed,
                        std::int64_t traces) {
  ExploreOptions options;
  if (!policy.empty()) options.run.subjects = {policy, "oracle:" + policy};
  require(options.run.config.set_all(config).has_value(), "a test's config is one");
  options.seed = seed;
  options.traces = traces;
  Result<ExploreOutcome> outcome = explore(options);
  require(outcome.has_value(), outcome ? "" : outcome.error().text);
  return std::move(*outcome);
}

TraceForm form_of(const std::string& text) {
  const Result<Trace> trace = parse_trace(text, "form");
  require(trace.has_value(), trace ? "" : trace.error().text);
  return {trace->config, literal_steps(trace->statements)};
}

std::string text_of(const TraceForm& form) {
  std::string text;
  for (const Step& step : form.steps) {
    const auto* const operation = std::get_if<Operation>(&step.statement.what);
    text += (operation == nullptr ? "request" : operation->text()) + "\n";
  }
  return text;
}

RunOptions run_with_defect(const std::string& defect) {
  const std::string policy = defect.substr(0, defect.find(':'));
  RunOptions run;
  run.subjects = {policy, "oracle:" + policy};
  run.defect = Defect::find(defect);
  require(run.defect != nullptr, "a test names a defect that is there");
  run.defect_name = Registry<DefectEntry>::find(defect)->name;
  return run;
}

void search_for(const std::string& defect, std::uint64_t seed, std::int64_t traces) {
  ExploreOptions options;
  options.run = run_with_defect(defect);
  options.seed = seed;
  options.traces = traces;
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  ASSERT_EQ(outcome->discoveries.size(), 1u) << "no random trace shows " << defect;
  const Discovery& found = outcome->discoveries.front();
  EXPECT_LE(line_count(found.trace), kMostShrunkLines) << trace_text(found.trace);
  testing::Test::RecordProperty("tests_to_detect", static_cast<int>(found.trace_number));
  testing::Test::RecordProperty("shrunk_lines", static_cast<int>(line_count(found.trace)));
}

std::vector<std::string> policies_with_oracle() {
  std::vector<std::string> names;
  for (const OracleEntry& oracle : Registry<OracleEntry>::all()) names.emplace_back(oracle.name);
  return names;
}

std::vector<std::string> all_defects() {
  std::vector<std::string> names;
  for (const DefectEntry& entry : Registry<DefectEntry>::all()) names.emplace_back(entry.name);
  return names;
}

std::vector<std::string> one_defect_in_eight() {
  std::vector<std::string> few;
  const std::vector<std::string> all = all_defects();
  for (std::size_t i = 0; i < all.size(); i += 8) few.push_back(all[i]);
  return few;
}

std::string test_name(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return text;
}

}  // namespace lockstep::testing_support
