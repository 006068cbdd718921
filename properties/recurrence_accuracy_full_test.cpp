// The yardstick's table: how far each form of a recurrence is from the truth, by sequence length.
// Printed, so that a kernel's error can be read beside it.
#include <gtest/gtest.h>

#include <cstdio>

#include "properties/support/recurrences.hpp"
#include "reference/base/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

template <template <class> class Run>
class RecurrenceAccuracy {
 public:
  explicit RecurrenceAccuracy(std::int64_t T) : T_(T), exact_(T, 1, 3), single_(T, 1, 3) {
    truth_ = Array<double, 3>(exact_.out_shape);
    auto state = exact_.states();
    Run<double>::scan(exact_.inputs(0, T), state.view(), truth_.view());
  }
  /// Error of the output in float; chunk 0 is the recurrence.
  Difference in_float(std::int64_t chunk, const StoragePoints& storage = {}) const {
    auto in = single_.inputs(0, T_);
    in.rows.storage = storage;
    auto state = single_.states();
    Array<float, 3> out(single_.out_shape);
    if (chunk == 0)
      Run<float>::scan(in, state.view(), out.view());
    else
      Run<float>::chunked(in, chunk, state.view(), out.view());
    return difference(out, truth_);
  }
  /// Error of the chunks in double: another algebraic form, not another precision.
  Difference in_double(std::int64_t chunk) const {
    auto state = exact_.states();
    Array<double, 3> out(exact_.out_shape);
    Run<double>::chunked(exact_.inputs(0, T_), chunk, state.view(), out.view());
    return difference(out, truth_);
  }

 private:
  std::int64_t T_;
  Run<double> exact_;
  Run<float> single_;
  Array<double, 3> truth_;
};

template <template <class> class Run>
void print_table(const char* name) {
  std::printf("%-18s %6s %10s %10s %10s %10s %10s %10s\n", name, "T", "float", "chunk 64",
              "chunk 256", "bf16 state", "bf16 ops", "f64 chunk");
  for (const std::int64_t T : {8, 64, 512, 2048, 16384}) {
    const RecurrenceAccuracy<Run> accuracy(T);
    const double single = accuracy.in_float(0).relative(), c64 = accuracy.in_float(64).relative();
    const double c256 = accuracy.in_float(256).relative();
    const double state =
        accuracy.in_float(0, {.state = Format::bf16, .state_each_token = true}).relative();
    const double operands =
        accuracy.in_float(64, {.chunk_state = Format::bf16, .operand = Format::bf16}).relative();
    const double form = accuracy.in_double(64).relative();
    std::printf("%-18s %6ld %10.1e %10.1e %10.1e %10.1e %10.1e %10.1e\n", "", T, single, c64, c256,
                state, operands, form);
    EXPECT_LT(single, 2e-6) << T;
    EXPECT_LT(c64, 4 * std::max(single, 1e-7)) << T << ": chunks are no worse than the yardstick";
    EXPECT_LT(c256, 4 * std::max(single, 1e-7)) << T;
    EXPECT_LT(form, 1e-13) << T;
    EXPECT_GT(state, single) << T;
    EXPECT_LT(state, 5e-2) << T;
    EXPECT_LT(operands, 2e-2) << T;
  }
}

TEST(RecurrenceAccuracy, ofMamba2) {
  print_table<Mamba2Run>("mamba2");
}

TEST(RecurrenceAccuracy, ofTheGatedDeltaRule) {
  print_table<GatedDeltaRun>("gated delta rule");
}

}  // namespace
}  // namespace lockstep
