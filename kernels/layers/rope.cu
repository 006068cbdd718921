// Rotary position embedding. Equations: reference/layers/rope.hpp.
//
//   grid   T
//   block  kThreads threads over the pairs of all heads of a token
#include "kernels/layers/rope.hpp"

#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ Rope<T> in) {
  const std::int64_t t = blockIdx.x;
  const auto half = static_cast<int>(in.frequencies.extent(0));
  const int pairs = static_cast<int>(in.x.extent(1)) * half;
  const auto position = static_cast<float>(in.positions(t));
  for (int pair = static_cast<int>(threadIdx.x); pair < pairs; pair += kThreads) {
    const int head = pair / half, i = pair % half;
    float sine, cosine;
    sincosf(position * in.frequencies(i), &sine, &cosine);
    sine *= in.magnitude;
    cosine *= in.magnitude;
    T& a = in.x(t, head, in.interleaved ? 2 * i : i);
    T& b = in.x(t, head, in.interleaved ? 2 * i + 1 : i + half);
    const float xa = to_float(a), xb = to_float(b);
    a = from_float<T>(xa * cosine - xb * sine);
    b = from_float<T>(xb * cosine + xa * sine);
  }
}

}  // namespace

template <class T>
void rope(const Rope<T>& in, cudaStream_t stream) {
  const Checks checks("rope");
  const std::int64_t tokens = in.x.extent(0), heads = in.x.extent(1);
  const std::int64_t half = in.frequencies.extent(0);
  checks.expect(2 * half <= in.x.extent(2), "frequencies",
                "[R / 2] with R of at most d = " + std::to_string(in.x.extent(2)),
                "R / 2 = " + std::to_string(half));
  checks.expect(heads * half <= INT32_MAX, "x", "of fewer than 2^31 pairs a token",
                text_of(shape_of(in.x)));
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.positions, "positions", "[T]", {tokens});
  if (tokens == 0 || heads == 0 || half == 0) return;
  launch("rope", rope_kernel<T>, dim3(static_cast<unsigned>(tokens)), dim3(kThreads), 0, stream,
         false, in);
}

#define LOCKSTEP_INSTANTIATE(T) template void rope(const Rope<T>&, cudaStream_t);
LOCKSTEP_ACTIVATIONS(LOCKSTEP_INSTANTIATE)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
