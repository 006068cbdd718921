// Prefill and decode apart: what the policy and its oracle answer to a request on its way from one
// server to the other, and what they refuse.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "cache_sim/model/label_state.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {
namespace {

/// The policy, beside its oracle.
class TwoServersTest : public testing::Test {
 protected:
  void start(const std::string& fields) {
    Config config;
    ASSERT_TRUE(config.set_all("kv_tokens=32,state_slots=4," + fields));
    const PolicyEntry& entry = *Registry<PolicyEntry>::find("sglang-pd");
    const PolicyEntry::SlotCounts slots = entry.slots_in(config);
    labels_ = std::make_unique<LabelState>(slots.states, slots.kv_end);
    policy_ = entry.make({.config = config, .layers = labels_.get()});
    oracle_ = Registry<OracleEntry>::find("sglang-pd")->make({.config = config});
  }

  /// The answer of both, or `bad input`.
  std::string said(const std::string& line) {
    const Operation operation = parse_operation(*parse_line(line)).value();
    const Result<Reply> policy = policy_->apply(operation), oracle = oracle_->apply(operation);
    EXPECT_EQ(policy.has_value(), oracle.has_value()) << line;
    if (!policy || !oracle) {
      EXPECT_TRUE(policy || policy.error().text.size() > 20) << line << ": no sentence";
      return "bad input";
    }
    EXPECT_FALSE(oracle->exact_difference(*policy))
        << line << ": " << policy->text() << ", " << oracle->text();
    return policy->text();
  }
  void expect_said(const std::string& line, const std::string& answer) {
    EXPECT_EQ(said(line), answer) << line;
  }

  std::unique_ptr<LabelState> labels_;
  std::unique_ptr<Subject> policy_, oracle_;
};

TEST_F(TwoServersTest, theFirstOneComputesAllTokensButTheLast) {
  start("slices=2");
  expect_said("admit id=a tokens=a1", "bad input");
  said("admit id=a tokens=a9");
  expect_said("admit id=a tokens=b9", "bad input");
  expect_said("extend id=a n=9", "bad input");
  expect_said("extend id=a n=9 tokens=b1", "bad input");
  said("extend id=a n=8");
  expect_said("extend id=a n=1", "bad input");
}

TEST_F(TwoServersTest, aRequestIsRefusedUntilItHasMoved) {
  start("slices=2");
  said("admit id=a tokens=a9");
  said("extend id=a n=5");
  expect_said("load id=a", "evicted_kv=0 evicted_states=0 kv=5 state=0");
  expect_said("finish id=a", "refused=same_step");
  said("extend id=a n=3");
  expect_said("load id=a", "kv=3 state=1");
  for (const char* const line : {"load id=a", "extend id=a n=1", "checkpoint id=a", "finish id=a"})
    expect_said(line, "refused=same_step");
  for (int i = 0; i < 4; ++i) {
    expect_said("settle", "n=0");
    expect_said("land tier=decode id=a from=prefill", "n=1");
  }
  expect_said("land tier=decode", "n=0");
  expect_said("extend id=a n=1", "refused=same_step");
  expect_said("settle", "n=1");
  expect_said("load id=a", "bad input");
  expect_said("extend id=a n=1", "evicted_kv=0 evicted_states=0 n=1");
  expect_said("finish id=a", "exist=0 length=9");
  expect_said("extend id=a n=1", "bad input");
}

TEST_F(TwoServersTest, aFailedRequestWaitsForItsAbort) {
  start("slices=2");
  said("admit id=a tokens=a9");
  said("extend id=a n=8");
  said("load id=a");
  expect_said("fail tier=decode", "n=1");
  expect_said("settle", "n=1");
  for (const char* const line : {"load id=a", "extend id=a n=1", "checkpoint id=a", "finish id=a"})
    expect_said(line, "refused=same_step");
  expect_said("admit id=a tokens=a9", "bad input");
  expect_said("abort id=a", "ok");
  expect_said("admit id=a tokens=a9", "refused=same_step");  // the other slice is in flight
  expect_said("land tier=decode", "n=1");
  expect_said("settle", "n=1");
  said("admit id=a tokens=a9");
  expect_said("flush", "kv=8 state=1");  // what the prefill server has kept
}

TEST_F(TwoServersTest, aTierIsOneOfThem) {
  start("decode_kv=16");
  for (const char* const line : {"evict tier=host", "land tier=host", "land tier=decode from=disk",
                                 "fail tier=decode rank=0", "land tier=decode id=nobody",
                                 "evict room=3", "step padded=4", "match tokens=a4"})
    expect_said(line, "bad input");
  expect_said("evict kv=1 tier=prefill", "kv=0 state=0");
  expect_said("check", "kv_free=48 kv_locked=0 states_free=8 states_locked=0");
}

}  // namespace
}  // namespace lockstep::cache_sim
