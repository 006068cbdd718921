// Where a candidate's tensors lie, seen by the process that loads a shared library: host memory, or
// device memory in a build with CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace lockstep::judging {

/// Launches set after set of inputs; each set is another piece of memory.
struct Launches {
  std::function<void(std::size_t set)> launch;
  std::size_t sets = 0;
};

/// Errors are exceptions: the process answers with them.
class Place {
 public:
  virtual ~Place() = default;
  virtual std::string name() const = 0;
  virtual bool is_gpu() const = 0;
  virtual void* stream() = 0;
  virtual char* allocate(std::int64_t bytes) = 0;
  virtual void release(char* memory) = 0;
  /// Between any two of host and device memory.
  virtual void copy(char* to, const char* from, std::int64_t bytes) = 0;
  virtual void finish() = 0;  ///< waits, and throws what went wrong on the device
  /// Prepares run(), and says how the calls will be timed. Runs nothing.
  virtual std::string record(const Launches& launches) = 0;
  virtual void forget() = 0;  ///< what was recorded: run() makes plain calls again
  /// Calls every set once and waits. Microseconds between events of the device around all of them;
  /// 0 where the device has no clock of its own: the judge has one.
  virtual double run(const Launches& launches) = 0;
  /// Bytes read plus bytes written per second by a plain copy, in GB/s.
  virtual double copy_gbps() = 0;
  virtual std::int64_t cold_bytes() const = 0;  ///< sets so large together are in no cache
};

std::unique_ptr<Place> host_place();
/// What all threads together copy within their caches, in GB/s: no kernel moves more.
double host_most_gbps();
std::unique_ptr<Place> cuda_place();  ///< null where this build has no CUDA

}  // namespace lockstep::judging
