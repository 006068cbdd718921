// Shows whether compute-sanitizer's synccheck follows the barriers of a large cluster's blocks.
//
//   compute-sanitizer --tool synccheck lockstep_cluster [BLOCKS]
//
// Launches 64 clusters of BLOCKS (16) blocks of four warps. Lane 0 of each warp makes a barrier of
// its warp's own, and asks for a tile of 4 KiB, which arrives there, four times; the warp waits for
// each. No thread touches another warp's barrier. Clusters of at most 8 blocks are reported clean;
// of 16, barriers of the blocks from the ninth on (shared addresses 0x8...... to 0xf......) and of
// no other are found wrong, a few of them and others in every run. On an H200 under CUDA 13.0 one
// run had 273 errors "Missing wait" and ended by an illegal memory access; layers' kernels in such
// clusters have "Missing init".
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda/ptx>

namespace {

namespace ptx = cuda::ptx;

constexpr int kWarps = 4, kClusters = 64, kTileBytes = 4096, kTiles = 4;

__global__ void wait_for_tiles(const char* tiles) {
  __shared__ __align__(128) char tile[kWarps][kTileBytes];
  __shared__ std::uint64_t barriers[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::uint64_t* const barrier = barriers + warp;
  const auto ask = [&] {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier,
                                   kTileBytes);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile[warp], tiles + warp * kTileBytes,
                       kTileBytes, barrier);
  };
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ask();
  }
  __syncthreads();
  for (int i = 0; i < kTiles; ++i) {
    while (!ptx::mbarrier_try_wait_parity(barrier, static_cast<std::uint32_t>(i) % 2)) {
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0 && i + 1 < kTiles) ask();
  }
}

bool check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) std::printf("%s: %s\n", what, cudaGetErrorString(status));
  return status == cudaSuccess;
}

}  // namespace

int main(int words, char** word) {
  const int blocks = words > 1 ? std::atoi(word[1]) : 16;
  char* tiles = nullptr;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks), kClusters);
  config.blockDim = dim3(32 * kWarps);
  config.attrs = &cluster;
  config.numAttrs = 1;
  bool fine =
      check(cudaMalloc(&tiles, kWarps * kTileBytes), "malloc") &&
      check(cudaFuncSetAttribute(wait_for_tiles, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
            "attribute");
  for (int i = 0; i < 4; ++i)
    fine =
        fine && check(cudaLaunchKernelEx(&config, wait_for_tiles, static_cast<const char*>(tiles)),
                      "launch");
  fine = fine && check(cudaDeviceSynchronize(), "run");
  std::printf("%d clusters of %d blocks have waited for their tiles\n", kClusters, blocks);
  return fine ? 0 : 1;
}
