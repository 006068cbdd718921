// Any bytes as a child's answer: garbage, or a reply that is printed as it was read.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "reference/base/require.hpp"
#include "reference/protocol/operation.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  if (size == 0) return 0;
  const auto verb = static_cast<Verb>(data[0] % kVerbCount);
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const Result<Reply> reply = parse_reply(text, verb);
  if (!reply) return 0;
  const Result<Reply> again = parse_reply(reply->text(), verb);
  require(again.has_value() && *again == *reply, "a reply is read as it is printed");
  return 0;
}
