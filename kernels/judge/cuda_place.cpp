#include "kernels/judge/memory.hpp"

#ifdef LOCKSTEP_HAS_CUDA

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/base/copy_rate.hpp"

namespace lockstep::judging {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

class CudaPlace : public Place {
 public:
  CudaPlace() {
    check(cudaGetDeviceProperties(&properties_, 0), "the GPU");
    check(cudaStreamCreate(&stream_), "a stream");
    for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "an event");
  }

  std::string name() const override { return properties_.name; }
  bool is_gpu() const override { return true; }
  void* stream() override { return stream_; }
  char* allocate(std::int64_t bytes) override {
    void* memory = nullptr;
    check(cudaMalloc(&memory, static_cast<std::size_t>(bytes)), "device memory");
    return static_cast<char*>(memory);
  }
  void release(char* memory) override { cudaFree(memory); }
  void copy(char* to, const char* from, std::int64_t bytes) override {
    check(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault), "a copy");
  }
  void finish() override { check(cudaDeviceSynchronize(), "the kernel"); }

  /// Microseconds between two events around body().
  template <class Body>
  double event_us(Body body) {
    check(cudaEventRecord(events_[0], stream_), "an event");
    body();
    check(cudaEventRecord(events_[1], stream_), "an event");
    check(cudaEventSynchronize(events_[1]), "the kernel");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, events_[0], events_[1]), "an event");
    return ms * 1e3;
  }

  std::string record(const Launches& launches) override {
    forget();
    graph_ = captured(launches);
    return graph_ != nullptr
               ? "CUDA graphs"
               : "plain launches between events (they cannot be captured into a graph)";
  }

  void forget() override {
    if (graph_ != nullptr) cudaGraphExecDestroy(std::exchange(graph_, nullptr));
  }

  double run(const Launches& launches) override {
    const double us = event_us([&] {
      if (graph_ != nullptr) return check(cudaGraphLaunch(graph_, stream_), "the graph");
      for (std::size_t set = 0; set < launches.sets; ++set) launches.launch(set);
    });
    finish();
    return us;
  }

  double copy_gbps() override {
    constexpr std::size_t kBytes = std::size_t{1} << 30;
    char* const from = allocate(kBytes);
    char* const to = allocate(kBytes);
    const auto copy_us = [&] {
      return event_us([&] { kernels::copy_on_device(to, from, kBytes, stream_); });
    };
    copy_us(), copy_us();
    std::vector<double> times(10);
    for (double& us : times) us = copy_us();
    release(from), release(to);
    return 2.0 * kBytes / median(times) / 1e3;
  }
  std::int64_t cold_bytes() const override { return std::int64_t{4} * properties_.l2CacheSize; }

 private:
  /// A graph of all launches; null if a launch does something that cannot be captured.
  cudaGraphExec_t captured(const Launches& launches) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    if (cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return {};
    bool failed = false;
    try {
      for (std::size_t set = 0; set < launches.sets && !failed; ++set) launches.launch(set);
    } catch (const std::exception&) {
      failed = true;
    }
    if (cudaStreamEndCapture(stream_, &graph) != cudaSuccess || failed || graph == nullptr) {
      cudaGetLastError();
      return {};
    }
    std::size_t nodes = 0;
    // The graph is empty if the candidate launches on another stream.
    const bool empty = cudaGraphGetNodes(graph, nullptr, &nodes) != cudaSuccess || nodes == 0;
    if (empty || cudaGraphInstantiate(&executable, graph, 0) != cudaSuccess) executable = nullptr;
    cudaGraphDestroy(graph);
    cudaGetLastError();
    return executable;
  }

  cudaDeviceProp properties_{};
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[2] = {};
  cudaGraphExec_t graph_ = nullptr;  // the last recording
};

}  // namespace

std::unique_ptr<Place> cuda_place() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
    throw std::runtime_error("there is no GPU that CUDA can use");
  return std::make_unique<CudaPlace>();
}

}  // namespace lockstep::judging

#else

namespace lockstep::judging {

std::unique_ptr<Place> cuda_place() {
  return nullptr;
}

}  // namespace lockstep::judging

#endif
