// The memory of a candidate's tensors, in the process that loads a shared library: host memory, or
// device memory in a build with CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::judging {

/// Calls of the candidate: launch(set) calls it on set number `set` of its arguments. Each set has
/// memory of its own.
struct Launches {
  std::function<void(std::size_t set)> launch;
  std::size_t sets = 0;
};

/// A kind of memory, and the clock of its device. Errors are exceptions; the process reports them
/// in its answer.
class Place {
 public:
  virtual ~Place() = default;
  virtual std::string name() const = 0;
  virtual bool is_gpu() const = 0;
  virtual void* stream() = 0;
  virtual char* allocate(std::int64_t bytes) = 0;
  virtual void release(char* memory) = 0;
  /// Copies between host memory, device memory, or both.
  virtual void copy(char* to, const char* from, std::int64_t bytes) = 0;
  virtual void finish() = 0;  ///< waits for the device, and throws its error if there is one
  /// Prepares run() (records a CUDA graph if possible), and returns a description of the timing.
  /// Runs nothing.
  virtual std::string record(const Launches& launches) = 0;
  virtual void forget() = 0;  ///< drops the recording: run() makes plain calls again
  /// Calls every set once and waits. Returns the microseconds between device events around all
  /// calls; 0 on the host, where the judge's own clock serves.
  virtual double run(const Launches& launches) = 0;
  /// Bytes read plus bytes written per second by a plain copy, in GB/s.
  virtual double copy_gbps() = 0;
  virtual std::int64_t cold_bytes()
      const = 0;  ///< sets of so many bytes together exceed all caches
};

std::unique_ptr<Place> host_place();
/// The rate, in GB/s, at which all threads together copy within their caches: no kernel is faster.
double host_most_gbps();
std::unique_ptr<Place> cuda_place();  ///< null where this build has no CUDA

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

}  // namespace lockstep::judging
