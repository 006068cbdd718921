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
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/leftovers.hpp"
#include "reference/protocol/near_word.hpp"

namespace {

using lockstep::program::end_output;
using lockstep::program::refuse;

const CLI::App* subcommand_of(const CLI::App& app, const std::string& name) {
  for (const CLI::App* const command : app.get_subcommands({}))
    if (command->get_name() == name) return command;
  return nullptr;
}

/// `text` up to `word`, and what stands after it. False where it does not stand there.
bool cut_at(const std::string& text, const std::string& word, std::string& before,
            std::string& after) {
  const std::size_t at = text.find(word);
  if (at == std::string::npos) return false;
  before = text.substr(0, at);
  after = text.substr(at + word.size());
  return true;
}

/// Four sentences of CLI11 (2.1) in this program's words; the others as they are.
std::string in_our_words(const std::string& what) {
  std::string before, after;
  if (cut_at(what, " not in {", before, after)) {  // --check: label not in {off,labels,all}
    std::string name, value, list;
    if (!cut_at(before, ": ", name, value)) return what;
    for (const char c : after.substr(0, after.find('}'))) list += c == ',' ? ", " : std::string{c};
    return name + ": `" + value + "` is none of " + list;
  }
  if (cut_at(what, "Could not convert: ", before, after)) {  // Could not convert: --seed = x
    std::string name, value;
    if (cut_at(after, " = ", name, value)) return name + ": `" + value + "` is not a whole number";
  }
  if (cut_at(what, ": Value ", before, after)) {  // --limit: Value 0 not in range 0.000000 to 1797…
    std::string value, range;
    if (cut_at(after, " not in range ", value, range))
      return before + ": `" + value + "` is not a positive number";
  }
  if (cut_at(what, ": 1 required ", before, after)) return before + " needs a value";
  return what;
}

/// One sentence about words that cannot be understood.
std::string usage_sentence(const CLI::App& app, const CLI::ParseError& error,
                           const std::vector<std::string>& words) {
  const std::string all = "; `lockstep --help` shows all";
  if (words.empty()) return "no command is named" + all;
  const CLI::App* const command = subcommand_of(app, words.front());
  if (command == nullptr) {
    const bool is_option = words.front().starts_with("-");
    std::vector<std::string> known = {"nightly", "server"};
    for (const CLI::App* const one : app.get_subcommands({})) known.push_back(one->get_name());
    return std::string("there is no ") + (is_option ? "option" : "command") + " `" + words.front() +
           "`" + lockstep::but_near(words.front(), {known.begin(), known.end()}) + all;
  }
  const std::string name = "lockstep " + words.front();
  const std::string help = "; `" + name + " --help` shows its words";
  if (const std::vector<std::string> extras = command->remaining();
      dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !extras.empty()) {
    const auto option = std::find_if(extras.begin(), extras.end(),
                                     [](const std::string& word) { return word.starts_with("-"); });
    if (option == extras.end())
      return name + " takes no further word `" + extras.front() + "`" + help;
    std::vector<std::string> known;
    for (const CLI::Option* const one : command->get_options())
      for (const std::string& long_name : one->get_lnames()) known.push_back("--" + long_name);
    const std::string typed = option->substr(0, option->find('='));
    return name + " has no option `" + *option + "`" +
           lockstep::but_near(typed, {known.begin(), known.end()}) + help;
  }
  std::string what = error.what();
  what.resize(std::min(what.find('\n'), what.size()));
  return name + ": " + in_our_words(what) + help;
}

// Given to python3 with the name of a module and its words.
constexpr const char* kRunModule = R"(
import importlib.util, runpy, sys
name = sys.argv.pop(1)
if importlib.util.find_spec("lockstep") is None:
    print(f"lockstep: `{name.split('.')[1]}` is in Python, and python3 finds no package "
          "`lockstep`: `pip install .` in a checkout brings it", file=sys.stderr)
    sys.exit(3)
runpy.run_module(name, run_name="__main__", alter_sys=True)
)";

/// `nightly` and `server` are modules of the Python package (cache_sim/python): this process
/// becomes them. Returns where there is no python3.
int become_python(std::vector<std::string> words) {
  std::error_code error;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe", error).string();
  if (!error) ::setenv("LOCKSTEP_PROGRAM", self.c_str(), 0);
  words.front().insert(0, "lockstep.");
  words.insert(words.begin(), {"python3", "-c", kRunModule});
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
  // Processes that a subject leaves behind end with this one. `judge` has a reaper of its own.
  std::optional<lockstep::Subreaper> reaper;
  if (words.empty() || words.front() != "judge") reaper.emplace();
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
