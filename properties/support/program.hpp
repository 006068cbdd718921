// The built program as a user runs it: a process with a status and two streams.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::testing_support {

struct ProgramRun {
  int status = -1;  ///< exit status; 128 + the signal's number where one ended it
  std::string out;
  std::string err;
  long peak_kib = 0;  ///< the largest resident set
  double cpu_s = 0;
};

/// `lockstep WORDS…` in the root of the sources.
ProgramRun run_program(const std::vector<std::string>& words);

std::vector<std::string> lines_of(const std::string& text);
std::string read_text(const std::filesystem::path& path);

/// A folder of its own that goes with the test.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  /// Writes the file and gives its path.
  std::string write(const std::string& name, const std::string& content) const;
  /// Names of what lies in the folder, sorted.
  std::vector<std::string> entries() const;

 private:
  std::filesystem::path folder_;
};

}  // namespace lockstep::testing_support
