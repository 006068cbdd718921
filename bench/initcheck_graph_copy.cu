// Shows whether compute-sanitizer's initcheck follows a copy inside a CUDA graph.
//
//   compute-sanitizer --tool initcheck lockstep_graph_copy graph
//
// A kernel spins for 2,000,000 cycles and then writes every byte of a buffer; after the kernel a
// copy reads that buffer.
//   stream     kernel and copy are launched into a stream
//   graph      kernel and copy are nodes of a graph, the copy after the kernel
//   nothing    as graph, but the kernel writes nothing: the tool has to report the copy
// The program compares the copied bytes with the kernel's and prints how many elements differ.
#include <cstdio>
#include <cstring>
#include <vector>

constexpr int kCount = 24576;

__global__ void write(float* to, int count, long long cycles) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
  if (i < count) to[i] = static_cast<float>(i);
}

bool check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) std::printf("%s: %s\n", what, cudaGetErrorString(status));
  return status == cudaSuccess;
}

int main(int words, char** word) {
  const char* const form = words > 1 ? word[1] : "graph";
  const int written = std::strcmp(form, "nothing") == 0 ? 0 : kCount;
  float *from = nullptr, *to = nullptr;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  bool fine = check(cudaMalloc(&from, kCount * sizeof(float)), "malloc") &&
              check(cudaMalloc(&to, kCount * sizeof(float)), "malloc") &&
              check(cudaStreamCreate(&stream), "stream");
  const auto both = [&] {
    write<<<kCount / 128, 128, 0, stream>>>(from, written, 2000000);
    return check(cudaGetLastError(), "kernel") &&
           check(
               cudaMemcpyAsync(to, from, kCount * sizeof(float), cudaMemcpyDeviceToDevice, stream),
               "copy");
  };
  if (std::strcmp(form, "stream") == 0) {
    fine = fine && both();
  } else {
    fine = fine && check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture") &&
           both() && check(cudaStreamEndCapture(stream, &graph), "capture") &&
           check(cudaGraphInstantiate(&exec, graph, 0), "graph") &&
           check(cudaGraphLaunch(exec, stream), "launch");
  }
  fine = fine && check(cudaStreamSynchronize(stream), "run");
  std::vector<float> read(kCount);
  fine = fine &&
         check(cudaMemcpy(read.data(), to, kCount * sizeof(float), cudaMemcpyDeviceToHost), "read");
  int wrong = 0;
  for (int i = 0; i < kCount; ++i) wrong += read[i] != static_cast<float>(i);
  std::printf("%s: %d of %d elements are not what the kernel wrote\n", form, wrong, kCount);
  return fine ? 0 : 1;
}
