// Laws of the convolution. Outputs and states are equal by bits: each is one sum in one order.
#include "reference/recurrent/causal_conv1d.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"
#include "properties/support/special_values.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::Activation;
using reference::causal_conv1d;
using reference::causal_conv1d_padded;
using reference::causal_conv1d_update;
using Inputs = reference::CausalConv1dInputs<double>;

/// A layer with its input; the state has `extra` columns more than W - 1.
struct Convolution {
  explicit Convolution(std::int64_t tokens, std::int64_t slots = 1, std::int64_t extra = -1)
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

// The definition, term by term: a window of W inputs that ends with the token, zeros or the state
// before the first.
RC_GTEST_PROP(CausalConv1d, isTheDefinition, ()) {
  const std::int64_t T = draw_length(8);
  const Convolution conv(T);
  const bool activates = *rc::gen::arbitrary<bool>(), biased = *rc::gen::arbitrary<bool>();
  Inputs in = conv.inputs();
  in.activation = activates ? Activation::silu : Activation::none;
  if (!biased) in.bias = {};
  auto out = conv.output();
  auto state = conv.state;
  causal_conv1d<double>(in, state.view(), out);
  const auto input = [&](std::int64_t p, std::int64_t d) {
    return p >= 0 ? conv.x(p, d) : conv.state(0, d, conv.C + p);
  };
  for (std::int64_t d = 0; d < conv.D; ++d) {
    for (std::int64_t t = 0; t < T; ++t) {
      double y = biased ? conv.bias(d) : 0;
      for (std::int64_t k = 0; k < conv.W; ++k)
        y += conv.weight(d, k) * input(t - (conv.W - 1) + k, d);
      RC_ASSERT(out(t, d) == (activates ? y / (1 + std::exp(-y)) : y));
    }
    for (std::int64_t c = 0; c < conv.C; ++c) RC_ASSERT(state(0, d, c) == input(T - conv.C + c, d));
  }
}

// A state carried across a cut equals the state of the uncut run: prefix caching is sound.
RC_GTEST_PROP(CausalConv1d, aCutRunIsTheUncutRun, ()) {
  const std::int64_t T = draw_length(65);
  const Convolution conv(T);
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
  const Convolution conv(T);
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
RC_GTEST_PROP(CausalConv1d, aRowDoesNotDependOnItsBatch, ()) {
  const Sizes lengths = draw_row_lengths(5, 16);
  const auto rows = static_cast<std::int64_t>(lengths.size());
  const Convolution conv(sum(lengths) + 2, rows + 3);
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
  const Convolution conv(B * S, B);
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
  const Convolution conv(T);
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
  const Convolution conv(T, 2);
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
  const Convolution conv(steps * (1 + drafts), 3, drafts);
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

// A tree with accepted counts: the pool's row is only read, from the column of the last accepted
// token on, and each token's snapshot is the window that the next one would see.
RC_GTEST_PROP(CausalConv1d, aTreeStartsAtTheAcceptedColumn, ()) {
  const std::int64_t T = 1 + draw_length(7), accepted = *rc::gen::inRange<std::int64_t>(1, 6);
  const Convolution conv(T, 2, 6);
  const bool tree = *rc::gen::arbitrary<bool>();
  const auto drawn = draw_parents(T, true);
  const std::optional<IndexView> parents =
      tree ? std::optional<IndexView>(drawn.view()) : std::nullopt;
  const auto starts = starts_of({T}), table = ints({1}), counts = ints({accepted});
  Inputs in = conv.inputs();
  in.query_start_loc = starts.view();
  in.slots = {.table = make_view(table.data(), Shape<2>{1, 1}), .num_accepted = counts.view()};
  auto state = conv.state;
  for (std::int64_t d = 0; d < conv.D; ++d)  // after the history, whatever earlier drafts left
    for (std::int64_t c = accepted + conv.W - 2; c < conv.C; ++c) state(1, d, c) = kNan;
  const auto before = state;
  auto out = conv.output();
  Array<double, 3> snapshots(Shape<3>{T, conv.D, conv.W - 1});
  causal_conv1d_update<double>(in, state.view(), out, parents, snapshots.view());
  RC_ASSERT(same_bits(state, before));
  for (std::int64_t t = 0; t < T; ++t) {
    Array<double, 3> window(Shape<3>{1, conv.D, conv.W - 1});
    for (std::int64_t d = 0; d < conv.D; ++d)
      for (std::int64_t c = 0; c < conv.W - 1; ++c) window(0, d, c) = state(1, d, accepted - 1 + c);
    Array<double, 2> last(Shape<2>{1, conv.D}, 0.0);
    for (const std::int64_t node : path_to(parents, {0, T}, t))
      causal_conv1d_update<double>(conv.inputs(cut(conv.x.view(), node, node + 1)), window.view(),
                                   last);
    RC_ASSERT(same_bits(at(last.view(), 0), at(out.view(), t)));
    RC_ASSERT(same_bits(at(window.view(), 0), at(snapshots.view(), t)));
  }
}

// Padding rows of a captured graph: their output is zero, and no slot changes.
RC_GTEST_PROP(CausalConv1d, rowsWithoutASlotWriteNothing, ()) {
  const Convolution conv(3, 2);
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
TEST(CausalConv1d, refusesInvalidSlots) {
  Array<double, 2> x(Shape<2>{2, 3}, 0.0), weight(Shape<2>{3, 2}, 0.0);
  Array<double, 3> state(Shape<3>{2, 3, 1}, 0.0);
  for (const Sizes& slots : {Sizes{0, 2}, Sizes{1, 1}}) {
    const auto indices = ints(slots);
    const Inputs in{.x = x, .weight = weight, .slots = {.indices = indices.view()}};
    EXPECT_THROW(causal_conv1d_update<double>(in, state.view(), x.view()), ContractViolation);
  }
  Array<double, 3> short_state(Shape<3>{2, 3, 0}, 0.0);
  const Inputs in{.x = x, .weight = weight};
  EXPECT_THROW(causal_conv1d_update<double>(in, short_state.view(), x.view()), ContractViolation);
}

// Shapes that do not fit are errors by name.
TEST(CausalConv1d, refusesShapesThatDoNotFit) {
  const Array<double, 2> x(Shape<2>{2, 3}, 0.0), weight(Shape<2>{3, 2}, 0.0), odd(Shape<2>{2, 2});
  const Array<double, 1> bias(Shape<1>{2}, 0.0);
  Array<double, 2> out(Shape<2>{2, 3}), narrow(Shape<2>{2, 2});
  Array<double, 3> state(Shape<3>{2, 3, 1}, 0.0);
  const auto both = [&](const Inputs& in, Array<double, 2>& y) {
    EXPECT_THROW(causal_conv1d<double>(in, state.view(), y), ContractViolation);
    EXPECT_THROW(causal_conv1d_update<double>(in, state.view(), y), ContractViolation);
  };
  both({.x = x, .weight = odd}, out);
  both({.x = x, .weight = weight, .bias = bias.view()}, out);
  both({.x = x, .weight = weight}, narrow);
  const auto twice = ints({1, 1}), starts = starts_of({1, 1});
  both({.x = x,
        .weight = weight,
        .query_start_loc = starts.view(),
        .slots = {.indices = twice.view()}},
       out);
  const auto lengths = ints({3});
  Array<double, 3> padded(Shape<3>{1, 2, 3});
  EXPECT_THROW(causal_conv1d_padded<double>({.x = x, .weight = weight},
                                            make_view<const double>(x.data(), Shape<3>{1, 2, 3}),
                                            lengths.view(), state.view(), padded.view()),
               ContractViolation);
  const Inputs one_slot{.x = x, .weight = weight, .slots = {.indices = twice.view()}};
  Array<double, 3> two(Shape<3>{2, 1, 3});
  EXPECT_THROW(
      causal_conv1d_padded<double>(one_slot, make_view<const double>(x.data(), Shape<3>{2, 1, 3}),
                                   {}, state.view(), two.view()),
      ContractViolation)
      << "two rows of one slot";
}

// A padded batch goes by rows of its own: padding rows write nothing, first chunks start from
// zeros, and without lengths all tokens count.
TEST(CausalConv1d, paddedRowsHaveSlotsAndBeginnings) {
  const auto x = on_grid<double>(Shape<3>{3, 2, 4}, {.seed = 1});
  const auto weight = on_grid<double>(Shape<2>{4, 3}, {.seed = 2});
  const auto before = on_grid<double>(Shape<3>{4, 4, 2}, {.seed = 3});
  const auto slots = ints({2, -1, 0});
  Array<bool, 1> resumes(Shape<1>{3}, true);
  resumes(2) = false;
  auto state = before;
  Array<double, 3> out(x.shape());
  causal_conv1d_padded<double>({.x = at(x.view(), 0),
                                .weight = weight,
                                .slots = {.indices = slots.view()},
                                .has_initial_state = resumes.view()},
                               x.view(), {}, state.view(), out.view());
  auto expected = before;
  fill(at(expected.view(), 0), 0.0);
  for (const std::int64_t row : {0, 2}) {
    Array<double, 2> alone(Shape<2>{2, 4});
    causal_conv1d<double>({.x = at(x.view(), row), .weight = weight},
                          cut(expected.view(), slots(row), slots(row) + 1), alone);
    EXPECT_TRUE(same_bits(at(out.view(), row), alone.view()));
  }
  EXPECT_TRUE(same_bits(state, expected));
  for_each_element(at(out.view(), 1), [](const auto&, double y) { EXPECT_EQ(y, 0); });
}

// A prefill's row without a slot writes nothing, and its output is 0.
TEST(CausalConv1d, prefillRowsWithoutASlotWriteNothing) {
  const auto x = on_grid<double>(Shape<2>{2, 2}, {.seed = 1});
  const auto weight = on_grid<double>(Shape<2>{2, 3}, {.seed = 2});
  auto state = on_grid<double>(Shape<3>{1, 2, 2}, {.seed = 3});
  const auto before = state;
  const auto slots = ints({-1});
  Array<double, 2> out(x.shape());
  causal_conv1d<double>({.x = x, .weight = weight, .slots = {.indices = slots.view()}},
                        state.view(), out);
  EXPECT_TRUE(same_bits(state, before));
  for (const double y : out) EXPECT_EQ(y, 0);
}

// Storage points: outputs and states are rounded when they are stored, and only then.
TEST(CausalConv1d, roundsWhereItStores) {
  const auto x = on_grid<double>(Shape<2>{3, 2}, {.seed = 1});
  Array<double, 2> weight = on_grid<double>(Shape<2>{2, 3}, {.seed = 2});
  for (double& w : weight) w += 1.0 / 1024;
  auto state = on_grid<double>(Shape<3>{1, 2, 2}, {.seed = 3});
  for (double& s : state) s += 1.0 / 1024;
  const auto starts = starts_of({3});
  for (const int how : {0, 1, 2}) {
    auto exact_state = state, stored = state;
    Array<double, 2> exact(x.shape()), out(x.shape());
    Array<double, 3> snapshots(Shape<3>{3, 2, 2}), exact_snapshots = snapshots;
    Inputs in{.x = x, .weight = weight, .query_start_loc = starts.view()};
    Inputs narrow = in;
    narrow.storage = {.state = Format::e4m3, .output = Format::bf16};
    const auto run = [&](const Inputs& with, auto& s, auto& y, auto& shots) {
      if (how == 0) causal_conv1d<double>(with, s.view(), y);
      if (how == 1) causal_conv1d_update<double>(with, s.view(), y);
      if (how == 2) causal_conv1d_update<double>(with, s.view(), y, {}, shots.view());
    };
    run(in, exact_state, exact, exact_snapshots);
    run(narrow, stored, out, snapshots);
    for (std::int64_t i = 0; i < out.size(); ++i)
      EXPECT_EQ(out.data()[i], rounded(exact.data()[i], Format::bf16));
    const auto& found = how == 2 ? snapshots : stored;
    const auto& truth = how == 2 ? exact_snapshots : exact_state;
    for (std::int64_t i = 0; i < found.size(); ++i)
      EXPECT_EQ(found.data()[i], rounded(truth.data()[i], Format::e4m3));
  }
}

TEST(CausalConv1d, snapshotsAreAsWideAsStates) {
  Array<double, 2> x(Shape<2>{1, 2}, 0.0), weight(Shape<2>{2, 3}, 0.0), out(Shape<2>{1, 2});
  Array<double, 3> state(Shape<3>{1, 2, 3}, 0.0), snapshots(Shape<3>{1, 2, 2}, 0.0);
  const Inputs in{.x = x, .weight = weight};
  EXPECT_THROW(causal_conv1d_update<double>(in, state.view(), out, {}, snapshots.view()),
               ContractViolation);
  Array<double, 3> few(Shape<3>{0, 2, 3}, 0.0);
  EXPECT_THROW(causal_conv1d_update<double>(in, state.view(), out, {}, few.view()),
               ContractViolation);
}

// A verification only reads its slots: two rows may verify against one state.
TEST(CausalConv1d, twoRowsMayVerifyAgainstOneState) {
  const auto x = on_grid<double>(Shape<2>{2, 2}, {.seed = 1});
  const auto weight = on_grid<double>(Shape<2>{2, 3}, {.seed = 2});
  auto state = on_grid<double>(Shape<3>{1, 2, 2}, {.seed = 3});
  const auto slots = ints({0, 0}), parents = ints({-1, -1});
  const Inputs in{.x = x, .weight = weight, .slots = {.indices = slots.view()}};
  Array<double, 2> out(x.shape());
  Array<double, 3> snapshots(Shape<3>{2, 2, 2});
  EXPECT_NO_THROW(causal_conv1d_update<double>(in, state.view(), out, {}, snapshots.view()));
  EXPECT_NO_THROW(causal_conv1d_update<double>(in, state.view(), out, parents.view()));
}

// A row's conv state lies in the first slot of its row of the table.
TEST(CausalConv1d, tablesNameTheirFirstSlots) {
  const auto x = on_grid<double>(Shape<2>{2, 2}, {.seed = 1});
  const auto weight = on_grid<double>(Shape<2>{2, 3}, {.seed = 2});
  const auto before = on_grid<double>(Shape<3>{7, 2, 4}, {.seed = 3});
  const auto entries = ints({4, 0, 1, 6, 2, 3}), counts = ints({1, 2}), starts = starts_of({1, 1});
  auto state = before, expected = before;
  Array<double, 2> out(x.shape());
  causal_conv1d_update<double>({.x = x,
                                .weight = weight,
                                .query_start_loc = starts.view(),
                                .slots = {.table = make_view(entries.data(), Shape<2>{2, 3}),
                                          .num_accepted = counts.view()}},
                               state.view(), out);
  for (std::int64_t row = 0; row < 2; ++row) {
    const std::int64_t slot = entries(3 * row), first = counts(row) - 1;
    for (std::int64_t d = 0; d < 2; ++d) {
      double y = weight(d, 2) * x(row, d);
      for (std::int64_t k = 0; k < 2; ++k) y += weight(d, k) * before(slot, d, first + k);
      EXPECT_DOUBLE_EQ(out(row, d), y);
      expected(slot, d, 0) = before(slot, d, first + 1);
      expected(slot, d, 1) = x(row, d);
    }
  }
  EXPECT_TRUE(same_bits(state, expected));
}

}  // namespace
}  // namespace lockstep
