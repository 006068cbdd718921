#include "cache_sim/search/detours.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cache_sim/draw/draw.hpp"
#include "cache_sim/search/swarm.hpp"

namespace lockstep::cache_sim {
namespace {

/// So many configurations show every choice that a search makes in more than one of ten.
constexpr std::uint64_t kDrawn = 64;

/// The features that all subjects accept; nothing where one is no policy and no oracle of one.
std::optional<Accepted> accepted_by_all(const std::vector<std::string>& subjects) {
  std::optional<Accepted> accepted;
  for (std::string_view name : subjects) {
    if (name.starts_with("oracle:")) name.remove_prefix(7);
    const PolicyEntry* const policy = Registry<PolicyEntry>::find(name);
    if (policy == nullptr) return std::nullopt;
    const Accepted own = accepted_by(*policy);
    accepted = accepted ? accepted_by_both(*accepted, own) : own;
  }
  return accepted;
}

bool is_choice(const ConfigOption& option) {
  return !option.number || (option.number->low == 0 && option.number->high == 1);
}

Operation& operation_in(Step& step) {
  return std::get<Operation>(step.statement.what);
}

/// The trace itself, and with each reason to wait.
std::vector<TraceForm> with_reasons(const TraceForm& trace) {
  std::vector<TraceForm> forms = {trace};
  std::vector<Name> seen;
  for (std::size_t line = 0; line < trace.steps.size(); ++line) {
    TraceForm late = trace;
    Operation& admission = operation_in(late.steps[line]);
    if (admission.verb != Verb::admit) continue;
    admission.late = true;
    forms.push_back(late);
    const Name id = admission.id;
    if (std::find(seen.begin(), seen.end(), id) != seen.end()) continue;
    seen.push_back(id);
    TraceForm crowded = trace;
    for (Step& step : crowded.steps)
      if (Operation& other = operation_in(step); other.verb == Verb::admit && other.id == id)
        other.room = crowded.config.kv_tokens;
    forms.push_back(crowded);
  }
  return forms;
}

}  // namespace

FieldValues choices_for(const RunOptions& run) {
  FieldValues choices;
  const std::optional<Accepted> accepted = accepted_by_all(run.subjects);
  if (!accepted) return choices;
  for (std::uint64_t number = 1; number <= kDrawn; ++number) {
    Draw draw(1, number);
    const Config drawn = draw_swarm(draw, *accepted, Config(), {}, SwarmLevel::operations).config;
    for (const ConfigOption& option : Registry<ConfigOption>::all()) {
      const std::string field(option.name);
      if (!is_choice(option) || run.fixed.contains(field)) continue;
      for (const std::string& value : {drawn.text(field), std::string(option.otherwise)})
        if (const std::pair choice(field, value);
            drawn.text(field) != option.otherwise &&
            std::find(choices.begin(), choices.end(), choice) == choices.end())
          choices.push_back(choice);
    }
  }
  return choices;
}

std::vector<TraceForm> detours(const TraceForm& trace, const FieldValues& choices) {
  std::vector<TraceForm> all;
  if (!is_of_operations(trace.steps)) return all;
  const std::vector<TraceForm> reasons = with_reasons(trace);
  all.assign(reasons.begin() + 1, reasons.end());
  for (const auto& [field, value] : choices) {
    if (trace.config.find(field) == value) continue;
    for (TraceForm form : reasons)
      if (form.config.set(field, value)) all.push_back(std::move(form));
  }
  return all;
}

}  // namespace lockstep::cache_sim
