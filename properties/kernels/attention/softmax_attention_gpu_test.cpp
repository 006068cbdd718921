// The kernel of softmax attention over pages against its reference.
#include "kernels/attention/softmax_attention.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/attention/softmax_attention.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Extents {
  std::int64_t HQ, HKV, d, dv;
};

/// Rows of queries and keys, the keys and values in pages of a pool that is NaN elsewhere.
struct Inputs {
  Inputs(const Extents& e, const Sizes& queries, const Sizes& keys, std::int64_t page,
         std::uint64_t seed)
      : extents(e),
        starts(starts_of(queries)),
        lengths(ints(keys)),
        q(on_grid<double>(Shape<2>{sum(queries) + 2, e.HQ * e.d},  // two tokens of padding
                          {.seed = seed, .stream = 1})) {
    std::int64_t widest = 1, blocks = 3;
    for (const std::int64_t length : keys) {
      widest = std::max(widest, (length + page - 1) / page + 1);
      blocks += (length + page - 1) / page;
    }
    k_pages = Array<double, 4>(Shape<4>{blocks, page, e.HKV, e.d});
    v_pages = Array<double, 4>(Shape<4>{blocks, page, e.HKV, e.dv});
    table = Array<std::int32_t, 2>(Shape<2>{static_cast<std::int64_t>(keys.size()), widest},
                                   2147480000);
    std::int64_t next = blocks - 2;  // pages are handed out from behind
    for (std::size_t row = 0; row < keys.size(); ++row)
      for (std::int64_t l = 0; l < keys[row]; ++l) {
        const auto n = static_cast<std::int64_t>(row);
        if (l % page == 0) table(n, l / page) = static_cast<std::int32_t>(next--);
        const std::int64_t block = table(n, l / page);
        set(at(k_pages.view(), block, l % page), {.seed = seed, .stream = 100 + row * 1000 + l});
        set(at(v_pages.view(), block, l % page),
            {.seed = seed + 5000, .stream = 100 + row * 1000 + l});
      }
  }
  static void set(const TensorView<double, 2>& token, const Grid& grid) {
    std::uint64_t i = 0;
    for_each_element(token, [&](const auto&, double& element) { element = grid(i++); });
  }

  Extents extents;
  Array<std::int32_t, 1> starts, lengths;
  Array<double, 2> q;  // [T, HQ d]
  Array<double, 4> k_pages, v_pages;
  Array<std::int32_t, 2> table;
};

/// [T, heads, d] of rows
template <AnyView V>
TensorView<ElementOf<V>, 3> by_heads(const V& rows, std::int64_t heads) {
  const std::int64_t d = rows.extent(1) / heads;
  return make_view(rows.data_handle(), Shape<3>{rows.extent(0), heads, d},
                   Shape<3>{rows.stride(0), d, 1});
}

template <class S>
struct Answer {
  Array<S, 2> out;  // [T, HQ dv]
  Array<S, 2> lse;
};

template <class S>
Answer<S> reference_answer(const Inputs& in, bool causal, double empty_lse) {
  const Extents& e = in.extents;
  const std::int64_t T = in.q.extent(0);
  // Padding is a query without keys.
  Answer<S> answer{Array<S, 2>(Shape<2>{T, e.HQ * e.dv}, S{0}),
                   Array<S, 2>(Shape<2>{e.HQ, T}, static_cast<S>(empty_lse))};
  const Array<S, 2> q = cast<S>(in.q);
  reference::paged_attention<S>(
      by_heads(q.view(), e.HQ), cast<S>(in.k_pages), cast<S>(in.v_pages), in.table, in.lengths,
      in.starts,
      {.scale = 1 / std::sqrt(static_cast<float>(e.d)), .causal = causal, .empty_lse = empty_lse},
      by_heads(answer.out.view(), e.HQ), answer.lse);
  return answer;
}

/// Inputs and results on the device.
template <class T>
struct Device {
  explicit Device(const Inputs& in)
      : extents(in.extents),
        q(in.q),
        k_pages(in.k_pages),
        v_pages(in.v_pages),
        table(in.table),
        lengths(in.lengths),
        starts(in.starts),
        out(in.q.extent(0), in.extents.HQ * in.extents.dv),
        lse(Shape<2>{in.extents.HQ, in.q.extent(0)}) {}
  kernels::SoftmaxAttention<T> arguments() {
    return {.q = by_heads(q.inputs(), extents.HQ),
            .k_pages = std::as_const(k_pages).view(),
            .v_pages = std::as_const(v_pages).view(),
            .block_table = std::as_const(table).view(),
            .seq_lens = std::as_const(lengths).view(),
            .query_start_loc = std::as_const(starts).view(),
            .scale = 1 / std::sqrt(static_cast<float>(extents.d)),
            .out = by_heads(out.view(), extents.HQ),
            .lse = lse.view()};
  }
  void run(bool causal = true, float empty_lse = -kInfinity, cudaStream_t stream = nullptr) {
    kernels::SoftmaxAttention<T> in = arguments();
    in.causal = causal;
    in.empty_lse = empty_lse;
    kernels::softmax_attention<T>(in, stream);
  }

  Extents extents;
  GappedRows<T> q;
  DeviceTensor<T, 4> k_pages, v_pages;
  DeviceTensor<std::int32_t, 2> table;
  DeviceTensor<std::int32_t, 1> lengths, starts;
  GappedRows<T> out;
  DeviceTensor<float, 2> lse;
};

template <class T>
class SoftmaxAttentionGpu : public GpuTest {};
using Types = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Fp16, float,
#endif
    Bf16>;
TYPED_TEST_SUITE(SoftmaxAttentionGpu, Types);

// Prefill, decode and chunks in one batch, rows without queries, without keys, and with more
// queries than keys; whatever NaN fills the rest of the pool.
TYPED_TEST(SoftmaxAttentionGpu, agreesWithTheReference) {
  using T = TypeParam;
  const Sizes queries{1, 0, 3, 65, 1, 5, 1, 2}, keys{1, 7, 3, 65, 64, 2, 0, 130};
  std::uint64_t seed = 1;
  for (const Extents& e : {Extents{4, 2, 64, 64},
                           {1, 1, 128, 128},
                           {6, 1, 33, 17},
                           {2, 2, 256, 256},
                           {2, 1, 192, 128},
                           {3, 3, 1, 1}})
    for (const std::int64_t page : {1, 16, 64}) {
      const Inputs in(e, queries, keys, page, ++seed);
      const bool causal = seed % 3 != 0;
      const float empty = seed % 2 ? kInfinity : -kInfinity;
      const auto truth = reference_answer<double>(in, causal, empty);
      const auto yardstick = reference_answer<float>(in, causal, empty);
      Device<T> device(in), again(in);
      device.run(causal, empty);
      again.run(causal, empty);
      finish();
      EXPECT_TRUE(within_yardstick("softmax_attention", "out", device.out, stored<T>(yardstick.out),
                                   truth.out));
      EXPECT_TRUE(
          within_yardstick("softmax_attention", "lse", device.lse, yardstick.lse, truth.lse));
      EXPECT_TRUE(same_bits(device.out, again.out) && same_bits(device.lse, again.lse));
    }
}

// A query gets the same bits whether it comes with a prompt or alone, whatever the page size.
TYPED_TEST(SoftmaxAttentionGpu, decodingRepeatsThePrefill) {
  using T = TypeParam;
  const Extents e{2, 1, 64, 64};
  const Inputs prompt(e, {65}, {65}, 16, 70);
  Device<T> whole(prompt);
  whole.run();
  finish();
  const Array<float, 2> expected = whole.out.host();
  for (const std::int64_t page : {1, 64})
    for (const std::int64_t position : {0, 1, 39, 64}) {
      Inputs one(e, {1}, {position + 1}, page, 70);
      for (std::int64_t i = 0; i < e.HQ * e.d; ++i) one.q(0, i) = prompt.q(position, i);
      Device<T> alone(one);
      alone.run();
      finish();
      const Array<float, 2> got = alone.out.host();
      EXPECT_TRUE(same_bits(cut(expected.view(), position, position + 1), cut(got.view(), 0, 1)))
          << "position " << position << ", pages of " << page;
    }
}

// Numbers of pages that are none hide their keys; the other keys are seen as if they were all.
TYPED_TEST(SoftmaxAttentionGpu, wrongPagesAreNotRead) {
  using T = TypeParam;
  const Extents e{1, 1, 32, 32};
  Inputs in(e, {1, 1}, {40, 16}, 16, 80);
  in.table(0, 2) = -1;  // the first row keeps 32 keys
  in.table(1, 0) = 2147480000;
  Device<T> device(in);
  device.run();
  finish();
  Inputs seen = in;
  seen.lengths(0) = 32, seen.lengths(1) = 0;
  Device<T> expected(seen);
  expected.run();
  finish();
  EXPECT_TRUE(same_bits(device.out, expected.out) && same_bits(device.lse, expected.lse));
}

TYPED_TEST(SoftmaxAttentionGpu, aGraphReplaysWithOtherContents) {
  using T = TypeParam;
  const Extents e{4, 2, 64, 64};
  const Inputs first(e, {1, 3}, {20, 33}, 16, 90), second(e, {1, 3}, {33, 20}, 16, 91);
  Device<T> captured(first), direct(second);
  ASSERT_EQ(first.table.shape(), second.table.shape());
  replay_behind_change([&](cudaStream_t stream) { captured.run(true, -kInfinity, stream); },
                       [&] {
                         captured.q.set(second.q);
                         captured.k_pages.set(direct.k_pages.elements());
                         captured.v_pages.set(direct.v_pages.elements());
                         captured.table.set(direct.table.elements());
                         captured.lengths.set(direct.lengths.elements());
                       });
  direct.run();
  finish();
  EXPECT_TRUE(same_bits(captured.out, direct.out) && same_bits(captured.lse, direct.lse));
}

// A pool of more than 2^31 elements: its last page gives what the same page in a small pool gives.
TYPED_TEST(SoftmaxAttentionGpu, offsetsGoBeyond32Bits) {
  using T = TypeParam;
  constexpr std::int64_t kPage = 64, kHeads = 2, kD = 128, kElements = kPage * kHeads * kD;
  const std::int64_t pages = (std::int64_t{1} << 31) / kElements + 2;
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < static_cast<std::size_t>(pages * kElements) * sizeof(T) * 2)
    GTEST_SKIP() << "there is too little device memory for a pool beyond 2^31 elements";
  const Inputs in({2, 2, kD, kD}, {1}, {50}, kPage, 95);
  Device<T> small(in), large(in);
  small.run();
  finish();
  DeviceTensor<T, 4> pool(Shape<4>{pages, kPage, kHeads, kD});
  DeviceTensor<std::int32_t, 2> table(
      Array<std::int32_t, 2>(large.table.shape(), static_cast<std::int32_t>(pages - 1)));
  ASSERT_EQ(cudaMemcpy(pool.data() + (pages - 1) * kElements,
                       large.k_pages.data() + in.table(0, 0) * kElements, kElements * sizeof(T),
                       cudaMemcpyDeviceToDevice),
            cudaSuccess);
  kernels::SoftmaxAttention<T> keys_alone = small.arguments();
  keys_alone.v_pages = keys_alone.k_pages;
  kernels::softmax_attention<T>(keys_alone, nullptr);
  kernels::SoftmaxAttention<T> beyond = large.arguments();
  beyond.k_pages = beyond.v_pages = std::as_const(pool).view();
  beyond.block_table = std::as_const(table).view();
  kernels::softmax_attention<T>(beyond, nullptr);
  finish();
  EXPECT_TRUE(same_bits(small.out, large.out) && same_bits(small.lse, large.lse));
}

// Keys go to the slots that are named, as bits; every other slot keeps its own.
TYPED_TEST(SoftmaxAttentionGpu, writesGoToTheirSlots) {
  using T = TypeParam;
  for (const std::int64_t page : {1, 16}) {
    const std::int64_t pages = 48 / page, heads = 3, d = 65;
    const auto x = on_grid<double>(Shape<2>{7, heads * d}, {.seed = 96});
    const Sizes slots{47, 0, -1, 16, 48, 17, -7};
    Array<float, 2> expected(Shape<2>{48, heads * d});
    for (std::size_t t = 0; t < slots.size(); ++t)
      if (0 <= slots[t] && slots[t] < 48)
        for (std::int64_t i = 0; i < heads * d; ++i)
          expected(slots[t], i) = static_cast<float>(x(static_cast<std::int64_t>(t), i));
    const GappedRows<T> device_x(x);
    const DeviceTensor<std::int32_t, 1> device_slots(ints(slots));
    DeviceTensor<T, 4> pool(Shape<4>{pages, page, heads, d});
    kernels::write_pages<T>({.x = by_heads(device_x.inputs(), heads),
                             .slots = device_slots.view(),
                             .pages = pool.view()},
                            nullptr);
    finish();
    const Array<float, 4> host = pool.host();
    bool same = pool.guards_intact();
    for (std::int64_t i = 0; i < host.size(); ++i) {
      const float got = host.data()[i], wanted = expected.data()[i];
      same = same && (std::isnan(wanted) ? std::isnan(got) : got == wanted);
    }
    EXPECT_TRUE(same);
    AccuracyLog::get().add_bits("softmax_attention", "write into pages, bit by bit", same);
  }
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(SoftmaxAttentionArguments, areRefusedByName) {
  using In = kernels::SoftmaxAttention<Bf16>;
  const auto complaint = [](auto change) {
    In in{.q = unread<const Bf16, 3>({5, 4, 64}),
          .k_pages = unread<const Bf16, 4>({9, 16, 2, 64}),
          .v_pages = unread<const Bf16, 4>({9, 16, 2, 32}),
          .block_table = unread<const std::int32_t, 2>({3, 7}),
          .seq_lens = unread<const std::int32_t, 1>({3}),
          .query_start_loc = unread<const std::int32_t, 1>({4}),
          .out = unread<Bf16, 3>({5, 4, 32}),
          .lse = unread<float, 2>({4, 5})};
    change(in);
    return complaint_of([&] { kernels::softmax_attention<Bf16>(in, nullptr); });
  };
  const std::string name = "softmax_attention: ";
  EXPECT_EQ(complaint([](In& in) {
              in.out = unread<Bf16, 3>({5, 4, 64});
            }),
            name + "out is expected to be [T, HQ, dv] = [5, 4, 32]; got [5, 4, 64]");
  EXPECT_EQ(complaint([](In& in) {
              in.v_pages = unread<const Bf16, 4>({9, 8, 2, 32});
            }),
            name +
                "v_pages is expected to be [pages, page, HKV, dv] = [9, 16, 2, 32]; "
                "got [9, 8, 2, 32]");
  EXPECT_EQ(complaint([](In& in) {
              in.k_pages = unread<const Bf16, 4>({9, 16, 2, 65});
            }),
            name +
                "k_pages is expected to be [pages, page, HKV, d] = [9, 16, 2, 64]; "
                "got [9, 16, 2, 65]");
  EXPECT_EQ(complaint([](In& in) {
              in.k_pages = unread<const Bf16, 4>({9, 16, 3, 64});
            }),
            name +
                "k_pages is expected to be [pages, page, HKV, d] with HKV a divisor of HQ = 4; "
                "got [9, 16, 3, 64]");
  EXPECT_EQ(complaint([](In& in) {
              in.block_table = unread<const std::int32_t, 2>({2, 7});
            }),
            name + "block_table is expected to be [N, blocks] = [3, 7]; got [2, 7]");
  EXPECT_EQ(complaint([](In& in) { in.query_start_loc = unread<const std::int32_t, 1>({3}); }),
            name + "query_start_loc is expected to be [N + 1] = [4]; got [3]");
  EXPECT_EQ(complaint([](In& in) {
              in.lse = unread<float, 2>({5, 4});
            }),
            name + "lse is expected to be [HQ, T] = [4, 5]; got [5, 4]");
  EXPECT_EQ(complaint([](In& in) {
              in.q = unread<const Bf16, 3>({5, 4, 257});
            }),
            name +
                "q is expected to be [T, HQ, d] with d from 1 to 256 and HQ of at most 65535; "
                "got [5, 4, 257]");
  EXPECT_EQ(complaint([](In& in) {
              in.q = unread<const Bf16, 3>({5, 4, 64}, {512, 128, 2});
            }),
            name + "q is expected to be contiguous in its last dimension; got a stride of 2");
}

TEST(SoftmaxAttentionArguments, ofWritesAreRefusedByName) {
  const auto complaint = [](Shape<1> slots, Shape<4> pages) {
    return complaint_of([&] {
      kernels::write_pages<Bf16>({.x = unread<const Bf16, 3>({5, 2, 64}),
                                  .slots = unread<const std::int32_t, 1>(slots),
                                  .pages = unread<Bf16, 4>(pages)},
                                 nullptr);
    });
  };
  EXPECT_EQ(complaint({4}, {9, 16, 2, 64}),
            "write_pages: slots is expected to be [T] = [5]; got [4]");
  EXPECT_EQ(complaint({5}, {9, 16, 3, 64}),
            "write_pages: pages is expected to be [pages, page, heads, d] = [9, 16, 2, 64]; "
            "got [9, 16, 3, 64]");
}

}  // namespace
}  // namespace lockstep
