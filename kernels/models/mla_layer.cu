// The attention of a decoder layer with multi-head latent attention, as a sequence of launches.
// Equations: reference/attention/mla_attention.hpp. "likewise": as in the column to the left.
//
//   launch            absorbed             one_shot, chunked                padded
//   batched_product   low = hidden qkv_a   likewise                         likewise
//   rms_norm          q_low                likewise                         likewise
//   batched_product   q = q_low q_b        likewise                         likewise
//   write_latents     and q_pe to q'       and q_pe in place                likewise, no cache
//   batched_product   q' = q_nope w_kc     [k_nope; v] = latents kv_b       likewise
//                     mla_decode           join_heads: k, mla_prefill,      join_heads: q, k, v;
//                                          merged with those of chunks      softmax_attention
//   batched_product   heads = a w_vc       -                                a copy of 128 of 256
//   batched_product   out = heads o_proj   likewise                         likewise
#include "kernels/models/mla_layer.hpp"

#include <algorithm>

#include "kernels/attention/latent_cache.hpp"
#include "kernels/attention/merge_attention.hpp"
#include "kernels/attention/mla_decode.hpp"
#include "kernels/attention/mla_prefill.hpp"
#include "kernels/attention/softmax_attention.hpp"
#include "kernels/base/device.cuh"
#include "kernels/layers/batched_product.hpp"
#include "kernels/layers/rms_norm.hpp"
#include "reference/tensors/array.hpp"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "mla_layer";
constexpr std::int64_t kNope = 128, kPe = 64, kQuery = kNope + kPe, kValue = 128;
constexpr std::int64_t kLatent = 512, kWidth = kLatent + kPe, kPadded = 256;
constexpr int kThreads = 128;

/// Allocates views in the workspace, one after another. Without memory it only counts bytes; the
/// layer then launches nothing.
class Workspace {
 public:
  explicit Workspace(const std::optional<TensorView<unsigned char, 1>>& memory)
      : memory_(memory ? memory->data_handle() : nullptr) {}

  template <class T, std::size_t Rank>
  TensorView<T, Rank> take(const Shape<Rank>& shape) {
    T* const data = reinterpret_cast<T*>(memory_ ? memory_ + used_ : counted_);
    const std::int64_t bytes = element_count(shape) * std::int64_t{sizeof(T)};
    used_ += (bytes + kAligned - 1) / kAligned * kAligned;
    most_ = std::max(most_, used_);
    return make_view(data, shape);
  }
  bool launches() const { return memory_ != nullptr; }
  std::int64_t used() const { return used_; }
  std::int64_t most() const { return most_; }
  /// Frees everything taken since used() was `used`.
  void back_to(std::int64_t used) { used_ = used; }

 private:
  static constexpr std::int64_t kAligned = 256;
  alignas(
      16) static inline unsigned char counted_[16] = {};  ///< base of views that are only counted
  unsigned char* memory_;
  std::int64_t used_ = 0, most_ = 0;
};

/// The first `columns` columns of each head of x [T, H d]: [T, H, columns].
TensorView<Bf16, 3> heads_of(const TensorView<Bf16, 2>& x, std::int64_t H, std::int64_t columns) {
  return make_view(x.data_handle(), Shape<3>{x.extent(0), H, columns},
                   Shape<3>{x.stride(0), H > 0 ? x.extent(1) / H : 0, 1});
}
template <class T>
TensorView<T, 3> columns_of(const TensorView<T, 3>& x, std::int64_t first, std::int64_t columns) {
  return make_view(x.data_handle() + first, Shape<3>{x.extent(0), x.extent(1), columns},
                   Shape<3>{x.stride(0), x.stride(1), 1});
}
template <class T>
TensorView<T, 2> columns_of(const TensorView<T, 2>& x, std::int64_t first, std::int64_t columns) {
  return make_view(x.data_handle() + first, Shape<2>{x.extent(0), columns},
                   Shape<2>{x.stride(0), 1});
}
/// [T, H, d] as [H, T, d].
template <class T>
TensorView<T, 3> by_head(const TensorView<T, 3>& x) {
  return make_view(x.data_handle(), Shape<3>{x.extent(1), x.extent(0), x.extent(2)},
                   Shape<3>{x.stride(1), x.stride(0), x.stride(2)});
}
/// A matrix as a batch of one.
template <class T>
TensorView<T, 3> batch_of_one(const TensorView<T, 2>& x) {
  return make_view(x.data_handle(), Shape<3>{1, x.extent(0), x.extent(1)},
                   Shape<3>{x.extent(0) * x.stride(0), x.stride(0), 1});
}

/// Makes every token a request of its own, for mla_decode with requests of different numbers of
/// tokens.
struct Tokens {
  IndexTable block_table;
  IndexView seq_lens, query_start_loc;
  std::int32_t* table;    // [T, blocks]
  std::int32_t* lengths;  // [T]
};

__global__ void __launch_bounds__(kThreads) tokens_kernel(const __grid_constant__ Tokens in) {
  const auto t = static_cast<int>(blockIdx.x), B = static_cast<int>(in.seq_lens.extent(0));
  int b = 0;  // the token's request; B: the token belongs to none
  while (b < B && in.query_start_loc(b + 1) <= t) ++b;
  const bool none = b == B || t < in.query_start_loc(0);
  if (threadIdx.x == 0)
    in.lengths[t] = none ? 0 : max(0, in.seq_lens(b) - (in.query_start_loc(b + 1) - 1 - t));
  const auto blocks = static_cast<int>(in.block_table.extent(1));
  for (int i = static_cast<int>(threadIdx.x); i < blocks; i += kThreads)
    in.table[std::int64_t{t} * blocks + i] = none ? -1 : in.block_table(b, i);
}

/// Number of heads: of the absorbing weights, or of kv_b if there are none.
std::int64_t head_count(const MlaWeights& w) {
  if (w.scaled_w_kc) return w.scaled_w_kc->numbers.extent(0);
  return w.w_kc.extent(0) > 0 ? w.w_kc.extent(0) : w.kv_b.extent(0) / (kNope + kValue);
}

/// One call of a layer: the steps that all forms share, and the forms.
template <class C>
class Layer {
 public:
  Layer(const MlaWeights& weights, const MlaTokens<C>& tokens, cudaStream_t stream)
      : w_(weights),
        in_(tokens),
        T_(tokens.positions.extent(0)),
        H_(head_count(weights)),
        low_(weights.qkv_a.extent(0) - kWidth),
        stream_(stream),
        space_(tokens.workspace) {}

  std::int64_t workspace() const { return space_.most(); }

  /// Checks weights and tokens; the call needs `bytes` bytes of workspace.
  void check(std::int64_t bytes) const;
  void run(const MlaPlan& plan) {
    if (plan.form == MlaForm::absorbed)
      absorbed();
    else
      normal(plan);
  }
  void padded(const PaddedCache& cache);
  void rope_decode(const TensorView<Bf16, 2>& q, const TensorView<Bf16, 2>& kv) {
    low_rank_ = kv;
    low_ = 0;
    rope_decode(heads_of(q, H_, kQuery));
  }
  /// Checks the arguments that every form and rope_decode() take.
  void check_tokens(std::int64_t bytes) const;
  void check_absorbing() const;

 private:
  /// Calls `call` unless the workspace is only counted.
  template <class Call>
  void launched(Call call) {
    if (space_.launches()) call();
  }
  void multiply(const TensorView<const Bf16, 3>& x, const TensorView<const Bf16, 3>& weight,
                const TensorView<Bf16, 3>& out, int splits = 8) {
    launched([&] {
      batched_product<Bf16>(
          {.x = x, .weight = weight, .out = out, .splits = splits, .settled_weights = true},
          stream_);
    });
  }
  void multiply(const TensorView<const Bf16, 2>& x, const TensorView<const Bf16, 2>& weight,
                const TensorView<Bf16, 2>& out, int splits = 8) {
    multiply(batch_of_one(x), batch_of_one(weight), batch_of_one(out), splits);
  }
  void multiply_scaled(const TensorView<const Bf16, 3>& x, const ScaledWeight& weight,
                       const TensorView<Bf16, 3>& out);

  /// Queries [T, H, 192], not rotated. Leaves the projection [q_a; latent; k_pe] in low_rank_.
  TensorView<Bf16, 3> queries();
  void write(const TensorView<Bf16, 3>& q_pe, const TensorView<Bf16, 3>& rotated,
             const std::optional<TensorView<Bf16, 2>>& latents, bool cached);
  TensorView<Bf16, 2> heads() {
    return in_.heads ? *in_.heads : space_.template take<Bf16, 2>({T_, H_ * kValue});
  }
  void project(const TensorView<Bf16, 2>& heads) { multiply(heads, w_.o_proj, in_.out); }

  void absorbed();
  /// Rotation, write, absorbed attention: [T, H 128] from queries and low_rank_.
  TensorView<Bf16, 2> rope_decode(const TensorView<Bf16, 3>& q);
  void normal(const MlaPlan& plan);
  struct KeysAndValues {
    TensorView<Bf16, 3> k, v;
  };
  /// Decompresses latents [L, 576] to keys [L, H, columns] (zeros from column 192 on) and values
  /// [L, H, 128].
  KeysAndValues decompressed(const TensorView<Bf16, 2>& latents, std::int64_t columns);
  /// Attention of the new tokens over the keys and values of `latents`; request b has the rows from
  /// starts[b] on.
  void attend(const TensorView<Bf16, 3>& q, const TensorView<Bf16, 2>& latents,
              const IndexView& starts, bool causal, const TensorView<Bf16, 3>& out,
              const TensorView<float, 2>& lse);

  const MlaWeights& w_;
  const MlaTokens<C>& in_;
  std::int64_t T_, H_, low_;
  cudaStream_t stream_;
  Workspace space_;
  TensorView<Bf16, 2> low_rank_{};
};

template <class C>
void Layer<C>::check(std::int64_t bytes) const {
  const Checks checks(kName);
  const std::int64_t hidden = in_.hidden.extent(1);
  checks.expect(low_ >= 0, "qkv_a", "[q_lora + 576, hidden]", text_of(shape_of(w_.qkv_a)));
  checks.shape(w_.qkv_a, "qkv_a", "[q_lora + 576, hidden]", {low_ + kWidth, hidden});
  if (low_ > 0) checks.shape(w_.q_a_norm, "q_a_norm", "[q_lora]", {low_});
  checks.shape(w_.q_b, "q_b", "[H 192, q_lora or hidden]", {H_ * kQuery, low_ > 0 ? low_ : hidden});
  checks.shape(w_.kv_b, "kv_b", "[H 256, 512]", {H_ * (kNope + kValue), kLatent});
  checks.shape(w_.o_proj, "o_proj", "[hidden, H 128]", {hidden, H_ * kValue});
  checks.shape(in_.out, "out", "[T, hidden]", {T_, hidden});
  checks.shape(in_.hidden, "hidden", "[T, hidden]", {T_, hidden});
  check_tokens(bytes);
}

template <class C>
void Layer<C>::check_tokens(std::int64_t bytes) const {
  const Checks checks(kName);
  const std::int64_t B = in_.seq_lens.extent(0);
  if (in_.heads) checks.shape(*in_.heads, "heads", "[T, H 128]", {T_, H_ * kValue});
  if (in_.query_start_loc)
    checks.shape(*in_.query_start_loc, "query_start_loc", "[B + 1]", {B + 1});
  else
    checks.expect(B > 0 && T_ % B == 0, "hidden", "of as many tokens for each of B requests",
                  std::to_string(T_) + " tokens of " + std::to_string(B) + " requests");
  const std::int64_t given = in_.workspace ? in_.workspace->extent(0) : 0;
  checks.expect(given >= bytes && in_.workspace &&
                    reinterpret_cast<std::uintptr_t>(in_.workspace->data_handle()) % 256 == 0,
                "workspace", "of " + std::to_string(bytes) + " bytes at a multiple of 256",
                std::to_string(given) + " bytes");
}

template <class C>
void Layer<C>::check_absorbing() const {
  const Checks checks(kName);
  if (w_.scaled_w_kc)
    checks.shape(w_.scaled_w_kc->numbers, "scaled_w_kc", "[H, 512, 128]", {H_, kLatent, kNope});
  else
    checks.shape(w_.w_kc, "w_kc", "[H, 512, 128]", {H_, kLatent, kNope});
  if (w_.scaled_w_vc)
    checks.shape(w_.scaled_w_vc->numbers, "scaled_w_vc", "[H, 128, 512]", {H_, kValue, kLatent});
  else
    checks.shape(w_.w_vc, "w_vc", "[H, 128, 512]", {H_, kValue, kLatent});
}

template <class C>
void Layer<C>::multiply_scaled(const TensorView<const Bf16, 3>& x, const ScaledWeight& weight,
                               const TensorView<Bf16, 3>& out) {
  const std::int64_t G = x.extent(0), M = x.extent(1), K = x.extent(2);
  const bool one = weight.scale.extent(1) == 1 && weight.scale.extent(2) == 1;
  const auto numbers = space_.template take<E4m3, 3>({G, M, K});
  const auto scale =
      space_.template take<float, 3>(one ? Shape<3>{1, 1, 1} : Shape<3>{G, M, (K + 127) / 128});
  launched([&] {
    scale_to_e4m3({.x = x, .numbers = numbers, .scale = scale}, stream_);
    batched_product<E4m3>({.x = numbers,
                           .weight = weight.numbers,
                           .out = out,
                           .x_scale = scale,
                           .weight_scale = weight.scale,
                           .settled_weights = true},
                          stream_);
  });
}

template <class C>
TensorView<Bf16, 3> Layer<C>::queries() {
  low_rank_ = space_.template take<Bf16, 2>({T_, low_ + kWidth});
  multiply(in_.hidden, w_.qkv_a, low_rank_);
  const auto q = space_.template take<Bf16, 2>({T_, H_ * kQuery});
  if (low_ == 0) {
    multiply(in_.hidden, w_.q_b, q);
    return heads_of(q, H_, kQuery);
  }
  const auto normed = space_.template take<Bf16, 2>({T_, low_});
  launched([&] {
    rms_norm<Bf16>(
        {.x = columns_of(low_rank_, 0, low_), .weight = w_.q_a_norm, .eps = w_.eps, .out = normed},
        stream_);
  });
  multiply(normed, w_.q_b, q);
  return heads_of(q, H_, kQuery);
}

template <class C>
void Layer<C>::write(const TensorView<Bf16, 3>& q_pe, const TensorView<Bf16, 3>& rotated,
                     const std::optional<TensorView<Bf16, 2>>& latents, bool cached) {
  launched([&] {
    LatentWrite<C> all{.latent = columns_of(low_rank_, low_, kLatent),
                       .k_pe = columns_of(low_rank_, low_ + kLatent, kPe),
                       .norm = w_.kv_a_norm,
                       .eps = w_.eps,
                       .positions = in_.positions,
                       .frequencies = w_.frequencies,
                       .magnitude = w_.magnitude,
                       .interleaved = w_.interleaved,
                       .slots = in_.slots,
                       .cache = in_.cache,
                       .kv_scale = in_.kv_scale,
                       .latents = latents,
                       .q_pe = TensorView<const Bf16, 3>(q_pe),
                       .rotated_q = rotated};
    if (!cached)  // a cache without pages has no slot, so nothing is written
      all.cache = make_view(in_.cache.data_handle(), Shape<3>{0, 1, in_.cache.extent(2)});
    write_latents<C>(all, stream_);
  });
}

template <class C>
void Layer<C>::absorbed() {
  project(rope_decode(queries()));
}

template <class C>
TensorView<Bf16, 2> Layer<C>::rope_decode(const TensorView<Bf16, 3>& q) {
  const auto wide = space_.template take<Bf16, 3>({T_, H_, kWidth});
  write(columns_of(q, kNope, kPe), columns_of(wide, kLatent, kPe), {}, true);
  const auto nope = by_head(columns_of(q, 0, kNope));
  const auto absorbed = by_head(columns_of(wide, 0, kLatent));
  if (w_.scaled_w_kc)
    multiply_scaled(nope, *w_.scaled_w_kc, absorbed);
  else
    multiply(nope, w_.w_kc, absorbed);

  IndexTable table = in_.block_table;
  IndexView lengths = in_.seq_lens;
  if (in_.query_start_loc) {
    const auto rows = space_.template take<std::int32_t, 2>({T_, table.extent(1)});
    const auto of_tokens = space_.template take<std::int32_t, 1>({T_});
    launched([&] {
      launch(kName, tokens_kernel, dim3(static_cast<unsigned>(T_)), dim3(kThreads), 0, stream_,
             false,
             Tokens{table, lengths, *in_.query_start_loc, rows.data_handle(),
                    of_tokens.data_handle()});
    });
    table = rows;
    lengths = of_tokens;
  }
  const std::int64_t B = lengths.extent(0), q_len = B > 0 ? T_ / B : 0;
  const auto latents = space_.template take<Bf16, 3>({T_, H_, kLatent});
  const auto lse = space_.template take<float, 3>({B, H_, q_len});
  MlaDecode<Bf16, C> decode{
      .q = make_view<const Bf16>(wide.data_handle(), Shape<4>{B, q_len, H_, kWidth}),
      .cache = in_.cache,
      .block_table = table,
      .seq_lens = lengths,
      .out = make_view(latents.data_handle(), Shape<4>{B, q_len, H_, kLatent}),
      .lse = lse,
      .softmax_scale = w_.softmax_scale,
      .lane = in_.lane,
      .kv_scale = in_.kv_scale};
  decode.workspace = space_.template take<unsigned char, 1>({mla_decode_workspace(decode)});
  launched([&] { mla_decode(decode, stream_); });

  const auto out = heads();
  const auto by_heads = by_head(heads_of(out, H_, kValue));
  if (w_.scaled_w_vc)
    multiply_scaled(by_head(latents), *w_.scaled_w_vc, by_heads);
  else
    multiply(by_head(latents), w_.w_vc, by_heads);
  return out;
}

template <class C>
typename Layer<C>::KeysAndValues Layer<C>::decompressed(const TensorView<Bf16, 2>& latents,
                                                        std::int64_t columns) {
  const std::int64_t L = latents.extent(0);
  const auto kv = space_.template take<Bf16, 2>({L, H_ * (kNope + kValue)});
  const auto k = space_.template take<Bf16, 3>({L, H_, columns});
  multiply(columns_of(latents, 0, kLatent), w_.kv_b, kv);
  launched([&] {
    join_heads({.a = heads_of(kv, H_, kNope),
                .b = TensorView<const Bf16, 3>(heads_of(columns_of(latents, kLatent, kPe), 1, kPe)),
                .out = k},
               stream_);
  });
  return {k,
          columns_of(make_view(kv.data_handle(), Shape<3>{L, H_, kNope + kValue}), kNope, kValue)};
}

template <class C>
void Layer<C>::attend(const TensorView<Bf16, 3>& q, const TensorView<Bf16, 2>& latents,
                      const IndexView& starts, bool causal, const TensorView<Bf16, 3>& out,
                      const TensorView<float, 2>& lse) {
  const auto [k, v] = decompressed(latents, kQuery);
  launched([&] {
    mla_prefill<Bf16>({.q = q,
                       .k = k,
                       .v = v,
                       .query_start_loc = *in_.query_start_loc,
                       .key_start_loc = starts,
                       .out = out,
                       .lse = lse,
                       .softmax_scale = w_.softmax_scale,
                       .causal = causal,
                       .lane = in_.lane},
                      stream_);
  });
}

template <class C>
void Layer<C>::normal(const MlaPlan& plan) {
  const bool chunked = plan.form == MlaForm::chunked;
  const std::int64_t B = in_.seq_lens.extent(0);
  const auto q = queries();
  const auto own = space_.template take<Bf16, 2>({T_, kWidth});
  write(columns_of(q, kNope, kPe), columns_of(q, kNope, kPe), own, true);
  const auto out = heads();
  const auto of_out = heads_of(out, H_, kValue);
  const auto starts = space_.template take<std::int32_t, 1>({B + 1});
  const auto gather = [&](std::int64_t begin, std::int64_t size, std::int64_t rows) {
    const auto latents = space_.template take<Bf16, 2>({rows, kWidth});
    launched([&] {
      gather_latents<C>({.cache = in_.cache,
                         .block_table = in_.block_table,
                         .seq_lens = in_.seq_lens,
                         .query_start_loc = *in_.query_start_loc,
                         .begin = begin,
                         .size = size,
                         .prefix = chunked,
                         .kv_scale = in_.kv_scale,
                         .latents = latents,
                         .starts = starts},
                        stream_);
    });
    return latents;
  };
  if (!chunked) {
    const auto lse = space_.template take<float, 2>({H_, T_});
    attend(q, gather(0, INT32_MAX, plan.capacity), starts, true, of_out, lse);
    project(out);
    return;
  }
  // Merged results alternate between two places; the first one is chosen so that the last is
  // `heads`.
  const std::int64_t size = B > 0 ? plan.capacity / B : 0;
  const std::int64_t chunks = size > 0 ? (plan.longest_prefix + size - 1) / size : 0;
  const auto part = space_.template take<Bf16, 3>({T_, H_, kValue});
  const auto other = space_.template take<Bf16, 3>({T_, H_, kValue});
  const auto part_lse = space_.template take<float, 2>({H_, T_});
  const TensorView<float, 2> lse[2] = {space_.template take<float, 2>({H_, T_}),
                                       space_.template take<float, 2>({H_, T_})};
  const TensorView<Bf16, 3> whole[2] = {of_out, other};
  const std::int64_t before = space_.used();
  auto turn = static_cast<std::size_t>(chunks % 2);
  attend(q, own, *in_.query_start_loc, true, whole[turn], lse[turn]);
  for (std::int64_t i = 0; i < chunks; ++i, turn = 1 - turn) {
    space_.back_to(before);
    attend(q, gather(i * size, size, size * B), starts, false, part, part_lse);
    launched([&] {
      merge_attention<Bf16>({.out_a = whole[turn],
                             .lse_a = lse[turn],
                             .out_b = part,
                             .lse_b = part_lse,
                             .out = whole[1 - turn],
                             .lse = lse[1 - turn]},
                            stream_);
    });
  }
  project(out);
}

template <class C>
void Layer<C>::padded(const PaddedCache& cache) {
  const auto q = queries();
  const auto own = space_.template take<Bf16, 2>({T_, kWidth});
  write(columns_of(q, kNope, kPe), columns_of(q, kNope, kPe), own, false);
  const auto [k, v] = decompressed(own, kPadded);
  const auto wide = [&] { return space_.template take<Bf16, 3>({T_, H_, kPadded}); };
  const auto wide_q = wide(), wide_v = wide(), wide_out = wide();
  const auto out = heads();
  launched([&] {
    join_heads({.a = q, .out = wide_q}, stream_);
    join_heads({.a = v, .out = wide_v}, stream_);
    write_pages<Bf16>({.x = k, .slots = in_.slots, .pages = cache.k}, stream_);
    write_pages<Bf16>({.x = wide_v, .slots = in_.slots, .pages = cache.v}, stream_);
    softmax_attention<Bf16>({.q = wide_q,
                             .k_pages = cache.k,
                             .v_pages = cache.v,
                             .block_table = in_.block_table,
                             .seq_lens = in_.seq_lens,
                             .query_start_loc = *in_.query_start_loc,
                             .scale = w_.softmax_scale,
                             .out = wide_out},
                            stream_);
    join_heads({.a = columns_of(wide_out, 0, kValue), .out = heads_of(out, H_, kValue)}, stream_);
  });
  project(out);
}

/// Runs the plan without launches; returns the bytes of workspace that it takes.
template <class C>
std::int64_t counted(const MlaWeights& weights, MlaTokens<C> tokens, const MlaPlan& plan) {
  tokens.workspace = std::nullopt;
  Layer<C> layer(weights, tokens, nullptr);
  layer.run(plan);
  return layer.workspace();
}

}  // namespace

template <class C>
std::int64_t mla_layer_workspace(const MlaWeights& weights, const MlaTokens<C>& tokens,
                                 const MlaPlan& plan) {
  return counted(weights, tokens, plan);
}

template <class C>
void mla_layer(const MlaWeights& weights, const MlaTokens<C>& tokens, const MlaPlan& plan,
               cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t B = tokens.seq_lens.extent(0);
  checks.expect(plan.form != MlaForm::padded, "form", "absorbed, one_shot or chunked",
                "padded, which padded_mla_layer() runs");
  if (plan.form != MlaForm::absorbed)
    checks.expect(tokens.query_start_loc.has_value(), "query_start_loc", "given for prompts",
                  "none");
  if (plan.form == MlaForm::chunked)
    checks.expect(plan.capacity >= B, "capacity", "at least one token for each of B requests",
                  std::to_string(plan.capacity));
  checks.expect(plan.capacity >= 0 && plan.longest_prefix >= 0, "capacity, longest_prefix",
                "at least 0",
                std::to_string(plan.capacity) + ", " + std::to_string(plan.longest_prefix));
  if (tokens.positions.extent(0) == 0) return;
  Layer<C> layer(weights, tokens, stream);
  if (plan.form == MlaForm::absorbed) layer.check_absorbing();
  layer.check(counted(weights, tokens, plan));
  layer.run(plan);
}

template <class C>
std::int64_t mla_rope_decode_workspace(const MlaRopeDecode<C>& in) {
  MlaTokens<C> counting = in.tokens;
  counting.workspace = std::nullopt;
  Layer<C> layer(in.weights, counting, nullptr);
  layer.rope_decode(in.q, in.kv);
  return layer.workspace();
}

template <class C>
void mla_rope_decode(const MlaRopeDecode<C>& in, cudaStream_t stream) {
  const Checks checks("mla_rope_decode");
  const std::int64_t T = in.tokens.positions.extent(0);
  checks.expect(in.tokens.heads.has_value(), "heads", "given", "none");
  checks.shape(in.q, "q", "[T, H 192]", {T, in.tokens.heads->extent(1) / kValue * kQuery});
  checks.shape(in.kv, "kv", "[T, 576]", {T, kWidth});
  if (T == 0) return;
  Layer<C> layer(in.weights, in.tokens, stream);
  layer.check_absorbing();
  layer.check_tokens(mla_rope_decode_workspace(in));
  layer.rope_decode(in.q, in.kv);
}

std::int64_t padded_mla_layer_workspace(const MlaWeights& weights, const MlaTokens<Bf16>& tokens,
                                        const PaddedCache& cache) {
  MlaTokens<Bf16> counting = tokens;
  counting.workspace = std::nullopt;
  Layer<Bf16> layer(weights, counting, nullptr);
  layer.padded(cache);
  return layer.workspace();
}

void padded_mla_layer(const MlaWeights& weights, const MlaTokens<Bf16>& tokens,
                      const PaddedCache& cache, cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t H = head_count(weights);
  checks.expect(tokens.query_start_loc.has_value(), "query_start_loc", "given", "none");
  const auto wide = [&](const TensorView<Bf16, 4>& pages, const char* argument) {
    checks.shape(pages, argument, "[pages, page, H, 256]",
                 {pages.extent(0), pages.extent(1), H, kPadded});
  };
  wide(cache.k, "k");
  wide(cache.v, "v");
  if (tokens.positions.extent(0) == 0) return;
  Layer<Bf16> layer(weights, tokens, stream);
  layer.check(padded_mla_layer_workspace(weights, tokens, cache));
  layer.padded(cache);
}

#define LOCKSTEP_INSTANTIATE(C)                                                                  \
  template std::int64_t mla_layer_workspace(const MlaWeights&, const MlaTokens<C>&,              \
                                            const MlaPlan&);                                     \
  template void mla_layer(const MlaWeights&, const MlaTokens<C>&, const MlaPlan&, cudaStream_t); \
  template std::int64_t mla_rope_decode_workspace(const MlaRopeDecode<C>&);                      \
  template void mla_rope_decode(const MlaRopeDecode<C>&, cudaStream_t);
LOCKSTEP_INSTANTIATE(Bf16)
LOCKSTEP_INSTANTIATE(E4m3)
LOCKSTEP_INSTANTIATE(std::uint8_t)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
