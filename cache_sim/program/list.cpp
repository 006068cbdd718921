// lockstep list: prints the names that other commands accept, one a line, the name first.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/model/model.hpp"
#include "cache_sim/policies/ideal/ideal_policy.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/judged.hpp"
#include "reference/base/mark.hpp"
#include "reference/protocol/subject.hpp"
#include "reference/protocol/vocabulary.hpp"

namespace lockstep::program {
namespace {

using nlohmann::ordered_json;

std::string verbs_json() {
  std::vector<ordered_json> verbs, words;
  for (std::size_t i = 0; i < kVerbCount; ++i) {
    const auto verb = static_cast<Verb>(i);
    ordered_json fields = ordered_json::array(), answer = ordered_json::array();
    for (const FieldName& field : fields_of(verb))
      fields.push_back({{"name", field.name},
                        {"kind", field.kind},
                        {"required", field.required},
                        {"needs", to_string(field.needs)}});
    for (const FieldName& field : answer_fields_of(verb))
      answer.push_back({{"name", field.name}, {"required", field.required}});
    verbs.push_back({{"name", to_string(verb)},
                     {"needs", to_string(capability_of(verb))},
                     {"fields", fields},
                     {"answer", answer}});
  }
  for (const CapabilityWord& word : kCapabilityWords) {
    ordered_json means = ordered_json::array();
    for (std::size_t i = 0; i < kCapabilityCount; ++i)
      if (const auto one = static_cast<Capability>(i); word.means.contains(one))
        means.push_back(to_string(one));
    words.push_back({{"field", word.field}, {"word", word.word}, {"means", means}});
  }
  const auto lines = [](const std::vector<ordered_json>& rows) {
    std::string text;
    for (const ordered_json& row : rows) text += (text.empty() ? "\n  " : ",\n  ") + row.dump();
    return text;
  };
  return fmt::format("{{\n \"verbs\": [{}\n ],\n \"words\": [{}\n ]\n}}", lines(verbs),
                     lines(words));
}

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
  if (what == "layers")
    for (const cache_sim::FidelityEntry& one : Registry<cache_sim::FidelityEntry>::all())
      add(one.name, one.sentence);
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
  if (what == "verbs")
    for (std::size_t i = 0; i < kVerbCount; ++i) {
      const auto verb = static_cast<Verb>(i);
      std::string fields;
      for (const FieldName& field : fields_of(verb))
        fields += fmt::format("{}{}{}=", fields.empty() ? "" : " ", field.required ? "" : "?",
                              field.name);
      add(to_string(verb), fields);
    }
  if (what == "config")
    for (const auto& [name, value] : Config().fields()) add(name, value);
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

void add_list(Command& app, int& status) {
  Command* const command = app.add_subcommand("list", "names that other commands take, one a line");
  const auto what = std::make_shared<std::string>();
  command->add_option("WHAT", *what, "what to list")
      ->required()
      ->one_of({"subjects", "policies", "models", "layers", "defects", "marks", "workloads",
                "operations", "verbs", "config"});
  const auto json = std::make_shared<bool>();
  command->add_flag("--json", *json,
                    "as JSON: an array of {name, text}; of verbs, their fields and answers");
  end_help(*command,
           {{kExitPass, "listed"},
            {kExitBadInput, "bad usage"},
            {kExitEnvironment,
             "the output cannot be written; of operations: lockstep-judge is not there"}},
           {"lockstep list policies"});
  command->callback([what, json, &status] {
    if (*what == "operations" && !has_judge()) {
      status = refuse(no_judge());
      return;
    }
    if (!*json) return print_all(rows_of(*what));
    ordered_json document = ordered_json::array();
    for (const auto& [name, text] : rows_of(*what)) {
      document.push_back({{"name", name}, {"text", text}});
      if (*what != "config") continue;
      for (const std::string& needed : needs_of(name)) document.back()["needs"].push_back(needed);
      if (const auto* const option = Registry<ConfigOption>::find(name))
        for (const std::string& other : option->overruled_by)
          document.back()["overruled_by"].push_back(other);
    }
    print("{}\n", *what == "verbs" ? verbs_json() : document.dump(1));
  });
}

}  // namespace lockstep::program
