#include "cache_sim/search/operation_player.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::cache_sim {

Steps literal_steps(const std::vector<Statement>& statements) {
  Steps steps;
  for (const Statement& statement : statements) steps.push_back({statement});
  return steps;
}

bool Ledger::adapt(Step& step) const {
  auto& operation = std::get<Operation>(step.statement.what);
  if (step.rest == Step::kLiteral && contradicts_itself(operation)) step.stands = true;
  if (step.stands) return true;
  if (bare_lock_.exists() && operation.lock != bare_lock_) return false;
  switch (operation.verb) {
    case Verb::insert: return adapt_insert(operation, step.of_slot);
    case Verb::admit:
      operation.prompt = std::min<std::int64_t>(operation.prompt, operation.tokens.size());
      return true;
    case Verb::accept: operation.n = operation.tokens.size(); return true;
    case Verb::extend: adapt_extend(operation, step.rest); return true;
    case Verb::checkpoint: adapt_checkpoint(operation, step.rest); return true;
    default: return true;
  }
}

/// Bad input where it comes from a trace that was played so.
bool Ledger::contradicts_itself(const Operation& operation) const {
  const auto request = requests_.find(operation.id.index());
  const bool known = request != requests_.end();
  switch (operation.verb) {
    case Verb::admit: return operation.prompt > std::int64_t{operation.tokens.size()};
    case Verb::accept: return operation.n != std::int64_t{operation.tokens.size()};
    case Verb::checkpoint: return known && operation.up_to > request->second.computed;
    case Verb::extend: {
      if (!known) return false;
      const std::int64_t left = request->second.known + operation.tokens.size() -
                                request->second.computed + operation.drafts.size();
      return operation.n > left || (!operation.drafts.empty() && operation.n != left);
    }
    default: return false;
  }
}

bool Ledger::adapt_insert(Operation& operation, bool& of_slot) const {
  const auto slot = slots_.find(operation.slot.index());
  // A key is whole pages: of a slot that stands for more, the tree would store another prefix.
  const bool is_key =
      slot != slots_.end() && !slot->second.empty() && slot->second.size() % page_ == 0;
  if (of_slot && !is_key) return false;
  if (!of_slot) of_slot = is_key && slot->second == operation.tokens;
  if (!of_slot) return true;
  operation.tokens = slot->second;
  operation.prev = std::min<std::int64_t>(operation.prev, operation.tokens.size());
  return true;
}

void Ledger::adapt_extend(Operation& operation, std::int64_t& rest) const {
  const auto request = requests_.find(operation.id.index());
  if (request == requests_.end()) return;
  const std::int64_t left = request->second.known + operation.tokens.size() -
                            request->second.computed + operation.drafts.size();
  if (rest != Step::kLiteral)
    operation.n = operation.drafts.empty() ? std::max<std::int64_t>(1, left - rest) : left;
  rest = std::max<std::int64_t>(0, left - operation.n);
}

void Ledger::adapt_checkpoint(Operation& operation, std::int64_t& rest) const {
  const auto request = requests_.find(operation.id.index());
  if (request == requests_.end() || operation.up_to == Operation::kAbsent) return;
  const std::int64_t computed = request->second.computed;
  if (rest != Step::kLiteral) operation.up_to = std::max<std::int64_t>(0, computed - rest);
  rest = std::max<std::int64_t>(0, computed - operation.up_to);
}

void Ledger::follow(const Operation& operation, const Reply& reply) {
  const bool shows_state =
      shown_ && shown_->tokens == operation.tokens && shown_->salt == operation.salt;
  if (operation.verb == Verb::lock && locks_states_alone_ && !shows_state)
    bare_lock_ = operation.as;
  if (operation.verb == Verb::unlock) bare_lock_ = Name();
  shown_.reset();
  if (reply.refused != Refusal::none) return;
  if (is_tree_verb(operation.verb))
    follow_slot(operation, reply);
  else
    follow_request(operation, reply);
}

void Ledger::follow_request(const Operation& operation, const Reply& reply) {
  if (operation.verb == Verb::admit)
    requests_[operation.id.index()] = {operation.tokens.size(), reply.get(ReplyField::cached)};
  const auto found = requests_.find(operation.id.index());
  if (found == requests_.end()) return;
  Request& request = found->second;
  switch (operation.verb) {
    case Verb::extend:
      if (!operation.drafts.empty()) break;
      request.known += operation.tokens.size();
      request.computed += operation.n;
      break;
    case Verb::accept:
      request.known += operation.tokens.size();
      request.computed = request.known - 1;
      break;
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt: requests_.erase(found); break;
    default: break;
  }
}

void Ledger::follow_slot(const Operation& operation, const Reply& reply) {
  switch (operation.verb) {
    case Verb::alloc: slots_[operation.as.index()] = Tokens(); break;
    case Verb::fork: slots_[operation.as.index()] = slots_[operation.slot.index()]; break;
    case Verb::copy: slots_[operation.to.index()] = slots_[operation.from.index()]; break;
    case Verb::advance:
      slots_[operation.slot.index()] = slots_[operation.slot.index()].followed_by(operation.tokens);
      break;
    case Verb::free: slots_.erase(operation.slot.index()); break;
    case Verb::insert:
      shown_ = operation;
      if (reply.get(ReplyField::exist) == 0) slots_.erase(operation.slot.index());
      break;
    case Verb::match:
      if (reply.get(ReplyField::state) != reply.get(ReplyField::kv)) break;
      shown_ = operation;
      shown_->tokens =
          operation.tokens.prefix(static_cast<std::uint32_t>(reply.get(ReplyField::kv)));
      break;
    default: break;
  }
}

OperationPlayer::OperationPlayer(ReplaySession& run)
    : run_(run), ledger_(run.options().config.page, false) {
  for (const std::string& subject : run.options().subjects) {
    const std::string_view name = subject;
    const PolicyEntry* const policy =
        Registry<PolicyEntry>::find(name.starts_with("oracle:") ? name.substr(7) : name);
    if (policy != nullptr && !policy->counts_locks_on_tombstones)
      ledger_ = Ledger(run.options().config.page, true);
  }
}

const Reply* OperationPlayer::play(Step step) {
  auto* const operation = std::get_if<Operation>(&step.statement.what);
  if (operation == nullptr || !ledger_.adapt(step)) return nullptr;
  step.statement.line = step.statement.answer_line = static_cast<int>(played_.size()) + 1;
  run_.set_place(step.statement.line, 0);
  const Reply* const reply = run_.apply(*operation);
  if (reply == nullptr && !run_.stopped()) return nullptr;
  if (reply != nullptr) ledger_.follow(*operation, *reply);
  played_.push_back(std::move(step));
  return reply;
}

}  // namespace lockstep::cache_sim
