#include "cache_sim/base/input.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <string_view>
#include <system_error>

namespace lockstep::cache_sim {
namespace {

std::string reason() {
  return std::generic_category().message(errno);
}

}  // namespace

Result<std::ifstream> open_input(const std::string& path) {
  // A pipe is not opened: opening it would wait until somebody writes into it.
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    return fail(fmt::format("{}: cannot be read: {}", path, reason()));
  if (S_ISDIR(status.st_mode)) return fail(path + ": is a folder, not a file");
  if (!S_ISREG(status.st_mode))
    return fail(path + ": is a pipe or a device; save what it gives in a file and name that");
  std::ifstream file(path, std::ios::binary);
  if (!file) return fail(fmt::format("{}: cannot be read: {}", path, reason()));
  char head[3] = {};
  file.read(head, sizeof head);
  const std::string_view begin(head, static_cast<std::size_t>(file.gcount()));
  if (begin.starts_with("\x1F\x8B"))
    return fail(path + ": is compressed with gzip; unpack it, or compress it with zstd");
  if (begin.starts_with("\xEF\xBB\xBF") || begin.starts_with("\xFF\xFE") ||
      begin.starts_with("\xFE\xFF"))
    return fail(path + ": begins with a byte order mark; save it as UTF-8 without one");
  file.clear();
  file.seekg(0);
  return file;
}

}  // namespace lockstep::cache_sim
