// lockstep list: the names that words of other commands can be, one a line, the name first.
#include <fmt/format.h>

#include <map>

#include "cache_sim/model/model.hpp"
#include "cache_sim/policies/ideal/ideal_policy.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/help.hpp"
#include "cache_sim/program/output.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/judged.hpp"
#include "reference/base/mark.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::program {
namespace {

void print_all(const std::vector<std::pair<std::string, std::string>>& rows) {
  std::size_t width = 0;
  for (const auto& [name, text] : rows) width = std::max(width, name.size());
  for (const auto& [name, text] : rows) {
    if (text.empty())
      print("{}\n", name);
    else
      print("{:<{}}  {}\n", name, width, text);
  }
}

std::string state_text(const cache_sim::Model& model) {
  return model.state_bytes == 0 ? "none" : fmt::format("{} bytes", model.state_bytes);
}

std::vector<std::pair<std::string, std::string>> rows_of(const std::string& what) {
  std::vector<std::pair<std::string, std::string>> rows;
  const auto add = [&](std::string_view name, std::string_view text) {
    rows.emplace_back(name, text);
  };
  if (what == "policies" || what == "subjects")
    for (const PolicyEntry& policy : Registry<PolicyEntry>::all()) add(policy.name, policy.summary);
  if (what == "subjects") {
    for (const OracleEntry& oracle : Registry<OracleEntry>::all())
      add("oracle:" + std::string(oracle.name),
          "a plain second implementation of " + std::string(oracle.name));
    add("oracle", "the oracle of the first other subject");
    add("exec:COMMAND", "a child process that speaks the subject protocol");
  }
  if (what == "layers") add("label", "the digest and length of the exact token prefix, no numbers");
  if (what == "defects")
    for (const DefectEntry& defect : Registry<DefectEntry>::all())
      add(defect.name, defect.sentence);
  if (what == "operations")
    for (const JudgedOperation& one : Registry<JudgedOperation>::all()) add(one.name, one.summary);
  if (what == "models")
    for (const cache_sim::Model& model : Registry<cache_sim::Model>::all())
      rows.emplace_back(model.name,
                        fmt::format("{}; a token's KV {} bytes, a state {}", model.summary,
                                    model.token_bytes, state_text(model)));
  if (what == "marks")
    for (const MarkEntry& mark : Registry<MarkEntry>::all()) add(mark.name, "");
  if (what == "policies")
    for (const cache_sim::IdealEntry& ideal : Registry<cache_sim::IdealEntry>::all())
      add(ideal.name, ideal.summary);
  if (what == "workloads") {
    for (const auto& one : Registry<cache_sim::GeneratedWorkload>::all())
      rows.emplace_back(one.name, fmt::format("{}: {}", one.summary, one.parameters));
    for (const auto& one : Registry<cache_sim::WorkloadFormat>::all()) add(one.name, one.summary);
  }
  return rows;
}

}  // namespace

void add_list(CLI::App& app, int&) {
  CLI::App* const command =
      app.add_subcommand("list", "names that other commands take, one a line");
  const auto what = std::make_shared<std::string>();
  command->add_option("WHAT", *what, "what to list")
      ->required()
      ->check(CLI::IsMember({"subjects", "policies", "models", "layers", "defects", "marks",
                             "workloads", "operations"}));
  end_help(*command,
           {{kExitPass, "listed"},
            {kExitBadInput, "bad usage"},
            {kExitEnvironment, "the output cannot be written"}},
           {"lockstep list policies"});
  command->callback([what] { print_all(rows_of(*what)); });
}

}  // namespace lockstep::program
