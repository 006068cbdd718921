// TensorLayers by the launches of kernels/, in bfloat16.
#include "cache_sim/numbers/torch/tensor_layers.hpp"

#ifdef LOCKSTEP_HAS_CUDA

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>

#include "kernels/attention/softmax_attention.hpp"
#include "kernels/layers/batched_product.hpp"
#include "kernels/layers/embedding.hpp"
#include "kernels/layers/moe_router.hpp"
#include "kernels/layers/product.hpp"
#include "kernels/layers/rms_norm.hpp"
#include "kernels/layers/rope.hpp"
#include "kernels/layers/swiglu.hpp"

namespace lockstep::cache_sim {
namespace {

using at::Tensor;
using kernels::Bf16;

template <class T, std::size_t Rank>
TensorView<T, Rank> view(const Tensor& tensor) {
  Shape<Rank> extents{}, strides{};
  for (std::size_t i = 0; i < Rank; ++i) {
    extents[i] = tensor.size(static_cast<std::int64_t>(i));
    strides[i] = tensor.stride(static_cast<std::int64_t>(i));
  }
  return make_view(static_cast<T*>(tensor.data_ptr()), extents, strides);
}

cudaStream_t stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

class DeviceLayersOfKernels final : public TensorLayers {
 public:
  at::Device device() const override { return {at::kCUDA, 0}; }

  Tensor product(const Tensor& x, const Tensor& weight) const override {
    const Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
    kernels::product<Bf16, Bf16>({.x = view<const Bf16, 2>(x.contiguous()),
                                  .weight = view<const Bf16, 2>(weight),
                                  .out = view<Bf16, 2>(out)},
                                 stream());
    return out;
  }
  Tensor logits(const Tensor& x, const Tensor& head) const override {
    const Tensor out = at::empty({x.size(0), head.size(0)}, x.options().dtype(at::kFloat));
    kernels::logits<Bf16>({.x = view<const Bf16, 2>(x.contiguous()),
                           .head = view<const Bf16, 2>(head),
                           .logits = view<float, 2>(out)},
                          stream());
    return out;
  }
  Tensor products(const Tensor& x, const Tensor& weight) const override {
    const Tensor out = at::empty({x.size(0), x.size(1), weight.size(1)}, x.options());
    kernels::batched_product<Bf16>({.x = view<const Bf16, 3>(x),
                                    .weight = view<const Bf16, 3>(weight),
                                    .out = view<Bf16, 3>(out)},
                                   stream());
    return out;
  }

  Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) const override {
    const Tensor own = x.contiguous(), out = at::empty_like(own);
    kernels::rms_norm<Bf16>({.x = view<const Bf16, 2>(own),
                             .weight = view<const float, 1>(weight),
                             .eps = static_cast<float>(eps),
                             .out = view<Bf16, 2>(out)},
                            stream());
    return out;
  }
  Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                        bool gate_before_norm, std::int64_t groups) const override {
    const Tensor own = x.contiguous(), gates = gate.contiguous(), out = at::empty_like(own);
    kernels::gated_rms_norm<Bf16>({.x = view<const Bf16, 2>(own),
                                   .gate = view<const Bf16, 2>(gates),
                                   .weight = view<const float, 1>(weight),
                                   .eps = static_cast<float>(eps),
                                   .out = view<Bf16, 2>(out),
                                   .gate_before_norm = gate_before_norm,
                                   .groups = groups},
                                  stream());
    return out;
  }

  Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& frequencies, double magnitude,
              bool interleaved) const override {
    Tensor own = x.clone(at::MemoryFormat::Contiguous);
    kernels::rope<Bf16>({.x = view<Bf16, 3>(own),
                         .positions = view<const std::int32_t, 1>(positions),
                         .frequencies = view<const float, 1>(frequencies),
                         .magnitude = static_cast<float>(magnitude),
                         .interleaved = interleaved},
                        stream());
    return own;
  }

  void store(const Tensor& pool, const Tensor& x, const Tensor& slots) const override {
    const Tensor own = x.contiguous();
    kernels::write_pages<Bf16>({.x = view<const Bf16, 3>(own),
                                .slots = view<const std::int32_t, 1>(slots),
                                .pages = view<Bf16, 4>(pool.unsqueeze(1))},
                               stream());
  }

  Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, const SeenSlots& seen,
                   double scale) const override {
    const Tensor own = q.contiguous();
    const Tensor out = at::empty({q.size(0), q.size(1), values.size(2)}, q.options());
    kernels::softmax_attention<Bf16>({.q = view<const Bf16, 3>(own),
                                      .k_pages = view<const Bf16, 4>(keys.unsqueeze(1)),
                                      .v_pages = view<const Bf16, 4>(values.unsqueeze(1)),
                                      .block_table = view<const std::int32_t, 2>(seen.table),
                                      .seq_lens = view<const std::int32_t, 1>(seen.lengths),
                                      .query_start_loc = view<const std::int32_t, 1>(seen.starts),
                                      .scale = static_cast<float>(scale),
                                      .out = view<Bf16, 3>(out)},
                                     stream());
    return out;
  }

  Routes route(const Tensor& logits, const std::optional<Tensor>& bias,
               const reference::ExpertsUnit& unit) const override {
    const std::int64_t T = logits.size(0);
    const Tensor experts = at::empty({T, unit.per_token}, logits.options().dtype(at::kInt));
    const Tensor weights = at::empty({T, unit.per_token}, logits.options());
    kernels::MoeRouter in{.logits = view<const float, 2>(logits),
                          .experts = view<std::int32_t, 2>(experts),
                          .weights = view<float, 2>(weights),
                          .sigmoid = unit.sigmoid_scores,
                          .groups = unit.groups,
                          .groups_kept = unit.groups_kept,
                          .scale = static_cast<float>(unit.scale)};
    if (bias) in.bias = view<const float, 1>(*bias);
    kernels::moe_router(in, stream());
    return {experts, weights};
  }

  Tensor swiglu(const Tensor& gate, const Tensor& up) const override {
    const Tensor out = at::empty(up.sizes(), up.options());
    kernels::swiglu<Bf16>({.gate = view<const Bf16, 2>(gate),
                           .up = view<const Bf16, 2>(up),
                           .out = view<Bf16, 2>(out)},
                          stream());
    return out;
  }
  // Elementwise functions of ATen on a GPU have the same bits for each element.
  Tensor squared_relu(const Tensor& x) const override {
    return x.to(at::kFloat).relu().square().to(x.scalar_type());
  }
  Tensor sigmoid_gated(const Tensor& x, const Tensor& gate) const override {
    return (x.to(at::kFloat) * gate.to(at::kFloat).sigmoid()).to(x.scalar_type());
  }

  Tensor experts(const Tensor& x, const Routes& routes, const ExpertMatrices& matrices,
                 const reference::ExpertsUnit& unit) const override {
    const std::int64_t T = x.size(0), k = unit.per_token, E = unit.experts;
    const at::TensorOptions ints = routes.experts.options();
    const Tensor starts = at::empty({E + 1}, ints), source = at::empty({T * k}, ints);
    const Tensor place = at::empty({T, k}, ints), own = x.contiguous();
    kernels::sort_by_expert({.experts = view<const std::int32_t, 2>(routes.experts),
                             .starts = view<std::int32_t, 1>(starts),
                             .source = view<std::int32_t, 1>(source),
                             .place = view<std::int32_t, 2>(place)},
                            stream());
    const Tensor sorted = at::empty({T * k, x.size(1)}, x.options());
    kernels::embedding<Bf16>({.tokens = view<const std::int32_t, 1>(source),
                              .table = view<const Bf16, 2>(own),
                              .out = view<Bf16, 2>(sorted)},
                             stream());
    const auto grouped = [&](const Tensor& rows, const Tensor& weight) {
      const Tensor out = at::empty({rows.size(0), weight.size(1)}, x.options());
      kernels::grouped_product<Bf16>({.x = view<const Bf16, 2>(rows),
                                      .weight = view<const Bf16, 3>(weight),
                                      .starts = view<const std::int32_t, 1>(starts),
                                      .out = view<Bf16, 2>(out)},
                                     stream());
      return out;
    };
    const Tensor raised = grouped(sorted, matrices.up);
    const Tensor inner =
        unit.form == reference::FeedForward::swiglu
            ? swiglu(raised.narrow(1, 0, unit.inner), raised.narrow(1, unit.inner, unit.inner))
            : squared_relu(raised);
    const Tensor lowered = grouped(inner, matrices.down);
    const Tensor out = at::empty({T, x.size(1)}, x.options());
    kernels::combine_experts<Bf16>({.x = view<const Bf16, 2>(lowered),
                                    .place = view<const std::int32_t, 2>(place),
                                    .weights = view<const float, 2>(routes.weights),
                                    .out = view<Bf16, 2>(out)},
                                   stream());
    return out;
  }

  /// A CUDA graph. What it allocates is in a pool of its own, which lives as long as it does.
  std::function<void()> captured(std::function<void()> work) const override {
    return [graph = std::make_shared<Graph>(work)] { graph->launch(); };
  }

 private:
  class Graph {
   public:
    explicit Graph(const std::function<void()>& work) {
      static std::atomic<std::uint64_t> graphs{1};
      pool_ = {0, (std::uint64_t{1} << 48) + graphs++};  // no pool of LibTorch's
      const c10::cuda::CUDAStream own = c10::cuda::getStreamFromPool();
      const c10::cuda::CUDAStreamGuard guard(own);
      checked(cudaDeviceSynchronize());
      checked(cudaStreamBeginCapture(own.stream(), cudaStreamCaptureModeThreadLocal));
      c10::cuda::CUDACachingAllocator::beginAllocateToPool(
          0, pool_, [stream = own.stream()](cudaStream_t one) { return one == stream; });
      std::exception_ptr thrown;
      try {
        work();
      } catch (...) {
        thrown = std::current_exception();
      }
      c10::cuda::CUDACachingAllocator::endAllocateToPool(0, pool_);
      cudaGraph_t graph = nullptr;
      const cudaError_t ended = cudaStreamEndCapture(own.stream(), &graph);
      if (thrown) std::rethrow_exception(thrown);
      checked(ended);
      checked(cudaGraphInstantiate(&runs_, graph, 0));
      checked(cudaGraphDestroy(graph));
    }
    ~Graph() {
      cudaDeviceSynchronize();
      cudaGraphExecDestroy(runs_);
      c10::cuda::CUDACachingAllocator::releasePool(0, pool_);
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    void launch() const { checked(cudaGraphLaunch(runs_, stream())); }

   private:
    static void checked(cudaError_t status) {
      if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
    }
    c10::MempoolId_t pool_{};
    cudaGraphExec_t runs_ = nullptr;
  };
};

}  // namespace

DeviceLayers device_layers() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
    return {nullptr, "there is no GPU here"};
  // LibTorch's half for GPUs is loaded where there is one.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr)
    return {nullptr, std::string("LibTorch's CUDA library does not load: ") + dlerror()};
  return {std::make_shared<DeviceLayersOfKernels>(), ""};
}

}  // namespace lockstep::cache_sim

#else

namespace lockstep::cache_sim {

DeviceLayers device_layers() {
  return {nullptr, "this program was built without CUDA"};
}

}  // namespace lockstep::cache_sim

#endif
