#include "cache_sim/search/legality_model.hpp"

#include <algorithm>

namespace lockstep::cache_sim {
namespace {

/// The number of tokens that an extend of the request could compute, its drafts included.
std::int64_t tokens_left(const LegalityModel::Request& request, const Operation& extend) {
  return request.left() + extend.tokens.size() + extend.drafts.size();
}

/// Whether the tokens can be kept drafts: a path of the request's tree of drafts, from its root.
bool are_kept(const LegalityModel::Request& request, const Tokens& tokens) {
  if (request.parents.empty())
    return tokens.size() <= request.drafts.size() && tokens == request.drafts.prefix(tokens.size());
  std::uint32_t found = 0;
  std::int64_t at = 0;
  for (std::uint32_t draft = 1; draft <= request.drafts.size() && found < tokens.size(); ++draft) {
    if (request.parents[draft - 1] != at || request.drafts[draft - 1] != tokens[found]) continue;
    ++found;
    at = draft;
  }
  return found == tokens.size();
}

/// Whether the request has neither drafts nor a result due, so that an accept has no meaning.
bool lacks_verification(const LegalityModel::Request* request) {
  return request != nullptr && request->drafts.empty() && !request->is_result_due();
}

/// The end of an answer that was planned to end at `up_to`, within the tokens that are known now.
std::int64_t answer_end(std::int64_t up_to, const LegalityModel::Request& request) {
  if (up_to == Operation::kAbsent) return up_to;
  return std::min<std::int64_t>(std::max(up_to, request.shortest), request.known.size());
}

}  // namespace

Steps literal_steps(const std::vector<Statement>& statements) {
  Steps steps;
  for (const Statement& statement : statements) steps.push_back({statement});
  return steps;
}

const LegalityModel::Request* LegalityModel::find_request(Name id) const {
  const auto found = std::ranges::find(requests_, id, &Request::id);
  return found == requests_.end() ? nullptr : &*found;
}

const LegalityModel::Slot* LegalityModel::find_slot(Name name) const {
  const auto found = std::ranges::find(slots_, name, &Slot::name);
  return found == slots_.end() ? nullptr : &*found;
}

// --- After an operation --------------------------------------------------------------------------

void LegalityModel::follow(const Operation& operation, const Reply& reply) {
  const bool shows_state = shown_ && shown_->has_state && shown_->tokens == operation.tokens &&
                           shown_->salt == operation.salt;
  if (operation.verb == Verb::lock && !counts_locks_on_tombstones_ && !shows_state)
    bare_lock_ = operation.as;
  if (operation.verb == Verb::unlock) bare_lock_ = Name();
  shown_.reset();
  if (reply.refused != Refusal::none) {
    if (operation.verb == Verb::admit) refused_.push_back(operation.id);
  } else if (capability_of(operation.verb) == Capability::tree) {
    follow_slot(operation, reply);
  } else {
    follow_request(operation, reply);
  }
}

void LegalityModel::follow_request(const Operation& operation, const Reply& reply) {
  if (operation.verb == Verb::admit) {
    std::erase(refused_, operation.id);  // it has asked again
    requests_.push_back({.id = operation.id,
                         .salt = operation.salt,
                         .known = operation.tokens,
                         .computed = reply.get(ReplyField::cached),
                         .external = std::max(operation.external, reply.get(ReplyField::host)),
                         .loads = reply.get(ReplyField::host) > 0,
                         .shortest = operation.tokens.size(),
                         .is_on_first = moves_});
    seen_.push_back(operation.tokens);
    const auto row = std::ranges::find(rows_, Name());
    *(row == rows_.end() ? rows_.insert(row, Name()) : row) = operation.id;
    return;
  }
  if (operation.verb == Verb::compact) return follow_compaction(operation);
  const auto found = std::ranges::find(requests_, operation.id, &Request::id);
  if (found == requests_.end()) return;
  switch (operation.verb) {
    case Verb::extend: follow_extend(operation, reply, *found); return;
    case Verb::complete:
      --found->in_flight;
      found->is_loading = false;
      if (!found->rows.empty()) found->rows.erase(found->rows.begin());
      return;
    case Verb::checkpoint: found->shortest = found->known.size(); return;
    case Verb::load: found->is_on_first &= reply.get(ReplyField::state) == 0; return;
    case Verb::accept:
      found->shortest = found->known.size() + 1;
      found->known = found->known.followed_by(operation.tokens);
      found->samples |= cuts_chunks_;
      if (results_tell_ && !found->rows.empty()) {
        const std::int64_t drafts = found->rows.front().drafts;
        --found->in_flight;
        found->promised -= 1 + drafts;
        found->computed -= drafts + 1 - operation.tokens.size();
        found->rows.erase(found->rows.begin());
        return;
      }
      if (!found->drafts.empty())
        found->computed = found->known.size() - 1;  // the last token has only been sampled
      found->drafts = Tokens();
      return;
    case Verb::preempt:  // in a block cache, a preempted request resumes with all its tokens
      if (cuts_chunks_) seen_.push_back(found->known);
      [[fallthrough]];
    case Verb::finish:
      if (operation.verb == Verb::finish) seen_.push_back(found->known);
      [[fallthrough]];
    case Verb::abort:
      std::ranges::replace(rows_, operation.id, Name());
      requests_.erase(found);
      return;
    default: follow_sequence(operation, *found); return;
  }
}

void LegalityModel::follow_extend(const Operation& operation, const Reply& reply,
                                  Request& request) const {
  const std::int64_t n = cuts_chunks_ ? reply.get(ReplyField::n, operation.n) : operation.n;
  // A server looks for the end of the answer in the tokens of one result, and launches no row after
  // it.
  if (request.in_flight == 0)
    request.shortest = request.known.size() + (operation.tokens.empty() ? 0 : 1);
  request.known = request.known.followed_by(operation.tokens);
  request.external = 0;
  request.samples |= !operation.tokens.empty();
  if (operation.async && (n > 0 || operation.n == 0)) ++request.in_flight;
  request.is_loading = operation.async && operation.n == 0;
  if (results_tell_ && operation.async) {
    if (n == 0) return;
    request.computed += n;
    const std::int64_t drafts = n == operation.n ? operation.drafts.size() : 0;
    request.rows.push_back({request.left() <= 0, drafts});
    if (request.rows.back().samples) request.promised += 1 + drafts;
    return;
  }
  request.drafts = operation.drafts;
  request.parents = operation.parents;
  if (operation.drafts.empty()) request.computed += n;
  // A verification computes all tokens that are left.
  request.is_cut = cuts_chunks_ && operation.drafts.empty() &&
                   request.computed < request.known.size() && (request.is_cut || n < operation.n);
}

void LegalityModel::follow_sequence(const Operation& operation, Request& request) {
  const auto length = static_cast<std::uint32_t>(
      operation.up_to == Operation::kAbsent ? request.computed : operation.up_to);
  switch (operation.verb) {
    case Verb::clone:
      requests_.push_back({.id = operation.as,
                           .salt = request.salt,
                           .known = request.known.prefix(length),
                           .computed = length});
      return;
    case Verb::truncate:
      request.known = request.known.prefix(length);
      request.computed = length;
      return;
    case Verb::capture:
      std::erase_if(captured_, [&](const Captured& old) { return old.name == operation.as; });
      captured_.push_back(
          {operation.as, request.salt, request.known.prefix(length), operation.partial});
      return;
    case Verb::restore:
      for (const Captured& kept : captured_)
        if (kept.name == operation.from) {
          if (!is_slot_cache_) request.known = kept.tokens;
          request.computed = kept.tokens.size();
        }
      return;
    default: return;
  }
}

void LegalityModel::follow_compaction(const Operation& operation) {
  std::vector<Name> rows;
  for (std::size_t i = 0; i < operation.mapping.size(); ++i) {
    const std::int64_t row = operation.mapping[i];
    if (row < 0) continue;
    rows.resize(std::max(rows.size(), static_cast<std::size_t>(row) + 1));
    rows[static_cast<std::size_t>(row)] = rows_[i];
  }
  rows_.swap(rows);
}

void LegalityModel::give_slot(Name name, const Tokens& tokens) {
  for (Slot& slot : slots_)
    if (slot.name == name) {
      slot.tokens = tokens;
      return;
    }
  slots_.push_back({name, tokens});
}

void LegalityModel::drop_slot(Name name) {
  std::erase_if(slots_, [&](const Slot& slot) { return slot.name == name; });
}

void LegalityModel::follow_slot(const Operation& operation, const Reply& reply) {
  const auto tokens_of = [&](Name name) {
    const Slot* const slot = find_slot(name);
    return slot == nullptr ? Tokens() : slot->tokens;
  };
  switch (operation.verb) {
    case Verb::alloc: give_slot(operation.as, operation.tokens); return;
    case Verb::fork: give_slot(operation.as, tokens_of(operation.slot)); return;
    case Verb::copy: give_slot(operation.to, tokens_of(operation.from)); return;
    case Verb::advance:
      give_slot(operation.slot, tokens_of(operation.slot).followed_by(operation.tokens));
      return;
    case Verb::free: drop_slot(operation.slot); return;
    case Verb::insert:
      seen_.push_back(operation.tokens);
      if (reply.get(ReplyField::exist) == 0) drop_slot(operation.slot);
      if (operation.tokens.size() % page_ == 0) shown_ = {operation.tokens, operation.salt, true};
      return;
    case Verb::match: {
      // A match that ends inside an edge splits the edge, so a node ends here.
      const std::int64_t kv = reply.get(ReplyField::kv);
      if (kv == 0) return;
      shown_ = {operation.tokens.prefix(static_cast<std::uint32_t>(kv)), operation.salt,
                reply.get(ReplyField::state) == kv};
      return;
    }
    case Verb::lock: locks_.push_back(operation.as); return;
    case Verb::unlock: std::erase(locks_, operation.lock); return;
    default: return;
  }
}

// --- Before an operation -------------------------------------------------------------------------

bool LegalityModel::adapt(Step& step) const {
  auto& operation = std::get<Operation>(step.statement.what);
  if (step.rest == Step::kLiteral && contradicts_itself(operation)) step.stands = true;
  if (step.stands) return true;
  if (bare_lock_.exists() && operation.lock != bare_lock_) return false;
  // A chunk that was cut short is completed before the request samples or finishes.
  const Request* const request = find_request(operation.id);
  const bool goes_on = operation.verb == Verb::finish ||
                       (operation.verb == Verb::extend && !operation.tokens.empty());
  if (request != nullptr && request->is_cut && goes_on) return false;
  // In a block cache, what a finished request has not computed would be stored on the host.
  if (request != nullptr && cuts_chunks_ && operation.verb == Verb::finish && request->left() > 0)
    return false;
  switch (operation.verb) {
    case Verb::insert: return adapt_insert(operation, step.of_slot);
    case Verb::admit:
      operation.prompt = std::min<std::int64_t>(operation.prompt, operation.tokens.size());
      return true;
    case Verb::accept:
      step.rest = 0;
      operation.n = operation.tokens.size();
      return !lacks_verification(request);
    case Verb::finish:
      if (request != nullptr) operation.up_to = answer_end(operation.up_to, *request);
      return true;
    case Verb::extend: adapt_extend(operation, step.rest); return true;
    case Verb::clone:
    case Verb::truncate:
    case Verb::checkpoint: adapt_checkpoint(operation, step.rest); return true;
    default: return true;
  }
}

bool LegalityModel::makes_sense(const Operation& operation) const {
  const Request* const request = find_request(operation.id);
  if (operation.verb == Verb::admit) return request == nullptr;
  if (operation.id.exists()) return request != nullptr && makes_sense_for(*request, operation);
  if (operation.verb == Verb::step)
    return std::ranges::all_of(operation.ids, [&](Name id) { return find_request(id) != nullptr; });
  for (const Name slot : {operation.slot, operation.from})
    if (slot.exists() && find_slot(slot) == nullptr) return false;
  return !operation.lock.exists() || std::ranges::find(locks_, operation.lock) != locks_.end();
}

bool LegalityModel::makes_sense_for(const Request& request, const Operation& operation) const {
  const bool verifies = !request.drafts.empty();
  const std::uint32_t kept = operation.tokens.size();
  switch (operation.verb) {
    case Verb::abort: return true;
    case Verb::accept:
      if (request.is_result_due()) return kept > 0 && kept <= request.rows.front().drafts + 1;
      return verifies && kept > 0 && are_kept(request, operation.tokens.prefix(kept - 1));
    case Verb::extend:
      if (!operation.parents.empty() && operation.parents.size() != operation.drafts.size())
        return false;
      // A block cache loads what a second memory has before it computes more.
      if (cuts_chunks_ && request.loads && request.external > 0 && operation.n > 0) return false;
      // Drafts follow a token that was sampled and is not computed.
      return !verifies && (request.in_flight == 0 || (operation.async && request.in_flight == 1)) &&
             operation.n <= tokens_left(request, operation) &&
             (operation.drafts.empty() ||
              tokens_left(request, operation) > std::int64_t{operation.drafts.size()});
    case Verb::complete: return request.in_flight > 0 && !request.is_result_due();
    case Verb::checkpoint: return !verifies && operation.up_to <= request.computed;
    case Verb::clone:
    case Verb::truncate:
    case Verb::capture:
    case Verb::restore:
      return !verifies && request.in_flight == 0 && is_sequence_sense(request, operation);
    default: return !verifies;
  }
}

bool LegalityModel::can_restore(const Request& request, const Captured& captured) {
  if (!request.drafts.empty() || request.in_flight != 0 || request.salt != captured.salt)
    return false;
  const std::uint32_t size = captured.tokens.size();
  return !captured.partial ||
         (size <= request.computed && request.known.prefix(size) == captured.tokens);
}

bool LegalityModel::is_sequence_sense(const Request& request, const Operation& operation) const {
  if (operation.verb == Verb::restore)
    return std::ranges::any_of(captured_, [&](const Captured& kept) {
      return kept.name == operation.from && can_restore(request, kept);
    });
  const std::int64_t length =
      operation.up_to == Operation::kAbsent ? request.computed : operation.up_to;
  if (length <= 0 || length > request.computed) return false;
  return operation.verb != Verb::clone || find_request(operation.as) == nullptr;
}

/// Whether the operation contradicts itself, as in a trace with bad input.
bool LegalityModel::contradicts_itself(const Operation& operation) const {
  const Request* const request = find_request(operation.id);
  switch (operation.verb) {
    case Verb::admit: return operation.prompt > std::int64_t{operation.tokens.size()};
    case Verb::accept:
      return operation.n != std::int64_t{operation.tokens.size()} || lacks_verification(request);
    case Verb::clone:
    case Verb::truncate:
    case Verb::checkpoint: return request != nullptr && operation.up_to > request->computed;
    case Verb::finish:
      return request != nullptr && operation.up_to > std::int64_t{request->known.size()};
    case Verb::step:
      return operation.padded != Operation::kAbsent && operation.padded < std::ssize(operation.ids);
    case Verb::extend: {
      if (request == nullptr) return false;
      for (std::size_t i = 0; i < operation.parents.size(); ++i)
        if (operation.parents[i] > static_cast<std::int64_t>(i)) return true;
      if (!operation.parents.empty() && operation.parents.size() != operation.drafts.size())
        return true;
      const std::int64_t left = tokens_left(*request, operation);
      return operation.n > left || (!operation.drafts.empty() && operation.n != left);
    }
    default: return false;
  }
}

bool LegalityModel::adapt_insert(Operation& operation, bool& of_slot) const {
  const Slot* const slot = find_slot(operation.slot);
  // A key consists of whole pages. If the slot stands for more tokens, the tree would store the
  // state under a shorter prefix.
  const bool is_key = slot != nullptr && !slot->tokens.empty() && slot->tokens.size() % page_ == 0;
  if (of_slot && !is_key) return false;
  if (!of_slot) of_slot = is_key && slot->tokens == operation.tokens;
  if (!of_slot) return true;
  operation.tokens = slot->tokens;
  operation.prev = std::min<std::int64_t>(operation.prev, operation.tokens.size());
  return true;
}

void LegalityModel::adapt_extend(Operation& operation, std::int64_t& rest) const {
  const Request* const request = find_request(operation.id);
  if (request == nullptr || (operation.async && operation.n == 0)) return;
  const std::int64_t left = tokens_left(*request, operation);
  if (rest != Step::kLiteral)
    operation.n = operation.drafts.empty() ? std::max<std::int64_t>(1, left - rest) : left;
  rest = std::max<std::int64_t>(0, left - operation.n);
}

void LegalityModel::adapt_checkpoint(Operation& operation, std::int64_t& rest) const {
  const Request* const request = find_request(operation.id);
  if (request == nullptr || operation.up_to == Operation::kAbsent) return;
  if (rest != Step::kLiteral) operation.up_to = std::max<std::int64_t>(0, request->computed - rest);
  rest = std::max<std::int64_t>(0, request->computed - operation.up_to);
}

}  // namespace lockstep::cache_sim
