// A file that is nowhere on a disk, for fuzz targets whose readers want a path.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "reference/base/require.hpp"

namespace lockstep::testing_support {

class MemoryFile {
 public:
  MemoryFile(const std::uint8_t* data, std::size_t size) : file_(::memfd_create("fuzz", 0)) {
    require(file_ >= 0 && ::write(file_, data, size) == static_cast<ssize_t>(size),
            "a fuzz target can write to memory");
  }
  ~MemoryFile() { ::close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

}  // namespace lockstep::testing_support
