// The attention of a latent decoder layer, from hidden states to hidden states, by each of its
// forms, against the reference in double.
#include "kernels/models/mla_layer.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/attention/mla_dispatch.hpp"
#include "reference/attention/mla_rope_decode.hpp"
#include "reference/layers/batched_product.hpp"
#include "reference/layers/product.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::E4m3;
using kernels::MlaForm;
using kernels::MlaPlan;

constexpr const char* kOperation = "mla_layer";
constexpr std::int64_t kHidden = 256, kNope = 128, kPe = 64, kValue = 128, kLatent = 512;
constexpr float kKvScale = 0.013f;

/// Numbers of about 1 / sqrt(columns), exact in bf16.
Array<double, 2> weight(std::int64_t rows, std::int64_t columns, std::uint64_t stream) {
  Array<double, 2> all = draw<2>({rows, columns}, 77, stream);
  const double scale = std::exp2(std::round(std::log2(1.7 / std::sqrt(double(columns)))));
  for (double& x : all) x *= scale;
  return all;
}

/// A layer's weights. H of all ranks' heads.
struct Weights {
  explicit Weights(std::int64_t heads, std::int64_t low = 128)
      : H(heads),
        low(low),
        qkv_a(weight(low + kLatent + kPe, kHidden, 1)),
        q_b(weight(H * (kNope + kPe), low > 0 ? low : kHidden, 2)),
        kv_b(weight(H * (kNope + kValue), kLatent, 3)),
        o_proj(weight(kHidden, H * kValue, 4)),
        q_a_norm(draw<1>({std::max<std::int64_t>(low, 1)}, 77, 5)),
        kv_a_norm(draw<1>({kLatent}, 77, 6)),
        up(reference::split_kv_b<double>(std::as_const(kv_b).view(), H, kNope)),
        rope(reference::yarn_rope<double>(kPe, 10000,
                                          {.factor = 40, .mscale = 1.0, .mscale_all_dim = 1.0})),
        frequencies(Shape<1>{kPe / 2}) {
    for (double& x : kv_a_norm) x = 1 + x / 2;
    for (std::int64_t i = 0; i < kPe / 2; ++i)  // the angles are the kernels', which are float
      rope.frequencies(i) = frequencies(i) = static_cast<float>(rope.frequencies(i));
  }
  float softmax_scale() const {
    return static_cast<float>(rope.softmax_factor / std::sqrt(double(kNope + kPe)));
  }

  std::int64_t H, low;
  Array<double, 2> qkv_a, q_b, kv_b, o_proj;
  Array<double, 1> q_a_norm, kv_a_norm;
  reference::MlaUpWeights<double> up;
  reference::Rope<double> rope;
  Array<float, 1> frequencies;
};

/// Requests: what is cached already, and the new tokens.
struct Question {
  Sizes prefixes, fresh;
  std::int64_t page = 16;
  std::int64_t requests() const { return static_cast<std::int64_t>(prefixes.size()); }
  Sizes lengths() const {
    Sizes all = prefixes;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += fresh[i];
    return all;
  }
};

/// Hidden states of every request, and where its tokens lie in the cache.
struct Inputs {
  explicit Inputs(const Question& q, std::uint64_t seed = 1) : question(q) {
    std::int64_t widest = 2;
    for (const std::int64_t length : q.lengths()) {
      pages += (length + q.page - 1) / q.page;
      widest = std::max(widest, (length + q.page - 1) / q.page + 1);
    }
    pages += 3;
    table = Array<std::int32_t, 2>(Shape<2>{q.requests(), widest}, 2147480000);
    std::int64_t next = pages - 2;
    for (std::int64_t b = 0; b < q.requests(); ++b) {
      const std::int64_t length = q.lengths()[static_cast<std::size_t>(b)];
      hidden.push_back(draw<2>({length, kHidden}, seed, static_cast<std::uint64_t>(100 + b)));
      for (std::int64_t i = 0; i * q.page < length; ++i)
        table(b, i) = static_cast<std::int32_t>(next--);
    }
  }
  std::int32_t slot(std::int64_t b, std::int64_t place) const {
    return static_cast<std::int32_t>(table(b, place / question.page) * question.page +
                                     place % question.page);
  }

  Question question;
  std::int64_t pages = 0;
  std::vector<Array<double, 2>> hidden;
  Array<std::int32_t, 2> table;
};

/// A tensor as S, rounded to bf16 where that is how the layer stores it.
template <class S, std::size_t Rank>
Array<S, Rank> kept(Array<S, Rank> x, bool rounds) {
  if (rounds)
    for (S& e : x) e = static_cast<S>(rounded(static_cast<double>(e), Format::bf16));
  return x;
}

/// The cached form of a value: 0 bf16, 1 e4m3 with one scale, 2 tokens of 656 bytes.
template <class S>
S cached(S x, int form, double amax) {
  const double scale =
      form == 1 ? double{kKvScale} : std::exp2(std::ceil(std::log2(std::max(amax / 448, 1e-4))));
  const auto value = static_cast<double>(x);
  return static_cast<S>(form == 0 ? value : rounded(value / scale, Format::e4m3) * scale);
}

/// Absorbed attention, its queries at the end of their context: [n, H, 128].
template <class S>
Array<S, 3> attended(const reference::MlaInputs<S>& in, const reference::MlaUpWeights<S>& up,
                     double scale, bool rounds) {
  const auto view = [](const auto& x) { return std::as_const(x).view(); };
  const Array<S, 3> wide = kept(reference::absorbed_queries<S>(in.q_nope, in.q_pe, up), rounds);
  const auto latent = reference::one_head<S>(in.latent);
  const Array<S, 3> k = reference::side_by_side<S>(latent, reference::one_head<S>(in.k_pe), 576);
  const std::int64_t n = wide.extent(0), H = wide.extent(1);
  Array<S, 3> a(Shape<3>{n, H, kLatent}), heads(Shape<3>{n, H, kValue});
  Array<S, 2> lse(Shape<2>{H, n});
  reference::attention_row<S>(wide, k, latent, {.scale = scale, .causal = true}, a, lse);
  a = kept(a, rounds);
  reference::project_values<S>(view(a), up, heads);
  return kept(heads, rounds);
}

/// The new tokens' hidden states after the layer, [T, hidden], and their heads. In float, rounded
/// where the layer stores; in double, exact.
template <class S>
struct Answer {
  Array<S, 2> out, heads;
};

template <class S>
Answer<S> answer(const Weights& w, const Inputs& in, int form = 0) {
  constexpr bool kRounds = std::is_same_v<S, float>;
  std::int64_t T = 0;
  for (const std::int64_t n : in.question.fresh) T += n;
  Answer<S> result{Array<S, 2>(Shape<2>{T, kHidden}), Array<S, 2>(Shape<2>{T, w.H * kValue})};
  const auto qkv_a = cast<S>(w.qkv_a), q_b = cast<S>(w.q_b), o_proj = cast<S>(w.o_proj);
  const auto q_norm = cast<S>(w.q_a_norm), kv_norm = cast<S>(w.kv_a_norm);
  const reference::MlaUpWeights<S> up{cast<S>(w.up.w_kc), cast<S>(w.up.w_vc)};
  const reference::Rope<S> rope{w.rope.frequencies.template cast<S>(),
                                static_cast<S>(w.rope.magnitude)};
  const auto view = [](const auto& x) { return std::as_const(x).view(); };
  std::int64_t row = 0;
  for (std::size_t b = 0; b < in.hidden.size(); ++b) {
    const auto hidden = cast<S>(in.hidden[b]);
    const std::int64_t L = hidden.extent(0), n = in.question.fresh[b];
    if (L == 0) continue;
    Array<S, 2> all(Shape<2>{L, w.low + kLatent + kPe});
    reference::product<S>(view(hidden), view(qkv_a), all);
    all = kept(all, kRounds);
    const auto columns = [&](std::int64_t first, std::int64_t count) {
      return make_view(std::as_const(all).data() + first, Shape<2>{L, count},
                       Shape<2>{all.extent(1), 1});
    };
    Array<S, 2> to_q = hidden;
    if (w.low > 0) {
      to_q = Array<S, 2>(Shape<2>{L, w.low});
      reference::rms_norm<S>(columns(0, w.low), view(q_norm), S(1e-6), to_q);
      to_q = kept(to_q, kRounds);
    }
    Array<S, 2> q(Shape<2>{L, w.H * (kNope + kPe)});
    reference::product<S>(view(to_q), view(q_b), q);
    q = kept(q, kRounds);
    Array<S, 2> latent(Shape<2>{L, kLatent}), k_pe(Shape<2>{L, kPe});
    reference::rms_norm<S>(columns(w.low, kLatent), view(kv_norm), S(1e-6), latent);
    Array<S, 3> q_nope(Shape<3>{L, w.H, kNope}), q_pe(Shape<3>{L, w.H, kPe});
    for (std::int64_t t = 0; t < L; ++t) {
      for (std::int64_t i = 0; i < kPe; ++i) k_pe(t, i) = all(t, w.low + kLatent + i);
      for (std::int64_t h = 0; h < w.H; ++h)
        for (std::int64_t i = 0; i < kNope + kPe; ++i)
          (i < kNope ? q_nope(t, h, i) : q_pe(t, h, i - kNope)) = q(t, h * (kNope + kPe) + i);
    }
    Array<std::int32_t, 1> positions(Shape<1>{L});
    for (std::int64_t t = 0; t < L; ++t) positions(t) = static_cast<std::int32_t>(t);
    reference::apply_rope<S>(rope, positions, reference::RopePairs::interleaved, q_pe);
    reference::apply_rope<S>(rope, positions, reference::RopePairs::interleaved,
                             make_view(k_pe.data(), Shape<3>{L, 1, kPe}));
    q_pe = kept(q_pe, kRounds);
    latent = kept(latent, kRounds && form == 0);
    k_pe = kept(k_pe, kRounds && form != 1);
    if (kRounds && form > 0)
      for (std::int64_t t = 0; t < L; ++t) {
        double amax[4]{};
        for (std::int64_t i = 0; i < kLatent; ++i)
          amax[i / 128] = std::max(amax[i / 128], std::abs(double(latent(t, i))));
        for (std::int64_t i = 0; i < kLatent; ++i)
          latent(t, i) = cached(latent(t, i), form, amax[i / 128]);
        for (std::int64_t i = 0; form == 1 && i < kPe; ++i) k_pe(t, i) = cached(k_pe(t, i), 1, 0);
      }
    const auto fresh = [&](const Array<S, 3>& x) { return cut(view(x), L - n, L); };
    const Array<S, 3> heads = attended<S>({fresh(q_nope), fresh(q_pe), view(latent), view(k_pe)},
                                          up, w.softmax_scale(), kRounds);
    const auto flat = make_view(std::as_const(heads).data(), Shape<2>{n, w.H * kValue});
    Array<S, 2> out(Shape<2>{n, kHidden});
    reference::product<S>(flat, view(o_proj), out);
    out = kept(out, kRounds);
    for (std::int64_t t = 0; t < n; ++t, ++row) {
      mapped(at(result.out.view(), row)) = mapped(at(view(out), t));
      mapped(at(result.heads.view(), row)) = mapped(at(flat, t));
    }
  }
  return result;
}

/// Weights on the device, of heads [first, first + heads).
struct DeviceWeights {
  DeviceWeights(const Weights& w, std::int64_t first, std::int64_t heads)
      : H(heads),
        low(w.low),
        magnitude(static_cast<float>(w.rope.magnitude)),
        softmax_scale(w.softmax_scale()),
        qkv_a(w.qkv_a),
        q_b(rows(w.q_b, first * 192, heads * 192)),
        kv_b(rows(w.kv_b, first * 256, heads * 256)),
        o_proj(contiguous(make_view(w.o_proj.data() + first * kValue,
                                    Shape<2>{kHidden, heads * kValue},
                                    Shape<2>{w.o_proj.extent(1), 1}))),
        w_kc(Shape<3>{heads, kLatent, kNope}),
        w_vc(Shape<3>{heads, kValue, kLatent}),
        q_a_norm(w.q_a_norm),
        kv_a_norm(w.kv_a_norm),
        frequencies(w.frequencies) {
    const auto turned = [&](const Array<double, 3>& all) {  // columns that are summed last
      return contiguous(transposed(cut(all.view(), first, first + heads)));
    };
    host_kc = turned(w.up.w_kc);
    host_vc = turned(w.up.w_vc);
    w_kc = DeviceTensor<Bf16, 3>(host_kc);
    w_vc = DeviceTensor<Bf16, 3>(host_vc);
  }
  static Array<double, 2> rows(const Array<double, 2>& all, std::int64_t first, std::int64_t n) {
    return contiguous(cut(all.view(), first, first + n));
  }

  /// w_kc and w_vc in e4m3, with one scale or one for each block of 128 x 128.
  void scale(bool blocks) {
    const auto scaled = [&](const Array<double, 3>& x,
                            std::optional<DeviceTensor<E4m3, 3>>& numbers,
                            std::optional<DeviceTensor<float, 3>>& scale) {
      const std::int64_t N = x.extent(1), K = x.extent(2);
      Array<double, 3> s(blocks ? Shape<3>{H, (N + 127) / 128, (K + 127) / 128} : Shape<3>{1, 1, 1},
                         0);
      const auto of = [&](const auto& i) -> double& {
        return blocks ? s(i[0], i[1] / 128, i[2] / 128) : s(0, 0, 0);
      };
      for_each_element(x.view(), [&](const auto& i, double e) {
        of(i) = std::max<double>(of(i), float(std::abs(e) / 448));
      });
      Array<double, 3> values = x;
      for_each_element(values.view(), [&](const auto& i, double& e) { e = e / of(i); });
      numbers.emplace(values);
      scale.emplace(s);
    };
    scaled(host_kc, kc_numbers, kc_scale);
    scaled(host_vc, vc_numbers, vc_scale);
  }

  kernels::MlaWeights view() const {
    kernels::MlaWeights all{.qkv_a = qkv_a.view(),
                            .q_b = q_b.view(),
                            .kv_a_norm = kv_a_norm.view(),
                            .kv_b = kv_b.view(),
                            .w_kc = w_kc.view(),
                            .w_vc = w_vc.view(),
                            .o_proj = o_proj.view(),
                            .frequencies = frequencies.view(),
                            .magnitude = magnitude,
                            .softmax_scale = softmax_scale};
    if (low > 0) all.q_a_norm = q_a_norm.view();
    if (kc_numbers) {
      all.scaled_w_kc = {kc_numbers->view(), kc_scale->view()};
      all.scaled_w_vc = {vc_numbers->view(), vc_scale->view()};
    }
    return all;
  }

  std::int64_t H, low;
  float magnitude, softmax_scale;
  DeviceTensor<Bf16, 2> qkv_a, q_b, kv_b, o_proj;
  DeviceTensor<Bf16, 3> w_kc, w_vc;
  DeviceTensor<Bf16, 1> q_a_norm, kv_a_norm;
  DeviceTensor<float, 1> frequencies;
  Array<double, 3> host_kc, host_vc;
  std::optional<DeviceTensor<E4m3, 3>> kc_numbers, vc_numbers;
  std::optional<DeviceTensor<float, 3>> kc_scale, vc_scale;
};

template <class C>
constexpr std::int64_t kColumns = std::is_same_v<C, std::uint8_t> ? 656 : 576;
template <class C>
constexpr int kCached = std::is_same_v<C, Bf16>   ? 0
                        : std::is_same_v<C, E4m3> ? 1
                                                  : 2;

/// The cache of a batch of requests: NaN where nothing was written.
template <class C>
struct Cache {
  explicit Cache(const Inputs& in)
      : latents(Shape<3>{in.pages, in.question.page, kColumns<C>}),
        kv_scale(Array<float, 1>(Shape<1>{1}, kKvScale)),
        table(in.table) {}
  DeviceTensor<C, 3> latents;
  DeviceTensor<float, 1> kv_scale;
  DeviceTensor<std::int32_t, 2> table;
};

/// Tokens first[b] … last[b] of every request, on the device, and what comes out.
struct Batch {
  Batch(const Inputs& in, std::int64_t H, const Sizes& first, const Sizes& last)
      : Batch(in, H, first, last, packed(in, first, last)) {}

  template <class C>
  kernels::MlaTokens<C> tokens(Cache<C>& cache, bool ragged) {
    kernels::MlaTokens<C> all{.hidden = std::as_const(hidden).view(),
                              .positions = std::as_const(positions).view(),
                              .slots = std::as_const(slots).view(),
                              .cache = cache.latents.view(),
                              .block_table = std::as_const(cache.table).view(),
                              .seq_lens = std::as_const(lengths).view(),
                              .out = out.view(),
                              .heads = heads.view()};
    if (ragged) all.query_start_loc = std::as_const(starts).view();
    if (std::is_same_v<C, E4m3>) all.kv_scale = std::as_const(cache.kv_scale).view();
    return all;
  }
  template <class C>
  void run(const DeviceWeights& w, Cache<C>& cache, const MlaPlan& plan, bool ragged = true,
           cudaStream_t stream = nullptr) {
    kernels::MlaTokens<C> all = tokens(cache, ragged);
    const kernels::MlaWeights weights = w.view();
    const std::int64_t bytes = kernels::mla_layer_workspace(weights, all, plan);
    if (!workspace || workspace->shape()[0] < bytes) workspace.emplace(Shape<1>{bytes});
    all.workspace = workspace->view();
    kernels::mla_layer(weights, all, plan, stream);
  }

  DeviceTensor<Bf16, 2> hidden;
  DeviceTensor<std::int32_t, 1> positions, slots, lengths, starts;
  DeviceTensor<Bf16, 2> out, heads;
  std::optional<DeviceTensor<unsigned char, 1>> workspace;

 private:
  struct Packed {
    Array<double, 2> hidden;
    Sizes positions, slots, counts;
  };
  static Packed packed(const Inputs& in, const Sizes& first, const Sizes& last) {
    Packed all;
    for (std::size_t b = 0; b < first.size(); ++b) {
      all.counts.push_back(last[b] - first[b]);
      for (std::int64_t place = first[b]; place < last[b]; ++place) {
        all.positions.push_back(place);
        all.slots.push_back(in.slot(static_cast<std::int64_t>(b), place));
      }
    }
    all.hidden = Array<double, 2>(Shape<2>{sum(all.counts), kHidden});
    std::int64_t row = 0;
    for (std::size_t b = 0; b < first.size(); ++b)
      for (std::int64_t place = first[b]; place < last[b]; ++place)
        mapped(at(all.hidden.view(), row++)) = mapped(at(in.hidden[b].view(), place));
    return all;
  }
  Batch(const Inputs&, std::int64_t H, const Sizes&, const Sizes& last, const Packed& all)
      : hidden(all.hidden),
        positions(ints(all.positions)),
        slots(ints(all.slots)),
        lengths(ints(last)),
        starts(starts_of(all.counts)),
        out(all.hidden.shape()),
        heads(Shape<2>{all.hidden.extent(0), H * kValue}) {}
};

/// The prefixes are cached in one call, the new tokens run in a second one.
template <class C>
struct Served {
  Served(const Weights& weights, const Inputs& in)
      : Served(in, DeviceWeights(weights, 0, weights.H)) {}
  Served(const Inputs& in, DeviceWeights weights)
      : w(std::move(weights)),
        cache(in),
        before(in, w.H, Sizes(in.question.prefixes.size(), 0), in.question.prefixes),
        fresh(in, w.H, in.question.prefixes, in.question.lengths()) {
    if (before.hidden.shape()[0] > 0) before.run(w, cache, {});
  }
  DeviceWeights w;
  Cache<C> cache;
  Batch before, fresh;
};

::testing::AssertionResult agrees(const Batch& batch, const std::string& what,
                                  const Answer<float>& yardstick, const Answer<double>& truth) {
  const auto heads =
      within_yardstick(kOperation, what + ", heads", batch.heads, yardstick.heads, truth.heads);
  return heads ? within_yardstick(kOperation, what, batch.out, yardstick.out, truth.out) : heads;
}

std::int64_t longest(const Sizes& sizes) {
  return sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
}

template <class C>
class MlaLayerGpu : public GpuTest {};
using Caches = ::testing::Types<Bf16, E4m3, std::uint8_t>;
TYPED_TEST_SUITE(MlaLayerGpu, Caches);

// A decode step: pages of every size, one token and several of each request.
TYPED_TEST(MlaLayerGpu, decodeAgreesWithTheReference) {
  const Weights w(16);
  for (const std::int64_t page : {1, 16, 32, 64})
    for (const std::int64_t q_len : {1, 2}) {
      const Inputs in({.prefixes = {70, 0, 5, 130}, .fresh = Sizes(4, q_len), .page = page}, 3);
      Served<TypeParam> run(w, in);
      run.fresh.run(run.w, run.cache, {}, false);
      finish();
      EXPECT_TRUE(agrees(run.fresh, "decode", answer<float>(w, in, kCached<TypeParam>),
                         answer<double>(w, in)))
          << page << " " << q_len;
    }
}

// Prompts, some with prefixes: every form, and chunks of any size.
TYPED_TEST(MlaLayerGpu, everyFormAgreesWithTheReference) {
  const Weights w(4);
  const Inputs in({.prefixes = {70, 0, 5, 130}, .fresh = {9, 66, 1, 20}}, 4);
  const Answer<double> truth = answer<double>(w, in);
  const Answer<float> yardstick = answer<float>(w, in, kCached<TypeParam>);
  Served<TypeParam> run(w, in);
  const auto expect = [&](const char* what, const MlaPlan& plan) {
    run.fresh.run(run.w, run.cache, plan);
    finish();
    EXPECT_TRUE(agrees(run.fresh, what, yardstick, truth)) << plan.capacity;
  };
  expect("absorbed", {});
  expect("one shot", {.form = MlaForm::one_shot, .capacity = 301});
  for (const std::int64_t capacity : {40, 128, 300, 4000})
    expect("chunked", {.form = MlaForm::chunked, .capacity = capacity, .longest_prefix = 130});
}

/// q_proj alone, as V2-Lite has it.
TYPED_TEST(MlaLayerGpu, aLayerWithoutLowRankQueriesAgreesToo) {
  const Weights w(2, 0);
  const Inputs in({.prefixes = {70, 3}, .fresh = {1, 1}}, 5);
  Served<TypeParam> run(w, in);
  run.fresh.run(run.w, run.cache, {}, false);
  finish();
  EXPECT_TRUE(agrees(run.fresh, "without q_lora", answer<float>(w, in, kCached<TypeParam>),
                     answer<double>(w, in)));
}

// A decode layer captured for 4 requests, replayed with other ones and with fewer: places that are
// gone have length 0 and a slot below 0, and change nothing.
TYPED_TEST(MlaLayerGpu, aCapturedLayerServesOtherAndFewerRequests) {
  const Weights w(16);
  const Inputs in({.prefixes = {70, 0, 5, 130}, .fresh = {1, 1, 1, 1}, .page = 64}, 6);
  Served<TypeParam> direct(w, in), captured(w, in);
  const auto lengths = direct.fresh.lengths.elements(), slots = direct.fresh.slots.elements();
  for (const std::size_t there : {4u, 2u}) {
    auto fewer = lengths, written = slots;
    for (std::size_t i = there; i < 4; ++i) fewer[i] = 0, written[i] = -1;
    direct.fresh.lengths.set(fewer);
    direct.fresh.slots.set(written);
    direct.fresh.run(direct.w, direct.cache, {}, false);
    captured.fresh.lengths.set({1, 0, 0, 1});
    captured.fresh.slots.set({-1, -1, -1, -1});
    captured.fresh.run(captured.w, captured.cache, {}, false);  // loads every kernel
    replay_behind_change(
        [&](cudaStream_t stream) {
          captured.fresh.run(captured.w, captured.cache, {}, false, stream);
        },
        [&] {
          captured.fresh.lengths.set(fewer);
          captured.fresh.slots.set(written);
        });
    EXPECT_TRUE(same_bits(captured.fresh.out, direct.fresh.out)) << there;
    EXPECT_TRUE(same_bits(captured.cache.latents, direct.cache.latents)) << there;
    const Array<float, 2> out = captured.fresh.out.host();
    for (std::size_t i = there; i < 4; ++i)
      for (std::int64_t j = 0; j < kHidden; ++j) ASSERT_EQ(out(i, j), 0);
  }
}

class MlaLayerBf16Gpu : public GpuTest {};

// Whichever form SGLang's rules, old and new, choose for a batch, the answer is the same.
TEST_F(MlaLayerBf16Gpu, mlaLayerAnswersDoNotDependOnTheRule) {
  using reference::MlaBackend;
  using reference::MlaPath;
  const Weights w(4);
  std::set<MlaPath> taken;
  for (const Question& question : {Question{.prefixes = {0, 0}, .fresh = {40, 7}},
                                   {.prefixes = {90, 8190}, .fresh = {3, 9}},
                                   {.prefixes = {33, 0}, .fresh = {2, 30}},
                                   {.prefixes = {60, 61}, .fresh = {1, 1}}}) {
    const Inputs in(question, 7);
    const Answer<double> truth = answer<double>(w, in);
    const Answer<float> yardstick = answer<float>(w, in);
    Served<Bf16> run(w, in);
    const bool extend = sum(question.fresh) > 2;
    const reference::MlaBatch batch{
        .extend = extend, .prefix = sum(question.prefixes), .all_tokens = sum(question.lengths())};
    std::set<MlaPath> paths;
    for (const auto backend : {MlaBackend::flashinfer, MlaBackend::fa3, MlaBackend::flashmla,
                               MlaBackend::trtllm, MlaBackend::triton})
      for (const bool radix : {true, false}) {
        const reference::MlaServer server{.radix_cache = radix};
        paths.insert(reference::mla_path(backend, batch, server));
        paths.insert(reference::older_mla_path(backend, batch, server));
      }
    for (const MlaPath path : paths) {
      const MlaForm form = path == MlaPath::absorbed   ? MlaForm::absorbed
                           : path == MlaPath::one_shot ? MlaForm::one_shot
                                                       : MlaForm::chunked;
      run.fresh.run(run.w, run.cache,
                    {.form = form,
                     .capacity = form == MlaForm::chunked ? 4096 : batch.all_tokens,
                     .longest_prefix = longest(question.prefixes)});
      finish();
      EXPECT_TRUE(agrees(run.fresh, "by rule", yardstick, truth)) << static_cast<int>(path);
      taken.insert(path);
    }
  }
  EXPECT_EQ(taken.size(), 3u) << "every path was taken";
}

// A cache of decompressed keys and values, 256 wide; nothing is absorbed.
TEST_F(MlaLayerBf16Gpu, paddedMlaLayerAgreesWithTheReference) {
  const Weights w(3);
  for (const std::int64_t page : {1, 16}) {
    const Inputs in({.prefixes = {40, 0, 5}, .fresh = {3, 30, 1}, .page = page}, 8);
    DeviceWeights weights(w, 0, w.H);
    DeviceTensor<Bf16, 4> k(Shape<4>{in.pages, page, w.H, 256}), v(k.shape());
    Cache<Bf16> unused(in);
    const kernels::PaddedCache cache{k.view(), v.view()};
    Batch before(in, w.H, Sizes(3, 0), in.question.prefixes);
    Batch fresh(in, w.H, in.question.prefixes, in.question.lengths());
    for (Batch* const batch : {&before, &fresh}) {
      auto tokens = batch->tokens(unused, true);
      kernels::MlaWeights all = weights.view();
      all.w_kc = all.w_vc = {};
      DeviceTensor<unsigned char, 1> workspace(
          Shape<1>{kernels::padded_mla_layer_workspace(all, tokens, cache)});
      tokens.workspace = workspace.view();
      kernels::padded_mla_layer(all, tokens, cache, nullptr);
      finish();
    }
    EXPECT_TRUE(agrees(fresh, "padded", answer<float>(w, in), answer<double>(w, in)));
  }
}

// Ranks that have an eighth of the heads each give the bits of the whole, and their outputs add up
// to it.
TEST_F(MlaLayerBf16Gpu, mlaLayerRanksWithSlicesOfTheHeadsAreTheWhole) {
  constexpr std::int64_t kRanks = 8;
  const Weights w(128);
  const Inputs in({.prefixes = {70, 5}, .fresh = {1, 1}}, 9);
  Served<Bf16> whole(w, in);
  whole.fresh.run(whole.w, whole.cache, {}, false);
  finish();
  const Array<float, 2> heads = whole.fresh.heads.host();
  Array<double, 2> total(Shape<2>{2, kHidden}, 0);
  Array<float, 2> joined(heads.shape());
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    Served<Bf16> part(in, DeviceWeights(w, rank * 16, 16));
    part.fresh.run(part.w, part.cache, {}, false);
    finish();
    EXPECT_TRUE(same_bits(part.cache.latents, whole.cache.latents));
    const Array<float, 2> own = part.fresh.heads.host(), out = part.fresh.out.host();
    for (std::int64_t t = 0; t < 2; ++t) {
      for (std::int64_t i = 0; i < 16 * kValue; ++i) joined(t, rank * 16 * kValue + i) = own(t, i);
      for (std::int64_t i = 0; i < kHidden; ++i) total(t, i) += out(t, i);
    }
  }
  const Answer<double> truth = answer<double>(w, in);
  const Answer<float> yardstick = answer<float>(w, in);
  EXPECT_TRUE(
      within_yardstick<Bf16>(kOperation, "heads of 8 ranks", joined, yardstick.heads, truth.heads));
  EXPECT_TRUE(agrees(whole.fresh, "128 heads", yardstick, truth));
  EXPECT_LT(difference(joined, heads).relative(), 1e-3) << "attention may be divided otherwise";
  EXPECT_LT(difference(total, truth.out).relative(), 1e-2);
}

// The part between the projections, which servers fuse: q_pe and k_pe come as they were projected,
// the latent normalised.
TEST_F(MlaLayerBf16Gpu, mlaLayerWithoutProjectionsIsMlaRopeDecode) {
  constexpr std::int64_t kHeads = 16;
  const Weights w(kHeads);
  const Inputs in({.prefixes = {70, 0, 5}, .fresh = {1, 1, 1}}, 11);
  const std::int64_t B = in.question.requests(), page = in.question.page;
  const Array<double, 2> q = draw<2>({B, kHeads * 192}, 11, 1), kv = draw<2>({B, 576}, 11, 2);
  Array<double, 3> cache = draw<3>({in.pages, page, 576}, 11, 3);
  Sizes positions, slots;
  for (std::int64_t b = 0; b < B; ++b) {
    positions.push_back(in.question.prefixes[static_cast<std::size_t>(b)]);
    slots.push_back(in.slot(b, positions.back()));
  }
  const DeviceWeights weights(w, 0, kHeads);
  kernels::MlaWeights given = weights.view();
  given.kv_a_norm = {};
  DeviceTensor<Bf16, 2> dq(q), dkv(kv), heads(Shape<2>{B, kHeads * kValue});
  DeviceTensor<Bf16, 3> pages(cache);
  const DeviceTensor<std::int32_t, 1> at_positions(ints(positions)), to(ints(slots)),
      lengths(ints(in.question.lengths()));
  const DeviceTensor<std::int32_t, 2> table(in.table);
  kernels::MlaRopeDecode<Bf16> decode{.weights = given,
                                      .tokens = {.positions = at_positions.view(),
                                                 .slots = to.view(),
                                                 .cache = pages.view(),
                                                 .block_table = table.view(),
                                                 .seq_lens = lengths.view(),
                                                 .heads = heads.view()},
                                      .q = dq.view(),
                                      .kv = dkv.view()};
  DeviceTensor<unsigned char, 1> workspace(Shape<1>{kernels::mla_rope_decode_workspace(decode)});
  decode.tokens.workspace = workspace.view();
  kernels::mla_rope_decode(decode, nullptr);
  finish();

  const auto part = [&](std::int64_t first, std::int64_t count) {
    return contiguous(
        make_view(q.data() + first, Shape<3>{B, kHeads, count}, Shape<3>{kHeads * 192, 192, 1}));
  };
  const Array<double, 3> q_nope = part(0, kNope), q_pe = part(kNope, kPe);
  Array<double, 3> out(Shape<3>{B, kHeads, kValue});
  const auto columns = [&](std::int64_t first, std::int64_t count) {
    return make_view(kv.data() + first, Shape<2>{B, count}, Shape<2>{576, 1});
  };
  reference::mla_rope_decode<double>({.q_nope = q_nope.view(),
                                      .q_pe = q_pe.view(),
                                      .latent = columns(0, kLatent),
                                      .k_pe = columns(kLatent, kPe),
                                      .positions = ints(positions),
                                      .slots = ints(slots),
                                      .block_table = in.table.view(),
                                      .seq_lens = ints(in.question.lengths()),
                                      .softmax_scale = w.softmax_scale()},
                                     w.up, w.rope, cache, out);
  Array<float, 3> yardstick(out.shape());
  const reference::MlaUpWeights<float> up{cast<float>(w.up.w_kc), cast<float>(w.up.w_vc)};
  const reference::Rope<float> rope{w.rope.frequencies.cast<float>(),
                                    static_cast<float>(w.rope.magnitude)};
  const auto nope = cast<float>(q_nope);
  auto pe = cast<float>(q_pe);
  reference::apply_rope<float>(rope, ints(positions), reference::RopePairs::interleaved, pe);
  pe = kept(pe, true);
  const auto all = kept(cast<float>(cache), true);  // with what the reference wrote
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t L = in.question.lengths()[static_cast<std::size_t>(b)];
    Array<float, 2> latent(Shape<2>{L, kLatent}), k_pe(Shape<2>{L, kPe});
    for (std::int64_t l = 0; l < L; ++l)
      for (std::int64_t i = 0; i < 576; ++i)
        (i < kLatent ? latent(l, i) : k_pe(l, i - kLatent)) =
            all.data()[in.slot(b, l) * std::int64_t{576} + i];
    const Array<float, 3> row =
        attended<float>({cut(nope.view(), b, b + 1), cut(std::as_const(pe).view(), b, b + 1),
                         std::as_const(latent).view(), std::as_const(k_pe).view()},
                        up, w.softmax_scale(), true);
    std::copy(row.begin(), row.end(), yardstick.data() + b * kHeads * kValue);
  }
  Array<float, 3> got(out.shape());
  const Array<float, 2> flat = heads.host();
  std::copy(flat.begin(), flat.end(), got.begin());
  EXPECT_TRUE(within_yardstick<Bf16>(kOperation, "mla_rope_decode", got, yardstick, out));
  EXPECT_TRUE(heads.guards_intact() && pages.guards_intact());
}

// Absorbing in e4m3: as far from the truth as numbers of three bits are, and no farther.
TEST_F(MlaLayerBf16Gpu, mlaLayerAbsorbsInE4m3) {
  const Weights w(16);
  const Inputs in({.prefixes = {70, 0, 5}, .fresh = {1, 1, 1}}, 10);
  const Answer<double> truth = answer<double>(w, in);
  for (const bool blocks : {false, true}) {
    DeviceWeights weights(w, 0, w.H);
    weights.scale(blocks);
    Served<Bf16> run(in, std::move(weights));
    run.fresh.run(run.w, run.cache, {}, false);
    finish();
    const double error = difference(run.fresh.heads.host(), truth.heads).relative();
    EXPECT_LT(error, 0.06);
    EXPECT_GT(error, 0.005) << "it is not e4m3";
  }
}

TEST(MlaLayerArguments, areRefusedByName) {
  using ::testing::HasSubstr;
  const auto complaint = [](auto change, const MlaPlan& plan = {}) {
    kernels::MlaWeights w{.qkv_a = unread<const Bf16, 2>({704, 256}),
                          .q_a_norm = unread<const Bf16, 1>({128}),
                          .q_b = unread<const Bf16, 2>({2 * 192, 128}),
                          .kv_a_norm = unread<const Bf16, 1>({512}),
                          .kv_b = unread<const Bf16, 2>({2 * 256, 512}),
                          .w_kc = unread<const Bf16, 3>({2, 512, 128}),
                          .w_vc = unread<const Bf16, 3>({2, 128, 512}),
                          .o_proj = unread<const Bf16, 2>({256, 256}),
                          .frequencies = unread<const float, 1>({32})};
    kernels::MlaTokens<Bf16> in{.hidden = unread<const Bf16, 2>({4, 256}),
                                .positions = unread<const std::int32_t, 1>({4}),
                                .slots = unread<const std::int32_t, 1>({4}),
                                .cache = unread<Bf16, 3>({9, 16, 576}),
                                .block_table = unread<const std::int32_t, 2>({2, 3}),
                                .seq_lens = unread<const std::int32_t, 1>({2}),
                                .out = unread<Bf16, 2>({4, 256})};
    change(w, in);
    return complaint_of([&] { kernels::mla_layer(w, in, plan, nullptr); });
  };
  const auto nothing = [](auto&, auto&) {};
  EXPECT_THAT(complaint(nothing, {.form = MlaForm::one_shot}),
              HasSubstr("mla_layer: query_start_loc is expected to be given for prompts"));
  EXPECT_THAT(complaint(nothing, {.form = MlaForm::padded}),
              HasSubstr("form is expected to be absorbed, one_shot or chunked"));
  EXPECT_THAT(
      complaint([](auto&, auto& in) { in.query_start_loc = unread<const std::int32_t, 1>({3}); },
                {.form = MlaForm::chunked, .capacity = 1}),
      HasSubstr("capacity is expected to be at least one token for each of B requests"));
  const auto without_absorbing = [](auto& w, auto& in) {
    w.w_kc = w.w_vc = {};
    in.query_start_loc = unread<const std::int32_t, 1>({3});
  };
  EXPECT_THAT(complaint(without_absorbing), HasSubstr("w_kc is expected to be [H, 512, 128]"));
  EXPECT_THAT(complaint(without_absorbing, {.form = MlaForm::one_shot, .capacity = 9}),
              HasSubstr("workspace is expected to be of"));  // the last thing that is looked at
}

}  // namespace
}  // namespace lockstep
