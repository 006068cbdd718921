#include "cache_sim/policies/vllm/vllm_policy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "cache_sim/policies/request_checks.hpp"
#include "cache_sim/policies/vllm/vllm_scheduler_options.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

VllmPolicy::VllmPolicy(const SubjectOptions& options, BlockRules rules)
    : config_(options.config),
      manager_(with_defect(std::move(rules), options.defect)),
      keys_(static_cast<std::uint32_t>(manager_.rules().hash_block),
            static_cast<std::uint32_t>(manager_.rules().hash_lookahead),
            manager_.rules().hash_algorithm),
      numbers_(options.blocks) {
  const VllmSchedulerOptions scheduler = *VllmSchedulerOptions::of(config_);
  most_tokens_ = scheduler.chunked_prefill;
  if (!manager_.rules().fills_drafter_places) most_tokens_ -= scheduler.draft_slots;
  if (scheduler.long_prefill > 0) most_tokens_ = std::min(most_tokens_, scheduler.long_prefill);
  lookahead_ = scheduler.lookahead;
  reserves_ = scheduler.is_vllm;
  cuts_padding_ = scheduler.is_vllm && manager_.rules().splitter_block == 0 && !scheduler.adapts &&
                  scheduler.long_prefill > 0 && scheduler.long_prefill <= config_.drafts;
  if (manager_.rules().cpu_chunks > 0) tier_ = std::make_unique<OffloadTier>(manager_.rules());
  if (manager_.rules().cpu_blocks > 0) simple_ = std::make_unique<SimpleTier>(manager_);
  if (numbers_ == nullptr) return;
  if (simple_) simple_->follow_numbers(*numbers_);
  if (numbers_->is_beside_labels())
    keep_labels();
  else
    follow(*numbers_);
}

Result<Reply> VllmPolicy::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::extend: return extend(operation);
    case Verb::complete: return complete(operation);
    case Verb::accept: return accept(operation);
    case Verb::checkpoint: return checkpoint(operation);
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt: return release(operation);
    case Verb::step: forward(); return Reply{};
    case Verb::evict: return evict(operation);
    case Verb::land: return land(operation);
    case Verb::fail: return end_disk_copy(operation);
    case Verb::settle: return settle();
    case Verb::flush: return flush();
    case Verb::check: return check();
    default: break;
  }
  return fail(
      fmt::format("{} is not an operation of vLLM's block cache", to_string(operation.verb)));
}

const VllmRequest* VllmPolicy::request(Name id) const {
  if (id.index() >= place_of_.size() || place_of_[id.index()] == 0) return nullptr;
  return &requests_[place_of_[id.index()] - 1];
}

/// The operation's request; an error where it has a verification whose accept has not come.
Result<VllmRequest*> VllmPolicy::idle(const Operation& operation) {
  VllmRequest* const request = find(operation.id);
  if (request == nullptr) return no_such_request(operation);
  if (!request->drafts.empty())
    return fail(fmt::format("{}: request `{}` has drafts that wait for their accept",
                            to_string(operation.verb), operation.id.text()));
  if (request->is_loading)
    return fail(fmt::format("{}: request `{}` is being loaded, and its complete is to come",
                            to_string(operation.verb), operation.id.text()));
  return request;
}

LabelBlocks& VllmPolicy::keep_labels() {
  if (labels_) return *labels_;
  labels_ = std::make_unique<LabelBlocks>(manager_.rules(), manager_.pool(), numbers_);
  if (tier_) tier_->follow(*labels_);
  if (simple_) simple_->follow(*labels_);
  if (numbers_ == nullptr) {
    follow(*labels_);
    return *labels_;
  }
  both_ = std::make_unique<LabelledBlocks>(*labels_, *numbers_);
  follow(*both_);
  return *labels_;
}

void VllmPolicy::follow(BlockMemory& memory) {
  worker_ = std::make_unique<AlignWorker>(manager_.rules(), memory);
  if (numbers_ != nullptr) manager_.follow(memory);
}

Findings VllmPolicy::take_findings() {
  Findings labels = labels_ ? std::exchange(labels_->findings(), {}) : Findings{};
  return numbers_ == nullptr ? labels : told_together(std::move(labels), numbers_->drain());
}

void VllmPolicy::run_worker() {
  std::vector<WorkerRow> rows;
  for (const std::uint32_t place : scheduled_) {
    const VllmRequest& request = requests_[place];
    if (request.is_loading) continue;
    rows.push_back(
        {.place = place,
         .request = &request.blocks,
         .name = request.id,
         .tokens = keyed_tokens(request.known.followed_by(request.drafts), request.content),
         .start = request.start,
         .end = request.blocks.computed,
         .drafts = request.drafts.size(),
         .external = request.loads ? request.external : 0,
         .ring = request.ring});
  }
  worker_->forward(manager_.copies(), rows);
}

/// Blocks published by results belong to no step; those published by a finished load belong to the
/// step that begins with it (rule 25).
void VllmPolicy::begin_step() {
  if (scheduled_.empty() && !has_begun_) manager_.new_step();
}

/// The step is decided and runs (rule 17).
void VllmPolicy::forward() {
  has_begun_ = goes_on_prefilling_ = false;
  manager_.release_copies();
  if (has_tier()) end_schedule();
  if (manager_.rules().ring > 0) step_rings();
  if (worker_ && knows_its_rows()) run_worker();
  if (simple_) simple_->end_forward();
  for (const std::uint32_t place : scheduled_) {
    VllmRequest& request = requests_[place];
    request.scheduled = false;
    request.is_in_flight &= request.is_loading || request.prefills;
  }
  scheduled_.clear();
  manager_.end_step();
  manager_.new_step();
  ++changes_;
}

void VllmPolicy::step_rings() {
  for (VllmRequest& request : requests_) {
    if (!request.id.exists() || !request.blocks.runs) continue;
    if (request.scheduled) request.ring = ring_step(request);
    request.rested = !request.scheduled;
  }
}

/// A decode step reads what the steps since the last one that wrote the state have left in the
/// ring. It writes the state where that fills the ring, or ends a block (rule 52).
RingStep VllmPolicy::ring_step(VllmRequest& request) const {
  const BlockRules& rules = manager_.rules();
  const std::int64_t start = request.start;
  const std::int64_t end = request.blocks.computed;
  const std::int64_t known = request.known.size();
  std::int64_t& base = request.ring_base;
  if (base < 0) base = rules.counts_from_the_prompt ? request.blocks.prompt : known;
  if (request.rested && rules.rebases_rows_that_rested) base = known;
  if (start < base && (rules.prompt_rows_read_no_ring || end != start + 1)) {
    const bool is_known = !rules.counts_from_the_prompt && !rules.begins_with_old_base;
    if (end > base && is_known) base = known;  // it was told more meanwhile
    return {};
  }
  const std::int64_t block =
      rules.blocks_begin_with_empty_rings ? floor_to(start, rules.state_block) : 0;
  RingStep step{.pending = (start - std::max(base, block)) % rules.ring};
  if (start < base) step.pending = rules.ring - 1;
  if (end != start + 1 || known != end) {
    LOCKSTEP_MARK("vllm.turn_reads_ring");
    base = known;
    if (!rules.turns_read_rings) step.pending = 0;
    return step;
  }
  const bool ends_block = rules.flushes_at_block_ends && end % rules.state_block == 0;
  const bool is_full = rules.flushes_full_rings && step.pending == rules.ring - 1;
  if (ends_block && !is_full) LOCKSTEP_MARK("vllm.ring_is_flushed_early");
  step.appends = !ends_block && !is_full && start >= base;
  if (rules.reads_entry_ahead) ++step.pending;
  if (ends_block && rules.boundary_flush_reads_all) step.pending = rules.ring - 1;
  return step;
}

void VllmPolicy::look_up(VllmRequest& request) {
  request.hit = manager_.look_up(request.blocks.keys, request.blocks.known);
  request.blocks.junction = request.hit.junction;
  request.seen = changes_;
}

/// The keys that go into the hashes of a request's blocks beside its tokens.
ContentKeys VllmPolicy::hashed(ContentKeys content) const {
  if (!manager_.rules().hashes_extra_keys) return {};
  if (!manager_.rules().hashes_image_places)
    for (ImageSpan& image : content.images)
      image.begin -= image.begin % static_cast<std::uint32_t>(manager_.rules().hash_block);
  return content;
}

/// Tells the worker which tokens the request's keys stand for.
void VllmPolicy::learn(const VllmRequest& request) {
  worker_->learn(request.blocks.keys, keyed_tokens(request.known, request.content));
}

/// vLLM knows of so many tokens now; the trace may tell the last of them later.
void VllmPolicy::deliver(VllmRequest& request, std::int64_t tokens) {
  request.blocks.known = tokens;
  const auto told = std::min(static_cast<std::uint32_t>(tokens), request.known.size());
  keys_.extend(request.blocks.keys, request.known, told, request.hashed);
}

Result<Reply> VllmPolicy::admit(const Operation& operation) {
  const bool is_admitted = find(operation.id) != nullptr;
  if (const Result<void> sound = check_admission(operation, is_admitted); !sound)
    return tl::unexpected(sound.error());
  const std::uint32_t size = operation.tokens.size();
  const std::int64_t prompt = operation.prompt == Operation::kAbsent ? size : operation.prompt;
  if (prompt == 0) return fail("admit: vLLM takes no prompt without a token");
  if (has_tier() && operation.external > 0)
    return fail("admit: with a CPU tier nobody else sends tokens");
  if (manager_.rules().ring > 0 && operation.external > 0)
    return fail("admit: with a replay ring nobody else sends tokens");
  if (!operation.images.empty() && operation.images.back().end() > prompt)
    return fail(fmt::format("admit: images end with the prompt's {}", counted(prompt, "token")));
  if (places_.empty()) {
    places_.push_back(static_cast<std::uint32_t>(requests_.size()));
    requests_.emplace_back();
  }
  const std::uint32_t place = places_.back();
  VllmRequest& request = requests_[place];
  request.known = operation.tokens;
  request.blocks.keys.clear();
  request.content = {operation.salt, operation.lora, operation.images};
  request.hashed = hashed(request.content);
  keys_.extend(request.blocks.keys, request.known, request.hashed);
  request.blocks.prompt = prompt;
  request.blocks.known = size;
  request.blocks.computed = request.blocks.in_flight = request.promised = 0;
  request.flights.clear();
  look_up(request);
  const std::int64_t offered = std::min<std::int64_t>(operation.external, size - 1);
  request.external = std::max<std::int64_t>(offered - request.hit.tokens, 0);
  if (has_tier() && !look_up_tier(operation, request)) return Reply::refusal(Refusal::same_step);
  request.ring = {};
  request.rested = false;
  if (!manager_.rules().begins_with_old_base) request.ring_base = -1;
  request.loads = request.is_loading = request.was_loaded = request.is_in_flight = false;
  request.id = operation.id;
  request.waits = true;
  request.scheduled = false;
  request.drafts = Tokens();
  places_.pop_back();
  if (worker_) {
    worker_->admit(place);
    learn(request);
  }
  if (place_of_.size() <= operation.id.index()) place_of_.resize(operation.id.index() + 1);
  place_of_[operation.id.index()] = place + 1;
  Reply reply;
  reply.set(ReplyField::cached, request.hit.tokens + request.external);
  reply.set(ReplyField::junction, request.hit.junction);
  if (has_tier()) reply.set(ReplyField::host, request.external);
  return reply;
}

/// The first token of the request's next row: after the look-up's hit, or after all tokens that
/// were scheduled.
std::int64_t VllmPolicy::begin_of(const VllmRequest& request) const {
  return request.waits ? request.hit.tokens + request.external : request.blocks.computed;
}

Result<void> VllmPolicy::check_extend(const VllmRequest& request,
                                      const Operation& operation) const {
  if (operation.async != (config_.overlap != 0))
    return fail("extend: async=1 is for a config with overlap=1, and all of its extends are");
  if (operation.n > 0 && request.waits && has_tier() && request.external > 0)
    return fail(
        fmt::format("extend: request `{}` loads first (n=0 async=1), as behind scheduler=vllm",
                    operation.id.text()));
  if (operation.n == 0)
    return fail(
        fmt::format("extend: n=0 loads what another server sends, and request `{}` lacks "
                    "nothing of that",
                    operation.id.text()));
  const std::int64_t start = begin_of(request);
  const std::uint32_t drafts = operation.drafts.size();
  if (!knows_its_rows() && !operation.tokens.empty())
    return fail("extend: with drafts and overlap=1, accept tells all tokens");
  const std::int64_t there = knows_its_rows()
                                 ? std::int64_t{request.known.size()} + operation.tokens.size()
                                 : request.blocks.known + request.promised;
  const std::int64_t fresh = there - start;
  if (operation.n > fresh + drafts || (drafts != 0 && operation.n != fresh + drafts))
    return fail(fmt::format("extend: n={} does not fit the {} that request `{}` has left",
                            operation.n, counted(fresh + drafts, "token"), operation.id.text()));
  if (drafts == 0) return {};
  const bool decodes = request.waits || start >= request.blocks.prompt;
  if (drafts > manager_.rules().drafts || fresh != 1 || !decodes)
    return fail(fmt::format("extend: {}, and at most {} stand after one sampled token",
                            counted(drafts, "draft"), manager_.rules().drafts));
  return {};
}

/// The number of tokens of a row that asks for operation.n. Drafts that only fill places are left
/// out rather than cut.
std::int64_t VllmPolicy::chunk(const VllmRequest& request, const Operation& operation) const {
  const std::int64_t start = begin_of(request);
  const std::int64_t cut = manager_.split(request.blocks, start, operation.n, most_tokens_);
  if (!operation.drafts.empty() && cut != operation.n && !manager_.rules().cuts_draft_places)
    return 1;
  return manager_.leave_rest(request.blocks, start, cut);
}

/// Whether vLLM pads the request's first row with drafts, to make all rows equal, and then cuts it.
/// It does so if the request lacks one token, others run, and no prefill goes on in this step.
/// (Where chunks end with blocks, the rule for chunks takes the padding back.)
bool VllmPolicy::is_cut_padding(const VllmRequest& request, const Operation& operation) const {
  return cuts_padding_ && request.waits && request.hit.tokens > 0 && running_ > 0 &&
         !goes_on_prefilling_ && operation.n == 1 &&
         begin_of(request) + 1 == std::int64_t{request.known.size()};
}

Result<Reply> VllmPolicy::extend(const Operation& operation) {
  const Result<VllmRequest*> found = idle(operation);
  if (!found) return tl::unexpected(found.error());
  VllmRequest& request = **found;
  if (operation.async && operation.n == 0 && request.waits && request.external > 0)
    return load(request);
  if (const Result<void> is_good = check_extend(request, operation); !is_good)
    return tl::unexpected(is_good.error());
  if (request.waits && request.seen != changes_) return Reply::refusal(Refusal::same_step);
  if (request.scheduled) forward();
  begin_step();
  const std::int64_t start = begin_of(request);
  const std::uint32_t known = request.known.size();
  const std::int64_t delivered = request.blocks.known;
  const std::size_t keys = request.blocks.keys.size();
  if (!operation.tokens.empty()) {
    request.known.append(operation.tokens);
    deliver(request, operation.async ? delivered : std::int64_t{request.known.size()});
  }
  const std::int64_t n = chunk(request, operation);
  require(!manager_.rules().asserts_whole_padding || !is_cut_padding(request, operation),
          "a row that is padded has a place for each draft");
  Reply reply;
  reply.set(ReplyField::n, n);
  if (n == 0) return reply;
  const Allocated allocated = manager_.allocate(
      request.blocks, {.tokens = n,
                       .hit = request.waits ? &request.hit : nullptr,
                       .lookahead = manager_.rules().makes_room_for_drafter ? lookahead_ : 0,
                       .external = request.waits ? request.external : 0,
                       .must_fit = request.waits || request.was_loaded,
                       .others_run = running_ > 0});
  if (allocated != Allocated::yes) {
    request.known = request.known.prefix(known);
    request.blocks.known = delivered;
    request.blocks.keys.resize(keys);
    return Reply::refusal(allocated == Allocated::no_blocks ? Refusal::no_kv : Refusal::same_step);
  }
  ++changes_;
  goes_on_prefilling_ |= !request.waits && request.prefills;
  request.prefills = start + n < request.blocks.known + request.promised;
  request.loads = request.waits && request.external > 0;
  request.begins = request.waits || request.was_loaded;
  if (request.begins) {
    request.is_in_flight |= request.prefills;
    take_tier_blocks(request, request.waits ? request.external : 0);
    ++running_;
  }
  request.waits = request.was_loaded = false;
  request.blocks.computed = start + n;
  request.scheduled = true;
  request.start = start;
  if (worker_) learn(request);
  scheduled_.push_back(static_cast<std::uint32_t>(&request - requests_.data()));
  std::int64_t drafts = operation.drafts.size();
  if (drafts > 0) drafts -= operation.n - n;
  if (!operation.async) {
    if (drafts > 0) request.drafts = operation.drafts.prefix(static_cast<std::uint32_t>(drafts));
    return reply;
  }
  const bool samples = request.blocks.computed >= request.blocks.known + request.promised;
  request.flights.push_back({n, drafts, samples});
  request.blocks.in_flight += n;
  request.blocks.quiet_until = 0;  // results may publish or give back before the next allocation
  if (samples) request.promised += 1 + drafts;
  return reply;
}

/// Behind vLLM's scheduler a load leaves free what requests that are prefilled or loaded still need
/// (rule 32).
std::int64_t VllmPolicy::reserved() const {
  if (!has_tier() || !reserves_) return 0;
  std::int64_t blocks = 0;
  for (const VllmRequest& request : requests_)
    if (request.id.exists() && request.is_in_flight) blocks += manager_.remaining(request.blocks);
  return blocks;
}

/// Allocates blocks for the hit and for the tokens that another server sends. The latter get keys
/// only when they have come (rule 24).
Reply VllmPolicy::load(VllmRequest& request) {
  if (request.seen != changes_) return Reply::refusal(Refusal::same_step);
  begin_step();
  const Allocated allocated = manager_.allocate(request.blocks, {.hit = &request.hit,
                                                                 .external = request.external,
                                                                 .delays_keys = true,
                                                                 .must_fit = true,
                                                                 .reserved = reserved(),
                                                                 .others_run = running_ > 0});
  if (allocated != Allocated::yes)
    return Reply::refusal(allocated == Allocated::no_blocks ? Refusal::no_kv : Refusal::same_step);
  LOCKSTEP_MARK("vllm.loads_behind_the_step");
  take_tier_blocks(request, request.external);
  ++changes_;
  request.waits = false;
  request.is_loading = request.is_in_flight = request.scheduled = true;
  request.blocks.computed = request.start = request.hit.tokens + request.external;
  scheduled_.push_back(static_cast<std::uint32_t>(&request - requests_.data()));
  return Reply().set(ReplyField::n, 0);
}

/// A load is done when the next step begins, and its keys are of that step (rule 25).
void VllmPolicy::end_load(VllmRequest& request) {
  if (request.scheduled) forward();
  begin_step();
  has_begun_ = true;
  request.is_loading = false;
  request.was_loaded = true;
  manager_.publish(request.blocks, request.blocks.computed);
  ++changes_;
  if (worker_ && knows_its_rows() && !has_tier())
    worker_->receive({.place = static_cast<std::uint32_t>(&request - requests_.data()),
                      .request = &request.blocks,
                      .tokens = keyed_tokens(request.known, request.content),
                      .start = request.blocks.computed,
                      .end = request.blocks.computed,
                      .drafts = 0,
                      .external = request.external});
}

Result<Reply> VllmPolicy::complete(const Operation& operation) {
  VllmRequest* const request = find(operation.id);
  if (request != nullptr && request->is_loading) {
    if (has_tier() && manager_.rules().loads_wait_to_land && !take_loaded(request->blocks.offload))
      return Reply::refusal(Refusal::same_step);
    end_load(*request);
    return Reply{};
  }
  if (request == nullptr || request->flights.empty())
    return fail(
        fmt::format("complete: request `{}` has no step under way here", operation.id.text()));
  const VllmRequest::Flight flight = request->flights.front();
  if (flight.samples && !knows_its_rows())
    return fail(
        fmt::format("complete: accept tells what request `{}` sampled", operation.id.text()));
  request->flights.erase(request->flights.begin());
  request->blocks.in_flight -= flight.tokens;
  ++changes_;
  if (!flight.samples) return Reply{};
  --request->promised;
  deliver(*request, request->blocks.known + 1);
  manager_.publish(request->blocks, request->blocks.computed - request->blocks.in_flight);
  if (worker_) learn(*request);
  return Reply{};
}

/// `n` tokens of a row are kept: n - 1 drafts and the sampled one (rule 22).
Result<Reply> VllmPolicy::accept(const Operation& operation) {
  VllmRequest* const request = find(operation.id);
  if (request == nullptr)
    return fail(fmt::format("accept: request `{}` has no drafts here", operation.id.text()));
  if (operation.n != operation.tokens.size() || operation.n == 0)
    return fail(
        fmt::format("accept: n={} of {}", operation.n, counted(operation.tokens.size(), "token")));
  const Result<void> taken = take_result(*request, operation.tokens);
  if (!taken) return tl::unexpected(taken.error());
  ++changes_;
  Reply reply;
  reply.set(ReplyField::n, operation.n);
  return reply;
}

Result<void> VllmPolicy::take_result(VllmRequest& request, const Tokens& tokens) {
  BlockRequest& blocks = request.blocks;
  const std::uint32_t kept = tokens.size();
  const bool is_ahead = !knows_its_rows() && !request.flights.empty();
  // With drafts configured, a row without drafts is answered by an `accept` too.
  const bool samples = is_ahead ? request.flights.front().samples
                                : config_.overlap == 0 && config_.drafts > 0 && !request.waits &&
                                      blocks.computed >= std::int64_t{request.known.size()};
  if (request.drafts.empty() && !samples)
    return fail(fmt::format("accept: request `{}` has no drafts here", request.id.text()));
  const std::int64_t drafts =
      is_ahead ? request.flights.front().drafts : std::int64_t{request.drafts.size()};
  if (kept > drafts + 1)
    return fail(fmt::format("accept: n={} of {}", kept, counted(drafts, "draft")));
  if (!is_ahead && tokens.prefix(kept - 1) != request.drafts.prefix(kept - 1))
    return fail("accept: the tokens are not those of the drafts");
  if (!is_ahead && request.scheduled) forward();
  if (is_ahead) {
    blocks.in_flight -= request.flights.front().tokens;
    request.promised -= 1 + drafts;
    request.flights.erase(request.flights.begin());
  }
  if (manager_.rules().drops_rejected_drafts) blocks.computed -= drafts - (kept - 1);
  request.known.append(tokens);
  deliver(request, blocks.known + kept);
  const bool verified = !request.drafts.empty();
  request.drafts = Tokens();
  manager_.publish(blocks,
                   blocks.computed - (manager_.rules().publishes_ahead ? 0 : blocks.in_flight));
  if (!worker_) return {};
  learn(request);
  if (verified)
    worker_->accept(static_cast<std::uint32_t>(&request - requests_.data()), blocks, kept);
  return {};
}

Result<Reply> VllmPolicy::release(const Operation& operation) {
  VllmRequest* const request = find(operation.id);
  if (request == nullptr || (operation.verb == Verb::finish && !request->drafts.empty()) ||
      (operation.verb != Verb::abort && request->is_loading))
    return tl::unexpected(idle(operation).error());
  if (request->scheduled && operation.verb == Verb::preempt &&
      manager_.rules().keeps_keys_of_unrun_chunks)
    std::erase(scheduled_, static_cast<std::uint32_t>(request - requests_.data()));
  else if (request->scheduled)
    forward();
  if (!request->waits) ++changes_;
  if (!request->waits && !request->is_loading && !request->was_loaded) --running_;
  if (has_tier()) leave_tier(*request, operation.verb);
  manager_.free(request->blocks);
  request->id = Name();
  request->known = request->drafts = Tokens();
  places_.push_back(static_cast<std::uint32_t>(request - requests_.data()));
  place_of_[operation.id.index()] = 0;
  return Reply{};
}

/// Does nothing: vLLM publishes by itself (rule 26).
Result<Reply> VllmPolicy::checkpoint(const Operation& operation) {
  const Result<VllmRequest*> request = idle(operation);
  if (!request) return tl::unexpected(request.error());
  const std::int64_t computed = (*request)->waits ? (*request)->hit.tokens + (*request)->external
                                                  : (*request)->blocks.computed;
  if (operation.up_to > computed)
    return fail(fmt::format("checkpoint: up_to={} is beyond the {} computed", operation.up_to,
                            counted(computed, "token")));
  Reply reply;
  reply.set(ReplyField::exist, 0).set(ReplyField::length, 0);
  return reply;
}

Reply VllmPolicy::evict_keys(std::int64_t blocks) {
  if (!scheduled_.empty()) forward();
  std::int64_t evicted = 0;
  const BlockPool& pool = manager_.pool();
  for (BlockId block = pool.first_free(); block != kNullBlock && evicted < blocks;
       block = pool.next_free(block))
    if (pool.has_key(block)) {
      manager_.evict(block);
      ++evicted;
    }
  ++changes_;
  Reply reply;
  reply.set(ReplyField::kv, evicted).set(ReplyField::state, 0);
  return reply;
}

Reply VllmPolicy::flush() {
  if (!scheduled_.empty() || has_tier()) forward();
  if (has_tier()) {
    do {
      while (land_one(true) || land_one(false)) continue;
      settle();
    } while (has_disk() && (tier_->waiting().size() + tier_->stores().size()) > 0);
    reset_tier();
    if (tier_) tier_->take_noted();
  }
  std::int64_t keyed = 0;
  const BlockPool& pool = manager_.pool();
  for (BlockId block = 1; block <= pool.block_count(); ++block)
    keyed += pool.has_key(block) ? 1 : 0;
  ++changes_;
  Reply reply;
  reply.set(ReplyField::kv, manager_.forget_keys() ? keyed : 0).set(ReplyField::state, 0);
  return reply;
}

Reply VllmPolicy::check() const {
  const BlockPool& pool = manager_.pool();
  Reply reply;
  reply.set(ReplyField::violations, 0);
  reply.set(ReplyField::kv_free, pool.free_count());
  reply.set(ReplyField::kv_locked, std::int64_t{pool.block_count()} - pool.free_count());
  reply.set(ReplyField::contents, contents());
  return reply;
}

void add_pool(const BlockPool& pool, const std::function<void(std::int64_t)>& add) {
  for (BlockId block = pool.first_free(); block != kNullBlock; block = pool.next_free(block))
    add(block);
  add(0);
  std::set<std::pair<std::uint32_t, KeyId>> keys;
  for (BlockId block = 1; block <= pool.block_count(); ++block) {
    add(pool.references(block));
    std::vector<BlockPool::Entry> entries = pool.entries_of(block);
    if (!entries.empty()) {
      std::sort(entries.begin() + 1, entries.end(), [](const auto& a, const auto& b) {
        return std::pair(a.group, a.key) < std::pair(b.group, b.key);
      });
      add(entries.front().tokens);
    }
    for (const BlockPool::Entry& entry : entries) {
      add(entry.group);
      add(entry.key + 1);
      keys.emplace(entry.group, entry.key);
    }
    add(0);
  }
  for (const auto& [group, key] : keys) {
    const std::vector<BlockId> blocks = pool.blocks_of(group, key);
    if (blocks.size() < 2) continue;
    for (const BlockId block : blocks) add(block);
    add(0);
  }
}

/// A digest of all that the cache holds: the numbers below, in this order, as the coefficients of a
/// polynomial. Any program that has vLLM's structures at hand can compute the same.
///
///   the free queue, from its head; 0
///   of each block: references, keys of it: primary first, its tokens, the others by group and
///   number each key that several blocks have, by group and number: those blocks in order each
///   request, by name: of each group its columns, columns cached, the column to copy and block
///   with replay_ring, of each of these requests the entries that are pending
///   of each chunk of the CPU tier, by group and number: loads that read it, its place, its rank
///   and position; 0; the numbers of stores that wait, and of copies to the host and to the device
///   with cpu_blocks, of the host's pool the first three; the last block that lazy stores looked
///   at; the numbers of copies to the host and to the device
///
/// Keys are numbers in the order of their first appearance, from 1; a list is closed by a 0 (rule
/// 26).
std::int64_t VllmPolicy::contents() const {
  constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;
  constexpr std::uint64_t kBase = 0x1CE4E5B9BF58476Du % kPrime;
  std::uint64_t digest = 0;
  const auto add = [&](std::int64_t number) {
    digest = static_cast<std::uint64_t>(
        (static_cast<unsigned __int128>(digest) * kBase + static_cast<std::uint64_t>(number + 1)) %
        kPrime);
  };
  add_pool(manager_.pool(), add);
  std::map<std::string_view, const VllmRequest*> running;
  for (const VllmRequest& request : requests_)
    if (request.id.exists() && request.blocks.runs) running.emplace(request.id.text(), &request);
  for (const auto& [name, request] : running)
    for (const BlockTable& table : request->blocks.tables) {
      for (const BlockId block : table.columns) add(block);
      add(0);
      add(table.cached);
      add(table.partial_column);
      add(table.partial_block);
    }
  if (manager_.rules().ring > 0)
    for (const auto& [name, request] : running)
      add(request->ring.appends ? request->ring.pending + 1 : 0);
  if (has_tier()) add_tier(add);
  return static_cast<std::int64_t>(digest);
}

std::optional<Snapshot> VllmPolicy::snapshot() const {
  Snapshot now;
  now.kv_free = manager_.pool().free_count();
  now.kv_total = manager_.pool().block_count();
  if (tier_) now.host = tier_->host();
  return now;
}

/// The columns that the last allocation added, `[[1, 2], [0, 3]]` by group.
std::string VllmPolicy::decided() const {
  std::string text = "[";
  for (const std::vector<BlockId>& columns : manager_.added())
    text += fmt::format("{}[{}]", text.size() > 1 ? ", " : "", fmt::join(columns, ", "));
  return text + "]";
}

namespace {

Result<void> check_config(const Config& config) {
  if (config.overlap != 0 && config.drafts == 0 && config.number("eagle") == 1)
    return fail(
        "field overlap: without drafts, not with hashes of tokens that come later (eagle=1)");
  const Result<BlockRules> rules = BlockRules::of(config);
  if (!rules) return tl::unexpected(rules.error());
  if (rules->splitter_block > 0 && VllmSchedulerOptions::of(config)->encoder > 0)
    return fail("field scheduler: encoder is for groups whose chunks end anywhere, not for mamba");
  return {};
}

std::unique_ptr<Subject> make(const SubjectOptions& options) {
  return std::make_unique<VllmPolicy>(options, *BlockRules::of(options.config));
}

std::unique_ptr<Subject> make_retention_0(const SubjectOptions& options) {
  SubjectOptions sparse = options;
  sparse.config.put("retention", "0");
  return make(sparse);
}

Result<void> check_all(const Config& config) {
  if (Result<void> steps = check_config(config); !steps) return steps;
  return BlockRules::of(config, GroupKind::mamba_all).map([](const BlockRules&) {});
}

std::unique_ptr<Subject> make_all(const SubjectOptions& options) {
  return std::make_unique<VllmPolicy>(options,
                                      *BlockRules::of(options.config, GroupKind::mamba_all));
}

template <GroupKind mamba>
Result<BlockGroups> groups(const Config& config) {
  if (config.number("cpu_chunks") > 0)
    return fail("field cpu_chunks: chunks of the CPU tier hold labels alone");
  if (config.number("replay_ring") > 0)
    return fail("field replay_ring: rings beside blocks hold labels alone");
  if (config.overlap != 0 && config.drafts != 0)
    return fail(
        "field overlap: with drafts a row begins before it is known after which tokens, so blocks "
        "hold neither labels nor numbers");
  return BlockRules::of(config, mamba).map([](const BlockRules& rules) {
    return BlockGroups{
        .groups = rules.groups, .blocks = rules.all_blocks(), .drafts = rules.drafts};
  });
}

constexpr Capabilities kCapabilities{Capability::transfers, Capability::content_keys};
const ConfigFields kAllFields{"blocks",         "block", "groups", "hash_block",
                              "hash_algorithm", "eagle", "overlap"};
const ConfigFields kSparseFields{
    "blocks", "block",          "groups",     "hash_block", "eagle",
    "drafts", "hash_algorithm", "checkpoint", "modules",    "shared_prefix_checkpoint",
    "overlap"};
const ConfigFields kFields{
    "blocks",       "block",          "groups",     "hash_block",       "eagle",
    "drafts",       "hash_algorithm", "checkpoint", "modules",          "shared_prefix_checkpoint",
    "retention",    "overlap",        "cpu_chunks", "blocks_per_chunk", "cpu_blocks",
    "lazy_offload", "disk",           "replay_ring"};

const Registration<PolicyEntry> kVllmAlign{
    {.name = "vllm-align",
     .summary = "vLLM 0.33: blocks by hash, the states of block ends, all of them kept",
     .has_states = true,
     .config_fields = kFields,
     .make = make,
     .check = check_config,
     .capabilities = kCapabilities | Capabilities{Capability::tiers},
     .tells_forwards = true,
     .groups = groups<GroupKind::mamba>}};
const Registration<PolicyEntry> kVllmAlignRetention0{
    {.name = "vllm-align-retention-0",
     .summary = "vllm-align that keeps states only at prompt ends and where prefixes diverge",
     .has_states = true,
     .config_fields = kSparseFields,
     .make = make_retention_0,
     .check = check_config,
     .capabilities = kCapabilities,
     .tells_forwards = true,
     .groups = groups<GroupKind::mamba>}};
const Registration<PolicyEntry> kVllmAll{
    {.name = "vllm-all",
     .summary = "vLLM's older \"all\" mode: a state at each block's end, and chunks of any length",
     .has_states = true,
     .config_fields = kAllFields,
     .make = make_all,
     .check = check_all,
     .capabilities = kCapabilities,
     .tells_forwards = true,
     .groups = groups<GroupKind::mamba_all>}};

}  // namespace

}  // namespace lockstep::cache_sim
