// torch.ops.lockstep.mla_layer, padded_mla_layer and mla_rope_decode: schemas in operators.md.
#include "kernels/torch/latents.hpp"
#include "reference/attention/mla_attention.hpp"
#include "reference/layers/batched_product.hpp"
#include "reference/layers/product.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/models/mla_layer.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

/// The projections before and after attention. H heads, with dn columns without rotation, dr with
/// rotation, and dv of values; a latent has dc columns.
struct Projections {
  const Tensor &hidden, &positions, &slots, &qkv_a;
  const MaybeTensor& q_a_norm;
  const Tensor &q_b, &kv_a_norm, &kv_b, &o_proj, &frequencies;
  double softmax_scale, magnitude;
  bool interleaved;
  double eps;
  std::int64_t H, dn, dv;
  std::int64_t T = hidden.size(0), width = hidden.size(1), dc = kv_a_norm.size(0),
               dr = 2 * frequencies.size(0), low = q_a_norm ? q_a_norm->size(0) : 0;

  void check() const {
    expect_shape(positions, "positions", "[T]", {T});
    expect_shape(slots, "slots", "[T]", {T});
    expect_shape(qkv_a, "qkv_a", "[q_lora + latent + rotary, hidden]", {low + dc + dr, width});
    expect_shape(q_b, "q_b", "[heads (nope + rotary), q_lora or hidden]",
                 {H * (dn + dr), low > 0 ? low : width});
    expect_shape(kv_b, "kv_b", "[heads (nope + values), latent]", {H * (dn + dv), dc});
    expect_shape(o_proj, "o_proj", "[hidden, heads values]", {width, H * dv});
    for (const auto& [weight, argument] :
         {std::pair{qkv_a, "qkv_a"}, {q_b, "q_b"}, {kv_b, "kv_b"}, {o_proj, "o_proj"}}) {
      expect_float(weight, argument);
      expect_contiguous_rows(weight, argument);
    }
  }

  reference::MlaProjected<float> projected() const {
    expect(interleaved, "interleaved", "true on the CPU", interleaved);
    const auto x = host_values<2>(hidden, "hidden"), b = host_values<2>(q_b, "q_b");
    const auto a = host_values<2>(low > 0 ? qkv_a.narrow(0, 0, low) : qkv_a, "qkv_a");
    const auto kv_a = host_values<2>(qkv_a.narrow(0, low, dc + dr), "qkv_a");
    const HostTensor<1> q_norm(q_a_norm, "q_a_norm"), kv_norm(kv_a_norm, "kv_a_norm");
    reference::MlaLayer<float> layer{.H = H,
                                     .dn = dn,
                                     .dr = dr,
                                     .q_b = b.in(),
                                     .kv_a = kv_a.in(),
                                     .kv_a_norm = kv_norm.in(),
                                     .eps = static_cast<float>(eps)};
    if (low > 0) layer.q_a = a.in(), layer.q_a_norm = q_norm.in();
    return reference::mla_project<float>(x.in(), indices_of<1>(positions, "positions"), layer,
                                         rope_of(frequencies, magnitude));
  }
  /// The hidden states that o_proj makes of the heads' outputs [T, H, dv].
  Tensor result(const Array<float, 3>& heads) const {
    const auto o = host_values<2>(o_proj, "o_proj");
    const HostTensor<2> out{MaybeTensor(at::zeros(hidden.sizes(), at::kFloat))};
    reference::product<float>(make_view(heads.data(), Shape<2>{T, H * dv}), o.in(), out.out());
    return out.as(hidden.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  void check_cuda() const {
    expect(hidden.scalar_type() == at::kBFloat16, "hidden", "bfloat16 on a GPU",
           hidden.scalar_type());
    expect(dc == 512 && dr == 64 && dn == 128 && dv == 128, "kv_a_norm, frequencies, q_b, kv_b",
           "of latents 512 wide, and heads of 128 + 64 columns and 128 of values on a GPU",
           std::to_string(dc) + ", " + std::to_string(dn) + " + " + std::to_string(dr) + ", " +
               std::to_string(dv));
  }
  kernels::MlaWeights weights() const {
    const auto matrix = [](const Tensor& w, const char* argument) {
      expect_type(w, at::kBFloat16, argument);
      return view_of<const kernels::Bf16, 2>(w, argument);
    };
    expect_type(frequencies, at::kFloat, "frequencies");
    return {.qkv_a = matrix(qkv_a, "qkv_a"),
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
  }
#endif
};

/// The absorbing weights w_kc [H, dc, dn] and w_vc [H, dv, dc]; in e4m3 with scales.
struct Absorbing {
  const Tensor &w_kc, &w_vc;
  const MaybeTensor &w_kc_scale, &w_vc_scale;

  void check() const {
    const std::int64_t H = w_kc.size(0), dc = w_kc.size(1), dn = w_kc.size(2);
    expect_shape(w_vc, "w_vc", "[heads, values, latent]", {H, w_vc.size(1), dc});
    expect_float_or_e4m3(w_kc, "w_kc");
    expect_float_or_e4m3(w_vc, "w_vc");
    expect(w_kc_scale.has_value() == in_e4m3(w_kc) && w_vc_scale.has_value() == in_e4m3(w_vc),
           "w_kc_scale, w_vc_scale", "given where the weight is float8_e4m3fn", "another");
    check_scale(w_kc_scale, "w_kc_scale", {H, dc, dn});
    check_scale(w_vc_scale, "w_vc_scale", {H, w_vc.size(1), dc});
  }
  /// Expects one scale for the tensor, or one for each block of 128 x 128.
  static void check_scale(const MaybeTensor& scale, const char* argument, at::IntArrayRef w) {
    if (!scale) return;
    expect_type(scale, at::kFloat, argument);
    expect_rank(*scale, argument, 3);
    const auto blocks = [](std::int64_t n) {
      return (n + reference::kScaleGroup - 1) / reference::kScaleGroup;
    };
    const std::int64_t whole[] = {w[0], blocks(w[1]), blocks(w[2])};
    for (std::int64_t i = 0; i < 3; ++i)
      TORCH_CHECK(scale->size(i) == 1 || scale->size(i) == whole[i], argument,
                  " is expected to be ", at::IntArrayRef(whole),
                  ", or 1 in place of an extent; got ", scale->sizes());
  }

  /// The weights transposed to [H, dn, dc] and [H, dc, dv], in float.
  reference::MlaUpWeights<float> values() const {
    const auto turned = [](const Tensor& w, const MaybeTensor& scale) {
      Tensor x = w.to(at::kFloat);
      if (scale) {
        Tensor wide = *scale;
        for (const std::int64_t d : {1, 2})
          if (wide.size(d) > 1)
            wide = wide.repeat_interleave(reference::kScaleGroup, d).narrow(d, 0, w.size(d));
        x = x * wide;
      }
      x = x.transpose(1, 2).contiguous();
      Array<float, 3> array(Shape<3>{x.size(0), x.size(1), x.size(2)});
      std::copy_n(x.data_ptr<float>(), array.size(), array.data());
      return array;
    };
    return {turned(w_kc, w_kc_scale), turned(w_vc, w_vc_scale)};
  }

#ifdef LOCKSTEP_HAS_CUDA
  void put_into(kernels::MlaWeights& w) const {
    const auto put = [](const Tensor& weight, const MaybeTensor& scale, auto& plain, auto& scaled,
                        const char* argument) {
      expect_contiguous_rows(weight, argument);
      if (scale) {
        scaled = {view_of<const kernels::E4m3, 3>(weight, argument),
                  view_of<const float, 3>(*scale, argument)};
      } else {
        expect_type(weight, at::kBFloat16, argument);
        plain = view_of<const kernels::Bf16, 3>(weight, argument);
      }
    };
    put(w_kc, w_kc_scale, w.w_kc, w.scaled_w_kc, "w_kc");
    put(w_vc, w_vc_scale, w.w_vc, w.scaled_w_vc, "w_vc");
  }
#endif
};

/// The requests of a batch: which of the T tokens, and which places of the cache, belong to each.
struct Requests {
  const Tensor &block_table, &seq_lens;
  const MaybeTensor& query_start_loc;
  std::int64_t T;

  void check(const char* tokens) const {
    const std::int64_t B = seq_lens.size(0);
    expect_shape(seq_lens, "seq_lens", "[B]", {B});
    expect_rank(block_table, "block_table", 2);
    expect_shape(block_table, "block_table", "[B, blocks]", {B, block_table.size(1)});
    expect_type(seq_lens, at::kInt, "seq_lens");
    expect_type(block_table, at::kInt, "block_table");
    expect_type(query_start_loc, at::kInt, "query_start_loc");
    expect_shape(query_start_loc, "query_start_loc", "[B + 1]", {B + 1});
    expect(query_start_loc || (B > 0 && T % B == 0), tokens, "of as many tokens for each request",
           T);
  }
  /// Checks the values of indices on the CPU, before anything is written to the cache.
  void check_host(const Tensor& cache) const {
    for_each(cache.size(1), [&](auto, auto, auto L, auto place) {
      for (std::int64_t i = 0; i < L; ++i) place(cache, i);
    });
  }
  /// Calls body(begin, end, L, place) for each request: it has new tokens begin ... end - 1 and a
  /// context of L tokens, of which token i is cached in place(cache, i).
  template <class Body>
  void for_each(std::int64_t page, Body body) const {
    const IndexView lengths = indices_of<1>(seq_lens, "seq_lens");
    const IndexTable table = indices_of<2>(block_table, "block_table");
    const auto starts = indices_of(query_start_loc, "query_start_loc");
    const std::int64_t B = lengths.extent(0);
    for (std::int64_t r = 0; r < B; ++r) {
      const std::int64_t begin = starts ? (*starts)(r) : T / B * r;
      const std::int64_t end = starts ? (*starts)(r + 1) : T / B * (r + 1), L = lengths(r);
      expect(0 <= begin && begin <= end && end <= T && 0 <= L && L <= table.extent(1) * page,
             "seq_lens, query_start_loc", "rows and contexts that exist", L);
      body(begin, end, L,
           [&](const Tensor& cache, std::int64_t i) { return cached_place(cache, table, r, i); });
    }
  }
};

#ifdef LOCKSTEP_HAS_CUDA
/// The arguments of a kernel call without its inputs and outputs.
template <class C>
kernels::MlaTokens<C> tokens_of(const Requests& requests, const Tensor& positions,
                                const Tensor& slots, const TensorView<C, 3>& cache) {
  return {.positions = indices_of<1>(positions, "positions"),
          .slots = indices_of<1>(slots, "slots"),
          .cache = cache,
          .block_table = indices_of<2>(requests.block_table, "block_table"),
          .seq_lens = indices_of<1>(requests.seq_lens, "seq_lens"),
          .query_start_loc = indices_of(requests.query_start_loc, "query_start_loc"),
          .lane = lane_of(stream())};
}

/// A tensor of `bytes` bytes on the device of `like`.
Tensor workspace_of(std::int64_t bytes, const Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}
#endif

Tensor tensor_of(const Array<float, 2>& from) {
  return at::from_blob(const_cast<float*>(from.data()), {from.extent(0), from.extent(1)},
                       at::kFloat);
}
Tensor tensor_of(const Array<float, 3>& from) {
  return at::from_blob(const_cast<float*>(from.data()),
                       {from.extent(0), from.extent(1), from.extent(2)}, at::kFloat);
}

/// The absorbed form after the projections: writes the new tokens to the cache, and returns the
/// heads' outputs [T, H, dv].
Array<float, 3> attended(const reference::MlaProjected<float>& p,
                         const reference::MlaUpWeights<float>& up, const Requests& requests,
                         const Tensor& slots, const Tensor& cache, const MaybeTensor& kv_scale,
                         double softmax_scale) {
  requests.check_host(cache);
  store(at::cat({tensor_of(p.latent), tensor_of(p.k_pe)}, 1), indices_of<1>(slots, "slots"), cache,
        kv_scale, true);
  const std::int64_t T = requests.T, H = up.w_kc.extent(0), dv = up.w_vc.extent(2);
  const std::int64_t dc = p.latent.extent(1), dr = p.k_pe.extent(1);
  Array<float, 3> heads(Shape<3>{T, H, dv}, 0);
  requests.for_each(cache.size(1), [&](auto begin, auto end, auto L, auto place) {
    const Tensor context = at::zeros({L, dc + dr}, at::kFloat);
    for (std::int64_t i = 0; i < L; ++i) load(place(cache, i), kv_scale, context[i]);
    const auto cached = view_of<const float, 2>(context, "kv_cache");
    const auto columns = [&](std::int64_t first, std::int64_t count) {
      return make_view(cached.data_handle() + first, Shape<2>{L, count}, Shape<2>{dc + dr, 1});
    };
    Array<float, 2> lse(Shape<2>{H, end - begin});
    reference::mla_absorbed<float>(
        {cut(p.q_nope.view(), begin, end), cut(p.q_pe.view(), begin, end), columns(0, dc),
         columns(dc, dr)},
        up, {.scale = softmax_scale, .causal = true}, cut(heads.view(), begin, end), lse);
  });
  return heads;
}

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

  Absorbing absorbing() const { return {w_kc, w_vc, w_kc_scale, w_vc_scale}; }
  Requests requests() const { return {block_table, seq_lens, query_start_loc, hidden.size(0)}; }
  Projections projections() const {
    return {hidden,      positions, slots,        qkv_a,        q_a_norm,      q_b,
            kv_a_norm,   kv_b,      o_proj,       frequencies,  softmax_scale, magnitude,
            interleaved, eps,       w_kc.size(0), w_kc.size(2), w_vc.size(1)};
  }

  void check() const {
    expect_rank(hidden, "hidden", 2);
    expect_float(hidden, "hidden");
    expect_rank(w_kc, "w_kc", 3);
    expect_rank(w_vc, "w_vc", 3);
    expect_shape(kv_a_norm, "kv_a_norm", "[latent]", {w_kc.size(1)});
    projections().check();
    absorbing().check();
    requests().check("hidden");
    check_cache(kv_cache, w_kc.size(1) + 2 * frequencies.size(0), kv_scale);
    expect(form == "absorbed" || (query_start_loc && (form == "one_shot" || form == "chunked")),
           "form", "absorbed, or with query_start_loc one_shot or chunked", form);
    expect(form != "chunked" || capacity >= seq_lens.size(0), "capacity",
           "at least one token for each request", capacity);
    expect(capacity >= 0 && longest_prefix >= 0, "capacity, longest_prefix", "at least 0",
           std::min(capacity, longest_prefix));
  }

  Tensor cpu() const {
    check();
    const Projections layer = projections();
    return layer.result(attended(layer.projected(), absorbing().values(), requests(), slots,
                                 kv_cache, kv_scale, softmax_scale));
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    projections().check_cuda();
    return of_cache(kv_cache, [&](auto c) { return run<decltype(c)>(); });
  }

  template <class C>
  Tensor run() const {
    using kernels::Bf16;
    const Tensor out = meta(), x = in_whole_rows(hidden);
    kernels::MlaWeights w = projections().weights();
    absorbing().put_into(w);
    auto in = tokens_of<C>(requests(), positions, slots, view_of<C, 3>(kv_cache, "kv_cache"));
    in.hidden = view_of<const Bf16, 2>(x, "hidden");
    in.kv_scale = scale_view(kv_scale);
    in.out = view_of<Bf16, 2>(out, "out");
    const kernels::MlaPlan plan{.form = form == "absorbed"   ? kernels::MlaForm::absorbed
                                        : form == "one_shot" ? kernels::MlaForm::one_shot
                                                             : kernels::MlaForm::chunked,
                                .capacity = capacity,
                                .longest_prefix = longest_prefix};
    const Tensor workspace = workspace_of(kernels::mla_layer_workspace(w, in, plan), hidden);
    in.workspace = view_of<unsigned char, 1>(workspace, "workspace");
    kernels::mla_layer(w, in, plan, stream());
    return out;
  }
#endif
};

struct PaddedMlaLayer : Arguments {
  static constexpr const char* kSchema = R"(
padded_mla_layer(Tensor hidden, Tensor positions, Tensor slots, Tensor(a!) k_cache,
    Tensor(b!) v_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor qkv_a,
    Tensor? q_a_norm, Tensor q_b, Tensor kv_a_norm, Tensor kv_b, Tensor o_proj, Tensor frequencies,
    float softmax_scale, *, float? magnitude=None, bool interleaved=True,
    float? eps=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor hidden = tensor(), positions = tensor(), slots = tensor(), k_cache = tensor(),
               v_cache = tensor(), block_table = tensor(), seq_lens = tensor();
  const MaybeTensor query_start_loc = tensor();
  const Tensor qkv_a = tensor();
  const MaybeTensor q_a_norm = maybe_tensor();
  const Tensor q_b = tensor(), kv_a_norm = tensor(), kv_b = tensor(), o_proj = tensor(),
               frequencies = tensor();
  const double softmax_scale = number();
  const double magnitude = maybe_number().value_or(1);
  const bool interleaved = flag();
  const double eps = maybe_number().value_or(kEps);

  Tensor meta() const { return like(hidden); }

  Requests requests() const { return {block_table, seq_lens, query_start_loc, hidden.size(0)}; }
  Projections projections() const {
    const std::int64_t H = k_cache.size(2), dn = q_b.size(0) / H - 2 * frequencies.size(0);
    return {hidden,
            positions,
            slots,
            qkv_a,
            q_a_norm,
            q_b,
            kv_a_norm,
            kv_b,
            o_proj,
            frequencies,
            softmax_scale,
            magnitude,
            interleaved,
            eps,
            H,
            dn,
            kv_b.size(0) / H - dn};
  }

  void check() const {
    expect_rank(hidden, "hidden", 2);
    expect_float(hidden, "hidden");
    expect_rank(k_cache, "k_cache", 4);
    expect_rank(frequencies, "frequencies", 1);
    expect_rank(kv_a_norm, "kv_a_norm", 1);
    expect_rank(q_b, "q_b", 2);
    expect_rank(kv_b, "kv_b", 2);
    expect(k_cache.size(1) >= 1 && k_cache.size(2) >= 1, "k_cache",
           "[pages, page, heads, width] with a token in each page, and a head", k_cache.sizes());
    for (const auto& [cache, name] : {std::pair(k_cache, "k_cache"), {v_cache, "v_cache"}}) {
      expect_type(cache, hidden.scalar_type(), name);
      expect_contiguous_rows(cache, name);
    }
    expect_shape(v_cache, "v_cache", "[pages, page, heads, width]", k_cache.sizes());
    const Projections layer = projections();
    expect(layer.dn > 0 && layer.dv > 0, "q_b, kv_b", "of more rows a head", q_b.sizes());
    layer.check();
    expect(k_cache.size(3) >= std::max(layer.dn + layer.dr, layer.dv), "k_cache",
           "as wide as keys and values at least", k_cache.sizes());
    requests().check("hidden");
  }

  Tensor cpu() const {
    check();
    requests().check_host(k_cache);
    const Projections layer = projections();
    const auto p = layer.projected();
    const std::int64_t width = k_cache.size(3), T = layer.T, H = layer.H;
    const auto kv = host_values<2>(kv_b, "kv_b");
    const auto up = reference::split_kv_b<float>(kv.in(), H, layer.dn);
    const auto [k, v] =
        reference::decompressed<float>(p.latent.view(), p.k_pe.view(), up, width, width);
    const IndexView at_slots = indices_of<1>(slots, "slots");
    for (std::int64_t t = 0; t < T; ++t) {
      if (const MaybeTensor place = place_of(k_cache, at_slots(t))) place->copy_(tensor_of(k)[t]);
      if (const MaybeTensor place = place_of(v_cache, at_slots(t))) place->copy_(tensor_of(v)[t]);
    }
    const Array<float, 3> q = reference::side_by_side<float>(p.q_nope.view(), p.q_pe.view(), width);
    Array<float, 3> heads(Shape<3>{T, H, layer.dv}, 0);
    requests().for_each(k_cache.size(1), [&](auto begin, auto end, auto L, auto place) {
      const auto cached = [&](const Tensor& cache) {
        const Tensor context = at::zeros({L, H, width}, at::kFloat);
        for (std::int64_t i = 0; i < L; ++i) context[i].copy_(place(cache, i));
        return context;
      };
      const Tensor keys = cached(k_cache), values = cached(v_cache);
      Array<float, 3> wide(Shape<3>{end - begin, H, width});
      Array<float, 2> lse(Shape<2>{H, end - begin});
      reference::attention_row<float>(cut(q.view(), begin, end),
                                      view_of<const float, 3>(keys, "k_cache"),
                                      view_of<const float, 3>(values, "v_cache"),
                                      {.scale = softmax_scale, .causal = true}, wide, lse);
      for_each_element(cut(heads.view(), begin, end),
                       [&](const auto& i, float& e) { e = wide(i[0], i[1], i[2]); });
    });
    return layer.result(heads);
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    using kernels::Bf16;
    check();
    const Projections layer = projections();
    layer.check_cuda();
    expect(k_cache.size(3) == 256, "k_cache", "[pages, page, heads, 256] on a GPU",
           k_cache.sizes());
    const Tensor out = meta(), x = in_whole_rows(hidden);
    const kernels::MlaWeights w = layer.weights();
    const auto no_latents = make_view<Bf16>(nullptr, Shape<3>{0, 1, 576});
    auto in = tokens_of<Bf16>(requests(), positions, slots, no_latents);
    in.hidden = view_of<const Bf16, 2>(x, "hidden");
    in.out = view_of<Bf16, 2>(out, "out");
    const kernels::PaddedCache cache{view_of<Bf16, 4>(k_cache, "k_cache"),
                                     view_of<Bf16, 4>(v_cache, "v_cache")};
    const Tensor workspace =
        workspace_of(kernels::padded_mla_layer_workspace(w, in, cache), hidden);
    in.workspace = view_of<unsigned char, 1>(workspace, "workspace");
    kernels::padded_mla_layer(w, in, cache, stream());
    return out;
  }
#endif
};

struct MlaRopeDecode : Arguments {
  static constexpr const char* kSchema = R"(
mla_rope_decode(Tensor q, Tensor kv, Tensor positions, Tensor slots, Tensor(a!) kv_cache,
    Tensor block_table, Tensor seq_lens, Tensor w_kc, Tensor w_vc, Tensor frequencies,
    float softmax_scale, *, Tensor? kv_a_norm=None, Tensor? query_start_loc=None,
    float? magnitude=None, bool interleaved=True, float? eps=None, Tensor? kv_scale=None,
    Tensor? w_kc_scale=None, Tensor? w_vc_scale=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor q = tensor(), kv = tensor(), positions = tensor(), slots = tensor(),
               kv_cache = tensor(), block_table = tensor(), seq_lens = tensor(), w_kc = tensor(),
               w_vc = tensor(), frequencies = tensor();
  const double softmax_scale = number();
  const MaybeTensor kv_a_norm = maybe_tensor(), query_start_loc = maybe_tensor();
  const double magnitude = maybe_number().value_or(1);
  const bool interleaved = flag();
  const double eps = maybe_number().value_or(kEps);
  const MaybeTensor kv_scale = maybe_tensor(), w_kc_scale = maybe_tensor(),
                    w_vc_scale = maybe_tensor();

  Tensor meta() const {
    return at::empty_symint({q.sym_size(0), q.sym_size(1), w_vc.sym_size(1)}, q.options());
  }

  Absorbing absorbing() const { return {w_kc, w_vc, w_kc_scale, w_vc_scale}; }
  Requests requests() const { return {block_table, seq_lens, query_start_loc, q.size(0)}; }

  void check() const {
    expect_rank(q, "q", 3);
    expect_float(q, "q");
    expect_rank(w_kc, "w_kc", 3);
    expect_rank(w_vc, "w_vc", 3);
    expect_rank(frequencies, "frequencies", 1);
    const std::int64_t T = q.size(0), H = w_kc.size(0), dc = w_kc.size(1), dn = w_kc.size(2);
    const std::int64_t dr = 2 * frequencies.size(0);
    expect_shape(q, "q", "[T, heads, nope + rotary]", {T, H, dn + dr});
    expect_type(kv, q.scalar_type(), "kv");
    expect_shape(kv, "kv", "[T, latent + rotary]", {T, dc + dr});
    expect_shape(kv_a_norm, "kv_a_norm", "[latent]", {dc});
    expect_shape(positions, "positions", "[T]", {T});
    expect_shape(slots, "slots", "[T]", {T});
    absorbing().check();
    requests().check("q");
    check_cache(kv_cache, dc + dr, kv_scale);
  }

  Tensor cpu() const {
    check();
    const std::int64_t T = q.size(0), H = w_kc.size(0), dc = w_kc.size(1), dn = w_kc.size(2);
    const std::int64_t dr = 2 * frequencies.size(0);
    const auto hq = host_values<3>(q, "q");
    const auto hkv = host_values<2>(kv, "kv");
    const HostTensor<1> norm(kv_a_norm, "kv_a_norm");
    reference::MlaProjected<float> p{
        Array<float, 3>(Shape<3>{T, H, dn}), Array<float, 3>(Shape<3>{T, H, dr}),
        Array<float, 2>(Shape<2>{T, dc}), Array<float, 2>(Shape<2>{T, dr})};
    for (std::int64_t t = 0; t < T; ++t) {
      const Vector<float> latent = as_vector(at(hkv.in(), t)).head(dc);
      mapped(at(p.latent.view(), t)) =
          kv_a_norm
              ? reference::rms_normed<float>(latent, as_vector(norm.in()), static_cast<float>(eps))
              : latent;
      mapped(at(p.k_pe.view(), t)) = as_vector(at(hkv.in(), t)).tail(dr);
      for (std::int64_t h = 0; h < H; ++h) {
        mapped(at(p.q_nope.view(), t, h)) = as_vector(at(hq.in(), t, h)).head(dn);
        mapped(at(p.q_pe.view(), t, h)) = as_vector(at(hq.in(), t, h)).tail(dr);
      }
    }
    const auto rope = rope_of(frequencies, magnitude);
    const IndexView places = indices_of<1>(positions, "positions");
    reference::apply_rope<float>(rope, places, pairs_of(interleaved), p.q_pe.view());
    reference::apply_rope<float>(rope, places, pairs_of(interleaved),
                                 make_view(p.k_pe.data(), Shape<3>{T, 1, dr}));
    return tensor_of(attended(p, absorbing().values(), requests(), slots, kv_cache, kv_scale,
                              softmax_scale))
        .to(q.scalar_type(), false, true);
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    expect(q.scalar_type() == at::kBFloat16, "q", "bfloat16 on a GPU", q.scalar_type());
    const bool sizes = w_kc.size(1) == 512 && w_kc.size(2) == 128 && w_vc.size(1) == 128 &&
                       frequencies.size(0) == 32;
    expect(sizes, "w_kc, w_vc, frequencies", "[H, 512, 128], [H, 128, 512], [32] on a GPU",
           w_kc.sizes());
    expect_type(frequencies, at::kFloat, "frequencies");
    return of_cache(kv_cache, [&](auto c) { return run<decltype(c)>(); });
  }

  template <class C>
  Tensor run() const {
    using kernels::Bf16;
    const Tensor out = meta(), latents = in_whole_rows(kv);
    const std::int64_t T = q.size(0), H = q.size(1);
    const Tensor queries = in_whole_rows(q.reshape({T, H * q.size(2)}));
    const Tensor heads = out.view({T, H * out.size(2)});
    kernels::MlaWeights w{.kv_a_norm = mixed<1>(kv_a_norm, "kv_a_norm"),
                          .frequencies = view_of<const float, 1>(frequencies, "frequencies"),
                          .magnitude = static_cast<float>(magnitude),
                          .interleaved = interleaved,
                          .softmax_scale = static_cast<float>(softmax_scale),
                          .eps = static_cast<float>(eps)};
    absorbing().put_into(w);
    auto tokens = tokens_of<C>(requests(), positions, slots, view_of<C, 3>(kv_cache, "kv_cache"));
    tokens.kv_scale = scale_view(kv_scale);
    tokens.heads = view_of<Bf16, 2>(heads, "q");
    kernels::MlaRopeDecode<C> in{.weights = w,
                                 .tokens = tokens,
                                 .q = view_of<Bf16, 2>(queries, "q"),
                                 .kv = view_of<Bf16, 2>(latents, "kv")};
    const Tensor workspace = workspace_of(kernels::mla_rope_decode_workspace(in), q);
    in.tokens.workspace = view_of<unsigned char, 1>(workspace, "workspace");
    kernels::mla_rope_decode(in, stream());
    return out;
  }
#endif
};

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<MlaLayer>(m);
  add_operator<MlaRopeDecode>(m);
  add_operator<PaddedMlaLayer>(m);
}

}  // namespace
}  // namespace lockstep::torch_ops
