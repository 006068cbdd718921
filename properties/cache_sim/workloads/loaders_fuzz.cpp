// Any bytes as a workload's file, plain or compressed, of any format (the content tells): refused
// with a sentence, or requests with tokens.
#include "cache_sim/workloads/workload.hpp"
#include "properties/support/memory_file.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  constexpr std::int64_t kMostRequests = 100;
  const testing_support::MemoryFile file(data, size);
  cache_sim::OpenedStream stream = cache_sim::open_workload(file.path(), kMostRequests);
  if (!stream) return 0;
  for (RequestSpec spec;;) {
    const Result<bool> more = (*stream)->next(spec);
    if (!more || !*more) return 0;
    require(spec.prompt_size <= spec.tokens.size(), "a prompt is part of its request's tokens");
  }
}
