#include "reference/protocol/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {

Result<SchedulerOptions> SchedulerOptions::of(const Config& config) {
  SchedulerOptions options{.chunked_prefill = config.chunked_prefill,
                           .max_running = config.max_running,
                           .overlap = config.overlap != 0,
                           .page = config.page,
                           .graph_batches = config.graphs()};
  std::string_view rest = config.scheduler;
  const auto next = [&] {
    const std::string_view word = rest.substr(0, rest.find(':'));
    rest.remove_prefix(std::min(word.size() + 1, rest.size()));
    return word;
  };
  const std::string_view name = next();
  options.sglang = name == "sglang";
  options.vllm = name == "vllm";
  if (!name.empty() && !options.sglang && !options.vllm)
    return fail(fmt::format("field scheduler: `{}` is neither sglang nor vllm", name));
  constexpr std::string_view kLongPrefill = "long_prefill=";
  while (!rest.empty()) {
    const std::string_view word = next();
    if (options.vllm && word == "priority") {
      options.by_priority = true;
    } else if (options.vllm && word.starts_with(kLongPrefill)) {
      const Result<std::int64_t> tokens =
          parse_integer(word.substr(kLongPrefill.size()), 0, std::int64_t{1} << 30);
      if (!tokens) return fail("field scheduler: long_prefill: " + tokens.error().text);
      options.long_prefill = *tokens;
    } else {
      return fail(fmt::format("field scheduler: {} has no option `{}`", name, word));
    }
  }
  return options;
}

void SchedulerEpisode::begin(const SchedulerEvent& with) {
  event = with;
  asked.clear();
  notes.clear();
  forward.reset();
  idle = false;
}

void SchedulerEpisode::add(const SchedulerEffects& effects) {
  notes.insert(notes.end(), effects.notes.begin(), effects.notes.end());
  if (effects.forward) forward = effects.forward;
  idle = idle || effects.idle;
}

}  // namespace lockstep
