// lockstep: replays traces against cache policies, their oracles and real servers, and compares
// policies on workloads
// (reference/contract.md).
#include <cstdio>
#include <exception>

#include "cache_sim/program/commands.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/leftovers.hpp"

namespace {

int run(int argc, char** argv) {
  CLI::App app{
      "Lockstep: replays cache traces against policies, oracles and servers, and names the first "
      "wrong event.",
      "lockstep"};
  app.set_version_flag("--version", LOCKSTEP_VERSION);
  app.require_subcommand(1);
  int status = lockstep::kExitPass;
  lockstep::program::add_replay(app, status);
  lockstep::program::add_compare(app, status);
  lockstep::program::add_check_log(app, status);
  lockstep::program::add_judge(app, status);
  lockstep::program::add_report(app, status);
  lockstep::program::add_list(app, status);
  lockstep::program::add_explore(app, status);
  lockstep::program::add_shrink(app, status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? lockstep::kExitPass : lockstep::kExitBadInput;
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  lockstep::clean_up_on_signals();
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lockstep: %s\n", error.what());
  } catch (...) {
    std::fputs("lockstep: stopped by something that is no error\n", stderr);
  }
  return lockstep::kExitEnvironment;
}
