#include "reference/caches/vllm_scheduler_oracle.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

namespace lockstep::reference {
namespace {

/// A test's pool may be smaller than its longest request; vLLM's never is. So a request that was
/// preempted this often while it ran alone, without a new token in between, is refused.
constexpr int kMostLonePreemptions = 8;
/// Nor does vLLM refuse what waits in vain. Here a connector's copies may hold blocks for two
/// steps.
constexpr int kStepsOfCopies = 3;

}  // namespace

/// A request that stops by itself might go on for ever, as far as the scheduler knows.
VllmSchedulerOracle::Count VllmSchedulerOracle::Request::max_tokens() const {
  return spec->stops ? std::numeric_limits<Count>::max() / 2 : Count{spec->output_size()};
}

Operation VllmSchedulerOracle::about(Verb verb, RequestNumber number) const {
  Operation operation;
  operation.verb = verb;
  operation.id = requests_.at(number).spec->id;
  return operation;
}

bool VllmSchedulerOracle::is_empty() const {
  return running_.empty() && scheduled_.empty() && queue_.empty();
}

SchedulerStatus VllmSchedulerOracle::status(RequestNumber request) {
  const std::size_t load = waiting_.size() + holding_.size() + running_.size();
  return {.has_work = load > 0 || !queue_.empty(),
          .waits_for_results = false,
          .has_results_out = !queue_.empty(),
          .awaits_results = results_due_,
          .load = load,
          .has_ended = requests_[request].status == Status::finished};
}

void VllmSchedulerOracle::play(const SchedulerEvent& event) {
  switch (event.kind) {
    case SchedulerEvent::Kind::arrival: {
      Request& request = requests_[event.request];
      if (request.status == Status::finished) return;  // its client left before it arrived
      request.spec = event.spec;
      request.tokens = event.spec->prompt_size;
      request.arrival = ++arrivals_;
      request.needs.assign(event.spec->images.size(), false);
      for (const RequestSpec::Image& image : event.spec->images)
        if (!options_.accepts(image)) return finish(event.request, FinishReason::refused);
      return enqueue(event.request, false);
    }
    case SchedulerEvent::Kind::abort: return abort(event.request);
    case SchedulerEvent::Kind::retract:
      if (requests_[event.request].status == Status::running) preempt(event.request);
      return;
    case SchedulerEvent::Kind::step_due: return schedule();
    case SchedulerEvent::Kind::forward_done: return update_from_output();
    case SchedulerEvent::Kind::reply: return;
  }
}

// --- schedule() ----------------------------------------------------------------------------------

void VllmSchedulerOracle::schedule() {
  const auto eligible = static_cast<Count>(waiting_.size() + holding_.size() + running_.size());
  idle_ = eligible == 0;
  const bool result_is_under_way = !queue_.empty();
  budget_ = options_.max_tokens;
  input_budget_ = options_.max_tokens;
  encoder_budget_ = options_.encoder_budget;
  threshold_ = 0;
  if (eligible > 1 && options_.long_prefill > 0) {
    threshold_ = options_.long_prefill;
    if (options_.adapts_long_prefill) threshold_ = std::max(threshold_, input_budget_ / eligible);
  }
  preempted_ = prefill_scheduled_ = false;
  if (running_.empty())
    ++quiet_;
  else
    quiet_ = 0;
  schedule_running();
  running_scheduled_ = !scheduled_.empty();
  if (!preempted_ && schedule_holding()) schedule_waiting();
  update_after_schedule();
  results_due_ = options_.is_async ? result_is_under_way : !queue_.empty();
}

VllmSchedulerOracle::Count VllmSchedulerOracle::wanted(const Request& request) const {
  Count tokens = request.tokens + request.spec_tokens + request.placeholders - request.computed;
  if (0 < threshold_ && threshold_ < tokens) tokens = threshold_;
  return std::min({tokens, budget_, input_budget_ - options_.drafting_slots});
}

void VllmSchedulerOracle::schedule_running() {
  for (auto next = running_.begin(); next != running_.end() && budget_ > 0;) {
    if (input_budget_ <= options_.drafting_slots) return;
    const RequestNumber number = *next;
    Request& request = requests_[number];
    const bool last_step_is_under_way =
        request.placeholders > 0 && request.computed + 2 - request.placeholders >=
                                        request.spec->prompt_size + request.max_tokens();
    Count tokens = last_step_is_under_way ? 0 : wanted(request);
    EncoderInputs inputs;
    if (tokens > 0) inputs = try_schedule_encoder_inputs(request, tokens);
    const Count with_spec = tokens + request.computed - request.tokens - request.placeholders;
    const Count spec_tokens = std::max<Count>(with_spec, 0);
    const bool verifies = !request.is_prefill;
    bool fits = tokens == 0;
    while (!fits && !(fits = allocate(number, tokens, spec_tokens, verifies))) {
      const RequestNumber victim = options_.by_priority ? least_urgent() : running_.back();
      if (victim == number) ++next;
      if (running_.size() == 1 && requests_[victim].lone++ == kMostLonePreemptions) {
        ask(about(Verb::abort, victim));
        running_.clear();
        finish(victim, FinishReason::refused);
        break;
      }
      for (auto one = scheduled_.begin(); one != scheduled_.end(); ++one)
        if (one->request == victim) {
          budget_ += one->tokens;
          input_budget_ += one->tokens + options_.drafting_slots;
          encoder_budget_ += one->encoded;
          scheduled_.erase(one);
          break;
        }
      preempt(victim);
      preempted_ = true;
      if (victim == number) break;
    }
    if (!fits && !options_.by_priority) return;
    if (!fits) continue;
    ++next;
    if (tokens == 0) continue;
    prefill_scheduled_ = prefill_scheduled_ || request.is_prefill;
    scheduled_.push_back({number, tokens, spec_tokens, verifies, false, inputs.size});
    request.spec_tokens = 0;
    allocate_encoder_inputs(request, inputs);
    budget_ -= tokens;
    input_budget_ -= tokens + options_.drafting_slots;
  }
}

/// The drafts that a row's result, or with overlap its launch, leaves for the next step.
VllmSchedulerOracle::Count VllmSchedulerOracle::proposal(const Request& request) const {
  if (options_.is_async) return gamma_;
  if (request.verified >= request.spec->drafts.size()) return 0;
  return std::min(gamma_, Count{request.spec->drafts[request.verified]});
}

/// The tokens that the model samples for a row, up to the output's end.
VllmSchedulerOracle::Count VllmSchedulerOracle::generated(const Request& request,
                                                          const Scheduled& row) {
  Count tokens = 1;
  if (row.verifies && request.verified < request.spec->accept.size())
    tokens = request.spec->accept[request.verified];
  while (tokens > 1 + row.spec_tokens || request.outputs() + tokens > request.spec->output_size())
    --tokens;
  return tokens;
}

/// Asks for an extend, of which the subject may cut tokens. False: it refused.
bool VllmSchedulerOracle::allocate(RequestNumber number, Count& tokens, Count spec_tokens,
                                   bool verifies) {
  Request& request = requests_[number];
  Operation extend = about(Verb::extend, number);
  extend.n = tokens;
  extend.async = options_.is_async;
  Count right = 0;
  if (spec_tokens > 0 && !options_.is_async)
    right = generated(request, {number, tokens, spec_tokens, verifies, true}) - 1;
  for (Count i = 0; i < spec_tokens; ++i) {
    const auto place = static_cast<std::uint32_t>(request.tokens + i);
    const auto wrong = static_cast<std::uint32_t>(i - right);
    extend.drafts.append(i < right ? request.spec->tokens.slice(place, place + 1)
                                   : Tokens::of_document(kWrongDrafts, wrong, 1));
  }
  const Count end = request.computed + tokens - spec_tokens;
  const bool is_unknown = options_.is_async && gamma_ > 0;
  if (end > request.told && !is_unknown)
    extend.tokens = request.spec->tokens.slice(static_cast<std::uint32_t>(request.told),
                                               static_cast<std::uint32_t>(end));
  const Reply& reply = ask(extend);
  if (reply.refused != Refusal::none) return false;
  tokens = reply.get(ReplyField::n, tokens);
  request.told += extend.tokens.size();
  return true;
}

RequestNumber VllmSchedulerOracle::least_urgent() const {
  return *std::ranges::min_element(running_, [&](auto a, auto b) {
    const Request& one = requests_.at(a);
    const Request& other = requests_.at(b);
    return std::tuple(one.spec->priority, -one.arrival) <
           std::tuple(other.spec->priority, -other.arrival);
  });
}

void VllmSchedulerOracle::preempt(RequestNumber number) {
  ask(about(Verb::preempt, number));
  Request& request = requests_[number];
  free_encoder_inputs(request, request.spec->prompt_size);
  running_.remove(number);
  request.computed = request.placeholders = request.told = request.spec_tokens = 0;
  request.stale = request.in_flight;
  enqueue(number, true);
  note({SchedulerNote::Kind::retracted, number});
}

void VllmSchedulerOracle::enqueue(RequestNumber number, bool prepend) {
  requests_[number].status = Status::waiting;
  waiting_.insert(prepend ? waiting_.begin() : waiting_.end(), number);
}

void VllmSchedulerOracle::sort_by_urgency(std::list<RequestNumber>& queue) const {
  if (!options_.by_priority) return;
  queue.sort([&](auto a, auto b) {
    const Request& one = requests_.at(a);
    const Request& other = requests_.at(b);
    return std::tuple(-one.spec->priority, one.arrival) <
           std::tuple(-other.spec->priority, other.arrival);
  });
}

/// Requests that hold blocks come before all others. False where the step admits nobody after them.
bool VllmSchedulerOracle::schedule_holding() {
  sort_by_urgency(holding_);
  for (const RequestNumber number : std::list<RequestNumber>(holding_)) {
    if (budget_ == 0 || input_budget_ <= options_.drafting_slots) return false;
    if (static_cast<Count>(running_.size()) == options_.max_requests) return false;
    if (!is_ready(number)) continue;
    Count tokens = wanted(requests_[number]);
    if (!allocate(number, tokens, 0, false) || tokens == 0) {
      if (!fits_nowhere(number)) return false;
      ask(about(Verb::abort, number));
      holding_.remove(number);
      finish(number, FinishReason::refused);
      continue;
    }
    holding_.remove(number);
    run(number, tokens, 0, 0);
  }
  return true;
}

/// _handle_blocked_waiting_request(): whether what the request waits for has come.
bool VllmSchedulerOracle::is_ready(RequestNumber number) {
  Request& request = requests_[number];
  if (request.status == Status::waiting_for_remote_kvs &&
      ask(about(Verb::complete, number)).refused == Refusal::none)
    request.status = Status::loaded;
  return request.status == Status::loaded;
}

/// load_kv_async, the request's blocks being there.
void VllmSchedulerOracle::start_load(RequestNumber number) {
  requests_[number].status = Status::waiting_for_remote_kvs;
  holding_.push_back(number);
}

/// The request leaves its queue, and gets a row.
void VllmSchedulerOracle::run(RequestNumber number, Count tokens, Count padding, Count encoded) {
  running_.push_back(number);
  requests_[number].status = Status::running;
  note({SchedulerNote::Kind::admitted, number});
  scheduled_.push_back({number, tokens, padding, false, false, encoded});
  budget_ -= tokens;
  input_budget_ -= tokens + options_.drafting_slots;
}

/// There will never be more room for a waiting request than now.
bool VllmSchedulerOracle::fits_nowhere(RequestNumber number) const {
  const bool has_blocks = requests_.at(number).status == Status::loaded;
  if (options_.has_connector && quiet_ < kStepsOfCopies) return false;
  return is_empty() && (has_blocks || holding_.empty());
}

Operation VllmSchedulerOracle::look_up(RequestNumber number) const {
  const Request& request = requests_.at(number);
  Operation admit = about(Verb::admit, number);
  admit.tokens = request.spec->tokens.prefix(static_cast<std::uint32_t>(request.tokens));
  admit.prompt = request.spec->prompt_size;
  admit.salt = request.spec->salt;
  admit.lora = request.spec->lora;
  for (const RequestSpec::Image& image : request.spec->images)
    if (image.name.exists()) admit.images.push_back(image);
  return admit;
}

void VllmSchedulerOracle::schedule_waiting() {
  sort_by_urgency(waiting_);
  for (auto next = waiting_.begin(); next != waiting_.end() && budget_ > 0;) {
    if (input_budget_ <= options_.drafting_slots) return;
    if (static_cast<Count>(running_.size()) == options_.max_requests) return;
    const RequestNumber number = *next;
    Request& request = requests_[number];
    if (request.stale > 0) {
      ++next;
      continue;
    }
    const Reply& hit = ask(look_up(number));
    if (hit.refused == Refusal::same_step) {  // the connector does not know yet
      ++next;
      continue;
    }
    if (hit.refused != Refusal::none) {
      if (hit.refused != Refusal::too_long && !fits_nowhere(number)) return;
      next = waiting_.erase(next);
      finish(number, FinishReason::refused);
      continue;
    }
    request.computed = hit.get(ReplyField::cached);
    request.told = request.tokens;
    const bool load_kv_async = hit.get(ReplyField::host, 0) > 0;
    Count tokens = load_kv_async ? 0 : wanted(request);
    if (load_kv_async) {
      Operation blocks = about(Verb::extend, number);
      blocks.n = 0;
      blocks.async = true;
      if (ask(blocks).refused == Refusal::none) {
        next = waiting_.erase(next);
        start_load(number);
        continue;
      }
    }
    Count padding = 0;
    bool is_tried = !load_kv_async;
    if (is_tried && pads(request)) {
      is_tried = 1 + gamma_ <= std::min(budget_, input_budget_ - options_.drafting_slots);
      if (threshold_ == 0 || threshold_ >= 1 + gamma_) padding = gamma_;
    }
    tokens += padding;
    EncoderInputs inputs;
    if (is_tried) inputs = try_schedule_encoder_inputs(request, tokens);
    if (tokens == 0 && !load_kv_async) {  // the requests after it are scheduled all the same
      // vLLM leaves it the images: reports/found/vllm_waiting_image.md.
      free_encoder_inputs(request, request.spec->prompt_size);
      ask(about(Verb::preempt, number));
      request.computed = request.told = 0;
      ++next;
      continue;
    }
    const bool fits = is_tried && allocate(number, tokens, padding, false);
    if (!fits || tokens == 0) {
      if (is_tried) free_encoder_inputs(request, request.spec->prompt_size);
      const bool is_hopeless = fits_nowhere(number);
      ask(about(is_hopeless ? Verb::abort : Verb::preempt, number));
      request.computed = request.told = 0;
      if (!is_hopeless) return;
      next = waiting_.erase(next);
      finish(number, FinishReason::refused);
      continue;
    }
    next = waiting_.erase(next);
    run(number, tokens, tokens <= 1 ? 0 : padding, inputs.size);
    allocate_encoder_inputs(request, inputs);
  }
}

/// Pad new decode requests to uniform spec decoding size.
bool VllmSchedulerOracle::pads(const Request& request) const {
  if (gamma_ == 0 || request.tokens - request.computed != 1) return false;
  return !prefill_scheduled_ && (running_scheduled_ || request.computed > 0);
}

void VllmSchedulerOracle::update_after_schedule() {
  Operation step;
  step.verb = Verb::step;
  if (scheduled_.empty()) {
    if (options_.has_connector) ask(step);  // kv_connector_no_forward()
    return;
  }
  StepWork work;
  for (Scheduled& row : scheduled_) {
    Request& request = requests_[row.request];
    step.ids.push_back(request.spec->id);
    const Count known = request.tokens + request.placeholders;
    const bool decodes =
        request.computed >= request.spec->prompt_size && known - request.computed == 1;
    (decodes ? work.decode_tokens : work.prefill_tokens) += row.tokens;
    work.context_tokens += request.computed;
    for (Count i = 1; i <= row.tokens; ++i) work.seen_tokens += request.computed + i;
    request.computed += row.tokens;
    request.in_flight += row.tokens;
    request.is_prefill = request.computed < known;
    row.samples = !request.is_prefill;
    if (!row.samples) continue;
    request.placeholders += 1 + row.spec_tokens;
    if (options_.is_async) request.spec_tokens = proposal(request);
  }
  ask(step);
  work_ = work;
  queue_.push_back(std::move(scheduled_));
  scheduled_.clear();
}

// --- The encoder ---------------------------------------------------------------------------------

VllmSchedulerOracle::ImageContent VllmSchedulerOracle::image_of(const Request& request,
                                                                std::size_t input) {
  const RequestSpec::Image& place = request.spec->images[input];
  if (place.name.exists()) return {std::string(place.name.text()), Tokens()};
  return {"", request.spec->tokens.slice(place.begin, place.begin + place.size)};
}

VllmSchedulerOracle::Embedding* VllmSchedulerOracle::embedding_of(const ImageContent& image) {
  for (Embedding& embedding : embeddings_)
    if (embedding.image == image) return &embedding;
  return nullptr;
}

VllmSchedulerOracle::Count VllmSchedulerOracle::free_places() const {
  Count free = options_.encoder_cache;
  for (const Embedding& embedding : embeddings_) free -= embedding.size;
  return free;
}

bool VllmSchedulerOracle::check_and_update(Request& request, std::size_t input) {
  Embedding* const embedding = embedding_of(image_of(request, input));
  if (embedding == nullptr) return false;
  if (!request.needs[input]) ++embedding->references;
  request.needs[input] = true;
  return true;
}

/// Evicts embeddings without references, the longest unreferenced first, if that makes room for the
/// image and for those that this step has scheduled.
bool VllmSchedulerOracle::can_allocate(Count size, Count scheduled) {
  Count freeable = free_places();
  for (const Embedding& embedding : embeddings_)
    if (embedding.references == 0) freeable += embedding.size;
  if (size + scheduled > freeable) return false;
  while (size + scheduled > free_places()) {
    auto oldest = embeddings_.end();
    for (auto one = embeddings_.begin(); one != embeddings_.end(); ++one)
      if (one->references == 0 &&
          (oldest == embeddings_.end() || one->unreferenced_since < oldest->unreferenced_since))
        oldest = one;
    embeddings_.erase(oldest);
  }
  return true;
}

void VllmSchedulerOracle::free_encoder_input(Request& request, std::size_t input) {
  if (!request.needs[input]) return;
  request.needs[input] = false;
  Embedding* const embedding = embedding_of(image_of(request, input));
  if (--embedding->references == 0) embedding->unreferenced_since = ++clock_;
}

/// Releases the images whose tokens are all among the first `up_to`.
void VllmSchedulerOracle::free_encoder_inputs(Request& request, Count up_to) {
  for (std::size_t input = 0; input < request.needs.size(); ++input)
    if (request.spec->images[input].end() <= up_to) free_encoder_input(request, input);
}

VllmSchedulerOracle::EncoderInputs VllmSchedulerOracle::try_schedule_encoder_inputs(
    Request& request, Count& tokens) {
  EncoderInputs inputs;
  if (options_.encoder_budget == 0) return inputs;
  const Count start = request.computed;
  const Count window_end = start + tokens + options_.shifted_tokens;
  for (std::size_t i = 0; i < request.spec->images.size(); ++i) {
    const Count begin = request.spec->images[i].begin;
    const Count size = request.spec->images[i].size;
    if (begin + size <= start || begin >= window_end) continue;
    if (options_.whole_images && start <= begin && start + tokens < begin + size) {
      tokens = std::max<Count>(0, begin - (start + options_.shifted_tokens));
      return inputs;
    }
    const ImageContent image = image_of(request, i);
    bool is_scheduled = false;
    for (const std::size_t other : inputs.scheduled)
      is_scheduled = is_scheduled || image_of(request, other) == image;
    if (is_scheduled) {
      inputs.duplicate.push_back(i);
    } else if (check_and_update(request, i)) {
      continue;
    } else if (inputs.size + size > encoder_budget_ || !can_allocate(size, inputs.size)) {
      tokens = start < begin ? std::min(tokens, begin - start) : 0;
      return inputs;
    } else {
      inputs.scheduled.push_back(i);
      inputs.size += size;
    }
  }
  return inputs;
}

void VllmSchedulerOracle::allocate_encoder_inputs(Request& request, const EncoderInputs& inputs) {
  encoder_budget_ -= inputs.size;
  for (const std::size_t input : inputs.scheduled) {
    const ImageContent image = image_of(request, input);
    embeddings_.push_back({image, request.spec->images[input].size});
    check_and_update(request, input);
  }
  for (const std::size_t input : inputs.duplicate) check_and_update(request, input);
}

// --- update_from_output() ------------------------------------------------------------------------

void VllmSchedulerOracle::update_from_output() {
  results_due_ = false;
  const std::list<Scheduled> rows = queue_.front();
  queue_.pop_front();
  for (const Scheduled& row : rows) {
    Request& request = requests_[row.request];
    if (request.status == Status::finished) continue;
    request.in_flight -= row.tokens;
    const bool is_stale = request.stale > 0;
    if (is_stale) request.stale -= row.tokens;
    const Count new_tokens = row.samples ? generated(request, row) : 0;
    if (!is_stale && gamma_ > 0 && row.samples) {
      Operation accept = about(Verb::accept, row.request);
      accept.n = new_tokens;
      accept.tokens =
          request.spec->tokens.slice(static_cast<std::uint32_t>(request.tokens),
                                     static_cast<std::uint32_t>(request.tokens + new_tokens));
      ask(accept);
    } else if (!is_stale && options_.is_async) {
      ask(about(Verb::complete, row.request));
    }
    if (row.samples && !is_stale) {
      const Count rejected = row.spec_tokens - (new_tokens - 1);
      request.computed -= rejected;
      request.placeholders -= rejected;
    }
    free_encoder_inputs(request, request.computed - (options_.is_async ? request.placeholders : 0));
    if (!row.samples) continue;
    request.tokens += new_tokens;
    request.lone = 0;
    if (row.verifies) ++request.verified;
    if (!is_stale) {
      request.placeholders -= new_tokens;
      if (gamma_ > 0) request.told = request.tokens;
      if (!options_.is_async) request.spec_tokens = proposal(request);
    }
    note({SchedulerNote::Kind::sampled, row.request, FinishReason::running, request.outputs()});
    if (request.outputs() < request.spec->output_size()) continue;
    if (request.status == Status::running) ask(about(Verb::finish, row.request));
    running_.remove(row.request);
    waiting_.remove(row.request);
    finish(row.request, request.spec->stops ? FinishReason::stop : FinishReason::length);
  }
}

void VllmSchedulerOracle::abort(RequestNumber number) {
  Request& request = requests_[number];
  if (request.status == Status::finished) return;
  const bool is_known = request.status == Status::waiting_for_remote_kvs ||
                        request.status == Status::loaded || request.status == Status::running;
  if (is_known) ask(about(Verb::abort, number));
  running_.remove(number);
  holding_.remove(number);
  waiting_.remove(number);
  finish(number, FinishReason::abort);
}

void VllmSchedulerOracle::finish(RequestNumber number, FinishReason reason) {
  Request& request = requests_[number];
  request.status = Status::finished;
  if (request.spec != nullptr) free_encoder_inputs(request, request.spec->prompt_size);
  note({SchedulerNote::Kind::ended, number, reason,
        request.spec == nullptr ? 0 : request.outputs()});
}

namespace {

const Registration<ScheduleCheckerEntry> kVllmScheduler{
    {"vllm", [](const Config& config) -> std::unique_ptr<ScheduleChecker> {
       return std::make_unique<VllmSchedulerOracle>(config);
     }}};

}  // namespace

}  // namespace lockstep::reference
