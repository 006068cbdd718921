// Registers operators as torch.ops.lockstep.NAME. A file of operators ends with
//
//   TORCH_LIBRARY_FRAGMENT(lockstep, m) {
//     add_operator<CausalConv1dUpdate>(m);
//   }
//
// A call with CUDA tensors runs cuda() on the current stream, one with CPU tensors runs cpu(), and
// torch.compile calls meta() for shapes. No operator has a gradient: a call with an argument that
// requires one is an error.
#pragma once

#include "kernels/torch/arguments.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "kernels/base/launch_note.hpp"
#endif

namespace lockstep::torch_ops {

template <class... Results>
void push_results(torch::jit::Stack* stack, const std::tuple<Results...>& results) {
  std::apply([&](const auto&... result) { torch::jit::push(*stack, result...); }, results);
}
inline void push_results(torch::jit::Stack* stack, const Tensor& result) {
  torch::jit::push(*stack, result);
}

/// Takes the operator's arguments from the stack, runs it, and leaves its results there.
template <class Op, auto Run>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = [&] {
    const Op in(op.schema(), *stack);
#ifdef LOCKSTEP_HAS_CUDA
    const c10::cuda::OptionalCUDAGuard guard(in.device().is_cuda() ? std::optional(in.device())
                                                                   : std::nullopt);
#endif
    if constexpr (std::is_void_v<decltype((in.*Run)())>) {
      (in.*Run)();
      return std::nullopt;
    } else {
      return std::optional((in.*Run)());
    }
  }();
  torch::jit::drop(*stack, op.schema().arguments().size());
  if constexpr (!std::is_same_v<decltype(result), const std::nullopt_t>)
    push_results(stack, *result);
}

template <auto Run, class Op>
torch::CppFunction implementation(c10::DispatchKey key) {
  return torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&boxed<Op, Run>>());
}

/// The autograd implementation: an error if an argument requires a gradient, else the call goes on
/// to the device's implementation.
inline void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; at::GradMode::is_enabled() && i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    TORCH_CHECK(!value.isTensor() || !value.toTensor().requires_grad(), op.operator_name().name,
                " has no gradient: ", arguments[i].name(),
                " is expected not to require one (torch.no_grad(), or detach()); got a tensor that "
                "does");
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

#ifdef LOCKSTEP_HAS_CUDA
/// Whether the thread's last launch was launch_any() of an update (recurrence_launch.cuh), whose
/// blocks alone have four warps for the kind "any".
inline bool ran_in_general_kernel() {
  return kernels::last_launch.warps == 4 && std::string_view(kernels::last_launch.kernel) == "any";
}
#endif

/// Registers Op's schema and its implementation for each device.
template <class Op>
void add_operator(torch::Library& m) {
  const std::string schema = Op::kSchema;
  const std::size_t begin = schema.find_first_not_of('\n');
  const std::string name = schema.substr(begin, schema.find('(') - begin);
  m.def(Op::kSchema, {at::Tag::pt2_compliant_tag});
  m.impl(name.c_str(), implementation<&Op::cpu, Op>(c10::DispatchKey::CPU));
  m.impl(name.c_str(), implementation<&Op::meta, Op>(c10::DispatchKey::Meta));
  m.impl(name.c_str(),
         torch::dispatch(c10::DispatchKey::Autograd,
                         torch::CppFunction::makeFromBoxedFunction<&refuse_gradients>()));
#ifdef LOCKSTEP_HAS_CUDA
  m.impl(name.c_str(), implementation<&Op::cuda, Op>(c10::DispatchKey::CUDA));
#endif
}

}  // namespace lockstep::torch_ops
