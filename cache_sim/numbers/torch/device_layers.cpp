// TensorLayers by the launches of kernels/, in bfloat16.
#include "cache_sim/numbers/torch/tensor_layers.hpp"

#ifdef LOCKSTEP_HAS_CUDA

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <optional>

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

  Tensor rope(const Tensor& x, const std::vector<std::int32_t>& positions,
              const std::vector<float>& frequencies, double magnitude,
              bool interleaved) const override {
    Tensor own = x.clone(at::MemoryFormat::Contiguous);
    const Tensor places = on_device(positions), turns = at::tensor(frequencies).to(device());
    kernels::rope<Bf16>({.x = view<Bf16, 3>(own),
                         .positions = view<const std::int32_t, 1>(places),
                         .frequencies = view<const float, 1>(turns),
                         .magnitude = static_cast<float>(magnitude),
                         .interleaved = interleaved},
                        stream());
    return own;
  }

  void store(const Tensor& pool, const Tensor& x,
             const std::vector<std::int32_t>& slots) const override {
    const Tensor own = x.contiguous(), places = on_device(slots);
    kernels::write_pages<Bf16>({.x = view<const Bf16, 3>(own),
                                .slots = view<const std::int32_t, 1>(places),
                                .pages = view<Bf16, 4>(pool.unsqueeze(1))},
                               stream());
  }

  Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values,
                   std::span<const Queries> queries, double scale) const override {
    std::size_t longest = 1;
    for (const Queries& some : queries) longest = std::max(longest, some.seen.size());
    const auto N = static_cast<std::int64_t>(queries.size());
    const Tensor table = at::full({N, static_cast<std::int64_t>(longest)}, -1, at::kInt);
    std::vector<std::int32_t> lengths, starts;
    for (std::size_t row = 0; row < queries.size(); ++row) {
      std::copy(queries[row].seen.begin(), queries[row].seen.end(),
                table.data_ptr<std::int32_t>() + row * longest);
      lengths.push_back(static_cast<std::int32_t>(queries[row].seen.size()));
      starts.push_back(static_cast<std::int32_t>(queries[row].first));
    }
    starts.push_back(static_cast<std::int32_t>(q.size(0)));
    const Tensor own = q.contiguous(), pages = table.to(device());
    const Tensor seen = on_device(lengths), first = on_device(starts);
    const Tensor out = at::empty({q.size(0), q.size(1), values.size(2)}, q.options());
    kernels::softmax_attention<Bf16>({.q = view<const Bf16, 3>(own),
                                      .k_pages = view<const Bf16, 4>(keys.unsqueeze(1)),
                                      .v_pages = view<const Bf16, 4>(values.unsqueeze(1)),
                                      .block_table = view<const std::int32_t, 2>(pages),
                                      .seq_lens = view<const std::int32_t, 1>(seen),
                                      .query_start_loc = view<const std::int32_t, 1>(first),
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

 private:
  Tensor on_device(const std::vector<std::int32_t>& values) const {
    return at::tensor(values, at::kInt).to(device());
  }
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
