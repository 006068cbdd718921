// `lockstep judge` over states that take gigabytes.
#include <gmock/gmock.h>

#include "properties/support/candidates.hpp"
#include "properties/support/program.hpp"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using namespace testing_support;

// States of bfloat16 whose last layer begins 2^31 elements after the first, which offsets that
// begin again there take for it: 5.4 GB.
TEST(JudgeInFull, offsetsBeyond32BitsAreTried) {
  const auto run = [](const std::string& candidate) {
    return run_program({"judge", "state_copy", "--candidate", candidate, "--types",
                        "bfloat16/bfloat16", "--device", "cpu", "--case", "far-offsets"});
  };
  const ProgramRun right = run(library("copy_right"));
  EXPECT_EQ(right.status, 0) << right.out << right.err;
  EXPECT_THAT(right.out, HasSubstr("1 case: nothing found"));
  const ProgramRun negative = run(library("copy_offsets_of_32_bits"));
  EXPECT_EQ(negative.status, 11) << negative.out;
  EXPECT_THAT(negative.out, HasSubstr("subject-died"));
  const ProgramRun wrapped = run(library("copy_offsets_of_31_bits"));
  EXPECT_EQ(wrapped.status, 11) << wrapped.out;
  EXPECT_THAT(wrapped.out, HasSubstr("far-offsets: output-differs: state"));
}

// The same of a Python function, with states of 4.8 GB.
TEST(JudgeInFull, offsetsOfAPythonFunctionAreTried) {
  std::string python;
  if (!has_pytorch(python))
    GTEST_SKIP() << python << " has no PyTorch (LOCKSTEP_PYTHON names another one)";
  const auto run = [](const std::string& function) {
    return run_program({"judge", "gated_delta_rule_update", "--candidate",
                        "fixtures/candidates/torch_delta_rule.py:" + function, "--types",
                        "bfloat16/bfloat16", "--device", "cpu", "--case", "far-offsets"});
  };
  const ProgramRun right = run("right");
  EXPECT_EQ(right.status, 0) << right.out << right.err;
  const ProgramRun between = run("writes_between_states");
  EXPECT_EQ(between.status, 10) << between.out;
  EXPECT_THAT(between.out, HasSubstr("state: memory between its elements, which lie far apart"));
}

}  // namespace
}  // namespace lockstep
