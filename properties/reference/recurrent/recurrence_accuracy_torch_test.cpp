// The yardstick's table: how far each form of a recurrence is from the truth, by sequence length
// and precision, with LibTorch's eager operations as two kernels more. Printed and written as CSV
// (to LOCKSTEP_ACCURACY_CSV, where that is set), so that a kernel's error can be read beside it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "properties/reference/recurrent/eager.hpp"
#include "reference/tensors/yardstick.hpp"

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

  /// Error of LibTorch in a dtype, in which every step is rounded.
  Difference in_torch(at::ScalarType dtype) const {
    return difference(array_of<double, 3>(eager(exact_, dtype).out), truth_);
  }

 private:
  std::int64_t T_;
  Run<double> exact_;
  Run<float> single_;
  Array<double, 3> truth_;
};

struct Column {
  const char* name;
  double error;
};

class Table {
 public:
  Table() {
    static bool begun = false;  // one file for all tables of a run, with one line of names
    const char* const path = std::getenv("LOCKSTEP_ACCURACY_CSV");
    if (path) csv_.open(path, begun ? std::ios::app : std::ios::trunc);
    names_ = !std::exchange(begun, true);
  }
  /// One row: the relative Frobenius error of every form at length T.
  void row(const char* recurrence, std::int64_t T, std::initializer_list<Column> columns) {
    if (T == 8) {
      std::printf("%-18s %6s", recurrence, "T");
      for (const Column& column : columns) std::printf(" %11s", column.name);
      std::printf("\n");
    }
    if (std::exchange(names_, false)) {
      csv_ << "recurrence,T";
      for (const Column& column : columns) csv_ << ',' << column.name;
      csv_ << '\n';
    }
    std::printf("%-18s %6ld", "", static_cast<long>(T));
    csv_ << recurrence << ',' << T;
    for (const Column& column : columns) {
      std::printf(" %11.1e", column.error);
      csv_ << ',' << Difference::scientific(column.error);
    }
    std::printf("\n");
    csv_ << '\n';
  }

 private:
  std::ofstream csv_;
  bool names_ = true;
};

template <template <class> class Run>
void print_table(const char* name) {
  Table table;
  for (const std::int64_t T : {8, 64, 512, 2048, 16384}) {
    const RecurrenceAccuracy<Run> accuracy(T);
    const double single = accuracy.in_float(0).relative(), c64 = accuracy.in_float(64).relative();
    const double c256 = accuracy.in_float(256).relative();
    const double state =
        accuracy.in_float(0, {.state = Format::bf16, .state_each_token = true}).relative();
    const double operands =
        accuracy.in_float(64, {.chunk_state = Format::bf16, .operand = Format::bf16}).relative();
    const double form = accuracy.in_double(64).relative();
    const double torch_double = accuracy.in_torch(at::kDouble).relative();
    const double torch_float = accuracy.in_torch(at::kFloat).relative();
    const double torch_bf16 = accuracy.in_torch(at::kBFloat16).relative();
    table.row(name, T,
              {{"float", single},
               {"chunk 64", c64},
               {"chunk 256", c256},
               {"bf16 state", state},
               {"bf16 ops", operands},
               {"f64 chunk", form},
               {"torch f64", torch_double},
               {"torch float", torch_float},
               {"torch bf16", torch_bf16}});
    const double yardstick = 4 * std::max(single, 1e-7);
    EXPECT_LT(single, 2e-6) << T;
    EXPECT_LT(c64, yardstick) << T << ": chunks are no worse than the yardstick";
    EXPECT_LT(c256, yardstick) << T;
    EXPECT_LT(form, 1e-13) << T;
    EXPECT_GT(state, single) << T;
    EXPECT_LT(state, 5e-2) << T;
    EXPECT_LT(operands, 2e-2) << T;
    EXPECT_LT(torch_double, 1e-12) << T;
    EXPECT_LT(torch_float, yardstick) << T;
    EXPECT_GT(torch_bf16, 1e-3) << T << ": eight bits are eight bits";
    EXPECT_LT(torch_bf16, 0.5) << T;
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
