#include "cache_sim/program/output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "cache_sim/base/text.hpp"

namespace lockstep::program {
namespace {

/// Why standard output took no more; 0 while it does.
int output_error = 0;

}  // namespace

void print_text(const std::string& text) {
  const std::string shown = cache_sim::printable(text);
  errno = 0;
  if (std::fwrite(shown.data(), 1, shown.size(), stdout) != shown.size() && output_error == 0)
    output_error = errno;
}

int refuse(const Error& error) {
  std::fprintf(stderr, "lockstep: %s\n", cache_sim::printable(error.text).c_str());
  return error.status;
}

void hold_closed_streams() {
  // Opened the wrong way round, so that using it fails as it would have done while closed.
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) == -1 && errno == EBADF)
      (void)::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int end_output(int status) {
  errno = 0;
  if (std::fflush(stdout) != 0 && output_error == 0) output_error = errno;
  if (output_error == 0 && std::ferror(stdout) == 0) return status;
  const std::string why =
      output_error == 0 ? "" : ": " + std::generic_category().message(output_error);
  refuse({.text = "the output cannot be written" + why});
  return status == kExitPass ? kExitEnvironment : status;
}

}  // namespace lockstep::program
