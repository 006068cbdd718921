// Captures steps as CUDA graphs. Only this file of the folder needs PyTorch's CUDA library.
#pragma once

#include "kernels/torch/static_kv/graph_runtime.hpp"

namespace lockstep::static_kv {

/// Captures a step on the current GPU: a Record (graph_runtime.hpp).
std::function<void()> captured(const std::function<void()>& step,
                               const std::function<void()>& clear);

}  // namespace lockstep::static_kv
