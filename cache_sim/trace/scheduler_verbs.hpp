// The verbs of a trace of requests (the scheduler level), and the fields that their lines can carry
// (cache_sim/trace/grammar.md, "Scheduler verbs").
#pragma once

#include <span>
#include <string_view>

#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

struct SchedulerVerb {
  std::string_view name;
  std::span<const std::string_view> required;
  std::span<const std::string_view> optional;
  std::span<const ReplyField> answer;

  bool has(std::string_view field) const;
};

std::span<const SchedulerVerb> scheduler_verbs();
/// The verb of that name, which must exist.
const SchedulerVerb& scheduler_verb(std::string_view name);

}  // namespace lockstep::cache_sim
