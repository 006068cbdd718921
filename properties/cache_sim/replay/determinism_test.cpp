// The same file gives the same digest: twice in one process, and with every compiler and level of
// optimisation, because the expected digests are written down here.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/report/recorded.hpp"

namespace lockstep::cache_sim {
namespace {

struct Recorded {
  std::string file;
  std::string subject;
  std::string digest;  ///< of the run
};
void PrintTo(const Recorded& recorded, std::ostream* out) {
  *out << recorded.file << " by " << recorded.subject;
}

/// Digest of the run and, for a workload, of its decisions, and the tokens hit.
std::string digests_of(const Recorded& recorded, CheckLevel check) {
  ReplayRequest request;
  request.file = recorded.file.starts_with("sglang-w1")
                     ? recorded.file
                     : std::string(LOCKSTEP_SOURCE_DIR) + "/fixtures/traces/" + recorded.file;
  request.subjects = {recorded.subject};
  request.check = check;
  const Result<ReplayOutcome> outcome = replay(request);
  if (!outcome) return outcome.error().text;
  std::string text = fmt::format("{:016x}", outcome->run->digest());
  if (outcome->decisions)
    text += fmt::format(" {:016x} {}", outcome->decisions->decision_digest,
                        outcome->run->totals(0).hit_tokens);
  return text;
}

class Determinism : public testing::TestWithParam<Recorded> {};

/// With the decisions that SGLang's own caches took, where they were recorded.
std::string recorded_digests(const Recorded& run) {
  const std::size_t colon = run.subject.find(':');
  const std::string policy =
      colon == std::string::npos ? run.subject : run.subject.substr(colon + 1);
  const auto all = recorded_decisions(
      LOCKSTEP_SOURCE_DIR "/fixtures/workloads/recorded_decisions.json", run.file);
  for (const RecordedDecisions& one : *all)
    if (one.policy == policy)
      return fmt::format("{} {} {}", run.digest, one.decision_digest, one.hit_tokens);
  return run.digest;
}

TEST_P(Determinism, theSameRunHasTheRecordedDigest) {
  const std::string recorded = recorded_digests(GetParam());
  EXPECT_EQ(digests_of(GetParam(), CheckLevel::all), recorded);
  EXPECT_EQ(digests_of(GetParam(), CheckLevel::off), recorded) << "without checks";
}

// No recording exists of the decisions of the design sglang-v0, so its decision digest is our own.
INSTANTIATE_TEST_SUITE_P(
    Runs, Determinism,
    testing::Values(
        Recorded{"sglang-w1", "sglang-no-buffer", "4bacb5c26073c92c"},
        Recorded{"sglang-w1", "oracle:sglang-no-buffer", "4bacb5c26073c92c"},
        Recorded{"sglang-w1", "sglang-extra-buffer", "174e44633c769c3b"},
        Recorded{"sglang-w1", "oracle:sglang-extra-buffer", "174e44633c769c3b"},
        Recorded{"sglang-w1", "sglang-legacy", "291aca3d4b108114"},
        Recorded{"sglang-w1", "oracle:sglang-legacy", "291aca3d4b108114"},
        Recorded{"sglang-w1", "sglang-v0", "077db3b4878b85ca c7e0fd53db3b180b 1772905"},
        Recorded{"sglang-w1", "oracle:sglang-v0", "077db3b4878b85ca c7e0fd53db3b180b 1772905"},
        Recorded{"sglang-w1", "radix", "88188de64dfcbe2f"},
        Recorded{"sglang-w1", "oracle:radix", "88188de64dfcbe2f"},
        Recorded{"chunk_ends_are_reused.trace", "sglang-no-buffer", "20e11ac1d6159a75"},
        Recorded{"waiting_requests_never_spin.trace", "radix", "e9849176f1ca4759"},
        Recorded{"drafts_leave_no_trace.trace", "sglang-no-buffer", "e28b890670f51f66"}),
    [](const testing::TestParamInfo<Recorded>& info) {
      std::string name =
          info.param.file.substr(0, info.param.file.find('.')) + "_" + info.param.subject;
      for (char& c : name)
        if (c == '-' || c == ':') c = '_';
      return name;
    });

// Another seed is another workload: the digest is not a constant.
TEST(DigestOfARun, followsTheSeed) {
  const auto digest = [](const std::string& file) {
    return digests_of({file, "sglang-no-buffer", ""}, CheckLevel::off);
  };
  EXPECT_EQ(digest("sglang-w1:requests=40"), digest("sglang-w1:requests=40,seed=0x5EED2026"));
  EXPECT_NE(digest("sglang-w1:requests=40"), digest("sglang-w1:requests=40,seed=1"));
  EXPECT_NE(digest("sglang-w1:requests=40"), digest("sglang-w1:requests=41"));
}

}  // namespace
}  // namespace lockstep::cache_sim
