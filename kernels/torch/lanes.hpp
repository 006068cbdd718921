// What the operators of latent attention share: the scale of a cache, a lane for each stream, and
// rows as kernels want them.
#pragma once

#include "kernels/torch/operator.hpp"

namespace lockstep::torch_ops {

/// One number, with a cache in e4m3 alone.
inline void expect_kv_scale(const MaybeTensor& kv_scale, const Tensor& kv_cache) {
  const bool scaled = kv_cache.scalar_type() == at::kFloat8_e4m3fn;
  expect(!kv_scale || scaled, "kv_scale", "absent without a cache of float8_e4m3fn", "given");
  if (!kv_scale) return;
  expect_type(kv_scale, at::kFloat, "kv_scale");
  expect(kv_scale->numel() == 1, "kv_scale", "one number", kv_scale->sizes());
}

}  // namespace lockstep::torch_ops

#ifdef LOCKSTEP_HAS_CUDA
#include <map>
#include <mutex>

namespace lockstep::torch_ops {

/// Calls on different streams may run at the same time. A captured call has its stream's lane.
inline int lane_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<cudaStream_t, int> lanes;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = lanes.emplace(stream, static_cast<int>(lanes.size()));
  return place->second;
}

/// Kernels want a last dimension that is contiguous, and every row at whole 16 bytes.
inline Tensor in_whole_rows(const Tensor& x) {
  bool rows = x.stride(-1) == 1 && reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0;
  for (std::int64_t i = 0; i + 1 < x.dim(); ++i)
    rows = rows && x.stride(i) * x.element_size() % 16 == 0;
  return rows ? x : x.clone(at::MemoryFormat::Contiguous);
}

}  // namespace lockstep::torch_ops
#endif
