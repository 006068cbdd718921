#include "properties/support/program.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "reference/base/require.hpp"

namespace lockstep::testing_support {
namespace {

/// Everything in a file that another process wrote through the same description.
std::string drain(std::FILE* file) {
  std::rewind(file);
  std::string text;
  char buffer[4096];
  while (const std::size_t size = std::fread(buffer, 1, sizeof buffer, file))
    text.append(buffer, size);
  std::fclose(file);
  return text;
}

/// Without lines as `lockstep: replay FILE: 12 operations, 30 s`: they depend on how busy the
/// machine is, and properties/cache_sim/program/terminal_check.py looks at them.
std::string without_progress(const std::string& text) {
  std::string rest;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    const std::string line = text.substr(begin, end - begin);
    const std::size_t seconds = line.find_last_not_of("0123456789", line.size() - 4);
    const bool is_progress = line.starts_with("lockstep: ") && line.ends_with(" s\n") &&
                             seconds != line.size() - 4 && line[seconds] == ' ';
    if (!is_progress) rest += line;
    begin = end;
  }
  return rest;
}

}  // namespace

ProgramRun run_program(const std::vector<std::string>& words) {
  // Files, not pipes: the program never waits for its reader.
  std::FILE* const out = std::tmpfile();
  std::FILE* const err = std::tmpfile();
  require(out != nullptr && err != nullptr, "a test can make temporary files");
  const char* const other = std::getenv("LOCKSTEP_PROGRAM");  // one with mutants
  std::string program = other != nullptr ? other : LOCKSTEP_PROGRAM;
  std::vector<std::string> copies = words;
  std::vector<char*> arguments{program.data()};
  for (std::string& word : copies) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t child = ::fork();
  require(child >= 0, "a test can start a process");
  if (child == 0) {
    const int null = ::open("/dev/null", O_RDONLY);
    const bool ready = ::chdir(LOCKSTEP_SOURCE_DIR) == 0 && ::dup2(null, 0) == 0 &&
                       ::dup2(::fileno(out), 1) == 1 && ::dup2(::fileno(err), 2) == 2;
    if (ready) ::execv(program.c_str(), arguments.data());
    ::_exit(127);
  }
  ProgramRun run;
  int status = 0;
  rusage usage{};
  require(::wait4(child, &status, 0, &usage) == child, "a child is waited for once");
  run.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  run.peak_kib = usage.ru_maxrss;
  for (const timeval& part : {usage.ru_utime, usage.ru_stime})
    run.cpu_s += static_cast<double>(part.tv_sec) + static_cast<double>(part.tv_usec) * 1e-6;
  run.out = drain(out);
  run.err = without_progress(drain(err));
  return run;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

ScratchFolder::ScratchFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
  require(::mkdtemp(name.data()) != nullptr, "a test can make a temporary folder");
  folder_ = name;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string ScratchFolder::write(const std::string& name, const std::string& content) const {
  std::ofstream(folder_ / name, std::ios::binary) << content;
  return path(name);
}

std::vector<std::string> ScratchFolder::entries() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

}  // namespace lockstep::testing_support
