// Laws that every recurrence obeys: Mamba2 and the gated delta rule, by the same sentences.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/recurrences.hpp"
#include "properties/support/special_values.hpp"
#include "reference/recurrent/speculative_commit.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
constexpr double kSameForm = 0;       // the same operations in the same order: by bits
constexpr double kOtherForm = 1e-12;  // another algebraic form, in double

template <class Run>
class Recurrence : public testing::Test {};
using Runs = testing::Types<Mamba2Run<double>, GatedDeltaRun<double>>;
TYPED_TEST_SUITE(Recurrence, Runs);

/// RapidCheck's cases inside a typed test of GoogleTest.
template <class Law>
void holds(Law law) {
  EXPECT_TRUE(rc::check(law));
}

template <std::size_t Rank>
bool agree(const Array<double, Rank>& a, const Array<double, Rank>& b, double tolerance) {
  for (const double e : a)
    if (!std::isfinite(e)) return false;  // what nobody wrote is NaN on both sides
  if (tolerance == kSameForm) return same_bits(a, b);
  const Difference found = difference(a, b);
  // An output may cancel: what it is a sum of has the size of the test data, about 1.
  if (found.misplaced == 0 && found.norm <= tolerance * (1 + found.expected_norm)) return true;
  RC_LOG() << found.text(Format::exact) << "\n";
  return false;
}

// A state carried across a cut equals the state of the uncut run: prefix caching is sound.
TYPED_TEST(Recurrence, aCutRunIsTheUncutRun) {
  holds([] {
    const std::int64_t T = draw_length(65);
    const TypeParam run(T, 1, draw_seed());
    const std::int64_t chunk = *rc::gen::element<std::int64_t>(0, 1, 3, 16, 64);
    auto state = run.states(), carried = run.states();
    Array<double, 3> whole(run.out_shape), pieces(run.out_shape);
    TypeParam::scan(run.inputs(0, T), state.view(), whole);
    std::int64_t at = 0;
    for (const std::int64_t size : draw_pieces(T)) {
      const auto out = cut(pieces.view(), at, at + size);
      if (chunk == 0)
        TypeParam::scan(run.inputs(at, at + size), carried.view(), out);
      else
        TypeParam::chunked(run.inputs(at, at + size), chunk, carried.view(), out);
      at += size;
    }
    RC_ASSERT(agree(pieces, whole, chunk ? kOtherForm : kSameForm));
    RC_ASSERT(agree(carried, state, chunk ? kOtherForm : kSameForm));
  });
}

TYPED_TEST(Recurrence, chunksOfEverySizeAreTheRecurrence) {
  holds([] {
    const Sizes lengths = draw_row_lengths(4, 129);
    const auto rows = static_cast<std::int64_t>(lengths.size());
    const TypeParam run(sum(lengths), rows, draw_seed());
    const std::int64_t size = *rc::gen::element<std::int64_t>(1, 2, 7, 16, 63, 64, 65, 128, 256);
    const auto starts = starts_of(lengths);
    auto in = run.inputs(0, sum(lengths));
    in.rows.query_start_loc = starts.view();
    auto state = run.states(), chunked_state = run.states();
    Array<double, 3> out(run.out_shape), chunked(run.out_shape);
    TypeParam::scan(in, state.view(), out);
    TypeParam::chunked(in, size, chunked_state.view(), chunked);
    RC_ASSERT(agree(chunked, out, kOtherForm));
    RC_ASSERT(agree(chunked_state, state, kOtherForm));
  });
}

TYPED_TEST(Recurrence, aPrefillIsItsDecodes) {
  holds([] {
    const std::int64_t T = draw_length(17);
    const TypeParam run(T, 1, draw_seed());
    auto state = run.states(), carried = run.states();
    Array<double, 3> whole(run.out_shape), steps(run.out_shape);
    TypeParam::scan(run.inputs(0, T), state.view(), whole);
    for (std::int64_t t = 0; t < T; ++t)
      TypeParam::update(run.inputs(t, t + 1), carried.view(), cut(steps.view(), t, t + 1));
    RC_ASSERT(same_bits(whole, steps));
    RC_ASSERT(same_bits(state, carried));
  });
}

// A row gets what it gets alone, beside any rows and slots of theirs. Slots that no row names keep
// their bytes, and tokens after the last row give 0.
TYPED_TEST(Recurrence, aRowDoesNotDependOnItsBatch) {
  holds([] {
    const Sizes lengths = draw_row_lengths(5, 8);
    const auto rows = static_cast<std::int64_t>(lengths.size());
    const bool update = *rc::gen::arbitrary<bool>();
    const TypeParam run(sum(lengths) + 2, rows + 3, draw_seed());
    const auto starts = starts_of(lengths);
    Sizes slots = draw_order(rows + 3);
    slots.resize(lengths.size());
    const auto indices = ints(slots);
    auto in = run.inputs(0, run.out_shape[0]);
    in.rows.query_start_loc = starts.view();
    in.rows.slots.indices = indices.view();
    auto state = run.states(), expected = run.states();
    Array<double, 3> out(run.out_shape);
    if (update)
      TypeParam::update(in, state.view(), out);
    else
      TypeParam::scan(in, state.view(), out);
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto slot = slots[static_cast<std::size_t>(row)];
      const auto tokens = cut(out.view(), starts(row), starts(row + 1));
      Array<double, 3> alone(shape_of(tokens));
      TypeParam::scan(run.inputs(starts(row), starts(row + 1)),
                      cut(expected.view(), slot, slot + 1), alone);
      RC_ASSERT(same_bits(alone.view(), tokens));
    }
    RC_ASSERT(same_bits(state, expected));
    for_each_element(cut(out.view(), sum(lengths), run.out_shape[0]),
                     [](const auto&, double y) { RC_ASSERT(y == 0.0); });
  });
}

TYPED_TEST(Recurrence, aStateIsReadFromOneSlotAndWrittenToAnother) {
  holds([] {
    const TypeParam run(2, 4, draw_seed());
    const Sizes order = draw_order(4);
    const auto from = ints({order[0], order[1]}), to = ints({order[2], order[3]});
    const auto starts = starts_of({1, 1});
    const bool prefill = *rc::gen::arbitrary<bool>();
    auto in = run.inputs(0, 2);
    in.rows.query_start_loc = starts.view();
    in.rows.slots.indices = from.view();
    const auto advance = [&](auto states, auto y) {
      prefill ? TypeParam::scan(in, states, y) : TypeParam::update(in, states, y);
    };
    auto in_place = run.states(), moved = run.states();
    Array<double, 3> out(run.out_shape), moved_out(run.out_shape);
    advance(in_place.view(), out.view());
    in.rows.slots.out_indices = to.view();
    advance(moved.view(), moved_out.view());
    RC_ASSERT(same_bits(out, moved_out));
    const auto before = run.states();
    for (std::int64_t row = 0; row < 2; ++row) {
      RC_ASSERT(same_bits(at(moved.view(), to(row)), at(in_place.view(), from(row))));
      RC_ASSERT(same_bits(at(moved.view(), from(row)), at(before.view(), from(row))));
    }
  });
}

// A table may name other slots to write than it reads: the states of a verification then lie beside
// the committed ones, which keep their bytes.
TYPED_TEST(Recurrence, aTablesStatesMayGoToAnotherTable) {
  holds([] {
    const std::int64_t width = 1 + *rc::gen::inRange<std::int64_t>(0, 4);
    const std::int64_t size = *rc::gen::inRange<std::int64_t>(1, width + 1);
    const TypeParam run(size, 2 * width + 1, draw_seed());
    const auto order = ints(draw_order(2 * width));
    const auto starts = starts_of({size});
    const auto accepted = ints({*rc::gen::inRange<std::int64_t>(1, width + 1)});
    auto in = run.inputs(0, size);
    in.rows.query_start_loc = starts.view();
    in.rows.slots = {.table = make_view(order.data(), Shape<2>{1, width}),
                     .num_accepted = accepted.view()};
    auto in_place = run.states(), apart = run.states();
    Array<double, 3> out(run.out_shape), apart_out(run.out_shape);
    TypeParam::update(in, in_place.view(), out);
    in.rows.slots.out_table = make_view(order.data() + width, Shape<2>{1, width});
    TypeParam::update(in, apart.view(), apart_out);
    RC_ASSERT(same_bits(out, apart_out));
    const auto before = run.states();
    for (std::int64_t i = 0; i < width; ++i) {
      RC_ASSERT(same_bits(at(apart.view(), order(i)), at(before.view(), order(i))));
      const auto target = at(apart.view(), order(width + i));
      RC_ASSERT((i < size ? same_bits(target, at(in_place.view(), order(i)))
                          : same_bits(target, at(before.view(), order(width + i)))));
    }
    RC_ASSERT(same_bits(at(apart.view(), 2 * width), at(before.view(), 2 * width)));
  });
}

TYPED_TEST(Recurrence, anOutputTableStandsBesideATable) {
  const TypeParam run(1, 2, 0);
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  auto in = run.inputs(0, 1);
  const auto zero = ints({0});
  in.rows.slots = {.indices = zero.view(), .out_table = make_view(zero.data(), Shape<2>{1, 1})};
  EXPECT_THROW(TypeParam::update(in, state.view(), out.view()), ContractViolation);
  in.rows.slots = {.table = make_view(zero.data(), Shape<2>{1, 1}), .out_indices = zero.view()};
  EXPECT_THROW(TypeParam::update(in, state.view(), out.view()), ContractViolation);
}

TYPED_TEST(Recurrence, aFirstChunkStartsFromZerosOnADirtySlot) {
  holds([] {
    const std::int64_t T = draw_length(8);
    const TypeParam run(T, 1, draw_seed());
    const bool no = false;
    auto in = run.inputs(0, T);
    Array<double, 4> dirty(run.state_shape, kNan), zeros(run.state_shape, 0.0);
    Array<double, 3> out(run.out_shape), expected(run.out_shape), stateless(run.out_shape);
    TypeParam::scan(in, zeros.view(), expected);
    TypeParam::scan(in, {}, stateless);
    in.rows.has_initial_state = make_view(&no, Shape<1>{1});
    TypeParam::scan(in, dirty.view(), out);
    RC_ASSERT(same_bits(out, expected));
    RC_ASSERT(same_bits(stateless, expected));
    RC_ASSERT(same_bits(dirty, zeros));
  });
}

// A tracked state is the state of its prefix, counted from the row's start.
TYPED_TEST(Recurrence, boundaryStatesAreThoseOfTheirPrefixes) {
  holds([] {
    const Sizes lengths = draw_row_lengths(3, 17);
    const std::int64_t every = *rc::gen::inRange<std::int64_t>(1, 9);
    const std::int64_t chunk = *rc::gen::element<std::int64_t>(0, 1, 5, 64);
    const TypeParam run(sum(lengths), static_cast<std::int64_t>(lengths.size()), draw_seed());
    const auto starts = starts_of(lengths);
    std::int64_t count = 0;
    for (const std::int64_t length : lengths) count += length / every;
    Shape<4> shape = run.state_shape;
    shape[0] = count;
    Array<double, 4> tracked(shape), expected(shape);
    const BoundaryStates<double> boundary{tracked.view(), every};
    auto in = run.inputs(0, sum(lengths));
    in.rows.query_start_loc = starts.view();
    auto state = run.states();
    Array<double, 3> out(run.out_shape);
    if (chunk == 0)
      TypeParam::scan(in, state.view(), out, boundary);
    else
      TypeParam::chunked(in, chunk, state.view(), out, boundary);
    std::int64_t next = 0;
    for (std::int64_t row = 0; row + 1 < starts.size(); ++row)
      for (std::int64_t end = starts(row) + every; end <= starts(row + 1); end += every) {
        auto prefix = run.states();
        Array<double, 3> ignored({end - starts(row), run.out_shape[1], run.out_shape[2]});
        TypeParam::scan(run.inputs(starts(row), end), cut(prefix.view(), row, row + 1), ignored);
        for_each_element(at(prefix.view(), row), [&](const auto& i, double s) {
          at(expected.view(), next)(i[0], i[1], i[2]) = s;
        });
        ++next;
      }
    RC_ASSERT(next == count);
    RC_ASSERT(agree(tracked, expected, chunk ? kOtherForm : kSameForm));
  });
}

// A draft that is not accepted leaves no trace; each token's snapshot is the state of its path.
TYPED_TEST(Recurrence, aVerificationReadsTheStateAndSnapshotsEachPath) {
  holds([] {
    const std::int64_t T = draw_length(8);
    const TypeParam run(T, 2, draw_seed());
    const bool tree = *rc::gen::arbitrary<bool>();
    const auto drawn = draw_parents(T, true);
    const std::optional<IndexView> parents =
        tree ? std::optional<IndexView>(drawn.view()) : std::nullopt;
    const auto starts = starts_of({T});
    const auto indices = ints({1});
    auto in = run.inputs(0, T);
    in.rows.query_start_loc = starts.view();
    in.rows.slots.indices = indices.view();
    const auto before = run.states();
    auto state = run.states();
    Shape<4> shape = run.state_shape;
    shape[0] = T;
    Array<double, 4> snapshots(shape);
    Array<double, 3> out(run.out_shape);
    TypeParam::update(in, state.view(), out, parents, snapshots.view());
    RC_ASSERT(same_bits(state, before));
    for (std::int64_t t = 0; t < T; ++t) {
      auto replayed = run.states();
      Array<double, 3> last({1, run.out_shape[1], run.out_shape[2]}, 0.0);
      for (const std::int64_t node : path_to(parents, {0, T}, t))
        TypeParam::update(run.inputs(node, node + 1), cut(replayed.view(), 1, 2), last);
      RC_ASSERT(same_bits(at(last.view(), 0), at(out.view(), t)));
      RC_ASSERT(same_bits(at(replayed.view(), 1), at(snapshots.view(), t)));
    }
  });
}

// vLLM's slot table: the state after token i goes to column i, and the next step reads the column
// of the last accepted token. Whatever is drafted, the outputs of accepted tokens are those of the
// accepted text alone, and the first request's slots are not the second's.
TYPED_TEST(Recurrence, speculativeStepsAreTheAcceptedText) {
  holds([] {
    const std::int64_t drafts = *rc::gen::inRange<std::int64_t>(0, 4);
    const std::int64_t steps = *rc::gen::inRange<std::int64_t>(1, 6), width = 1 + drafts;
    const TypeParam run(2 * steps * width, 2 * width + 1, draw_seed());
    const auto table = ints(draw_order(2 * width + 1));
    auto state = run.states();
    const auto before = run.states();
    Shape<4> one = run.state_shape;
    one[0] = 1;
    std::vector<Array<double, 4>> plain;
    for (std::int64_t row = 0; row < 2; ++row)
      plain.push_back(joined<TensorView<const double, 4>>(
          {cut(before.view(), table(row * width), table(row * width) + 1)}));
    Sizes accepted{1, 1};
    for (std::int64_t step = 0; step < steps; ++step) {
      const Sizes sizes{1 + *rc::gen::inRange<std::int64_t>(0, width),
                        1 + *rc::gen::inRange<std::int64_t>(0, width)};
      const std::int64_t begin = 2 * step * width;
      const auto starts = starts_of(sizes);
      const auto counts = ints(accepted);
      auto in = run.inputs(begin, begin + sum(sizes));
      in.rows.query_start_loc = starts.view();
      in.rows.slots = {.table = make_view(table.data(), Shape<2>{2, width}),
                       .num_accepted = counts.view()};
      Array<double, 3> out({sum(sizes), run.out_shape[1], run.out_shape[2]});
      TypeParam::update(in, state.view(), out);
      for (std::size_t row = 0; row < 2; ++row) {
        accepted[row] = *rc::gen::inRange<std::int64_t>(1, sizes[row] + 1);
        for (std::int64_t t = 0; t < accepted[row]; ++t) {
          const std::int64_t token = starts(static_cast<std::int64_t>(row)) + t;
          Array<double, 3> alone({1, run.out_shape[1], run.out_shape[2]});
          TypeParam::update(run.inputs(begin + token, begin + token + 1), plain[row].view(), alone);
          RC_ASSERT(same_bits(at(alone.view(), 0), at(out.view(), token)));
        }
      }
    }
    const std::int64_t unused = table(2 * width);
    RC_ASSERT(same_bits(at(state.view(), unused), at(before.view(), unused)));
  });
}

// Verify, then replay what was accepted: the state of the accepted decode steps, by bits, in states
// of half precision too. Nothing accepted leaves the state as it was.
TYPED_TEST(Recurrence, aReplayIsTheAcceptedDecodeSteps) {
  holds([] {
    const std::int64_t T = draw_length(8);
    const TypeParam run(T, 1, draw_seed());
    const bool tree = *rc::gen::arbitrary<bool>();
    const Format format = *rc::gen::element(Format::exact, Format::fp16, Format::bf16);
    const auto starts = starts_of({T});
    const auto accepted = ints({*rc::gen::inRange<std::int64_t>(-1, T + 2)});
    Sizes path;  // of a tree: what was accepted, with entries that are no tokens in between
    for (std::int64_t node = 0; node < T; ++node)
      if (*rc::gen::arbitrary<bool>())
        path.push_back(*rc::gen::element(node, node, std::int64_t{-1}, T));
    const auto nodes = ints(path);
    auto in = run.inputs(0, T);
    in.rows.query_start_loc = starts.view();
    in.rows.storage.state = format;
    auto state = run.states(), expected = run.states();
    const std::optional<IndexTable> table =
        tree ? std::optional<IndexTable>(make_view(nodes.data(), Shape<2>{1, nodes.size()}))
             : std::nullopt;
    TypeParam::replay(in, accepted.view(), state.view(), table);
    Array<double, 3> out({1, run.out_shape[1], run.out_shape[2]});
    for (std::int64_t i = 0; i < std::min<std::int64_t>(accepted(0), tree ? nodes.size() : T);
         ++i) {
      const std::int64_t node = tree ? nodes(i) : i;
      if (node < 0 || node >= T) continue;
      auto one = run.inputs(node, node + 1);
      one.rows.storage.state = format;
      TypeParam::update(one, expected.view(), out);
    }
    RC_ASSERT(same_bits(state, expected));
  });
}

TYPED_TEST(Recurrence, rowsWithoutASlotWriteNothing) {
  holds([] {
    const TypeParam run(3, 2, draw_seed());
    const std::int32_t pad = *rc::gen::element(-1, 0);
    const auto indices = ints({pad, 1, pad});
    auto in = run.inputs(0, 3);
    in.rows.slots = {.indices = indices.view(), .pad_slot_id = pad};
    auto state = run.states(), expected = run.states();
    Array<double, 3> out(run.out_shape), alone({1, run.out_shape[1], run.out_shape[2]});
    TypeParam::update(in, state.view(), out);
    TypeParam::update(run.inputs(1, 2), cut(expected.view(), 1, 2), alone);
    RC_ASSERT(same_bits(state, expected));
    RC_ASSERT(same_bits(at(out.view(), 1), at(alone.view(), 0)));
    for (const std::int64_t row : {0, 2})
      for_each_element(at(out.view(), row), [](const auto&, double y) { RC_ASSERT(y == 0.0); });
  });
}

// The same of verifications and of prefills: what a token starts from is what would have been
// stored before it.
TYPED_TEST(Recurrence, roundingEachTokenIsTheSameInEveryForm) {
  const std::int64_t T = 5;
  const TypeParam run(T, 1, 12);
  const auto starts = starts_of({T});
  auto in = run.inputs(0, T);
  in.rows.query_start_loc = starts.view();
  in.rows.storage = {.state = Format::bf16, .state_each_token = true};
  auto state = run.states(), scanned = run.states(), verified = run.states();
  Array<double, 3> out(run.out_shape), scan_out(run.out_shape), verify_out(run.out_shape);
  Shape<4> shape = run.state_shape;
  shape[0] = T;
  Array<double, 4> snapshots(shape);
  TypeParam::update(in, state.view(), out.view());
  TypeParam::scan(in, scanned.view(), scan_out.view());
  TypeParam::update(in, verified.view(), verify_out.view(), {}, snapshots.view());
  EXPECT_TRUE(same_bits(out, scan_out) && same_bits(out, verify_out));
  EXPECT_TRUE(same_bits(state, scanned));
  EXPECT_TRUE(same_bits(at(state.view(), 0), at(snapshots.view(), T - 1)));
  auto once = in;
  once.rows.storage.state_each_token = false;
  auto carried = run.states();
  Array<double, 3> once_out(run.out_shape);
  TypeParam::update(once, carried.view(), once_out.view());
  EXPECT_FALSE(same_bits(once_out, out)) << "one launch rounds once";
  once.rows.storage.output = Format::bf16;
  Array<double, 3> narrow(run.out_shape);
  carried = run.states();
  TypeParam::update(once, carried.view(), narrow.view());
  for (std::int64_t i = 0; i < narrow.size(); ++i)
    EXPECT_EQ(narrow.data()[i], rounded(once_out.data()[i], Format::bf16));
}

// A row without tokens has no output and leaves its state, or zeroes it where it begins anew.
TYPED_TEST(Recurrence, aRowWithoutTokensIsEmpty) {
  const TypeParam run(2, 3, 13);
  const auto starts = starts_of({1, 0, 1});
  for (const bool chunked : {false, true})
    for (const bool resumes : {false, true}) {
      Array<bool, 1> has(Shape<1>{3}, true);
      has(1) = resumes;
      auto in = run.inputs(0, 2);
      in.rows.query_start_loc = starts.view();
      in.rows.has_initial_state = has.view();
      in.rows.storage.state = Format::e4m3;  // the pool's numbers are none of the format's
      auto state = run.states();
      Array<double, 3> out(run.out_shape);
      if (chunked)
        TypeParam::chunked(in, 4, state.view(), out.view());
      else
        TypeParam::scan(in, state.view(), out.view());
      const auto before = run.states();
      for_each_element(at(state.view(), 1), [&](const auto& i, double s) {
        EXPECT_EQ(s, resumes ? at(before.view(), 1)(i[0], i[1], i[2]) : 0.0);
      });
    }
}

// Every form checks whose slots are whose, and that there are as many snapshots, parents and
// tokens as there must be.
TYPED_TEST(Recurrence, refusesWhatDoesNotFit) {
  const TypeParam run(2, 3, 14);
  const auto twice = ints({1, 1}), one = ints({1, 1}), starts = starts_of({1, 1});
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  auto in = run.inputs(0, 2);
  in.rows.query_start_loc = starts.view();
  in.rows.slots.indices = twice.view();
  EXPECT_THROW(TypeParam::update(in, state.view(), out.view()), ContractViolation);
  EXPECT_THROW(TypeParam::scan(in, state.view(), out.view()), ContractViolation);
  EXPECT_THROW(TypeParam::chunked(in, 4, state.view(), out.view()), ContractViolation);
  EXPECT_THROW(TypeParam::replay(in, one.view(), state.view()), ContractViolation);
  Shape<4> shape = run.state_shape;
  shape[0] = 2;
  Array<double, 4> snapshots(shape);
  EXPECT_NO_THROW(TypeParam::update(in, state.view(), out.view(), {}, snapshots.view()))
      << "a verification writes no slot";
  in.rows.slots = {};
  shape[0] = 1;
  Array<double, 4> few(shape);
  EXPECT_THROW(TypeParam::update(in, state.view(), out.view(), {}, few.view()), ContractViolation);
  const auto short_parents = ints({-1});
  EXPECT_THROW(TypeParam::update(in, state.view(), out.view(), short_parents.view()),
               ContractViolation);
  EXPECT_THROW(TypeParam::chunked(in, 0, state.view(), out.view()), ContractViolation);
  const BoundaryStates<double> boundary{few.view(), 0};
  EXPECT_THROW(TypeParam::scan(in, state.view(), out.view(), boundary), ContractViolation);
  in.rows.slots.table = make_view(twice.data(), Shape<2>{2, 1});
  EXPECT_THROW(TypeParam::scan(in, state.view(), out.view()), ContractViolation);
  const bool no = false;
  in.rows.slots = {};
  in.rows.has_initial_state = make_view(&no, Shape<1>{1});
  EXPECT_THROW(TypeParam::update(in, state.view(), out.view()), ContractViolation);
}

// Tokens after the last row give 0 in every form.
TYPED_TEST(Recurrence, tokensBehindTheLastRowGiveZero) {
  const TypeParam run(4, 2, 17);
  const auto starts = starts_of({1, 1});
  auto in = run.inputs(0, 4);
  in.rows.query_start_loc = starts.view();
  for (const int form : {0, 1, 2}) {
    auto state = run.states();
    Array<double, 3> out(run.out_shape);
    if (form == 0) TypeParam::update(in, state.view(), out.view());
    if (form == 1) TypeParam::scan(in, state.view(), out.view());
    if (form == 2) TypeParam::chunked(in, 4, state.view(), out.view());
    for_each_element(cut(out.view(), 2, 4), [](const auto&, double y) { EXPECT_EQ(y, 0); });
    for_each_element(cut(out.view(), 0, 2),
                     [](const auto&, double y) { EXPECT_TRUE(std::isfinite(y)); });
  }
}

// Of a replayed batch, rows of padding are not looked at, whatever count stands beside them.
TYPED_TEST(Recurrence, aReplaySkipsRowsWithoutASlot) {
  const TypeParam run(3, 2, 15);
  const auto starts = starts_of({1, 1, 1}), slots = ints({-1, 1, -1}), accepted = ints({1, 1, 1});
  auto in = run.inputs(0, 3);
  in.rows.query_start_loc = starts.view();
  in.rows.slots.indices = slots.view();
  auto state = run.states(), expected = run.states();
  TypeParam::replay(in, accepted.view(), state.view());
  Array<double, 3> out({1, run.out_shape[1], run.out_shape[2]});
  TypeParam::update(run.inputs(1, 2), cut(expected.view(), 1, 2), out.view());
  EXPECT_TRUE(same_bits(state, expected));
  const TypeParam many(1, 9, 16);  // more slots than heads
  auto pool = many.states(), advanced = many.states();
  in = many.inputs(0, 1);
  const auto last = ints({8}), one = ints({1});
  in.rows.slots.indices = last.view();
  TypeParam::replay(in, one.view(), pool.view());
  Array<double, 3> y({1, many.out_shape[1], many.out_shape[2]});
  TypeParam::update(many.inputs(0, 1), cut(advanced.view(), 8, 9), y.view());
  EXPECT_TRUE(same_bits(pool, advanced));
}

// P8. A captured state is that of its moment, whatever happens to its slot, and going on from it in
// another slot is going on.
TYPED_TEST(Recurrence, aRestoredCaptureGoesOnUninterrupted) {
  holds([] {
    const std::int64_t T = draw_length(17), moment = *rc::gen::inRange<std::int64_t>(0, T + 1);
    const TypeParam run(T, 1, draw_seed());
    auto whole = run.states();
    Array<double, 3> out(run.out_shape), again(run.out_shape), scratch(run.out_shape);
    TypeParam::scan(run.inputs(0, T), whole.view(), out);
    const Shape<4> s = run.state_shape;
    Array<double, 5> pool(Shape<5>{1, 3, s[1], s[2], s[3]});  // NaN
    const auto slot = [&](std::int64_t i) { return cut(at(pool.view(), 0), i, i + 1); };
    const auto before = run.states();
    for_each_element(before.view(),
                     [&](const auto& i, double e) { slot(1)(i[0], i[1], i[2], i[3]) = e; });
    TypeParam::scan(run.inputs(0, moment), slot(1), cut(again.view(), 0, moment));
    reference::copy_states(pool, ints({1}), ints({2}));
    TypeParam::scan(run.inputs(0, T), slot(1), scratch);  // somebody else's tokens
    reference::copy_states(pool, ints({2}), ints({0}));
    TypeParam::scan(run.inputs(moment, T), slot(0), cut(again.view(), moment, T));
    RC_ASSERT(same_bits(again, out) && same_bits(slot(0), whole.view()));
  });
}

// A pool whose states lie apart and whose rows are columns: strides are honoured.
TYPED_TEST(Recurrence, statesOfAnyStridesAreTheSame) {
  holds([] {
    const std::int64_t T = draw_length(5);
    const TypeParam run(T, 1, draw_seed());
    auto state = run.states();
    Array<double, 3> out(run.out_shape), strided_out(run.out_shape);
    const Shape<4> s = run.state_shape;
    Array<double, 1> memory(Shape<1>{s[1] * s[2] * s[3] + 7}, 5.0);
    const auto strided = make_view(
        memory.data() + 3, s, Shape<4>{s[1] * s[2] * s[3], s[2] * s[3], 1, s[2]});  // column-major
    for_each_element(state.view(),
                     [&](const auto& i, double e) { strided(i[0], i[1], i[2], i[3]) = e; });
    TypeParam::scan(run.inputs(0, T), state.view(), out);
    TypeParam::scan(run.inputs(0, T), strided, strided_out);
    RC_ASSERT(same_bits(out, strided_out));
    RC_ASSERT(same_bits(state.view(), strided));
    for (const std::int64_t i : {0, 1, 2}) RC_ASSERT(memory(i) == 5.0);
  });
}

// bf16 states: one launch of q tokens rounds once, q launches round q times, and the policy names
// which of the two is meant.
TYPED_TEST(Recurrence, roundingEachTokenIsOneLaunchPerToken) {
  holds([] {
    const std::int64_t T = draw_length(5);
    const TypeParam run(T, 1, draw_seed());
    const auto starts = starts_of({T});
    auto in = run.inputs(0, T);
    in.rows.query_start_loc = starts.view();
    in.rows.storage = {.state = Format::bf16, .state_each_token = true};
    auto state = run.states(), carried = run.states();
    Array<double, 3> out(run.out_shape), steps(run.out_shape);
    TypeParam::update(in, state.view(), out);
    for (std::int64_t t = 0; t < T; ++t) {
      auto one = run.inputs(t, t + 1);
      one.rows.storage = {.state = Format::bf16};
      TypeParam::update(one, carried.view(), cut(steps.view(), t, t + 1));
    }
    RC_ASSERT(same_bits(out, steps));
    RC_ASSERT(same_bits(state, carried));
    for_each_element(state.view(),
                     [](const auto&, double s) { RC_ASSERT(rounded(s, Format::bf16) == s); });
  });
}

}  // namespace
}  // namespace lockstep
