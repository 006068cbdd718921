#include "cache_sim/server/vllm/vllm_scheduler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/host_tier.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

namespace {

/// The identity of an image: its name or, without one, its tokens.
std::uint64_t digest_of(const RequestSpec& spec, const RequestSpec::Image& image) {
  if (!image.name.exists()) return spec.tokens.slice(image.begin, image.end()).digest();
  return Tokens::of_ids({~0u, image.name.index()}).digest();  // no prompt has these tokens
}

}  // namespace

void VllmScheduler::hear(const SchedulerEvent& event, SchedulerEffects& effects) {
  switch (event.kind) {
    case SchedulerEvent::Kind::arrival:
      if (Request* const request = arrive(event)) {
        request->arrival = arrivals_++;
        for (const RequestSpec::Image& image : request->spec->images) {
          if (!options_.can_encode(image))
            return end(event.request, FinishReason::refused, effects);
          request->images.push_back({digest_of(*request->spec, image), image.size});
        }
        wait(event.request, false);
      }
      return;
    case SchedulerEvent::Kind::abort:
      require(phase_ == Phase::between_steps || phase_ == Phase::forward,
              "a client goes between steps or while a forward is under way");
      encoder_.release_all(event.request);
      return abort(event.request, effects);
    case SchedulerEvent::Kind::retract:
      require(phase_ == Phase::between_steps, "a request is retracted between steps");
      if (record(event.request).state == State::running && !record(event.request).holds)
        ask(Verb::preempt, event.request, Asked::retract, effects);
      return;
    case SchedulerEvent::Kind::step_due:
      require(phase_ == Phase::between_steps, "a step begins after the last one ended");
      return begin_step(effects);
    case SchedulerEvent::Kind::forward_done:
      require(phase_ == Phase::forward, "results come from a forward");
      phase_ = Phase::results;
      if (!options_.overlap) launched_.swap(batch_);
      cursor_ = 0;
      return;
    case SchedulerEvent::Kind::reply: return;
  }
}

void VllmScheduler::next(SchedulerEffects& effects) {
  while (asked_ == Asked::nothing) {
    switch (phase_) {
      case Phase::between_steps:
      case Phase::forward: return;
      case Phase::running: next_running(effects); break;
      case Phase::waiting: next_waiting(effects); break;
      case Phase::results: next_result(effects); break;
    }
  }
}

// --- Decisions -----------------------------------------------------------------------------------

void VllmScheduler::begin_step(SchedulerEffects& effects) {
  launched_ = std::exchange(batch_, {});  // with overlap: the step is under way
  effects.idle = waiting_.empty() && running_.empty();
  cursor_ = 0;
  budget_ = input_budget_ = options_.chunked_prefill;
  encoder_budget_ = options_.encoder;
  threshold_ = load() > 1 ? options_.long_prefill : 0;
  if (threshold_ > 0 && options_.adapts)
    threshold_ = std::max(threshold_, input_budget_ / static_cast<std::int64_t>(load()));
  has_preempted_ = goes_on_prefilling_ = false;
  quiet_steps_ = running_.empty() ? quiet_steps_ + 1 : 0;
  phase_ = Phase::running;
}

/// Whether the request's last step is under way, however few tokens that step yields.
bool VllmScheduler::has_all_steps(const Request& request) const {
  return request.promised > 0 && !request.spec->stops &&
         request.computed + 2 - request.promised >= request.spec->tokens.size();
}

/// The tokens that the next row of this step may have.
std::int64_t VllmScheduler::left() const {
  return std::min(budget_, input_budget_ - options_.draft_slots);
}

/// The number of drafts after the request's last token. With overlap these are placeholders, which
/// the forward under way will fill.
std::uint32_t VllmScheduler::proposed(const Request& request) const {
  if (options_.drafts == 0 || request.prefills) return 0;
  const auto most = static_cast<std::uint32_t>(options_.drafts);
  if (options_.overlap) return most;
  const std::vector<std::int64_t>& given = request.spec->drafts;
  if (request.verification >= given.size()) return 0;
  return std::min(most, static_cast<std::uint32_t>(given[request.verification]));
}

/// The tokens that the next row of this request gets, at most left().
std::uint32_t VllmScheduler::share(const Request& request) const {
  std::int64_t tokens = request.lacks() + proposed(request);
  if (threshold_ > 0) tokens = std::min(tokens, threshold_);
  return static_cast<std::uint32_t>(std::min(tokens, left()));
}

void VllmScheduler::next_running(SchedulerEffects& effects) {
  for (; cursor_ < running_.size() && left() > 0; ++cursor_) {
    const Request& request = requests_[running_[cursor_]];
    if (has_all_steps(request) || request.lacks() == 0) continue;
    needy_ = running_[cursor_];
    if (const std::uint32_t tokens = fit_images(needy_, share(request)); tokens > 0)
      return extend(needy_, tokens, effects);
  }
  cursor_ = 0;
  running_rows_ = batch_.size();
  if (has_preempted_) return end_decisions(effects);
  phase_ = Phase::waiting;
}

void VllmScheduler::next_waiting(SchedulerEffects& effects) {
  while (cursor_ < waiting_.size() && requests_[waiting_[cursor_]].stale > 0) {
    LOCKSTEP_MARK("vllm_scheduler.overtakes_who_has_results_out");
    ++cursor_;
  }
  const bool room = left() > 0 && static_cast<std::int64_t>(running_.size()) < options_.max_running;
  if (!room || cursor_ == waiting_.size()) return end_decisions(effects);
  const RequestNumber number = waiting_[cursor_];
  if (requests_[number].is_loading) {
    ask(Verb::complete, number, Asked::loaded, effects);
    return;
  }
  if (requests_[number].holds) return go_on_after_load(number, effects);
  ask(Verb::admit, number, Asked::admit, effects);
}

void VllmScheduler::end_decisions(SchedulerEffects& effects) {
  if (!batch_.empty() || options_.has_tier) {
    ask(Verb::step, 0, Asked::step, effects);
    for (const Row& row : batch_) effects.operation->ids.push_back(requests_[row.request].spec->id);
    return;
  }
  phase_ = launched_.empty() ? Phase::between_steps : Phase::forward;
}

void VllmScheduler::extend(RequestNumber number, std::uint32_t tokens, SchedulerEffects& effects) {
  const Request& request = requests_[number];
  asked_tokens_ = tokens;
  const std::uint32_t drafts = tokens - std::min(tokens, request.lacks());
  Operation& extend = ask(Verb::extend, number, Asked::extend, effects);
  extend.n = tokens;
  extend.async = options_.overlap;
  if (drafts > 0) extend.drafts = drafts_of(request, drafts);
  if (options_.overlap && options_.drafts > 0) return;  // the tokens are not known yet
  const std::uint32_t end = request.computed + tokens - drafts;
  if (end > request.told) extend.tokens = request.spec->tokens.slice(request.told, end);
}

/// The drafts of a row: the first ones are right, the tokens that will be sampled; the others are
/// wrong. Drafts that only fill placeholders are all wrong.
Tokens VllmScheduler::drafts_of(const Request& request, std::uint32_t drafts) const {
  const std::uint32_t right =
      options_.overlap ? 0 : kept_of(request, drafts, !request.prefills) - 1;
  const std::uint32_t known = request.spec->prompt_size + request.sampled;
  return request.spec->tokens.slice(known, known + right)
      .followed_by(Tokens::of_document(kWrongDrafts, 0, drafts - right));
}

/// The tokens that a row with so many drafts yields: its accepted drafts and one more, but none
/// after the output's end.
std::uint32_t VllmScheduler::kept_of(const Request& request, std::uint32_t drafts, bool verifies) {
  const std::vector<std::int64_t>& accept = request.spec->accept;
  std::uint32_t kept = 1;
  if (verifies && request.verification < accept.size())
    kept = static_cast<std::uint32_t>(accept[request.verification]);
  return std::min({kept, drafts + 1, request.spec->output_size() - request.sampled});
}

/// Cuts a row of `tokens` tokens before the first image that cannot be encoded now, and plans the
/// encoding of the images before it.
std::uint32_t VllmScheduler::fit_images(RequestNumber number, std::uint32_t tokens) {
  const Request& request = requests_[number];
  planned_.clear();
  repeated_.clear();
  planned_size_ = 0;
  if (options_.encoder == 0) return tokens;
  const std::uint32_t begin = request.computed;
  const auto ahead = static_cast<std::uint32_t>(options_.reads_ahead);
  const std::uint32_t end = begin + tokens;
  for (EncoderCache::Input i = 0; i < request.images.size(); ++i) {
    const RequestSpec::Image& place = request.spec->images[i];
    const EncoderCache::Image& image = request.images[i];
    if (place.end() <= begin || place.begin >= end + ahead) continue;
    if (options_.whole_images && begin <= place.begin && end < place.end()) {
      LOCKSTEP_MARK("vllm_scheduler.ends_before_an_image");
      return place.begin - std::min(place.begin, begin + ahead);
    }
    const auto is_same = [&](EncoderCache::Input other) {
      return request.images[other].digest == image.digest;
    };
    if (std::ranges::any_of(planned_, is_same)) {
      repeated_.push_back(i);
      continue;
    }
    if (encoder_.take(number, i, image)) continue;
    if (image.size > encoder_budget_ - planned_size_ || !encoder_.make_room(image, planned_size_)) {
      LOCKSTEP_MARK("vllm_scheduler.waits_for_the_encoder");
      return place.begin > begin ? std::min(tokens, place.begin - begin) : 0;
    }
    planned_.push_back(i);
    planned_size_ += image.size;
  }
  return tokens;
}

/// Takes the planned images into the cache, once the row is scheduled.
void VllmScheduler::encode_planned(RequestNumber number) {
  const Request& request = requests_[number];
  for (const EncoderCache::Input input : planned_)
    encoder_.put(number, input, request.images[input]);
  for (const EncoderCache::Input input : repeated_)
    encoder_.take(number, input, request.images[input]);
  encoder_budget_ -= planned_size_;
}

/// Releases images whose tokens are computed and can no longer be taken back by a result.
void VllmScheduler::release_seen_images(RequestNumber number) {
  const Request& request = requests_[number];
  const std::uint32_t pending = options_.overlap ? request.promised : 0;
  const std::map<EncoderCache::Input, std::uint64_t> needed = encoder_.of(number);
  for (const auto& [input, digest] : needed)
    if (request.spec->images[input].end() + pending <= request.computed)
      encoder_.release(number, input);
}

/// Preempts a request, because the extend of needy_ was refused.
void VllmScheduler::make_room(SchedulerEffects& effects) {
  LOCKSTEP_MARK("vllm_scheduler.preempts");
  RequestNumber victim = running_.back();
  if (options_.by_priority)
    victim = *std::ranges::max_element(running_, [&](auto a, auto b) { return goes_before(a, b); });
  if (running_.size() == 1 && ++requests_[victim].lone_preemptions > kLonePreemptions)
    return drop(victim, FinishReason::refused, effects);
  ask(Verb::preempt, victim, Asked::preempt, effects);
}

void VllmScheduler::schedule(RequestNumber number, std::uint32_t tokens) {
  Request& request = requests_[number];
  const bool decodes = request.lacks() == 1 && request.computed >= request.spec->prompt_size;
  const bool goes_on = phase_ == Phase::running;
  const Row row{.request = number,
                .begin = request.computed,
                .tokens = tokens,
                .drafts = tokens - std::min(tokens, request.lacks()),
                .encoded = planned_size_,
                .samples = tokens >= request.lacks(),
                .decodes = decodes,
                .verifies = goes_on && !request.prefills};
  if (goes_on && !request.prefills && row.drafts < proposed(request))
    LOCKSTEP_MARK("vllm_scheduler.drops_drafts_that_do_not_fit");
  goes_on_prefilling_ |= goes_on && request.prefills;
  request.computed += tokens;
  ++request.in_flight;
  if (row.samples) request.promised += 1 + row.drafts;
  request.prefills = !row.samples;
  batch_.push_back(row);
  encode_planned(number);
  budget_ -= tokens;
  input_budget_ -= tokens + options_.draft_slots;
}

// --- Answers -------------------------------------------------------------------------------------

void VllmScheduler::settle(Asked asked, const Reply& reply, SchedulerEffects& effects) {
  const RequestNumber number = subject_of_ask_;
  switch (asked) {
    case Asked::admit: return settle_admission(reply, effects);
    case Asked::extend: return settle_extend(reply, effects);
    case Asked::load: return settle_load(reply, effects);
    case Asked::loaded:
      if (reply.refused != Refusal::none) {
        LOCKSTEP_MARK("vllm_scheduler.overtakes_who_loads");
        ++cursor_;
        return;
      }
      requests_[number].is_loading = false;
      return go_on_after_load(number, effects);
    case Asked::undo: return end_decisions(effects);
    case Asked::skip: ++cursor_; return;
    case Asked::preempt: return settle_preemption(effects);
    case Asked::retract:
      forget(number);
      wait(number, true);
      effects.notes.push_back({SchedulerNote::Kind::retracted, number});
      return;
    case Asked::step: return settle_step(effects);
    case Asked::result: return settle_result(effects);
    case Asked::finish:
      forget(number);
      end(number, effects);
      ++cursor_;
      return;
    case Asked::drop:
      forget(number);
      end(number, drop_reason_, effects);
      return;
    case Asked::nothing: return;
  }
}

void VllmScheduler::settle_extend(const Reply& reply, SchedulerEffects& effects) {
  const RequestNumber number = subject_of_ask_;
  Request& request = requests_[number];
  const bool taken = reply.refused == Refusal::none;
  if (taken)
    request.told =
        std::max(request.told, request.computed + std::min(asked_tokens_, request.lacks()));
  const auto tokens =
      taken ? static_cast<std::uint32_t>(reply.get(ReplyField::n, asked_tokens_)) : 0;
  if (phase_ == Phase::running) {
    if (!taken) return make_room(effects);
    if (tokens > 0) schedule(number, tokens);
    ++cursor_;
    return;
  }
  if (tokens == 0) {
    encoder_.release_all(number);
    if (request.holds && !is_alone()) return end_decisions(effects);
    return undo_admission(effects);
  }
  waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(cursor_));
  if (std::exchange(request.holds, false)) --holders_;
  running_.push_back(number);
  request.state = State::running;
  effects.notes.push_back({SchedulerNote::Kind::admitted, number});
  schedule(number, tokens);
}

void VllmScheduler::settle_admission(const Reply& reply, SchedulerEffects& effects) {
  Request& request = requests_[subject_of_ask_];
  if (reply.refused == Refusal::same_step) {
    LOCKSTEP_MARK("vllm_scheduler.passes_over_who_needs_a_copy");
    ++cursor_;
    return;
  }
  if (reply.refused != Refusal::none) {
    if (reply.refused != Refusal::too_long && !is_alone()) return end_decisions(effects);
    encoder_.release_all(subject_of_ask_);
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(cursor_));
    return end(subject_of_ask_, FinishReason::refused, effects);
  }
  request.computed = static_cast<std::uint32_t>(reply.get(ReplyField::cached));
  request.told = request.spec->prompt_size + request.sampled;
  if (reply.get(ReplyField::host, 0) > 0) {
    Operation& load = ask(Verb::extend, subject_of_ask_, Asked::load, effects);
    load.n = 0;
    load.async = true;
    return;
  }
  std::uint32_t tokens = share(request);
  if (is_padded(request)) {
    const std::int64_t padded = 1 + options_.drafts;
    if (padded > left()) return undo_admission(effects);
    LOCKSTEP_MARK("vllm_scheduler.pads_an_admission");
    // A row that is cut has one token and no drafts.
    if (threshold_ == 0 || threshold_ >= padded) tokens = static_cast<std::uint32_t>(padded);
  }
  const RequestNumber number = subject_of_ask_;
  tokens = fit_images(number, tokens);
  if (tokens > 0) return extend(number, tokens, effects);
  encoder_.release_all(number);
  request.computed = request.told = 0;
  ask(Verb::preempt, number, Asked::skip, effects);
}

/// Whether an admitted request that decodes at once gets placeholders for drafts: in a step where
/// all rows decode, they have one length.
bool VllmScheduler::is_padded(const Request& request) const {
  return options_.drafts > 0 && request.lacks() == 1 && !goes_on_prefilling_ &&
         (running_rows_ > 0 || request.computed > 0);
}

/// The request has blocks for its load, or did not get them.
void VllmScheduler::settle_load(const Reply& reply, SchedulerEffects& effects) {
  if (reply.refused != Refusal::none) return undo_admission(effects);
  const RequestNumber number = subject_of_ask_;
  Request& request = requests_[number];
  request.holds = request.is_loading = true;
  request.state = State::running;
  waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(cursor_));
  auto place = waiting_.begin() + holders_;
  if (options_.by_priority)
    place = std::partition_point(waiting_.begin(), place,
                                 [&](RequestNumber other) { return goes_before(other, number); });
  waiting_.insert(place, number);
  ++holders_;
  ++cursor_;
}

void VllmScheduler::go_on_after_load(RequestNumber number, SchedulerEffects& effects) {
  extend(number, share(requests_[number]), effects);
}

/// Whether nothing else runs, so that there will never be more room than now.
bool VllmScheduler::is_alone() const {
  if (options_.has_tier && quiet_steps_ <= kQuietSteps) return false;
  const bool is_next = holders_ == 0 || requests_[subject_of_ask_].holds;
  return running_.empty() && batch_.empty() && launched_.empty() && is_next;
}

/// Undoes an admission. The subject holds nothing, because the look-up took no blocks.
void VllmScheduler::undo_admission(SchedulerEffects& effects) {
  const RequestNumber number = subject_of_ask_;
  if (is_alone()) {
    drop_reason_ = FinishReason::refused;
    ask(Verb::abort, number, Asked::drop, effects);
    return;
  }
  requests_[number].computed = requests_[number].told = 0;
  ask(Verb::preempt, number, Asked::undo, effects);
}

void VllmScheduler::settle_preemption(SchedulerEffects& effects) {
  const RequestNumber victim = subject_of_ask_;
  const auto place = std::ranges::find(running_, victim) - running_.begin();
  if (static_cast<std::size_t>(place) < cursor_) --cursor_;
  has_preempted_ = true;
  const auto row = std::ranges::find(batch_, victim, &Row::request);
  if (row != batch_.end()) {
    LOCKSTEP_MARK("vllm_scheduler.preempts_who_was_scheduled");
    budget_ += row->tokens;
    input_budget_ += row->tokens + options_.draft_slots;
    encoder_budget_ += row->encoded;
    --requests_[victim].in_flight;
    batch_.erase(row);
  }
  forget(victim);
  wait(victim, true);
  effects.notes.push_back({SchedulerNote::Kind::retracted, victim});
  if (victim != needy_) return extend(needy_, asked_tokens_, effects);
  if (!options_.by_priority) return end_decisions(effects);
}

void VllmScheduler::settle_step(SchedulerEffects& effects) {
  if (batch_.empty()) {
    phase_ = Phase::between_steps;
    return;
  }
  StepWork work;
  for (const Row& row : batch_) {
    (row.decodes ? work.decode_tokens : work.prefill_tokens) += row.tokens;
    work.context_tokens += row.begin;
    work.seen_tokens +=
        std::int64_t{row.tokens} * row.begin + std::int64_t{row.tokens} * (row.tokens + 1) / 2;
  }
  effects.forward = work;
  phase_ = options_.overlap && launched_.empty() ? Phase::between_steps : Phase::forward;
}

// --- Results -------------------------------------------------------------------------------------

void VllmScheduler::next_result(SchedulerEffects& effects) {
  if (cursor_ == launched_.size()) {
    launched_.clear();
    phase_ = Phase::between_steps;
    return;
  }
  const Row& row = launched_[cursor_];
  Request& request = requests_[row.request];
  if (request.state == State::ended) {
    ++cursor_;
    return;
  }
  --request.in_flight;
  if (row.stale) --request.stale;
  // The subject does not know a request that was preempted.
  if (!row.stale && row.samples && options_.drafts > 0) {
    const std::uint32_t kept = kept_of(request, row.drafts, row.verifies);
    const std::uint32_t known = request.spec->prompt_size + request.sampled;
    Operation& accept = ask(Verb::accept, row.request, Asked::result, effects);
    accept.n = kept;
    accept.tokens = request.spec->tokens.slice(known, known + kept);
    return;
  }
  if (!row.stale && options_.overlap) {
    ask(Verb::complete, row.request, Asked::result, effects);
    return;
  }
  settle_result(effects);
}

void VllmScheduler::settle_result(SchedulerEffects& effects) {
  const Row& row = launched_[cursor_];
  Request& request = requests_[row.request];
  const std::uint32_t kept = kept_of(request, row.drafts, row.verifies);
  if (row.samples && !row.stale) {
    request.promised -= row.drafts + 1 - kept;
    request.computed -= row.drafts + 1 - kept;
  }
  release_seen_images(row.request);
  if (!row.samples) {
    ++cursor_;
    return;
  }
  request.sampled += kept;
  request.lone_preemptions = 0;
  if (row.verifies) ++request.verification;
  if (!row.stale) {
    request.promised -= kept;
    if (options_.drafts > 0) request.told = request.spec->prompt_size + request.sampled;
  }
  effects.notes.push_back(
      {SchedulerNote::Kind::sampled, row.request, FinishReason::running, request.sampled});
  if (request.sampled < request.spec->output_size()) {
    ++cursor_;
    return;
  }
  if (request.state == State::running) {
    ask(Verb::finish, row.request, Asked::finish, effects);
    return;
  }
  forget(row.request);
  end(row.request, effects);
  ++cursor_;
}

// --- Queues --------------------------------------------------------------------------------------

bool VllmScheduler::goes_before(RequestNumber a, RequestNumber b) const {
  const Request& one = requests_[a];
  const Request& other = requests_[b];
  if (one.spec->priority != other.spec->priority) return one.spec->priority > other.spec->priority;
  return one.arrival < other.arrival;
}

void VllmScheduler::wait(RequestNumber number, bool front) {
  requests_[number].state = State::waiting;
  const auto first = waiting_.begin() + holders_;
  auto place = front ? first : waiting_.end();
  if (options_.by_priority)
    place = std::partition_point(first, waiting_.end(),
                                 [&](RequestNumber other) { return goes_before(other, number); });
  waiting_.insert(place, number);
}

/// Removes the request from running_ and waiting_; none of its tokens is computed any more.
void VllmScheduler::forget(RequestNumber number) {
  Request& request = requests_[number];
  encoder_.release_all(number);
  std::erase(running_, number);
  std::erase(waiting_, number);
  if (std::exchange(request.holds, false)) --holders_;
  request.is_loading = false;
  request.computed = request.told = request.promised = 0;
  request.prefills = true;
  request.stale = request.in_flight;
  for (std::vector<Row>* const rows : {&launched_, &batch_})
    for (Row& row : *rows)
      if (row.request == number) row.stale = true;
}

namespace {

const Registration<SchedulerEntry> kRegistered{
    {.name = "vllm",
     .summary = "vLLM 0.33's scheduler: steps that mix prefill chunks and decodes",
     .check = [](const Config& config, const PolicyEntry& policy) -> Result<void> {
       const Result<VllmSchedulerOptions> options = VllmSchedulerOptions::of(config);
       if (!options) return tl::unexpected(options.error());
       if (!policy.config_fields.contains("blocks"))
         return fail(fmt::format("field scheduler: policy {} is none of vLLM's", policy.name));
       if (config.drafts > 0 && has_host_tier(config))
         return fail("field drafts: scheduler=vllm has none beside a CPU tier");
       if (has_disk(config))
         return fail("field disk: scheduler=vllm loads from the CPU tier alone");
       return {};
     },
     .make = [](const Config& config) -> std::unique_ptr<ServerScheduler> {
       return std::make_unique<VllmScheduler>(*VllmSchedulerOptions::of(config));
     },
     .takes_transfers = false,
     .takes_cuts = true,
     .settles_with_results = true}};

}  // namespace
}  // namespace lockstep::cache_sim
