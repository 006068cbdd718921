// Merges two partial results of attention. Equations: reference/attention/softmax_attention.hpp.
//
//   grid   ceil(T H dv / 8 / kThreads)
//   block  kThreads threads; each merges 8 columns (16 bytes) of a token and head
#include "kernels/attention/merge_attention.hpp"

#include "kernels/base/device.cuh"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "merge_attention";
constexpr int kThreads = 256;
constexpr int kColumns = 8;  ///< columns of a thread

template <class T>
struct Columns {
  alignas(16) T of[kColumns];
};

/// A partial result, or the merged one: out [T, H, dv] and lse [H, T].
template <class T>
struct Part {
  T* out;
  std::int64_t out_strides[2];
  std::conditional_t<std::is_const_v<T>, const float, float>* lse;
  std::int64_t lse_strides[2];

  __device__ auto* columns(std::int64_t t, std::int64_t h, int first) const {
    using Vector =
        std::conditional_t<std::is_const_v<T>, const Columns<std::remove_const_t<T>>, Columns<T>>;
    return reinterpret_cast<Vector*>(out + t * out_strides[0] + h * out_strides[1] + first);
  }
  __device__ auto& lse_of(std::int64_t t, std::int64_t h) const {
    return lse[h * lse_strides[0] + t * lse_strides[1]];
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_attention_kernel(Part<const T> a, Part<const T> b, Part<T> both, std::int64_t vectors,
                           int heads, int vectors_of_head) {
  const std::int64_t number = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (number >= vectors) return;
  const std::int64_t row = number / vectors_of_head, t = row / heads, h = row - t * heads;
  const int first = static_cast<int>(number - row * vectors_of_head) * kColumns;
  const float lse_a = a.lse_of(t, h), lse_b = b.lse_of(t, h);
  const bool is_a = !isinf(lse_a), is_b = !isinf(lse_b);
  const float largest = is_a && is_b ? fmaxf(lse_a, lse_b) : is_a ? lse_a : lse_b;
  const float weight_a = is_a ? expf(lse_a - largest) : 0.0f;
  const float weight_b = is_b ? expf(lse_b - largest) : 0.0f;
  const float sum = weight_a + weight_b;
  const Columns<T> x = *a.columns(t, h, first), y = *b.columns(t, h, first);
  Columns<T> result;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const float left = is_a ? weight_a * to_float(x.of[i]) : 0.0f;
    const float right = is_b ? weight_b * to_float(y.of[i]) : 0.0f;
    result.of[i] = from_float<T>(is_a || is_b ? (left + right) / sum : 0.0f);
  }
  *both.columns(t, h, first) = result;
  if (first == 0) both.lse_of(t, h) = is_a || is_b ? largest + logf(sum) : -INFINITY;
}

template <class T, class Number>
Part<T> part(const TensorView<T, 3>& out, const TensorView<Number, 2>& lse) {
  return {out.data_handle(),
          {out.stride(0), out.stride(1)},
          lse.data_handle(),
          {lse.stride(0), lse.stride(1)}};
}

}  // namespace

template <class T>
void merge_attention(const MergeAttention<T>& in, cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t tokens = in.out_a.extent(0), H = in.out_a.extent(1), dv = in.out_a.extent(2);
  checks.expect(dv % kColumns == 0 && dv > 0 && dv < (1 << 20) && H < (1 << 20), "out_a",
                "[T, H, dv] with dv a multiple of 8", text_of(shape_of(in.out_a)));
  const auto whole = [&](const auto& out, const char* name) {
    checks.shape(out, name, "[T, H, dv]", {tokens, H, dv});
    checks.expect(
        out.stride(2) == 1 && out.stride(0) % kColumns == 0 && out.stride(1) % kColumns == 0 &&
            reinterpret_cast<std::uintptr_t>(out.data_handle()) % 16 == 0,
        name, "contiguous in its last dimension, with strides of whole 16 bytes", "other strides");
  };
  whole(in.out_a, "out_a");
  whole(in.out_b, "out_b");
  whole(in.out, "out");
  checks.shape(in.lse_a, "lse_a", "[H, T]", {H, tokens});
  checks.shape(in.lse_b, "lse_b", "[H, T]", {H, tokens});
  checks.shape(in.lse, "lse", "[H, T]", {H, tokens});
  const std::int64_t vectors = tokens * H * (dv / kColumns);
  const std::int64_t blocks = (vectors + kThreads - 1) / kThreads;
  checks.expect(blocks < (std::int64_t{1} << 31), "out_a", "[T, H, dv] of fewer than 2^42 elements",
                text_of(shape_of(in.out_a)));
  if (vectors == 0) return;
  launch(kName, merge_attention_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
         stream, false, part(in.out_a, in.lse_a), part(in.out_b, in.lse_b), part(in.out, in.lse),
         vectors, static_cast<int>(H), static_cast<int>(dv / kColumns));
}

#define LOCKSTEP_INSTANTIATE(T) \
  template void merge_attention(const MergeAttention<T>&, cudaStream_t);
LOCKSTEP_INSTANTIATE(Bf16)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_INSTANTIATE(Fp16)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
