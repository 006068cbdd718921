// Steps as CUDA graphs. The one file of this folder that needs PyTorch's CUDA library.
#pragma once

#include "kernels/torch/static_kv/graph_runtime.hpp"

namespace lockstep::static_kv {

/// A step of the GPU that is current, as a graph: a Record (graph_runtime.hpp).
std::function<void()> captured(const std::function<void()>& step,
                               const std::function<void()>& clear);

}  // namespace lockstep::static_kv
