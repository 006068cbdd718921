#include "cache_sim/server/simulation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cache_sim/check/trace_player.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/overloaded.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {
namespace {

/// After this many steps in a row that compute nothing and end no request, the run is stuck.
constexpr std::int64_t kIdleStepsUntilStuck = 1000;
/// With overlap, the next step may contain rows of a request that has ended.
constexpr std::int64_t kStepsInFlight = 2;
constexpr std::size_t kUnrouted = static_cast<std::size_t>(-1);
/// A scheduler that asks for this many operations after one event is checked before it has come to
/// an end, and again each time the number doubles.
constexpr std::size_t kManyOperations = 4096;

/// The sentence about a subject to which no scheduler sends requests; empty where there is none.
std::string lack_of_scheduler(const RunOptions& options) {
  for (const std::string& name : options.subjects) {
    const auto* const policy = Registry<PolicyEntry>::find(name);
    if (policy != nullptr && policy->capabilities.contains(Capability::disaggregation))
      return fmt::format(
          "policy {}: no scheduler moves requests from one server to the other, "
          "traces of single operations do",
          name);
  }
  return "";
}

}  // namespace

Simulation::Simulation(ReplaySession& run, std::unique_ptr<StepCost> cost)
    : run_(run),
      cost_(std::move(cost)),
      keeps_spans_(run.options().keep_events),
      has_host_tier_(has_host_tier(run.options().config)) {
  const Config& config = run.options().config;
  if (cost_ == nullptr) cost_ = std::make_unique<ConstantStepCost>(config.step_time);
  const std::string_view name = scheduler_name(config);  // start_subject() has checked it
  const auto* const scheduler = Registry<SchedulerEntry>::find(name);
  const auto* const oracle = Registry<ScheduleCheckerEntry>::find(name);
  require(scheduler != nullptr && oracle != nullptr, "the scheduler and its oracle are linked");
  settles_with_results_ = scheduler->settles_with_results;
  takes_cuts_ = scheduler->takes_cuts || run.options().subjects.front().starts_with("exec:");
  for (std::int64_t rank = 0; rank < config.ranks; ++rank) {
    ranks_.push_back({scheduler->make(config)});
    if (run.options().check == CheckLevel::all) ranks_.back().oracle = oracle->make(config);
  }
}

void play_trace(ReplaySession& run, const Trace& trace, std::unique_ptr<StepCost> cost) {
  if (trace.scheduler_level)
    Simulation(run, std::move(cost)).play(trace);
  else
    play_operations(run, trace);
}

void Simulation::play(const Trace& trace) {
  run_.set_driver(Children::Driver::scheduler);
  for (const Statement& statement : trace.statements)
    if (const auto* const expect = std::get_if<Expect>(&statement.what))
      run_.keep_events_of(expect->id);
  for (const Statement& statement : trace.statements) {
    line_ = statement.line;
    run_.set_place(line_, now_);
    was_left_out_ = false;
    const Reply reply = perform(statement);
    if (run_.stopped()) return;
    run_.set_place(line_, now_);
    if (!was_left_out_) check_answer(run_, statement, reply);
  }
  run_.set_place(0, now_);
  run_.conclude();
}

Result<void> Simulation::play(RequestStream& requests) {
  if (std::string lack = lack_of_scheduler(run_.options()); !lack.empty())
    return fail(std::move(lack));
  stream_ = &requests;
  run_.set_driver(Children::Driver::scheduler);
  pull(requests);
  run_until({});
  if (!run_.stopped() && stream_state_) run_.conclude();
  if (run_.options().ended)
    for (const RequestSpec* const spec : specs_)
      if (spec != nullptr) run_.forget(spec->id);
  return stream_state_;
}

/// Reads the next request of the stream, ahead of its arrival.
void Simulation::pull(RequestStream& requests) {
  ahead_.emplace();
  const Result<bool> more = requests.next(*ahead_);
  if (!more) stream_state_ = tl::unexpected(more.error());
  if (!more || !*more) ahead_.reset();
}

Reply Simulation::perform(const Statement& statement) {
  return std::visit(
      Overloaded{[&](const Operation& operation) { return apply_to_all(operation); },
                 [&](const RequestSpec& spec) {
                   if (std::string lack = lack_of_scheduler(run_.options()); !lack.empty()) {
                     run_.fail({.text = std::move(lack)});
                     return Reply{};
                   }
                   if (spec.rank >= static_cast<std::int64_t>(ranks_.size())) {
                     run_.fail({.text = fmt::format("field rank: {} is not below the {}", spec.rank,
                                                    counted(ranks_.size(), "rank"))});
                     return Reply{};
                   }
                   const std::string_view scheduler = scheduler_name(run_.options().config);
                   const SchedulerEntry* const entry = Registry<SchedulerEntry>::find(scheduler);
                   if (spec.external > 0 && entry != nullptr && !entry->takes_transfers) {
                     run_.fail({.text = fmt::format("field external: scheduler {} asks no other "
                                                    "server for a request's tokens",
                                                    scheduler)});
                     return Reply{};
                   }
                   schedule(spec.at, arrival_of(spec));
                   return Reply{};
                 },
                 [&](const Intervention& stop) {
                   // With overlap, a forward is under way between any two steps.
                   const bool waits = run_.options().config.overlap == 0;
                   if (stop.during && waits) {
                     leaving_.push_back(number_of_[stop.id.index()]);
                     return Reply{};
                   }
                   schedule(stop.at, {.kind = stop.retract ? SchedulerEvent::Kind::retract
                                                           : SchedulerEvent::Kind::abort,
                                      .request = number_of_[stop.id.index()]});
                   return Reply{};
                 },
                 [&](const CloseSession& close) {
                   close_session(close.session);
                   return Reply{};
                 },
                 [&](const RunStatement& limits) { return run_until(limits); },
                 [&](const Expect& expect) { return expectation(expect.id); }},
      statement.what);
}

/// The number of the next request that arrives.
RequestNumber Simulation::next_number() const {
  return free_numbers_.empty() ? static_cast<RequestNumber>(specs_.size()) : free_numbers_.back();
}

/// Gives a request a number and a record. It arrives at its time, or now if that has passed.
SchedulerEvent Simulation::arrival_of(const RequestSpec& spec) {
  const RequestNumber number = next_number();
  if (number == specs_.size()) {
    specs_.emplace_back();
    rank_of_.emplace_back();
    span_of_.emplace_back();
    queued_since_.emplace_back();
  } else {
    free_numbers_.pop_back();
  }
  specs_[number] = &spec;
  rank_of_[number] = kUnrouted;
  span_of_[number] = 0;
  queued_since_[number] = std::max(spec.at, now_);
  if (number_of_.size() <= spec.id.index()) number_of_.resize(spec.id.index() + 1);
  number_of_[spec.id.index()] = number;
  RequestOutcome& outcome = run_.outcome(spec.id);
  outcome.prompt_tokens = spec.prompt_size;
  outcome.arrival = std::max(spec.at, now_);
  return {.kind = SchedulerEvent::Kind::arrival, .request = number, .spec = &spec};
}

void Simulation::schedule(Nanoseconds at, const SchedulerEvent& event) {
  due_.push({std::max(at, now_), sequence_++, event});
  if (at <= now_) deliver_due();
}

void Simulation::close_session(Name session) {
  for (RequestNumber number = 0; number < specs_.size(); ++number)
    if (specs_[number]->session == session)
      schedule(now_, {.kind = SchedulerEvent::Kind::abort, .request = number});
}

/// Applies an operation of the file on each rank, and adds up the numbers of the replies.
Reply Simulation::apply_to_all(const Operation& operation) {
  Reply all;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    run_.set_rank(rank);
    const Applied applied = run_.apply(operation);
    was_left_out_ = applied.left_out;
    const Reply* const reply = applied.reply;
    if (reply == nullptr) return all;
    if (rank == 0) {
      all = *reply;
      continue;
    }
    for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
      const auto field = static_cast<ReplyField>(i);
      if (reply->has(field)) all.set(field, all.get(field) + reply->get(field));
    }
  }
  return all;
}

/// Delivers the stream's requests that have arrived by now; one step may have passed since they
/// did.
void Simulation::deliver_arrivals() {
  while (ahead_ && ahead_->at <= now_ && !run_.stopped()) {
    const RequestNumber number = next_number();
    RequestSpec& spec = streamed_.emplace(number, std::move(*ahead_)).first->second;
    if (!spec.id.exists())
      spec.id = Name::intern(run_.options().ended ? fmt::format("seat{}", number)
                                                  : fmt::format("r{}", spec.number));
    pull(*stream_);
    const SchedulerEvent arrival = arrival_of(spec);
    queued_since_[number] = run_.outcome(spec.id).arrival = spec.at;
    deliver(arrival);
  }
}

/// Forgets a request of the stream whose rows have left all steps.
void Simulation::forget(RequestNumber request) {
  if (run_.options().ended) {
    run_.forget(specs_[request]->id);
    ranks_[rank_of_[request]].scheduler->recycle(request);
    free_numbers_.push_back(request);
  }
  specs_[request] = nullptr;
  streamed_.erase(request);
}

/// The time of the next event that does not depend on a step; nothing where there is none.
std::optional<Nanoseconds> Simulation::next_moment() const {
  std::optional<Nanoseconds> moment;
  if (!due_.empty()) moment = due_.top().time;
  if (ahead_ && (!moment || ahead_->at < *moment)) moment = ahead_->at;
  return moment;
}

void Simulation::deliver_due() {
  deliver_arrivals();
  while (!due_.empty() && due_.top().time <= now_ && !run_.stopped()) {
    const SchedulerEvent event = due_.top().event;
    due_.pop();
    deliver(event);
  }
}

/// Delivers an event to the request's rank. A request whose client leaves before it arrives has
/// rank 0.
void Simulation::deliver(const SchedulerEvent& event) {
  std::size_t& rank = rank_of_[event.request];
  if (rank == kUnrouted) {
    if (event.kind == SchedulerEvent::Kind::retract) return;
    rank = event.spec == nullptr ? 0 : route(*event.spec);
  }
  feed(rank, event);
}

namespace {

// Of `routing=balanced`, the defaults of https://github.com/lightseekorg/smg, "Cache-Aware
// Routing".
constexpr double kLeastShared = 0.3;  // of the prompt, for a rank to be chosen by it
constexpr std::int64_t kMostAhead = 64;
constexpr double kMostTimesAhead = 1.5;

}  // namespace

std::size_t Simulation::route(const RequestSpec& spec) {
  if (spec.rank >= 0) return static_cast<std::size_t>(spec.rank);
  if (ranks_.size() == 1) return 0;
  const std::string& routing = run_.options().config.routing;
  if (routing == "round") return routed_++ % ranks_.size();
  const auto load = [&](std::size_t rank) { return ranks_[rank].scheduler->load(); };
  std::size_t fewest = 0, most = 0, nearest = 0;
  std::uint32_t longest = 0;
  const bool by_prefix = routing == "prefix" || routing == "balanced";
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (load(rank) < load(fewest)) fewest = rank;
    if (load(rank) > load(most)) most = rank;
    const std::uint32_t prefix =
        by_prefix ? ranks_[rank].sent.longest_common(spec.tokens, spec.salt) : 0;
    if (prefix > longest || (prefix == longest && load(rank) < load(nearest))) nearest = rank;
    longest = std::max(longest, prefix);
  }
  if (!by_prefix) return fewest;
  const bool is_uneven =
      load(most) - load(fewest) > kMostAhead &&
      static_cast<double>(load(most)) > kMostTimesAhead * static_cast<double>(load(fewest));
  const bool is_far = longest < kLeastShared * static_cast<double>(spec.tokens.size());
  const std::size_t chosen = routing == "balanced" && (is_uneven || is_far) ? fewest : nearest;
  ranks_[chosen].sent.insert(spec.tokens, spec.salt);
  return chosen;
}

/// Delivers one event, and applies every operation that the scheduler asks for until time has to
/// pass.
void Simulation::feed(std::size_t rank, SchedulerEvent event) {
  Rank& server = ranks_[rank];
  if (server.oracle) server.episode.begin(event);
  for (;;) {
    const SchedulerEffects* const effects = effects_of(server, event);
    if (effects == nullptr) return;
    Operation* const operation = effects->operation;
    if (operation == nullptr) return check_schedule(server, true);
    if (operation->verb == Verb::step) server.padded = operation->padded;
    if (keeps_spans_ && operation->verb == Verb::step) server.rows = operation->ids;
    run_.set_place(line_, now_);
    run_.set_rank(rank);
    const Reply* const reply = run_.apply(*operation);
    if (reply == nullptr || !was_computed_whole(*operation, *reply)) return;
    if (server.oracle) {
      server.episode.asked.push_back({*operation, *reply});
      const std::size_t count = server.episode.asked.size();
      if (count >= kManyOperations && (count & (count - 1)) == 0) check_schedule(server, false);
      if (run_.stopped()) return;
    }
    event.kind = SchedulerEvent::Kind::reply;
    event.reply = reply;
  }
}

/// Ends the run where a policy leaves a part of a row that its scheduler takes for computed.
bool Simulation::was_computed_whole(const Operation& operation, const Reply& reply) {
  if (takes_cuts_ || operation.verb != Verb::extend || reply.refused != Refusal::none ||
      reply.get(ReplyField::n) == operation.n)
    return true;
  const std::vector<SchedulerEntry> all = Registry<SchedulerEntry>::all();
  const auto other = std::ranges::find_if(all, &SchedulerEntry::takes_cuts);
  run_.fail({.text = fmt::format("policy {} computes {} of {} of `{}`, and scheduler {} takes all "
                                 "for computed; scheduler={} goes on with the rest",
                                 run_.options().subjects.front(), reply.get(ReplyField::n),
                                 counted(operation.n, "token"), operation.id.text(),
                                 scheduler_name(run_.options().config), other->name)});
  return false;
}

/// The effects of one event; null where the scheduler threw an exception, which is a finding.
const SchedulerEffects* Simulation::effects_of(Rank& server, const SchedulerEvent& event) try {
  const SchedulerEffects& effects = server.scheduler->step(event);
  for (const SchedulerNote& one : effects.notes) note(one);
  if (effects.forward) server.forward = effects.forward;
  if (server.oracle) server.episode.add(effects);
  return &effects;
} catch (const std::exception& thrown) {
  run_.add({FindingKind::schedule_differs, fmt::format("the scheduler stopped: {}", thrown.what()),
            "a schedule", thrown.what()},
           "", true);
  return nullptr;
}

void Simulation::check_schedule(Rank& server, bool is_whole) {
  if (!server.oracle) return;
  server.episode.status = server.scheduler->status(server.episode.event.request);
  std::optional<Finding> parted =
      is_whole ? server.oracle->check(server.episode) : server.oracle->check_so_far(server.episode);
  if (parted) run_.add(std::move(*parted), "", true);
}

bool Simulation::any_rank(bool (ServerScheduler::*is)() const) const {
  return std::ranges::any_of(ranks_, [&](const Rank& rank) { return ((*rank.scheduler).*is)(); });
}

/// Copies between tiers that were queued in earlier steps have landed by now, and the server takes
/// note. True if there was one.
bool Simulation::settle_copies() {
  if (!has_host_tier_) return false;
  bool settled = false;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    run_.set_place(line_, now_);
    run_.set_rank(rank);
    for (const char* const tier : {"host", "device"}) {
      Operation land{.verb = Verb::land};
      land.tier = Name::intern(tier);
      for (const Reply* reply = nullptr;
           (reply = run_.apply(land)) != nullptr && reply->get(ReplyField::n) != 0;)
        continue;
    }
    const Reply* const reply = run_.apply(Operation{.verb = Verb::settle});
    settled |= reply != nullptr && reply->get(ReplyField::n) != 0;
  }
  return settled;
}

/// Lets all ranks decide a step. True if it computed something, ended a request, brought results,
/// or settled a copy.
bool Simulation::one_step() {
  const std::int64_t before = ended_ + computed_;
  ++steps_;
  for (; !gone_.empty() && gone_.front().step + kStepsInFlight < steps_; gone_.pop_front())
    forget(gone_.front().request);
  const bool settled = !settles_with_results_ && settle_copies();
  if (any_rank(&ServerScheduler::waits_for_results))
    take_results(&ServerScheduler::has_results_out);
  for (std::size_t rank = 0; rank < ranks_.size() && !run_.stopped(); ++rank) {
    ranks_[rank].forward.reset();
    feed(rank, {.kind = SchedulerEvent::Kind::step_due});
  }
  if (run_.stopped()) return true;
  if (!launch()) return true;
  if (!any_rank(&ServerScheduler::awaits_results))
    return (settles_with_results_ && settle_copies()) || settled || ended_ + computed_ != before;
  for (const RequestNumber request : std::exchange(leaving_, {}))
    if (!run_.stopped()) deliver({.kind = SchedulerEvent::Kind::abort, .request = request});
  if (run_.stopped()) return true;
  take_results(&ServerScheduler::awaits_results);
  if (settles_with_results_ && !run_.stopped()) settle_copies();
  return true;
}

/// Runs the forward of the step, if any rank has rows; ranks without rows take part in it. The
/// device runs one forward after another. False where the run has stopped.
bool Simulation::launch() {
  Nanoseconds longest = 0;
  for (const Rank& rank : ranks_) {
    if (!rank.forward) continue;
    computed_ += rank.forward->prefill_tokens + rank.forward->decode_tokens;
    const Nanoseconds own = cost_->of(*rank.forward);
    run_.rank_time.needed += static_cast<double>(own);
    longest = std::max(longest, own);
  }
  run_.rank_time.taken += static_cast<double>(longest) * static_cast<double>(ranks_.size());
  if (longest == 0) return true;
  const Nanoseconds begin = std::max(now_, device_free_);
  if (longest > std::numeric_limits<Nanoseconds>::max() - begin) {
    run_.fail({.text = fmt::format("a step of {} that begins at {} ends after the last moment of "
                                   "the virtual clock, 2^63 ns",
                                   time_text(longest), time_text(begin))});
    return false;
  }
  device_free_ = begin + longest;
  // A rank without rows runs as many rows of padding as the largest graph of the other ranks has.
  Operation idle;
  idle.verb = Verb::step;
  for (const Rank& rank : ranks_)
    if (rank.forward) idle.padded = std::max(idle.padded, rank.padded);
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Rank& server = ranks_[rank];
    if (!server.forward) {
      run_.set_rank(rank);
      if (run_.apply(idle) == nullptr) return false;
      continue;
    }
    if (!keeps_spans_) continue;
    const std::string_view name = server.forward->prefill_tokens != 0 ? "prefill" : "decode";
    for (const Name row : server.rows) add_span(name, row, begin, device_free_);
  }
  if (!any_rank(&ServerScheduler::awaits_results))
    flights_.clear();  // all requests of earlier forwards have left
  flights_.push_back(device_free_);
  return true;
}

/// Takes the results of the oldest forward to the ranks that are due.
void Simulation::take_results(bool (ServerScheduler::*due)() const) {
  require(!flights_.empty(), "results come from a forward");
  now_ = std::max(now_, flights_.front());
  flights_.pop_front();
  for (std::size_t rank = 0; rank < ranks_.size() && !run_.stopped(); ++rank)
    if (((*ranks_[rank].scheduler).*due)())
      feed(rank, {.kind = SchedulerEvent::Kind::forward_done});
}

Reply Simulation::run_until(const RunStatement& limits) {
  const std::int64_t ended_before = ended_;
  const std::size_t findings_before = run_.findings().size();
  std::int64_t steps = 0;
  std::int64_t idle_steps = 0;
  while (!run_.stopped() && stream_state_) {
    deliver_due();
    if (limits.steps >= 0 && steps == limits.steps) break;
    if (limits.until >= 0 && now_ >= limits.until) break;
    if (!any_rank(&ServerScheduler::has_work)) {
      const std::optional<Nanoseconds> moment = next_moment();
      if (!moment || (limits.until >= 0 && *moment > limits.until)) break;
      now_ = *moment;
      continue;
    }
    ++steps;
    idle_steps = one_step() ? 0 : idle_steps + 1;
    if (idle_steps == kIdleStepsUntilStuck)
      run_.add({FindingKind::stuck,
                fmt::format(
                    "{} steps in a row computed nothing and ended no request, and some are waiting",
                    idle_steps),
                "progress", "none"},
               "", true);
  }
  if (limits.until >= 0 && !run_.stopped()) now_ = std::max(now_, limits.until);
  if (limits.until < 0 && limits.steps < 0) check_the_end();
  return Reply{}
      .set(ReplyField::finished, ended_ - ended_before)
      .set(ReplyField::violations,
           static_cast<std::int64_t>(run_.findings().size() - findings_before))
      .set(ReplyField::time, now_);
}

/// Liveness of requests: a run without limits ends every request, without exception. One that fits
/// nowhere ends as refused, one whose client left before it arrived as aborted. Requests of a
/// stream that are not held any more have ended.
void Simulation::check_the_end() {
  if (run_.stopped() || !stream_state_) return;
  for (RequestNumber number = 0; number < specs_.size(); ++number) {
    const RequestSpec* const spec = specs_[number];
    const std::size_t rank = rank_of_[number];
    if (spec == nullptr || (rank != kUnrouted && ranks_[rank].scheduler->ended(number))) continue;
    run_.add({FindingKind::stuck,
              fmt::format("nothing is left to do and request `{}` has not ended", spec->id.text()),
              "every request ends", "it waits for ever"},
             spec->id.text(), true);
    return;
  }
}

void Simulation::note(const SchedulerNote& note) {
  const Name id = specs_[note.request]->id;
  RequestOutcome& outcome = run_.outcome(id);
  switch (note.kind) {
    case SchedulerNote::Kind::admitted:
      add_span("queued", id, queued_since_[note.request], now_);
      return;
    case SchedulerNote::Kind::sampled:
      outcome.output_tokens = note.output_tokens;
      if (outcome.first_token < 0) outcome.first_token = now_;
      return;
    case SchedulerNote::Kind::retracted:
      if (keeps_spans_) run_.spans().push_back({"retracted", id, now_, now_});
      span_of_[note.request] = 0;
      queued_since_[note.request] = now_;
      outcome.finish = FinishReason::running;
      return;
    case SchedulerNote::Kind::ended:
      outcome.output_tokens = note.output_tokens;
      outcome.finish = note.reason;
      outcome.end = std::max(now_, outcome.arrival);  // a request may be aborted before it arrives
      ++ended_;
      if (stream_ != nullptr) gone_.push_back({steps_, note.request});
      return;
  }
}

/// Adds a bar to the timeline. A bar that begins where the request's last bar of the same name ends
/// extends that one.
void Simulation::add_span(std::string_view name, Name request, Nanoseconds begin, Nanoseconds end) {
  if (begin == end || !keeps_spans_) return;
  std::size_t& open = span_of_[number_of_[request.index()]];
  std::vector<Span>& spans = run_.spans();
  if (open != 0 && spans[open - 1].name == name && spans[open - 1].end == begin) {
    spans[open - 1].end = end;
    return;
  }
  spans.push_back({std::string(name), request, begin, end});
  open = spans.size();
}

Reply Simulation::expectation(Name id) const {
  const RequestOutcome* const outcome = run_.find_outcome(id);
  Reply reply;
  if (outcome == nullptr) return reply;
  if (outcome->cached_tokens >= 0) reply.set(ReplyField::cached, outcome->cached_tokens);
  reply.set(ReplyField::output_tokens, outcome->output_tokens);
  reply.set(ReplyField::finish, static_cast<std::int64_t>(outcome->finish));
  return reply;
}

}  // namespace lockstep::cache_sim
