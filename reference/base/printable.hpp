// Cuts and escapes text from outside, so that a message can quote it.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace lockstep {

/// The text's first `limit` bytes, with all but printable ASCII written as \xNN: no invalid UTF-8
/// reaches a JSON file, and no escape sequence a terminal.
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
