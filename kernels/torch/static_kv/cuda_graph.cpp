#include "kernels/torch/static_kv/cuda_graph.hpp"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>

#include <memory>

namespace lockstep::static_kv {

std::function<void()> captured(const std::function<void()>& step,
                               const std::function<void()>& clear) {
  const auto before = at::cuda::getCurrentCUDAStream();
  const auto stream = at::cuda::getStreamFromPool();  // the default stream cannot be captured
  const auto graph = std::make_shared<at::cuda::CUDAGraph>();
  before.synchronize();
  {
    const c10::cuda::CUDAStreamGuard guard(stream);
    for (int i = 0; i < kWarmUps; ++i) {
      step();
      clear();
    }
    stream.synchronize();
    graph->capture_begin();
    step();
    graph->capture_end();
  }
  return [graph] { graph->replay(); };
}

}  // namespace lockstep::static_kv
