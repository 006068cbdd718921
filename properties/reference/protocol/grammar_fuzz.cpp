// Any bytes as a trace: refused with a sentence, or read and written so that they are read again as
// the same trace.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cache_sim/trace/trace_writer.hpp"
#include "reference/base/require.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Result<cache_sim::Trace> trace = cache_sim::parse_trace(text, "fuzz");
  if (!trace) {
    require(trace.error().text.starts_with("fuzz"), "an error names the file");
    return 0;
  }
  const std::string written = cache_sim::trace_text(*trace);
  const Result<cache_sim::Trace> again = cache_sim::parse_trace(written, "again");
  require(again.has_value(), again ? "" : again.error().text);
  require(cache_sim::trace_text(*again) == written, "what is written is read as the same");
  return 0;
}
