#include "cache_sim/search/detours.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

#include "cache_sim/draw/draw.hpp"
#include "properties/support/search.hpp"

namespace lockstep::cache_sim {
namespace {

using testing_support::form_of, testing_support::text_of;

RunOptions run_of(std::vector<std::string> subjects) {
  RunOptions run;
  run.subjects = std::move(subjects);
  return run;
}

bool has(const FieldValues& values, const std::string& field, const std::string& value) {
  return std::ranges::find(values, std::pair(field, value)) != values.end();
}

TEST(Detours, chooseAmongWhatASearchDraws) {
  RunOptions run = run_of({"sglang-no-buffer", "oracle:sglang-no-buffer"});
  FieldValues choices = choices_for(run);
  EXPECT_TRUE(has(choices, "write_policy", "write_back"));
  EXPECT_TRUE(has(choices, "write_policy", "write_through"));
  EXPECT_FALSE(has(choices, "lazy", "1")) << "that policy has no such flag";
  EXPECT_TRUE(std::ranges::none_of(choices, [](const auto& choice) {
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

// Each kind of change is among many draws, by itself.
TEST(Detours, changeATraceInEachWay) {
  const std::string text =
      "admit id=r1 tokens=a4\nextend id=r1 n=4\nfinish id=r1\nadmit id=r2 tokens=b2\n";
  const std::string end = "admit id=r2 tokens=b2\n";
  const TraceForm trace = form_of("config lazy=1 disk=1 host_kv=9 host_states=1\n" + text);
  std::set<std::string> seen;
  std::set<std::string> values;
  for (std::uint64_t number = 1; number <= 4000; ++number) {
    Draw draw(1, number);
    const TraceForm form = detour(trace, {{"lazy", "0"}}, draw);
    seen.insert(text_of(form));
    values.insert(form.config.text("lazy"));
  }
  const std::string finished = "admit id=r1 tokens=a4\nextend id=r1 n=4\n";
  EXPECT_TRUE(seen.contains(finished + end)) << "a line goes";
  EXPECT_TRUE(seen.contains(finished + end + "finish id=r1\n")) << "a line moves";
  EXPECT_TRUE(seen.contains(text + end)) << "a line comes once more";
  EXPECT_TRUE(seen.contains(text + "flush\n"));
  EXPECT_TRUE(seen.contains(text + "evict kv=2\n"));
  EXPECT_TRUE(seen.contains(finished + "finish id=r1\nadmit id=r2 late=1 tokens=b2\n"));
  EXPECT_TRUE(seen.contains(finished + "finish id=r1\nadmit id=r2 room=131072 tokens=b2\n"));
  EXPECT_TRUE(seen.contains(finished + "finish id=r1\nadmit id=r2 tokens=b1\n"));
  EXPECT_TRUE(seen.contains(finished + "finish id=r1\nadmit id=r2 tokens=a4\n"));
  EXPECT_TRUE(seen.contains("alloc as=r1 tokens=a4\ninsert slot=r1 tokens=a4\n" + end));
  EXPECT_TRUE(seen.contains("admit external=4 id=r1 tokens=a5\nfinish id=r1\n" + end));
  EXPECT_EQ(values, (std::set<std::string>{"0", "1"}));
}

TEST(Detours, leaveRequestsOfASchedulerAsTheyAre) {
  const TraceForm trace = form_of("request id=r1 tokens=a4 output=1\nrun\n");
  for (std::uint64_t number = 1; number <= 100; ++number) {
    Draw draw(1, number);
    const TraceForm form = detour(trace, {{"lazy", "1"}}, draw);
    EXPECT_EQ(form.steps.size(), 2u);
    EXPECT_EQ(form.config.text("lazy"), "0");
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
