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
#include <string_view>
#include <system_error>
#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/leftovers.hpp"

namespace {

using lockstep::program::end_output;
using lockstep::program::refuse;

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

/// The file of this program; empty where the system does not say.
std::filesystem::path own_file() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error);
}

/// This process becomes the program of the first word. Returns, with errno, where it cannot.
void become(std::vector<std::string> words) {
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
}

/// `nightly`, `server` and `sweep` are modules of the Python package (cache_sim/python).
int become_python(std::vector<std::string> words) {
  if (const std::string self = own_file().string(); !self.empty())
    ::setenv("LOCKSTEP_PROGRAM", self.c_str(), 0);
  words.front().insert(0, "lockstep.");
  words.insert(words.begin(), {"python3", "-c", kRunModule});
  become(std::move(words));
  return refuse({.text = "python3 cannot be started: " + std::generic_category().message(errno),
                 .status = lockstep::kExitEnvironment});
}

/// Whether the words are about kernels, which the program `lockstep-judge` judges: this program and
/// the judge (CMakeLists.txt).
bool are_for_judge(const std::vector<std::string>& words) {
  return words.front() == "judge" ||
         (words.front() == "list" && std::ranges::find(words, "operations") != words.end());
}

/// Whether the words ask for a fidelity that the program `lockstep-torch` alone has.
bool are_for_torch(const std::vector<std::string>& words) {
  for (const std::string_view name : lockstep::cache_sim::kTorchFidelities)
    for (std::size_t i = 0; i < words.size(); ++i)
      if ((words[i] == name && i > 0 && words[i - 1] == "--fidelity") ||
          words[i].ends_with("fidelity=" + std::string(name)))
        return true;
  return false;
}

/// Becomes a program that lies beside this one where it was built. Returns where it was not: the
/// command itself then says so, after its --help and its complaints about words.
void become_sibling(const char* program, std::vector<std::string> words) {
  words.insert(words.begin(), (own_file().parent_path() / program).string());
  become(std::move(words));
}

int run(const std::vector<std::string>& words) {
  if (!words.empty() &&
      (words.front() == "nightly" || words.front() == "server" || words.front() == "sweep"))
    return become_python(words);
  if (!words.empty() && are_for_judge(words) && !lockstep::program::has_judge())
    become_sibling("lockstep-judge", words);
  if (are_for_torch(words) && !lockstep::cache_sim::has_torch())
    become_sibling("lockstep-torch", words);
  // Processes that a subject leaves behind end with this one. `judge` has a reaper of its own.
  std::optional<lockstep::Subreaper> reaper;
  if (words.empty() || words.front() != "judge") reaper.emplace();
  lockstep::program::Command app(
      "Lockstep: replays cache traces against policies, oracles and servers, and names the first "
      "wrong event.",
      "lockstep");
  app.add_version(LOCKSTEP_VERSION);
  app.footer(
      "`lockstep nightly` (the search of every night), `lockstep server` (random requests to a "
      "running server) and\n`lockstep sweep` (one search over many machines) are in Python. "
      "`lockstep COMMAND --help` says more.");
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
  return app.run(words, status);
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
