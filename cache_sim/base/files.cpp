#include "cache_sim/base/files.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "reference/base/finding.hpp"

namespace lockstep::cache_sim {

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

std::string commit() {
  const char* const known = std::getenv("LOCKSTEP_COMMIT");  // the script asks git for it
  return known == nullptr ? "unknown" : known;
}

Result<void> write_file(const std::string& path, const std::string& content) {
  const std::string part = path + ".part";
  {
    std::ofstream file(part, std::ios::binary | std::ios::trunc);
    file << content;
    file.close();
    if (!file) {
      std::remove(part.c_str());
      return fail(path + ": cannot be written", kExitEnvironment);
    }
  }
  if (std::rename(part.c_str(), path.c_str()) != 0) {
    std::remove(part.c_str());
    return fail(path + ": cannot be written", kExitEnvironment);
  }
  return {};
}

}  // namespace lockstep::cache_sim
