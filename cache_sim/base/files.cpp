#include "cache_sim/base/files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "reference/base/finding.hpp"
#include "reference/base/leftovers.hpp"

namespace lockstep::cache_sim {

namespace {

tl::unexpected<Error> cannot_write(const std::string& path) {
  const std::string reason = std::generic_category().message(errno);
  return fail(fmt::format("{}: cannot be written: {}", path, reason), kExitEnvironment);
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (is_open()) ::close(number_);
  }
  bool is_open() const { return number_ >= 0; }
  int get() const { return number_; }
  /// Closes the file. False, with errno set, where the file system reports a failed write only now.
  bool close() { return ::close(std::exchange(number_, -1)) == 0; }

 private:
  int number_;
};

bool write_all(int file, std::string_view content) {
  while (!content.empty()) {
    const ssize_t written = ::write(file, content.data(), content.size());
    if (written < 0 && errno != EINTR) return false;
    if (written > 0) content.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

/// The descriptor of standard output or error, where that stream is this very file. A second
/// descriptor of the file has an offset of its own, so it would write over the stream's text.
std::optional<int> standard_stream(const struct stat& file) {
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat open {};
    if (::fstat(stream, &open) == 0 && open.st_dev == file.st_dev && open.st_ino == file.st_ino)
      return stream;
  }
  return std::nullopt;
}

/// The path that symbolic links lead to; its last component need not exist.
Result<std::string> behind_links(std::string path) {
  constexpr int kMostLinks = 40;  // as Linux
  for (int links = 0; links < kMostLinks; ++links) {
    std::error_code none;
    const std::filesystem::path next = std::filesystem::read_symlink(path, none);
    if (none) return path;
    path = (std::filesystem::path(path).parent_path() / next).string();
  }
  errno = ELOOP;
  return cannot_write(path);
}

/// Writes the content to a new file beside `path` and renames it to `path`. `mode` 0: the mode of a
/// new file.
Result<void> replace(const std::string& path, std::string_view content, mode_t mode) {
  static int count = 0;
  // A signal that ends the program meanwhile would leave the .part file behind.
  const SignalsBlocked until_it_is_renamed;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::string part;
  int number = -1;
  do {
    part = (folder / fmt::format(".lockstep-{}-{}.part", ::getpid(), ++count)).string();
    number = ::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (number < 0 && errno == EEXIST);
  Descriptor file(number);
  if (!file.is_open()) return cannot_write(path);
  const bool is_written = write_all(file.get(), content) &&
                          (mode == 0 || ::fchmod(file.get(), mode) == 0) && file.close() &&
                          ::rename(part.c_str(), path.c_str()) == 0;
  if (is_written) return {};
  Result<void> error = cannot_write(path);  // errno is still that of the failure
  ::unlink(part.c_str());
  return error;
}

}  // namespace

std::string today() {
  const char* const epoch = std::getenv("SOURCE_DATE_EPOCH");
  const std::time_t now = epoch != nullptr ? std::strtoll(epoch, nullptr, 10) : std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

std::string commit() {
  const char* const known = std::getenv("LOCKSTEP_COMMIT");  // the lockstep script sets it
  return known == nullptr ? "unknown" : known;
}

Result<void> write_file(const std::string& path, const std::string& content) {
  struct stat there {};
  const bool exists = ::stat(path.c_str(), &there) == 0;
  if (!exists && errno != ENOENT) return cannot_write(path);
  if (const std::optional<int> stream = exists ? standard_stream(there) : std::nullopt) {
    std::fflush(nullptr);  // earlier output comes before this text
    return write_all(*stream, content) ? Result<void>{} : cannot_write(path);
  }
  if (exists && !S_ISREG(there.st_mode)) {
    const Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    return file.is_open() && write_all(file.get(), content) ? Result<void>{} : cannot_write(path);
  }
  const Result<std::string> target = behind_links(path);
  if (!target) return tl::unexpected(target.error());
  return replace(*target, content, exists ? there.st_mode & 07777 : 0);
}

}  // namespace lockstep::cache_sim
