// Any bytes as a server's log: refused with a sentence, or judged, and written so that it is read
// again as the same log.
#include "cache_sim/logs/server_log.hpp"
#include "properties/support/memory_file.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const testing_support::MemoryFile file(data, size);
  const auto log = cache_sim::read_log(file.path());
  if (!log) return 0;
  const std::size_t findings = cache_sim::judge_log(*log).findings.size();
  const std::string text = cache_sim::log_text(*log);
  const testing_support::MemoryFile written(reinterpret_cast<const std::uint8_t*>(text.data()),
                                            text.size());
  const auto again = cache_sim::read_log(written.path());
  if (log->empty()) return 0;  // nothing is written of it, and an empty file is no log
  require(again.has_value(), again ? "" : again.error().text);
  require(cache_sim::log_text(*again) == text, "what is written is read as the same");
  require(cache_sim::judge_log(*again).findings.size() == findings, "and judged as the same");
  return 0;
}
