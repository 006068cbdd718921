// Traces that dropping lines and runs of lines makes no shorter, and what other forms make of them.
#include "cache_sim/search/shrink.hpp"

#include <gtest/gtest.h>

#include <string>

#include "cache_sim/trace/trace.hpp"
#include "cache_sim/trace/trace_writer.hpp"
#include "properties/support/search.hpp"

namespace lockstep::cache_sim {
namespace {

struct Case {
  std::string defect;
  ConfigFields fixed;
  std::string trace;
  std::size_t lines;  ///< that are left
};

void expect_shrunk(const Case& given) {
  const Result<Trace> trace = parse_trace(given.trace, "trace");
  ASSERT_TRUE(trace.has_value()) << trace.error().text;
  RunOptions run = testing_support::run_with_defect(given.defect);
  run.fixed = given.fixed;
  const Result<ShrinkOutcome> shrunk = shrink(*trace, run);
  ASSERT_TRUE(shrunk.has_value()) << shrunk.error().text;
  EXPECT_EQ(line_count(shrunk->trace), given.lines) << trace_text(shrunk->trace);
  for (const std::string& field : given.fixed)
    EXPECT_EQ(shrunk->trace.config.find(field), trace->config.find(field)) << field;
  const std::optional<LocatedFinding> again = finding_of(shrunk->trace, run);
  ASSERT_TRUE(again.has_value()) << "its text is what was played";
  EXPECT_TRUE(is_same_finding(*again, shrunk->finding));
  run.defect = nullptr;
  run.defect_name = "";
  EXPECT_FALSE(finding_of(shrunk->trace, run).has_value())
      << "without the defect nothing is found\n"
      << trace_text(shrunk->trace);
}

const std::string kStored = "alloc as=s1\nadvance slot=s1 tokens=a1\ninsert slot=s1 tokens=a1\n";
const std::string kTwoStored =
    kStored + "alloc as=s2\nadvance slot=s2 tokens=a2\ninsert slot=s2 tokens=a2\n";

TEST(ShrinkFurther, aFlushForLandingSettlingAndEvicting) {
  expect_shrunk({"sglang-no-buffer:stopped-prefetch-frees-slots",
                 {"disk"},
                 "config disk=1 host_kv=2 host_states=1 prefetch_least=1\n" + kStored +
                     "land tier=host\nsettle\nland tier=disk\nsettle\nevict kv=1\n"
                     "evict kv=1 tier=host\nadmit id=r1 tokens=a2\nsettle\n"
                     "admit id=r1 late=1 tokens=a2\nsettle\n",
                 7});
}

TEST(ShrinkFurther, aSlotForARequest) {
  expect_shrunk({"sglang-no-buffer:cut-prefetch-keeps-its-state",
                 {"disk", "host_kv", "host_states"},
                 "config disk=1 host_kv=8 host_states=3 prefetch_least=1\n"
                 "admit id=r7 prompt=1 tokens=a4\nsettle\nadmit id=r7 prompt=1 tokens=a4\n"
                 "extend id=r7 n=5 tokens=a4:5\nalloc as=s10\nadvance slot=s10 tokens=a4\n"
                 "insert slot=s10 tokens=a4\nland tier=host\nsettle\nland tier=disk\nsettle\n"
                 "evict kv=1\nevict kv=1 tier=host\nadmit id=r8 tokens=a5\nfinish id=r7\nsettle\n"
                 "land from=disk tier=host\nland from=disk tier=host\nsettle\n",
                 10});
}

TEST(ShrinkFurther, linesAndTheFieldThatAskedForThem) {
  expect_shrunk({"sglang-no-buffer:ranks-take-their-own",
                 {"disk", "storage_ranks"},
                 "config disk=1 host_kv=2 host_states=1 prefetch_least=1 storage_ranks=2 "
                 "write_policy=write_through_selective\n"
                 "admit id=r1 tokens=a1\nextend id=r1 n=2 tokens=a1:3\nfinish id=r1\n"
                 "admit id=r2 tokens=a3\n" +
                     kStored +
                     "flush\nalloc as=s2\nadvance slot=s2 tokens=a1\ninsert slot=s2 tokens=a1\n"
                     "land tier=host\nsettle\nfail rank=1 tier=disk\nflush\nadmit id=r3 tokens=a2\n"
                     "settle\n",
                 8});
}

TEST(ShrinkFurther, anotherChoiceAndAnotherReasonToWait) {
  expect_shrunk({"sglang-no-buffer:passed-over-keeps-copy",
                 {"disk", "host_kv", "host_states"},
                 "config disk=1 host_kv=40 host_states=6 prefetch_least=1\n" + kTwoStored +
                     "land tier=host\nland tier=host\nsettle\nland tier=disk\nland tier=disk\n"
                     "admit id=r1 tokens=a4\nsettle\nevict kv=1\nevict kv=1 tier=host\n"
                     "admit id=r1 tokens=a4\nflush\n",
                 8});
}

TEST(ShrinkFurther, numbersOfAList) {
  expect_shrunk({"vllm-align:loads-from-the-other-tier",
                 {"cpu_blocks", "cpu_chunks"},
                 "config blocks=9 cpu_blocks=8 cpu_chunks=6 groups=attention:2,mamba:2 "
                 "hash_block=1 retention=0 scheduler=vllm\n"
                 "request id=r1 output=a7:9 tokens=a7\nrequest id=r2 output=a9:11 tokens=a9\n"
                 "request id=r3 output=a7:9 tokens=a7\nrun steps=5\n"
                 "request id=r4 output=a3:6 tokens=a3\nevict kv=8 state=0\nrun\n",
                 5});
}

// Each of the two states is stored by two lines and leaves the device by one, and its write to the
// disk fails on one rank; everything is flushed between them, and before a prompt asks and is told.
TEST(ShrinkFurther, leavesWhatIsNeeded) {
  expect_shrunk({"sglang-no-buffer:ranks-take-the-least",
                 {"disk", "storage_ranks"},
                 "config disk=1 host_kv=2 host_states=2 prefetch_least=1 storage_ranks=2\n"
                 "alloc as=s1\nadvance slot=s1 tokens=a2\ninsert slot=s1 tokens=a2\n"
                 "land tier=host\nsettle\nfail rank=0 tier=disk\n"
                 "alloc as=s2\nadvance slot=s2 tokens=a1\ninsert slot=s2 tokens=a1\n"
                 "land tier=host\nsettle\nfail rank=1 tier=disk\nflush\nadmit id=r1 tokens=a3\n"
                 "settle\n",
                 12});
}

// Executions with a pool of the default size take several times as long, but that size is what a
// reader expects.
TEST(ShrinkFurther, endsWithTheUsualPool) {
  const Result<Trace> trace = parse_trace(
      "config kv_tokens=77\nalloc as=s2\nadvance slot=s2 tokens=a6\ninsert slot=s2 tokens=a6\n"
      "match tokens=a4\n",
      "pool");
  ASSERT_TRUE(trace.has_value()) << trace.error().text;
  const RunOptions run = testing_support::run_with_defect("sglang-no-buffer:split-moves-state");
  const Result<ShrinkOutcome> shrunk = shrink(*trace, run);
  ASSERT_TRUE(shrunk.has_value()) << shrunk.error().text;
  EXPECT_EQ(shrunk->trace.config.kv_tokens, Config().kv_tokens);
}

}  // namespace
}  // namespace lockstep::cache_sim
