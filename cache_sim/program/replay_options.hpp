// The options of `lockstep replay`, for the command and for the `# run:` lines of traces.
#pragma once

#include <string>
#include <vector>

#include "cache_sim/program/annotations.hpp"
#include "cache_sim/replay/replay.hpp"

namespace lockstep::program {

class Command;
class Option;

struct ReplayOptions {
  std::vector<std::string> files;
  cache_sim::ReplayRequest request;  ///< without the file
  std::string check = "all";
  std::string timeout = "10s";
  std::string json_path;
  std::string timeline_path;
  std::string html_path;
  std::string decisions_path;
  AnnotationOptions annotations;
  bool run_lines = false;
  bool allow_exec = false;

  void add_to(Command& command);
  /// One request for each file; the error says what is wrong with the options.
  Result<std::vector<cache_sim::ReplayRequest>> requests() const;
};

/// The time that `--timeout` names, at least a millisecond. The error names the option.
Result<std::chrono::milliseconds> read_timeout(const std::string& text);
/// The level that `--check` names.
cache_sim::CheckLevel check_level(const std::string& word);
void add_fidelity(Command& command, std::string& word);
Option* add_check(Command& command, std::string& word);

/// Parses the words of a `# run:` line after `lockstep replay`, as on the command line. A trace can
/// come from anybody, so a line that starts a program (exec:COMMAND) is an error that names the
/// option --allow-exec, unless that option is given.
cache_sim::ReadRunLine run_line_reader(bool allow_exec);
void add_allow_exec(Command& command, bool& allow_exec);

}  // namespace lockstep::program
