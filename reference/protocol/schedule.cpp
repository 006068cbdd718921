#include "reference/protocol/schedule.hpp"

namespace lockstep {

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
