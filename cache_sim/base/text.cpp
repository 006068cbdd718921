#include "cache_sim/base/text.hpp"

#include <fmt/format.h>

namespace lockstep::cache_sim {
namespace {

unsigned byte_at(std::string_view text, std::size_t at) {
  return at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
}

/// The size in bytes of the UTF-8 character that begins at `at`; 0 where no valid one begins (RFC
/// 3629, section 4).
std::size_t character_size(std::string_view text, std::size_t at) {
  const unsigned lead = byte_at(text, at);
  if (lead < 0x80) return 1;
  const std::size_t size = lead < 0xC2   ? 0
                           : lead < 0xE0 ? 2
                           : lead < 0xF0 ? 3
                           : lead < 0xF5 ? 4
                                         : 0;
  for (std::size_t i = 1; i < size; ++i)
    if ((byte_at(text, at + i) & 0xC0u) != 0x80) return 0;
  const unsigned second = byte_at(text, at + 1);
  const bool is_overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool is_no_code_point = (lead == 0xED && second > 0x9F) || (lead == 0xF4 && second > 0x8F);
  return is_overlong || is_no_code_point ? 0 : size;
}

bool is_control(std::string_view text, std::size_t at) {
  const unsigned lead = byte_at(text, at);
  if (lead == 0xC2) return byte_at(text, at + 1) < 0xA0;  // a C1 control character
  return (lead < 0x20 && lead != '\n' && lead != '\t') || lead == 0x7F;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t size = character_size(text, at);
    if (size != 0 && !is_control(text, at)) {
      shown += text.substr(at, size);
      at += size;
      continue;
    }
    for (const std::size_t end = at + (size == 0 ? 1 : size); at < end; ++at)
      shown += fmt::format("\\x{:02x}", byte_at(text, at));
  }
  return shown;
}

}  // namespace lockstep::cache_sim
