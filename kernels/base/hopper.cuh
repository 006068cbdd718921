// Hopper's asynchronous instructions, for kernels that divide a block into producer and consumer
// warps: barriers in shared memory (mbarrier), bulk tensor copies (TMA), matrix products of a
// warpgroup (wgmma), and the fences that order them. NVIDIA, "PTX ISA" 8.0, chapters mbarrier,
// Tensor Map and wgmma. For sm_90a only.
//
// A tile in shared memory has rows of 64 elements of 16 bits (128 bytes), begins at a multiple of
// 1024 bytes and has the 128-byte swizzle that TMA writes and wgmma reads: see tile_offset(). A
// matrix of more than 64 columns is several tiles, one after the other.
#pragma once

#include <cudaTypedefs.h>  // only types: tile_map() looks the driver's function up at run time

#include "kernels/base/device.cuh"
#include "kernels/base/fast_math.cuh"

namespace lockstep::kernels::hopper {

constexpr int kTileColumns = 64;    ///< elements of a tile's row
constexpr int kTileRowBytes = 128;  ///< bytes of a tile's row
constexpr int kWarpgroup = 128;     ///< threads: the four warps that issue a product together

// --- The host: tensor maps -----------------------------------------------------------------------

/// Whether tile_map() can describe x [T, heads, extent]: elements of 16 bits, the last dimension
/// contiguous, the address and the other strides multiples of 16 bytes, strides below 2^40 bytes.
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
/// head, token). A load fills the part of a tile that lies outside the tensor with 0; a store
/// leaves that part out.
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

/// Byte offset of 16-byte piece `chunk` (0 ... 7) of a tile's row. The 128-byte swizzle exchanges
/// the pieces of a row by XOR with the row's number modulo 8, so that eight rows' pieces of one
/// number lie in different banks.
__device__ inline std::uint32_t tile_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kTileRowBytes + ((chunk ^ (row & 7)) << 4));
}

/// Makes this thread's earlier ordinary stores to shared memory visible to the asynchronous proxy:
/// to wgmma and bulk copies that are issued after a barrier at which this thread arrives next.
__device__ inline void publish_to_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Stores or loads four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of
/// matrix i / 8, and holds elements 2 (i % 4) and the next of row i / 4 of each matrix in one
/// register per matrix.
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
/// load_matrices() that gives each lane the elements of the transposed matrices.
__device__ inline void load_transposed(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// --- Barriers ------------------------------------------------------------------------------------

// A barrier (mbarrier, 8 bytes in shared memory, here named by its shared address) counts arrivals
// and bytes of copies; when both are complete, its phase ends and the next phase begins. A wait
// names the parity of the phase that must have ended. Parity cannot tell a phase from the one two
// before it, so a thread may wait for a phase only if it knows that the previous phase has ended.

__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to other threads, blocks of the cluster and copies. The
/// thread that called barrier_init() calls it before the block's __syncthreads().
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and adds `bytes` to the bytes of copies that must land before the phase ends.
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

/// Synchronises `threads` threads of the block at hardware barrier `number`; __syncthreads() uses
/// number 0.
__device__ inline void sync_threads_of(int number, int threads) {
  __syncwarp();  // bar.sync counts whole warps, so lanes that diverged before must meet first
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/// Arrives at hardware barrier `number` without waiting; counts towards `threads` like
/// sync_threads_of().
__device__ inline void arrive_at(int number, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// --- Bulk tensor copies: one thread asks for a whole tile ----------------------------------------

// Loads complete on a barrier, by bytes. Stores complete by groups: see commit_stores().

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
/// Prefetches a tile into L2.
__device__ inline void prefetch_tile(const CUtensorMap& map, int element, int head, int token) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(element), "r"(head), "r"(token)
               : "memory");
}
/// Copies `bytes` contiguous bytes from device memory to shared memory, unswizzled and without a
/// tensor map. Both addresses and `bytes` are multiples of 16.
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
/// load_bytes() in the other direction: from shared memory to device memory.
__device__ inline void store_bytes(void* to, std::uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
/// Makes one group of the bulk stores that this thread issued since its last commit.
__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until all but this thread's last kGroups groups of stores have read their source, so that
/// shared memory may be overwritten; the writes themselves may still be under way.
template <int kGroups>
__device__ inline void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
/// Waits until all bulk stores of this thread have been written.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// --- Roles ---------------------------------------------------------------------------------------

/// x of lane 0, in all lanes. The shuffle shows the compiler that the value is warp-uniform: it
/// then keeps numbers derived from it in uniform registers, where wgmma wants its descriptors.
__device__ inline int uniform(int x) {
  return __shfl_sync(0xffffffffu, x, 0);
}
/// Raises or lowers the registers per thread of the calling warpgroup to kRegisters: warps that
/// only load leave registers to warps that multiply.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- Products of a warpgroup ---------------------------------------------------------------------

// A product (wgmma) is D [64, N] += A [64, 16] B [16, N], with D in registers, B in shared memory
// and A in either. Warp w, lane l of the warpgroup holds of D the rows r = 16 w + l / 4 and r + 8
// and, for each n = 0 ... N / 8 - 1, the columns c = 8 n + 2 (l % 4) and c + 1:
//
//   d[4 n]     = D[r, c]        d[4 n + 1] = D[r, c + 1]
//   d[4 n + 2] = D[r + 8, c]    d[4 n + 3] = D[r + 8, c + 1]
//
// Of A in registers it holds four pairs of neighbouring elements, with k = 2 (l % 4):
//
//   a[0] = A[r, k ...]        a[1] = A[r + 8, k ...]
//   a[2] = A[r, k + 8 ...]    a[3] = A[r + 8, k + 8 ...]
//
// Order: writes to registers, start_products(), products, commit_products(), wait_for_products(),
// reads. Between start and wait nothing may touch the registers of a product; pin() before the
// start and after the wait keeps the compiler from moving accesses across.

/// Descriptor of a matrix in swizzled tiles at shared address `address`.
///
/// K-major (each row of the tile holds consecutive elements of the summed dimension): groups of 8
/// rows are 1024 bytes apart; the operand of the next 16 summed elements is further(m, 32) within a
/// tile. Transposed (each row of the tile has one index of the summed dimension): `tile_step` is
/// the distance in bytes of neighbouring tiles along the other dimension; the operand of the next
/// 16 summed rows is further(m, 2048).
__device__ inline std::uint64_t matrix(std::uint32_t address, std::uint32_t tile_step = 16) {
  constexpr std::uint32_t kEightRows = 8 * kTileRowBytes >> 4, kSwizzle128 = 1u << 30;
  return std::uint64_t{((address & 0x3ffff) >> 4) | tile_step >> 4 << 16} |
         std::uint64_t{kEightRows | kSwizzle128} << 32;
}
/// The descriptor of the matrix that begins `bytes` later. The address lies in the lower 32 bits
/// and does not overflow them, so one 32-bit addition does instead of a 64-bit one.
__device__ inline std::uint64_t further(std::uint64_t matrix, std::uint32_t bytes) {
  const auto low = static_cast<std::uint32_t>(matrix) + (bytes >> 4);
  return (matrix & 0xffffffff00000000) | low;
}
/// The same descriptor with both distances given in bytes. K-major: row_step = 1024 is the distance
/// of groups of 8 rows, column_step is ignored; the next 16 summed elements are 32 bytes further.
/// Transposed: column_step is the distance of tiles along the dimension that is not summed,
/// row_step = 1024; the next 16 summed rows are 2048 bytes further.
__device__ inline std::uint64_t matrix(std::uint32_t address, std::uint32_t column_step,
                                       std::uint32_t row_step) {
  return std::uint64_t{(address & 0x3ffff) >> 4} | std::uint64_t{column_step >> 4} << 16 |
         std::uint64_t{row_step >> 4} << 32 | std::uint64_t{1} << 62;
}

/// Orders this warp's earlier register writes before the products that follow.
__device__ inline void start_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Makes one group of the products issued since the last commit.
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until all but the last kGroups groups of products are done.
template <int kGroups>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
/// An empty asm that claims to read and write the registers: the compiler keeps earlier accesses
/// before it and later ones after it.
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

/// One wgmma, D [64, N] with 16 summed elements. of(d, a, b, accumulate): d = a b, or d += a b
/// where `accumulate`. a is a descriptor or four registers, b a descriptor; kTransposedA and
/// kTransposedB say that a matrix is stored transposed: see matrix().
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

// D occupies the asm operands %0 ... %(N/2 - 1); i0 ... i6 are the numbers of the operands after
// it.
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

/// Two floats, each rounded to T (nearest, ties to even), in one register; `low` in the lower half.
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

constexpr std::uint16_t kBothBlocks = 3;  ///< multicast mask: ranks 0 and 1 of a cluster of two

__device__ inline int rank_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Synchronises all threads of all blocks of the cluster; every one of them calls it.
__device__ inline void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
/// Arrives at the barrier with the same shared address in block `rank` of the cluster. The arrival
/// comes after this thread's earlier reads, but does not publish its earlier ordinary stores: that
/// would cost a fence at device scope each time.
__device__ inline void remote_arrive(std::uint32_t barrier, int rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
/// load_tile() and load_bytes() by multicast: the bytes go to the same shared address in both
/// blocks of the cluster, and complete on the barrier at the same address in each.
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

/// publish_to_async() for shared and device memory, in both directions: bulk copies issued after it
/// see ordinary stores made visible before it, also those of other blocks.
__device__ inline void publish_to_async_everywhere() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
/// Adds 1 to a counter in device memory, with release order: a thread that reads the new count by
/// count_of() sees this thread's earlier writes.
__device__ inline void count_up(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
/// Reads a counter with acquire order: this thread's later reads see all writes that came before
/// the count_up() calls it counts.
__device__ inline int count_of(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// --- Products of a warp --------------------------------------------------------------------------

/// Transposes an 8 x 8 matrix of 16-bit elements; lane l holds, before and after, columns 2 (l % 4)
/// and the next of row l / 4.
__device__ inline std::uint32_t transposed_in_warp(std::uint32_t pairs) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pairs));
  return result;
}
/// d [16, 8] += a [16, 16] b [16, 8], by one warp (mma.m16n8k16). Lane l holds of d the rows l / 4
/// and l / 4 + 8, columns 2 (l % 4) and the next; of a the four registers that a warpgroup's
/// product takes; of b, in column l / 4, the rows 2 (l % 4) and the next (b0) and those 8 below
/// (b1): two registers as load_transposed() gives them.
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
