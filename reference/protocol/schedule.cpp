#include "reference/protocol/schedule.hpp"

namespace lockstep {

SchedulerOptions SchedulerOptions::of(const Config& config) {
  return {.chunked_prefill = config.chunked_prefill,
          .max_running = config.max_running,
          .overlap = config.overlap != 0,
          .page = config.page,
          .graph_batches = config.graphs()};
}

std::string_view scheduler_name(const Config& config) {
  const std::string_view text = config.scheduler;
  return text.empty() ? kPlainScheduler : text.substr(0, text.find(':'));
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
