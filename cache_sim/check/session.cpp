#include "cache_sim/check/session.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/require.hpp"
#include "reference/base/work_done.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <numeric>

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kEventsAround = 6;
constexpr std::int64_t kRecomputeEvery = 1000;
constexpr std::size_t kTextLimit = 100;  // of a token list in texts for people

/// The change of the number of requests, slots and locks that hold memory.
int change_of_holders(const Operation& operation, const Reply& reply) {
  if (reply.refused != Refusal::none) return 0;
  switch (operation.verb) {
    case Verb::admit:
    case Verb::alloc:
    case Verb::fork:
    case Verb::lock:
    case Verb::clone:
    case Verb::capture: return 1;
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt:
    case Verb::free:
    case Verb::unlock: return -1;
    case Verb::insert: return operation.slot.exists() && reply.get(ReplyField::exist) == 0 ? -1 : 0;
    default: return 0;
  }
}

/// A slot that has seen tokens when it is taken. Subjects are asked for the slot first, and then to
/// advance it.
Result<Reply> take_and_advance(Subject& subject, Operation operation) {
  Operation advance{.verb = Verb::advance};
  advance.slot = operation.as;
  advance.tokens = std::exchange(operation.tokens, Tokens());
  Result<Reply> taken = subject.apply(operation);
  if (!taken || taken->refused != Refusal::none) return taken;
  Result<Reply> advanced = subject.apply(advance);
  if (advanced && advanced->has(ReplyField::length))
    taken->set(ReplyField::length, advanced->get(ReplyField::length));
  return advanced && advanced->refused == Refusal::none ? taken : advanced;
}

}  // namespace

ReplaySession::ReplaySession(const RunOptions& options) : options_(options) {}
ReplaySession::~ReplaySession() = default;

Result<std::unique_ptr<ReplaySession>> ReplaySession::start(const RunOptions& options) {
  std::unique_ptr<ReplaySession> run(new ReplaySession(options));
  for (std::int64_t rank = 0; rank < options.config.ranks; ++rank)
    for (const std::string& name : options.subjects)
      if (const Result<void> seated = run->seat(name, static_cast<std::size_t>(rank)); !seated)
        return tl::unexpected(seated.error());
  run->replies_.resize(run->subject_count());
  run->asked_.resize(run->subject_count());
  std::iota(run->asked_.begin(), run->asked_.end(), std::size_t{0});
  const auto first_child =
      std::stable_partition(run->asked_.begin(), run->asked_.end(),
                            [&](std::size_t i) { return !run->seats_[i]->is_child; });
  run->in_process_ = static_cast<std::size_t>(first_child - run->asked_.begin());
  run->holders_.resize(static_cast<std::size_t>(options.config.ranks));
  run->set_driver(Children::Driver::operations);
  return run;
}

void ReplaySession::set_driver(Children::Driver driver) {
  driver_ = driver;
  unsupported_ = options_.children->unsupported(driver);
}

/// Starts a subject. A child whose answer to hello is a finding gets a seat without a subject, and
/// the run ends.
Result<void> ReplaySession::seat(const std::string& name, std::size_t rank) {
  Result<std::unique_ptr<SubjectSeat>> seat = start_subject(name, options_);
  if (!seat && !seat.error().finding) return tl::unexpected(seat.error());
  seats_.push_back(seat ? std::move(*seat) : std::make_unique<SubjectSeat>());
  seats_.back()->name = name;
  seats_.back()->rank = rank;
  if (!seat)
    add({*seat.error().finding, seat.error().text, "levels=…", "nothing usable"}, "", true);
  return {};
}

SubjectTotals ReplaySession::totals(std::size_t i) const {
  SubjectTotals all;
  for (; i < seats_.size(); i += subject_count()) {
    const SubjectTotals& one = seats_[i]->totals;
    all.input_tokens += one.input_tokens;
    all.hit_tokens += one.hit_tokens;
    all.host_hit_tokens += one.host_hit_tokens;
    all.evicted_kv += one.evicted_kv;
    all.evicted_states += one.evicted_states;
    all.preemptions += one.preemptions;
  }
  return all;
}
std::optional<Snapshot> ReplaySession::snapshot(std::size_t i, std::size_t rank) const {
  const SubjectSeat& seat = *seats_[rank * subject_count() + i];
  return seat.subject == nullptr ? std::nullopt : seat.subject->snapshot();
}

/// The subject's reply. An exception is reported as the subject's death.
Result<Reply> ReplaySession::answer(SubjectSeat& seat, const Operation& operation) try {
  if (operation.verb == Verb::alloc && !operation.tokens.empty())
    return take_and_advance(*seat.subject, operation);
  return seat.subject->apply(operation);
} catch (const std::exception& thrown) {
  return fail_as(FindingKind::subject_died,
                 fmt::format("{} stopped: {}", seat.name, thrown.what()));
}

/// Asks every subject. Children are asked last; an operation that an in-process subject rejects is
/// never sent to them. False where there are no replies to compare.
bool ReplaySession::ask_all(const Operation& operation) {
  // A verb that a subject does not understand is the caller's mistake; it is sent to no subject.
  for (const auto& seat : seats_of_rank())
    if (const std::optional<Lack> lack = lack_for(operation, seat->capabilities)) {
      refuse(
          {.text = fmt::format("{}: {} {}", to_string(operation.verb), seat->name, lack->text())});
      return false;
    }
  std::vector<std::optional<Error>> refusals;
  bool is_done_by_some = false;
  for (std::size_t k = 0; k < asked_.size(); ++k) {
    if (k == in_process_ && !refusals.empty()) break;
    const std::size_t i = asked_[k];
    if (!ask(i, operation, refusals)) return false;
    if (replies_[i].refused == Refusal::unsupported) {
      note_unsupported(i, operation);
      if (is_done_by_some) state_ = MustRestart{};
      return false;
    }
    is_done_by_some = true;
  }
  if (refusals.empty()) return true;
  take_refusal(operation, refusals);
  return false;
}

/// From now on such operations are left out.
void ReplaySession::note_unsupported(std::size_t subject, const Operation& operation) {
  const std::string form = form_of(operation);
  unsupported_[form] = fmt::format("{} does not support `{}`", seat_at(subject).name, form);
  options_.children->note_unsupported(driver_, form, unsupported_[form]);
}

/// Asks one subject, and keeps its reply or its refusal of bad input. False where it failed with a
/// finding.
bool ReplaySession::ask(std::size_t subject, const Operation& operation,
                        std::vector<std::optional<Error>>& refusals) {
  SubjectSeat& seat = seat_at(subject);
  Result<Reply> reply = answer(seat, operation);
  if (reply) {
    replies_[subject] = *reply;
    if (reply->refused != Refusal::unsupported) count(operation, *reply, seat);
    return true;
  }
  replies_[subject] = Reply();
  if (!reply.error().finding) {
    refusals.resize(subject_count());
    refusals[subject] = std::move(reply.error());
    return true;
  }
  remember(operation, nullptr);
  locate(&seat, {*reply.error().finding, reply.error().text, "an answer", "none"},
         operation.id.text());
  state_ = HasFound{};
  return false;
}

/// The form under which a child's `unsupported` is remembered. Requests that decode have forms of
/// their own.
std::string ReplaySession::form_of(const Operation& operation) const {
  const RequestOutcome* const request =
      operation.id.exists() ? find_outcome(operation.id) : nullptr;
  const bool decodes = request != nullptr && request->output_tokens > 0;
  return operation_form(operation) + (decodes ? " while decoding" : "");
}

/// Leaves out an operation that a child does not support. A scheduler can go on without a
/// checkpoint; without a forward it is blocked.
Applied ReplaySession::leave_out(const std::string& form, const Operation& operation) {
  --events_;
  LeftOut& known = left_out_[form];
  known.why = unsupported_.at(form);
  ++known.count;
  Reply& reply = replies_.front() = Reply();
  switch (operation.verb) {
    case Verb::checkpoint:
      reply.set(ReplyField::exist, 0).set(ReplyField::length, 0);
      return {&reply, true};
    case Verb::step:
    case Verb::evict:
    case Verb::flush:
    case Verb::check: return {&reply, true};
    default: break;
  }
  if (!options_.skip_illegal)
    state_ = IsBlocked{fmt::format("{}{}: {}, and the run cannot go on without it", options_.file,
                                   line_ > 0 ? fmt::format(":{}", line_) : "", known.why)};
  return {nullptr, true};
}

/// An operation is bad input where every subject that can tell says so. Where one subject takes it
/// and another refuses it, the answers differ, which is a finding.
void ReplaySession::take_refusal(const Operation& operation,
                                 const std::vector<std::optional<Error>>& refusals) {
  std::size_t refuser = 0;
  while (!refusals[refuser]) ++refuser;
  for (std::size_t i = 0; i < subject_count(); ++i) {
    if (refusals[i] || seat_at(i).is_child) continue;
    remember(operation, nullptr);
    locate(&seat_at(seat_at(i).is_oracle ? refuser : i),
           {FindingKind::reply_differs,
            fmt::format("{} answered {} and {} calls the operation bad input: {}", seat_at(i).name,
                        replies_[i].text(), seat_at(refuser).name, refusals[refuser]->text),
            "the same from both", "an answer and a refusal"},
           operation.id.text());
    state_ = HasFound{};
    return;
  }
  refuse(*refusals[refuser]);
}

/// Ends the run, or leaves the operation out, because it is bad input.
void ReplaySession::refuse(Error error) {
  if (options_.skip_illegal)
    --events_;
  else
    fail(std::move(error));
}

Applied ReplaySession::apply(const Operation& operation) {
  if (stopped()) return {};
  ++events_;
  count_work();
  if (!unsupported_.empty() && unsupported_.contains(form_of(operation)))
    return leave_out(form_of(operation), operation);
  if (!ask_all(operation)) {
    const bool is_new = !stopped() && unsupported_.contains(form_of(operation));
    return is_new ? leave_out(form_of(operation), operation) : Applied{};
  }
  const Reply& first = replies_.front();
  if (options_.watch) options_.watch(operation, first);
  digest_.add(static_cast<std::uint64_t>(operation.verb) << 32 | operation.tokens.size());
  digest_.add(static_cast<std::uint64_t>(operation.n));
  if (options_.config.ranks > 1) digest_.add(rank_);
  first.add_to(digest_);
  if (options_.check == CheckLevel::off && subject_count() == 1 && !options_.keep_events) {
    follow(operation, first);
    return {&first};
  }
  remember(operation, &first);
  if (!kept_requests_.empty()) keep_moment(operation, first);
  for (std::size_t i = 0; i < subject_count(); ++i) check(seat_at(i), operation, replies_[i]);
  keep_rows();
  compare(operation);
  follow(operation, first);
  return stopped() ? Applied{} : Applied{&first};
}

/// Runs the checks of one subject: labels, auditor and bounds. All findings of one operation are
/// reported, and the run stops there.
void ReplaySession::check(SubjectSeat& seat, const Operation& operation, const Reply& reply) {
  Findings& findings = seat.findings;
  findings.clear();
  if (seat.numbers)
    findings = seat.numbers->drain(driver_ == Children::Driver::operations);
  else if (seat.labels)
    findings = seat.labels->drain();
  if (seat.auditor) audit(seat, &operation, &reply);
  if (operation.verb == Verb::check && &seat == &seat_at(0))
    replies_.front().set(ReplyField::violations, static_cast<std::int64_t>(findings.size()));
  if (options_.check != CheckLevel::off) check_cached(operation, reply, findings);
  if (seat.closed) seat.closed->check(operation, reply, findings);
  for (Finding& own : seat.subject->take_findings()) findings.push_back(std::move(own));
  if (options_.check == CheckLevel::all && operation.verb == Verb::flush)
    check_emptied(seat, findings);
  // One broken rule shows in several ways. Kinds of finding are ordered so that the one that
  // explains most comes first.
  std::ranges::stable_sort(findings, {}, &Finding::kind);
  if (findings.empty()) return;
  show_answer(seat, reply);
  for (Finding& finding : findings) locate(&seat, std::move(finding), operation.id.text());
  state_ = HasFound{};
}

/// Runs the auditor after an operation, or at the end of the run. A structure can be too broken for
/// the auditor to read; then its exception is a finding.
void ReplaySession::audit(SubjectSeat& seat, const Operation* operation, const Reply* reply) try {
  if (operation != nullptr) seat.auditor->after(*operation, *reply, seat.findings);
  if (operation == nullptr || operation->verb == Verb::check || events_ % kRecomputeEvery == 0)
    seat.auditor->recompute(seat.findings);
} catch (const std::exception& thrown) {
  seat.findings.push_back(
      {FindingKind::out_of_range,
       fmt::format("the structure of {} cannot be read: {}", seat.name, thrown.what()),
       "a sound structure", thrown.what()});
}

/// Checks the hit of an admission by the numbers of its reply: it is shorter than the prompt, and
/// the labels have its length.
void ReplaySession::check_cached(const Operation& operation, const Reply& reply,
                                 Findings& findings) {
  if (operation.verb != Verb::admit || reply.refused != Refusal::none) return;
  const std::int64_t cached = reply.get(ReplyField::cached);
  const std::int64_t size = operation.tokens.size();
  if (cached >= size)
    findings.push_back(
        {FindingKind::cached_too_much,
         fmt::format("{} of {} {} said to be cached, so none is left whose output could be sampled",
                     cached, counted(size, "token"), is_or_are(cached)),
         fmt::format("at most {}", size - 1), std::to_string(cached)});
  for (const ReplyField field : {ReplyField::state, ReplyField::conv})
    if (reply.has(field) && reply.get(field) != cached && findings.empty())
      findings.push_back(
          {FindingKind::wrong_state_prefix,
           fmt::format("request `{}` has {} and a {} label of length {}", operation.id.text(),
                       counted(cached, "cached token"),
                       field == ReplyField::conv ? "conv" : "recurrent", reply.get(field)),
           std::to_string(cached), std::to_string(reply.get(field))});
}

/// Liveness of the pools: after a flush with nothing running, every slot is free. Slots may be held
/// by a request that runs, by a slot or a lock of a tree verb, or by a row that a slot cache has
/// captured. A result under way holds none, because its request has left.
void ReplaySession::check_emptied(const SubjectSeat& seat, Findings& findings) const {
  if (holders_[seat.rank] != 0) return;
  const std::optional<Snapshot> now = seat.subject->snapshot();
  if (!now) return;
  const auto check_free = [&](const char* what, std::int64_t free, std::int64_t total) {
    if (free != total)
      findings.push_back(
          {FindingKind::leak,
           fmt::format("nothing runs and the cache was flushed, and {} of {} {} are not free",
                       total - free, total, what),
           std::to_string(total), std::to_string(free)});
  };
  check_free("KV slots", now->kv_free, now->kv_total);
  check_free("state slots", now->states_free, now->states_total);
}

/// Compares the replies field by field. The reply of an oracle is the expected one.
void ReplaySession::compare(const Operation& operation) {
  for (std::size_t i = 1; i < subject_count() && !stopped(); ++i) {
    const bool first_is_oracle = seat_at(0).is_oracle;
    const std::size_t expected = seat_at(i).is_oracle || !first_is_oracle ? i : 0;
    const std::size_t actual = expected == i ? 0 : i;
    const bool whole = !seat_at(actual).is_child && !seat_at(expected).is_child;
    const auto difference = whole ? replies_[actual].exact_difference(replies_[expected])
                                  : replies_[actual].difference(replies_[expected]);
    if (!difference) continue;
    FindingKind kind = FindingKind::reply_differs;
    if (difference->field == "cached" && seat_at(expected).is_oracle &&
        replies_[actual].get(ReplyField::cached) < replies_[expected].get(ReplyField::cached))
      kind = FindingKind::missed_reuse;
    if (difference->field == to_string(ReplyField::output)) kind = FindingKind::output_differs;
    const auto said = [&](std::size_t seat, const std::string& value) {
      const bool took_it =
          difference->field == "refused" && replies_[seat].refused == Refusal::none;
      return took_it ? value : fmt::format("{}={}", difference->field, value);
    };
    show_answer(seat_at(actual), replies_[actual]);
    locate(&seat_at(actual),
           {kind,
            fmt::format("{} answered {} and {} answered {}", seat_at(actual).name,
                        said(actual, difference->here), seat_at(expected).name,
                        said(expected, difference->there)),
            fmt::format("{}={}", difference->field, difference->there),
            fmt::format("{}={}", difference->field, difference->here)},
           operation.id.text());
    state_ = HasFound{};
  }
}

void ReplaySession::count(const Operation& operation, const Reply& reply, SubjectSeat& seat) {
  SubjectTotals& totals = seat.totals;
  if (operation.verb == Verb::preempt)
    if (const RequestOutcome* const known = find_outcome(operation.id); known && known->computes)
      ++totals.preemptions;
  if (reply.refused != Refusal::none) return;
  if (operation.verb == Verb::admit) {
    const RequestOutcome* const known = find_outcome(operation.id);
    if (known == nullptr || known->cached_tokens < 0) {
      totals.input_tokens += operation.tokens.size();
      totals.hit_tokens += reply.get(ReplyField::cached);
      totals.host_hit_tokens += std::max<std::int64_t>(reply.get(ReplyField::host), 0);
    }
  }
  if (operation.verb == Verb::evict || operation.verb == Verb::flush) {
    totals.evicted_kv += reply.get(ReplyField::kv);
    totals.evicted_states += reply.get(ReplyField::state);
  } else {
    totals.evicted_kv += reply.get(ReplyField::evicted_kv);
    totals.evicted_states += reply.get(ReplyField::evicted_states);
  }
}

/// Keeps the ledger of requests from the operations themselves. A scheduler adds times and finish
/// reasons.
void ReplaySession::follow(const Operation& operation, const Reply& reply) {
  holders_[rank_] += change_of_holders(operation, reply);
  switch (operation.verb) {
    case Verb::admit: {
      RequestOutcome& now = outcome(operation.id);
      if (now.prompt_tokens == 0)
        now.prompt_tokens =
            operation.prompt == Operation::kAbsent ? operation.tokens.size() : operation.prompt;
      if (reply.refused == Refusal::none && now.cached_tokens < 0)
        now.cached_tokens = reply.get(ReplyField::cached);
      now.finish = reply.refused == Refusal::none ? FinishReason::running : FinishReason::refused;
      now.computes = false;
      return;
    }
    case Verb::extend:
    case Verb::accept: {
      if (reply.refused != Refusal::none) return;
      RequestOutcome& now = outcome(operation.id);
      now.computes |= reply.get(ReplyField::n) > 0;
      now.output_tokens += operation.tokens.size();
      return;
    }
    case Verb::clone:
      if (reply.refused == Refusal::none) outcome(operation.as).finish = FinishReason::running;
      return;
    case Verb::finish: outcome(operation.id).finish = FinishReason::stop; return;
    case Verb::abort: outcome(operation.id).finish = FinishReason::abort; return;
    default: return;
  }
}

RequestOutcome& ReplaySession::outcome(Name id) {
  if (outcome_of_.size() <= id.index()) outcome_of_.resize(id.index() + 1);
  std::uint32_t& place = outcome_of_[id.index()];
  if (place == 0) {
    outcomes_.emplace_back().id = id;
    place = static_cast<std::uint32_t>(outcomes_.size());
  }
  return outcomes_[place - 1];
}

void ReplaySession::forget(Name id) {
  std::uint32_t& place = outcome_of_[id.index()];
  RequestOutcome& gone = outcomes_[place - 1];
  options_.ended(gone);
  outcome_of_[outcomes_.back().id.index()] = place;
  gone = outcomes_.back();
  outcomes_.pop_back();
  place = 0;
}

const RequestOutcome* ReplaySession::find_outcome(Name id) const {
  if (id.index() >= outcome_of_.size() || outcome_of_[id.index()] == 0) return nullptr;
  return &outcomes_[outcome_of_[id.index()] - 1];
}

void ReplaySession::remember(const Operation& operation, const Reply* reply) {
  if (past_.size() == kEventsAround) past_.pop_front();
  past_.push_back({operation, reply == nullptr ? std::nullopt : std::optional(*reply)});
  if (!options_.keep_events) return;
  KeptEvent kept{line_, now_, operation.text(kTextLimit), past_.back().answer()};
  if (const auto now = seat_at(0).subject->snapshot()) {
    kept.kv_used = now->kv_total - now->kv_free;
    kept.states_used = now->states_total - now->states_free;
    if (now->host) kept.copies = now->host->in_flight;
  }
  kept_.push_back(std::move(kept));
}

/// The event of the first finding is shown with the answer of the subject that is wrong.
void ReplaySession::show_answer(const SubjectSeat& seat, const Reply& reply) {
  if (stopped() || &seat == &seat_at(0)) return;
  past_.back().reply = reply;
  if (options_.keep_events) kept_.back().reply = past_.back().answer();
}

void ReplaySession::keep_rows() {
  if (kept_.empty() || seats_.empty()) return;
  if (RowTeller* const told = seat_at(0).rows())
    for (std::string& row : told->rows()) kept_.back().rows.push_back(std::move(row));
}

void ReplaySession::keep_moment(const Operation& operation, const Reply& reply) {
  const auto kept =
      operation.id.exists() ? kept_requests_.find(operation.id.index()) : kept_requests_.end();
  if (kept == kept_requests_.end()) return;
  kept->second.last = {events_, past_};
  if (operation.verb == Verb::admit && reply.refused == Refusal::none &&
      kept->second.admission.event == 0)
    kept->second.admission = kept->second.last;
}

void ReplaySession::locate(SubjectSeat* seat, Finding finding, const std::string& request,
                           std::int64_t event, const std::deque<PastEvent>& past) {
  LocatedFinding located;
  located.finding = std::move(finding);
  located.subject = seat == nullptr ? "" : seat->name;
  if (seat != nullptr && options_.config.ranks > 1)
    located.finding.text += fmt::format(" (rank {})", seat->rank);
  located.file = options_.file;
  located.line = line_;
  located.event = event;
  located.request = request;
  for (const PastEvent& one : past)
    located.around.push_back(fmt::format("{} → {}", one.operation.text(kTextLimit), one.answer()));
  if (!past.empty()) located.operation = past.back().operation.text(kTextLimit);
  findings_.push_back(std::move(located));
}

void ReplaySession::add(Finding finding, const std::string& request, bool stop) {
  locate(seats_.empty() ? nullptr : &seat_at(0), std::move(finding), request);
  if (stop) state_ = HasFound{};
}

void ReplaySession::add_about(Name request, bool is_of_admission, Finding finding) {
  const auto kept = kept_requests_.find(request.index());
  require(kept != kept_requests_.end(), "the driver has said whose events are kept");
  const KeptRequest& known = kept->second;
  const Moment& moment =
      is_of_admission && known.admission.event != 0 ? known.admission : known.last;
  if (moment.event == 0) return add(std::move(finding), request.text(), false);
  locate(seats_.empty() ? nullptr : &seat_at(0), std::move(finding), request.text(), moment.event,
         moment.past);
}

void ReplaySession::fail(Error error) {
  error.text = fmt::format("{}{}: {}", options_.file, line_ > 0 ? fmt::format(":{}", line_) : "",
                           error.text);
  state_ = HadBadInput{std::move(error)};
}

void ReplaySession::conclude() {
  const bool goes_on = !stopped();
  for (const auto& seat : seats_) {
    if (seat->is_child) seat->subject.reset();  // the process is free for the next run
    if (!goes_on) continue;
    seat->findings.clear();
    if (seat->numbers) seat->findings = seat->numbers->drain(true);
    if (seat->auditor) audit(*seat, nullptr, nullptr);
    for (Finding& finding : seat->findings) locate(seat.get(), std::move(finding), "");
    if (!seat->findings.empty()) state_ = HasFound{};
  }
  keep_rows();
}

}  // namespace lockstep::cache_sim
