// The words of `lockstep replay`, for the command itself and for the `# run:` lines of traces.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cache_sim/replay/replay.hpp"

namespace lockstep::program {

struct ReplayOptions {
  std::vector<std::string> files;
  cache_sim::ReplayRequest request;  ///< without its file
  std::string check = "all";
  std::string timeout = "10s";
  std::string json_path;
  std::string timeline_path;
  std::string decisions_path;

  void add_to(CLI::App& command);
  /// One request per file, or what is wrong with the words.
  Result<std::vector<cache_sim::ReplayRequest>> requests() const;
};

/// The words of a `# run:` line behind `lockstep replay`: they mean what they mean on the command
/// line.
Result<std::vector<cache_sim::ReplayRequest>> read_run_line(std::vector<std::string> words);

}  // namespace lockstep::program
