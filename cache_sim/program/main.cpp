// lockstep: replays traces against cache policies, their oracles and real servers, and compares
// policies on workloads
// (reference/contract.md).
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/leftovers.hpp"

namespace {

using lockstep::program::end_output;
using lockstep::program::refuse;

const CLI::App* subcommand_of(const CLI::App& app, const std::string& name) {
  for (const CLI::App* const command : app.get_subcommands({}))
    if (command->get_name() == name) return command;
  return nullptr;
}

/// One sentence about words that cannot be understood.
std::string usage_sentence(const CLI::App& app, const CLI::ParseError& error,
                           const std::vector<std::string>& words) {
  const std::string all = "; `lockstep --help` shows all";
  if (words.empty()) return "no command is named" + all;
  const CLI::App* const command = subcommand_of(app, words.front());
  if (command == nullptr) {
    const bool is_option = words.front().starts_with("-");
    return "`" + words.front() + (is_option ? "` is no option" : "` is no command") + all;
  }
  const std::string name = "lockstep " + words.front();
  const std::string help = "; `" + name + " --help` shows its words";
  if (const std::vector<std::string> extras = command->remaining();
      dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !extras.empty()) {
    const auto option = std::find_if(extras.begin(), extras.end(),
                                     [](const std::string& word) { return word.starts_with("-"); });
    return name + " does not know `" + (option == extras.end() ? extras.front() : *option) + "`" +
           help;
  }
  std::string what = error.what();
  what.resize(std::min(what.find('\n'), what.size()));
  return name + ": " + what + help;
}

/// `nightly` and `server` are modules of the Python package (cache_sim/python): this process
/// becomes them. Returns where there is no python3.
int become_python(std::vector<std::string> words) {
  std::error_code error;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe", error).string();
  if (!error) ::setenv("LOCKSTEP_PROGRAM", self.c_str(), 0);
  words.front().insert(0, "lockstep.");
  words.insert(words.begin(), {"python3", "-m"});
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  return refuse({.text = "python3 cannot be started: " + std::generic_category().message(errno),
                 .status = lockstep::kExitEnvironment});
}

int run(const std::vector<std::string>& words) {
  if (!words.empty() && (words.front() == "nightly" || words.front() == "server"))
    return become_python(words);
  CLI::App app{
      "Lockstep: replays cache traces against policies, oracles and servers, and names the first "
      "wrong event.",
      "lockstep"};
  app.set_version_flag("--version", LOCKSTEP_VERSION);
  app.require_subcommand(1);
  app.footer(
      "`lockstep nightly` (the search of every night) and `lockstep server` (random requests to a "
      "running server)\nare in Python. `lockstep COMMAND --help` says more.");
  int status = lockstep::kExitPass;
  lockstep::program::add_replay(app, status);
  lockstep::program::add_compare(app, status);
  lockstep::program::add_check_log(app, status);
  lockstep::program::add_judge(app, status);
  lockstep::program::add_report(app, status);
  lockstep::program::add_list(app, status);
  lockstep::program::add_explore(app, status);
  lockstep::program::add_shrink(app, status);
  lockstep::program::add_completion(app, status);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return refuse({.text = usage_sentence(app, error, words)});
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  lockstep::program::hold_closed_streams();
  lockstep::clean_up_on_signals();
  try {
    return end_output(run({argv + std::min(argc, 1), argv + argc}));
  } catch (const std::exception& error) {
    return refuse({.text = error.what(), .status = lockstep::kExitEnvironment});
  } catch (...) {
    std::fputs("lockstep: stopped by something that is no error\n", stderr);
  }
  return lockstep::kExitEnvironment;
}
