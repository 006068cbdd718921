// Laws of the convolution. Outputs and states are equal by bits: each is one sum in one order.
#include "reference/causal_conv1d.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::Activation;
using reference::causal_conv1d;
using reference::causal_conv1d_padded;
using reference::causal_conv1d_update;
using Inputs = reference::CausalConv1dInputs<double>;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// A layer with its input; the state has `extra` columns more than W - 1.
struct Conv {
  explicit Conv(std::int64_t tokens, std::int64_t slots = 1, std::int64_t extra = -1)
      : seed(draw_seed()),
        D(*rc::gen::inRange<std::int64_t>(1, 6)),
        W(*rc::gen::inRange<std::int64_t>(2, 5)),
        C(W - 1 + (extra < 0 ? *rc::gen::inRange<std::int64_t>(0, 2) : extra)),
        x(on_grid<double>(Shape<2>{tokens, D}, {.seed = seed, .stream = 1})),
        weight(on_grid<double>(Shape<2>{D, W}, {.seed = seed, .stream = 2})),
        bias(on_grid<double>(Shape<1>{D}, {.seed = seed, .stream = 3})),
        state(on_grid<double>(Shape<3>{slots, D, C}, {.seed = seed, .stream = 4})) {}

  Inputs inputs(const TensorView<const double, 2>& tokens) const {
    return {.x = tokens, .weight = weight, .bias = bias.view(), .activation = Activation::silu};
  }
  Inputs inputs() const { return inputs(x.view()); }
  Array<double, 2> output() const { return Array<double, 2>(x.shape()); }

  std::uint64_t seed;
  std::int64_t D, W, C;
  Array<double, 2> x, weight;
  Array<double, 1> bias;
  Array<double, 3> state;
};

// A state carried across a cut equals the state of the uncut run: prefix caching is sound.
RC_GTEST_PROP(CausalConv1d, aCutRunIsTheUncutRun, ()) {
  const std::int64_t T = draw_length(65);
  const Conv conv(T);
  auto whole = conv.output(), pieces = conv.output();
  auto state = conv.state, carried = conv.state;
  causal_conv1d<double>(conv.inputs(), state.view(), whole);
  std::int64_t at = 0;
  for (const std::int64_t size : draw_pieces(T)) {
    const auto tokens = cut(conv.x.view(), at, at + size);
    causal_conv1d<double>(conv.inputs(tokens), carried.view(), cut(pieces.view(), at, at + size));
    at += size;
  }
  RC_ASSERT(same_bits(whole, pieces));
  RC_ASSERT(same_bits(state, carried));
}

RC_GTEST_PROP(CausalConv1d, aPrefillIsItsDecodes, ()) {
  const std::int64_t T = draw_length(17);
  const Conv conv(T);
  auto whole = conv.output(), steps = conv.output();
  auto state = conv.state, carried = conv.state;
  causal_conv1d<double>(conv.inputs(), state.view(), whole);
  for (std::int64_t t = 0; t < T; ++t)
    causal_conv1d_update<double>(conv.inputs(cut(conv.x.view(), t, t + 1)), carried.view(),
                                 cut(steps.view(), t, t + 1));
  RC_ASSERT(same_bits(whole, steps));
  RC_ASSERT(same_bits(state, carried));
}

// Rows of a packed batch do not see each other, whatever slots they use; other slots keep their
// bytes.
RC_GTEST_PROP(CausalConv1d, aRowIsAloneInItsBatch, ()) {
  const Sizes lengths = draw_row_lengths(5, 16);
  const auto rows = static_cast<std::int64_t>(lengths.size());
  const Conv conv(sum(lengths) + 2, rows + 3);
  const auto starts = starts_of(lengths);
  Sizes slots = draw_order(rows + 3);
  slots.resize(lengths.size());
  const auto indices = ints(slots);
  auto out = conv.output();
  auto state = conv.state, expected = conv.state;
  Inputs in = conv.inputs();
  in.query_start_loc = starts.view();
  in.slots.indices = indices.view();
  causal_conv1d<double>(in, state.view(), out);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto slot = slots[static_cast<std::size_t>(row)];
    const auto tokens = cut(conv.x.view(), starts(row), starts(row + 1));
    Array<double, 2> alone(shape_of(tokens));
    causal_conv1d<double>(conv.inputs(tokens), cut(expected.view(), slot, slot + 1), alone);
    RC_ASSERT(same_bits(alone.view(), cut(out.view(), starts(row), starts(row + 1))));
  }
  RC_ASSERT(same_bits(state, expected));
  for (std::int64_t t = sum(lengths); t < conv.x.extent(0); ++t)
    for (std::int64_t d = 0; d < conv.D; ++d) RC_ASSERT(out(t, d) == 0.0);
}

// A right-padded batch: the window and the state take nothing from behind a row's end.
RC_GTEST_PROP(CausalConv1d, paddingIsNotLookedAt, ()) {
  const std::int64_t B = *rc::gen::inRange<std::int64_t>(1, 4), S = draw_length(16);
  const Conv conv(B * S, B);
  Sizes lengths;
  for (std::int64_t b = 0; b < B; ++b) lengths.push_back(*rc::gen::inRange<std::int64_t>(0, S + 1));
  Array<double, 2> poisoned = conv.x;
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t t = lengths[static_cast<std::size_t>(b)]; t < S; ++t)
      for (std::int64_t d = 0; d < conv.D; ++d) poisoned(b * S + t, d) = kNan;
  const auto context_lengths = ints(lengths);
  const Shape<3> padded{B, S, conv.D};
  Array<double, 3> out(padded);
  auto state = conv.state, expected = conv.state;
  causal_conv1d_padded<double>(conv.inputs(), make_view<const double>(poisoned.data(), padded),
                               context_lengths.view(), state.view(), out);
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    const auto tokens = cut(conv.x.view(), b * S, b * S + length);
    Array<double, 2> alone(shape_of(tokens));
    causal_conv1d<double>(conv.inputs(tokens), cut(expected.view(), b, b + 1), alone);
    RC_ASSERT(same_bits(alone.view(), cut(at(out.view(), b), 0, length)));
    for (std::int64_t t = length; t < S; ++t)
      for (std::int64_t d = 0; d < conv.D; ++d) RC_ASSERT(out(b, t, d) == 0.0);
  }
  RC_ASSERT(same_bits(state, expected));
}

RC_GTEST_PROP(CausalConv1d, aFirstChunkStartsFromZerosOnADirtySlot, ()) {
  const std::int64_t T = draw_length(8);
  const Conv conv(T);
  auto out = conv.output(), expected = conv.output();
  Array<double, 3> dirty(conv.state.shape(), kNan), zeros(conv.state.shape(), 0.0);
  const bool no = false;
  Inputs in = conv.inputs();
  in.has_initial_state = make_view(&no, Shape<1>{1});
  causal_conv1d<double>(in, dirty.view(), out);
  causal_conv1d<double>(conv.inputs(), zeros.view(), expected);
  RC_ASSERT(same_bits(out, expected));
  RC_ASSERT(same_bits(dirty, zeros));
  auto stateless = conv.output();
  causal_conv1d<double>(conv.inputs(), {}, stateless);
  RC_ASSERT(same_bits(out, stateless));
}

// A draft that is not accepted leaves no trace, and each snapshot is the state of its prefix.
RC_GTEST_PROP(CausalConv1d, aVerificationReadsTheStateAndSnapshotsEachPath, ()) {
  const std::int64_t T = draw_length(8);
  const Conv conv(T, 2);
  const auto parents = draw_parents(T, true);
  const auto starts = starts_of({T});
  const auto indices = ints({1});
  auto out = conv.output();
  auto state = conv.state;
  Array<double, 3> snapshots(Shape<3>{T, conv.D, conv.C});
  Inputs in = conv.inputs();
  in.query_start_loc = starts.view();
  in.slots.indices = indices.view();
  causal_conv1d_update<double>(in, state.view(), out, parents.view(), snapshots.view());
  RC_ASSERT(same_bits(state, conv.state));
  for (std::int64_t t = 0; t < T; ++t) {
    auto replayed = conv.state;
    Array<double, 2> last(Shape<2>{1, conv.D}, 0.0);
    for (const std::int64_t node : path_to(parents.view(), {0, T}, t))
      causal_conv1d_update<double>(conv.inputs(cut(conv.x.view(), node, node + 1)),
                                   cut(replayed.view(), 1, 2), last);
    RC_ASSERT(same_bits(at(last.view(), 0), at(out.view(), t)));
    RC_ASSERT(same_bits(at(replayed.view(), 1), at(snapshots.view(), t)));
  }
}

TEST(CausalConv1d, aTokenWithoutAPathToTheRootIsInvalid) {
  const auto parents = ints({-1, 0, 2, 1, 2, -1});
  const auto valid = [&](std::int64_t t) { return path_to(parents.view(), {0, 6}, t); };
  EXPECT_EQ(valid(3), (Sizes{0, 1, 3}));
  for (const std::int64_t t : {2, 4, 5}) EXPECT_TRUE(valid(t).empty()) << t;
  EXPECT_TRUE(path_to(ints({0, 0}).view(), {0, 2}, 1).empty()) << "the root has no parent";
}

// vLLM's speculative conv state: whatever is drafted and accepted, the outputs at accepted tokens
// are those of the accepted text alone.
RC_GTEST_PROP(CausalConv1d, speculativeStepsAreTheAcceptedText, ()) {
  const std::int64_t drafts = *rc::gen::inRange<std::int64_t>(0, 5);
  const std::int64_t steps = *rc::gen::inRange<std::int64_t>(1, 7);
  const Conv conv(steps * (1 + drafts), 3, drafts);
  auto state = conv.state;
  auto plain = make_view(state.data(), Shape<3>{3, conv.D, conv.W - 1},
                         Shape<3>{conv.D * conv.C, conv.C, 1});
  Array<double, 3> expected(Shape<3>{1, conv.D, conv.W - 1});
  mapped(at(expected.view(), 0)) = mapped(at(plain, 2));
  std::int64_t accepted = 1;
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t size = 1 + *rc::gen::inRange<std::int64_t>(0, drafts + 1);
    const auto tokens = cut(conv.x.view(), step * (1 + drafts), step * (1 + drafts) + size);
    const auto starts = starts_of({size});
    const auto table = ints({2});
    const auto counts = ints({accepted});
    Inputs in = conv.inputs(tokens);
    in.query_start_loc = starts.view();
    in.slots = {.table = make_view(table.data(), Shape<2>{1, 1}), .num_accepted = counts.view()};
    Array<double, 2> out(shape_of(tokens));
    causal_conv1d_update<double>(in, state.view(), out);
    accepted = *rc::gen::inRange<std::int64_t>(1, size + 1);
    for (std::int64_t t = 0; t < accepted; ++t) {
      Array<double, 2> one(Shape<2>{1, conv.D});
      causal_conv1d_update<double>(conv.inputs(cut(tokens, t, t + 1)), expected.view(), one);
      RC_ASSERT(same_bits(at(one.view(), 0), at(out.view(), t)));
    }
  }
  RC_ASSERT(same_bits(cut(state.view(), 0, 2), cut(conv.state.view(), 0, 2)));
}

// Padding rows of a captured graph: their output is zero, and no slot changes.
RC_GTEST_PROP(CausalConv1d, rowsWithoutASlotWriteNothing, ()) {
  const Conv conv(3, 2);
  const std::int32_t pad = *rc::gen::element(-1, 0);
  const Array<std::int32_t, 1> indices = ints({pad, 1, pad});
  Inputs in = conv.inputs();
  in.slots = {.indices = indices.view(), .pad_slot_id = pad};
  auto out = conv.output();
  auto state = conv.state;
  causal_conv1d_update<double>(in, state.view(), out);
  for (std::int64_t d = 0; d < conv.D; ++d) RC_ASSERT(out(0, d) == 0.0 && out(2, d) == 0.0);
  RC_ASSERT(same_bits(at(state.view(), 0), at(conv.state.view(), 0)));
  auto alone = conv.state;
  Array<double, 2> one(Shape<2>{1, conv.D});
  causal_conv1d_update<double>(conv.inputs(cut(conv.x.view(), 1, 2)), cut(alone.view(), 1, 2), one);
  RC_ASSERT(same_bits(state, alone));
  RC_ASSERT(same_bits(at(one.view(), 0), at(out.view(), 1)));
}

// A state index that names no slot, or one slot for two rows, is an error by name.
TEST(CausalConv1d, refusesSlotsThatAreNone) {
  Array<double, 2> x(Shape<2>{2, 3}, 0.0), weight(Shape<2>{3, 2}, 0.0);
  Array<double, 3> state(Shape<3>{2, 3, 1}, 0.0);
  for (const Sizes& slots : {Sizes{0, 2}, Sizes{1, 1}}) {
    const auto indices = ints(slots);
    const Inputs in{.x = x, .weight = weight, .slots = {.indices = indices.view()}};
    EXPECT_THROW(causal_conv1d_update<double>(in, state.view(), x.view()), ContractViolation);
  }
  Array<double, 3> short_state(Shape<3>{2, 3, 0}, 0.0), long_state(Shape<3>{2, 3, 3}, 0.0);
  const Inputs in{.x = x, .weight = weight};
  EXPECT_THROW(causal_conv1d_update<double>(in, short_state.view(), x.view()), ContractViolation);
  EXPECT_THROW(causal_conv1d_update<double>(in, long_state.view(), x.view()), ContractViolation);
}

}  // namespace
}  // namespace lockstep
