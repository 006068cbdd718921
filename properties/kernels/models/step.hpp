// Tests that every layer's decode step has. Device has inputs and results of a batch on the device,
// x, window, state and out among them: launch(stream) and run() are the one launch, run_apart() the
// three that it replaces.
#pragma once

#include "properties/support/gpu.hpp"

namespace lockstep::testing_support {

/// One launch leaves the bits of three, but for the outputs of padded rows, which are 0. Returns
/// the note of the launch.
template <class Device>
std::string expect_the_steps_bits(Device whole, Device apart, const Batch& batch) {
  whole.run();
  std::string note = kernels::last_launch.text();
  apart.run_apart();
  SCOPED_TRACE(note + ", rows " + std::to_string(batch.rows()) + ", parts " +
               std::to_string(whole.question.parts));
  EXPECT_TRUE(same_bits(whole.window, apart.window)) << "windows";
  EXPECT_TRUE(same_bits(whole.state, apart.state)) << "states";
  EXPECT_TRUE(whole.out.guards_intact() && whole.state.guards_intact());
  const auto found = whole.out.host(), wanted = apart.out.host();
  for (std::int64_t n = 0; n < batch.rows(); ++n) {
    const auto row = at(found.view(), n);
    if (batch.indices(n) >= 0)
      EXPECT_TRUE(same_bits(row, at(wanted.view(), n))) << "row " << n;
    else
      for_each_element(row, [](const auto&, float y) { EXPECT_EQ(y, 0); });
  }
  return note;
}

/// A server's graph is captured once and replayed for other slots and other tokens, step by step.
/// make(batch, seed) is a Device, whose inputs are of the seed.
template <class Make>
void expect_replays_follow_the_slots(Make make) {
  const Batch batch = Batch::draw(11, 6, 1, false);
  Batch other = batch;
  Sizes used;
  for (std::int64_t n = 0; n < 6; ++n) {  // a slot for each row, none twice
    other.indices(n) = batch.indices(n) < 0 ? 0 : (batch.indices(n) + 1) % 9;
    while (std::count(used.begin(), used.end(), other.indices(n)) > 0)
      other.indices(n) = (other.indices(n) + 1) % static_cast<std::int32_t>(batch.slots);
    used.push_back(other.indices(n));
  }
  auto captured = make(batch, 1), direct = make(other, 1), next = make(batch, 2);
  direct.x.set(next.x.elements());
  replay_behind_change([&](cudaStream_t stream) { captured.launch(stream); },
                       [&] {
                         captured.x.set(next.x.elements());
                         captured.indices.indices.set(direct.indices.indices.elements());
                       });
  direct.run();
  EXPECT_TRUE(same_bits(captured.out, direct.out));
  EXPECT_TRUE(same_bits(captured.state, direct.state));
  EXPECT_TRUE(same_bits(captured.window, direct.window));
}

/// Launches may overlap, so that a layer's step begins while the step before it in the same slots
/// still runs; 40 steps of the same rows are those of three launches each. make(batch, parts) is a
/// Device.
template <class Make>
void expect_steps_wait(Make make) {
  const Batch batch = Batch::draw(5, 5, 1, false);
  for (const int parts : {1, 4, 8}) {
    auto whole = make(batch, parts), apart = make(batch, 0);
    for (int step = 0; step < 40; ++step) whole.launch();
    for (int step = 0; step < 40; ++step) apart.run_apart();
    finish();
    EXPECT_TRUE(same_bits(whole.state, apart.state));
    EXPECT_TRUE(same_bits(whole.window, apart.window));
  }
}

}  // namespace lockstep::testing_support
