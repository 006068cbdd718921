#include "cache_sim/program/help.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>

#include "reference/base/finding.hpp"

namespace lockstep::program {

std::vector<StatusHelp> statuses_of_runs() {
  return {
      {kExitPass, "nothing found"},
      {kExitBadInput, "bad usage or bad input; nothing is written"},
      {kExitEnvironment, "the environment: a child that cannot start, a full disk"},
      {kExitInvariant, "a broken invariant or label"},
      {kExitDiffers, "replies, answers or outputs differ"},
      {kExitLiveness, "something never ends"},
      {kExitNondeterministic, "two runs of the same trace differ"},
  };
}

CLI::Validator number_from(double least) {
  const auto refusal = [least](const std::string& text) {
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    const bool is_number = !text.empty() && *end == '\0' && std::isfinite(number);
    return is_number && number >= least
               ? ""
               : fmt::format("`{}` is not a number from {} on", text, least);
  };
  return {refusal, ""};
}

CLI::Validator whole_number() {
  const auto refusal = [](const std::string& text) {
    const bool is_one = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
    return is_one ? "" : fmt::format("`{}` is not a whole number", text);
  };
  return {refusal, ""};
}

void end_help(CLI::App& command, const std::vector<StatusHelp>& statuses, const Example& example) {
  std::string text = "Exit status:\n";
  for (const StatusHelp& one : statuses)
    text += fmt::format("  {:<4} {}\n", one.status, one.meaning);
  text += example.status == kExitPass
              ? "\nExample:\n"
              : fmt::format("\nExample (it ends with {}):\n", example.status);
  command.footer(text + "  " + example.command);
}

}  // namespace lockstep::program
