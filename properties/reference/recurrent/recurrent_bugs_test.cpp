// Bugs that kernels and runners of recurrent layers had, by the number of their public report. Each
// is planted, and a law of the reference sees it.
#include <gtest/gtest.h>

#include "properties/support/planted.hpp"
#include "properties/support/recurrences.hpp"
#include "properties/support/slot_laws.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/speculative_commit.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::CausalConv1dInputs;
using Rule = GatedDeltaRun<double>;
using Ssm = Mamba2Run<double>;

/// The state of slot `slot` after tokens [begin, end) that start from it.
template <class Run>
Array<double, 4> after(const Run& run, std::int64_t slot, std::int64_t begin, std::int64_t end) {
  auto states = run.states();
  Array<double, 3> out({end - begin, run.out_shape[1], run.out_shape[2]});
  Run::scan(run.inputs(begin, end), cut(states.view(), slot, slot + 1), out.view());
  return states;
}

template <class A, class B>
bool close(const A& a, const B& b, double tolerance = 1e-12) {
  const Difference found = difference(a, b);
  return found.misplaced == 0 && found.relative() < tolerance;
}

// SGLang #15829, #31833, #33450: rows of a batched prefill were chunked on the flattened batch, and
// the tracked state taken as if chunks began with the row.
TEST(RecurrentBugs, sglang31833_chunksBeginWithTheRow) {
  const Sizes lengths{7, 5, 6};
  const Ssm run(18, 3, 1);
  const auto starts = starts_of(lengths);
  const auto law = [&](auto tracked_length) {
    for (std::int64_t row = 0; row < 3; ++row) {
      const std::int64_t begin = starts(row);
      const auto expected = after(run, row, begin, begin + 4);
      const auto found = after(run, row, begin, begin + tracked_length(begin));
      if (!close(at(found.view(), row), at(expected.view(), row))) return false;
    }
    return true;
  };
  catches(
      law, [](std::int64_t) { return std::int64_t{4}; },
      [](std::int64_t begin) { return (begin + 4) / 4 * 4 - begin; });
}

/// Rows and slots of decoding and verification: the laws are in properties/support/slot_laws.hpp,
/// and the kernel is asked in gated_delta_rule_update_gpu_test.cpp.
class SlotLaws : public ::testing::TestWithParam<SlotLaw> {};
INSTANTIATE_TEST_SUITE_P(RecurrentBugs, SlotLaws, ::testing::ValuesIn(slot_laws()),
                         [](const auto& law) { return law.param.report; });

TEST_P(SlotLaws, areKeptByTheReferenceAndBrokenByTheReportsMistake) {
  EXPECT_TRUE(GetParam().holds(reference_update)) << GetParam().says;
  EXPECT_FALSE(GetParam().holds(with_mistake(GetParam(), reference_update))) << GetParam().says;
}

// SGLang #33515: the tracked state was looked up by pages among states that stand at chunks.
TEST(RecurrentBugs, sglang33515_statesAreCountedInChunks) {
  const Ssm run(24, 1, 2);
  const std::int64_t page = 8, chunk = 4, tracked = 16;
  Array<double, 4> states({6, run.H, run.P, run.N});
  Array<double, 3> out(run.out_shape);
  auto pool = run.states();
  Ssm::chunked(run.inputs(0, 24), chunk, pool.view(), out.view(),
               BoundaryStates<double>{states.view(), chunk});
  const auto expected = after(run, 0, 0, tracked);
  const auto law = [&](std::int64_t unit) {
    return close(at(states.view(), tracked / unit - 1), at(expected.view(), 0));
  };
  catches(law, chunk, page);
}

/// A prompt of T tokens on a slot that holds another request's state.
template <class Start>
bool starts_from_zeros(std::int64_t T, Start start) {
  const Rule run(T, 1, 8);
  Array<double, 3> out(run.out_shape), expected(run.out_shape);
  Rule::scan(run.inputs(0, T), {}, expected.view());
  auto states = run.states();
  start(run.inputs(0, T), states.view(), out.view());
  return same_bits(out, expected);
}

// vLLM #32118, #51483: a first chunk of one token was taken for a decode, and read what the block's
// former owner had left.
TEST(RecurrentBugs, vllm32118_aFirstChunkOfOneTokenIsNoDecode) {
  const bool no = false;
  catches([](auto start) { return starts_from_zeros(1, start); },
          [&](auto in, auto states, auto out) {
            in.rows.has_initial_state = make_view(&no, Shape<1>{1});
            Rule::scan(in, states, out);
          },
          [](auto in, auto states, auto out) { Rule::update(in, states, out); });
}

// vLLM #56524: a block that came back from another request was read before it was written.
TEST(RecurrentBugs, vllm56524_aRecycledBlockIsNotRead) {
  const bool no = false;
  catches([](auto start) { return starts_from_zeros(5, start); },
          [&](auto in, auto states, auto out) {
            in.rows.has_initial_state = make_view(&no, Shape<1>{1});
            Rule::scan(in, states, out);
          },
          [](auto in, auto states, auto out) { Rule::scan(in, states, out); });
}

// vLLM #22034: the second chunk of a prompt dropped its initial state where the batch had one row.
TEST(RecurrentBugs, vllm22034_theSecondChunkGoesOnFromTheFirst) {
  const Ssm run(11, 1, 10);
  const bool yes = true, no = false;
  const auto law = [&](const bool* resumes) {
    auto states = run.states(), whole = run.states();
    Array<double, 3> out({7, run.H, run.P}), rest({4, run.H, run.P}), all(run.out_shape);
    Ssm::chunked(run.inputs(0, 7), 4, states.view(), out.view());
    auto in = run.inputs(7, 11);
    in.rows.has_initial_state = make_view(resumes, Shape<1>{1});
    Ssm::chunked(in, 4, states.view(), rest.view());
    Ssm::scan(run.inputs(0, 11), whole.view(), all.view());
    return close(rest.view(), cut(all.view(), 7, 11)) && close(states, whole);
  };
  catches(law, &yes, &no);
}

// vLLM #23279: the decay of a carried state was summed from the start of the chunk's grid, as if
// the tokens before this call stood in the same chunk once more.
TEST(RecurrentBugs, vllm23279_decaysAreSummedFromTheCallsFirstToken) {
  const Ssm run(6, 1, 11);
  const auto whole = after(run, 0, 0, 6);
  const auto law = [&](bool from_the_grid) {
    auto states = after(run, 0, 0, 2);  // a chunk of 4 is half full
    if (from_the_grid)
      for (std::int64_t t = 0; t < 2; ++t) {
        auto faded = run;
        fill(faded.x.view(), 0.0);
        Array<double, 3> out({1, run.H, run.P});
        Ssm::update(faded.inputs(t, t + 1), states.view(), out.view());
      }
    Array<double, 3> out({4, run.H, run.P});
    Ssm::chunked(run.inputs(2, 6), 4, states.view(), out.view());
    return close(states, whole);
  };
  catches(law, false, true);
}

/// A convolution of width 4 over 16 tokens of 3 channels.
struct Conv {
  Array<double, 2> x = on_grid<double>(Shape<2>{16, 3}, {.seed = 1, .stream = 1});
  Array<double, 2> weight = on_grid<double>(Shape<2>{3, 4}, {.seed = 1, .stream = 2});
  Array<double, 3> state = on_grid<double>(Shape<3>{1, 3, 3}, {.seed = 1, .stream = 3});

  CausalConv1dInputs<double> inputs(std::int64_t begin, std::int64_t end) const {
    return {.x = cut(x.view(), begin, end), .weight = weight};
  }
  /// Output of the last of tokens [0, count), decoded one by one, and the state after them.
  std::pair<Array<double, 2>, Array<double, 3>> decoded(const Sizes& tokens) const {
    auto states = state;
    Array<double, 2> out(Shape<2>{1, 3});
    for (const std::int64_t t : tokens)
      reference::causal_conv1d_update<double>(inputs(t, t + 1), states.view(), out);
    return {out, states};
  }
};

// vLLM #50729: the left shift of a window within its block was copied in the wrong order, so that
// columns were read after they had been written.
TEST(RecurrentBugs, vllm50729_aShiftReadsBeforeItWrites) {
  const Conv conv;
  const auto expected = conv.decoded({0}).second;
  const auto law = [&](const Sizes& order) {
    auto state = conv.state;
    for (const std::int64_t column : order)
      for (std::int64_t d = 0; d < 3; ++d)
        state(0, d, column) = column == 2 ? conv.x(0, d) : state(0, d, column + 1);
    return same_bits(state, expected);
  };
  catches(law, Sizes{0, 1, 2}, Sizes{2, 1, 0});
}

// mlx-swift-lm #218, vLLM #50272: after rejected drafts the recurrent state was rolled back and the
// conv window was not.
TEST(RecurrentBugs, vllm50272_rejectedDraftsLeaveTheWindowToo) {
  const Conv conv;
  const auto expected = conv.decoded({0, 4}).first;  // token 0 accepted, drafts 1 to 3 rejected
  const auto starts = starts_of({4});
  const auto law = [&](std::int64_t taken) {
    auto in = conv.inputs(0, 4);
    in.query_start_loc = starts.view();
    auto state = conv.state;
    Array<double, 2> out(Shape<2>{4, 3}), next(Shape<2>{1, 3});
    Array<double, 3> snapshots(Shape<3>{4, 3, 3});
    reference::causal_conv1d_update<double>(in, state.view(), out, {}, snapshots.view());
    mapped(at(state.view(), 0)) = mapped(at(snapshots.view(), taken));
    reference::causal_conv1d_update<double>(conv.inputs(4, 5), state.view(), next);
    return same_bits(next, expected);
  };
  catches(law, std::int64_t{0}, std::int64_t{3});
}

// transformers #48256, TensorRT-Edge-LLM's first conv plugin: a right-padded prefill took its
// window from the padding, and the state decayed through it.
TEST(RecurrentBugs, transformers48256_paddingIsNoContext) {
  const Conv conv;
  const auto lengths = ints({5}), none = ints({16});
  const auto law = [&](const Array<std::int32_t, 1>& context) {
    auto state = conv.state, expected = conv.state;
    Array<double, 3> out(Shape<3>{1, 16, 3});
    Array<double, 2> alone(Shape<2>{5, 3});
    reference::causal_conv1d_padded<double>(
        conv.inputs(0, 16), make_view<const double>(conv.x.data(), Shape<3>{1, 16, 3}),
        context.view(), state.view(), out.view());
    reference::causal_conv1d<double>(conv.inputs(0, 5), expected.view(), alone);
    return same_bits(state, expected);
  };
  catches(law, lengths, none);
  const Ssm run(16, 1, 12);
  const auto expected = after(run, 0, 0, 5);
  catches([&](std::int64_t count) { return close(after(run, 0, 0, count), expected); },
          std::int64_t{5}, std::int64_t{16});
}

// vLLM #20938, #35275, #41617, #48109: block times stride in 32 bits. Kernels are asked by
// offsetsGoBeyond32Bits and offsetsOfIndicesGoBeyond32Bits of their tests. 544 tokens of bf16 are
// 557,056 elements, so block 3,856 is the first beyond.
TEST(RecurrentBugs, vllm20938_offsetsHave64Bits) {
  double anything = 0;
  const auto pool = make_view(&anything, Shape<2>{4000, 1}, Shape<2>{557056, 1});
  const auto law = [&](auto offset) {
    return offset(3855) == 2147450880 && offset(3856) == 2148007936;
  };
  catches(
      law, [&](std::int64_t block) { return pool.mapping()(block, std::int64_t{0}); },
      [&](std::int64_t block) {
        return std::int64_t{static_cast<std::int32_t>(static_cast<std::uint32_t>(block * 557056))};
      });
}

// TensorRT-Edge-LLM 0.5.0: the tree verification read D as half precision where it was float.
TEST(RecurrentBugs, edgeLlmTree_DHasItsOwnType) {
  const Ssm run(2, 1, 13);
  const auto starts = starts_of({2}), parents = ints({-1, 0});
  const auto as_half = [](double value) {  // the first half of a little-endian float
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value)) & 0xFFFFu;
    return std::ldexp(static_cast<double>(bits & 0x3FFu), -24);
  };
  const auto law = [&](auto read) {
    auto chain = run.inputs(0, 2), tree = run.inputs(0, 2);
    Array<double, 1> D = run.D;
    for (double& d : D) d = read(d);
    tree.D = repeat(std::as_const(D).view(), run.P);
    chain.rows.query_start_loc = tree.rows.query_start_loc = starts.view();
    auto states = run.states(), read_only = run.states();
    Array<double, 3> out(run.out_shape), found(run.out_shape);
    Ssm::update(chain, states.view(), out.view());
    Ssm::update(tree, read_only.view(), found.view(), parents.view());
    return same_bits(found, out);
  };
  catches(
      law, [](double d) { return d; }, as_half);
}

// TensorRT-Edge-LLM: a scatter skipped the row whose tokens were all accepted, as if the
// verification had advanced the state itself.
TEST(RecurrentBugs, edgeLlmScatter_allAcceptedIsCopiedToo) {
  const auto snapshots = on_grid<double>(Shape<3>{1, 3, 2}, {.seed = 1});
  const auto slot = ints({0}), all = ints({3});
  const auto law = [&](auto scatter) {
    Array<double, 2> state(Shape<2>{1, 2}, 7.0);
    scatter(state);
    return same_bits(at(state.view(), 0), at(snapshots.view(), 0, 2));
  };
  catches(
      law,
      [&](Array<double, 2>& state) {
        reference::scatter_accepted(state.view(), snapshots.view(), slot.view(), all.view());
      },
      [&](Array<double, 2>& state) {
        if (all(0) < 3) mapped(at(state.view(), 0)) = mapped(at(snapshots.view(), 0, all(0) - 1));
      });
}

/// Rows of a cache with their lengths, moved by a mapping from old rows to new ones (-1: dropped).
struct CachedRows {
  Array<std::int32_t, 2> lengths;  // [1, rows]
  Array<double, 3> tokens;         // [1, rows, most]
};

CachedRows compacted(CachedRows rows, const Sizes& mapping) {
  Sizes from, to;
  for (std::size_t old = 0; old < mapping.size(); ++old)
    if (mapping[old] >= 0)
      from.push_back(static_cast<std::int64_t>(old)), to.push_back(mapping[old]);
  reference::copy_states(rows.lengths, ints(from), ints(to));
  reference::copy_states(rows.tokens, ints(from), ints(to));
  return rows;
}

template <class Compact>
bool keeps_rows(const Sizes& mapping, const Sizes& lengths, Compact compact) {
  const auto count = static_cast<std::int64_t>(lengths.size());
  CachedRows rows{Array<std::int32_t, 2>(Shape<2>{1, count}, 0),
                  on_grid<double>(Shape<3>{1, count, 9}, {.seed = 2})};
  for (std::int64_t row = 0; row < count; ++row)
    rows.lengths(0, row) = static_cast<std::int32_t>(lengths[static_cast<std::size_t>(row)]);
  const CachedRows moved = compact(rows, mapping);
  for (std::int64_t old = 0; old < count; ++old) {
    const std::int64_t row = mapping[static_cast<std::size_t>(old)];
    if (row < 0) continue;
    if (moved.lengths(0, row) != rows.lengths(0, old)) return false;
    for (std::int64_t t = 0; t < rows.lengths(0, old); ++t)
      if (moved.tokens(0, row, t) != rows.tokens(0, old, t)) return false;
  }
  return true;
}

// TensorRT-Edge-LLM 0.5.0: lengths were compacted in place by one block of threads while others
// still read them, so that a row moved with another's length.
TEST(RecurrentBugs, edgeLlmCompaction_rowsMoveWithTheirOwnLength) {
  const auto early = [](CachedRows rows, const Sizes& mapping) {
    const CachedRows before = rows;
    for (std::size_t old = 0; old < mapping.size(); ++old)
      if (mapping[old] >= 0)
        rows.lengths(0, mapping[old]) = before.lengths(0, static_cast<std::int64_t>(old));
    for (std::size_t old = 0; old < mapping.size(); ++old)
      for (std::int64_t t = 0;
           mapping[old] >= 0 && t < rows.lengths(0, static_cast<std::int64_t>(old)); ++t)
        rows.tokens(0, mapping[old], t) = before.tokens(0, static_cast<std::int64_t>(old), t);
    return rows;
  };
  catches(
      [](auto compact) {
        return keeps_rows({-1, 0, 1}, {5, 9, 2}, compact);
      },
      compacted, early);
}

// The same: a row of length 0 did not store its length, and its new row kept the old one's.
TEST(RecurrentBugs, edgeLlmCompaction_emptyRowsAreEmptyWhereTheyGo) {
  const auto skips = [](CachedRows rows, const Sizes& mapping) {
    CachedRows moved = compacted(rows, mapping);
    for (std::size_t old = 0; old < mapping.size(); ++old)
      if (rows.lengths(0, static_cast<std::int64_t>(old)) == 0) return rows;
    return moved;
  };
  catches([](auto compact) { return keeps_rows({-1, 0}, {5, 0}, compact); }, compacted, skips);
}

// And a batch whose size stays the same was left as it was, whatever the mapping.
TEST(RecurrentBugs, edgeLlmCompaction_aPermutationMovesRows) {
  const auto early_return = [](CachedRows rows, const Sizes&) { return rows; };
  catches(
      [](auto compact) {
        return keeps_rows({1, 0}, {3, 4}, compact);
      },
      compacted, early_return);
}

// TensorRT-Edge-LLM #174: heads of 80 took the token-by-token path without a word. The rule is a
// function that says so, and both paths agree.
TEST(RecurrentBugs, edgeLlm174_theSlowPathIsNamed) {
  const auto everything = [](std::int64_t S, std::int64_t, std::int64_t) { return S >= 128; };
  catches([](auto rule) { return rule(1024, 64, 128) && !rule(1024, 80, 128); },
          reference::prefers_chunks, everything);
}

}  // namespace
}  // namespace lockstep
