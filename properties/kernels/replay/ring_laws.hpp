// Laws of decode with a ring of pending inputs, for both recurrences: the kernels against
// reference/recurrent/replay_rings.hpp. A Run has a layer's inputs for some steps of a batch, on
// the host and on the device:
//
//   Run(extents, rings, seed)      draws them
//   launch(t, first, count, how)   step t for rows first and on
//   flush(counts)                  writes the states of all rows
//   answer<R>(storage)             outputs and states of all steps by the reference in R
#pragma once

#include "kernels/replay/selective_state_ring.hpp"
#include "properties/support/gpu.hpp"
#include "reference/recurrent/replay_rings.hpp"

namespace lockstep::testing_support {

/// A batch of rings over some steps: where each row stands before each of them.
struct Rings {
  Rings(const Batch& batch, std::int64_t steps, std::int64_t window, std::int64_t apart = 5)
      : batch(batch),
        steps(steps),
        window(window),
        cursors(Shape<2>{steps, batch.rows()}, 0),
        positions(Shape<2>{steps, batch.rows()}, 0) {
    for (std::int64_t row = 0; row < batch.rows(); ++row) {
      std::int32_t cursor = 0, position = static_cast<std::int32_t>(apart * row);
      for (std::int64_t t = 0; t < steps; ++t, ++position) {
        cursors(t, row) = cursor;
        positions(t, row) = position;
        cursor = reference::next_cursor(cursor, position, window);
      }
    }
  }
  std::int64_t rows() const { return batch.rows(); }
  std::int64_t tokens() const { return steps * rows(); }

  Batch batch;
  std::int64_t steps, window;
  Array<std::int32_t, 2> cursors, positions;  // [steps, rows]
};

struct DeviceRings {
  explicit DeviceRings(const Rings& rings)
      : cursors(rings.cursors), positions(rings.positions), indices(rings.batch.indices) {}

  IndexView cursors_of(std::int64_t t, std::int64_t first, std::int64_t count) const {
    return cut(at(cursors.view(), t), first, first + count);
  }
  IndexView positions_of(std::int64_t t, std::int64_t first, std::int64_t count) const {
    return cut(at(positions.view(), t), first, first + count);
  }
  StateSlots slots(std::int64_t first, std::int64_t count) const {
    return {.indices = cut(indices.view(), first, first + count)};
  }
  kernels::DeviceTensor<std::int32_t, 2> cursors, positions;
  kernels::DeviceTensor<std::int32_t, 1> indices;
};

struct RingAnswer {
  Array<double, 3> out;    // [steps rows, heads, rows of a state]
  Array<double, 4> state;  // [slots, ...]
};

struct LaunchHow {
  cudaStream_t stream = nullptr;
  bool early = false;
  std::optional<IndexView> cursors{}, positions{};  ///< instead of the step's own
};

/// Cursors and positions that a launch of this library writes: a small step of Mamba2, which lets
/// the next launch start and then stores each row's dt, bit by bit, as the new entry of its ring.
/// Head 0's dt is the cursor, head 1's the position.
class WrittenPlaces {
 public:
  explicit WrittenPlaces(std::int64_t rows)
      : rows_(rows),
        state_({rows, 2, 32, 64}),
        x_({rows, 2, 16, 32}),
        b_({rows, 1, 16, 64}),
        dt_({rows, 2, 16}),
        new_x_({rows, 2, 32}),
        new_b_({rows, 1, 64}),
        new_dt_({rows, 2}),
        out_({rows, 2, 32}),
        A_(Array<double, 1>(Shape<1>{2}, -1)),
        zeros_(Array<std::int32_t, 1>(Shape<1>{rows}, 0)) {}

  /// Launches the write of one step's cursors and positions.
  void launch(const IndexView& cursors, const IndexView& positions, cudaStream_t stream) {
    std::vector<float> bits;
    for (std::int64_t row = 0; row < rows_; ++row) {
      bits.push_back(std::bit_cast<float>(cursors(row)));
      bits.push_back(std::bit_cast<float>(positions(row)));
    }
    new_dt_.set(bits);
    finish();
    kernels::selective_state_ring_update<float>(
        {.ring = {state_.view(), x_.view(), b_.view(), dt_.view()},
         .x = std::as_const(new_x_).view(),
         .dt = new_dt_.view(),
         .A = A_.view(),
         .B = std::as_const(new_b_).view(),
         .C = std::as_const(new_b_).view(),
         .out = out_.view(),
         .cursors = std::as_const(zeros_).view(),
         .positions = std::as_const(zeros_).view()},
        stream);
  }
  IndexView cursors() const { return written(0); }
  IndexView positions() const { return written(1); }

 private:
  IndexView written(std::int64_t head) const {
    return make_view(reinterpret_cast<const std::int32_t*>(dt_.data()) + 16 * head, Shape<1>{rows_},
                     Shape<1>{32});
  }
  std::int64_t rows_;
  kernels::DeviceTensor<float, 4> state_;
  kernels::DeviceTensor<kernels::Bf16, 4> x_, b_;
  kernels::DeviceTensor<float, 3> dt_;
  kernels::DeviceTensor<kernels::Bf16, 3> new_x_, new_b_;
  kernels::DeviceTensor<float, 2> new_dt_;
  kernels::DeviceTensor<kernels::Bf16, 3> out_;
  kernels::DeviceTensor<float, 1> A_;
  kernels::DeviceTensor<std::int32_t, 1> zeros_;
};

template <class Run>
void run_all(Run& run, const LaunchHow& how = {}) {
  for (std::int64_t t = 0; t < run.rings.steps; ++t) run.launch(t, 0, run.rings.rows(), how);
  finish();
}

template <class Run>
void expect_ring_agreement(const typename Run::Extents& e, std::int64_t rows, std::int64_t steps,
                           std::int64_t window, std::uint64_t seed) {
  using S = typename Run::State;
  const Rings rings(Batch::draw(seed, rows, 1, false), steps, window);
  Run run(e, rings, seed);
  run_all(run);
  const RingAnswer truth = run.template answer<double>({});
  const RingAnswer yardstick = run.template answer<float>(storage_of<kernels::Bf16, S>());
  SCOPED_TRACE(testing::Message() << run.text() << ", " << rows << " rows, window " << window);
  EXPECT_TRUE(
      within_yardstick(Run::kOperation, "out", run.out, cast<float>(yardstick.out), truth.out));
  EXPECT_TRUE(within_yardstick(Run::kOperation, "state", run.state, cast<float>(yardstick.state),
                               truth.state));
}

// A row's bits depend on its request alone: not on other rows, not on their number.
template <class Run>
void expect_rows_alone_to_agree(const typename Run::Extents& e) {
  const Rings rings(Batch::draw(3, 9, 1, false), 20, 16);
  Run together(e, rings, 3), alone(e, rings, 3);
  run_all(together);
  for (std::int64_t row = 0; row < rings.rows(); ++row)
    for (std::int64_t t = 0; t < rings.steps; ++t) alone.launch(t, row, 1, {});
  finish();
  EXPECT_TRUE(same_bits(together.out, alone.out));
  EXPECT_TRUE(same_bits(together.state, alone.state));
}

// A flush by position is the flush of the ring that another request would still have.
template <class Run>
void expect_flush_to_be_the_steps(const typename Run::Extents& e, std::int64_t count) {
  Batch batch = Batch::draw(5, 1, 1, false);
  Rings flushes(batch, count, 16), keeps(batch, count, 16);
  for (std::int64_t t = 0; t < count; ++t) flushes.positions(t, 0) += 16 - count;
  Run flushed(e, flushes, 5), kept(e, keeps, 5);
  run_all(flushed);
  run_all(kept);
  EXPECT_TRUE(same_bits(flushed.out, kept.out));
  if (count < 16) {
    EXPECT_FALSE(same_bits(flushed.state, kept.state));
    kept.flush(static_cast<std::int32_t>(count));
  }
  EXPECT_TRUE(same_bits(flushed.state, kept.state));
}

// A launch may read early all that the launch two before it wrote: a large layer beside a small
// one.
template <class Run>
void expect_early_states_to_agree(const typename Run::Extents& e) {
  const Rings large(Batch::draw(7, 200, 1, false), 20, 16),
      small(Batch::draw(8, 1, 1, false), 20, 16);
  Run late(e, large, 7), early(e, large, 7), between(e, small, 8);
  run_all(late);
  cudaStream_t stream;
  kernels::check_cuda(cudaStreamCreate(&stream), "a stream");
  for (std::int64_t t = 0; t < large.steps; ++t) {
    early.launch(t, 0, large.rows(), {stream, true});
    between.launch(t, 0, 1, {stream, true});
  }
  finish();
  cudaStreamDestroy(stream);
  EXPECT_TRUE(same_bits(late.out, early.out));
  EXPECT_TRUE(same_bits(late.state, early.state));
}

// Padding and impossible cursors: a zero output, and every byte of state and ring as it was.
template <class Run>
void expect_rows_without_a_slot_to_write_nothing(const typename Run::Extents& e) {
  Batch batch = Batch::draw(9, 5, 1, false);
  batch.indices = ints({-1, 2, 3, 4, 1});
  Rings rings(batch, 1, 16);
  rings.cursors(0, 1) = -1;
  rings.cursors(0, 2) = 16;
  rings.cursors(0, 3) = 3;
  rings.positions(0, 3) = 18;  // two tokens since the last flush, three in the ring
  rings.positions(0, 4) = -1;
  Run run(e, rings, 9), before(e, rings, 9);
  for (const bool early : {false, true}) {
    run_all(run, {.early = early});
    for (const float x : run.out.host()) EXPECT_EQ(x, 0);
    EXPECT_TRUE(same_bits(run.state, before.state));
    EXPECT_TRUE(run.same_rings(before));
  }
}

// A graph is captured once; cursors and positions are the next step's when it runs again.
template <class Run>
void expect_graphs_to_take_other_cursors(const typename Run::Extents& e) {
  const Rings rings(Batch::draw(11, 4, 1, false), 17, 16);
  Run eager(e, rings, 11), captured(e, rings, 11);
  run_all(eager);
  captured.launch(0, 0, 4, {});
  finish();
  for (std::int64_t t = 1; t < rings.steps; ++t)
    replay_behind_change([&](cudaStream_t stream) { captured.launch(0, 0, 4, {stream}); },
                         [&] { captured.move_to_front(t); });
  const auto all = eager.out.elements(), last = captured.out.elements();
  const std::size_t step = all.size() / static_cast<std::size_t>(rings.steps);
  EXPECT_EQ(std::memcmp(all.data() + (rings.steps - 1) * step, last.data(), step * sizeof all[0]),
            0);
  EXPECT_TRUE(same_bits(eager.state, captured.state));
}

// A launch that does not ask early takes the cursors and positions that the launch ahead writes,
// though it starts before these are written.
template <class Run>
void expect_places_of_the_launch_ahead(const typename Run::Extents& e) {
  const Rings rings(Batch::draw(15, 4, 1, false), 20, 16);
  Run known(e, rings, 15), behind(e, rings, 15);
  run_all(known);
  WrittenPlaces places(rings.rows());
  cudaStream_t stream;
  kernels::check_cuda(cudaStreamCreate(&stream), "a stream");
  for (std::int64_t t = 0; t < rings.steps; ++t) {
    places.launch(at(rings.cursors.view(), t), at(rings.positions.view(), t), stream);
    behind.launch(t, 0, rings.rows(), {stream, false, places.cursors(), places.positions()});
    finish();
  }
  cudaStreamDestroy(stream);
  EXPECT_TRUE(same_bits(known.out, behind.out));
  EXPECT_TRUE(same_bits(known.state, behind.state));
}

/// ||a - b|| / ||b|| of the slot's state.
template <class S>
double state_error(const kernels::DeviceTensor<S, 4>& states, const Array<double, 4>& truth,
                   std::int64_t slot) {
  const Array<float, 4> got = states.host();
  double error = 0, norm = 0;
  for_each_element(at(truth.view(), slot), [&](const auto& index, double x) {
    const double d = double(got(slot, index[0], index[1], index[2])) - x;
    error += d * d;
    norm += x * x;
  });
  return std::sqrt(error / norm);
}

/// The laws that hold for both recurrences, as tests of a suite of Runs.
template <class Run>
class RingLaws : public GpuTest {};
TYPED_TEST_SUITE_P(RingLaws);

// Of the second extents, a row alone and the rows together are launches of other tilings.
TYPED_TEST_P(RingLaws, aRowDoesNotDependOnItsBatch) {
  expect_rows_alone_to_agree<TypeParam>(TypeParam::kUsual);
  expect_rows_alone_to_agree<TypeParam>(TypeParam::kMany);
}
TYPED_TEST_P(RingLaws, aFlushIsTheStepsBitByBit) {
  for (const std::int64_t count : {1, 7, 15, 16})
    expect_flush_to_be_the_steps<TypeParam>(TypeParam::kUsual, count);
}
TYPED_TEST_P(RingLaws, earlyStatesAreThoseOfTheStepBefore) {
  expect_early_states_to_agree<TypeParam>(TypeParam::kUsual);
}
TYPED_TEST_P(RingLaws, placesAreThoseOfTheLaunchAhead) {
  expect_places_of_the_launch_ahead<TypeParam>(TypeParam::kUsual);
}
TYPED_TEST_P(RingLaws, rowsWithoutASlotWriteNothing) {
  expect_rows_without_a_slot_to_write_nothing<TypeParam>(TypeParam::kUsual);
}
TYPED_TEST_P(RingLaws, graphsTakeOtherCursors) {
  expect_graphs_to_take_other_cursors<TypeParam>(TypeParam::kUsual);
}
// Every tiling, windows that are a power of two and that are not, rows at different positions.
TYPED_TEST_P(RingLaws, aDecodeIsTheReferences) {
  for (const auto& e : TypeParam::kTilings) expect_ring_agreement<TypeParam>(e, 3, 20, 16, 1);
  for (const std::int64_t window : {1, 2, 5, 16}) {
    expect_ring_agreement<TypeParam>(TypeParam::kUsual, 1, 2 * window + 3, window, 2);
    expect_ring_agreement<TypeParam>(TypeParam::kOther, 9, 2 * window + 3, window, 2);
  }
}
// Gates that hardly decay, where errors add up: a state that is written once in 16 tokens is at
// most twice as wrong as one that is written at each.
TYPED_TEST_P(RingLaws, aThousandTokensAreNoWorseThanSnapshots) {
  Batch batch = Batch::draw(13, 2, 1, false);
  batch.indices = ints({2, 0});
  const Rings rings(batch, 1024, 16, 0);
  TypeParam ring(TypeParam::kUsual, rings, 13, 0.02), snapshots(TypeParam::kUsual, rings, 13, 0.02);
  run_all(ring);
  for (std::int64_t t = 0; t < rings.steps; ++t) snapshots.launch_snapshots(t);
  finish();
  const RingAnswer truth = ring.template answer<double>({});
  for (const std::int64_t slot : {0, 2}) {
    const double error = state_error(ring.state, truth.state, slot);
    EXPECT_LE(error, 2 * state_error(snapshots.state, truth.state, slot));
    EXPECT_LE(error, sizeof(typename TypeParam::State) == 4 ? 2e-6 : 2e-2);
  }
}
REGISTER_TYPED_TEST_SUITE_P(RingLaws, aRowDoesNotDependOnItsBatch, aFlushIsTheStepsBitByBit,
                            earlyStatesAreThoseOfTheStepBefore, placesAreThoseOfTheLaunchAhead,
                            rowsWithoutASlotWriteNothing, graphsTakeOtherCursors,
                            aDecodeIsTheReferences, aThousandTokensAreNoWorseThanSnapshots);

}  // namespace lockstep::testing_support
