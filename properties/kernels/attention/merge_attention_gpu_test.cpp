// The kernel of merge_attention against the reference of the same name.
#include "kernels/attention/merge_attention.hpp"

#include <gmock/gmock.h>

#include "properties/support/gpu.hpp"
#include "reference/attention/softmax_attention.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

constexpr const char* kOperation = "merge_attention";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Parts {
  Array<double, 3> out_a, out_b;
  Array<double, 2> lse_a, lse_b;
};

/// Every pair of a part with keys and one without, of either sign; outputs of empty parts are NaN.
Parts drawn(std::int64_t tokens, std::int64_t H, std::int64_t dv, std::uint64_t seed) {
  Parts parts{draw(Shape<3>{tokens, H, dv}, seed, 1), draw(Shape<3>{tokens, H, dv}, seed, 2),
              draw(Shape<2>{H, tokens}, seed, 3), draw(Shape<2>{H, tokens}, seed, 4)};
  const auto empty = [&](Array<double, 3>& out, Array<double, 2>& lse, std::int64_t t,
                         std::int64_t h, double sign) {
    lse(h, t) = sign * kInfinity;
    for_each_element(at(out.view(), t, h), [](const auto&, double& e) { e = std::nan(""); });
  };
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t h = 0; h < H; ++h) {
      const std::int64_t kind = (t * H + h) % 12;
      if (kind < 4) empty(parts.out_a, parts.lse_a, t, h, kind % 2 == 0 ? -1 : 1);
      if (kind >= 2 && kind < 6) empty(parts.out_b, parts.lse_b, t, h, kind % 2 == 0 ? 1 : -1);
    }
  return parts;
}

template <class T>
class MergeAttentionGpu : public GpuTest {};
using Types = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Fp16,
#endif
    Bf16>;
TYPED_TEST_SUITE(MergeAttentionGpu, Types);

TYPED_TEST(MergeAttentionGpu, isItsReference) {
  using T = TypeParam;
  std::uint64_t seed = 0;
  for (const auto& [tokens, H, dv] :
       {Shape<3>{1, 1, 8}, {37, 5, 128}, {300, 16, 128}, {9, 3, 512}}) {
    SCOPED_TRACE(::testing::PrintToString(Sizes{tokens, H, dv}));
    const Parts in = drawn(tokens, H, dv, ++seed);
    Array<double, 3> out(Shape<3>{tokens, H, dv});
    Array<double, 2> lse(Shape<2>{H, tokens});
    reference::merge_attention<double>(in.out_a, in.lse_a, in.out_b, in.lse_b, out, lse);
    const auto out_a = cast<float>(in.out_a), out_b = cast<float>(in.out_b);
    const auto lse_a = cast<float>(in.lse_a), lse_b = cast<float>(in.lse_b);
    Array<float, 3> yardstick(out.shape());
    Array<float, 2> yardstick_lse(lse.shape());
    reference::merge_attention<float>(out_a, lse_a, out_b, lse_b, yardstick, yardstick_lse);
    for (float& x : yardstick) x = rounded(x, kernels::format_of<T>());
    const DeviceTensor<T, 3> a(in.out_a), b(in.out_b);
    const DeviceTensor<float, 2> of_a(in.lse_a), of_b(in.lse_b);
    DeviceTensor<T, 3> both(out.shape());
    DeviceTensor<float, 2> of_both(lse.shape());
    kernels::merge_attention<T>({.out_a = a.view(),
                                 .lse_a = of_a.view(),
                                 .out_b = b.view(),
                                 .lse_b = of_b.view(),
                                 .out = both.view(),
                                 .lse = of_both.view()},
                                nullptr);
    finish();
    EXPECT_TRUE(within_yardstick(kOperation, "out", both, yardstick, out));
    EXPECT_TRUE(within_yardstick(kOperation, "lse", of_both, yardstick_lse, lse));
  }
}

TEST(MergeAttentionArguments, areRefusedByName) {
  const auto complaint = [&](auto change) {
    kernels::MergeAttention<Bf16> in{.out_a = unread<const Bf16, 3>({9, 4, 128}),
                                     .lse_a = unread<const float, 2>({4, 9}),
                                     .out_b = unread<const Bf16, 3>({9, 4, 128}),
                                     .lse_b = unread<const float, 2>({4, 9}),
                                     .out = unread<Bf16, 3>({9, 4, 128}),
                                     .lse = unread<float, 2>({4, 9})};
    change(in);
    return complaint_of([&] { kernels::merge_attention<Bf16>(in, nullptr); });
  };
  using In = kernels::MergeAttention<Bf16>;
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint([](In& in) {
                in.out_b = unread<const Bf16, 3>({8, 4, 128});
              }),
              HasSubstr("out_b is expected to be [T, H, dv] = [9, 4, 128]; got [8, 4, 128]"));
  EXPECT_THAT(complaint([](In& in) {
                in.lse_a = unread<const float, 2>({9, 4});
              }),
              HasSubstr("lse_a is expected to be [H, T] = [4, 9]; got [9, 4]"));
  EXPECT_THAT(complaint([](In& in) {
                in.out_a = unread<const Bf16, 3>({9, 4, 12});
              }),
              HasSubstr("out_a is expected to be [T, H, dv] with dv a multiple of 8"));
}

}  // namespace
}  // namespace lockstep
