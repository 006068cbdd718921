// Text from outside, cut and escaped so that it can be quoted in a message.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace lockstep {

/// The text's first `limit` bytes, where everything but printable ASCII is written as \xNN: no
/// bytes that are no UTF-8 reach a file of JSON, and no escape sequence a terminal.
inline std::string printable(std::string_view text, std::size_t limit = 60) {
  std::string out;
  for (const char c : text.substr(0, limit)) {
    if (c >= ' ' && c <= '~')
      out += c;
    else
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  }
  return text.size() > limit ? out + "…" : out;
}

}  // namespace lockstep
