#include "cache_sim/trace/scheduler_verbs.hpp"

#include <algorithm>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::string_view kId[] = {"id"};
constexpr std::string_view kSession[] = {"session"};
constexpr std::string_view kRequest[] = {"id", "tokens", "output"};
constexpr std::string_view kRequestOptional[] = {
    "at",       "accept",  "drafts", "speculate", "lora",     "branches", "overrun",
    "priority", "session", "salt",   "rank",      "external", "images"};
constexpr std::string_view kAbortOptional[] = {"at", "during"};
constexpr std::string_view kRetractOptional[] = {"at"};
constexpr std::string_view kRunOptional[] = {"until", "steps"};
constexpr ReplyField kRunAnswer[] = {ReplyField::finished, ReplyField::violations,
                                     ReplyField::time};
constexpr ReplyField kExpectAnswer[] = {ReplyField::cached, ReplyField::output_tokens,
                                        ReplyField::finish};

constexpr SchedulerVerb kVerbs[] = {
    {"request", kRequest, kRequestOptional, {}}, {"abort", kId, kAbortOptional, {}},
    {"retract", kId, kRetractOptional, {}},      {"close", kSession, {}, {}},
    {"run", {}, kRunOptional, kRunAnswer},       {"expect", kId, {}, kExpectAnswer},
};

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

bool SchedulerVerb::has(std::string_view field) const {
  return contains(required, field) || contains(optional, field);
}

std::span<const SchedulerVerb> scheduler_verbs() {
  return kVerbs;
}

const SchedulerVerb& scheduler_verb(std::string_view name) {
  const auto* const found = std::ranges::find(kVerbs, name, &SchedulerVerb::name);
  require(found != std::end(kVerbs), "a scheduler's verb is one of the table");
  return *found;
}

}  // namespace lockstep::cache_sim
