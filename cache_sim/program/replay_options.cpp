#include "cache_sim/program/replay_options.hpp"

#include <algorithm>

namespace lockstep::program {

void ReplayOptions::add_to(CLI::App& command) {
  command
      .add_option("FILE", files,
                  "trace files, workload files, or workloads by name (lockstep list workloads)")
      ->required();
  command
      .add_option(
          "--subject", request.subjects,
          "a policy, oracle:POLICY, oracle, or exec:COMMAND; several are compared reply by reply")
      ->take_all()
      ->allow_extra_args(false);
  command.add_option("--fidelity", request.fidelity, "what state is: label")->capture_default_str();
  command.add_option("--check", check, "off, labels or all")
      ->check(CLI::IsMember({"off", "labels", "all"}))
      ->capture_default_str();
  command.add_option("--defect", request.defect, "plant a defect (lockstep list defects)");
  command.add_option("--config", request.config, "config fields over the file's own: key=value,…");
  command.add_option("--model", request.model,
                     "a step takes what it costs this model; without it, the config's step_time");
  command.add_option("--timeout", timeout, "how long a child may take for one answer")
      ->capture_default_str();
  command.add_option("--json", json_path, "write the run's data to this file");
  command.add_option("--timeline", timeline_path, "write a Chrome trace of the run to this file");
  command.add_option("--decisions", decisions_path, "write a line per admission to this file");
}

Result<std::vector<cache_sim::ReplayRequest>> ReplayOptions::requests() const {
  const Result<Nanoseconds> limit = parse_time(timeout);
  if (!limit) return fail("--timeout: " + limit.error().text);
  std::vector<cache_sim::ReplayRequest> all;
  for (const std::string& file : files) {
    cache_sim::ReplayRequest one = request;
    one.file = file;
    one.timeout = std::chrono::milliseconds(std::max<Nanoseconds>(*limit / 1'000'000, 1));
    one.check = check == "off"      ? cache_sim::CheckLevel::off
                : check == "labels" ? cache_sim::CheckLevel::labels
                                    : cache_sim::CheckLevel::all;
    all.push_back(std::move(one));
  }
  return all;
}

Result<std::vector<cache_sim::ReplayRequest>> read_run_line(std::vector<std::string> words) {
  CLI::App parser("lockstep replay");
  ReplayOptions options;
  options.add_to(parser);
  std::reverse(words.begin(), words.end());  // CLI11 takes words from the back
  try {
    parser.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    return fail(error.what());
  }
  return options.requests();
}

}  // namespace lockstep::program
