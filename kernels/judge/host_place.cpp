#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <thread>
#include <vector>

#include "kernels/judge/memory.hpp"
#include "reference/base/parallel.hpp"

namespace lockstep::judging {
namespace {

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) {
      const std::size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  return "a CPU";
}

class HostPlace : public Place {
 public:
  std::string name() const override { return processor(); }
  bool is_gpu() const override { return false; }
  void* stream() override { return nullptr; }
  char* allocate(std::int64_t bytes) override {
    // The alignment of cudaMalloc.
    void* const memory =
        std::aligned_alloc(512, static_cast<std::size_t>((bytes + 511) / 512 * 512));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<char*>(memory);
  }
  void release(char* memory) override { std::free(memory); }
  void copy(char* to, const char* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void finish() override {}

  std::string record(const Launches&) override { return "calls by the clock"; }
  void forget() override {}
  double run(const Launches& launches) override {
    for (std::size_t set = 0; set < launches.sets; ++set) launches.launch(set);
    return 0;
  }

  double copy_gbps() override {
    constexpr std::size_t kBytes = std::size_t{128} << 20;
    std::vector<char> from(kBytes, 1), to(kBytes, 2);
    std::vector<double> times(5);
    for (double& seconds : times)
      seconds = seconds_of([&] { std::memcpy(to.data(), from.data(), kBytes); });
    return 2.0 * kBytes / median(times) / 1e9;
  }
  std::int64_t cold_bytes() const override { return std::int64_t{128} << 20; }
};

}  // namespace

double host_most_gbps() {
  constexpr std::size_t kBytes = std::size_t{128} << 10;
  constexpr int kCopies = 400, kTries = 5;
  struct Buffers {
    std::vector<char> from = std::vector<char>(kBytes, 1), to = std::vector<char>(kBytes, 2);
  };
  std::vector<Buffers> threads(std::max(1U, std::thread::hardware_concurrency()));
  double most = 0;
  for (int i = 0; i < kTries; ++i) {
    const double seconds = seconds_of([&] {
      in_parallel(threads, [](Buffers& own) {
        for (int n = 0; n < kCopies; ++n) {
          own.from[static_cast<std::size_t>(n)] =
              own.to[kBytes - 1];  // each copy moves other bytes
          std::memcpy(own.to.data(), own.from.data(), kBytes);
        }
      });
    });
    most = std::max(most, 2.0 * kBytes * kCopies * static_cast<double>(threads.size()) / seconds);
  }
  return most / 1e9;
}

std::unique_ptr<Place> host_place() {
  return std::make_unique<HostPlace>();
}

}  // namespace lockstep::judging
