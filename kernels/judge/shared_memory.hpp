// Memory that the judge and a candidate's process share: an anonymous file in memory (memfd).
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "reference/base/result.hpp"

namespace lockstep::judging {

class SharedMemory {
 public:
  static Result<SharedMemory> make();
  SharedMemory(SharedMemory&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  int fd() const { return fd_; }  ///< children inherit it under the same number

  /// Makes room for `bytes` bytes; an error if the machine has not so much memory.
  Result<void> reserve(std::int64_t bytes);

  /// Both return false if the other process has shortened the file.
  bool write(std::int64_t offset, const char* from, std::int64_t bytes) const;
  bool read(std::int64_t offset, char* to, std::int64_t bytes) const;

 private:
  explicit SharedMemory(int fd) : fd_(fd) {}
  int fd_ = -1;
  std::int64_t size_ = 0;
};

/// Write or read all bytes, in as many pieces as the system makes of them; false at an error or the
/// end of the file.
bool write_at(int fd, std::int64_t offset, const char* from, std::int64_t bytes);
bool read_at(int fd, std::int64_t offset, char* to, std::int64_t bytes);

}  // namespace lockstep::judging
