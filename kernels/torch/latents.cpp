// torch.ops.lockstep.batched_product, latent_cache_write and mla_layer: schemas in operators.md.
#include "kernels/torch/lanes.hpp"
#include "reference/attention/latent_token.hpp"
#include "reference/attention/mla_attention.hpp"
#include "reference/layers/batched_product.hpp"
#include "reference/layers/product.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/attention/latent_cache.hpp"
#include "kernels/layers/batched_product.hpp"
#include "kernels/models/mla_layer.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

constexpr double kEps = 1e-6;  ///< of DeepSeek's norms

bool in_e4m3(const Tensor& x) {
  return x.scalar_type() == at::kFloat8_e4m3fn;
}

/// A matrix, or a batch of matrices, in float.
template <std::size_t Rank>
HostTensor<Rank> host_values(const Tensor& x, const char* argument) {
  expect_rank(x, argument, Rank);
  return HostTensor<Rank>(MaybeTensor(x));
}

struct BatchedProduct : Arguments {
  static constexpr const char* kSchema = R"(
batched_product(Tensor x, Tensor weight, *, Tensor? x_scale=None,
    Tensor? weight_scale=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor x = tensor(), weight = tensor();
  const MaybeTensor x_scale = maybe_tensor(), weight_scale = maybe_tensor();

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
                                  .out = view_of<kernels::Bf16, 3>(out, "out")};
    if (x_scale) in.x_scale = view_of<const float, 3>(*x_scale, "x_scale");
    if (weight_scale) in.weight_scale = view_of<const float, 3>(*weight_scale, "weight_scale");
    kernels::batched_product(in, stream());
    return out;
  }
#endif
};

/// A cache of latents: of numbers, or of tokens of 656 bytes.
void check_cache(const Tensor& cache, std::int64_t width, const MaybeTensor& kv_scale) {
  expect_rank(cache, "kv_cache", 3);
  const bool bytes = cache.scalar_type() == at::kByte;
  expect(cache.size(1) >= 1, "kv_cache", "[pages, page, width] with a token in each page",
         cache.sizes());
  expect_shape(cache, "kv_cache", bytes ? "[pages, page, 656] in bytes" : "[pages, page, width]",
               {cache.size(0), cache.size(1), bytes ? reference::kTokenBytes : width});
  expect_kv_scale(kv_scale, cache);
}

#ifdef LOCKSTEP_HAS_CUDA
/// `run` of a value of the type that kernels see in the cache.
template <class Run>
Tensor of_cache(const Tensor& cache, Run run) {
  if (in_e4m3(cache)) return run(kernels::E4m3());
  if (cache.scalar_type() == at::kByte) return run(std::uint8_t());
  expect_type(cache, at::kBFloat16, "kv_cache");
  return run(kernels::Bf16());
}
#endif

float scale_of(const MaybeTensor& kv_scale) {
  return kv_scale ? kv_scale->item<float>() : 1.0f;
}

/// The place of a slot, [width], or none.
MaybeTensor place_of(const Tensor& cache, std::int64_t slot) {
  if (slot < 0 || slot >= cache.size(0) * cache.size(1)) return {};
  return cache[slot / cache.size(1)][slot % cache.size(1)];
}

/// Latents [T, width] into their slots.
void store(const Tensor& latents, const IndexView& slots, const Tensor& cache,
           const MaybeTensor& kv_scale, bool power_of_two) {
  for (std::int64_t t = 0; t < latents.size(0); ++t) {
    const MaybeTensor place = place_of(cache, slots(t));
    if (!place) continue;
    if (cache.scalar_type() == at::kByte) {
      const auto row = view_of<const float, 1>(latents[t], "latent");
      const reference::LatentToken token = reference::packed_token<float>(
          as_vector(row),
          power_of_two ? reference::TileScale::power_of_two : reference::TileScale::exact);
      place->copy_(at::from_blob(const_cast<std::uint8_t*>(token.data()), {reference::kTokenBytes},
                                 at::kByte));
    } else if (in_e4m3(cache)) {
      place->copy_((latents[t] / scale_of(kv_scale)).clamp(-448, 448).to(cache.scalar_type()));
    } else {
      place->copy_(latents[t]);
    }
  }
}

/// What the slot of a token stands for, into a row [width].
void load(const Tensor& place, const MaybeTensor& kv_scale, const Tensor& row) {
  if (place.scalar_type() != at::kByte) {
    row.copy_(place.to(at::kFloat) * scale_of(kv_scale));
    return;
  }
  const Tensor bytes = place.contiguous();
  reference::LatentToken token;
  std::copy_n(bytes.data_ptr<std::uint8_t>(), token.size(), token.begin());
  const Vector<float> x = reference::unpacked_token<float>(token);
  std::copy(x.begin(), x.end(), row.data_ptr<float>());
}

reference::Rope<float> rope_of(const Tensor& frequencies, double magnitude) {
  const HostTensor<1> of(MaybeTensor(frequencies), "frequencies");
  return {as_vector(of.in()), static_cast<float>(magnitude)};
}
reference::RopePairs pairs_of(bool interleaved) {
  return interleaved ? reference::RopePairs::interleaved : reference::RopePairs::half_split;
}

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
    if (kv_scale) in.kv_scale = view_of<const float, 1>(kv_scale->reshape({1}), "kv_scale");
    if (q.size(1) > 0) {
      in.q_pe = view_of<const Bf16, 3>(q, "q_pe");
      in.rotated_q = view_of<Bf16, 3>(out, "q_pe");
    }
    kernels::write_latents(in, stream());
    return out;
  }
#endif
};

struct MlaLayer : Arguments {
  static constexpr const char* kSchema = R"(
mla_layer(Tensor hidden, Tensor positions, Tensor slots, Tensor(a!) kv_cache, Tensor block_table,
    Tensor seq_lens, Tensor qkv_a, Tensor? q_a_norm, Tensor q_b, Tensor kv_a_norm, Tensor kv_b,
    Tensor w_kc, Tensor w_vc, Tensor o_proj, Tensor frequencies, float softmax_scale, *,
    Tensor? query_start_loc=None, str form="absorbed", int capacity=0, int longest_prefix=0,
    float? magnitude=None, bool interleaved=True, float? eps=None, Tensor? kv_scale=None,
    Tensor? w_kc_scale=None, Tensor? w_vc_scale=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor hidden = tensor(), positions = tensor(), slots = tensor(), kv_cache = tensor(),
               block_table = tensor(), seq_lens = tensor(), qkv_a = tensor();
  const MaybeTensor q_a_norm = maybe_tensor();
  const Tensor q_b = tensor(), kv_a_norm = tensor(), kv_b = tensor(), w_kc = tensor(),
               w_vc = tensor(), o_proj = tensor(), frequencies = tensor();
  const double softmax_scale = number();
  const MaybeTensor query_start_loc = maybe_tensor();
  const std::string form = text();
  const std::int64_t capacity = integer(), longest_prefix = integer();
  const double magnitude = maybe_number().value_or(1);
  const bool interleaved = flag();
  const double eps = maybe_number().value_or(kEps);
  const MaybeTensor kv_scale = maybe_tensor(), w_kc_scale = maybe_tensor(),
                    w_vc_scale = maybe_tensor();

  Tensor meta() const { return like(hidden); }

  void check() const {
    expect_rank(hidden, "hidden", 2);
    expect_float(hidden, "hidden");
    expect_rank(w_kc, "w_kc", 3);
    expect_rank(w_vc, "w_vc", 3);
    const std::int64_t T = hidden.size(0), width = hidden.size(1), H = w_kc.size(0);
    const std::int64_t dc = w_kc.size(1), dn = w_kc.size(2), dv = w_vc.size(1);
    const std::int64_t dr = 2 * frequencies.size(0), low = q_a_norm ? q_a_norm->size(0) : 0;
    expect_shape(positions, "positions", "[T]", {T});
    expect_shape(slots, "slots", "[T]", {T});
    expect_shape(qkv_a, "qkv_a", "[q_lora + latent + rotary, hidden]", {low + dc + dr, width});
    expect_shape(q_b, "q_b", "[heads (nope + rotary), q_lora or hidden]",
                 {H * (dn + dr), low > 0 ? low : width});
    expect_shape(kv_a_norm, "kv_a_norm", "[latent]", {dc});
    expect_shape(kv_b, "kv_b", "[heads (nope + values), latent]", {H * (dn + dv), dc});
    expect_shape(w_vc, "w_vc", "[heads, values, latent]", {H, dv, dc});
    expect_shape(o_proj, "o_proj", "[hidden, heads values]", {width, H * dv});
    expect(w_kc_scale.has_value() == in_e4m3(w_kc) && w_vc_scale.has_value() == in_e4m3(w_vc),
           "w_kc_scale, w_vc_scale", "given where the weight is float8_e4m3fn", "another");
    check_cache(kv_cache, dc + dr, kv_scale);
    const std::int64_t B = seq_lens.size(0);
    expect_shape(block_table, "block_table", "[B, blocks]", {B, block_table.size(1)});
    expect_shape(query_start_loc, "query_start_loc", "[B + 1]", {B + 1});
    expect(query_start_loc || (B > 0 && T % B == 0), "hidden", "of as many tokens for each request",
           hidden.sizes());
    expect(form == "absorbed" || (query_start_loc && (form == "one_shot" || form == "chunked")),
           "form", "absorbed, or with query_start_loc one_shot or chunked", form);
    expect(form != "chunked" || capacity >= B, "capacity", "at least one token for each request",
           capacity);
    expect(capacity >= 0 && longest_prefix >= 0, "capacity, longest_prefix", "at least 0",
           std::min(capacity, longest_prefix));
  }

  /// The absorbing weights as [H, dn, dc] and [H, dc, dv], in float.
  reference::MlaUpWeights<float> up_weights() const {
    const auto values = [](const Tensor& w, const MaybeTensor& scale) {
      Tensor x = w.to(at::kFloat);
      if (scale) {
        const std::int64_t block = reference::kScaleGroup;
        Tensor wide = *scale;
        for (const std::int64_t d : {1, 2})
          if (wide.size(d) > 1) wide = wide.repeat_interleave(block, d).narrow(d, 0, w.size(d));
        x = x * wide;
      }
      const Tensor turned = x.transpose(1, 2).contiguous();
      Array<float, 3> array(Shape<3>{turned.size(0), turned.size(1), turned.size(2)});
      std::copy_n(turned.data_ptr<float>(), array.size(), array.data());
      return array;
    };
    return {values(w_kc, w_kc_scale), values(w_vc, w_vc_scale)};
  }

  Tensor cpu() const {
    check();
    const std::int64_t dr = 2 * frequencies.size(0), dc = w_kc.size(1), dn = w_kc.size(2);
    const std::int64_t H = w_kc.size(0), dv = w_vc.size(1), low = q_a_norm ? q_a_norm->size(0) : 0;
    const auto x = host_values<2>(hidden, "hidden");
    const auto a = host_values<2>(low > 0 ? qkv_a.narrow(0, 0, low) : qkv_a, "qkv_a");
    const auto kv_a = host_values<2>(qkv_a.narrow(0, low, dc + dr), "qkv_a");
    const auto b = host_values<2>(q_b, "q_b"), o = host_values<2>(o_proj, "o_proj");
    const HostTensor<1> q_norm(q_a_norm, "q_a_norm"), kv_norm(kv_a_norm, "kv_a_norm");
    reference::MlaLayer<float> layer{.H = H,
                                     .dn = dn,
                                     .dr = dr,
                                     .q_b = b.in(),
                                     .kv_a = kv_a.in(),
                                     .kv_a_norm = kv_norm.in(),
                                     .eps = static_cast<float>(eps)};
    if (low > 0) layer.q_a = a.in(), layer.q_a_norm = q_norm.in();
    reference::Rope<float> rope = rope_of(frequencies, magnitude);
    expect(interleaved, "interleaved", "true on the CPU", interleaved);
    const auto p =
        reference::mla_project<float>(x.in(), indices_of<1>(positions, "positions"), layer, rope);
    const auto tensor_of = [](const Array<float, 2>& from) {
      return at::from_blob(const_cast<float*>(from.data()), {from.extent(0), from.extent(1)},
                           at::kFloat);
    };
    store(at::cat({tensor_of(p.latent), tensor_of(p.k_pe)}, 1), indices_of<1>(slots, "slots"),
          kv_cache, kv_scale, true);

    const auto up = up_weights();
    const IndexView lengths = indices_of<1>(seq_lens, "seq_lens");
    const IndexTable table = indices_of<2>(block_table, "block_table");
    const auto starts = indices_of(query_start_loc, "query_start_loc");
    const std::int64_t T = hidden.size(0), B = lengths.extent(0), page = kv_cache.size(1);
    Array<float, 2> heads(Shape<2>{T, H * dv}, 0);
    for (std::int64_t r = 0; r < B; ++r) {
      const std::int64_t begin = starts ? (*starts)(r) : T / B * r;
      const std::int64_t end = starts ? (*starts)(r + 1) : T / B * (r + 1), L = lengths(r);
      expect(0 <= begin && begin <= end && end <= T && 0 <= L && L <= table.extent(1) * page,
             "seq_lens, query_start_loc", "rows and contexts that exist", L);
      const Tensor context = at::zeros({L, dc + dr}, at::kFloat);
      for (std::int64_t i = 0; i < L; ++i) {
        const MaybeTensor place = place_of(kv_cache, table(r, i / page) * page + i % page);
        expect(table(r, i / page) >= 0 && place, "block_table", "pages before a request's end",
               table(r, i / page));
        load(*place, kv_scale, context[i]);
      }
      const auto of = [&](const Array<float, 3>& q) { return cut(q.view(), begin, end); };
      const auto cached = view_of<const float, 2>(context, "kv_cache");
      const auto columns = [&](std::int64_t first, std::int64_t count) {
        return make_view(cached.data_handle() + first, Shape<2>{L, count}, Shape<2>{dc + dr, 1});
      };
      Array<float, 3> out(Shape<3>{end - begin, H, dv});
      Array<float, 2> lse(Shape<2>{H, end - begin});
      reference::mla_absorbed<float>({of(p.q_nope), of(p.q_pe), columns(0, dc), columns(dc, dr)},
                                     up, {.scale = softmax_scale, .causal = true}, out, lse);
      std::copy(out.begin(), out.end(), &heads.data()[begin * H * dv]);
    }
    const HostTensor<2> result{MaybeTensor(at::zeros(hidden.sizes(), at::kFloat))};
    reference::product<float>(std::as_const(heads).view(), o.in(), result.out());
    return result.as(hidden.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    expect(hidden.scalar_type() == at::kBFloat16, "hidden", "bfloat16 on a GPU",
           hidden.scalar_type());
    const bool sizes = w_kc.size(1) == 512 && w_kc.size(2) == 128 && w_vc.size(1) == 128 &&
                       frequencies.size(0) == 32;
    expect(sizes, "w_kc, w_vc, frequencies", "[H, 512, 128], [H, 128, 512], [32] on a GPU",
           w_kc.sizes());
    return of_cache(kv_cache, [&](auto c) { return run<decltype(c)>(); });
  }

  template <class C>
  Tensor run() const {
    using kernels::Bf16;
    const Tensor out = meta(), x = in_whole_rows(hidden);
    const auto matrix = [](const Tensor& w, const char* argument) {
      expect_type(w, at::kBFloat16, argument);
      return view_of<const Bf16, 2>(w, argument);
    };
    kernels::MlaWeights w{.qkv_a = matrix(qkv_a, "qkv_a"),
                          .q_a_norm = mixed<1>(q_a_norm, "q_a_norm"),
                          .q_b = matrix(q_b, "q_b"),
                          .kv_a_norm = mixed<1>(kv_a_norm, "kv_a_norm"),
                          .kv_b = matrix(kv_b, "kv_b"),
                          .o_proj = matrix(o_proj, "o_proj"),
                          .frequencies = view_of<const float, 1>(frequencies, "frequencies"),
                          .magnitude = static_cast<float>(magnitude),
                          .interleaved = interleaved,
                          .softmax_scale = static_cast<float>(softmax_scale),
                          .eps = static_cast<float>(eps)};
    const auto absorbing = [](const Tensor& weight, const MaybeTensor& scale, auto& plain,
                              auto& scaled, const char* argument) {
      if (scale) {
        scaled = {view_of<const kernels::E4m3, 3>(weight, argument),
                  view_of<const float, 3>(*scale, argument)};
      } else {
        expect_type(weight, at::kBFloat16, argument);
        plain = view_of<const Bf16, 3>(weight, argument);
      }
    };
    absorbing(w_kc, w_kc_scale, w.w_kc, w.scaled_w_kc, "w_kc");
    absorbing(w_vc, w_vc_scale, w.w_vc, w.scaled_w_vc, "w_vc");
    kernels::MlaTokens<C> in{.hidden = view_of<const Bf16, 2>(x, "hidden"),
                             .positions = indices_of<1>(positions, "positions"),
                             .slots = indices_of<1>(slots, "slots"),
                             .cache = view_of<C, 3>(kv_cache, "kv_cache"),
                             .block_table = indices_of<2>(block_table, "block_table"),
                             .seq_lens = indices_of<1>(seq_lens, "seq_lens"),
                             .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
                             .out = view_of<Bf16, 2>(out, "out"),
                             .lane = lane_of(stream())};
    if (kv_scale) in.kv_scale = view_of<const float, 1>(kv_scale->reshape({1}), "kv_scale");
    const kernels::MlaPlan plan{.form = form == "absorbed"   ? kernels::MlaForm::absorbed
                                        : form == "one_shot" ? kernels::MlaForm::one_shot
                                                             : kernels::MlaForm::chunked,
                                .capacity = capacity,
                                .longest_prefix = longest_prefix};
    const Tensor workspace =
        at::empty({kernels::mla_layer_workspace(w, in, plan)}, hidden.options().dtype(at::kByte));
    in.workspace = view_of<unsigned char, 1>(workspace, "workspace");
    kernels::mla_layer(w, in, plan, stream());
    return out;
  }
#endif
};

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<BatchedProduct>(m);
  add_operator<LatentCacheWrite>(m);
  add_operator<MlaLayer>(m);
}

}  // namespace
}  // namespace lockstep::torch_ops
