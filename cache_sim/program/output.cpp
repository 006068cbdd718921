#include "cache_sim/program/output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "cache_sim/base/text.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/progress.hpp"

namespace lockstep::program {
namespace {

/// The error number of standard output's first failed write; 0 if there is none.
int output_error = 0;
bool quiet = false;

/// Writes a text that is safe for a terminal.
void write_out(const std::string& shown) {
  hide_progress();
  errno = 0;
  if (std::fwrite(shown.data(), 1, shown.size(), stdout) != shown.size() && output_error == 0)
    output_error = errno;
}

/// Whether both paths name one file, so that one output would overwrite the other.
bool is_same_file(const std::string& one, const std::string& other) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::exists(one, error))
    return fs::equivalent(one, other, error) && fs::is_regular_file(one, error);
  return fs::absolute(one, error).lexically_normal() ==
         fs::absolute(other, error).lexically_normal();
}

bool has_colours() {
  const auto is_set = [](const char* name) {
    const char* const value = std::getenv(name);
    return value != nullptr && *value != '\0';
  };
  return is_terminal(STDOUT_FILENO) && !is_set("NO_COLOR") && is_set("TERM");
}

}  // namespace

bool is_terminal(int stream) {
  const char* const term = std::getenv("TERM");
  return ::isatty(stream) != 0 && term != nullptr && std::string_view(term) != "dumb";
}

void print_text(const std::string& text) {
  write_out(cache_sim::printable(text));
}

void print_red(std::string_view text) {
  const std::string shown = cache_sim::printable(std::string(text));
  write_out(has_colours() ? "\033[1;31m" + shown + "\033[0m" : shown);
}

void add_quiet(Command& command) {
  command.add_flag("-q,--quiet", quiet, "no progress, and of the output the findings alone");
}

bool is_quiet() {
  return quiet;
}

Result<void> expect_apart(const std::vector<std::string>& read,
                          const std::vector<std::string>& written) {
  for (std::size_t i = 0; i < written.size(); ++i) {
    if (written[i].empty()) continue;
    for (const std::string& input : read)
      if (is_same_file(written[i], input))
        return fail(written[i] + ": is read here, and would be overwritten");
    for (std::size_t j = 0; j < i; ++j)
      if (!written[j].empty() && is_same_file(written[i], written[j]))
        return fail(written[i] + ": two options write this file");
  }
  return {};
}

int refuse(const Error& error) {
  hide_progress();
  std::fprintf(stderr, "lockstep: %s\n", cache_sim::printable(error.text).c_str());
  return error.status;
}

void hold_closed_streams() {
  // The stream is opened for the wrong direction, so that its use fails as it would while closed.
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
