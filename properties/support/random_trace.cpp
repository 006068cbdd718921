#include "properties/support/random_trace.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "reference/base/philox.hpp"
#include "reference/base/require.hpp"

namespace lockstep::testing_support {
namespace {

constexpr std::uint64_t kLongest = 24;  // of a prompt: pools of some fifty tokens fill up

}  // namespace

std::uint64_t RandomTrace::below(std::uint64_t bound) {
  return random_below(bound, seed_, number_, index_++);
}

Tokens RandomTrace::fresh_tokens(std::uint64_t size) {
  const auto document = static_cast<Document>(1 + below(2));
  const auto first = static_cast<std::uint32_t>(below(3));
  return Tokens::of_document(document, first, static_cast<std::uint32_t>(size));
}

/// Often a prefix of what was there before, and something behind it.
Tokens RandomTrace::some_tokens() {
  Tokens tokens;
  if (!seen_.empty() && below(3) != 0) {
    const Tokens& old = seen_[below(seen_.size())];
    const bool whole = below(2) == 0;
    tokens = whole ? old : old.prefix(static_cast<std::uint32_t>(below(old.size() + 1)));
  }
  if (tokens.empty() || below(3) != 0) tokens = tokens.followed_by(fresh_tokens(1 + below(9)));
  if (tokens.size() > kLongest) tokens = tokens.prefix(static_cast<std::uint32_t>(kLongest));
  return tokens;
}

Name RandomTrace::some_salt() {
  return below(12) == 0 ? Name::intern("s") : Name();
}

Name RandomTrace::fresh_name(const char* prefix) {
  return Name::intern(fmt::format("{}{}", prefix, names_++));
}

Operation RandomTrace::admission() {
  Operation admit;
  admit.verb = Verb::admit;
  admit.id = fresh_name("r");
  admit.salt = some_salt();
  admit.tokens = some_tokens();
  if (below(3) == 0) admit.prompt = static_cast<std::int64_t>(below(admit.tokens.size() + 1));
  return admit;
}

Operation RandomTrace::of_request() {
  if (requests_.empty() || (requests_.size() < 4 && below(4) == 0)) return admission();
  place_ = below(requests_.size());
  Request& request = requests_[place_];
  Operation operation;
  operation.id = request.id;
  if (!request.drafts.empty()) {
    operation.verb = below(9) == 0 ? Verb::abort : Verb::accept;
    if (operation.verb == Verb::abort) return operation;
    const auto kept = static_cast<std::uint32_t>(below(request.drafts.size() + 1));
    operation.tokens = request.drafts.prefix(kept).followed_by(fresh_tokens(1));
    operation.n = kept + 1;
    return operation;
  }
  const bool overlaps = config_.overlap != 0;
  if (overlaps && request.in_flight > 0 && (request.in_flight == 2 || below(4) == 0)) {
    operation.verb = Verb::complete;
    return operation;
  }
  const std::int64_t left = request.known.size() - request.computed;
  const std::uint64_t choice = below(16);
  if (choice < 8) {
    operation.verb = Verb::extend;
    std::int64_t most = left;
    if (left == 0 || below(3) == 0) {
      operation.tokens = fresh_tokens(1 + below(4));
      most += operation.tokens.size();
    }
    operation.n = 1 + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(most)));
    if (below(2) == 0) operation.n = most;
    operation.async = request.in_flight > 0 || (overlaps && below(2) == 0);
    if (!operation.async && below(4) == 0) {
      operation.drafts = fresh_tokens(1 + below(3));
      operation.n = most + operation.drafts.size();
    }
    return operation;
  }
  if (choice < 11) {
    operation.verb = Verb::checkpoint;
    if (below(5) == 0)
      operation.up_to =
          static_cast<std::int64_t>(below(static_cast<std::uint64_t>(request.computed) + 1));
    return operation;
  }
  if (choice < 14) {
    operation.verb = Verb::finish;
    operation.insert = below(6) != 0;
    return operation;
  }
  operation.verb = choice == 14 ? Verb::preempt : Verb::abort;
  return operation;
}

Operation RandomTrace::use_of_slot(std::size_t slot) {
  place_ = slot;
  Operation operation;
  const std::uint64_t choice = below(8);
  const Tokens& held = slots_[slot].tokens;
  const bool fits_a_key = !held.empty() && held.size() % config_.page == 0;  // keys are whole pages
  if (!fits_a_key || choice < 2) {
    operation.verb = Verb::advance;
    operation.slot = slots_[slot].name;
    operation.tokens = held.empty() ? some_tokens() : fresh_tokens(1 + below(6));
  } else if (choice < 6) {
    operation.verb = Verb::insert;
    operation.slot = slots_[slot].name;
    operation.tokens = slots_[slot].tokens;
    operation.salt = some_salt();
    const std::uint32_t stored = ending_.tokens.size();
    if (node_is_there_ && ending_.salt == operation.salt && stored <= operation.tokens.size() &&
        operation.tokens.prefix(stored) == ending_.tokens && below(2) == 0)
      operation.prev = stored;
  } else if (choice == 6) {
    operation.verb = Verb::free;
    operation.slot = slots_[slot].name;
  } else {
    operation.verb = Verb::fork;
    operation.slot = slots_[slot].name;
    operation.as = fresh_name("f");
  }
  return operation;
}

Operation RandomTrace::of_tree() {
  Operation operation;
  if (node_is_there_ && may_lock_ && below(2) == 0) {
    operation.verb = Verb::lock;
    operation.tokens = ending_.tokens;
    operation.salt = ending_.salt;
    operation.as = fresh_name("l");
    return operation;
  }
  const std::uint64_t choice = below(12);
  if (!locks_.empty() && choice < 3) {
    operation.verb = Verb::unlock;
    operation.lock = locks_[below(locks_.size())];
    return operation;
  }
  if (choice < 6) {
    operation.verb = Verb::match;
    operation.tokens = some_tokens();
    operation.salt = some_salt();
    if (below(4) == 0)
      operation.limit = static_cast<std::int64_t>(below(operation.tokens.size() + 3));
    return operation;
  }
  if (!has_states_) {
    operation.verb = Verb::insert;
    if (node_is_there_ && below(2) == 0) {  // what the last reply showed is counted on
      operation.prev = ending_.tokens.size();
      operation.tokens = ending_.tokens.followed_by(fresh_tokens(below(9)));
      operation.salt = ending_.salt;
      return operation;
    }
    operation.tokens = some_tokens();
    operation.salt = some_salt();
    return operation;
  }
  if (slots_.size() >= 2 && choice == 6) {
    operation.verb = Verb::copy;
    const std::size_t from = below(slots_.size());
    place_ = below(slots_.size());
    operation.from = slots_[from].name;
    operation.to = slots_[place_].name;
    return operation;
  }
  if (!slots_.empty() && choice < 11) return use_of_slot(below(slots_.size()));
  operation.verb = Verb::alloc;
  operation.as = fresh_name("s");
  return operation;
}

Operation RandomTrace::next() {
  const std::uint64_t choice = below(20);
  if (choice == 0) {
    last_ = Operation{};  // check
  } else if (choice == 1) {
    last_ = Operation{};
    last_.verb = Verb::evict;
    last_.kv = static_cast<std::int64_t>(below(kLongest));
    last_.state = static_cast<std::int64_t>(below(3));
  } else if (choice == 2 && below(8) == 0) {
    last_ = Operation{};
    last_.verb = Verb::flush;
  } else {
    last_ = choice < 12 ? of_request() : of_tree();
  }
  node_is_there_ = false;
  return last_;
}

void RandomTrace::answered(const Reply& reply) {
  if (reply.refused != Refusal::none) return;
  const auto slot_named = [&](Name name) {
    return std::find_if(slots_.begin(), slots_.end(),
                        [&](const Slot& slot) { return slot.name == name; });
  };
  switch (last_.verb) {
    case Verb::admit:
      requests_.push_back(
          {last_.id, last_.salt, last_.tokens, reply.get(ReplyField::cached), Tokens(), 0});
      seen_.push_back(last_.tokens);
      return;
    case Verb::extend: {
      Request& request = requests_[place_];
      request.known = request.known.followed_by(last_.tokens);
      request.drafts = last_.drafts;
      if (last_.drafts.empty()) request.computed += last_.n;
      if (last_.async) ++request.in_flight;
      return;
    }
    case Verb::complete: --requests_[place_].in_flight; return;
    case Verb::accept: {
      Request& request = requests_[place_];
      request.known = request.known.followed_by(last_.tokens);
      request.computed = request.known.size() - 1;
      request.drafts = Tokens();
      return;
    }
    case Verb::finish: seen_.push_back(requests_[place_].known); [[fallthrough]];
    case Verb::abort:
    case Verb::preempt:
      requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(place_));
      return;
    case Verb::alloc: slots_.push_back({last_.as, Tokens()}); return;
    case Verb::fork: slots_.push_back({last_.as, slot_named(last_.slot)->tokens}); return;
    case Verb::copy: slots_[place_].tokens = slot_named(last_.from)->tokens; return;
    case Verb::advance:
      slots_[place_].tokens = slots_[place_].tokens.followed_by(last_.tokens);
      return;
    case Verb::free: slots_.erase(slot_named(last_.slot)); return;
    case Verb::insert:
      seen_.push_back(last_.tokens);
      if (has_states_ && reply.get(ReplyField::exist) == 0) slots_.erase(slot_named(last_.slot));
      ending_ = last_;
      node_is_there_ = last_.tokens.size() % config_.page == 0;
      may_lock_ = true;
      return;
    case Verb::match:
      // A match that ends inside an edge splits it, so a node ends here.
      ending_ = last_;
      ending_.tokens = last_.tokens.prefix(static_cast<std::uint32_t>(reply.get(ReplyField::kv)));
      node_is_there_ = !ending_.tokens.empty();
      // Older versions lose count of locks on tombstones (SGLang #21379): not a difference to find.
      may_lock_ = (config_.policy != "sglang-legacy" && config_.policy != "sglang-v0") ||
                  reply.get(ReplyField::state) == reply.get(ReplyField::kv);
      return;
    case Verb::lock: locks_.push_back(last_.as); return;
    case Verb::unlock: std::erase(locks_, last_.lock); return;
    default: return;
  }
}

bool RandomTrace::next_of_the_end(Operation& operation) {
  operation = Operation{};
  if (!requests_.empty()) {
    operation.verb = below(2) == 0 || !requests_.back().drafts.empty() ? Verb::abort : Verb::finish;
    operation.id = requests_.back().id;
    requests_.pop_back();
  } else if (!locks_.empty()) {
    operation.verb = Verb::unlock;
    operation.lock = locks_.back();
    locks_.pop_back();
  } else if (!slots_.empty()) {
    operation.verb = Verb::free;
    operation.slot = slots_.back().name;
    slots_.pop_back();
  } else {
    return false;
  }
  return true;
}

RandomPlay play_random_trace(const cache_sim::RunOptions& options, std::uint64_t seed,
                             std::uint64_t number, int operations) {
  Result<std::unique_ptr<cache_sim::Run>> started = cache_sim::Run::start(options);
  require(started.has_value(), started ? "" : started.error().text);
  cache_sim::Run& run = **started;
  const bool has_states = options.subjects.front().find("radix") == std::string::npos;
  RandomTrace trace(seed, number, options.config, has_states);
  RandomPlay play;
  const auto say = [&](const Operation& operation) {
    const Reply* const reply = run.apply(operation);
    play.transcript +=
        "    " + operation.text() + (reply == nullptr ? "" : " → " + reply->text()) + "\n";
    if (reply != nullptr && reply->refused != Refusal::none) ++play.refusals;
    if (reply != nullptr) play.left = *reply;
    return reply;
  };
  for (int i = 0; i < operations && !run.stopped(); ++i)
    if (const Reply* const reply = say(trace.next())) trace.answered(*reply);
  for (Operation end; !run.stopped() && trace.next_of_the_end(end);) say(end);
  for (const Verb verb : {Verb::flush, Verb::check}) {
    Operation operation;
    operation.verb = verb;
    if (!run.stopped()) say(operation);
  }
  run.conclude();
  play.hit_tokens = run.totals(0).hit_tokens;
  if (run.error()) play.error = run.error()->text;
  if (!run.findings().empty())
    play.finding = fmt::format("{}: {}", to_string(run.findings().front().finding.kind),
                               run.findings().front().finding.text);
  return play;
}

}  // namespace lockstep::testing_support
