// The scheduler's oracle under SGLang's rules (`scheduler=sglang`): how a step finds room for
// all of its rows, and who goes where there is none. SGLang 0.5.23: PrefillAdder,
// ScheduleBatch.retract_decode, Scheduler.update_running_batch.
#include <algorithm>
#include <map>
#include <utility>

#include "reference/caches/scheduler_oracle.hpp"

namespace lockstep::reference {
namespace {

/// The decode steps that SGLang makes room for when it has retracted a request
/// (SGLANG_RETRACT_DECODE_STEPS).
constexpr std::int64_t kStepsAfterRetraction = 20;

class SglangSchedulerOracle final : public SchedulerOracle {
 public:
  using SchedulerOracle::SchedulerOracle;

 private:
  std::unique_ptr<ScheduleListener> copy() const override {
    return std::make_unique<SglangSchedulerOracle>(*this);
  }
  void begin_step() override;
  void decide() override {
    prefill_together();
    if (decided_.empty() && make_room_to_decode()) decode();
  }
  bool waits_for_forwards_without_requests() const override { return options_.overlap; }
  bool preempted_goes_first() const override { return false; }
  void leave(RequestNumber number) override {
    SchedulerOracle::leave(number);
    closed_ = false;
  }

  void prefill_together();
  bool make_room_to_decode();
  std::int64_t ask_for_room(std::int64_t tokens);
  std::int64_t pages_to_decode(RequestNumber number) const;

  bool closed_ = false;  // nobody is admitted
};

/// Admission opens when a request leaves, and in two other cases: the last batch ended within a
/// prompt, or nobody decodes but those whose prompts the last batch finished.
void SglangSchedulerOracle::begin_step() {
  const std::vector<Row> last = std::exchange(last_rows_, {});
  const auto finished_prompt = [&](RequestNumber number) {
    return std::ranges::any_of(last, [&](const Row& row) {
      return row.request == number && row.chunk && row.ends_prompt;
    });
  };
  bool only_new = true;
  for (const RequestNumber number : running_)
    if (!requests_[number].prefills() && !finished_prompt(number)) only_new = false;
  if (only_new) closed_ = false;
  for (const Row& row : last)
    if (row.chunk && !row.ends_prompt) closed_ = false;
}

/// `evict room=`: how much KV is free then; -1 where the subject does not say.
std::int64_t SglangSchedulerOracle::ask_for_room(std::int64_t tokens) {
  Operation evict;
  evict.verb = Verb::evict;
  evict.room = tokens;
  return ask(evict).get(ReplyField::kv_free, -1);
}

/// The step's prompts are found first. Each one counts as whole pages and one page.
void SglangSchedulerOracle::prefill_together() {
  std::vector<std::pair<RequestNumber, std::int64_t>> found;
  std::int64_t counted = 0;
  const auto count = [&](RequestNumber number) {
    const Request& request = requests_[number];
    const std::int64_t tokens = std::min<std::int64_t>(budget_, request.goal - request.computed);
    const std::int64_t pages = (tokens + options_.page - 1) / options_.page;
    found.emplace_back(number, tokens);
    budget_ -= pages * options_.page;
    counted += (pages + 1) * options_.page;
  };
  for (const RequestNumber number : running_)
    if (requests_[number].prefills() && budget_ > 0) count(number);
  while (budget_ > 0 && !queue_.empty() && !closed_) {
    if (static_cast<std::int64_t>(running_.size()) >= options_.max_running) {
      closed_ = true;
      break;
    }
    const RequestNumber number = queue_.begin()->second.front();
    Operation admission = admission_of(number);
    admission.room = counted + options_.page + 1;
    const Reply& reply = ask(admission);
    if (reply.refused == Refusal::none) {
      enter(number, reply);
      count(number);
      closed_ = reply.has(ReplyField::kv) && reply.get(ReplyField::kv) <= counted;
    } else if (running_.empty() || reply.refused == Refusal::too_long) {
      stop_waiting(number);
      end(number, FinishReason::refused);
    } else {
      closed_ = true;
    }
  }
  if (found.empty()) return;
  std::int64_t room = 0;
  for (const auto& [number, tokens] : found)
    room += tokens + (options_.page == 1 ? 0 : options_.page);
  ask_for_room(room);
  for (const auto& [number, tokens] : found)
    if (requests_[number].state == State::running)
      compute(number, static_cast<std::uint32_t>(tokens));
}

/// Of the request's next token, and of its drafts.
std::int64_t SglangSchedulerOracle::pages_to_decode(RequestNumber number) const {
  const Request& request = requests_[number];
  std::int64_t tokens = 1;
  if (request.verification < request.spec->drafts.size())
    tokens += request.spec->drafts[request.verification];
  std::int64_t begun = 0;
  for (std::int64_t i = 0; i < tokens; ++i)
    if ((request.computed + i) % options_.page == 0) ++begun;
  return begun;
}

/// False where nobody decodes in this step.
bool SglangSchedulerOracle::make_room_to_decode() {
  std::vector<RequestNumber> stay;
  bool one_ends = false;  // with a result that is out
  for (const RequestNumber number : running_) {
    const Request& request = requests_[number];
    if (request.prefills()) continue;
    if (!request.spec->stops && request.computed + 1 == request.spec->tokens.size())
      one_ends = true;
    else
      stay.push_back(number);
  }
  if (stay.empty()) return true;
  const auto lacks_room = [&] {
    std::int64_t pages = 0;
    for (const RequestNumber number : stay) pages += pages_to_decode(number);
    const std::int64_t free = ask_for_room(pages * options_.page);
    return free >= 0 && free < pages * options_.page;
  };
  if (lacks_room()) {
    if (one_ends) {
      closed_ = false;
      return false;
    }
    // Most outputs first, then the shortest prompt, then as they run.
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<RequestNumber>> ranked;
    for (const RequestNumber number : stay)
      ranked[{-std::int64_t{requests_[number].sampled}, requests_[number].spec->prompt_size}]
          .push_back(number);
    stay.clear();
    for (const auto& [rank, equals] : ranked) stay.insert(stay.end(), equals.begin(), equals.end());
    do {
      const RequestNumber last = stay.back();
      stay.pop_back();
      if (stay.empty()) {
        drop(last);
        return false;
      }
      give_way(last);
      ask_for_room(kStepsAfterRetraction * static_cast<std::int64_t>(stay.size()));
    } while (lacks_room());
    std::vector<RequestNumber> order = stay;
    for (const RequestNumber number : running_)
      if (std::ranges::find(stay, number) == stay.end()) order.push_back(number);
    running_ = order;
  }
  if (options_.page > 1) ask_for_room(options_.page * static_cast<std::int64_t>(stay.size()));
  return true;
}

const Registration<ScheduleCheckerEntry> kSglangScheduler{
    {"sglang", [](const Config& config) -> std::unique_ptr<ScheduleChecker> {
       return std::make_unique<SglangSchedulerOracle>(SchedulerOptions::of(config));
     }}};

}  // namespace
}  // namespace lockstep::reference
