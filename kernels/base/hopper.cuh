// Hopper's asynchronous instructions, for kernels that divide a block into producers and consumers:
// barriers in shared memory, bulk tensor copies, matrix products of a warpgroup, and what orders
// them. NVIDIA, "PTX ISA" 8.0, chapters mbarrier, Tensor Map and wgmma; for sm_90a alone.
//
// A tile in shared memory is 64 elements of 16 bits wide (128 bytes), begins at a multiple of 1024
// bytes and is swizzled as the tensor cores want it: tile_offset(). A matrix of more than 64
// columns is several tiles, one after the other.
#pragma once

#include <cudaTypedefs.h>  // types alone: the driver's function is looked up when it is needed

#include "kernels/base/device.cuh"
#include "kernels/base/fast_math.cuh"

namespace lockstep::kernels::hopper {

constexpr int kTileColumns = 64;    ///< elements of a tile's row
constexpr int kTileRowBytes = 128;  ///< their bytes
constexpr int kWarpgroup = 128;     ///< threads that issue a product together

// --- The host: tensor maps -----------------------------------------------------------------------

/// Whether tile_map() can describe x [T, heads, extent].
template <class T>
bool can_be_mapped(const TensorView<T, 3>& x) {
  const auto whole = [](std::int64_t extent, std::int64_t stride) {
    return extent <= 1 || (stride > 0 && stride * std::int64_t{sizeof(T)} % 16 == 0 &&
                           stride * std::int64_t{sizeof(T)} < (std::int64_t{1} << 40));
  };
  return sizeof(T) == 2 && reinterpret_cast<std::uintptr_t>(x.data_handle()) % 16 == 0 &&
         x.extent(0) > 0 && (x.extent(2) <= 1 || x.stride(2) == 1) &&
         whole(x.extent(0), x.stride(0)) && whole(x.extent(1), x.stride(1));
}

/// Describes x [T, heads, extent] for tiles of `tokens` rows of one head: coordinates are (element,
/// head, token). What a tile has beyond the tensor is loaded as 0 and never stored.
template <class T>
CUtensorMap tile_map(const char* operation, const TensorView<T, 3>& x, int tokens) {
  static const auto encode = [&] {
    cudaDriverEntryPointQueryResult found{};
    void* function = nullptr;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               operation);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const auto bytes = [](std::int64_t extent, std::int64_t stride) {
    return extent <= 1 ? cuuint64_t{16} : static_cast<cuuint64_t>(stride) * sizeof(T);
  };
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(x.extent(2)),
                                 static_cast<cuuint64_t>(x.extent(1)),
                                 static_cast<cuuint64_t>(x.extent(0))};
  const cuuint64_t strides[2] = {bytes(x.extent(1), x.stride(1)), bytes(x.extent(0), x.stride(0))};
  const cuuint32_t box[3] = {kTileColumns, 1, static_cast<cuuint32_t>(tokens)};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map,
             format_of<std::remove_const_t<T>>() == Format::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             3, const_cast<std::remove_const_t<T>*>(x.data_handle()), extents, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw CudaError(std::string(operation) + ": no tensor map for " + text_of(shape_of(x)) +
                    ", driver error " + std::to_string(static_cast<int>(status)));
  return map;
}

// --- Shared memory -------------------------------------------------------------------------------

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Where the 16 bytes number `chunk` (0 ... 7) of a tile's row lie.
__device__ inline std::uint32_t tile_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kTileRowBytes + ((chunk ^ (row & 7)) << 4));
}

/// What ordinary stores of this thread left in shared memory can be seen by products and tensor
/// copies that start after a barrier which this thread reaches afterwards.
__device__ inline void publish_to_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Four 8x8 matrices of 16 bits; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                      std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_transposed(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// --- Barriers ------------------------------------------------------------------------------------

// A barrier counts arrivals and bytes; when both are complete its phase ends and the next begins.
// A wait names the parity of the phase that must have ended, so it is right only for a thread that
// is at most one phase behind: whoever waits must know that the phase before has ended.

__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// After the inits of one thread, before the block's __syncthreads().
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and lets the phase wait for so many bytes of copies.
__device__ inline void barrier_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline bool barrier_passed(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t passed;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; "
      "}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}

/// A barrier of `threads` threads beside __syncthreads(), which is number 0.
__device__ inline void sync_threads_of(int number, int threads) {
  __syncwarp();  // a warp reaches it as one, also after a branch that one lane took
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/// The same for threads that do not wait.
__device__ inline void arrive_at(int number, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// --- Bulk tensor copies: one thread asks for a whole tile ----------------------------------------

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ inline void load_tile(std::uint32_t to, const CUtensorMap& map, int element, int head,
                                 int token, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(element), "r"(head), "r"(token)
      : "memory");
}
/// Asks L2 for a tile.
__device__ inline void prefetch_tile(const CUtensorMap& map, int element, int head, int token) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(element), "r"(head), "r"(token)
               : "memory");
}
/// Bytes that are the same everywhere, such as zeros: no map is needed. Addresses and their number
/// are multiples of 16.
__device__ inline void load_bytes(std::uint32_t to, const void* from, int bytes,
                                  std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ inline void store_tile(const CUtensorMap& map, std::uint32_t from, int element, int head,
                                  int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(from), "r"(element), "r"(head), "r"(token)
      : "memory");
}
/// Likewise whole 16 bytes that lie side by side, as they are.
__device__ inline void store_bytes(void* to, std::uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
/// The stores of this thread since the last commit become a group.
__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// All but the last kGroups groups have read their tiles.
template <int kGroups>
__device__ inline void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
/// All stores of this thread have been done.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// --- Roles ---------------------------------------------------------------------------------------

/// The same number in all lanes, known to the compiler to be so: then what is computed from it
/// stays in uniform registers, where products want their descriptors.
__device__ inline int uniform(int x) {
  return __shfl_sync(0xffffffffu, x, 0);
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- Products of a warpgroup ---------------------------------------------------------------------

// A product is D [64, N] += A [64, 16] B [16, N], with D in registers, B in shared memory and A in
// either. Thread t of the warpgroup (warp w, lane l) holds of D, for each n: rows 16 w + l / 4 and
// 8 below, columns 8 n + 2 (l % 4) and the next: d[4 n], d[4 n + 1]; d[4 n + 2], d[4 n + 3]. Of A
// in registers it holds the pairs (row, 2 (l % 4)), (row + 8, same), (row, 8 more), (row + 8,
// same).
//
// Order: writes to registers, start_products(), products, commit_products(), wait_for_products(),
// reads. Registers of a product are left alone meanwhile; pin() keeps the compiler from moving
// accesses across.

/// A matrix in tiles at `address`. K-major (its rows along the dimension that is not summed): the
/// distance of 8 rows is 1024 bytes; 16 summed elements further: further(m, 32), within a tile.
/// Otherwise (transposed): `tile_step` is the distance of tiles along the dimension that is not
/// summed; 16 summed rows further: further(m, 2048).
__device__ inline std::uint64_t matrix(std::uint32_t address, std::uint32_t tile_step = 16) {
  constexpr std::uint32_t kEightRows = 8 * kTileRowBytes >> 4, kSwizzle128 = 1u << 30;
  return std::uint64_t{((address & 0x3ffff) >> 4) | tile_step >> 4 << 16} |
         std::uint64_t{kEightRows | kSwizzle128} << 32;
}
/// The matrix that begins `bytes` later. Only the lower half changes, which is kept apart so that
/// it is one addition.
__device__ inline std::uint64_t further(std::uint64_t matrix, std::uint32_t bytes) {
  const auto low = static_cast<std::uint32_t>(matrix) + (bytes >> 4);
  return (matrix & 0xffffffff00000000) | low;
}
/// A matrix in tiles at `address`. K-major (rows of the matrix along its non-summed dimension):
/// row_step = 1024, the distance of 8 rows; 16 summed elements further: + 32 bytes; column_step
/// is not looked at. Otherwise (transposed): column_step is the distance of tiles along the
/// non-summed dimension, row_step = 1024; 16 summed rows further: + 2048 bytes.
__device__ inline std::uint64_t matrix(std::uint32_t address, std::uint32_t column_step,
                                       std::uint32_t row_step) {
  return std::uint64_t{(address & 0x3ffff) >> 4} | std::uint64_t{column_step >> 4} << 16 |
         std::uint64_t{row_step >> 4} << 32 | std::uint64_t{1} << 62;
}

__device__ inline void start_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// All but the last kGroups groups of products are done.
template <int kGroups>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
template <int kCount>
__device__ inline void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ inline void pin(std::uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

/// of(d, a, b, accumulate): d = a b, or d += a b. kTransposedA, kTransposedB: see matrix().
template <class T, int N, bool kTransposedB, bool kTransposedA = false>
struct Product;

#define LOCKSTEP_D8(o)                                                                        \
  "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), \
      "+f"(d[o + 6]), "+f"(d[o + 7])
#define LOCKSTEP_D16(o) LOCKSTEP_D8(o), LOCKSTEP_D8(o + 8)
#define LOCKSTEP_D32(o) LOCKSTEP_D16(o), LOCKSTEP_D16(o + 16)
#define LOCKSTEP_D64(o) LOCKSTEP_D32(o), LOCKSTEP_D32(o + 32)
#define LOCKSTEP_D128(o) LOCKSTEP_D64(o), LOCKSTEP_D64(o + 64)
#define LOCKSTEP_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LOCKSTEP_R32 LOCKSTEP_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LOCKSTEP_R64                                                                      \
  LOCKSTEP_R32                                                                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
  "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LOCKSTEP_R128                                                                     \
  LOCKSTEP_R64                                                                            \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84," \
  "%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104," \
  "%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121," \
  "%122,%123,%124,%125,%126,%127"

// The numbers are those of the operands after the N / 2 of D.
#define LOCKSTEP_PRODUCT(T_, TYPE, N_, R, D, i0, i1, i2, i3, i4, i5, i6)                         \
  template <bool kTransposedB, bool kTransposedA>                                                \
  struct Product<T_, N_, kTransposedB, kTransposedA> {                                           \
    __device__ static void of(float (&d)[N_ / 2], std::uint64_t a, std::uint64_t b,              \
                              bool accumulate) {                                                 \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i2                                        \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N_ "k16.f32." TYPE "." TYPE " {" R       \
                   "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 "; }"                       \
                   : D(0)                                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)),                          \
                     "n"(static_cast<int>(kTransposedA)), "n"(static_cast<int>(kTransposedB)));  \
    }                                                                                            \
    __device__ static void of(float (&d)[N_ / 2], const std::uint32_t* a, std::uint64_t b,       \
                              bool accumulate) {                                                 \
      static_assert(!kTransposedA, "registers have one order");                                  \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i5                                        \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N_ "k16.f32." TYPE "." TYPE " {" R       \
                   "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 "; }" \
                   : D(0)                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                         \
                     "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposedB)));    \
    }                                                                                            \
  };
#define LOCKSTEP_PRODUCTS(T, TYPE)                                                       \
  LOCKSTEP_PRODUCT(T, TYPE, 32, LOCKSTEP_R16, LOCKSTEP_D16, 16, 17, 18, 19, 20, 21, 22)  \
  LOCKSTEP_PRODUCT(T, TYPE, 64, LOCKSTEP_R32, LOCKSTEP_D32, 32, 33, 34, 35, 36, 37, 38)  \
  LOCKSTEP_PRODUCT(T, TYPE, 128, LOCKSTEP_R64, LOCKSTEP_D64, 64, 65, 66, 67, 68, 69, 70) \
  LOCKSTEP_PRODUCT(T, TYPE, 256, LOCKSTEP_R128, LOCKSTEP_D128, 128, 129, 130, 131, 132, 133, 134)
LOCKSTEP_PRODUCTS(Bf16, "bf16")
LOCKSTEP_PRODUCTS(Fp16, "f16")
#undef LOCKSTEP_PRODUCTS
#undef LOCKSTEP_PRODUCT
#undef LOCKSTEP_R128
#undef LOCKSTEP_R64
#undef LOCKSTEP_R32
#undef LOCKSTEP_R16
#undef LOCKSTEP_D128
#undef LOCKSTEP_D64
#undef LOCKSTEP_D32
#undef LOCKSTEP_D16
#undef LOCKSTEP_D8

// --- Numbers -------------------------------------------------------------------------------------

/// Two numbers, each rounded to the nearest of T, ties to even; the first in the lower half.
template <class T>
__device__ inline std::uint32_t pack(float low, float high) {
  std::uint32_t both;
  if constexpr (std::is_same_v<T, Bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <class T>
__device__ inline float2 unpack(std::uint32_t both) {
  if constexpr (std::is_same_v<T, Bf16>)
    return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
  return __half22float2(*reinterpret_cast<const __half2*>(&both));
}
// --- Clusters of blocks --------------------------------------------------------------------------

constexpr std::uint16_t kBothBlocks = 3;  ///< of a cluster of two

__device__ inline int rank_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Every thread of the cluster's blocks calls it.
__device__ inline void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
/// Like barrier_arrive(), for the barrier at the same place of the cluster's block `rank`. It
/// orders what the thread has read before, but not its ordinary stores: that would cost a fence
/// over the whole device each time.
__device__ inline void remote_arrive(std::uint32_t barrier, int rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
/// load_tile() and load_bytes() to the same place in both blocks, whose barriers each count it.
__device__ inline void load_tile_in_both(std::uint32_t to, const CUtensorMap& map, int element,
                                         int head, int token, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(element), "r"(head), "r"(token), "h"(kBothBlocks)
      : "memory");
}
__device__ inline void load_bytes_in_both(std::uint32_t to, const void* from, int bytes,
                                          std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(kBothBlocks)
      : "memory");
}

// --- Between kernels that run at the same time ---------------------------------------------------

/// Like publish_to_async(), for device memory too, and for copies that were done before the call.
__device__ inline void publish_to_async_everywhere() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
/// Adds 1 after all that the thread has done before.
__device__ inline void count_up(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
/// What was counted up to is done for all that the thread does afterwards.
__device__ inline int count_of(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// --- Products of a warp --------------------------------------------------------------------------

/// The 8 x 8 matrix whose rows l / 4 have columns 2 (l % 4) and the next in lane l, transposed.
__device__ inline std::uint32_t transposed_in_warp(std::uint32_t pairs) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pairs));
  return result;
}
/// d [16, 8] += a [16, 16] b [16, 8]. Lane l holds of d the rows l / 4 and 8 below, columns
/// 2 (l % 4) and the next; of a in registers what a warpgroup's product takes; of b the rows
/// 2 (l % 4) and the next, and 8 below, in column l / 4: two registers of load_transposed().
template <class T>
__device__ inline void add_warp_product(float (&d)[4], const std::uint32_t (&a)[4],
                                        std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, Bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace lockstep::kernels::hopper
