#include "cache_sim/server/scheduler.hpp"

#include <algorithm>
#include <utility>

#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

void Scheduler::hear(const SchedulerEvent& event, SchedulerEffects& effects) {
  switch (event.kind) {
    case SchedulerEvent::Kind::arrival:
      if (arrive(event) != nullptr) enqueue(event.request, false);
      return;
    case SchedulerEvent::Kind::abort:
      require(phase_ == Phase::between_steps || phase_ == Phase::forward,
              "a client goes between steps or while a forward is under way");
      return abort(event.request, effects);
    case SchedulerEvent::Kind::retract:
      require(phase_ == Phase::between_steps, "a request is retracted between steps");
      if (record(event.request).state == State::running) retract(event.request, effects);
      return;
    case SchedulerEvent::Kind::step_due:
      require(phase_ == Phase::between_steps, "a step begins after the last one ended");
      return begin_step(effects);
    case SchedulerEvent::Kind::forward_done:
      require(has_results_out(), "results come from a forward");
      phase_ = Phase::results;
      if (launched_.empty() && !orphan_rows_in_flight_) {
        launched_.swap(batch_);
        has_forward_ = false;
      }
      orphan_rows_in_flight_ = false;
      cursor_ = 0;
      return;
    case SchedulerEvent::Kind::reply: return;
  }
}

bool Scheduler::waits_for_results() const {
  if (!options_.overlap || batch_.empty()) return false;
  return std::ranges::any_of(running_, [&](RequestNumber number) {
    const Request& request = requests_[number];
    return request.verification < request.spec->drafts.size();
  });
}

void Scheduler::begin_step(SchedulerEffects& effects) {
  launched_.swap(batch_);  // with overlap: the step decided before this one is under way
  is_launched_ = std::exchange(has_forward_, false);
  cursor_ = 0;
  // A prompt is cut where a page ends, so the budget is a whole number of pages.
  budget_ = std::max(options_.chunked_prefill / options_.page * options_.page, options_.page);
  effects.idle = !has_work();
  begin_decisions();
  if (!effects.idle) phase_ = Phase::chunk_ends;
}

void Scheduler::next(SchedulerEffects& effects) {
  while (asked_ == Asked::nothing) {
    switch (phase_) {
      case Phase::between_steps:
      case Phase::forward: return;
      case Phase::chunk_ends: next_chunk_end(effects); break;
      case Phase::prefill: next_prefill(effects); break;
      case Phase::admission: next_admission(effects); break;
      case Phase::rules: next_rule(effects); break;
      case Phase::decode: next_decode(effects); break;
      case Phase::results: next_result(effects); break;
    }
  }
}

/// Checkpoints chunks that are not the last ones of their prompts: they are stored before the next
/// chunks begin.
void Scheduler::next_chunk_end(SchedulerEffects& effects) {
  for (; cursor_ < launched_.size(); ++cursor_) {
    Row& row = launched_[cursor_];
    if (!row.chunk || row.samples) continue;
    row.checkpointed = true;
    ask(Verb::checkpoint, row.request, Asked::checkpoint, effects);
    effects.operation->up_to = row.begin + row.tokens;
    return;
  }
  cursor_ = 0;
  phase_ = Phase::prefill;
}

void Scheduler::next_prefill(SchedulerEffects& effects) {
  for (; cursor_ < running_.size() && budget_ > 0; ++cursor_) {
    if (!requests_[running_[cursor_]].prefilling) continue;
    prefill(running_[cursor_], effects);
    if (asked_ != Asked::nothing) return;
  }
  phase_ = Phase::admission;
}

void Scheduler::prefill(RequestNumber number, SchedulerEffects& effects) {
  extend(
      number,
      static_cast<std::uint32_t>(std::min<std::int64_t>(budget_, requests_[number].to_prefill())),
      effects);
}

bool Scheduler::may_admit() {
  return budget_ > 0 && static_cast<std::int64_t>(running_.size()) < options_.max_running;
}

void Scheduler::next_admission(SchedulerEffects& effects) {
  if (may_admit() && !waiting_.empty()) return look_up(effects);
  end_admission(effects);
}

void Scheduler::end_admission(SchedulerEffects& effects) {
  if (!batch_.empty()) return begin_forward(effects);
  phase_ = Phase::decode;
  cursor_ = 0;
}

/// Whether the request gets a row in this decode step. A request that is still prefilling found no
/// room and waits for the results that are out. A request that ends by its length gets no step
/// after the one that samples its last token; a request that stops by itself is not known to have
/// ended.
bool Scheduler::may_decode(const Request& request) {
  const RequestSpec& spec = *request.spec;
  return !request.prefilling && (spec.stops || request.scheduled + 1 < spec.tokens.size());
}

void Scheduler::next_decode(SchedulerEffects& effects) {
  while (cursor_ < running_.size() && !may_decode(requests_[running_[cursor_]])) ++cursor_;
  if (cursor_ < running_.size()) {
    const RequestNumber number = running_[cursor_];
    const Request& request = requests_[number];
    const bool drafts = request.verification < request.spec->drafts.size() &&
                        request.spec->drafts[request.verification] > 0;
    if (drafts) return verify(number, effects);
    return extend(number, 1, effects);
  }
  if (!batch_.empty()) return begin_forward(effects);
  end_decisions();  // all running requests were refused or retracted
}

void Scheduler::end_decisions() {
  orphan_rows_in_flight_ = launched_.empty() && is_launched_;
  is_launched_ = false;
  phase_ = launched_.empty() && !orphan_rows_in_flight_ ? Phase::between_steps : Phase::forward;
}

void Scheduler::begin_forward(SchedulerEffects& effects) {
  ask(Verb::step, 0, Asked::step, effects);
  for (const Row& row : batch_) effects.operation->ids.push_back(requests_[row.request].spec->id);
  forward_begins();
  // A decode or verification step runs as a captured graph where one is large enough.
  const auto graph = std::ranges::lower_bound(options_.graph_batches, std::ssize(batch_));
  if (!batch_.front().chunk && graph != options_.graph_batches.end())
    effects.operation->padded = *graph;
}

void Scheduler::next_result(SchedulerEffects& effects) {
  if (cursor_ == launched_.size()) {
    launched_.clear();
    phase_ = Phase::between_steps;
    return;
  }
  Row& row = launched_[cursor_];
  Request& request = requests_[row.request];
  if (options_.overlap && row.accepts == 0 && !row.completed) {
    row.completed = true;
    ask(Verb::complete, row.request, Asked::complete, effects);
    return;
  }
  if (row.accepts != 0) {
    ask(Verb::accept, row.request, Asked::accept, effects);
    const std::uint32_t kept = row.accepts + row.overrun;
    effects.operation->n = kept;
    effects.operation->tokens =
        sampled_from(*request.spec, request.spec->prompt_size + request.sampled, kept);
    return;
  }
  settle_result(effects);
}

/// Takes the result of one row: its tokens are computed, and a token is sampled if all known tokens
/// were.
void Scheduler::settle_result(SchedulerEffects& effects) {
  const Row& row = launched_[cursor_];
  Request& request = requests_[row.request];
  if (row.accepts != 0) {
    request.scheduled += row.accepts + row.overrun;
    request.known += row.accepts + row.overrun;
    request.sampled += row.accepts;
  }
  if (!row.chunk) ++request.verification;  // a row without drafts counts as a verification as well
  if (row.samples) {
    if (row.accepts == 0) ++request.sampled;
    effects.notes.push_back(
        {SchedulerNote::Kind::sampled, row.request, FinishReason::running, request.sampled});
    if (request.sampled == request.spec->output_size()) {
      ask(Verb::finish, row.request, Asked::finish, effects);
      if (row.overrun > 0) effects.operation->up_to = request.spec->tokens.size();
      return;
    }
  }
  if (row.chunk && !row.checkpointed) {
    ask(Verb::checkpoint, row.request, Asked::checkpoint, effects);
    if (options_.overlap) effects.operation->up_to = row.begin + row.tokens;
    return;
  }
  ++cursor_;
}

void Scheduler::look_up(SchedulerEffects& effects) {
  const Request& first = requests_[waiting_.front()];
  Operation& admission = ask(Verb::admit, waiting_.front(), Asked::admit, effects);
  // KV that was transferred before a retraction is gone.
  if (first.spec->external > 0 && !first.was_admitted) admission.external = first.spec->external;
  admission.room = admission_room();
}

void Scheduler::extend(RequestNumber number, std::uint32_t tokens, SchedulerEffects& effects) {
  const Request& request = requests_[number];
  ask(Verb::extend, number, Asked::extend, effects);
  asked_tokens_ = tokens;
  asked_accepts_ = asked_overrun_ = 0;
  effects.operation->n = tokens;
  effects.operation->async = options_.overlap;
  const std::uint32_t end = request.scheduled + tokens;
  if (end > request.known)
    effects.operation->tokens = request.spec->tokens.slice(request.known, end);
}

/// The tokens sampled from `position` on. After the output's end, where the client does not look
/// any more, they are tokens of a document of their own.
Tokens Scheduler::sampled_from(const RequestSpec& spec, std::uint32_t position,
                               std::uint32_t count) {
  const std::uint32_t end = spec.tokens.size();
  const std::uint32_t within = std::min(count, end - std::min(position, end));
  return spec.tokens.slice(std::min(position, end), std::min(position, end) + within)
      .followed_by(Tokens::of_document(kBehindTheEnd, 0, count - within));
}

/// Asks for a verification of the last sampled token and the drafts. The first accept - 1 drafts on
/// the longest path of the tree are the tokens that will be sampled.
void Scheduler::verify(RequestNumber number, SchedulerEffects& effects) {
  const Request& request = requests_[number];
  const RequestSpec& spec = *request.spec;
  const std::int64_t drafts = spec.drafts[request.verification];
  const auto left = std::int64_t{spec.output_size()} - request.sampled;
  const std::int64_t kept = std::min(spec.accept[request.verification], left);
  const bool ends = kept == left && spec.overrun > 0;
  const std::int64_t overrun = ends ? std::min(spec.overrun, spec.most_kept(drafts) - kept) : 0;
  extend(number, 1, effects);
  Operation& verification = *effects.operation;
  verification.async = false;
  const auto right = static_cast<std::uint32_t>(kept + overrun - 1);
  const Tokens expected = sampled_from(spec, request.scheduled + 1, right);
  if (spec.branches == 1) {
    const auto wrong = static_cast<std::uint32_t>(drafts) - right;
    verification.drafts = expected.followed_by(Tokens::of_document(kWrongDrafts, 0, wrong));
  } else {
    std::int64_t on_way = 1;
    std::uint32_t found = 0;
    for (std::int64_t draft = 1; draft <= drafts; ++draft) {
      const bool is_right = draft == on_way && found < right;
      verification.drafts.append(
          is_right ? expected.slice(found, found + 1)
                   : Tokens::of_document(kWrongDrafts, static_cast<std::uint32_t>(draft), 1));
      verification.parents.push_back((draft - 1) / spec.branches);
      if (!is_right) continue;
      ++found;
      on_way = spec.branches * draft + 1;
    }
  }
  verification.n = 1 + drafts;
  asked_tokens_ = static_cast<std::uint32_t>(1 + drafts);
  asked_accepts_ = static_cast<std::uint32_t>(kept);
  asked_overrun_ = static_cast<std::uint32_t>(overrun);
}

void Scheduler::retract(RequestNumber request, SchedulerEffects& effects) {
  LOCKSTEP_MARK("scheduler.retract");
  ask(Verb::preempt, request, Asked::preempt, effects);
}

/// Queues a request: higher priorities first, equal ones by arrival; a retracted request goes
/// before its equals.
void Scheduler::enqueue(RequestNumber request, bool front) {
  const std::int64_t priority = requests_[request].spec->priority;
  const auto goes_before = [&](RequestNumber other) {
    const std::int64_t theirs = requests_[other].spec->priority;
    return front ? theirs > priority : theirs >= priority;
  };
  waiting_.insert(std::partition_point(waiting_.begin(), waiting_.end(), goes_before), request);
}

/// Removes the row of a request that leaves in the middle of a step. The cursor stays valid,
/// because no request before it leaves.
void Scheduler::leave_batch(RequestNumber request) {
  const auto is_its = [&](const Row& row) { return row.request == request; };
  std::erase_if(batch_, is_its);
  if (phase_ != Phase::results) std::erase_if(launched_, is_its);
  std::erase(running_, request);
}

void Scheduler::settle_admit(RequestNumber number, const Reply& reply, SchedulerEffects& effects) {
  if (reply.refused != Refusal::none) {
    // A request that does not fit while nothing runs can never be admitted, so it is refused for
    // good. Otherwise admission ends for this step.
    if (running_.empty() || reply.refused == Refusal::too_long) {
      waiting_.pop_front();
      end(number, FinishReason::refused, effects);
    } else {
      admission_refused(effects);
    }
    return;
  }
  Request& request = requests_[number];
  waiting_.pop_front();
  running_.push_back(number);
  request.state = State::running;
  request.was_admitted = true;
  request.prefilling = true;
  request.known = request.spec->prompt_size + request.sampled;
  request.scheduled = static_cast<std::uint32_t>(reply.get(ReplyField::cached));
  effects.notes.push_back({SchedulerNote::Kind::admitted, number});
  prefill(number, effects);
  admitted(reply);
}

void Scheduler::settle(Asked asked, const Reply& reply, SchedulerEffects& effects) {
  const RequestNumber number = subject_of_ask_;
  switch (asked) {
    case Asked::admit: return settle_admit(number, reply, effects);
    case Asked::extend: return settle_extend(reply, effects);
    case Asked::preempt:
      leave_batch(number);
      requests_[number].state = State::waiting;
      enqueue(number, retracted_goes_first());
      effects.notes.push_back({SchedulerNote::Kind::retracted, number});
      return retracted(effects);
    case Asked::step: {
      StepWork work;
      for (const Row& row : batch_) {
        (row.chunk ? work.prefill_tokens : work.decode_tokens) += row.tokens;
        work.context_tokens += row.begin;
        work.seen_tokens +=
            std::int64_t{row.tokens} * row.begin + std::int64_t{row.tokens} * (row.tokens + 1) / 2;
      }
      effects.forward = work;
      phase_ = Phase::forward;
      has_forward_ = waits_for_orphan_rows();
      if (options_.overlap) end_decisions();
      return;
    }
    case Asked::complete: return;
    case Asked::rules: return settle_rule(reply, effects);
    case Asked::accept: return settle_result(effects);
    case Asked::checkpoint: ++cursor_; return;
    case Asked::finish:
      end(number, effects);
      leave_batch(number);
      ++cursor_;
      return;
    case Asked::drop:
      leave_batch(number);
      end(number, drop_reason_, effects);
      return;
    case Asked::nothing: return;
  }
}

void Scheduler::settle_extend(const Reply& reply, SchedulerEffects& effects) {
  const RequestNumber number = subject_of_ask_;
  Request& request = requests_[number];
  if (reply.refused == Refusal::none) {
    const bool verifies = asked_accepts_ != 0;
    const std::uint32_t begin = request.scheduled;
    request.known = std::max(request.known, begin + (verifies ? 1 : asked_tokens_));
    // the result of a verification decides how far it counts
    if (!verifies) request.scheduled += asked_tokens_;
    const bool chunk = request.prefilling;
    if (chunk && request.to_prefill() == 0) request.prefilling = false;
    batch_.push_back({.request = number,
                      .begin = begin,
                      .tokens = asked_tokens_,
                      .accepts = asked_accepts_,
                      .overrun = asked_overrun_,
                      .chunk = chunk,
                      .samples = !request.prefilling});
    if (phase_ != Phase::decode)
      budget_ -= (asked_tokens_ + options_.page - 1) / options_.page * options_.page;
    if (phase_ != Phase::admission) ++cursor_;
    return;
  }
  if (running_.size() == 1) {
    if (launched_.empty()) return drop(number, FinishReason::refused, effects);
    ++cursor_;  // its end may be in the results that are still out
    budget_ = 0;
    return;
  }
  if (running_.back() == number) budget_ = 0;  // nor is it admitted again before others decode
  retract(running_.back(), effects);
}

namespace {

const Registration<SchedulerEntry> kRegistered{
    {.name = kPlainScheduler,
     .summary = "steps that either prefill or decode, and no rules of a server's own",
     .check = [](const Config& config, const PolicyEntry&) -> Result<void> {
       if (!config.scheduler.empty() && config.scheduler != kPlainScheduler)
         return fail("field scheduler: plain has no options");
       return {};
     },
     .make = [](const Config& config) -> std::unique_ptr<ServerScheduler> {
       return std::make_unique<Scheduler>(SchedulerOptions::of(config));
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
