// Where a candidate's tensors lie, seen by the child that loads a shared library: host memory, or
// device memory in a build with CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace lockstep::judging {

struct Timing {
  double us = 0;
  std::string how;
};

/// Errors are exceptions: the child writes them down and ends.
class Place {
 public:
  virtual ~Place() = default;
  virtual std::string name() const = 0;
  virtual bool is_gpu() const = 0;
  virtual void* stream() = 0;
  virtual char* allocate(std::int64_t bytes) = 0;
  virtual void release(char* memory) = 0;
  virtual void upload(char* to, const char* from, std::int64_t bytes) = 0;
  virtual void download(char* to, const char* from, std::int64_t bytes) = 0;
  virtual void finish() = 0;  ///< waits, and throws what went wrong on the device
  /// The median time of one call of launch(set), over sets so large that none is in a cache.
  virtual Timing time(const std::function<void(std::size_t set)>& launch, std::size_t sets) = 0;
  virtual double copy_gbps() = 0;
  virtual std::int64_t cold_bytes() const = 0;  ///< of all sets together
};

std::unique_ptr<Place> host_place();
std::unique_ptr<Place> cuda_place();  ///< null where this build has no CUDA

}  // namespace lockstep::judging
