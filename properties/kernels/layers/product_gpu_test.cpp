// The kernels of products with weights and of experts against their references.
#include "kernels/layers/product.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/layers/product.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

template <std::size_t Rank>
Array<double, Rank> draw(const Shape<Rank>& shape, std::uint64_t seed) {
  return on_grid<double>(shape, {.seed = seed});
}

/// [E, N, K] of rows of E N times K elements.
template <AnyView V>
TensorView<ElementOf<V>, 3> by_experts(const V& rows, std::int64_t E, std::int64_t N) {
  return make_view(rows.data_handle(), Shape<3>{E, N, rows.extent(1)},
                   Shape<3>{N * rows.stride(0), rows.stride(0), 1});
}

template <class S>
Array<S, 2> reference_product(const Array<double, 2>& x, const Array<double, 2>& weight) {
  Array<S, 2> out(Shape<2>{x.extent(0), weight.extent(0)});
  reference::product<S>(cast<S>(x), cast<S>(weight), out);
  return out;
}

template <class S>
Array<S, 2> reference_grouped(const Array<double, 2>& x, const Array<double, 2>& weight,
                              const Array<std::int32_t, 1>& starts) {
  const std::int64_t E = starts.extent(0) - 1, N = weight.extent(0) / E;
  const Array<S, 2> rows = cast<S>(weight);
  Array<S, 2> out(Shape<2>{x.extent(0), N});
  reference::grouped_product<S>(cast<S>(x), by_experts(rows.view(), E, N), starts, out);
  return out;
}

template <class T>
class ProductGpu : public GpuTest {};
using Types = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Fp16, float,
#endif
    Bf16>;
TYPED_TEST_SUITE(ProductGpu, Types);

// Extents below, at and above a tile; no rows, and no terms.
TYPED_TEST(ProductGpu, agreesWithTheReference) {
  using T = TypeParam;
  struct Extents {
    std::int64_t T, N, K;
  };
  std::uint64_t seed = 1;
  for (const auto& [rows, N, K] : {Extents{0, 5, 3},
                                   {1, 1, 1},
                                   {65, 63, 64},
                                   {64, 65, 31},
                                   {63, 130, 257},
                                   {1, 200, 1000},
                                   {3, 2, 0}}) {
    const auto x = draw<2>({rows, K}, ++seed), weight = draw<2>({N, K}, ++seed);
    const GappedRows<T> device_x(x), device_weight(weight);
    GappedRows<T> out(rows, N), again(rows, N);
    for (GappedRows<T>* const result : {&out, &again})
      kernels::product<T, T>(
          {.x = device_x.inputs(), .weight = device_weight.inputs(), .out = result->view()},
          nullptr);
    finish();
    EXPECT_TRUE(within_yardstick("product", "product", out,
                                 stored<T>(reference_product<float>(x, weight)),
                                 reference_product<double>(x, weight)));
    EXPECT_TRUE(same_bits(out, again));
  }
}

// Each token meets the matrix of its expert alone: experts without tokens, with one, with tiles and
// a bit, and rows after the last expert.
TYPED_TEST(ProductGpu, ofExpertsAgreesWithTheReference) {
  using T = TypeParam;
  std::uint64_t seed = 100;
  for (const auto& [lengths, padding] :
       {std::pair<Sizes, std::int64_t>{{0, 1, 65, 0, 63, 128}, 3}, {{0, 0}, 70}, {{7}, 0}}) {
    const auto E = static_cast<std::int64_t>(lengths.size());
    const std::int64_t N = 70, K = 45, rows = sum(lengths) + padding;
    const auto x = draw<2>({rows, K}, ++seed), weight = draw<2>({E * N, K}, ++seed);
    const auto starts = starts_of(lengths);
    const GappedRows<T> device_x(x), device_weight(weight);
    const DeviceTensor<std::int32_t, 1> device_starts(starts);
    GappedRows<T> out(rows, N);
    kernels::grouped_product<T>({.x = device_x.inputs(),
                                 .weight = by_experts(device_weight.inputs(), E, N),
                                 .starts = device_starts.view(),
                                 .out = out.view()},
                                nullptr);
    finish();
    EXPECT_TRUE(within_yardstick("product", "product of experts", out,
                                 stored<T>(reference_grouped<float>(x, weight, starts)),
                                 reference_grouped<double>(x, weight, starts)));
  }
}

// A row's bits depend on no other row: alone, in a batch, among the rows of an expert.
TYPED_TEST(ProductGpu, rowsDoNotSeeEachOther) {
  using T = TypeParam;
  constexpr std::int64_t kRows = 130, kN = 33, kK = 300;
  const auto x = draw<2>({kRows, kK}, 200), weight = draw<2>({kN, kK}, 201);
  const GappedRows<T> device_x(x), device_weight(weight);
  GappedRows<T> batch(kRows, kN), grouped(kRows, kN), alone(1, kN);
  kernels::product<T, T>(
      {.x = device_x.inputs(), .weight = device_weight.inputs(), .out = batch.view()}, nullptr);
  const DeviceTensor<std::int32_t, 1> starts(ints({0, kRows}));
  kernels::grouped_product<T>({.x = device_x.inputs(),
                               .weight = by_experts(device_weight.inputs(), 1, kN),
                               .starts = starts.view(),
                               .out = grouped.view()},
                              nullptr);
  kernels::product<T, T>({.x = cut(device_x.inputs(), 100, 101),
                          .weight = device_weight.inputs(),
                          .out = alone.view()},
                         nullptr);
  finish();
  EXPECT_TRUE(same_bits(batch, grouped));
  EXPECT_TRUE(same_bits(contiguous(cut(batch.host().view(), 100, 101)), alone.host()));
}

// Starts that fall or leave the rows are wrong, but nothing is written beside the result.
TYPED_TEST(ProductGpu, wrongStartsStayInside) {
  using T = TypeParam;
  const GappedRows<T> x(draw<2>({9, 8}, 210)), weight(draw<2>({3 * 4, 8}, 211));
  for (const Sizes& wrong : {Sizes{0, 50, 3, 200}, {-5, 9, -7, 4}, {9, 3, 2, 1}}) {
    const DeviceTensor<std::int32_t, 1> starts(ints(wrong));
    GappedRows<T> out(9, 4);
    kernels::grouped_product<T>({.x = x.inputs(),
                                 .weight = by_experts(weight.inputs(), 3, 4),
                                 .starts = starts.view(),
                                 .out = out.view()},
                                nullptr);
    finish();
    EXPECT_TRUE(out.gaps_intact());
  }
}

TYPED_TEST(ProductGpu, aGraphReplaysWithOtherContents) {
  using T = TypeParam;
  const auto x = draw<2>({65, 40}, 220), weight = draw<2>({20, 40}, 221);
  GappedRows<T> captured_x(draw<2>({65, 40}, 222)), captured_weight(draw<2>({20, 40}, 223));
  GappedRows<T> captured(65, 10), direct(65, 10);
  const GappedRows<T> device_x(x), device_weight(weight);
  DeviceTensor<std::int32_t, 1> starts(ints({0, 1, 65}));
  const DeviceTensor<std::int32_t, 1> later(ints({0, 30, 60}));
  const auto run = [&](const GappedRows<T>& a, const GappedRows<T>& w, const auto& from,
                       GappedRows<T>& out, cudaStream_t stream) {
    kernels::grouped_product<T>({.x = a.inputs(),
                                 .weight = by_experts(w.inputs(), 2, 10),
                                 .starts = from.view(),
                                 .out = out.view()},
                                stream);
  };
  replay_behind_change(
      [&](cudaStream_t stream) {
        run(captured_x, captured_weight, std::as_const(starts), captured, stream);
      },
      [&] {
        captured_x.set(x), captured_weight.set(weight);
        starts.set(later.elements());
      });
  run(device_x, device_weight, later, direct, nullptr);
  finish();
  EXPECT_TRUE(same_bits(captured, direct));
}

/// Choices of `k` of E experts for T tokens; some negative.
Array<std::int32_t, 2> draw_choices(std::int64_t T, std::int64_t k, std::int64_t E,
                                    std::uint64_t seed) {
  Array<std::int32_t, 2> experts(Shape<2>{T, k}, 0);
  for (std::int64_t i = 0; i < experts.size(); ++i)
    experts.data()[i] =
        static_cast<std::int32_t>(random_below(static_cast<std::uint64_t>(E + 1), seed, 1, i)) - 1;
  return experts;
}

class ExpertOrderGpu : public GpuTest {};

// Sorting is the reference's, element by element, and undone by combining.
TEST_F(ExpertOrderGpu, isTheReferences) {
  std::uint64_t seed = 300;
  for (const auto& [T, k, E] :
       {std::tuple{0, 2, 3}, {1, 1, 1}, {65, 8, 70}, {63, 1, 2}, {33, 3, 64}}) {
    const auto experts = draw_choices(T, k, E, ++seed);
    const reference::ExpertOrder expected = reference::sorted_by_expert(experts, E);
    const DeviceTensor<std::int32_t, 2> device_experts(experts);
    DeviceTensor<std::int32_t, 1> starts(Shape<1>{E + 1}), source(Shape<1>{T * k});
    DeviceTensor<std::int32_t, 2> place(Shape<2>{T, k});
    kernels::sort_by_expert({.experts = device_experts.view(),
                             .starts = starts.view(),
                             .source = source.view(),
                             .place = place.view()},
                            nullptr);
    finish();
    EXPECT_TRUE(same_bits(starts, DeviceTensor<std::int32_t, 1>(expected.starts)));
    EXPECT_TRUE(same_bits(source, DeviceTensor<std::int32_t, 1>(expected.source)));
    EXPECT_TRUE(same_bits(place, DeviceTensor<std::int32_t, 2>(expected.place)));
    EXPECT_TRUE(starts.guards_intact() && source.guards_intact() && place.guards_intact());
  }
}

TYPED_TEST(ProductGpu, combinedExpertsAgreeWithTheReference) {
  using T = TypeParam;
  constexpr std::int64_t kTokens = 65, kChoices = 4, kE = 7;
  for (const std::int64_t D : {1, 129, 300}) {
    const reference::ExpertOrder order =
        reference::sorted_by_expert(draw_choices(kTokens, kChoices, kE, 400), kE);
    const auto x = draw<2>({kTokens * kChoices, D}, 401);
    const auto weights = draw<2>({kTokens, kChoices}, 402);
    const auto answer = [&]<class S>(S) {
      Array<S, 2> out(Shape<2>{kTokens, D});
      reference::combine_experts<S>(cast<S>(x), order.place, cast<S>(weights), out);
      return out;
    };
    const GappedRows<T> device_x(x);
    const DeviceTensor<std::int32_t, 2> place(order.place);
    const DeviceTensor<float, 2> device_weights(weights);
    GappedRows<T> out(kTokens, D);
    kernels::combine_experts<T>({.x = device_x.inputs(),
                                 .place = place.view(),
                                 .weights = device_weights.view(),
                                 .out = out.view()},
                                nullptr);
    finish();
    EXPECT_TRUE(
        within_yardstick("product", "experts combined", out, stored<T>(answer(0.0f)), answer(0.0)));
  }
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(ProductArguments, areRefusedByName) {
  using In = kernels::Product<Bf16, Bf16>;
  const auto complaint = [](auto change) {
    In in{.x = unread<const Bf16, 2>({4, 8}),
          .weight = unread<const Bf16, 2>({6, 8}),
          .out = unread<Bf16, 2>({4, 6})};
    change(in);
    return complaint_of([&] { kernels::product<Bf16, Bf16>(in, nullptr); });
  };
  EXPECT_EQ(complaint([](In& in) {
              in.weight = unread<const Bf16, 2>({6, 9});
            }),
            "product: weight is expected to be [N, K] = [6, 8]; got [6, 9]");
  EXPECT_EQ(complaint([](In& in) {
              in.out = unread<Bf16, 2>({4, 5});
            }),
            "product: out is expected to be [T, N] = [4, 6]; got [4, 5]");
  EXPECT_EQ(complaint([](In& in) {
              in.x = unread<const Bf16, 2>({4, 8}, {1, 4});
            }),
            "product: x is expected to be contiguous in its last dimension; got a stride of 4");
}

TEST(ProductArguments, ofExpertsAreRefusedByName) {
  using In = kernels::GroupedProduct<Bf16>;
  const auto complaint = [](auto change) {
    In in{.x = unread<const Bf16, 2>({4, 8}),
          .weight = unread<const Bf16, 3>({3, 6, 8}),
          .starts = unread<const std::int32_t, 1>({4}),
          .out = unread<Bf16, 2>({4, 6})};
    change(in);
    return complaint_of([&] { kernels::grouped_product<Bf16>(in, nullptr); });
  };
  EXPECT_EQ(complaint([](In& in) { in.starts = unread<const std::int32_t, 1>({3}); }),
            "grouped_product: starts is expected to be [E + 1] = [4]; got [3]");
  EXPECT_EQ(complaint([](In& in) {
              in.weight = unread<const Bf16, 3>({3, 6, 7});
            }),
            "grouped_product: weight is expected to be [E, N, K] = [3, 6, 8]; got [3, 6, 7]");

  const auto sort_complaint = [](auto change) {
    kernels::ExpertOrder in{.experts = unread<const std::int32_t, 2>({4, 2}),
                            .starts = unread<std::int32_t, 1>({4}),
                            .source = unread<std::int32_t, 1>({8}),
                            .place = unread<std::int32_t, 2>({4, 2})};
    change(in);
    return complaint_of([&] { kernels::sort_by_expert(in, nullptr); });
  };
  using Order = kernels::ExpertOrder;
  EXPECT_EQ(sort_complaint([](Order& in) { in.source = unread<std::int32_t, 1>({4}); }),
            "sort_by_expert: source is expected to be [T k] = [8]; got [4]");
  EXPECT_EQ(sort_complaint([](Order& in) {
              in.place = unread<std::int32_t, 2>({4, 3});
            }),
            "sort_by_expert: place is expected to be [T, k] = [4, 2]; got [4, 3]");

  const kernels::CombineExperts<Bf16> combine{.x = unread<const Bf16, 2>({8, 5}),
                                              .place = unread<const std::int32_t, 2>({4, 2}),
                                              .weights = unread<const float, 2>({4, 3}),
                                              .out = unread<Bf16, 2>({4, 5})};
  EXPECT_EQ(complaint_of([&] { kernels::combine_experts<Bf16>(combine, nullptr); }),
            "combine_experts: weights is expected to be [T, k] = [4, 2]; got [4, 3]");
}

}  // namespace
}  // namespace lockstep
