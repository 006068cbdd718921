// torch.ops.lockstep.mla_decode, mla_prefill and merge_attention: schemas in operators.md.
#include "kernels/torch/lanes.hpp"
#include "reference/attention/latent_token.hpp"
#include "reference/attention/mla_attention.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/attention/merge_attention.hpp"
#include "kernels/attention/mla_decode.hpp"
#include "kernels/attention/mla_decode_e4m3.hpp"
#include "kernels/attention/mla_prefill.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

constexpr std::int64_t kMlaWidth = 576;

#ifdef LOCKSTEP_HAS_CUDA
constexpr std::int64_t kPromptWidth = 192, kPromptValues = 128;

/// Calls run(T{}) with T the type of tensor x.
template <class Run>
auto of_type(const Tensor& x, const char* argument, Run run) {
#ifdef LOCKSTEP_ALL_SHAPES
  if (x.scalar_type() == at::kHalf) return run(kernels::Fp16{});
#endif
  expect(x.scalar_type() == at::kBFloat16, argument,
         "bfloat16 on a GPU, or float16 in a build with LOCKSTEP_ALL_SHAPES", x.scalar_type());
  return run(kernels::Bf16{});
}
#endif

struct MlaDecode : Arguments {
  static constexpr const char* kSchema = R"(
mla_decode(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, float softmax_scale, *,
    bool causal=True, int value_dim=512, Tensor? kv_scale=None,
    int parts=0, bool e4m3_products=False) -> (Tensor out, Tensor lse))";

  using Arguments::Arguments;
  const Tensor q = tensor(), kv_cache = tensor(), block_table = tensor(), seq_lens = tensor();
  const double softmax_scale = number();
  const bool causal = flag();
  const std::int64_t value_dim = integer();
  const MaybeTensor kv_scale = maybe_tensor();
  const std::int64_t parts = integer();
  const bool e4m3_products = flag();

  using Result = std::tuple<Tensor, Tensor>;

  Result meta() const {
    return {at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), value_dim}, q.options()),
            at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)},
                             q.options().dtype(at::kFloat))};
  }

  void check() const {
    expect(0 <= parts && parts <= 1 << 16, "parts", "0 or a number of parts", parts);
    expect_rank(q, "q", 4);
    expect_rank(kv_cache, "kv_cache", 3);
    expect_rank(block_table, "block_table", 2);
    expect_float_or_e4m3(q, "q");
    expect(!e4m3_products || kv_cache.scalar_type() == at::kFloat8_e4m3fn, "kv_cache",
           "float8_e4m3fn for e4m3_products", kv_cache.scalar_type());
    if (!in_tokens()) expect_float_or_e4m3(kv_cache, "kv_cache");
    const std::int64_t B = q.size(0), width = q.size(3), page = kv_cache.size(1);
    if (in_tokens())
      expect_shape(kv_cache, "kv_cache", "[pages, page, 656] in bytes, for a width of 576",
                   {kv_cache.size(0), page, width == kMlaWidth ? reference::kTokenBytes : -1});
    else
      expect_shape(kv_cache, "kv_cache", "[pages, page, width of q]",
                   {kv_cache.size(0), page, width});
    expect(page >= 1, "kv_cache", "[pages, page, width] with a token in each page",
           kv_cache.sizes());
    expect_contiguous_rows(kv_cache, "kv_cache");
    expect_shape(block_table, "block_table", "[B, blocks]", {B, block_table.size(1)});
    expect_shape(seq_lens, "seq_lens", "[B]", {B});
    expect(1 <= value_dim && value_dim <= width, "value_dim", "between 1 and the width of q",
           value_dim);
    expect_kv_scale(kv_scale, kv_cache);
  }

  /// Whether the cache has tokens of 656 bytes (reference/attention/latent_token.hpp).
  bool in_tokens() const { return kv_cache.scalar_type() == at::kByte; }

  /// The cache's values in float32; numbers in e4m3 without kv_scale.
  Tensor values() const {
    if (!in_tokens()) return kv_cache.to(at::kFloat);
    const Tensor tokens = kv_cache.contiguous();
    const Tensor values = at::empty({tokens.size(0), tokens.size(1), kMlaWidth}, at::kFloat);
    for (std::int64_t i = 0; i < tokens.size(0) * tokens.size(1); ++i) {
      reference::LatentToken token;
      std::copy_n(tokens.data_ptr<std::uint8_t>() + i * reference::kTokenBytes, token.size(),
                  token.begin());
      const Vector<float> x = reference::unpacked_token<float>(token);
      std::copy(x.begin(), x.end(), values.data_ptr<float>() + i * kMlaWidth);
    }
    return values;
  }

  Result cpu() const {
    check();
    const std::int64_t B = q.size(0), page = kv_cache.size(1);
    const IndexView lengths = indices_of<1>(seq_lens, "seq_lens");
    const IndexTable table = indices_of<2>(block_table, "block_table");
    for (std::int64_t b = 0; b < B; ++b) {
      expect(0 <= lengths(b) && lengths(b) <= table.extent(1) * page, "seq_lens",
             "between 0 and what block_table has room for", lengths(b));
      for (std::int64_t i = 0; i * page < lengths(b); ++i)
        expect(0 <= table(b, i) && table(b, i) < kv_cache.size(0), "block_table",
               "numbers of pages before a request's end", table(b, i));
    }
    const HostTensor<4> hq{MaybeTensor(q)};
    const HostTensor<3> cache{MaybeTensor(values())};
    const auto [out, lse] = meta();
    const HostTensor<4> hout{MaybeTensor(at::zeros(out.sizes(), lse.options()))};
    const HostTensor<3> hlse{MaybeTensor(at::zeros(lse.sizes(), lse.options()))};
    const float scale = kv_scale ? kv_scale->item<float>() : 1.0f;
    reference::mla_decode<float>({.q = hq.in(),
                                  .cache = cache.in(),
                                  .block_table = table,
                                  .seq_lens = lengths,
                                  .softmax_scale = softmax_scale,
                                  .causal = causal,
                                  .value_dim = value_dim,
                                  .kv_scale = scale,
                                  .q_scale = q.scalar_type() == at::kFloat8_e4m3fn ? scale : 1.0f},
                                 hout.out(), hlse.out());
    return {hout.as(out.scalar_type()), hlse.as(at::kFloat)};
  }

#ifdef LOCKSTEP_HAS_CUDA
  Result cuda() const {
    check();
    expect(q.size(3) == kMlaWidth, "q", "[B, q_len, H, 576] on a GPU", q.sizes());
    expect(value_dim == 512, "value_dim", "512 on a GPU", value_dim);
    const auto results = meta();
    const auto type = kv_cache.scalar_type();
    if (type == at::kFloat8_e4m3fn || in_tokens()) {
      expect(q.scalar_type() == at::kBFloat16, "q", "bfloat16 for a cache in e4m3 on a GPU",
             q.scalar_type());
      return in_tokens() ? run<kernels::Bf16, std::uint8_t>(results)
                         : run<kernels::Bf16, kernels::E4m3>(results);
    }
    expect_type(kv_cache, q.scalar_type(), "kv_cache");
    return of_type(q, "q", [&](auto t) { return run<decltype(t), decltype(t)>(results); });
  }

  template <class T, class C>
  Result run(const Result& results) const {
    // The kernel needs one stride between all rows (query and head) of a request.
    const bool even = q.size(1) == 1 || q.size(2) == 1 || q.stride(1) == q.size(2) * q.stride(2);
    const Tensor queries = even ? in_whole_rows(q) : q.clone(at::MemoryFormat::Contiguous);
    const auto& [out, lse] = results;
    kernels::MlaDecode<T, C> in{.q = view_of<const T, 4>(queries, "q"),
                                .cache = view_of<const C, 3>(kv_cache, "kv_cache"),
                                .block_table = indices_of<2>(block_table, "block_table"),
                                .seq_lens = indices_of<1>(seq_lens, "seq_lens"),
                                .out = view_of<T, 4>(out, "out"),
                                .lse = view_of<float, 3>(lse, "lse"),
                                .softmax_scale = static_cast<float>(softmax_scale),
                                .causal = causal,
                                .lane = lane_of(stream()),
                                .parts = static_cast<int>(parts)};
    if (kv_scale) in.kv_scale = view_of<const float, 1>(kv_scale->reshape({1}), "kv_scale");
    const auto with = [&](std::int64_t bytes, auto decode) {
      const Tensor workspace = at::empty({bytes}, q.options().dtype(at::kByte));
      in.workspace = view_of<unsigned char, 1>(workspace, "workspace");
      decode(in, stream());
      return results;
    };
    if constexpr (std::is_same_v<C, kernels::E4m3>)
      if (e4m3_products)
        return with(kernels::mla_decode_e4m3_workspace(in), kernels::mla_decode_e4m3);
    return with(kernels::mla_decode_workspace(in),
                [](const auto& one, cudaStream_t on) { kernels::mla_decode(one, on); });
  }
#endif
};

struct MlaPrefill : Arguments {
  static constexpr const char* kSchema = R"(
mla_prefill(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor key_start_loc,
    float softmax_scale, *, bool causal=True) -> (Tensor out, Tensor lse))";

  using Arguments::Arguments;
  const Tensor q = tensor(), k = tensor(), v = tensor(), query_start_loc = tensor(),
               key_start_loc = tensor();
  const double softmax_scale = number();
  const bool causal = flag();

  using Result = std::tuple<Tensor, Tensor>;

  Result meta() const {
    return {at::empty_symint({q.sym_size(0), q.sym_size(1), v.sym_size(2)}, q.options()),
            at::empty_symint({q.sym_size(1), q.sym_size(0)}, q.options().dtype(at::kFloat))};
  }

  void check() const {
    expect_rank(q, "q", 3);
    expect_rank(k, "k", 3);
    expect_rank(v, "v", 3);
    expect_float(q, "q");
    expect_type(k, q.scalar_type(), "k");
    expect_type(v, q.scalar_type(), "v");
    expect_shape(k, "k", "[L, heads, width of q]", {k.size(0), q.size(1), q.size(2)});
    expect_shape(v, "v", "[L, heads, values]", {k.size(0), q.size(1), v.size(2)});
    expect_rank(query_start_loc, "query_start_loc", 1);
    expect(query_start_loc.size(0) >= 1, "query_start_loc", "[N + 1]", query_start_loc.sizes());
    expect_shape(key_start_loc, "key_start_loc", "[N + 1]", {query_start_loc.size(0)});
  }

  Result cpu() const {
    check();
    const IndexView queries = indices_of<1>(query_start_loc, "query_start_loc");
    const IndexView keys = indices_of<1>(key_start_loc, "key_start_loc");
    const auto rising = [](const IndexView& starts, std::int64_t tokens, const char* name) {
      for (std::int64_t i = 0; i < starts.extent(0); ++i)
        expect((i == 0 ? 0 : starts(i - 1)) <= starts(i) && starts(i) <= tokens, name,
               "rising, from 0 at least to the number of tokens at most", starts(i));
    };
    rising(queries, q.size(0), "query_start_loc");
    rising(keys, k.size(0), "key_start_loc");
    const HostTensor<3> hq{MaybeTensor(q)}, hk{MaybeTensor(k)}, hv{MaybeTensor(v)};
    const auto [out, lse] = meta();
    const HostTensor<3> hout{MaybeTensor(at::zeros(out.sizes(), lse.options()))};
    const HostTensor<2> hlse{MaybeTensor(at::zeros(lse.sizes(), lse.options()))};
    reference::softmax_attention<float>(hq.in(), hk.in(), hv.in(), queries, keys,
                                        {.scale = softmax_scale, .causal = causal}, hout.out(),
                                        hlse.out());
    return {hout.as(out.scalar_type()), hlse.as(at::kFloat)};
  }

#ifdef LOCKSTEP_HAS_CUDA
  Result cuda() const {
    check();
    expect(q.size(2) == kPromptWidth, "q", "[T, heads, 192] on a GPU", q.sizes());
    expect(v.size(2) == kPromptValues, "v", "[L, heads, 128] on a GPU", v.sizes());
    const Result results = meta();
    return of_type(q, "q", [&](auto t) {
      using T = decltype(t);
      const Tensor queries = in_whole_rows(q), keys = in_whole_rows(k), values = in_whole_rows(v);
      const auto& [out, lse] = results;
      kernels::mla_prefill<T>({.q = view_of<const T, 3>(queries, "q"),
                               .k = view_of<const T, 3>(keys, "k"),
                               .v = view_of<const T, 3>(values, "v"),
                               .query_start_loc = indices_of<1>(query_start_loc, "query_start_loc"),
                               .key_start_loc = indices_of<1>(key_start_loc, "key_start_loc"),
                               .out = view_of<T, 3>(out, "out"),
                               .lse = view_of<float, 2>(lse, "lse"),
                               .softmax_scale = static_cast<float>(softmax_scale),
                               .causal = causal,
                               .lane = lane_of(stream())},
                              stream());
      return results;
    });
  }
#endif
};

struct MergeAttention : Arguments {
  static constexpr const char* kSchema = R"(
merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b,
    Tensor lse_b) -> (Tensor out, Tensor lse))";

  using Arguments::Arguments;
  const Tensor out_a = tensor(), lse_a = tensor(), out_b = tensor(), lse_b = tensor();

  using Result = std::tuple<Tensor, Tensor>;

  Result meta() const {
    return {at::empty_symint(out_a.sym_sizes(), out_a.options()),
            at::empty_symint(lse_a.sym_sizes(), lse_a.options())};
  }

  void check() const {
    expect_rank(out_a, "out_a", 3);
    expect_float(out_a, "out_a");
    expect_type(out_b, out_a.scalar_type(), "out_b");
    expect_type(lse_a, at::kFloat, "lse_a");
    expect_type(lse_b, at::kFloat, "lse_b");
    expect_shape(out_b, "out_b", "[T, heads, values]", out_a.sizes());
    expect_shape(lse_a, "lse_a", "[heads, T]", {out_a.size(1), out_a.size(0)});
    expect_shape(lse_b, "lse_b", "[heads, T]", {out_a.size(1), out_a.size(0)});
  }

  Result cpu() const {
    check();
    const HostTensor<3> a{MaybeTensor(out_a)}, b{MaybeTensor(out_b)};
    const HostTensor<2> of_a{MaybeTensor(lse_a)}, of_b{MaybeTensor(lse_b)};
    const HostTensor<3> out{MaybeTensor(at::zeros(out_a.sizes(), lse_a.options()))};
    const HostTensor<2> lse{MaybeTensor(at::zeros(lse_a.sizes(), lse_a.options()))};
    reference::merge_attention<float>(a.in(), of_a.in(), b.in(), of_b.in(), out.out(), lse.out());
    return {out.as(out_a.scalar_type()), lse.as(at::kFloat)};
  }

#ifdef LOCKSTEP_HAS_CUDA
  Result cuda() const {
    check();
    expect(out_a.size(2) % 8 == 0, "out_a", "[T, heads, a multiple of 8] on a GPU", out_a.sizes());
    const Tensor a = in_whole_rows(out_a), b = in_whole_rows(out_b);
    const Result results{at::empty(out_a.sizes(), out_a.options()),
                         at::empty(lse_a.sizes(), lse_a.options())};
    return of_type(out_a, "out_a", [&](auto t) {
      using T = decltype(t);
      kernels::merge_attention<T>({.out_a = view_of<const T, 3>(a, "out_a"),
                                   .lse_a = view_of<const float, 2>(lse_a, "lse_a"),
                                   .out_b = view_of<const T, 3>(b, "out_b"),
                                   .lse_b = view_of<const float, 2>(lse_b, "lse_b"),
                                   .out = view_of<T, 3>(std::get<0>(results), "out"),
                                   .lse = view_of<float, 2>(std::get<1>(results), "lse")},
                                  stream());
      return results;
    });
  }
#endif
};

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<MergeAttention>(m);
  add_operator<MlaDecode>(m);
  add_operator<MlaPrefill>(m);
}

}  // namespace
}  // namespace lockstep::torch_ops
