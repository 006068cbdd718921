#include "cache_sim/search/operation_player.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

#include "cache_sim/model/pool_layout.hpp"

namespace lockstep::cache_sim {
namespace {

/// The policies of the subjects; the policy of an oracle is the one that it judges.
std::vector<const PolicyEntry*> policies_of(const std::vector<std::string>& subjects) {
  std::vector<const PolicyEntry*> policies;
  for (std::string_view name : subjects) {
    if (name.starts_with("oracle:")) name.remove_prefix(7);
    const PolicyEntry* const policy = Registry<PolicyEntry>::find(name);
    if (policy != nullptr) policies.push_back(policy);
  }
  return policies;
}

/// Whether all subjects are children. Then no subject can tell bad input, because a child need not.
bool all_are_children(const std::vector<std::string>& subjects) {
  return std::ranges::all_of(subjects,
                             [](std::string_view name) { return name.starts_with("exec:"); });
}

}  // namespace

LegalityModel model_for(const RunOptions& options) {
  const std::vector<const PolicyEntry*> policies = policies_of(options.subjects);
  LegalityModel model(
      options.config.page,
      std::ranges::all_of(
          policies, [](const PolicyEntry* policy) { return policy->counts_locks_on_tombstones; }),
      std::ranges::any_of(policies, [](const PolicyEntry* policy) {
        return policy->capabilities.contains(Capability::slots);
      }));
  if (std::ranges::any_of(policies, [](const PolicyEntry* policy) {
        return policy->capabilities.contains(Capability::disaggregation);
      }))
    model.expect_moves();
  if (std::ranges::any_of(policies,
                          [](const PolicyEntry* policy) { return has_blocks(*policy); })) {
    model.expect_cut_chunks();
    if (options.config.overlap != 0 && options.config.drafts > 0) model.expect_results_to_tell();
  }
  return model;
}

OperationPlayer::OperationPlayer(ReplaySession& run)
    : run_(run),
      all_are_children_(all_are_children(run.options().subjects)),
      model_(model_for(run.options())) {}

const Reply* OperationPlayer::play(Step step) {
  auto* const operation = std::get_if<Operation>(&step.statement.what);
  if (operation == nullptr || !model_.adapt(step)) return nullptr;
  if (all_are_children_ &&
      (!model_.makes_sense(*operation) || (operation->async && run_.options().config.overlap == 0)))
    return nullptr;
  step.statement.line = step.statement.answer_line = static_cast<int>(played_.size()) + 1;
  run_.set_place(step.statement.line, 0);
  const auto [reply, left_out] = run_.apply(*operation);
  if (left_out || (reply == nullptr && !run_.stopped())) return nullptr;
  if (reply != nullptr) model_.follow(*operation, *reply);
  played_.push_back(std::move(step));
  return reply;
}

}  // namespace lockstep::cache_sim
