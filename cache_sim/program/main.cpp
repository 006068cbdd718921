// lockstep: replays traces against cache policies, their oracles and real servers
// (reference/contract.md).
#include <exception>
#include <iostream>

#include "cache_sim/program/commands.hpp"
#include "reference/base/finding.hpp"

int main(int argc, char** argv) {
  CLI::App app{
      "Lockstep: replays cache traces against policies, oracles and servers, and names the first "
      "wrong event.",
      "lockstep"};
  app.set_version_flag("--version", LOCKSTEP_VERSION);
  app.require_subcommand(1);
  int status = lockstep::kExitPass;
  lockstep::program::add_replay(app, status);
  lockstep::program::add_report(app, status);
  lockstep::program::add_list(app, status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? lockstep::kExitPass : lockstep::kExitBadInput;
  } catch (const std::exception& error) {
    std::cerr << "lockstep: " << error.what() << '\n';
    return lockstep::kExitEnvironment;
  }
  return status;
}
