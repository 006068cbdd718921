// An array of zeros that takes memory only for the pages that are written: the system allocates a
// page at its first use. For tables that are as long as a pool, of which a run uses little.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace lockstep {

template <class T>
class ZeroedArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  /// Throws std::bad_alloc if the system has no such range of addresses.
  explicit ZeroedArray(std::size_t size)
      : size_(size), values_(nullptr, Release{size * sizeof(T)}) {
    reset();
  }

  /// Makes all elements 0 again.
  void reset() {
    values_.reset();
    const std::size_t bytes = size_ * sizeof(T);
    void* memory = nullptr;
    if (bytes < kMapped) {
      memory = std::calloc(1, bytes == 0 ? 1 : bytes);
    } else {
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) memory = nullptr;
    }
    if (memory == nullptr) throw std::bad_alloc();
    values_.reset(static_cast<T*>(memory));
  }

  std::size_t size() const { return size_; }
  T* data() { return values_.get(); }
  const T* data() const { return values_.get(); }
  T& operator[](std::size_t i) { return values_.get()[i]; }
  const T& operator[](std::size_t i) const { return values_.get()[i]; }

 private:
  static constexpr std::size_t kMapped = std::size_t{1} << 20;  // bytes from which on mmap is used

  struct Release {
    std::size_t bytes;
    void operator()(T* values) const {
      if (bytes < kMapped)
        std::free(values);
      else
        munmap(values, bytes);
    }
  };
  std::size_t size_;
  std::unique_ptr<T, Release> values_;
};

}  // namespace lockstep
