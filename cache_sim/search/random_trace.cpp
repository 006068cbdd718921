#include "cache_sim/search/random_trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "cache_sim/search/operation_player.hpp"

namespace lockstep::cache_sim {
namespace {

/// One of several things, as often as their weights say.
template <std::size_t N>
std::size_t pick(Draw& draw, const std::array<int, N>& weights) {
  std::uint64_t sum = 0;
  for (const int weight : weights) sum += static_cast<std::uint64_t>(weight);
  std::uint64_t at = draw.below(sum);
  std::size_t i = 0;
  while (at >= static_cast<std::uint64_t>(weights[i]))
    at -= static_cast<std::uint64_t>(weights[i++]);
  return i;
}

Tokens drawn_tokens(const Swarm& swarm, Draw& draw, std::int64_t size) {
  if (swarm.letters != 0) {
    std::vector<std::uint32_t> ids(static_cast<std::size_t>(size));
    for (std::uint32_t& id : ids)
      id = static_cast<std::uint32_t>(1 + draw.below(static_cast<std::uint64_t>(swarm.letters)));
    return Tokens::of_ids(std::move(ids));
  }
  // One document in two is the first: hot and cold prefixes.
  const std::uint64_t document =
      draw.chance(1, 2) ? 0 : draw.below(static_cast<std::uint64_t>(swarm.documents));
  return Tokens::of_document(static_cast<Document>(1 + document),
                             static_cast<std::uint32_t>(draw.below(3)),
                             static_cast<std::uint32_t>(size));
}

/// Often a prefix of what was there before, and something behind it.
Tokens drawn_prompt(const Swarm& swarm, Draw& draw, const std::vector<Tokens>& seen) {
  Tokens tokens;
  if (!seen.empty() && draw.chance(static_cast<std::uint64_t>(swarm.shared), 10)) {
    const Tokens& old = seen[draw.below(seen.size())];
    const bool whole = draw.chance(1, 2);
    tokens = whole ? old : old.prefix(static_cast<std::uint32_t>(draw.below(old.size() + 1)));
  }
  if (tokens.empty() || !draw.chance(1, 3))
    tokens = tokens.followed_by(drawn_tokens(swarm, draw, draw.between(1, swarm.piece)));
  const auto longest = static_cast<std::uint32_t>(swarm.longest);
  return tokens.size() > longest ? tokens.prefix(longest) : tokens;
}

}  // namespace

Tokens RandomTrace::fresh_tokens(std::int64_t size) {
  return drawn_tokens(swarm_, draw_, size);
}

Tokens RandomTrace::some_tokens() {
  return drawn_prompt(swarm_, draw_, seen_);
}

Name RandomTrace::some_salt() {
  return draw_.chance(static_cast<std::uint64_t>(swarm_.salted), 40)
             ? Name::intern(draw_.chance(1, 2) ? "s" : "t")
             : Name();
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
  if (draw_.below(3) == 0)
    admit.prompt = static_cast<std::int64_t>(draw_.below(admit.tokens.size() + 1));
  return admit;
}

/// What came of a verification.
Operation RandomTrace::verdict(const Request& request) {
  Operation operation;
  operation.id = request.id;
  operation.verb = draw_.chance(1, 9) ? Verb::abort : Verb::accept;
  if (operation.verb == Verb::abort) return operation;
  const auto kept = static_cast<std::uint32_t>(draw_.below(request.drafts.size() + 1));
  operation.tokens = request.drafts.prefix(kept).followed_by(fresh_tokens(1));
  operation.n = kept + 1;
  return operation;
}

Operation RandomTrace::forward(const Request& request) {
  Operation operation;
  operation.verb = Verb::extend;
  operation.id = request.id;
  std::int64_t most = request.known.size() - request.computed;
  if (most == 0 || draw_.chance(1, 3)) {
    operation.tokens = fresh_tokens(draw_.between(1, 4));
    most += operation.tokens.size();
  }
  operation.n = draw_.chance(1, 2) ? most : draw_.between(1, most);
  const bool overlaps = swarm_.config.overlap != 0;
  operation.async = request.in_flight > 0 || (overlaps && draw_.chance(1, 2));
  if (!operation.async && draw_.chance(static_cast<std::uint64_t>(swarm_.drafts), 10)) {
    operation.drafts = fresh_tokens(draw_.between(1, 3));
    operation.n = most + operation.drafts.size();
  }
  return operation;
}

Operation RandomTrace::of_request() {
  const auto most = static_cast<std::size_t>(swarm_.running);
  if (requests_.empty() || (requests_.size() < most && draw_.chance(1, 4))) return admission();
  place_ = draw_.below(requests_.size());
  const Request& request = requests_[place_];
  if (!request.drafts.empty()) return verdict(request);
  Operation operation;
  operation.id = request.id;
  if (request.in_flight > 0 && (request.in_flight == 2 || draw_.chance(1, 4))) {
    operation.verb = Verb::complete;
    return operation;
  }
  switch (pick<5>(
      draw_, {swarm_.extend, swarm_.checkpoint, swarm_.finish, swarm_.abort, swarm_.preempt})) {
    case 0: return forward(request);
    case 1:
      operation.verb = Verb::checkpoint;
      if (draw_.chance(1, 5)) operation.up_to = draw_.between(0, request.computed);
      break;
    case 2:
      operation.verb = Verb::finish;
      operation.insert = !draw_.chance(static_cast<std::uint64_t>(swarm_.discarded), 10);
      break;
    case 3: operation.verb = Verb::abort; break;
    default: operation.verb = Verb::preempt; break;
  }
  return operation;
}

Operation RandomTrace::use_of_slot(std::size_t slot) {
  place_ = slot;
  Operation operation;
  const std::uint64_t choice = draw_.below(8);
  const Tokens& held = slots_[slot].tokens;
  const bool fits_a_key =
      !held.empty() && held.size() % swarm_.config.page == 0;  // keys are whole pages
  if (!fits_a_key || choice < 2) {
    operation.verb = Verb::advance;
    operation.slot = slots_[slot].name;
    operation.tokens = held.empty() ? some_tokens() : fresh_tokens(draw_.between(1, 6));
  } else if (choice < 6) {
    operation.verb = Verb::insert;
    operation.slot = slots_[slot].name;
    operation.tokens = slots_[slot].tokens;
    operation.salt = some_salt();
    const std::uint32_t stored = ending_.tokens.size();
    if (node_is_there_ && ending_.salt == operation.salt && stored <= operation.tokens.size() &&
        operation.tokens.prefix(stored) == ending_.tokens && draw_.below(2) == 0)
      operation.prev = stored;
    else
      overstate_prev(operation);
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

/// Now and then an insert says that the tree has more of its tokens than anybody has looked at.
void RandomTrace::overstate_prev(Operation& insert) {
  if (!draw_.chance(static_cast<std::uint64_t>(swarm_.bad), 20)) return;
  const auto page = static_cast<std::uint64_t>(swarm_.config.page);
  const std::uint64_t pages = insert.tokens.size() / page;
  insert.prev =
      static_cast<std::int64_t>((draw_.chance(1, 2) ? pages : draw_.below(pages + 1)) * page);
  may_be_bad_ = true;
}

Operation RandomTrace::of_tree() {
  Operation operation;
  if (bare_lock_.exists()) {  // nothing may come between: see counts_locks_on_tombstones
    operation.verb = Verb::unlock;
    operation.lock = std::exchange(bare_lock_, Name());
    return operation;
  }
  if (node_is_there_ && draw_.below(2) == 0) {
    operation.verb = Verb::lock;
    operation.tokens = ending_.tokens;
    operation.salt = ending_.salt;
    operation.as = fresh_name("l");
    if (!may_lock_) bare_lock_ = operation.as;
    return operation;
  }
  const std::uint64_t choice = draw_.below(12);
  if (!locks_.empty() && choice < 3) {
    operation.verb = Verb::unlock;
    operation.lock = locks_[draw_.below(locks_.size())];
    return operation;
  }
  if (choice < 6) {
    operation.verb = Verb::match;
    operation.tokens = some_tokens();
    operation.salt = some_salt();
    if (draw_.below(4) == 0)
      operation.limit = static_cast<std::int64_t>(draw_.below(operation.tokens.size() + 3));
    return operation;
  }
  if (!has_states_) {
    operation.verb = Verb::insert;
    if (node_is_there_ && draw_.below(2) == 0) {  // what the last reply showed is counted on
      operation.prev = ending_.tokens.size();
      operation.tokens = ending_.tokens.followed_by(fresh_tokens(draw_.between(0, 8)));
      operation.salt = ending_.salt;
      return operation;
    }
    operation.tokens = some_tokens();
    operation.salt = some_salt();
    overstate_prev(operation);
    return operation;
  }
  if (slots_.size() >= 2 && choice == 6) {
    operation.verb = Verb::copy;
    const std::size_t from = draw_.below(slots_.size());
    place_ = draw_.below(slots_.size());
    operation.from = slots_[from].name;
    operation.to = slots_[place_].name;
    return operation;
  }
  if (!slots_.empty() && choice < 11) return use_of_slot(draw_.below(slots_.size()));
  operation.verb = Verb::alloc;
  operation.as = fresh_name("s");
  return operation;
}

// --- Bad input -----------------------------------------------------------------------------------

namespace {

/// A document that no prompt has.
constexpr Document kNowhere = 99;

Name nobody() {
  return Name::intern("nobody");
}

}  // namespace

std::optional<Operation> RandomTrace::bad_input() {
  if (!draw_.chance(static_cast<std::uint64_t>(swarm_.bad), 40)) return std::nullopt;
  const Request* const request =
      requests_.empty() ? nullptr : &requests_[draw_.below(requests_.size())];
  switch (draw_.below(6)) {
    case 0: return refused_.empty() ? bad_admission() : of_the_refused();
    case 1: return bad_of_tree();
    case 2: return bad_admission();
    case 3: return request == nullptr ? bad_admission() : bad_result(*request);
    default: return request == nullptr ? bad_of_tree() : bad_forward(*request);
  }
}

/// Of a request that was not admitted. (One that was never asked for cannot stand in a file.)
Operation RandomTrace::of_the_refused() {
  constexpr Verb kVerbs[] = {Verb::extend, Verb::complete, Verb::accept, Verb::checkpoint,
                             Verb::finish, Verb::abort,    Verb::preempt};
  Operation operation;
  operation.verb = kVerbs[draw_.below(std::size(kVerbs))];
  operation.id = refused_[draw_.below(refused_.size())];
  operation.insert = operation.verb != Verb::finish || draw_.chance(1, 2);
  if (operation.verb == Verb::extend || operation.verb == Verb::accept) {
    operation.tokens = fresh_tokens(1);
    operation.n = 1;
  }
  return operation;
}

/// What cannot be computed or stored now: more than there is, or something between a verification
/// and its verdict, or out of the order of results.
Operation RandomTrace::bad_forward(const Request& request) {
  Operation operation;
  operation.id = request.id;
  operation.verb = Verb::extend;
  const std::int64_t left = request.known.size() - request.computed;
  const bool verifying = !request.drafts.empty();
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
      return operation;
  }
}

/// A verdict that is none, or a result that is not to come.
Operation RandomTrace::bad_result(const Request& request) {
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

Operation RandomTrace::bad_admission() {
  Operation admit;
  admit.verb = Verb::admit;
  admit.id = nobody();
  admit.tokens = some_tokens();
  switch (draw_.below(3)) {
    case 0: admit.tokens = Tokens(); break;
    case 1: admit.prompt = admit.tokens.size() + draw_.between(1, 3); break;
    default: admit.external = 1; break;
  }
  return admit;
}

/// Names that nobody has, names that are taken, prefixes that are not stored, and what a radix
/// cache does not do at all.
Operation RandomTrace::bad_of_tree() {
  const auto page = static_cast<std::uint32_t>(swarm_.config.page);
  Operation operation;
  const std::uint64_t choice = draw_.below(10);
  if (choice == 0) {
    constexpr Verb kVerbs[] = {Verb::compact, Verb::capture, Verb::restore};
    operation.verb = kVerbs[draw_.below(requests_.empty() ? 1 : std::size(kVerbs))];
    operation.as = operation.from = nobody();
    if (!requests_.empty()) operation.id = requests_.front().id;
    if (operation.verb == Verb::compact) operation.mapping = {0};
  } else if (choice == 1) {
    operation.verb = Verb::unlock;
    operation.lock = nobody();
  } else if (choice == 2 && !locks_.empty() && node_is_there_) {
    operation.verb = Verb::lock;
    operation.tokens = ending_.tokens;
    operation.salt = ending_.salt;
    operation.as = locks_[draw_.below(locks_.size())];
  } else if (choice == 3) {
    operation.verb = Verb::lock;
    operation.as = nobody();
    if (draw_.chance(1, 2)) operation.tokens = Tokens::of_document(kNowhere, 0, page);
  } else if (choice == 4) {
    operation.verb = Verb::insert;
    operation.tokens = Tokens::of_document(kNowhere, 0, page);
    if (has_states_ && draw_.chance(1, 2)) return operation;  // it needs a slot
    if (has_states_) operation.slot = slots_.empty() ? nobody() : slots_.front().name;
    operation.prev = page;
  } else if (choice == 5 && has_states_) {
    operation.verb = draw_.chance(1, 2) && !slots_.empty() ? Verb::fork : Verb::alloc;
    operation.as = slots_.empty() ? Name() : slots_[draw_.below(slots_.size())].name;
    operation.slot = operation.as;
    if (slots_.empty()) return bad_admission();
  } else {
    constexpr Verb kVerbs[] = {Verb::fork, Verb::advance, Verb::copy, Verb::free, Verb::insert};
    operation.verb = kVerbs[draw_.below(has_states_ ? 5 : 4)];
    operation.tokens = Tokens::of_document(kNowhere, 0, page);
    operation.slot = operation.as = operation.from = operation.to = nobody();
    if (operation.verb == Verb::copy && !slots_.empty())
      (draw_.chance(1, 2) ? operation.from : operation.to) = slots_.front().name;
    if (!has_states_ && draw_.chance(1, 5)) operation.verb = Verb::alloc;
  }
  return operation;
}

Operation RandomTrace::next() {
  may_be_bad_ = false;
  if (bare_lock_.exists()) {
    node_is_there_ = false;
    return last_ = of_tree();
  }
  switch (pick<5>(draw_, {swarm_.request, swarm_.tree, swarm_.evict, swarm_.check, swarm_.flush})) {
    case 0: last_ = of_request(); break;
    case 1: last_ = of_tree(); break;
    case 2:
      last_ = Operation{};
      last_.verb = Verb::evict;
      last_.kv = draw_.between(0, swarm_.longest);
      last_.state = draw_.between(0, 2);
      break;
    case 3: last_ = Operation{}; break;  // check
    default:
      last_ = Operation{};
      last_.verb = Verb::flush;
      break;
  }
  node_is_there_ = false;
  return last_;
}

void RandomTrace::answered(const Reply& reply) {
  if (reply.refused != Refusal::none) {
    if (last_.verb == Verb::admit) refused_.push_back(last_.id);
    return;
  }
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
      node_is_there_ = last_.tokens.size() % swarm_.config.page == 0;
      may_lock_ = true;
      return;
    case Verb::match:
      // A match that ends inside an edge splits it, so a node ends here.
      ending_ = last_;
      ending_.tokens = last_.tokens.prefix(static_cast<std::uint32_t>(reply.get(ReplyField::kv)));
      node_is_there_ = !ending_.tokens.empty();
      may_lock_ =
          counts_locks_on_tombstones_ || reply.get(ReplyField::state) == reply.get(ReplyField::kv);
      return;
    case Verb::lock: locks_.push_back(last_.as); return;
    case Verb::unlock: std::erase(locks_, last_.lock); return;
    default: return;
  }
}

bool RandomTrace::next_of_the_end(Operation& operation) {
  operation = Operation{};
  if (bare_lock_.exists()) {
    std::erase(locks_, bare_lock_);
    operation.verb = Verb::unlock;
    operation.lock = std::exchange(bare_lock_, Name());
  } else if (!requests_.empty()) {
    operation.verb =
        draw_.below(2) == 0 || !requests_.back().drafts.empty() ? Verb::abort : Verb::finish;
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

namespace {

/// Of each verification, drafts and how many tokens are kept, until `output` tokens are sampled.
void draw_verifications(Draw& draw, RequestSpec& spec) {
  for (std::int64_t sampled = 1; sampled < spec.output_size(); sampled += spec.accept.back()) {
    spec.drafts.push_back(draw.between(0, 3));
    spec.accept.push_back(draw.between(1, spec.drafts.back() + 1));
  }
}

}  // namespace

namespace {

/// Requests to the scheduler, one after the other.
class RequestMaker {
 public:
  RequestMaker(const Swarm& swarm, Draw& draw) : swarm_(swarm), draw_(draw) {}

  std::vector<Statement> all() {
    for (int i = 0; i < swarm_.operations; ++i) {
      say(request(Name::intern(fmt::format("q{}", i))));
      const auto stop = pick<3>(draw_, {12, swarm_.abort * 2, swarm_.preempt * 2});
      if (stop != 0)
        say(Intervention{
            .retract = stop == 2, .id = ids_[draw_.below(ids_.size())], .at = some_time()});
      if (!sessions_.empty() && draw_.chance(1, 6))
        say(CloseSession{sessions_[draw_.below(sessions_.size())]});
      if (draw_.chance(1, 3)) say(some_run());
      if (draw_.chance(static_cast<std::uint64_t>(swarm_.evict), 12)) say(some_eviction());
    }
    say(RunStatement{});
    for (const Verb verb : {Verb::flush, Verb::check}) {
      Operation operation;
      operation.verb = verb;
      say(operation);
    }
    return std::move(statements_);
  }

 private:
  template <class What>
  void say(What what) {
    statements_.push_back(
        {.line = static_cast<int>(statements_.size()) + 1, .what = std::move(what)});
  }

  /// Times never go back from line to line.
  Nanoseconds some_time() {
    if (!draw_.chance(1, 3)) return -1;
    return latest_ += draw_.between(0, 4) * swarm_.config.step_time;
  }
  Name some_session() {
    return Name::intern(
        fmt::format("c{}", draw_.below(static_cast<std::uint64_t>(swarm_.sessions))));
  }

  RequestSpec request(Name id) {
    RequestSpec spec;
    spec.id = id;
    if (draw_.chance(static_cast<std::uint64_t>(swarm_.salted), 40)) spec.salt = Name::intern("s");
    const Tokens prompt = drawn_prompt(swarm_, draw_, seen_);
    spec.prompt_size = prompt.size();
    spec.tokens = prompt.followed_by(drawn_tokens(swarm_, draw_, draw_.between(1, swarm_.piece)));
    spec.stops = true;
    spec.at = some_time();
    if (draw_.chance(static_cast<std::uint64_t>(swarm_.drafts), 10))
      draw_verifications(draw_, spec);
    if (draw_.chance(static_cast<std::uint64_t>(swarm_.urgent), 10))
      spec.priority = draw_.between(1, 2);
    if (swarm_.sessions != 0 && draw_.chance(1, 2)) {
      spec.session = some_session();
      sessions_.push_back(spec.session);
    }
    if (swarm_.config.ranks > 1 && draw_.chance(1, 4))
      spec.rank = draw_.between(0, swarm_.config.ranks - 1);
    seen_.push_back(spec.tokens);
    ids_.push_back(spec.id);
    return spec;
  }

  RunStatement some_run() {
    if (!draw_.chance(1, 3)) return {.steps = draw_.between(1, 6)};
    return {.until = latest_ += draw_.between(0, 5) * swarm_.config.step_time};
  }

  Operation some_eviction() {
    Operation evict;
    evict.verb = Verb::evict;
    evict.kv = draw_.between(0, swarm_.longest);
    evict.state = draw_.between(0, 2);
    return evict;
  }

  const Swarm& swarm_;
  Draw& draw_;
  std::vector<Statement> statements_;
  std::vector<Tokens> seen_;
  std::vector<Name> ids_;
  std::vector<Name> sessions_;
  Nanoseconds latest_ = 0;
};

}  // namespace

std::vector<Statement> random_requests(const Swarm& swarm, Draw& draw) {
  return RequestMaker(swarm, draw).all();
}

}  // namespace lockstep::cache_sim
