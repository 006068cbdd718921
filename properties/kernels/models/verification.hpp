// Tests that every layer's verification has. Device has inputs and results of a batch on the
// device, x, window, state and out among them: launch(stream) and run() are the one launch,
// run_apart() the three that it replaces.
#pragma once

#include "properties/support/gpu.hpp"

namespace lockstep::testing_support {

/// Whether token t belongs to a row with slots.
inline bool has_slots(const Batch& batch, std::int64_t t) {
  for (std::int64_t n = 0; n < batch.rows(); ++n)
    if (batch.starts(n) <= t && t < batch.starts(n + 1)) return batch.table(n, 0) >= 0;
  return false;
}

/// One launch leaves the bits of three, but for the outputs of padding, which are 0. Returns the
/// note of the launch.
template <class Device>
std::string expect_the_launches_bits(Device whole, Device apart, const Batch& batch) {
  whole.run();
  std::string note = kernels::last_launch.text();
  apart.run_apart();
  SCOPED_TRACE(note + ", rows " + std::to_string(batch.rows()) + ", columns " +
               std::to_string(batch.columns));
  EXPECT_TRUE(same_bits(whole.window, apart.window)) << "windows";
  EXPECT_TRUE(same_bits(whole.state, apart.state)) << "states";
  EXPECT_TRUE(whole.out.guards_intact() && whole.state.guards_intact());
  const auto found = whole.out.host(), wanted = apart.out.host();
  for (std::int64_t t = 0; t < batch.tokens; ++t) {
    const auto outputs = at(found.view(), t);
    if (has_slots(batch, t))
      EXPECT_TRUE(same_bits(outputs, at(wanted.view(), t))) << "token " << t;
    else
      for_each_element(outputs, [](const auto&, float y) { EXPECT_EQ(y, 0); });
  }
  return note;
}

/// A table has a slot for each token of a row; a row that has more is left as it is. make(batch) is
/// a Device.
template <class Make>
void expect_longer_rows_leave_nothing(Make make) {
  Batch batch = Batch::draw(5, 3, 2, true);
  batch.lengths = {2, 3, 1};
  batch.starts = starts_of(batch.lengths);
  batch.tokens = 6;
  for (std::int64_t n = 0; n < 3; ++n)
    for (std::int64_t c = 0; c < 2; ++c) batch.table(n, c) = static_cast<std::int32_t>(2 * n + c);
  auto device = make(batch), before = make(batch);
  device.run();
  const auto out = device.out.host();
  const auto state = device.state.host(), old = before.state.host();
  const auto window = device.window.host(), old_window = before.window.host();
  for (std::int64_t t = 2; t < 5; ++t)
    for_each_element(at(out.view(), t), [](const auto&, float y) { EXPECT_EQ(y, 0); });
  for (const std::int64_t slot : {2, 3}) {
    EXPECT_TRUE(same_bits(at(state.view(), slot), at(old.view(), slot)));
    EXPECT_TRUE(same_bits(at(window.view(), slot), at(old_window.view(), slot)));
  }
  EXPECT_FALSE(same_bits(at(state.view(), 4), at(old.view(), 4)));
}

/// A server's graph is captured once and replayed for other tokens, counts and slots. make(batch,
/// seed) is a Device, whose inputs are of the seed; the tokens' inputs of `inputs(device)` change.
template <class Make, class Inputs>
void expect_replays_follow_the_counts(Make make, Inputs inputs) {
  Batch batch = Batch::draw(11, 6, 4, true), other = batch;
  for (std::int64_t n = 0; n < 6; ++n) {
    other.accepted(n) = 1 + (batch.accepted(n) + 1) % 4;
    for (std::int64_t c = 0; c < 4; ++c) other.table(n, c) = static_cast<std::int32_t>(4 * n + c);
  }
  std::swap(other.lengths[0], other.lengths[5]);
  other.starts = starts_of(other.lengths);
  auto captured = make(batch, 1), direct = make(other, 1), next = make(batch, 2);
  inputs(direct).set(inputs(next).elements());
  replay_behind_change([&](cudaStream_t stream) { captured.launch(stream); },
                       [&] {
                         inputs(captured).set(inputs(next).elements());
                         captured.indices.table.set(direct.indices.table.elements());
                         captured.indices.starts.set(direct.indices.starts.elements());
                         captured.indices.accepted.set(direct.indices.accepted.elements());
                       });
  direct.run();
  EXPECT_TRUE(same_bits(captured.out, direct.out));
  EXPECT_TRUE(same_bits(captured.state, direct.state));
  EXPECT_TRUE(same_bits(captured.window, direct.window));
}

/// Launches may overlap, so that a verification begins while the one before it in the same slots
/// still runs; 10 of the same rows are those of three launches each. make(batch, parts) is a
/// Device.
template <class Make>
void expect_verifications_wait(Make make) {
  const Batch batch = Batch::draw(5, 5, 4, true);
  for (const int parts : {1, 4}) {
    auto whole = make(batch, parts), apart = make(batch, 0);
    for (int step = 0; step < 10; ++step) whole.launch();
    for (int step = 0; step < 10; ++step) apart.run_apart();
    finish();
    EXPECT_TRUE(same_bits(whole.state, apart.state));
    EXPECT_TRUE(same_bits(whole.window, apart.window));
  }
}

}  // namespace lockstep::testing_support
