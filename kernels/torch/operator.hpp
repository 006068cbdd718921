// Registers operators as torch.ops.lockstep.NAME. A file of operators ends with
//
//   TORCH_LIBRARY_FRAGMENT(lockstep, m) {
//     add_operator<CausalConv1dUpdate>(m);
//   }
//
// A call with CUDA tensors runs cuda() on the current stream, once for each kRowsOfLaunch rows of
// an operator that has batch_rows(); one with CPU tensors runs cpu(), and torch.compile calls
// meta() for shapes. No operator has a gradient: a call with an argument that requires one is an
// error.
#pragma once

#include <algorithm>
#include <set>

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

#ifdef LOCKSTEP_HAS_CUDA
/// The arguments of `count` rows of a batch from row `first` on: views of the batch's arguments.
inline torch::jit::Stack rows_of_call(const c10::FunctionSchema& schema,
                                      const torch::jit::Stack& stack, std::int64_t first,
                                      std::int64_t count) {
  static const std::set<std::string_view> kOfRows{"state_indices",
                                                  "state_out_indices",
                                                  "num_accepted_tokens",
                                                  "has_initial_state",
                                                  "context_lengths",
                                                  "nodes",
                                                  "cursors",
                                                  "positions",
                                                  "counts",
                                                  "targets",
                                                  "slots",
                                                  "intermediate"};
  static const std::set<std::string_view> kOfTokens{
      "q", "k", "v", "g", "beta",    "x",         "dt",          "dt_low",  "B",
      "C", "z", "a", "b", "parents", "snapshots", "stash_decay", "stash_dt"};
  torch::jit::Stack part(stack.end() - std::ssize(schema.arguments()), stack.end());
  const auto given = [&](const char* name) {
    const auto index = schema.argumentIndexWithName(name);
    return index && part[static_cast<std::size_t>(*index)].isTensor();
  };
  const bool by_starts = given("query_start_loc"), fold_by_starts = given("fold_query_start_loc");
  const bool own_slots = !given("state_indices") && (given("state") || given("conv_state"));
  const at::Device device = std::ranges::find_if(part, &c10::IValue::isTensor)->toTensor().device();
  for (std::size_t i = 0; i < part.size(); ++i) {
    const std::string_view full = schema.arguments()[i].name();
    const bool fold = full.starts_with("fold_");
    const std::string_view name = fold ? full.substr(5) : full;
    if (own_slots && name == "state_indices")
      part[i] = at::arange(first, first + count, at::TensorOptions(device).dtype(at::kInt));
    else if (own_slots && name == "pad_slot_id")
      part[i] = -1;  // own slots are none of padding
    else if (!part[i].isTensor())
      continue;
    else if (name == "query_start_loc")
      part[i] = part[i].toTensor().narrow(0, first, count + 1);
    else if (kOfRows.contains(name) ||
             (kOfTokens.contains(name) && !(fold ? fold_by_starts : by_starts)))
      part[i] = part[i].toTensor().narrow(0, first, count);
  }
  return part;
}

/// Runs a call of more rows than a launch takes in launches of kRowsOfLaunch rows, one after the
/// other: rows are independent, so the results are those of one launch.
template <class Op>
auto run_in_launches(const Op& whole, const c10::FunctionSchema& schema,
                     const torch::jit::Stack& stack) {
  whole.check();
  constexpr bool kReturns = !std::is_void_v<decltype(whole.cuda())>;
  Tensor out;
  if constexpr (kReturns) out = whole.meta();
  const std::int64_t N = whole.batch_rows();
  const bool whole_outputs = [&] {  // a launch finds its tokens by their place in the whole batch
    if constexpr (requires { whole.query_start_loc; }) return whole.query_start_loc.has_value();
    return false;
  }();
  for (std::int64_t first = 0; first < N; first += kRowsOfLaunch) {
    const std::int64_t count = std::min(kRowsOfLaunch, N - first);
    Op part(schema, rows_of_call(schema, stack, first, count));
    if constexpr (kReturns) part.place = whole_outputs ? out : out.narrow(0, first, count);
    part.cuda();
  }
  if constexpr (kReturns) return out;
}
#endif

/// Takes the operator's arguments from the stack, runs it, and leaves its results there.
template <class Op, auto Run>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = [&] {
    const Op in(op.schema(), *stack);
#ifdef LOCKSTEP_HAS_CUDA
    const c10::cuda::OptionalCUDAGuard guard(in.device().is_cuda() ? std::optional(in.device())
                                                                   : std::nullopt);
#endif
    const auto run = [&] {
#ifdef LOCKSTEP_HAS_CUDA
      if constexpr (Run == &Op::cuda && requires { in.batch_rows(); })
        if (in.batch_rows() > kRowsOfLaunch) return run_in_launches(in, op.schema(), *stack);
#endif
      return (in.*Run)();
    };
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
      return std::nullopt;
    } else {
      return std::optional(run());
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
