#include "kernels/judge/shared_memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace lockstep::judging {

Result<SharedMemory> SharedMemory::make() {
  const int fd = ::memfd_create("lockstep-judge", 0);  // without CLOEXEC: the child inherits it
  if (fd < 0)
    return fail(fmt::format("shared memory cannot be made: {}", std::strerror(errno)),
                kExitEnvironment);
  return SharedMemory(fd);
}

SharedMemory::~SharedMemory() {
  if (fd_ >= 0) ::close(fd_);
}

Result<void> SharedMemory::reserve(std::int64_t bytes) {
  if (bytes <= size_) return {};
  if (const int error = ::posix_fallocate(fd_, 0, bytes); error != 0)
    return fail(
        fmt::format("{} bytes of memory for a case cannot be had: {}", bytes, std::strerror(error)),
        kExitEnvironment);
  size_ = bytes;
  return {};
}

bool SharedMemory::write(std::int64_t offset, const char* from, std::int64_t bytes) const {
  return write_at(fd_, offset, from, bytes);
}

bool SharedMemory::read(std::int64_t offset, char* to, std::int64_t bytes) const {
  return read_at(fd_, offset, to, bytes);
}

bool write_at(int fd, std::int64_t offset, const char* from, std::int64_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::pwrite(fd, from, static_cast<std::size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    from += done, offset += done, bytes -= done;
  }
  return true;
}

bool read_at(int fd, std::int64_t offset, char* to, std::int64_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::pread(fd, to, static_cast<std::size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    to += done, offset += done, bytes -= done;
  }
  return true;
}

}  // namespace lockstep::judging
