// Embeddings of tokens, and logits. Equations: reference/layers/embedding.hpp. Logits are a product
// (kernels/layers/product.hpp); this kernel copies embeddings.
//
//   grid   T
//   block  kThreads threads over the elements of a token's vector
#include "kernels/layers/embedding.hpp"

#include "kernels/base/plain.cuh"
#include "kernels/layers/product.hpp"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const __grid_constant__ Embedding<T> in) {
  const std::int64_t t = blockIdx.x, token = in.tokens(t);
  const bool named = token >= 0 && token < in.table.extent(0);
  for (std::int64_t d = threadIdx.x; d < in.out.extent(1); d += kThreads)
    in.out(t, d) = named ? in.table(token, d) : from_float<T>(0.0f);
}

}  // namespace

template <class T>
void embedding(const Embedding<T>& in, cudaStream_t stream) {
  const Checks checks("embedding");
  const std::int64_t T_ = in.tokens.extent(0), D = in.table.extent(1);
  checks.contiguous_rows(in.table, "table");
  checks.shape(in.out, "out", "[T, D]", {T_, D});
  checks.contiguous_rows(in.out, "out");
  if (T_ == 0 || D == 0) return;
  launch("embedding", embedding_kernel<T>, dim3(static_cast<unsigned>(T_)), dim3(kThreads), 0,
         stream, false, in);
}

template <class T>
void logits(const Logits<T>& in, cudaStream_t stream) {
  const Checks checks("logits");
  const std::int64_t T_ = in.x.extent(0), V = in.head.extent(0);
  checks.shape(in.head, "head", "[V, D]", {V, in.x.extent(1)});
  checks.shape(in.logits, "logits", "[T, V]", {T_, V});
  product<T, float>({.x = in.x, .weight = in.head, .out = in.logits}, stream);
}

#define LOCKSTEP_INSTANTIATE(T)                               \
  template void embedding(const Embedding<T>&, cudaStream_t); \
  template void logits(const Logits<T>&, cudaStream_t);
LOCKSTEP_ACTIVATIONS(LOCKSTEP_INSTANTIATE)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
