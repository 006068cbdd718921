// Shifts conv states by the accepted tokens of a verification. A thread moves the W - 1 columns of
// one channel; it reads all of them before it writes any, because the ranges may overlap.
//
//   grid   (ceil(D / kThreads), N, layers)
//   block  kThreads threads, one channel per thread
#include "kernels/recurrent/conv_state_shift.hpp"

#include "kernels/base/device.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256, kWidthMost = 8;  ///< kWidthMost: W at most

struct Shift {
  ConvStatePool states;
  const std::int32_t *slots, *num_accepted;
  std::int64_t slots_stride, num_accepted_stride;
  int width;
};

template <class Element>
__global__ void __launch_bounds__(kThreads) shift_kernel(const __grid_constant__ Shift s) {
  const ConvStatePool& p = s.states;
  const std::int32_t slot = s.slots[blockIdx.y * s.slots_stride];
  const std::int32_t accepted = s.num_accepted[blockIdx.y * s.num_accepted_stride];
  const std::int64_t channel = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool moves = accepted > 1 && accepted - 1 + s.width - 1 <= p.columns;
  if (!moves || slot < 0 || slot >= p.slots || channel >= p.channels) return;
  Element* const first = static_cast<Element*>(p.data) + blockIdx.z * p.layer_stride +
                         slot * p.slot_stride + channel * p.channel_stride;
  Element column[kWidthMost - 1];
#pragma unroll
  for (int i = 0; i < kWidthMost - 1; ++i)
    if (i < s.width - 1) column[i] = first[(accepted - 1 + i) * p.column_stride];
#pragma unroll
  for (int i = 0; i < kWidthMost - 1; ++i)
    if (i < s.width - 1) first[i * p.column_stride] = column[i];
}

}  // namespace

void conv_state_shift(const ConvStatePool& states, const IndexView& slots,
                      const IndexView& num_accepted, int width, cudaStream_t stream) {
  const Checks checks("conv_state_shift");
  checks.expect(states.element_bytes == 2 || states.element_bytes == 4, "state",
                "of elements of 2 or 4 bytes", std::to_string(states.element_bytes));
  checks.expect(2 <= width && width <= kWidthMost, "width", "from 2 to 8", std::to_string(width));
  checks.expect(states.columns >= width - 1, "state",
                "[layers, slots, D, C] with C at least width - 1",
                "C = " + std::to_string(states.columns));
  checks.expect(states.layers <= 65535, "state", "of at most 65535 layers",
                std::to_string(states.layers));
  checks.shape(num_accepted, "num_accepted_tokens", "[N]", shape_of(slots));
  checks.expect(slots.extent(0) <= 65535, "state_indices", "at most 65535 rows",
                std::to_string(slots.extent(0)));
  if (slots.extent(0) == 0 || states.layers == 0 || states.channels == 0) return;
  const Shift shift{states,          slots.data_handle(),    num_accepted.data_handle(),
                    slots.stride(0), num_accepted.stride(0), width};
  const dim3 grid(static_cast<unsigned>((states.channels + kThreads - 1) / kThreads),
                  static_cast<unsigned>(slots.extent(0)), static_cast<unsigned>(states.layers));
  launch("conv_state_shift",
         states.element_bytes == 2 ? shift_kernel<std::uint16_t> : shift_kernel<std::uint32_t>,
         grid, dim3(kThreads), 0, stream, false, shift);
}

}  // namespace lockstep::kernels
