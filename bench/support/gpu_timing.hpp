// Times launches as a server makes them: one after the other in a CUDA graph, with inputs that are
// cold in L2, because 256 MiB or more move between two uses of the same inputs and L2 holds less.
#pragma once

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/base/copy_rate.hpp"
#include "kernels/base/device_tensor.hpp"

namespace lockstep::bench {

inline void check(cudaError_t status) {
  kernels::check_cuda(status, "the benchmark");
}

inline bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

constexpr std::int64_t kColdBytes = std::int64_t{256} << 20;

/// The number of input sets that leaves L2 without a set's bytes when the set's turn comes again,
/// if a launch on one set moves `bytes_moved`.
inline int cold_sets(double bytes_moved) {
  return std::max(1, static_cast<int>(static_cast<double>(kColdBytes) / bytes_moved) + 1);
}

/// launch(set, stream) enqueues the work on one set.
using Launch = std::function<void(int, cudaStream_t)>;

/// A graph of launches that take the sets in turns. It has at least 50 launches and 1.5 ms of work,
/// beside which the graph's own start is small.
class LaunchGraph {
 public:
  LaunchGraph(int sets, double expected_us, const Launch& launch) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    launch(0, stream_);  // loads the kernels before the capture
    check(cudaStreamSynchronize(stream_));
    const double wanted = std::max(50.0, 1500.0 / std::max(expected_us, 1.0));
    launches_ = sets * std::max(1, static_cast<int>(wanted / sets + 0.999));
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches_; ++i) launch(i % sets, stream_);
    check(cudaStreamEndCapture(stream_, &graph));
    check(cudaGraphInstantiate(&graph_, graph, 0));
    check(cudaGraphDestroy(graph));
    check(cudaEventCreate(&start_));
    check(cudaEventCreate(&end_));
  }
  LaunchGraph(const LaunchGraph&) = delete;
  LaunchGraph& operator=(const LaunchGraph&) = delete;
  ~LaunchGraph() {
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
    cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
  }

  /// Replays the graph once; microseconds of one launch, the mean over the graph.
  double replay_us() const {
    float ms = 0;
    check(cudaEventRecord(start_, stream_));
    check(cudaGraphLaunch(graph_, stream_));
    check(cudaEventRecord(end_, stream_));
    check(cudaEventSynchronize(end_));
    check(cudaEventElapsedTime(&ms, start_, end_));
    return static_cast<double>(ms) * 1e3 / launches_;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  cudaEvent_t start_ = nullptr, end_ = nullptr;
  int launches_ = 0;
};

/// Device memory for a benchmark's inputs: empty, a copy of given elements, or numbers between
/// `low` and `high` that are the same in every run.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::int64_t count) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes(count)));
    data_ = static_cast<T*>(memory);
  }
  Buffer(std::int64_t count, double low, double high) : Buffer(count) {
    std::vector<T> numbers(static_cast<std::size_t>(std::min<std::int64_t>(count, 1 << 20)));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto draw = static_cast<double>(i * 2654435761u >> 8 & 0xffff) / 65536.0;
      numbers[i] = kernels::from_host<T>(low + (high - low) * draw);
    }
    const auto piece = static_cast<std::int64_t>(numbers.size());
    for (std::int64_t at = 0; at < count; at += piece)
      check(cudaMemcpy(data_ + at, numbers.data(), bytes(std::min(piece, count - at)),
                       cudaMemcpyHostToDevice));
  }
  explicit Buffer(const std::vector<T>& elements)
      : Buffer(static_cast<std::int64_t>(elements.size())) {
    check(cudaMemcpy(data_, elements.data(), bytes(static_cast<std::int64_t>(elements.size())),
                     cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  T* at(std::int64_t element) const { return data_ + element; }

 private:
  static std::size_t bytes(std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(T);
  }
  T* data_ = nullptr;
};

/// The chip's copy rate in GB/s, read and written bytes together, from a copy of 2 GiB. A kernel
/// that only streams cannot be faster.
inline double copy_gbps() {
  static const double rate = [] {
    constexpr std::int64_t kBytes = std::int64_t{1} << 31;
    const Buffer<float> from(kBytes / 4, -1, 1), to(kBytes / 4);
    const LaunchGraph graph(1, 1000, [&](int, cudaStream_t stream) {
      kernels::copy_on_device(to.at(0), from.at(0), kBytes, stream);
    });
    double best = 0;
    for (int i = 0; i < 3; ++i) best = std::max(best, 2e-3 * kBytes / graph.replay_us());
    return best;
  }();
  return rate;
}

/// Runs a benchmark's loop over a LaunchGraph and writes its counters. `bytes` is the number of
/// bytes that a launch must read and write.
inline void time_launches(benchmark::State& state, int sets, double bytes, const Launch& launch) {
  const LaunchGraph graph(sets, bytes / 4e6, launch);
  std::vector<double> times;
  graph.replay_us();
  for (auto _ : state) {
    times.push_back(graph.replay_us());
    state.SetIterationTime(times.back() * 1e-6);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                   times.end());
  const double us = times[times.size() / 2];
  state.counters["median_us"] = us;
  state.counters["GB/s"] = bytes / us * 1e-3;
  state.counters["limit_share"] = bytes / us * 1e-3 / copy_gbps();
}

}  // namespace lockstep::bench
