#include "reference/caches/scheduler_oracle.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::reference {

SchedulerOracle::Request& SchedulerOracle::at(RequestNumber number) {
  if (requests_.size() <= number) requests_.resize(number + 1);
  return requests_[number];
}

Operation SchedulerOracle::about(Verb verb, RequestNumber number) const {
  Operation operation;
  operation.verb = verb;
  operation.id = requests_[number].spec->id;
  return operation;
}

SchedulerStatus SchedulerOracle::status(RequestNumber request) {
  const bool has_drafts_to_come = std::ranges::any_of(running_, [&](RequestNumber number) {
    return requests_[number].verification < requests_[number].spec->drafts.size();
  });
  std::size_t waiting = 0;
  for (const auto& [priority, numbers] : queue_) waiting += numbers.size();
  return {.has_work = !queue_.empty() || !running_.empty(),
          .waits_for_results = options_.overlap && !decided_.empty() && has_drafts_to_come,
          .has_results_out = awaits_results_ || !decided_.empty() || computes_,
          .awaits_results = awaits_results_,
          .load = waiting + running_.size(),
          .has_ended = at(request).state == State::ended};
}

// --- Events --------------------------------------------------------------------------------------

void SchedulerOracle::play(const SchedulerEvent& event) {
  switch (event.kind) {
    case SchedulerEvent::Kind::arrival: return arrive(event.request, event.spec);
    case SchedulerEvent::Kind::abort: return abort(event.request);
    case SchedulerEvent::Kind::retract:
      if (at(event.request).state == State::running) give_way(event.request);
      return;
    case SchedulerEvent::Kind::step_due: return step();
    case SchedulerEvent::Kind::forward_done: return take_results();
    case SchedulerEvent::Kind::reply: return;
  }
}

void SchedulerOracle::arrive(RequestNumber number, const RequestSpec* spec) {
  Request& request = at(number);
  if (request.state == State::ended) return;  // its client left before it arrived
  request.spec = spec;
  wait(number, false);
}

void SchedulerOracle::abort(RequestNumber number) {
  const State state = at(number).state;
  if (state == State::ended) return;
  if (state == State::running) {
    ask(about(Verb::abort, number));
    leave(number);
  }
  if (state == State::waiting) stop_waiting(number);
  end(number, FinishReason::abort);
}

// --- A step --------------------------------------------------------------------------------------

void SchedulerOracle::step() {
  under_way_ = std::exchange(decided_, {});
  computed_ahead_ = std::exchange(computes_, false);
  idle_ = queue_.empty() && running_.empty();
  if (idle_) return;
  budget_ = std::max<std::int64_t>(1, options_.chunked_prefill / options_.page) * options_.page;
  begin_step();
  store_chunk_ends();
  decide();
  if (!decided_.empty()) forward();
  awaits_results_ = options_.overlap ? !under_way_.empty() || computed_ahead_ : !decided_.empty();
}

void SchedulerOracle::decide() {
  prefill();
  admit();
  if (decided_.empty()) decode();
}

/// With overlap, what a chunk leaves behind is stored before the next chunk begins. After the last
/// chunk of a prompt it has time until its result.
void SchedulerOracle::store_chunk_ends() {
  for (Row& row : under_way_) {
    if (!row.chunk || row.ends_prompt) continue;
    row.stored = true;
    Operation checkpoint = about(Verb::checkpoint, row.request);
    checkpoint.up_to = row.begin + row.tokens;
    ask(checkpoint);
  }
}

void SchedulerOracle::prefill() {
  for (std::size_t i = 0; i < running_.size() && budget_ > 0;) {
    const RequestNumber number = running_[i];
    const Request& request = requests_[number];
    if (request.prefills()) prefill(number);
    if (i < running_.size() && running_[i] == number) ++i;
  }
}

/// One chunk: the rest of the prompt, or whole pages of it. A page that is begun counts whole.
void SchedulerOracle::prefill(RequestNumber number) {
  const Request& request = requests_[number];
  const std::int64_t left = request.goal - request.computed;
  const std::int64_t done =
      compute(number, static_cast<std::uint32_t>(std::min<std::int64_t>(budget_, left)));
  for (std::int64_t paid = 0; paid < done; paid += options_.page) budget_ -= options_.page;
}

void SchedulerOracle::admit() {
  const auto has_room = [&] {
    return budget_ > 0 && static_cast<std::int64_t>(running_.size()) < options_.max_running;
  };
  while (has_room() && !queue_.empty()) {
    const RequestNumber number = queue_.begin()->second.front();
    const Reply& reply = ask(admission_of(number));
    if (reply.refused != Refusal::none) {
      if (!running_.empty() && reply.refused != Refusal::too_long) return;
      stop_waiting(number);
      end(number, FinishReason::refused);
      continue;
    }
    enter(number, reply);
    prefill(number);
  }
}

Operation SchedulerOracle::admission_of(RequestNumber number) const {
  const Request& request = requests_[number];
  Operation admission = about(Verb::admit, number);
  admission.tokens = request.spec->tokens.prefix(request.spec->prompt_size + request.sampled);
  admission.prompt = request.spec->prompt_size;
  admission.salt = request.spec->salt;
  admission.lora = request.spec->lora;
  // A transfer happens once.
  if (request.spec->external != 0 && !request.was_running)
    admission.external = request.spec->external;
  return admission;
}

void SchedulerOracle::enter(RequestNumber number, const Reply& reply) {
  Request& request = requests_[number];
  stop_waiting(number);
  running_.push_back(number);
  request.state = State::running;
  request.was_running = true;
  request.goal = request.told = request.spec->prompt_size + request.sampled;
  request.computed = static_cast<std::uint32_t>(reply.get(ReplyField::cached));
  note({SchedulerNote::Kind::admitted, number});
}

void SchedulerOracle::decode() {
  for (std::size_t i = 0; i < running_.size();) {
    const RequestNumber number = running_[i];
    const Request& request = requests_[number];
    const bool verifies = request.verification < request.spec->drafts.size() &&
                          request.spec->drafts[request.verification] != 0;
    Kept kept;
    // If the output's length is given, no token is sampled after its last one.
    const bool is_done =
        !request.spec->stops && request.computed + 1 == request.spec->tokens.size();
    if (request.prefills() || is_done) {
      // It found no room and waits for the results that are under way, or for its last one.
    } else if (verifies) {
      const Operation drafts = verification(number, kept);
      compute(number, drafts, kept);
    } else {
      compute(number, 1);
    }
    if (i < running_.size() && running_[i] == number) ++i;
  }
}

void SchedulerOracle::forward() {
  Operation begin;
  begin.verb = Verb::step;
  StepWork work;
  last_rows_ = decided_;
  computes_ = waits_for_forwards_without_requests();
  for (const Row& row : decided_) {
    begin.ids.push_back(requests_[row.request].spec->id);
    if (row.chunk)
      work.prefill_tokens += row.tokens;
    else
      work.decode_tokens += row.tokens;
    work.context_tokens += row.begin;
    for (std::uint32_t i = 1; i <= row.tokens; ++i) work.seen_tokens += row.begin + i;
  }
  // The smallest captured graph that has a row for each; prompts are computed without one.
  if (work.prefill_tokens == 0)
    for (const std::int64_t rows : options_.graph_batches)
      if (begin.padded == Operation::kAbsent && rows >= std::ssize(decided_)) begin.padded = rows;
  ask(begin);
  work_ = work;
}

// --- A row ---------------------------------------------------------------------------------------

Operation SchedulerOracle::extend_by(RequestNumber number, std::uint32_t tokens) const {
  const Request& request = requests_[number];
  Operation extend = about(Verb::extend, number);
  extend.n = tokens;
  extend.async = options_.overlap;
  const std::uint32_t end = request.computed + tokens;
  if (end > request.told) extend.tokens = request.spec->tokens.slice(request.told, end);
  return extend;
}

/// The prompt, the output, and the tokens that the model would sample if nothing stopped it.
Tokens SchedulerOracle::text_of(const RequestSpec& spec) {
  return spec.tokens.followed_by(
      Tokens::of_document(kBehindTheEnd, 0, static_cast<std::uint32_t>(spec.overrun)));
}

/// Verifies the last token and its drafts. One way from the root of the drafts is right; it has one
/// token less than will be kept, because a token is sampled after it. No more are kept than the
/// output has, except that its last verification may accept `overrun` tokens more, as far as its
/// drafts reach.
Operation SchedulerOracle::verification(RequestNumber number, Kept& kept) const {
  const Request& request = requests_[number];
  const RequestSpec& spec = *request.spec;
  const auto drafts = static_cast<std::size_t>(spec.drafts[request.verification]);
  std::vector<std::size_t> way;  // numbers of the drafts from first child to first child
  for (std::size_t next = 1; next <= drafts;
       next = next * static_cast<std::size_t>(spec.branches) + 1)
    way.push_back(next);
  const std::uint32_t rest = spec.output_size() - request.sampled;
  kept.output = static_cast<std::uint32_t>(spec.accept[request.verification]);
  kept.behind = 0;
  if (kept.output >= rest) {
    kept.output = rest;
    while (kept.behind < spec.overrun && kept.all() < way.size() + 1) ++kept.behind;
  }
  Operation extend = extend_by(number, 1);
  const Tokens text = text_of(spec);
  for (std::size_t draft = 1; draft <= drafts; ++draft) {
    const auto at = std::ranges::find(way, draft);
    const auto depth = static_cast<std::uint32_t>(at - way.begin());
    if (at != way.end() && depth + 1 < kept.all()) {
      const std::uint32_t place = request.computed + 1 + depth;
      extend.drafts.append(text.slice(place, place + 1));
      continue;
    }
    // Wrong drafts of a chain are numbered from the first wrong one, those of a tree by their
    // place.
    const std::size_t index = spec.branches == 1 ? draft - kept.all() : draft;
    extend.drafts.append(Tokens::of_document(kWrongDrafts, static_cast<std::uint32_t>(index), 1));
  }
  if (spec.branches > 1)
    for (std::size_t draft = 0; draft < drafts; ++draft)
      extend.parents.push_back(static_cast<std::int64_t>(draft) / spec.branches);
  extend.n = static_cast<std::int64_t>(1 + drafts);
  extend.async = false;
  return extend;
}

std::uint32_t SchedulerOracle::compute(RequestNumber number, std::uint32_t tokens) {
  return compute(number, extend_by(number, tokens), Kept());
}

/// Extends a running request, at the cost of those that were admitted after it, and in the end at
/// its own. Returns how many tokens are computed.
std::uint32_t SchedulerOracle::compute(RequestNumber number, const Operation& extend, Kept kept) {
  while (ask(extend).refused != Refusal::none) {
    if (running_.size() > 1) {
      const RequestNumber last = running_.back();
      give_way(last);
      if (last != number) continue;
      budget_ = 0;  // it is not admitted again before the others had their turn
      return 0;
    }
    if (under_way_.empty())
      drop(number);
    else
      budget_ = 0;  // a result under way may end the request
    return 0;
  }
  Request& request = requests_[number];
  const std::uint32_t begin = request.computed;
  const bool chunk = request.prefills();
  const auto tokens = static_cast<std::uint32_t>(extend.n);
  request.told += extend.tokens.size();
  if (kept.all() == 0) request.computed += tokens;  // the result of a verification decides later
  decided_.push_back({number, begin, tokens, kept, chunk, !request.prefills()});
  return tokens;
}

void SchedulerOracle::give_way(RequestNumber number) {
  ask(about(Verb::preempt, number));
  leave(number);
  requests_[number].computed = requests_[number].goal = requests_[number].told = 0;
  wait(number, preempted_goes_first());
  note({SchedulerNote::Kind::retracted, number});
}

/// Refuses the request: no running request will ever make room for it.
void SchedulerOracle::drop(RequestNumber number) {
  ask(about(Verb::abort, number));
  leave(number);
  end(number, FinishReason::refused);
}

void SchedulerOracle::leave(RequestNumber number) {
  const auto is_its = [&](const Row& row) { return row.request == number; };
  std::erase_if(decided_, is_its);
  std::erase_if(under_way_, is_its);
  std::erase(running_, number);
}

/// Queues by priority, then by arrival; a preempted request goes before its equals.
void SchedulerOracle::wait(RequestNumber number, bool before_equals) {
  std::deque<RequestNumber>& equals = queue_[requests_[number].spec->priority];
  equals.insert(before_equals ? equals.begin() : equals.end(), number);
  requests_[number].state = State::waiting;
}

void SchedulerOracle::stop_waiting(RequestNumber number) {
  const auto equals = queue_.find(requests_[number].spec->priority);
  if (equals->second.front() == number)
    equals->second.pop_front();
  else
    std::erase(equals->second, number);
  if (equals->second.empty()) queue_.erase(equals);
}

void SchedulerOracle::end(RequestNumber number, FinishReason reason) {
  requests_[number].state = State::ended;
  note({SchedulerNote::Kind::ended, number, reason, requests_[number].sampled});
}

// --- Results -------------------------------------------------------------------------------------

void SchedulerOracle::take_results() {
  awaits_results_ = false;
  const bool ahead = std::exchange(computed_ahead_, false) || !under_way_.empty();
  if (!ahead) computes_ = false;
  std::vector<Row> rows = std::exchange(ahead ? under_way_ : decided_, {});
  for (Row& row : rows) take_result(row);
}

void SchedulerOracle::take_result(Row& row) {
  Request& request = requests_[row.request];
  const RequestSpec& spec = *request.spec;
  if (row.kept.all() != 0) {
    Operation accept = about(Verb::accept, row.request);
    accept.n = row.kept.all();
    const std::uint32_t first = spec.prompt_size + request.sampled;
    accept.tokens = text_of(spec).slice(first, first + row.kept.all());
    ask(accept);
    request.computed += row.kept.all();
    request.told += row.kept.all();
  } else if (options_.overlap) {
    ask(about(Verb::complete, row.request));
  }
  if (!row.chunk) ++request.verification;  // one without drafts is a decode like any other
  if (row.samples()) {
    request.sampled += row.kept.all() == 0 ? 1 : row.kept.output;
    note({SchedulerNote::Kind::sampled, row.request, FinishReason::running, request.sampled});
  }
  if (row.samples() && request.sampled == spec.output_size()) {
    Operation finish = about(Verb::finish, row.request);
    if (row.kept.behind != 0) finish.up_to = spec.tokens.size();
    ask(finish);
    leave(row.request);
    return end(row.request, spec.stops ? FinishReason::stop : FinishReason::length);
  }
  if (!row.chunk || row.stored) return;
  Operation checkpoint = about(Verb::checkpoint, row.request);
  if (options_.overlap) checkpoint.up_to = row.begin + row.tokens;
  ask(checkpoint);
}

const Registration<ScheduleCheckerEntry> kFirstScheduler{
    {kPlainScheduler, [](const Config& config) -> std::unique_ptr<ScheduleChecker> {
       return std::make_unique<SchedulerOracle>(SchedulerOptions::of(config));
     }}};

}  // namespace lockstep::reference
