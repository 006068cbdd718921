// Shared by the operators of latent attention: the check of a cache's scale, a lane for each
// stream, and aligned rows.
#pragma once

#include "kernels/torch/operator.hpp"

namespace lockstep::torch_ops {

/// Expects kv_scale to be one number, and to be given only with a cache in e4m3.
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

/// The lane (mla_decode.hpp) of a stream: calls on different streams may run at the same time, so
/// each stream gets a lane of its own. A captured call keeps the lane of the stream it was captured
/// on.
inline int lane_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<cudaStream_t, int> lanes;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = lanes.emplace(stream, static_cast<int>(lanes.size()));
  return place->second;
}

/// x, or a contiguous copy unless its last dimension is contiguous and every row begins at a
/// multiple of 16 bytes.
inline Tensor in_whole_rows(const Tensor& x) {
  bool rows = x.stride(-1) == 1 && reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0;
  for (std::int64_t i = 0; i + 1 < x.dim(); ++i)
    rows = rows && x.stride(i) * x.element_size() % 16 == 0;
  return rows ? x : x.clone(at::MemoryFormat::Contiguous);
}

}  // namespace lockstep::torch_ops
#endif
