// Moves of states within pools.
//
// copy_kernel: a block owns the same `chunk` bytes of every slot's row in one layer. It reads those
// bytes of all source rows into shared memory [moves, chunk] before it writes any target, so that a
// slot may be both source and target. No other block touches these bytes.
//   grid   (ceil(row / chunk), layers)
//   block  one warp; its lanes issue bulk copies (TMA), one mbarrier counts the bytes that arrive
//
// zero_kernel, scatter_kernel: a thread writes 16 bytes.
//   grid   (ceil(row / (16 kThreads)), layers, slots) and (ceil(row / (16 kThreads)), B)
#include "kernels/recurrent/state_copy.hpp"

#include <algorithm>

#include "kernels/base/device.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kSharedWanted = 64 << 10;  ///< bytes: three blocks per processor
constexpr std::int64_t kSharedMost = 200 << 10;   ///< bytes of a block, at most
constexpr std::int64_t kChunkWanted = 512;        ///< bytes: shorter pieces waste DRAM bursts
constexpr std::int64_t kChunkMost = 16 << 10;

/// Moves of rows from source[i] to target[i], i < count, in every layer; strides in bytes, those of
/// the lists in elements.
struct Moves {
  char* data;
  std::int64_t slots, row_bytes, layer_stride, slot_stride;
  const std::int32_t *source, *target;
  std::int64_t source_stride, target_stride;
  int count;
  int chunk;
};

[[maybe_unused]] __device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__global__ void __launch_bounds__(32) copy_kernel(const __grid_constant__ Moves m) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char pieces[];  // [count, chunk] bytes
  __shared__ __align__(8) std::uint64_t barrier;
  const std::int64_t begin = std::int64_t{blockIdx.x} * m.chunk;
  const auto bytes = static_cast<unsigned>(min(std::int64_t{m.chunk}, m.row_bytes - begin));
  char* const layer = m.data + blockIdx.y * m.layer_stride + begin;
  const auto slot_of = [&](const std::int32_t* list, std::int64_t stride, int i) {
    const std::int32_t slot = list[i * stride];
    return slot >= 0 && slot < m.slots ? slot : -1;
  };
  const int lane = static_cast<int>(threadIdx.x);
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(shared_address(&barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncwarp();
  // Each lane announces the bytes of its own moves, then issues them: 32 arrivals end the phase.
  unsigned expected = 0;
  for (int i = lane; i < m.count; i += 32) {
    const int from = slot_of(m.source, m.source_stride, i);
    const int to = slot_of(m.target, m.target_stride, i);
    if (from >= 0 && to >= 0 && from != to) expected += bytes;
  }
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(expected)
      : "memory");
  for (int i = lane; i < m.count; i += 32) {
    const int from = slot_of(m.source, m.source_stride, i);
    const int to = slot_of(m.target, m.target_stride, i);
    if (from < 0 || to < 0 || from == to) continue;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(pieces + i * m.chunk)),
        "l"(layer + from * m.slot_stride), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
  }
  // Every lane waits for the bytes of all lanes, so no write precedes a read.
  asm volatile(
      "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra wait;\n}\n" ::"r"(shared_address(&barrier))
      : "memory");
  for (int i = lane; i < m.count; i += 32) {
    const int from = slot_of(m.source, m.source_stride, i);
    const int to = slot_of(m.target, m.target_stride, i);
    if (from < 0 || to < 0 || from == to) continue;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     layer + to * m.slot_stride),
                 "r"(shared_address(pieces + i * m.chunk)), "r"(bytes)
                 : "memory");
  }
  // Shared memory must stay until the stores have read it.
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

__global__ void __launch_bounds__(kThreads) zero_kernel(const __grid_constant__ Moves m) {
  const std::int32_t slot = m.target[blockIdx.z * m.target_stride];
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * 16;
  if (slot < 0 || slot >= m.slots || at >= m.row_bytes) return;
  *reinterpret_cast<uint4*>(m.data + blockIdx.y * m.layer_stride + slot * m.slot_stride + at) =
      uint4{0, 0, 0, 0};
}

/// Row to.target[b] becomes row accepted[b] - 1 of batch row b of `from`; strides in bytes.
struct Scatter {
  Moves to;  ///< `target` lists the slots; `source` and `count` are unused
  const char* from;
  std::int64_t row_stride, token_stride;
  std::int64_t tokens;
  const std::int32_t* accepted;
  std::int64_t accepted_stride;
};

__global__ void __launch_bounds__(kThreads) scatter_kernel(const __grid_constant__ Scatter s) {
  const std::int64_t b = blockIdx.y;
  const std::int32_t slot = s.to.target[b * s.to.target_stride];
  const std::int32_t n = s.accepted[b * s.accepted_stride];
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * 16;
  if (slot < 0 || slot >= s.to.slots || n <= 0 || n > s.tokens || at >= s.to.row_bytes) return;
  *reinterpret_cast<uint4*>(s.to.data + slot * s.to.slot_stride + at) = __ldcs(
      reinterpret_cast<const uint4*>(s.from + b * s.row_stride + (n - 1) * s.token_stride + at));
}

void check_pool(const Checks& checks, const StatePoolBytes& pool, const char* argument) {
  const auto pieces = [](std::int64_t bytes) { return bytes % 16 == 0; };
  checks.expect(reinterpret_cast<std::uintptr_t>(pool.data) % 16 == 0 && pieces(pool.row_bytes) &&
                    pieces(pool.slot_stride_bytes) && pieces(pool.layer_stride_bytes),
                argument, "of rows and strides of a multiple of 16 bytes",
                "rows of " + std::to_string(pool.row_bytes) + " bytes, " +
                    std::to_string(pool.slot_stride_bytes) + " apart");
  checks.expect(pool.layers <= 65535, argument, "of at most 65535 layers",
                std::to_string(pool.layers));
}

Moves moves_of(const StatePoolBytes& pool) {
  Moves m{};
  m.data = static_cast<char*>(pool.data);
  m.slots = pool.slots;
  m.row_bytes = pool.row_bytes;
  m.layer_stride = pool.layer_stride_bytes;
  m.slot_stride = pool.slot_stride_bytes;
  return m;
}

unsigned blocks_of_row(const StatePoolBytes& pool) {
  return static_cast<unsigned>((pool.row_bytes / 16 + kThreads - 1) / kThreads);
}

}  // namespace

void state_copy(const StatePoolBytes& pool, const IndexView& source, const IndexView& target,
                cudaStream_t stream) {
  const Checks checks("state_copy");
  check_pool(checks, pool, "state");
  checks.shape(target, "target", "[moves]", shape_of(source));
  const std::int64_t count = source.extent(0);
  checks.expect(count * 16 <= kSharedMost, "source", "of at most 12800 moves",
                std::to_string(count));
  if (count == 0 || pool.layers == 0 || pool.row_bytes == 0) return;
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "the device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "the device");
  checks.expect(major >= 9, "the device", "of compute capability 9.0 or newer",
                std::to_string(major) + ".x");
  const auto piece = [&](std::int64_t shared) { return shared / count / 16 * 16; };
  std::int64_t chunk = std::min(piece(kSharedWanted), kChunkMost);
  if (chunk < kChunkWanted) chunk = std::min(piece(kSharedMost), kChunkWanted);
  chunk = std::min(chunk, pool.row_bytes);
  Moves m = moves_of(pool);
  m.source = source.data_handle();
  m.source_stride = source.stride(0);
  m.target = target.data_handle();
  m.target_stride = target.stride(0);
  m.count = static_cast<int>(count);
  m.chunk = static_cast<int>(chunk);
  const auto shared = static_cast<std::size_t>(chunk * count);
  check_cuda(cudaFuncSetAttribute(copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kSharedMost)),
             "state_copy");
  const dim3 grid(static_cast<unsigned>((pool.row_bytes + chunk - 1) / chunk),
                  static_cast<unsigned>(pool.layers));
  launch("state_copy", copy_kernel, grid, dim3(32), shared, stream, false, m);
}

void state_zero(const StatePoolBytes& pool, const IndexView& slots, cudaStream_t stream) {
  const Checks checks("state_zero");
  check_pool(checks, pool, "state");
  checks.expect(slots.extent(0) <= 65535, "slots", "at most 65535",
                std::to_string(slots.extent(0)));
  if (slots.extent(0) == 0 || pool.layers == 0 || pool.row_bytes == 0) return;
  Moves m = moves_of(pool);
  m.target = slots.data_handle();
  m.target_stride = slots.stride(0);
  const dim3 grid(blocks_of_row(pool), static_cast<unsigned>(pool.layers),
                  static_cast<unsigned>(slots.extent(0)));
  launch("state_zero", zero_kernel, grid, dim3(kThreads), 0, stream, false, m);
}

void state_scatter_accepted(const StatePoolBytes& pool, const StatePoolBytes& intermediate,
                            const IndexView& slots, const IndexView& num_accepted,
                            cudaStream_t stream) {
  const Checks checks("state_scatter_accepted");
  check_pool(checks, pool, "state");
  check_pool(checks, intermediate, "intermediate");
  checks.expect(
      intermediate.row_bytes == pool.row_bytes, "intermediate", "of rows as long as state's",
      std::to_string(intermediate.row_bytes) + " bytes for " + std::to_string(pool.row_bytes));
  checks.shape(slots, "slots", "[B]", {intermediate.layers});
  checks.shape(num_accepted, "num_accepted_tokens", "[B]", {intermediate.layers});
  if (intermediate.layers == 0 || pool.row_bytes == 0) return;
  Scatter s{};
  s.to = moves_of(pool);
  s.to.target = slots.data_handle();
  s.to.target_stride = slots.stride(0);
  s.from = static_cast<const char*>(intermediate.data);
  s.row_stride = intermediate.layer_stride_bytes;
  s.token_stride = intermediate.slot_stride_bytes;
  s.tokens = intermediate.slots;
  s.accepted = num_accepted.data_handle();
  s.accepted_stride = num_accepted.stride(0);
  launch("state_scatter_accepted", scatter_kernel,
         dim3(blocks_of_row(pool), static_cast<unsigned>(intermediate.layers)), dim3(kThreads), 0,
         stream, false, s);
}

}  // namespace lockstep::kernels
