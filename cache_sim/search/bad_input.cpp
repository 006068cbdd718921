#include "cache_sim/search/bad_input.hpp"

#include <iterator>

namespace lockstep::cache_sim {
namespace {

/// The number of a document that no prompt contains.
constexpr Document kNowhere = 99;

Name nobody() {
  return Name::intern("nobody");
}

}  // namespace

std::optional<Operation> BadInput::next() {
  if (!draw_.chance(static_cast<std::uint64_t>(swarm_.bad), 40)) return std::nullopt;
  const std::vector<Request>& running = model_.requests();
  const Request* const request = running.empty() ? nullptr : &running[draw_.below(running.size())];
  switch (draw_.below(6)) {
    case 0: return model_.refused().empty() ? bad_admission() : use_of_refused_request();
    case 1: return bad_tree_operation();
    case 2: return bad_admission();
    case 3: return request == nullptr ? bad_admission() : bad_result(*request);
    default: return request == nullptr ? bad_tree_operation() : bad_forward(*request);
  }
}

/// An operation on a request that was not admitted. (The name of a request that was never asked for
/// cannot stand in a file.)
Operation BadInput::use_of_refused_request() {
  constexpr Verb kVerbs[] = {Verb::extend, Verb::complete, Verb::accept, Verb::checkpoint,
                             Verb::finish, Verb::abort,    Verb::preempt};
  Operation operation;
  operation.verb = kVerbs[draw_.below(std::size(kVerbs))];
  operation.id = model_.refused()[draw_.below(model_.refused().size())];
  operation.insert = operation.verb != Verb::finish || draw_.chance(1, 2);
  if (operation.verb == Verb::extend || operation.verb == Verb::accept) {
    operation.tokens = fresh_tokens(1);
    operation.n = 1;
  }
  return operation;
}

/// A forward, checkpoint or finish that is impossible now: more tokens than there are, an operation
/// between a verification and its accept, or a result out of order.
Operation BadInput::bad_forward(const Request& request) {
  Operation operation;
  operation.id = request.id;
  operation.verb = Verb::extend;
  const std::int64_t left = request.left();
  const bool verifying = !request.drafts.empty();
  if (accepted_.can(Capability::draft_trees) && draw_.chance(1, 6))
    return bad_server_field(request);
  switch (draw_.below(verifying ? 3 : 5)) {
    case 0:
      operation.n = left + draw_.between(1, 3);
      operation.async = request.in_flight > 0;
      return operation;
    case 1:
      operation.verb = Verb::checkpoint;
      operation.up_to = request.computed + draw_.between(verifying ? 0 : 1, 3);
      return operation;
    case 2:
      if (verifying) operation.verb = Verb::finish;
      operation.n = left + 1;
      operation.async = request.in_flight > 0;
      return operation;
    case 3:
      operation.drafts = fresh_tokens(draw_.between(1, 3));
      operation.n = left + operation.drafts.size() + (left > 1 && draw_.chance(1, 2) ? -1 : 1);
      operation.async = request.in_flight > 0;
      return operation;
    default:
      operation.tokens = fresh_tokens(1);
      operation.n = left + 1;
      operation.async = swarm_.config.overlap == 0 || request.in_flight != 1;
      if (operation.async && request.in_flight == 0 && swarm_.config.overlap != 0) {
        operation.drafts = fresh_tokens(1);
        ++operation.n;
      }
      // In a block cache, either all steps run ahead of their results or none does.
      if (swarm_.blocks && swarm_.config.overlap != 0) operation.async = false;
      return operation;
  }
}

/// Drafts that form no tree, an end beyond the known tokens, or a graph with too few rows.
Operation BadInput::bad_server_field(const Request& request) {
  Operation operation;
  operation.id = request.id;
  switch (draw_.below(3)) {
    case 0:
      operation.verb = Verb::extend;
      operation.drafts = fresh_tokens(2);
      operation.parents.assign(static_cast<std::size_t>(draw_.between(1, 3)), 0);
      operation.parents.back() = operation.parents.size() == 2 ? draw_.between(2, 3) : 0;
      operation.n = request.known.size() - request.computed + 2;
      return operation;
    case 1:
      operation.verb = Verb::finish;
      operation.up_to = request.known.size() + draw_.between(1, 2);
      return operation;
    default:
      operation = Operation{.verb = Verb::step};
      operation.ids = {request.id};
      operation.padded = 0;
      return operation;
  }
}

/// An accept without a verification, or a result that is not due.
Operation BadInput::bad_result(const Request& request) {
  Operation operation;
  operation.id = request.id;
  operation.verb = Verb::accept;
  const std::uint32_t drafts = request.drafts.size();
  switch (draw_.below(drafts == 0 ? 2 : 4)) {
    case 0:
      operation.tokens = request.drafts.followed_by(fresh_tokens(1));
      operation.n = operation.tokens.size() + (drafts != 0 && draw_.chance(1, 2) ? -1 : 1);
      return operation;
    case 1:
      if (request.in_flight == 0) {
        operation.verb = Verb::complete;
      } else {
        operation.n = 2;
        operation.tokens = fresh_tokens(1);
      }
      return operation;
    case 2:
      operation.tokens = request.drafts.followed_by(fresh_tokens(2));
      if (draw_.chance(1, 2)) operation.tokens = Tokens();
      operation.n = operation.tokens.size();
      return operation;
    default:
      operation.tokens = Tokens::of_document(kNowhere, 0, drafts + 1);
      operation.n = drafts + 1;
      return operation;
  }
}

Operation BadInput::bad_admission() {
  Operation admit;
  admit.verb = Verb::admit;
  admit.id = nobody();
  admit.tokens = drawn_prompt(swarm_, draw_, model_.seen());
  switch (draw_.below(3)) {
    case 0: admit.tokens = Tokens(); break;
    case 1: admit.prompt = admit.tokens.size() + draw_.between(1, 3); break;
    default:
      if (accepted_.can(Capability::transfers))
        admit.prompt = admit.tokens.size() + 1;
      else
        admit.external = 1;
      break;
  }
  return admit;
}

/// Of a slot cache: a mapping with another number of rows than there are, or a restore of a prefix
/// that was never captured.
Operation BadInput::bad_slot_operation() {
  Operation operation;
  operation.verb = Verb::compact;
  operation.mapping.assign(1 << 10, 0);
  if (model_.requests().empty() || draw_.chance(1, 2)) return operation;
  operation = Operation{.verb = Verb::restore};
  operation.id = model_.requests().front().id;
  operation.from = nobody();
  return operation;
}

/// Tree verbs with unknown names, with names that are taken, with prefixes that are not stored, or
/// which a radix cache does not have.
Operation BadInput::bad_tree_operation() {
  const auto page = static_cast<std::uint32_t>(swarm_.config.page);
  const std::vector<Request>& requests = model_.requests();
  const std::vector<LegalityModel::Slot>& slots = model_.slots();
  const std::vector<Name>& locks = model_.locks();
  const auto& node = model_.shown();
  Operation operation;
  const std::uint64_t choice = draw_.below(10);
  if (choice == 0) {
    if (accepted_.can(Capability::slots)) return bad_slot_operation();
    constexpr Verb kVerbs[] = {Verb::compact, Verb::capture, Verb::restore};
    operation.verb = kVerbs[draw_.below(requests.empty() ? 1 : std::size(kVerbs))];
    operation.as = operation.from = nobody();
    if (!requests.empty()) operation.id = requests.front().id;
    if (operation.verb == Verb::compact) operation.mapping = {0};
  } else if (choice == 1) {
    operation.verb = Verb::unlock;
    operation.lock = nobody();
  } else if (choice == 2 && !locks.empty() && node) {
    operation.verb = Verb::lock;
    operation.tokens = node->tokens;
    operation.salt = node->salt;
    operation.as = locks[draw_.below(locks.size())];
  } else if (choice == 3) {
    operation.verb = Verb::lock;
    operation.as = nobody();
    if (draw_.chance(1, 2)) operation.tokens = Tokens::of_document(kNowhere, 0, page);
  } else if (choice == 4) {
    operation.verb = Verb::insert;
    operation.tokens = Tokens::of_document(kNowhere, 0, page);
    // in a cache with states, an insert needs a slot
    if (accepted_.has_states && draw_.chance(1, 2)) return operation;
    if (accepted_.has_states) operation.slot = slots.empty() ? nobody() : slots.front().name;
    operation.prev = page;
  } else if (choice == 5 && accepted_.has_states) {
    operation.verb = draw_.chance(1, 2) && !slots.empty() ? Verb::fork : Verb::alloc;
    operation.as = slots.empty() ? Name() : slots[draw_.below(slots.size())].name;
    operation.slot = operation.as;
    if (slots.empty()) return bad_admission();
  } else {
    constexpr Verb kVerbs[] = {Verb::fork, Verb::advance, Verb::copy, Verb::free, Verb::insert};
    operation.verb = kVerbs[draw_.below(accepted_.has_states ? 5 : 4)];
    operation.tokens = Tokens::of_document(kNowhere, 0, page);
    operation.slot = operation.as = operation.from = operation.to = nobody();
    if (operation.verb == Verb::copy && !slots.empty())
      (draw_.chance(1, 2) ? operation.from : operation.to) = slots.front().name;
    if (!accepted_.has_states && draw_.chance(1, 5)) operation.verb = Verb::alloc;
  }
  return operation;
}

}  // namespace lockstep::cache_sim
