#include "cache_sim/search/detours.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cache_sim/trace/trace.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

TraceForm form_of(const std::string& text) {
  const Result<Trace> trace = parse_trace(text, "form");
  require(trace.has_value(), trace ? "" : trace.error().text);
  return {trace->config, literal_steps(trace->statements)};
}

RunOptions run_of(std::vector<std::string> subjects) {
  RunOptions run;
  run.subjects = std::move(subjects);
  return run;
}

bool has(const FieldValues& values, const std::string& field, const std::string& value) {
  return std::find(values.begin(), values.end(), std::pair(field, value)) != values.end();
}

TEST(Detours, chooseAmongWhatASearchDraws) {
  RunOptions run = run_of({"sglang-no-buffer", "oracle:sglang-no-buffer"});
  FieldValues choices = choices_for(run);
  EXPECT_TRUE(has(choices, "write_policy", "write_back"));
  EXPECT_TRUE(has(choices, "write_policy", "write_through"));
  EXPECT_FALSE(has(choices, "lazy", "1")) << "that policy has no such flag";
  EXPECT_TRUE(std::none_of(choices.begin(), choices.end(), [](const auto& choice) {
    return choice.first == "prefetch_least";
  })) << "a number is no choice";
  run.fixed = {"write_policy"};
  choices = choices_for(run);
  EXPECT_FALSE(has(choices, "write_policy", "write_back"));
  EXPECT_FALSE(choices.empty());
}

TEST(Detours, leaveTheFieldsOfAChildAlone) {
  EXPECT_TRUE(choices_for(run_of({"sglang-no-buffer", "exec:python3 server.py"})).empty());
}

TEST(Detours, giveEachAdmissionEachReasonToWait) {
  const TraceForm trace = form_of(
      "config disk=1 host_kv=9 host_states=1\nadmit id=r1 tokens=a4\ncheck\n"
      "admit id=r1 tokens=a4\nadmit id=r2 tokens=a2\n");
  const std::vector<TraceForm> forms = detours(trace, {});
  ASSERT_EQ(forms.size(), 5u) << "three deadlines, and the room of two requests";
  int late = 0;
  int asking = 0;
  for (const TraceForm& form : forms) {
    EXPECT_EQ(form.steps.size(), trace.steps.size());
    for (const Step& step : form.steps) {
      const auto& operation = std::get<Operation>(step.statement.what);
      late += operation.late ? 1 : 0;
      asking += operation.room == trace.config.kv_tokens ? 1 : 0;
    }
  }
  EXPECT_EQ(late, 3);
  EXPECT_EQ(asking, 3) << "both admissions of r1 ask alike, or the second one is another request";
}

TEST(Detours, giveEachReasonEachChoice) {
  const TraceForm trace = form_of("config lazy=1\nadmit id=r1 tokens=a4\n");
  const std::vector<TraceForm> forms = detours(trace, {{"lazy", "0"}, {"lazy", "1"}});
  EXPECT_EQ(forms.size(), 2u + 3u) << "what the trace has already is no other choice";
}

TEST(Detours, haveNoneForRequestsOfAScheduler) {
  EXPECT_TRUE(detours(form_of("request id=r1 tokens=a4 output=1\nrun\n"), {{"lazy", "1"}}).empty());
}

}  // namespace
}  // namespace lockstep::cache_sim
