#include "cache_sim/policies/sglang/sglang_policy.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/policies/request_checks.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {
namespace {

RadixTree::Options tree_options(const Config& config) {
  return {.page = static_cast<std::uint32_t>(config.page),
          .branch_grid = static_cast<std::uint32_t>(
              std::lcm(std::max(config.model_chunk, config.page), config.page)),
          .path_cap = SglangOptions::of(config).path_cap};
}

/// More than any trace fills. Slots that hold numbers cost memory from the start.
StorageTier::Room storage_room(const Config& config) {
  if (!has_disk(config)) return {0, 0};
  if (config.text(kFidelityField) != "label") return {1 << 12, 1 << 7};
  return {1 << 24, 1 << 20};
}

std::unique_ptr<HostTier> host_tier(const Config& config, const SglangRules& rules,
                                    LayerState& layers) {
  const SglangOptions options = SglangOptions::of(config);
  if (!rules.has_states || options.host_kv == 0) return nullptr;
  const auto first_kv =
      static_cast<std::uint32_t>(config.kv_tokens + config.page + window_slots(config));
  const auto first_state = static_cast<std::uint32_t>(config.state_slots + 1);
  auto host =
      std::make_unique<HostTier>(first_kv, options.host_kv, options.host_window_kv, first_state,
                                 options.host_states, options.write_policy, layers);
  if (options.disk)
    host->storage =
        std::make_unique<StorageTier>(first_kv + static_cast<std::uint32_t>(options.host_kv),
                                      first_state + static_cast<std::uint32_t>(options.host_states),
                                      storage_room(config), options.storage_ranks, layers, rules);
  return host;
}

std::unique_ptr<RadixWindows> windows_of(const Config& config, LayerState& layers) {
  const SglangOptions options = SglangOptions::of(config);
  if (options.window == 0) return nullptr;
  const auto page = static_cast<std::uint32_t>(config.page);
  return std::make_unique<RadixWindows>(static_cast<std::uint32_t>(config.kv_tokens) + page,
                                        options.window_kv, page,
                                        static_cast<std::uint32_t>(options.window - 1), layers);
}

}  // namespace

SglangPolicy::SglangPolicy(const SubjectOptions& options, const SglangRules& variant,
                           FirstSlots first)
    : config_(options.config),
      options_(SglangOptions::of(config_)),
      layers_(*options.layers),
      variant_(variant),
      rules_(with_defect(variant, options.defect)),
      has_states_(variant.has_states),
      page_(static_cast<std::uint32_t>(config_.page)),
      kv_(first.kv != 0 ? first.kv : page_, config_.kv_tokens, page_, layers_),
      states_(first.state != 0 ? first.state : 1, has_states_ ? config_.state_slots : 0, layers_),
      host_(host_tier(config_, rules_, layers_)),
      windows_(windows_of(config_, layers_)),
      tree_(tree_options(config_), rules_, kv_, states_) {
  if (host_) tree_.use_host(*host_);
  if (windows_) tree_.use_windows(*windows_);
  for (std::int64_t row = config_.rows(); row >= 1; --row)
    free_rows_.push_back(
        {static_cast<std::uint32_t>(row)});  // row 1 is taken first; row 0 is the padding row
}

tl::unexpected<Error> SglangPolicy::unknown(const Operation& operation, std::string_view what,
                                            Name name) {
  return fail(
      fmt::format("{}: no {} is called `{}` here", to_string(operation.verb), what, name.text()));
}

Result<Reply> SglangPolicy::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::extend: return extend(operation);
    case Verb::complete: return complete(operation);
    case Verb::accept: return accept(operation);
    case Verb::checkpoint: return checkpoint(operation);
    case Verb::finish: return operation.insert ? finish(operation) : release(operation);
    case Verb::abort:
    case Verb::preempt: return release(operation);
    case Verb::step: return step(operation);
    case Verb::evict: return evict(operation);
    case Verb::flush: return flush();
    case Verb::fail:
      if (storage() == nullptr) break;
      [[fallthrough]];
    case Verb::land: return land(operation);
    case Verb::settle: return settle();
    case Verb::check: return check();
    case Verb::match: return match(operation);
    case Verb::insert: return insert(operation);
    case Verb::lock: return lock(operation);
    case Verb::unlock: return unlock(operation);
    case Verb::alloc:
    case Verb::fork: return hold_slot(operation);
    case Verb::advance: return advance_slot(operation);
    case Verb::copy: return copy(operation);
    case Verb::free: return free(operation);
    case Verb::load:
    case Verb::capture:
    case Verb::restore:
    case Verb::compact:
    case Verb::clone:
    case Verb::truncate: break;
  }
  return fail(
      fmt::format("{} is not an operation of SGLang's radix caches", to_string(operation.verb)));
}

// --- Requests ------------------------------------------------------------------------------------

/// The operation's request is unknown, or it has a verification whose accept has not come.
tl::unexpected<Error> SglangPolicy::not_idle(const Operation& operation) {
  if (find(operation.id) == nullptr) return unknown(operation, "admitted request", operation.id);
  return fail(fmt::format("{}: request `{}` has drafts that wait for their accept",
                          to_string(operation.verb), operation.id.text()));
}

bool SglangPolicy::make_room_for_kv(std::int64_t size, RadixTree::Evicted& evicted) {
  const std::int64_t window_lacks = windows_ ? size - windows_->pool.free_count() : 0;
  if (size > kv_.free_count() || window_lacks > 0)
    evicted = rules_.evicts_full_request
                  ? tree_.evict(size, 0)
                  : tree_.evict_for_alloc(size - kv_.free_count(), 0, window_lacks);
  return has_room(size);
}

/// KV tokens that an extend by n makes room for. With pages, SGLang asks for more than it takes
/// (allocation.py): for a chunk or a verification a page beyond its tokens, for each decoded token
/// a page, whether or not the token begins one.
std::int64_t SglangPolicy::kv_demand(const RadixRequest& request, std::int64_t n,
                                     Forward forward) const {
  const std::int64_t end = request.computed + n;
  if (page_ == 1 || !rules_.asks_for_page_more) return page_ceiling(end) - request.allocated;
  return forward == Forward::decode ? page_ceiling(end - 1) - request.allocated + page_ : n + page_;
}

bool SglangPolicy::make_room_for_states(std::int64_t count, RadixTree::Evicted& evicted) {
  if (count > states_.free_count())
    evicted = tree_.evict_for_alloc(0, count - states_.free_count());
  if (rules_.hides_kv_of_states) evicted.kv = 0;
  return count <= states_.free_count();
}

/// The slot that a request's forward reads and writes.
StateSlot SglangPolicy::slot_of(const RadixRequest& request) const {
  return rules_.finds_states_by_row ? StateSlot{request.row.value} : request.live;
}

/// sglang.md, 1.2, 5: the request's own slot, filled from the matched node, which must survive the
/// eviction that makes room. So must the copy on the host of a window that will be loaded there,
/// and the node `end`, with which the request begins where that load is refused.
bool SglangPolicy::copy_on_write(RadixRequest& request, NodeIndex source, NodeIndex end) {
  if (states_.free_count() == 0) {
    LOCKSTEP_MARK("match.evicts_for_copy");
    const NodeIndex locked = rules_.locks_copied_state ? source : NodeIndex::none();
    const bool locks_host = host_ && windows_ && rules_.copies_lock_host;
    tree_.lock(locked);
    if (end != source) tree_.lock(end);
    const std::uint32_t begin = locks_host ? tree_.lock_host(source) : 0;
    const std::uint32_t window_begin = locks_host ? tree_.lock_host_window(source) : 0;
    RadixTree::Evicted unreported;
    make_room_for_states(1, unreported);
    if (end != source) tree_.unlock(end);
    tree_.unlock(locked);
    if (locks_host) {
      tree_.unlock_host_window(source, window_begin);
      tree_.unlock_host(source, begin);
    }
  }
  if (states_.free_count() == 0) {
    if (rules_.loads_into_busy_slots)
      for (const RadixRequest& busy : requests_)
        if (busy.id.exists()) layers_.copy_state(tree_.node(source).state, busy.live);
    return false;
  }
  require(tree_.node(source).alive, "a matched node stays until its state is copied");
  request.live = states_.allocate();
  const StateSlot matched = tree_.node(source).state;
  if (rules_.reuses_kv_without_state && !matched.exists())
    layers_.zero_state(request.live);
  else if (!rules_.match_copies_conv)
    layers_.copy_state(matched, request.live, StatePart::recurrent);
  else
    copy_matched_state(request, matched);
  return true;
}

/// Takes the slots that a request needs besides the copy of a matched state: a live slot if nothing
/// was copied, and the slots for tracking.
bool SglangPolicy::take_slots(RadixRequest& request, RadixTree::Evicted& evicted) {
  const bool copied = request.live.exists();
  const int needed = (copied ? 0 : 1) + tracking_slots();
  if (!rules_.admission_evicts)
    require(states_.free_count() >= needed, "Not enough space for mamba cache");
  if (!make_room_for_states(needed, evicted)) return false;
  if (!copied) {
    request.live = states_.allocate();
    if (rules_.zeroes_new_states) layers_.zero_state(request.live);
  }
  for (int i = 0; i < tracking_slots(); ++i)
    request.tracking.slots[static_cast<std::size_t>(i)] = states_.allocate();
  return true;
}

/// The request in the next free place runs from now on.
void SglangPolicy::enter(RadixRequest& request, Name id) {
  request.id = id;
  if (place_of_.size() <= id.index()) place_of_.resize(id.index() + 1, kNowhere);
  place_of_[id.index()] = free_places_.back();
  free_places_.pop_back();
}

/// The next free place with the request that the admission describes, without its name.
RadixRequest& SglangPolicy::request_of(const Operation& admission) {
  if (free_places_.empty()) {
    free_places_.push_back(static_cast<std::uint32_t>(requests_.size()));
    requests_.emplace_back();
  }
  RadixRequest& request = requests_[free_places_.back()];
  KvRuns kv = std::move(request.kv);  // its capacity
  std::destroy_at(&request);
  std::construct_at(&request);
  request.kv = std::move(kv);
  request.salt = admission.salt;
  request.known = admission.tokens;
  const std::uint32_t size = request.admitted = admission.tokens.size();
  request.prompt_size =
      admission.prompt == Operation::kAbsent ? size : static_cast<std::uint32_t>(admission.prompt);
  return request;
}

/// The tokens of a prompt of `size` that a match may find.
std::uint32_t SglangPolicy::match_limit(std::uint32_t size) const {
  const std::uint32_t limit = rules_.matches_last_token ? size : size - 1;
  if (!rules_.matches_first_chunk_alone) return limit;
  return static_cast<std::uint32_t>(std::min<std::int64_t>(limit, config_.chunked_prefill));
}

/// Whichever way the slot got its state, nothing is pending beside it.
bool SglangPolicy::clears_cursor(bool received, std::uint32_t cached,
                                 std::uint32_t on_device) const {
  return received             ? rules_.load_clears_cursor
         : cached > on_device ? rules_.loaded_clears_cursor
         : cached > 0         ? rules_.copy_clears_cursor
                              : rules_.allocation_clears_cursor;
}

Result<Reply> SglangPolicy::admit(const Operation& operation) {
  if (const Result<void> sound = check_admission(operation, find(operation.id) != nullptr); !sound)
    return tl::unexpected(sound.error());
  if (windows_)
    if (const Result<void> fits = check_windows(operation); !fits)
      return tl::unexpected(fits.error());
  const std::uint32_t size = operation.tokens.size();
  if (size > config_.kv_tokens) return Reply::refusal(Refusal::too_long);
  WaitingRequest* const waiting = storage() != nullptr ? &arrive(operation) : nullptr;
  if (free_rows_.empty()) return Reply::refusal(Refusal::no_row);
  if (waiting != nullptr && !prefetch_is_over(*waiting, operation.late))
    return Reply::refusal(Refusal::same_step);

  RadixRequest& request = request_of(operation);
  RadixTree::Match match = tree_.match(operation.tokens, match_limit(size), operation.salt);
  const std::uint32_t on_device = match.prefix;
  const bool hit = match.end != RadixTree::kRoot;
  if (waiting != nullptr) take_up(*waiting, request, match);
  NodeIndex source = match.on_host.exists() ? match.on_host : match.end;
  if (match.on_host.exists() && !tree_.node(source).state.exists()) source = RadixTree::kRoot;
  if (source != RadixTree::kRoot && has_states_ && !copy_on_write(request, source, match.end))
    return Reply::refusal(Refusal::no_state_slot);
  if (waiting != nullptr && has_lost_match(*waiting, match, operation)) {
    pass_over(*waiting, request, match.end);
    return Reply::refusal(Refusal::same_step);
  }
  NodeIndex locked = hit && rules_.admission_locks ? match.end : NodeIndex::none();
  tree_.lock(locked);
  request.window.lock_begin = tree_.lock_window(locked);
  const auto refuse = [&](Refusal refusal) {
    if (host_ && host_->is_awaited(request.live)) host_->land_loads(host_->loads.back().id);
    tree_.unlock(locked);
    tree_.unlock_window(locked, request.window.lock_begin);
    if (request.live.exists() && rules_.refusal_frees_copy) states_.release(request.live);
    for (const StateSlot slot : request.tracking.slots)
      if (slot.exists()) states_.release(slot);
    return Reply::refusal(refusal);
  };
  const std::int64_t left = kv_.free_count() + tree_.sizes().evictable_kv;
  if (size - match.prefix > left - std::max<std::int64_t>(operation.room, 0)) {
    LOCKSTEP_MARK("admit.no_room_for_prompt");
    return refuse(Refusal::no_kv);
  }
  if (match.on_host.exists()) {
    if (const Refusal refusal = load(request, match, locked); refusal != Refusal::none)
      return refuse(refusal);
  }
  RadixTree::Evicted evicted;
  if (has_states_ && !take_slots(request, evicted)) return refuse(Refusal::no_state_slot);
  // The last token is always computed here, because the next token is sampled after it.
  const auto external =
      static_cast<std::uint32_t>(std::clamp<std::int64_t>(operation.external, 0, size - 1));
  const std::int64_t received = external > match.prefix ? page_ceiling(external) - match.prefix : 0;
  RadixTree::Evicted for_received;
  if (!make_room_for_kv(received, for_received)) return refuse(Refusal::no_kv);
  begin_at(request, match);

  if (clears_cursor(received > 0, match.prefix, on_device)) clear_cursor(request.live);
  if (received > 0) {
    await_loads(request);
    receive(request, external);
  }
  Reply reply = admitted(request);
  if (host_) reply.set(ReplyField::host, match.prefix - on_device);
  reply.set(ReplyField::evicted_kv, evicted.kv + for_received.kv)
      .set(ReplyField::evicted_states, evicted.states + for_received.states);
  if (operation.room != Operation::kAbsent) reply.set(ReplyField::kv, left);
  if (waiting != nullptr) waiting_.erase(operation.id.index());
  enter(request, operation.id);
  return reply;
}

/// The tokens that an admitted request has, and those that its state has seen.
Reply SglangPolicy::admitted(const RadixRequest& request) const {
  Reply reply;
  reply.set(ReplyField::cached, request.computed);
  if (!has_states_) return reply;
  const LayerState::Lengths lengths = lengths_of(request);
  return reply.set(ReplyField::state, lengths.recurrent).set(ReplyField::conv, lengths.conv);
}

/// The request has a row, and the tree's KV up to where its match ends.
void SglangPolicy::begin_at(RadixRequest& request, const RadixTree::Match& match) {
  const bool hit = match.end != RadixTree::kRoot;
  request.locked = hit ? match.end : NodeIndex::none();
  request.branch = match.branch;
  // A node of the host is no place to go on from, nor one without a window.
  request.reached = host_ || windows_ ? match.end : match.reached;
  request.reached_serial = tree_.node(request.reached).serial;
  request.owned = request.computed = request.allocated = request.window.begin = match.prefix;
  request.row = free_rows_.back();
  free_rows_.pop_back();
  request.kv.clear();
  if (hit) tree_.append_path_kv(match.end, 0, request.kv);
  if (rules_.child_offer != ChildOffer::none) {
    KvRuns kept;
    append_slice(kept, request.kv, 0, match.prefix);
    request.kv.swap(kept);
  }
  follow_loads(request);
}

/// The lengths of an admitted request's state; those of one that a load still brings are known.
LayerState::Lengths SglangPolicy::lengths_of(const RadixRequest& request) const {
  if (host_ && (request.source.exists() || host_->is_awaited(request.live)))
    return {request.computed, request.computed};
  return layers_.state_lengths(request.live, request.computed);
}

void SglangPolicy::take_received_kv(RadixRequest& request, std::uint32_t size) {
  const auto end = static_cast<std::uint32_t>(page_ceiling(size));
  kv_.allocate(end - request.allocated, request.kv, request.kv_tail);
  request.allocated = end;
}

void SglangPolicy::receive(RadixRequest& request, std::uint32_t size) {
  LOCKSTEP_MARK("admit.receives");
  take_received_kv(request, size);
  if (layers_.keeps_kv())
    for_slots(request.kv, request.computed, size, [&](KvSlots slots, std::uint32_t place) {
      layers_.receive_kv(slots, request.known, place);
    });
  for (const StatePart part : kStateParts) {
    if (!has_states_ || (part == StatePart::conv && !rules_.receives_conv)) continue;
    const std::uint32_t sent = rules_.receives_last_token ? size + 1 : size;
    layers_.receive_state(request.live, part, request.known, sent);
  }
  request.computed = size;
}

/// Computes tokens[computed, stop). Different kernels move the two parts of the state.
void SglangPolicy::run(RadixRequest& request, std::uint32_t stop, Forward forward) {
  if (options_.ring != 0 && forward == Forward::decode) return run_with_ring(request, stop);
  forward_window(request, stop);
  ForwardRow row{.request = request.id,
                 .tokens = request.known,
                 .begin = request.computed,
                 .end = stop,
                 .kv = request.kv};
  if (has_states_) {
    const bool resumes = forward == Forward::chunk && row.begin > 0;
    row.state = slot_of(request);
    row.keeps = {.recurrent = rules_.chunk_moves_recurrent || !resumes,
                 .conv = rules_.decode_moves_conv || stop != row.begin + 1};
    if (!rules_.chunk_resumes_recurrent && resumes)
      layers_.zero_state(row.state, StatePart::recurrent);
    takes_.clear();
    track(request, stop, forward);
    row.takes = takes_;
  }
  layers_.forward(row);
  request.computed = stop;
}

Result<Reply> SglangPolicy::extend(const Operation& operation) {
  RadixRequest* const found = idle(operation);
  if (found == nullptr) return not_idle(operation);
  RadixRequest& request = *found;
  if (operation.async && config_.overlap == 0)
    return fail("extend: async=1 is for a config with overlap=1");
  if (!operation.async && request.in_flight_count != 0)
    return fail("extend: results are still out, so async=1 goes on");
  if (operation.async && request.in_flight_count == request.in_flight.size())
    return fail("extend: two results are out already, and a server runs one step ahead");
  const std::uint32_t drafts = operation.drafts.size();
  if (windows_)
    if (const Result<void> fits = check_windows(operation); !fits)
      return tl::unexpected(fits.error());
  if (!operation.parents.empty())
    if (const Result<void> tree = check_tree(operation); !tree) return tl::unexpected(tree.error());
  if (operation.async && drafts != 0)
    return fail("extend: a verification's result decides what comes next, so it is not async");
  const std::int64_t left =
      std::int64_t{request.known.size()} + operation.tokens.size() - request.computed + drafts;
  if (operation.n < 1 || operation.n > left || (drafts != 0 && operation.n != left))
    return fail(fmt::format("extend: n={} does not fit the {} that request `{}` has left",
                            operation.n, counted(left, "token"), operation.id.text()));

  const Forward forward = drafts != 0                           ? Forward::verification
                          : request.computed < request.admitted ? Forward::chunk
                                                                : Forward::decode;
  const std::int64_t end = request.computed + operation.n;
  const std::int64_t needed = page_ceiling(end) - request.allocated;
  const bool by_step = windows_ && forward == Forward::decode;
  if (by_step && operation.n == 1) slide_for_decoding(request);
  RadixTree::Evicted evicted;
  make_room_for_kv(kv_demand(request, operation.n, forward), evicted);
  const bool fits = by_step && operation.n > 1 ? has_room(needed) : allocate_kv(request, needed);
  if (!fits) return Reply::refusal(Refusal::no_kv);
  await_loads(request);
  request.known.append(operation.tokens);
  const auto stop = static_cast<std::uint32_t>(end);
  if (operation.async) {
    if (request.in_flight_count == 0) request.in_flight_begin = request.computed;
    request.in_flight[request.in_flight_count++] = stop;
  }
  if (by_step) {
    decode_with_windows(request, stop, operation.async, evicted);
    batch_tokens_ += static_cast<std::uint32_t>(operation.n);
  } else if (drafts == 0) {
    run(request, stop, forward);
    request.window.prefilled = stop;
    if (!operation.async) results_came(request);
    batch_tokens_ += static_cast<std::uint32_t>(operation.n);
  } else {
    prepare_verification(request, static_cast<std::uint32_t>(operation.n));
    verify(request, operation);
  }
  Reply reply;
  reply.set(ReplyField::n, operation.n);
  reply.set(ReplyField::evicted_kv, evicted.kv).set(ReplyField::evicted_states, evicted.states);
  return reply;
}

/// The result of the oldest extend that ran ahead.
Result<Reply> SglangPolicy::complete(const Operation& operation) {
  RadixRequest* const request = find(operation.id);
  if (request == nullptr) return unknown(operation, "admitted request", operation.id);
  if (request->in_flight_count == 0)
    return fail(fmt::format("complete: request `{}` has no result to come", operation.id.text()));
  request->in_flight_begin = request->in_flight[0];
  request->in_flight[0] = request->in_flight[1];
  --request->in_flight_count;
  results_came(*request);
  return Reply{};
}

/// Inserts the request's first `size` tokens with `state`, moves the lock there, and lets the row
/// point at the tree's KV. The insert comes before the unlock, so that nothing on the path can be
/// evicted between them (sglang.md, 1.7, 3).
RadixTree::Inserted SglangPolicy::store(RadixRequest& request, std::uint32_t size,
                                        StateSlot state) {
  NodeIndex from = RadixTree::kRoot;
  if (request.locked.exists() && request.owned <= size &&
      tree_.node(request.locked).depth() == request.owned)
    from = request.locked;
  // Tokens that the match compared are not compared again, unless their nodes were evicted since.
  const RadixNode& reached = tree_.node(request.reached);
  if (reached.alive && reached.serial == request.reached_serial &&
      reached.depth() > request.owned && reached.depth() <= size)
    from = request.reached;
  const RadixTree::Inserted done =
      tree_.insert(request.known, size, request.salt, request.kv, 0, state, request.owned, from,
                   request.inserted, windows_ ? &request.window : nullptr);
  if (windows_ && size > request.window.begin) {  // what was before is the tree's, or free
    KvRuns rest;
    append_slice(rest, request.window.slots, size - request.window.begin,
                 request.allocated - request.window.begin);
    request.window.slots.swap(rest);
    request.window.begin = size;
  }
  request.inserted = std::max(request.inserted, size);
  if (done.duplicates != 0) {
    scratch_.clear();
    append_slice(scratch_, request.kv, 0, request.owned);
    tree_.append_path_kv(done.end, request.owned, scratch_);
    append_slice(scratch_, request.kv, size, request.allocated);
    request.kv.swap(scratch_);
  }
  request.owned = std::max(size, rules_.floors_finished_key ? request.owned : 0);
  if (!has_states_ && !windows_ && rules_.splits_at_prompt)
    split_at_prompt(request, size, done.end);
  return done;
}

/// A second insert, of the prompt alone, so that outputs can be evicted without it
/// (unified_radix_cache.py does this in trees without states).
void SglangPolicy::split_at_prompt(const RadixRequest& request, std::uint32_t size, NodeIndex end) {
  const std::uint32_t prompt = whole_pages(request.prompt_size);
  if (prompt == 0 || prompt >= size) return;
  LOCKSTEP_MARK("insert.splits_at_prompt");
  NodeIndex from = end;
  while (tree_.node(from).depth() > prompt) from = tree_.node(from).parent;
  tree_.insert(request.known, prompt, request.salt, request.kv, 0, StateSlot::none(), prompt, from);
}

void SglangPolicy::move_lock(RadixRequest& request, NodeIndex node) {
  const bool state_locked = !options_.skip_decode_lock;
  const bool was_locked = request.state_locked || rules_.unlocks_skipped_locks;
  tree_.move_lock(request.locked, was_locked, node, state_locked);
  if (!request.window.is_released) tree_.unlock_window(request.locked, request.window.lock_begin);
  request.window.lock_begin = tree_.lock_window(node);
  request.window.is_released = false;
  request.window.decoded = 0;
  request.state_locked = state_locked;
  request.locked = node;
}

Reply SglangPolicy::stored_reply(const RadixRequest& request, bool exist) const {
  return Reply{}.set(ReplyField::exist, exist).set(ReplyField::length, request.owned);
}

Result<Reply> SglangPolicy::checkpoint(const Operation& operation) {
  RadixRequest* const found = idle(operation);
  if (found == nullptr) return not_idle(operation);
  RadixRequest& request = *found;
  const std::int64_t up_to =
      operation.up_to == Operation::kAbsent ? request.computed : operation.up_to;
  if (up_to > request.computed)
    return fail(fmt::format("checkpoint: up_to={} is beyond the {}", up_to,
                            counted(request.computed, "computed token")));
  await_loads(request);
  const Reply reply = store_unfinished(request, static_cast<std::uint32_t>(up_to));
  if (reply.refused == Refusal::none) follow_loads(request);
  return reply;
}

Reply SglangPolicy::store_unfinished(RadixRequest& request, std::uint32_t up_to) {
  const std::uint32_t size = whole_pages(up_to);
  // The running state stands for all computed tokens and for no shorter key.
  if (has_states_ && up_to != request.computed) return stored_reply(request, false);
  if (pending(request) != 0 && rules_.checkpoint_waits_for_flush) {
    LOCKSTEP_MARK("checkpoint.ring_is_pending");
    return stored_reply(request, false);
  }
  if (size == 0 || size < request.owned) return stored_reply(request, true);
  if (!has_states_) {
    const bool is_cut = is_cut_at_branch(request, up_to);
    const std::uint32_t kept = is_cut ? request.branch : up_to;
    slide(request, std::int64_t{kept} - 1, 1);
    const RadixTree::Inserted done = store(request, whole_pages(kept), StateSlot::none());
    move_lock(request, done.end);
    if (is_cut) {
      LOCKSTEP_MARK("window.cut_at_branch");
      request.branch = 0;
      slide(request, std::int64_t{up_to} - 1, 1);
    }
    return stored_reply(request, done.exist);
  }
  RadixTree::Evicted unreported;
  const bool room = make_room_for_states(1, unreported);
  if (rules_.checkpoint_asserts_room) require(room, "Can not alloc mamba cache");
  if (!room) {
    LOCKSTEP_MARK("checkpoint.skipped");
    return Reply::refusal(Refusal::no_state_slot);
  }
  const StateSlot donated =
      rules_.checkpoint_copy == CheckpointCopy::none ? request.live : states_.allocate();
  if (rules_.checkpoint_copy == CheckpointCopy::conv_later) {
    layers_.copy_state(slot_of(request), donated, StatePart::recurrent);
    deferred_.push_back({slot_of(request), donated});
  } else if (rules_.checkpoint_copy == CheckpointCopy::conv_alone) {
    layers_.copy_state(slot_of(request), donated, StatePart::conv);
  } else if (rules_.checkpoint_copy != CheckpointCopy::none) {
    layers_.copy_state(slot_of(request), donated);
  }
  slide(request, std::int64_t{size} - 1, 1);
  const RadixTree::Inserted done = store(request, size, donated);
  if (rules_.matches_after_checkpoint) tree_.refresh_path(done.end);
  move_lock(request, done.end);
  if (done.exist) {
    LOCKSTEP_MARK("checkpoint.exists");
    if (rules_.frees_refused_checkpoint) states_.release(donated);
  }
  return stored_reply(request, done.exist);
}

Result<Reply> SglangPolicy::finish(const Operation& operation) {
  RadixRequest* const found = idle(operation);
  if (found == nullptr) return not_idle(operation);
  RadixRequest& request = *found;
  // KV is stored from its launch on, so the KV of a token under way is stored too. A state is
  // stored only when its result has come.
  const bool at_launch =
      has_states_ ? rules_.states_count_from_launch : rules_.kv_counts_from_launch;
  std::uint32_t committed = at_launch ? request.computed : request.committed();
  if (operation.up_to > std::int64_t{request.known.size()})
    return fail(fmt::format("finish: up_to={} is beyond the {}", operation.up_to,
                            counted(request.known.size(), "known token")));
  await_loads(request);
  // Tokens accepted after the end are discarded. The end itself was a draft, so its KV is there.
  if (operation.up_to != Operation::kAbsent && rules_.finish_stops_at_end)
    committed = std::min(committed, static_cast<std::uint32_t>(operation.up_to));
  const std::uint32_t kept =
      options_.strip_thinking ? std::min(request.prompt_size, committed) : committed;
  const bool exist = store_finished(request, kept);
  if (rules_.finish_frees_tree_kv) request.owned = whole_pages(kept);
  const Reply reply = stored_reply(request, exist);
  remove(request);
  return reply;
}

bool SglangPolicy::store_finished(RadixRequest& request, std::uint32_t kept) {
  std::uint32_t size = whole_pages(give_back_pending(request, kept));
  if (is_cut_at_branch(request, kept)) size = request.branch;
  if (rules_.finished_key_one_short && size > request.owned) --size;
  if (rules_.floors_finished_key) size -= size % 64;
  bool exist = true;
  // The live state stands for all computed tokens: under a stripped key it would be a state of
  // another length.
  const bool fits =
      !has_states_ || kept == request.computed || rules_.strips_key_alone || rules_.cuts_key_alone;
  if (rules_.strips_key_alone)
    require(size >= request.owned, "cache_protected_len is at most len(new_indices)");
  // A key that adds no token is inserted as well, because the insert renews its path.
  const bool reaches =
      size > request.owned || (size == request.owned && rules_.finish_inserts_known_key);
  if (fits && size != 0 && (reaches || rules_.floors_finished_key)) {
    StateSlot donated = request.live;
    if (rules_.finish_gives != Finish::slot) {
      RadixTree::Evicted unreported;
      if (!make_room_for_states(1, unreported)) return true;
      donated = states_.allocate();
      layers_.copy_state(request.live, donated);
    }
    exist = store(request, size, donated).exist;
    if (donated != request.live) {
      if (exist && rules_.frees_refused_finish) states_.release(donated);
      if (!exist && rules_.finish_gives == Finish::fork) request.live = StateSlot::none();
    } else if (has_states_ && !exist && !rules_.frees_donated_slot) {
      request.live = StateSlot::none();
    }
  } else if (size != 0 && !fits) {
    LOCKSTEP_MARK("finish.state_does_not_fit");
  }
  return exist;
}

Result<Reply> SglangPolicy::release(const Operation& operation) {
  RadixRequest* const request = find(operation.id);
  if (request == nullptr) return unknown(operation, "admitted request", operation.id);
  await_loads(*request);
  if (!rules_.abort_unlocks) request->locked = NodeIndex::none();
  if (!rules_.abort_frees_drafts && request->verifying) {
    KvRuns known;
    append_slice(known, request->kv, 0, request->known.size());
    request->kv.swap(known);
  }
  remove(*request);
  return Reply{};
}

void SglangPolicy::free_kv_from(RadixRequest& request, std::uint32_t first) {
  kv_.release_from(request.kv, first);
  request.allocated = first;
}

/// Gives back the slots that the tree does not own, unlocks the prefix, and forgets the request.
void SglangPolicy::remove(RadixRequest& request) {
  if (request.live.exists()) states_.release(request.live);
  for (const StateSlot slot : request.tracking.slots)
    if (slot.exists() && rules_.frees_tracking_slots) states_.release(slot);
  free_window(request);
  free_kv_from(request, request.owned);
  tree_.unlock(request.locked, request.state_locked || rules_.unlocks_skipped_locks);
  free_rows_.push_back(request.row);
  const std::uint32_t place = place_of_[request.id.index()];
  place_of_[request.id.index()] = kNowhere;
  free_places_.push_back(place);
  request.id = Name();
  request.known = {};
}

/// Launches the batch. A captured graph may have more rows than there are requests; these padding
/// rows use state slot 0 and KV page 0.
Result<Reply> SglangPolicy::step(const Operation& operation) {
  batch_tokens_ = 0;
  for (const Deferred& copy : std::exchange(deferred_, {}))
    layers_.copy_state(copy.source, copy.target, StatePart::conv);
  padding_.clear();
  if (operation.padded != Operation::kAbsent) {
    if (operation.padded < std::ssize(operation.ids))
      return fail(fmt::format("step: padded={} has no room for {}", operation.padded,
                              counted(operation.ids.size(), "row")));
    if (has_states_) pad_to(static_cast<std::size_t>(operation.padded), operation.ids);
  }
  layers_.launch(padding_);
  return Reply{};
}

/// Collects the slots of the graph's rows that no request has.
void SglangPolicy::pad_to(std::size_t rows, const std::vector<Name>& ids) {
  if (!rules_.pads_with_old_rows) graph_slots_.clear();
  if (graph_slots_.size() < rows) graph_slots_.resize(rows, StateSlot{0});
  for (std::size_t row = 0; row < rows; ++row) {
    if (row >= ids.size()) {
      padding_.push_back(graph_slots_[row]);
    } else if (const RadixRequest* const request = find(ids[row])) {
      graph_slots_[row] = request->live;
    }
  }
  RadixRequest* const last = rules_.padding_moves_cursors && options_.ring != 0 && !ids.empty()
                                 ? find(ids.back())
                                 : nullptr;
  if (last != nullptr)
    cursor_of(*last) = (cursor_of(*last) + static_cast<std::uint32_t>(rows - ids.size())) %
                       static_cast<std::uint32_t>(options_.ring);
}

Reply SglangPolicy::evict(std::int64_t kv, std::int64_t states, std::int64_t window) {
  RadixTree::Evicted evicted =
      tree_.evict(kv, has_states_ && !rules_.evicts_separately ? states : 0, window);
  if (rules_.evicts_separately) {
    const RadixTree::Evicted of_states = tree_.evict(0, states);
    evicted = {evicted.kv + of_states.kv, evicted.states + of_states.states};
  }
  return Reply{}.set(ReplyField::kv, evicted.kv).set(ReplyField::state, evicted.states);
}

/// Evicts as an allocation of `room` tokens does, but allocates nothing.
Result<Reply> SglangPolicy::make_room(const Operation& operation) {
  if (operation.kv != Operation::kAbsent || operation.state != Operation::kAbsent)
    return fail("evict: room= stands without kv= and state=");
  RadixTree::Evicted evicted;
  make_room_for_kv(operation.room, evicted);
  return Reply{}
      .set(ReplyField::kv, evicted.kv)
      .set(ReplyField::state, evicted.states)
      .set(ReplyField::kv_free, kv_.free_count());
}

Reply SglangPolicy::check() const {
  Reply reply;
  if (windows_)
    reply.set(ReplyField::window_free, windows_->pool.free_count())
        .set(ReplyField::window_locked, windows_->locked);
  if (host_)
    reply.set(ReplyField::host_kv_free, host_->kv.free_count())
        .set(ReplyField::host_states_free, host_->states.free_count());
  reply.set(ReplyField::kv_free, kv_.free_count())
      .set(ReplyField::kv_locked, tree_.sizes().protected_kv);
  if (has_states_)
    reply.set(ReplyField::states_free, states_.free_count())
        .set(ReplyField::states_locked, tree_.sizes().protected_states);
  return reply;
}

/// Nodes by depth, then age: parents come before their children.
std::optional<Snapshot> SglangPolicy::snapshot() const {
  Snapshot content;
  content.kv_free = kv_.free_count();
  content.kv_total = kv_.slot_count();
  content.states_free = states_.free_count();
  content.states_total = states_.slot_count();
  if (host_) content.host = host_->snapshot();
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 1; i < tree_.node_count(); ++i)
    if (tree_.node({i}).alive) order.push_back(i);
  std::ranges::sort(order, [&](std::uint32_t a, std::uint32_t b) {
    const RadixNode& left = tree_.node({a});
    const RadixNode& right = tree_.node({b});
    return left.depth() != right.depth() ? left.depth() < right.depth()
                                         : left.serial < right.serial;
  });
  std::vector<int> place(tree_.node_count(), -1);
  for (const std::uint32_t i : order) {
    const RadixNode& node = tree_.node({i});
    place[i] = static_cast<int>(content.nodes.size());
    content.nodes.push_back(
        {place[node.parent.value], node.path.slice(node.start, node.depth()).text(40), node.depth(),
         node.state.exists(), node.full_lock != 0, node.path.prefix(node.depth()).text(40),
         node.state.exists() ? node.state.value : 0, host_ && host_->nodes[i].state.exists()});
  }
  return content;
}

namespace {

std::unique_ptr<Subject> make_radix(const SubjectOptions& options) {
  return std::make_unique<SglangPolicy>(options, SglangRules{.has_states = false});
}
std::unique_ptr<Subject> make_no_buffer(const SubjectOptions& options) {
  return std::make_unique<SglangPolicy>(options, SglangRules{});
}

Result<void> check_host(const Config& config) {
  if (!write_policy_of(config))
    return fail(fmt::format("field write_policy: `{}` is none of {}",
                            config.text("write_policy").substr(0, 60),
                            fmt::join(kWritePolicies, ", ")));
  if (!prefetch_policy_of(config))
    return fail(fmt::format("field prefetch_policy: `{}` is none of {}",
                            config.text("prefetch_policy").substr(0, 60),
                            fmt::join(kPrefetchPolicies, ", ")));
  const SglangOptions options = SglangOptions::of(config);
  if ((options.host_kv == 0) != (options.host_states == 0))
    return fail("field host_states: a host tier has room for KV and for states");
  if (options.disk && options.host_kv == 0)
    return fail("field disk: a storage stands behind a host tier, which host_kv= gives");
  if (options.ring == 0 && config.options.contains("track_interval"))
    return fail("field track_interval: it has no effect without replay_ring=");
  if (options.index_keys && options.disk)
    return fail("field index_keys: index keys are not in the storage of disk=1");
  return check_window_fields(config);
}

PolicyEntry::SlotCounts slots_of_radix(const Config& config) {
  return {0, config.kv_tokens + config.page + window_slots(config)};
}

PolicyEntry::SlotCounts slots_with_host(const Config& config) {
  const SglangOptions options = SglangOptions::of(config);
  const StorageTier::Room storage = storage_room(config);
  return {config.state_slots + options.host_states + storage.states,
          config.kv_tokens + config.page + window_slots(config) + options.host_kv +
              options.host_window_kv + storage.kv,
          options.index_keys};
}

const Registration<PolicyEntry> kRadix{
    {.name = "radix",
     .summary = "SGLang 0.5.23's radix cache for attention alone",
     .has_states = false,
     .config_fields = {"page", "strip_thinking", "overlap", "window", "window_kv",
                       "window_interval", "window_release"},
     .make = make_radix,
     .check = check_window_fields,
     .slots = slots_of_radix,
     .capabilities = kSglangCapabilities,
     .tells_forwards = true}};
const Registration<PolicyEntry> kNoBuffer{
    {.name = "sglang-no-buffer",
     .summary = "SGLang 0.5.23's hybrid radix cache, one state slot a request",
     .has_states = true,
     .config_fields = {"strip_thinking", "skip_decode_lock", "path_cap", "replay_ring",
                       "track_interval", "host_kv", "host_states", "write_policy", "disk",
                       "prefetch_policy", "prefetch_least", "window", "window_kv",
                       "window_interval", "window_release", "host_window_kv", "storage_ranks",
                       "index_keys"},
     .make = make_no_buffer,
     .check = check_host,
     .slots = slots_with_host,
     .capabilities = kSglangCapabilities | Capabilities{Capability::tiers},
     .is_default = true,
     .tells_forwards = true,
     .has_rings = [](const Config& config) { return SglangOptions::of(config).ring > 0; }}};

}  // namespace

}  // namespace lockstep::cache_sim
