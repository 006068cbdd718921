// Laws of a decode that is divided between parts, which say nothing of its numbers: for each kernel
// of it. Question, In and On are the kernel's test's own: a case, its inputs, and these on the
// device.
#pragma once

#include "properties/support/gpu.hpp"

namespace lockstep::testing_support {

/// Parts that finish in another order are merged in the same one, and counters are left as found.
template <class Question, class In, class On>
void expect_the_same_bits_of_every_launch() {
  for (const std::int64_t heads : {16, 70}) {
    const Question question{.lengths = {900, 20, 1700, 64}, .heads = heads};
    const In in(question, 9);
    On first(in), again(in);
    first.run(question);
    finish();
    for (int i = 0; i < 50; ++i) again.run(question);
    finish();
    EXPECT_TRUE(same_bits(again.out, first.out));
    EXPECT_TRUE(same_bits(again.lse, first.lse));
  }
}

/// A captured launch is divided by the lengths that it finds: longer requests than at its capture
/// are whole, and places of requests that are gone have length 0.
template <class Question, class In, class On>
void expect_a_captured_launch_to_serve_other_lengths() {
  const Question question{.lengths = {1000, 70, 640, 5}};
  const In in(question, 4);
  On captured(in), direct(in);
  direct.run(question);
  finish();
  captured.lengths.set({64, 0, 0, 1});
  replay_behind_change([&](cudaStream_t stream) { captured.run(question, stream); },
                       [&] {
                         captured.lengths.set({1000, 70, 640, 5});
                       });
  EXPECT_TRUE(same_bits(captured.out, direct.out));
  EXPECT_TRUE(same_bits(captured.lse, direct.lse));
}

}  // namespace lockstep::testing_support
