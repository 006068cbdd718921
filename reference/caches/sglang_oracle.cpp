#include "reference/caches/sglang_oracle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "reference/base/counted.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::reference {
namespace {

std::int64_t or_else(std::int64_t field, std::int64_t otherwise) {
  return field == Operation::kAbsent ? otherwise : field;
}

SglangPrefixMap::Options map_options(const Config& config, const SglangOracle::Variant& variant) {
  const std::string write = config.text("write_policy");
  return {.page = config.page,
          .has_states = variant.has_states,
          .path_cap = config.number("path_cap"),
          .host_kv = variant.has_states ? config.number("host_kv") : 0,
          .host_states = config.number("host_states"),
          .host_window = config.number("host_window_kv") > 0 ? config.number("host_window_kv")
                                                             : config.number("host_kv"),
          .inserts = write == "write_through_selective" ? 2 : 1,
          .backs_up_late = write == "write_back",
          .has_storage = variant.has_states && has_disk(config),
          .reach = std::max<std::int64_t>(0, config.number("window") - 1),
          .rules = variant.rules};
}

Reply evicted_reply(const SglangPrefixMap::Evicted& evicted) {
  return Reply()
      .set(ReplyField::evicted_kv, evicted.kv)
      .set(ReplyField::evicted_states, evicted.states);
}

auto no_request(const Operation& operation) {
  return fail(fmt::format("there is no request {}", operation.id.text()));
}
auto still_verifying(const Operation& operation) {
  return fail(
      fmt::format("request {} has a verification that was not accepted yet", operation.id.text()));
}
auto no_slot(Name name) {
  return fail(fmt::format("there is no slot {}", name.text()));
}

}  // namespace

SglangOracle::SglangOracle(const Config& config, const Variant& variant)
    : config_(config),
      variant_(variant),
      has_states_(variant.has_states),
      cached_(map_options(config, variant), free_slots_) {}

Result<Reply> SglangOracle::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::extend: return extend(operation);
    case Verb::accept: return accept(operation);
    case Verb::checkpoint: return checkpoint(operation);
    case Verb::finish: return finish(operation);
    case Verb::abort:
    case Verb::preempt: return abort(operation);
    case Verb::step:
      if (operation.padded != Operation::kAbsent && operation.padded < std::ssize(operation.ids))
        return fail("step: a captured graph has a row for every request");
      return Reply{};
    case Verb::complete: return complete(operation);
    case Verb::capture:
    case Verb::restore:
    case Verb::compact:
      return fail(fmt::format("{}: this cache has no slot cache", to_string(operation.verb)));
    case Verb::evict: return evict(operation);
    case Verb::flush: return flush();
    case Verb::fail:
      if (!cached_.has_storage()) break;
      [[fallthrough]];
    case Verb::land: return land(operation);
    case Verb::settle: return settle();
    case Verb::check: return check();
    case Verb::match: return match(operation);
    case Verb::insert: return insert(operation);
    case Verb::lock: return lock(operation);
    case Verb::unlock: return unlock(operation);
    default: break;
  }
  if (!has_states_) return fail(fmt::format("{}: radix has no states", to_string(operation.verb)));
  switch (operation.verb) {
    case Verb::alloc: return alloc(operation);
    case Verb::advance: return advance(operation);
    case Verb::fork: return fork(operation);
    case Verb::copy: return copy(operation);
    case Verb::free: return free(operation);
    default: break;
  }
  return fail(fmt::format("{}: this cache does not know the verb", to_string(operation.verb)));
}

// --- The two memories ---------------------------------------------------------------------------

/// Every KV slot is free, of the map, or private to a request.
std::int64_t SglangOracle::kv_free() const {
  std::int64_t used = cached_.kv();
  for (const auto& [name, request] : requests_) used += request.allocated - request.protected_size;
  return whole_pages(config_.kv_tokens) - used;
}

/// Evicts what is missing [1.6]; false where that was not enough.
bool SglangOracle::make_kv_free(std::int64_t needed, Evicted& evicted) {
  if (!has_room(needed))
    evicted = cached_.evict(variant_.evicts_full_request ? needed : needed - kv_free(), 0,
                            cached_.has_windows() ? needed - window_free() : 0);
  return has_room(needed);
}

/// A token takes KV of both kinds, where there are windows.
bool SglangOracle::has_room(std::int64_t needed) {
  return needed <= kv_free() && (!cached_.has_windows() || needed <= window_free());
}

bool SglangOracle::make_slots_free(std::int64_t needed, Evicted& evicted) {
  const std::int64_t lacking = needed - slots_free();
  if (lacking > 0) evicted = cached_.evict(0, lacking);
  if (variant_.slots_tell_no_kv) evicted.kv = 0;
  return needed <= slots_free();
}

/// Counts free slots, those that were never used included.
std::int64_t SglangOracle::slots_free() const {
  const std::int64_t unused = has_states_ ? config_.state_slots + 1 - next_unused_slot_ : 0;
  return unused + static_cast<std::int64_t>(free_slots_.size());
}

/// The first free slot, after evicting one state where none is free; none where that did not help.
StateSlot SglangOracle::take_slot(Evicted& evicted) {
  if (!make_slots_free(1, evicted)) return StateSlot::none();
  if (next_unused_slot_ <= config_.state_slots)
    return {static_cast<std::uint32_t>(next_unused_slot_++)};
  const StateSlot slot = free_slots_.front();
  free_slots_.pop_front();
  return slot;
}

void SglangOracle::release_slot(StateSlot slot) {
  if (slot.exists()) free_slots_.push_back(slot);
}

/// The position at which one more state, or without states one more window, would have helped a
/// match; 0: none.
std::int64_t SglangOracle::branch_of(std::int64_t full, std::int64_t told) const {
  const std::int64_t step = has_states_ ? grid() : config_.page;
  return full / step * step > told ? full / step * step : 0;
}

/// The positions at which a forward can show a state: whole pages and whole chunks of the model.
std::int64_t SglangOracle::grid() const {
  return std::lcm(std::max(config_.model_chunk, config_.page), config_.page);
}

// --- Requests -----------------------------------------------------------------------------------

Result<void> SglangOracle::check_admission(const Operation& operation) const {
  const std::string& name = operation.id.text();
  const std::int64_t size = operation.tokens.size();
  if (requests_.contains(name)) return fail(fmt::format("request {} is admitted already", name));
  if (size == 0) return fail(fmt::format("request {} has no tokens", name));
  if (or_else(operation.prompt, size) > size)
    return fail(fmt::format("request {} has fewer tokens than its prompt", name));
  return check_windows(operation);
}

/// With windows on a host, what is copied is locked on both tiers meanwhile.
void SglangOracle::take_copy_slot(Request& request, const Prefix& source) {
  const bool on_both = cached_.has_host() && cached_.has_windows();
  SglangPrefixMap::LoadLocks locks;
  if (on_both) locks = cached_.lock_for_load(source);
  Evicted unreported;
  request.live = take_slot(unreported);
  if (on_both) cached_.unlock_load(source, locks);
}

Result<Reply> SglangOracle::admit(const Operation& operation) {
  if (const Result<void> sound = check_admission(operation); !sound)
    return tl::unexpected(sound.error());
  const std::int64_t size = operation.tokens.size();
  if (size > config_.kv_tokens) return Reply::refusal(Refusal::too_long);
  Waiting* const waiting = cached_.has_storage() ? &waiting_for(operation) : nullptr;
  if (static_cast<std::int64_t>(requests_.size()) >= config_.rows())
    return Reply::refusal(Refusal::no_row);
  if (waiting != nullptr && !fetch_is_over(*waiting, operation.late))
    return Reply::refusal(Refusal::same_step);

  Request request{
      .known = prefix_of(operation), .prompt = or_else(operation.prompt, size), .admitted = size};
  const auto [full, prefix, best_size, told] =
      cached_.match(cached_.whole_pages(request.known.first(size - 1)));
  std::int64_t cached = prefix;
  request.branch = branch_of(full, told);
  Prefix best = request.known.first(cached);
  bool loaded = false;
  const auto refuse = [&](Refusal refusal) {
    if (loaded) cached_.land_loads(cached_.newest_load());  // its target cannot go before
    release_slot(request.live);
    for (const StateSlot slot : request.tracking) release_slot(slot);
    unlock(request, best, has_states_);
    return Reply::refusal(refusal);
  };
  // Locked before a slot is sought: that eviction must not take what is to be copied.
  lock(request, best, has_states_);
  Evicted evicted;
  // The copy is of the longer prefix if the host has more: its window is loaded.
  const Prefix source = request.known.first(std::max(best_size, prefix));
  if (has_states_ && !source.empty() && cached_.has_state(source)) {
    take_copy_slot(request, source);
    if (!request.live.exists()) return refuse(Refusal::no_state_slot);
  }
  if (waiting != nullptr && has_lost_match(*waiting, told, operation))
    return refuse(Refusal::same_step);
  // Unlocked KV is counted only where the count decides, because a burst of requests asks often.
  const std::int64_t lacking = size - cached + or_else(operation.room, 0) - kv_free();
  if (lacking > 0 && lacking > cached_.kv() - cached_.locked_kv()) return refuse(Refusal::no_kv);
  const std::int64_t left =
      operation.room == Operation::kAbsent ? 0 : kv_free() + cached_.kv() - cached_.locked_kv();
  if (best_size > prefix) {  // the host has more [1.13]
    if (const auto refusal = load(request, best, best_size, loaded); refusal)
      return refuse(*refusal);
    if (loaded) cached = best_size;
  }
  if (has_states_ && !take_slots(request, evicted)) return refuse(Refusal::no_state_slot);
  // A transfer brings the KV beyond the hit, except that of the last token, which is computed here.
  const std::int64_t there = std::max(cached, std::min(or_else(operation.external, 0), size - 1));
  if (there > cached) {
    Evicted for_kv;
    if (!make_kv_free(up_to_whole_pages(there) - cached, for_kv)) return refuse(Refusal::no_kv);
    evicted.kv += for_kv.kv;
    evicted.states += for_kv.states;
  }
  request.computed = request.written = there;
  request.allocated = up_to_whole_pages(there);
  request.protected_size = cached;
  request.state_locked = has_states_;
  request.awaits = cached_.newest_load();
  if (there > cached) cached_.land_loads(request.awaits);  // the transfer writes over the state
  requests_.emplace(operation.id.text(), std::move(request));
  waiting_.erase(operation.id.text());

  Reply reply = evicted_reply(evicted).set(ReplyField::cached, there);
  if (has_states_) reply.set(ReplyField::state, there).set(ReplyField::conv, there);
  if (operation.room != Operation::kAbsent) reply.set(ReplyField::kv, left);
  if (cached_.has_host()) reply.set(ReplyField::host, cached - prefix);
  return reply;
}

/// The slots that a request needs beside that of a copy: its live one where nothing was copied, and
/// those for tracking. All of them or none.
bool SglangOracle::take_slots(Request& request, Evicted& evicted) {
  const bool has_live = request.live.exists();
  if (!make_slots_free((has_live ? 0 : 1) + tracking_slots(), evicted)) return false;
  Evicted nothing;
  if (!has_live) request.live = take_slot(nothing);
  for (int i = 0; i < tracking_slots(); ++i) request.tracking.push_back(take_slot(nothing));
  return true;
}

std::optional<SglangOracle::DraftTree> SglangOracle::DraftTree::of(const Operation& extend) {
  const std::vector<Token> drafts = extend.drafts.values();
  const bool chain = extend.parents.empty();
  if (!chain && extend.parents.size() != drafts.size()) return std::nullopt;
  std::vector<std::vector<Token>> ways(1);  // by number: the drafts from the root to this one
  DraftTree tree;
  for (std::size_t i = 0; i < drafts.size(); ++i) {
    const std::int64_t parent = chain ? static_cast<std::int64_t>(i) : extend.parents[i];
    if (parent < 0 || parent >= std::ssize(ways)) return std::nullopt;
    std::vector<Token> way = ways[static_cast<std::size_t>(parent)];
    way.push_back(drafts[i]);
    if (!tree.ways_.insert(way).second) return std::nullopt;
    ways.push_back(std::move(way));
  }
  return tree;
}

Result<Reply> SglangOracle::extend(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return no_request(operation);
  Request& request = found->second;
  if (request.pending) return still_verifying(operation);
  if (const Result<void> fits = check_windows(operation); !fits)
    return tl::unexpected(fits.error());
  if (operation.async && config_.overlap == 0)
    return fail("extend: this cache does not run ahead of results without overlap=1");
  if (operation.async ? request.in_flight.size() == 2 : !request.in_flight.empty())
    return fail("extend: results of this request are still out");

  const bool verifies = !operation.drafts.empty();
  const std::optional<DraftTree> tree = DraftTree::of(operation);
  if (!tree) return fail("extend: parents is no tree of these drafts");
  if (verifies && operation.async) return fail("extend: a verification is not async");
  const std::int64_t known = request.known.size() + operation.tokens.size();
  const std::int64_t inputs = known - request.computed;
  const std::int64_t drafts = operation.drafts.size();
  if (verifies && operation.n != inputs + drafts)
    return fail(fmt::format("extend: n is {} where {} and {} are computed", operation.n,
                            counted(inputs, "input"), counted(drafts, "draft")));
  if (!verifies && (operation.n < 1 || operation.n > inputs))
    return fail(
        fmt::format("request {} extends past the tokens it was given", operation.id.text()));

  const Forward forward = verifies                              ? Forward::verification
                          : request.computed < request.admitted ? Forward::chunk
                                                                : Forward::decode;
  Evicted evicted;
  // With windows, the scheduler acts between decode steps.
  const bool by_step = cached_.has_windows() && forward == Forward::decode;
  if (by_step && operation.n == 1) slide_for_decoding(request);
  const std::int64_t end = request.computed + operation.n;
  if (by_step && operation.n > 1 ? !has_room_for_steps(request, end, evicted)
                                 : !allocate(request, end, forward, evicted))
    return Reply::refusal(Refusal::no_kv);
  cached_.land_loads(request.awaits);
  request.known.tokens.append(operation.tokens);
  if (verifies) {
    before_verification(request, operation.n);
    request.written = request.computed;
    request.pending = Verification{inputs, *tree};
  } else {
    const std::int64_t from = request.computed;
    if (operation.async) request.in_flight.push_back(from);
    for (std::int64_t left = operation.n; left > 0;) {
      if (by_step && operation.n > 1) {
        slide_for_decoding(request);
        Evicted for_step;
        allocate(request, request.computed + 1, forward, for_step);
        evicted.kv += for_step.kv;
        evicted.states += for_step.states;
      }
      const std::int64_t begin = request.computed;
      request.computed += by_step ? 1 : left;
      left -= request.computed - begin;
      if (by_step) ++request.decoded;
      write_state(request, begin, forward);
      advanced(request, begin, forward);
      if (!operation.async) results_came(request);
    }
    if (forward == Forward::chunk) request.prefilled = request.computed;
  }
  return evicted_reply(evicted).set(ReplyField::n, operation.n);
}

/// Every forward writes the state, but a decode step with a ring [1.12]: that one writes it where
/// the ring is full, and where the length is a multiple of the track interval.
void SglangOracle::write_state(Request& request, std::int64_t from, Forward forward) const {
  const std::int64_t ring = config_.number("replay_ring");
  const std::int64_t interval = config_.number("track_interval");
  if (ring == 0 || forward != Forward::decode) {
    request.written = request.computed;
    return;
  }
  for (std::int64_t length = from + 1; length <= request.computed; ++length)
    if (length == request.written + ring || length % interval == 0) request.written = length;
}

/// KV for the tokens from `computed` to `to`; false, and nothing taken, where there is too little.
bool SglangOracle::allocate(Request& request, std::int64_t to, Forward forward, Evicted& evicted) {
  const std::int64_t page = config_.page;
  const std::int64_t before = request.allocated;
  if (page == 1) {
    if (!make_kv_free(to - before, evicted)) return false;
  } else if (forward == Forward::decode) {
    for (std::int64_t token = request.computed; token < to; ++token) {
      Evicted for_token;
      const bool has_page = make_kv_free(page, for_token);
      evicted.kv += for_token.kv;
      evicted.states += for_token.states;
      if (token < request.allocated) continue;
      if (!has_page) {
        request.allocated = before;
        return false;
      }
      request.allocated += page;
    }
  } else {
    make_kv_free(to - request.computed + page, evicted);
    if (!has_room(up_to_whole_pages(to) - before)) return false;
  }
  request.allocated = std::max(before, up_to_whole_pages(to));
  return true;
}

Result<Reply> SglangOracle::complete(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return no_request(operation);
  if (found->second.in_flight.empty()) return fail("complete: no result is out");
  found->second.in_flight.pop_front();
  results_came(found->second);
  return Reply{};
}

Result<Reply> SglangOracle::accept(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return no_request(operation);
  Request& request = found->second;
  const std::vector<Token> tokens = operation.tokens.values();
  if (operation.n != static_cast<std::int64_t>(tokens.size()))
    return fail(
        fmt::format("accept: n is {} but {} came", operation.n, counted(tokens.size(), "token")));
  if (request.pending) {
    const auto& [inputs, drafts] = *request.pending;
    if (tokens.empty() || !drafts.has({tokens.begin(), tokens.end() - 1}))
      return fail("accept: all tokens but the last are drafts, each after the one before");
    const std::int64_t from = request.computed;
    request.computed += inputs + operation.n - 1;  // the last token is not computed yet
    request.written = request.computed;
    advanced(request, from, Forward::verification);
    request.allocated = up_to_whole_pages(request.computed);
    request.pending.reset();
  }
  request.known.tokens.append(operation.tokens);
  return Reply().set(ReplyField::n, operation.n);
}

void SglangOracle::lock(Request& request, const Prefix& prefix, bool with_state) {
  cached_.lock(prefix, with_state);
  request.window_locked = cached_.lock_window(prefix);
  request.window_released = false;
}

void SglangOracle::unlock(const Request& request, const Prefix& prefix, bool with_state) {
  cached_.unlock(prefix, with_state);
  if (!request.window_released) cached_.unlock_window(prefix, request.window_locked);
}

/// Unlocks the request's prefix and locks its first `to` tokens instead.
void SglangOracle::move_lock(Request& request, std::int64_t to) {
  unlock(request, request.known.first(request.protected_size), request.state_locked);
  request.state_locked = has_states_ && config_.number("skip_decode_lock") == 0;
  request.protected_size = to;
  lock(request, request.known.first(to), request.state_locked);
  request.decoded = 0;
}

/// Inserts what the request knows, up to `length`; without states, then its prompt alone.
bool SglangOracle::store(Request& request, std::int64_t length, StateSlot state) {
  const Prefix key = request.known.first(length);
  const std::int64_t prev = request.protected_size;
  if (cached_.has_windows())
    return cached_
        .insert_with_window(key, state, prev, std::exchange(request.inserted, length),
                            request.window_evicted)
        .exist;
  const bool exist = cached_.insert(key, state, prev, request.inserted).exist;
  request.inserted = std::max(request.inserted, length);
  const std::int64_t prompt = whole_pages(request.prompt);
  if (!has_states_ && prompt > 0 && prompt < length)
    cached_.insert(request.known.first(prompt), StateSlot::none(), prompt, prompt);
  return exist;
}

Result<Reply> SglangOracle::checkpoint(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return no_request(operation);
  Request& request = found->second;
  if (request.pending) return still_verifying(operation);
  const std::int64_t up_to = or_else(operation.up_to, request.computed);
  if (up_to > request.computed)
    return fail(fmt::format("request {} has computed only {}", operation.id.text(),
                            counted(request.computed, "token")));
  cached_.land_loads(request.awaits);
  const std::optional<Stored> stored = store_unfinished(request, up_to);
  if (!stored) return Reply::refusal(Refusal::no_state_slot);
  request.awaits = cached_.newest_load();  // whose KV it may have been given for its own
  return Reply()
      .set(ReplyField::exist, stored->exist ? 1 : 0)
      .set(ReplyField::length, stored->length);
}

std::optional<SglangOracle::Stored> SglangOracle::store_unfinished(Request& request,
                                                                   std::int64_t up_to) {
  // The live state stands for exactly the computed tokens.
  if (has_states_ && (up_to != request.computed || request.written != up_to))
    return Stored{false, request.protected_size};
  if (whole_pages(up_to) == 0 || whole_pages(up_to) < request.protected_size)
    return Stored{true, request.protected_size};
  const std::int64_t kept = cut_at_branch(request, up_to);
  const std::int64_t length = whole_pages(kept);
  StateSlot copy;
  if (has_states_) {
    Evicted unreported;
    copy = take_slot(unreported);
    if (!copy.exists()) return std::nullopt;
  }
  slide(request, kept - 1, 1);
  const bool is_cut = request.branch > request.protected_size && request.branch == kept;
  const bool exist = store(request, length, copy);
  if (variant_.checkpoint_matches) cached_.match(request.known.first(length));
  move_lock(request, length);
  if (exist) release_slot(copy);
  if (is_cut && !has_states_) {  // the rest is stored by a later insert
    request.branch = 0;
    slide(request, up_to - 1, 1);
  }
  return Stored{exist, length};
}

Result<Reply> SglangOracle::finish(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return no_request(operation);
  Request& request = found->second;
  if (!operation.insert) return abort(operation);
  if (request.pending) return still_verifying(operation);

  const bool only_prompt = config_.number("strip_thinking") != 0;
  if (operation.up_to > request.known.size())
    return fail(fmt::format("request {} has not {}", operation.id.text(),
                            counted(operation.up_to, "token")));
  cached_.land_loads(request.awaits);
  std::int64_t committed = has_states_ ? request.committed() : request.computed;
  if (operation.up_to != Operation::kAbsent) committed = std::min(committed, operation.up_to);
  const std::int64_t owned = only_prompt ? std::min(request.prompt, committed) : committed;
  const Stored stored = store_finished(request, owned);
  forget(found);
  return Reply()
      .set(ReplyField::exist, stored.exist ? 1 : 0)
      .set(ReplyField::length, stored.length);
}

SglangOracle::Stored SglangOracle::store_finished(Request& request, std::int64_t owned) {
  // A state is stored for all computed tokens or not at all; what its ring has, it lacks.
  const bool whole = owned == request.computed;
  const std::int64_t length =
      whole_pages(has_states_ && whole ? request.written : cut_at_branch(request, owned));
  const bool fits = has_states_ ? whole : length >= request.protected_size;
  if (!fits || length == 0) return {true, request.protected_size};
  StateSlot given = request.live;
  if (variant_.finish_copies) {
    Evicted unreported;
    given = take_slot(unreported);
    if (!given.exists()) return {true, request.protected_size};
  }
  const bool exist = store(request, length, given);
  if (variant_.finish_copies && exist) release_slot(given);
  if (!variant_.finish_copies && !exist) request.live = StateSlot::none();  // the map's now
  return {exist, length};
}

Result<Reply> SglangOracle::abort(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return no_request(operation);
  cached_.land_loads(found->second.awaits);
  forget(found);
  return Reply{};
}

/// Ends the request and frees its KV beyond the protected tokens.
void SglangOracle::forget(std::map<std::string, Request>::iterator request) {
  const Request& gone = request->second;
  release_slot(gone.live);
  for (const StateSlot slot : gone.tracking) release_slot(slot);
  unlock(gone, gone.known.first(gone.protected_size), gone.state_locked);
  requests_.erase(request);
}

// --- Both levels --------------------------------------------------------------------------------

Reply SglangOracle::evict(std::int64_t kv, std::int64_t states, std::int64_t window) {
  Evicted evicted = cached_.evict(kv, variant_.tracks_eviction_apart ? 0 : states, window);
  if (variant_.tracks_eviction_apart) {
    const Evicted more = cached_.evict(0, states);
    evicted = {evicted.kv + more.kv, evicted.states + more.states};
  }
  return Reply().set(ReplyField::kv, evicted.kv).set(ReplyField::state, evicted.states);
}

/// Frees KV as an allocation of `room` tokens does, and allocates nothing.
Result<Reply> SglangOracle::make_room(const Operation& operation) {
  if (operation.kv != Operation::kAbsent || operation.state != Operation::kAbsent)
    return fail("evict: room= goes without the other fields");
  Evicted evicted;
  make_kv_free(operation.room, evicted);
  return Reply()
      .set(ReplyField::kv, evicted.kv)
      .set(ReplyField::state, evicted.states)
      .set(ReplyField::kv_free, kv_free());
}

Reply SglangOracle::check() {
  Reply reply;
  if (cached_.has_windows())
    reply.set(ReplyField::window_free, window_free())
        .set(ReplyField::window_locked, cached_.locked_window_kv());
  if (cached_.has_host())
    reply.set(ReplyField::host_kv_free, cached_.host_kv_free())
        .set(ReplyField::host_states_free, cached_.host_states_free());
  reply.set(ReplyField::kv_free, kv_free()).set(ReplyField::kv_locked, cached_.locked_kv());
  if (!has_states_) return reply;
  return reply.set(ReplyField::states_free, slots_free())
      .set(ReplyField::states_locked, cached_.locked_states());
}

// --- Tree verbs ---------------------------------------------------------------------------------

Result<Reply> SglangOracle::match(const Operation& operation) {
  const Prefix tokens = prefix_of(operation);
  const std::int64_t limit = std::min(or_else(operation.limit, tokens.size()), tokens.size());
  const auto [full, prefix, best, told] = cached_.match(cached_.whole_pages(tokens.first(limit)));
  Reply reply = Reply().set(ReplyField::kv, full);
  if (!has_states_ && cached_.has_windows())
    reply.set(ReplyField::cached, prefix).set(ReplyField::branch, branch_of(full, prefix));
  if (!has_states_) return reply;
  const std::int64_t branch = full / grid() * grid();
  const std::int64_t found = std::max(prefix, best);
  const bool is_told = variant_.tells_every_branch ? full > told : branch > told;
  if (cached_.has_host()) reply.set(ReplyField::host, found - prefix);
  return reply.set(ReplyField::state, prefix).set(ReplyField::branch, is_told ? branch : 0);
}

/// A slot with a name of its own, standing for `length` tokens.
Result<Reply> SglangOracle::hold_slot(Name name, std::int64_t length) {
  if (held_.contains(name.text()))
    return fail(fmt::format("there is a slot {} already", name.text()));
  Evicted unreported;
  const StateSlot slot = take_slot(unreported);
  if (!slot.exists()) return Reply::refusal(Refusal::no_state_slot);
  held_.emplace(name.text(), Held{slot, length});
  return Reply().set(ReplyField::slot, slot.value);
}

Result<Reply> SglangOracle::alloc(const Operation& operation) {
  return hold_slot(operation.as, 0);
}

Result<Reply> SglangOracle::advance(const Operation& operation) {
  const auto held = held_.find(operation.slot.text());
  if (held == held_.end()) return no_slot(operation.slot);
  held->second.length += operation.tokens.size();
  return Reply().set(ReplyField::length, held->second.length);
}

Result<Reply> SglangOracle::fork(const Operation& operation) {
  const auto held = held_.find(operation.slot.text());
  if (held == held_.end()) return no_slot(operation.slot);
  return hold_slot(operation.as, held->second.length);
}

Result<Reply> SglangOracle::copy(const Operation& operation) {
  const auto from = held_.find(operation.from.text());
  const auto to = held_.find(operation.to.text());
  if (from == held_.end()) return no_slot(operation.from);
  if (to == held_.end()) return no_slot(operation.to);
  to->second.length = from->second.length;
  return Reply{};
}

Result<Reply> SglangOracle::free(const Operation& operation) {
  const auto held = held_.find(operation.slot.text());
  if (held == held_.end()) return no_slot(operation.slot);
  release_slot(held->second.slot);
  held_.erase(held);
  return Reply{};
}

Result<Reply> SglangOracle::insert(const Operation& operation) {
  auto held = held_.end();
  if (has_states_) {
    if (!operation.slot.exists())
      return fail("insert: a state goes with the tokens, so it needs the field slot");
    held = held_.find(operation.slot.text());
    if (held == held_.end()) return no_slot(operation.slot);
  }
  const Prefix key = cached_.whole_pages(prefix_of(operation));
  const std::int64_t prev = or_else(operation.prev, 0);
  const auto prev_is_stored = [&] { return prev <= cached_.shared_on_device(key); };
  if (!prev_is_stored())
    return fail(
        fmt::format("insert: the first {} {} not stored", counted(prev, "token"), is_or_are(prev)));
  Evicted unreported;
  if (!make_kv_free(key.size() - prev, unreported)) return Reply::refusal(Refusal::no_kv);
  // The `prev` tokens were not locked, and making room has evicted some of them.
  if (!prev_is_stored()) return Reply::refusal(Refusal::no_kv);

  const StateSlot slot = has_states_ ? held->second.slot : StateSlot::none();
  const auto [exist, duplicates] =
      cached_.has_windows()
          ? cached_.insert_with_window(key, slot, prev, 0, up_to_whole_pages(prev))
          : cached_.insert(key, slot, prev, 0);
  if (has_states_ && !exist) held_.erase(held);  // the slot is the map's now
  return Reply().set(ReplyField::exist, exist ? 1 : 0).set(ReplyField::freed_kv, duplicates);
}

Result<Reply> SglangOracle::lock(const Operation& operation) {
  const std::string& name = operation.as.text();
  if (locks_.contains(name)) return fail(fmt::format("there is a lock {} already", name));
  Prefix end = prefix_of(operation);
  if (!cached_.contains(end)) return fail("lock: no stored prefix ends where the tokens end");
  cached_.lock(end, has_states_);
  const std::int64_t begin = cached_.lock_window(end);
  locks_.emplace(name, Lock{std::move(end), begin});
  return Reply{};
}

Result<Reply> SglangOracle::unlock(const Operation& operation) {
  const auto found = locks_.find(operation.lock.text());
  if (found == locks_.end()) return fail(fmt::format("there is no lock {}", operation.lock.text()));
  cached_.unlock(found->second.end, has_states_);
  cached_.unlock_window(found->second.end, found->second.window_begin);
  locks_.erase(found);
  return Reply{};
}

// --- By name ------------------------------------------------------------------------------------

namespace {

std::unique_ptr<Subject> make_radix(const SubjectOptions& options) {
  return std::make_unique<SglangOracle>(options.config, SglangOracle::Variant{.has_states = false});
}
std::unique_ptr<Subject> make_no_buffer(const SubjectOptions& options) {
  return std::make_unique<SglangOracle>(options.config, SglangOracle::Variant{});
}

// Before 0.5.23 [1.10, 1.11]. `sglang-legacy` gives the decision digest of 0.5.9's MambaRadixCache
// on `sglang-w1`; nobody recorded those of `sglang-v0`.

std::unique_ptr<Subject> make_legacy(const SubjectOptions& options) {
  const SglangOracle::Variant legacy{
      .rules = {.paths_are_used = true, .bare_parents_go = true, .tombstones_lock = false},
      .evicts_full_request = true,
      .tracks_eviction_apart = true,
      .slots_tell_no_kv = true,
      .checkpoint_matches = true,
      .tells_every_branch = true};
  return std::make_unique<SglangOracle>(options.config, legacy);
}

std::unique_ptr<Subject> make_first(const SubjectOptions& options) {
  const SglangOracle::Variant first{
      .rules = {.existing_end_is_used = false, .bare_parents_go = true, .tombstones_lock = false},
      .evicts_full_request = true,
      .tracks_eviction_apart = true,
      .finish_copies = true};
  return std::make_unique<SglangOracle>(options.config, first);
}

const Registration<OracleEntry> kSglang{{"radix", make_radix},
                                        {"sglang-no-buffer", make_no_buffer},
                                        {"sglang-legacy", make_legacy},
                                        {"sglang-v0", make_first}};

}  // namespace
}  // namespace lockstep::reference
