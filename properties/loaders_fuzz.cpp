// Any bytes as a workload's file, plain or compressed: refused with a sentence, or requests with
// tokens.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cache_sim/workload.hpp"
#include "reference/base/require.hpp"

namespace {

constexpr std::int64_t kMostRequests = 100;

/// A file that is nowhere on a disk.
class MemoryFile {
 public:
  MemoryFile(const std::uint8_t* data, std::size_t size) : file_(::memfd_create("workload", 0)) {
    lockstep::require(file_ >= 0 && ::write(file_, data, size) == static_cast<ssize_t>(size),
                      "a fuzz target can write to memory");
  }
  ~MemoryFile() { ::close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const MemoryFile file(data, size);
  cache_sim::OpenedStream stream = cache_sim::open_workload(file.path(), kMostRequests);
  if (!stream) return 0;
  for (cache_sim::RequestSpec spec;;) {
    const Result<bool> more = (*stream)->next(spec);
    if (!more || !*more) return 0;
    require(spec.prompt_size <= spec.tokens.size(), "a prompt is part of its request's tokens");
  }
}
