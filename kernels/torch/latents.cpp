// torch.ops.lockstep.batched_product, scale_to_e4m3, latent_cache_write and latent_cache_gather:
// schemas in operators.md.
#include "kernels/torch/latents.hpp"
#include "reference/layers/batched_product.hpp"
#include "reference/layers/rms_norm.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/attention/latent_cache.hpp"
#include "kernels/layers/batched_product.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

struct BatchedProduct : Arguments {
  static constexpr const char* kSchema = R"(
batched_product(Tensor x, Tensor weight, *, Tensor? x_scale=None,
    Tensor? weight_scale=None, bool settled_weights=False) -> Tensor)";

  using Arguments::Arguments;
  const Tensor x = tensor(), weight = tensor();
  const MaybeTensor x_scale = maybe_tensor(), weight_scale = maybe_tensor();
  const bool settled_weights = flag();

  Tensor meta() const {
    return at::empty_symint({weight.sym_size(0), x.sym_size(1), weight.sym_size(1)},
                            x.options().dtype(in_e4m3(x) ? at::kBFloat16 : x.scalar_type()));
  }

  void check() const {
    expect_rank(x, "x", 3);
    expect_rank(weight, "weight", 3);
    if (!in_e4m3(x)) expect_float(x, "x");
    expect_type(weight, x.scalar_type(), "weight");
    const std::int64_t G = weight.size(0), K = weight.size(2), M = x.size(1);
    expect_shape(x, "x", "[1 or G, M, K]", {x.size(0) == 1 ? 1 : G, M, K});
    const std::int64_t groups = (K + reference::kScaleGroup - 1) / reference::kScaleGroup;
    check_scale(x_scale, "x_scale", {x.size(0), M, groups});
    check_scale(
        weight_scale, "weight_scale",
        {G, (weight.size(1) + reference::kScaleGroup - 1) / reference::kScaleGroup, groups});
  }
  void check_scale(const MaybeTensor& scale, const char* argument, at::IntArrayRef whole) const {
    expect(scale.has_value() == in_e4m3(x), argument,
           "given with float8_e4m3fn, and absent without", scale ? "one" : "none");
    if (!scale) return;
    expect_type(scale, at::kFloat, argument);
    expect_rank(*scale, argument, 3);
    for (std::int64_t i = 0; i < 3; ++i)
      TORCH_CHECK(scale->size(i) == 1 || scale->size(i) == whole[static_cast<std::size_t>(i)],
                  argument, " is expected to be ", whole, ", or 1 in place of an extent; got ",
                  scale->sizes());
  }

  Tensor cpu() const {
    check();
    const auto hx = host_values<3>(x, "x"), hw = host_values<3>(weight, "weight");
    const HostTensor<3> xs{x_scale, "x_scale"}, ws{weight_scale, "weight_scale"};
    const Tensor out = meta();
    const HostTensor<3> result{
        MaybeTensor(at::zeros(out.sizes(), out.options().dtype(at::kFloat)))};
    reference::batched_product<float>(
        {.x = hx.in(), .weight = hw.in(), .x_scale = xs.maybe(), .weight_scale = ws.maybe()},
        result.out());
    return result.as(out.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    if (in_e4m3(x)) return run<kernels::E4m3>();
    expect(x.scalar_type() == at::kBFloat16, "x", "bfloat16 or float8_e4m3fn on a GPU",
           x.scalar_type());
    return run<kernels::Bf16>();
  }
  template <class T>
  Tensor run() const {
    const Tensor rows = in_whole_rows(x), weights = in_whole_rows(weight), out = meta();
    kernels::BatchedProduct<T> in{.x = view_of<const T, 3>(rows, "x"),
                                  .weight = view_of<const T, 3>(weights, "weight"),
                                  .out = view_of<kernels::Bf16, 3>(out, "out"),
                                  .settled_weights = settled_weights && weights.is_same(weight)};
    if (x_scale) in.x_scale = view_of<const float, 3>(*x_scale, "x_scale");
    if (weight_scale) in.weight_scale = view_of<const float, 3>(*weight_scale, "weight_scale");
    kernels::batched_product(in, stream());
    return out;
  }
#endif
};

struct ScaleToE4m3 : Arguments {
  static constexpr const char* kSchema = R"(
scale_to_e4m3(Tensor x, *, bool by_groups=True) -> (Tensor numbers, Tensor scale))";

  using Arguments::Arguments;
  const Tensor x = tensor();
  const bool by_groups = flag();

  using Result = std::tuple<Tensor, Tensor>;

  Result meta() const {
    const c10::SymInt groups =
        (x.sym_size(2) + (reference::kScaleGroup - 1)) / c10::SymInt(reference::kScaleGroup);
    const auto options = x.options().dtype(at::kFloat);
    return {at::empty_symint(x.sym_sizes(), x.options().dtype(at::kFloat8_e4m3fn)),
            by_groups ? at::empty_symint({x.sym_size(0), x.sym_size(1), groups}, options)
                      : at::empty({1, 1, 1}, options)};
  }

  void check() const {
    expect_rank(x, "x", 3);
    expect_float(x, "x");
  }

  Result cpu() const {
    check();
    const HostTensor<3> values(x, "x");
    const auto scaled = reference::scaled_numbers<float>(values.in(), by_groups);
    const auto results = meta();
    const auto put = [](const Array<float, 3>& from, const Tensor& to) {
      to.copy_(at::from_blob(const_cast<float*>(from.data()), to.sizes(), at::kFloat));
    };
    put(scaled.numbers, std::get<0>(results));
    put(scaled.scale, std::get<1>(results));
    return results;
  }

#ifdef LOCKSTEP_HAS_CUDA
  Result cuda() const {
    check();
    expect(x.scalar_type() == at::kBFloat16, "x", "bfloat16 on a GPU", x.scalar_type());
    expect(x.size(2) % 8 == 0, "x", "[G, M, a multiple of 8] on a GPU", x.sizes());
    const Tensor rows = in_whole_rows(x);
    const auto results = meta();
    const auto& [numbers, scale] = results;
    if (x.numel() == 0) scale.fill_(kLeastScale);
    kernels::scale_to_e4m3({.x = view_of<const kernels::Bf16, 3>(rows, "x"),
                            .numbers = view_of<kernels::E4m3, 3>(numbers, "x"),
                            .scale = view_of<float, 3>(scale, "x")},
                           stream());
    return results;
  }
  static constexpr double kLeastScale = 1e-12 / 448;
#endif
};

struct LatentCacheWrite : Arguments {
  static constexpr const char* kSchema = R"(
latent_cache_write(Tensor latent, Tensor k_pe, Tensor q_pe, Tensor(a!) kv_cache, Tensor slots,
    Tensor positions, Tensor frequencies, *, Tensor? norm=None, float? eps=None,
    float? magnitude=None, bool interleaved=True, Tensor? kv_scale=None,
    bool power_of_two_scales=True) -> Tensor)";

  using Arguments::Arguments;
  const Tensor latent = tensor(), k_pe = tensor(), q_pe = tensor(), kv_cache = tensor(),
               slots = tensor(), positions = tensor(), frequencies = tensor();
  const MaybeTensor norm = maybe_tensor();
  const double eps = maybe_number().value_or(kEps), magnitude = maybe_number().value_or(1);
  const bool interleaved = flag();
  const MaybeTensor kv_scale = maybe_tensor();
  const bool power_of_two_scales = flag();

  Tensor meta() const { return like(q_pe); }

  void check() const {
    expect_rank(latent, "latent", 2);
    expect_rank(q_pe, "q_pe", 3);
    expect_rank(frequencies, "frequencies", 1);
    expect_type(frequencies, at::kFloat, "frequencies");
    const std::int64_t T = latent.size(0), dr = 2 * frequencies.size(0);
    expect_float(latent, "latent");
    expect_type(k_pe, latent.scalar_type(), "k_pe");
    expect_type(q_pe, latent.scalar_type(), "q_pe");
    expect_shape(k_pe, "k_pe", "[T, 2 frequencies]", {T, dr});
    expect_shape(q_pe, "q_pe", "[T, heads, 2 frequencies]", {T, q_pe.size(1), dr});
    expect_shape(slots, "slots", "[T]", {T});
    expect_shape(positions, "positions", "[T]", {T});
    expect_shape(norm, "norm", "[width of latent]", {latent.size(1)});
    check_cache(kv_cache, latent.size(1) + dr, kv_scale);
  }

  Tensor cpu() const {
    check();
    const HostTensor<2> hl(latent, "latent");
    const HostTensor<3> hq(q_pe, "q_pe");
    const HostTensor<1> weight(norm, "norm");
    const Tensor all = at::cat({latent.to(at::kFloat), k_pe.to(at::kFloat)}, 1);
    const std::int64_t T = all.size(0), dc = latent.size(1), dr = k_pe.size(1);
    const auto rows = view_of<float, 2>(all, "latent");
    for (std::int64_t t = 0; norm && t < T; ++t)
      mapped(at(rows, t)).head(dc) = reference::rms_normed<float>(
          as_vector(at(hl.in(), t)), as_vector(*weight.maybe()), static_cast<float>(eps));
    const auto rope = rope_of(frequencies, magnitude);
    const IndexView at_positions = indices_of<1>(positions, "positions");
    reference::apply_rope<float>(rope, at_positions, pairs_of(interleaved), hq.out());
    reference::apply_rope<float>(
        rope, at_positions, pairs_of(interleaved),
        make_view(rows.data_handle() + dc, Shape<3>{T, 1, dr}, Shape<3>{dc + dr, dr, 1}));
    store(all, indices_of<1>(slots, "slots"), kv_cache, kv_scale, power_of_two_scales);
    return hq.as(q_pe.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    expect(latent.scalar_type() == at::kBFloat16, "latent", "bfloat16 on a GPU",
           latent.scalar_type());
    expect(latent.size(1) == 512, "latent", "[T, 512] on a GPU", latent.sizes());
    expect(frequencies.size(0) == 32, "frequencies", "[32] on a GPU", frequencies.sizes());
    return of_cache(kv_cache, [&](auto c) { return run<decltype(c)>(); });
  }
  template <class C>
  Tensor run() const {
    using kernels::Bf16;
    const Tensor out = meta(), q = in_whole_rows(q_pe);
    kernels::LatentWrite<C> in{.latent = view_of<const Bf16, 2>(latent, "latent"),
                               .k_pe = view_of<const Bf16, 2>(k_pe, "k_pe"),
                               .eps = static_cast<float>(eps),
                               .positions = indices_of<1>(positions, "positions"),
                               .frequencies = view_of<const float, 1>(frequencies, "frequencies"),
                               .magnitude = static_cast<float>(magnitude),
                               .interleaved = interleaved,
                               .slots = indices_of<1>(slots, "slots"),
                               .cache = view_of<C, 3>(kv_cache, "kv_cache"),
                               .power_of_two_scales = power_of_two_scales};
    if (norm) in.norm = mixed<1>(norm, "norm");
    in.kv_scale = scale_view(kv_scale);
    if (q.size(1) > 0) {
      in.q_pe = view_of<const Bf16, 3>(q, "q_pe");
      in.rotated_q = view_of<Bf16, 3>(out, "q_pe");
    }
    kernels::write_latents(in, stream());
    return out;
  }
#endif
};

struct LatentCacheGather : Arguments {
  static constexpr const char* kSchema = R"(
latent_cache_gather(Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc,
    int rows, *, int begin=0, int? size=None, bool prefix=False,
    Tensor? kv_scale=None) -> (Tensor latents, Tensor starts))";

  using Arguments::Arguments;
  const Tensor kv_cache = tensor(), block_table = tensor(), seq_lens = tensor(),
               query_start_loc = tensor();
  const std::int64_t rows = integer(), begin = integer();
  const std::int64_t size = maybe_integer().value_or(INT32_MAX);
  const bool prefix = flag();
  const MaybeTensor kv_scale = maybe_tensor();

  using Result = std::tuple<Tensor, Tensor>;

  Result meta() const {
    const bool bytes = kv_cache.scalar_type() == at::kByte;
    const auto type = bytes || in_e4m3(kv_cache) ? at::kBFloat16 : kv_cache.scalar_type();
    const c10::SymInt width =
        bytes ? c10::SymInt(reference::kLatent + reference::kRotary) : kv_cache.sym_size(2);
    return {at::empty_symint({rows, width}, kv_cache.options().dtype(type)),
            at::empty_symint({seq_lens.sym_size(0) + 1}, seq_lens.options())};
  }

  void check() const {
    check_cache(kv_cache, {}, kv_scale);
    expect_rank(seq_lens, "seq_lens", 1);
    const std::int64_t B = seq_lens.size(0);
    expect_rank(block_table, "block_table", 2);
    expect_shape(block_table, "block_table", "[B, blocks]", {B, block_table.size(1)});
    expect_shape(query_start_loc, "query_start_loc", "[B + 1]", {B + 1});
    expect(rows >= 0 && begin >= 0 && size >= 0, "rows, begin, size", "at least 0",
           std::min({rows, begin, size}));
  }

  Result cpu() const {
    check();
    const IndexView lengths = indices_of<1>(seq_lens, "seq_lens");
    const IndexView starts = indices_of<1>(query_start_loc, "query_start_loc");
    const IndexTable table = indices_of<2>(block_table, "block_table");
    const auto results = meta();
    const Tensor all = at::zeros(std::get<0>(results).sizes(), at::kFloat);
    const auto first = view_of<std::int32_t, 1>(std::get<1>(results), "starts");
    const std::int64_t room = block_table.size(1) * kv_cache.size(1);
    std::int64_t row = 0;
    for (std::int64_t b = 0; b < lengths.extent(0); ++b) {
      const std::int64_t fresh = prefix ? starts(b + 1) - starts(b) : 0;
      const std::int64_t end = std::min(begin + size, lengths(b) - fresh);
      expect(lengths(b) - fresh <= room, "seq_lens", "no more than block_table has room for",
             lengths(b));
      first(b) = static_cast<std::int32_t>(row);
      for (std::int64_t i = begin; i < end; ++i, ++row)
        if (row < rows) load(cached_place(kv_cache, table, b, i), kv_scale, all[row]);
    }
    first(lengths.extent(0)) = static_cast<std::int32_t>(row);
    std::get<0>(results).copy_(all);
    return results;
  }

#ifdef LOCKSTEP_HAS_CUDA
  Result cuda() const {
    check();
    if (kv_cache.scalar_type() != at::kByte)
      expect(kv_cache.size(2) == 576, "kv_cache", "[pages, page, 576] on a GPU", kv_cache.sizes());
    return of_cache(kv_cache, [&](auto c) { return run<decltype(c)>(); });
  }
  template <class C>
  Result run() const {
    const Result results = meta();
    const auto& [latents, starts] = results;
    kernels::gather_latents<C>(
        {.cache = view_of<const C, 3>(kv_cache, "kv_cache"),
         .block_table = indices_of<2>(block_table, "block_table"),
         .seq_lens = indices_of<1>(seq_lens, "seq_lens"),
         .query_start_loc = indices_of<1>(query_start_loc, "query_start_loc"),
         .begin = begin,
         .size = size,
         .prefix = prefix,
         .kv_scale = scale_view(kv_scale),
         .latents = view_of<kernels::Bf16, 2>(latents, "latents"),
         .starts = view_of<std::int32_t, 1>(starts, "starts")},
        stream());
    return results;
  }
#endif
};

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<BatchedProduct>(m);
  add_operator<ScaleToE4m3>(m);
  add_operator<LatentCacheWrite>(m);
  add_operator<LatentCacheGather>(m);
}

}  // namespace
}  // namespace lockstep::torch_ops
