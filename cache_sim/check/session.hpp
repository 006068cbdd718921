// A replay session: it sends the same operations to every subject, compares the replies, audits the
// structures, and names the first wrong event.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "cache_sim/check/outcomes.hpp"
#include "cache_sim/check/run_options.hpp"
#include "cache_sim/check/start_subject.hpp"
#include "reference/base/mix.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

// The state of a run.
struct GoesOn {};
struct HasFound {};  ///< a finding ended it
struct HadBadInput {
  Error error;
};
/// A child does not support an operation without which the run cannot go on.
struct IsBlocked {
  std::string why;
};
/// A child said `unsupported` only after other subjects had done the operation, so their states
/// differ. A new run with the same RunOptions::children leaves such operations out from the
/// beginning.
struct MustRestart {};
using RunState = std::variant<GoesOn, HasFound, HadBadInput, IsBlocked, MustRestart>;

/// The result of one operation.
struct Applied {
  /// The first subject's reply; null where the run has ended or where bad input was left out.
  const Reply* reply = nullptr;
  /// The operation was sent to no subject, because a child does not support it. Where the caller
  /// can go on without it, `reply` says that nothing happened.
  bool left_out = false;
  operator const Reply*() const { return reply; }  // NOLINT: most callers want nothing else
};

class ReplaySession {
 public:
  /// Starts the subjects. Errors: an unknown name, a config field that a policy does not have, a
  /// child that does not start.
  static Result<std::unique_ptr<ReplaySession>> start(const RunOptions& options);
  ~ReplaySession();

  /// Sends the operation to every subject.
  Applied apply(const Operation& operation);
  const RunState& state() const { return state_; }
  bool stopped() const { return !std::holds_alternative<GoesOn>(state_); }
  /// The bad input that ended the run; null where the run did not end so.
  const Error* error() const {
    const auto* const bad = std::get_if<HadBadInput>(&state_);
    return bad == nullptr ? nullptr : &bad->error;
  }

  /// The operations that were left out because a child does not support them, by their form.
  const std::map<std::string, LeftOut>& left_out() const { return left_out_; }

  /// Sets the driver of the run; it is a trace of operations until this is called. Call it before
  /// the first operation.
  void set_driver(Children::Driver driver);
  /// Sets the line and the time of the operations that follow.
  void set_place(int line, Nanoseconds now) {
    line_ = line;
    now_ = now;
  }
  /// Runs the checks at the end: every structure is audited from nothing. Called once; afterwards
  /// the children are let go.
  void conclude();

  /// Adds a finding of the driver itself at the current place; `stop` ends the run.
  void add(Finding finding, const std::string& request, bool stop);
  /// Keeps the events of a request, which add_about() needs. Call it before the request is
  /// admitted.
  void keep_events_of(Name request) { kept_requests_[request.index()]; }
  /// Adds a finding about an earlier answer to the request: the answer to its first admission or,
  /// for its outcome, to its last operation. Where the request had none, the finding stands at the
  /// current event.
  void add_about(Name request, bool is_of_admission, Finding finding);
  /// Ends the run with bad input that shows only while it runs.
  void fail(Error error);

  RequestOutcome& outcome(Name id);
  const RequestOutcome* find_outcome(Name id) const;
  /// Hands a request to RunOptions::ended; outcomes() has it no longer.
  void forget(Name id);
  const std::vector<RequestOutcome>& outcomes() const { return outcomes_; }
  std::vector<Span>& spans() { return spans_; }
  const std::vector<Span>& spans() const { return spans_; }
  const std::vector<LocatedFinding>& findings() const { return findings_; }
  const std::vector<KeptEvent>& kept_events() const { return kept_; }

  /// With config ranks=N there are N instances of every subject, each with its own memory.
  /// Operations go to the instances of the rank that is set here.
  void set_rank(std::size_t rank) { rank_ = rank; }
  /// The time of forwards, summed over all ranks: what each needs for itself, and what it takes,
  /// because ranks wait for the slowest one.
  struct RankTime {
    double needed = 0, taken = 0;  ///< nanoseconds
    double idle_share() const { return taken > 0 ? 1 - needed / taken : 0; }
  };
  RankTime rank_time{};

  /// The first subject is a child, which may leave out fields of a reply.
  bool first_is_child() const { return !seats_.empty() && seats_.front()->is_child; }
  std::size_t subject_count() const { return options_.subjects.size(); }
  const std::string& subject_name(std::size_t i) const { return options_.subjects[i]; }
  SubjectTotals totals(std::size_t i) const;  ///< summed over all ranks
  std::optional<Snapshot> snapshot(std::size_t i, std::size_t rank = 0) const;
  /// The details of the first subject's last decision.
  std::string decided() const { return seats_.front()->subject->decided(); }
  std::int64_t event_count() const { return events_; }
  std::uint64_t digest() const { return digest_.value; }
  const RunOptions& options() const { return options_; }
  Nanoseconds now() const { return now_; }

 private:
  struct PastEvent {
    Operation operation;
    std::optional<Reply> reply;  // empty: the subject failed
    std::string answer() const { return reply ? reply->text() : "no answer"; }
  };

  /// A past event, and the events before it.
  struct Moment {
    std::int64_t event = 0;  ///< 0: there was none
    std::deque<PastEvent> past{};
  };
  struct KeptRequest {
    Moment admission;
    Moment last;
  };

  explicit ReplaySession(const RunOptions& options);
  Result<void> seat(const std::string& name, std::size_t rank);
  static Result<Reply> answer(SubjectSeat& seat, const Operation& operation);
  bool ask_all(const Operation& operation);
  bool ask(std::size_t subject, const Operation& operation,
           std::vector<std::optional<Error>>& refusals);
  void note_unsupported(std::size_t subject, const Operation& operation);
  std::string form_of(const Operation& operation) const;
  Applied leave_out(const std::string& form, const Operation& operation);
  void refuse(Error error);
  void take_refusal(const Operation& operation, const std::vector<std::optional<Error>>& refusals);
  void check(SubjectSeat& seat, const Operation& operation, const Reply& reply);
  void audit(SubjectSeat& seat, const Operation* operation, const Reply* reply);
  static void check_cached(const Operation& operation, const Reply& reply, Findings& findings);
  void check_emptied(const SubjectSeat& seat, Findings& findings) const;
  void compare(const Operation& operation);
  void remember(const Operation& operation, const Reply* reply);
  void follow(const Operation& operation, const Reply& reply);
  void count(const Operation& operation, const Reply& reply, SubjectSeat& seat);
  void show_answer(const SubjectSeat& seat, const Reply& reply);
  void keep_rows();
  void keep_moment(const Operation& operation, const Reply& reply);
  void locate(SubjectSeat* seat, Finding finding, const std::string& request) {
    locate(seat, std::move(finding), request, events_, past_);
  }
  void locate(SubjectSeat* seat, Finding finding, const std::string& request, std::int64_t event,
              const std::deque<PastEvent>& past);
  SubjectSeat& seat_at(std::size_t i) { return *seats_[rank_ * subject_count() + i]; }
  std::span<const std::unique_ptr<SubjectSeat>> seats_of_rank() const {
    return {&seats_[rank_ * subject_count()], subject_count()};
  }

  RunOptions options_;
  std::vector<std::unique_ptr<SubjectSeat>> seats_;  // ordered by rank
  std::vector<std::size_t> asked_;  // the subjects in the order of asking: children come last
  std::size_t in_process_ = 0;      // how many of them are no children
  std::size_t rank_ = 0;
  std::vector<std::int64_t> holders_;  // by rank: requests, slots and locks that hold memory
  std::vector<Reply> replies_;
  std::vector<LocatedFinding> findings_;
  RunState state_;
  Children::Driver driver_ = Children::Driver::operations;
  Children::Unsupported unsupported_;  // forms of operations that are left out
  std::map<std::string, LeftOut> left_out_;
  int line_ = 0;
  Nanoseconds now_ = 0;
  std::int64_t events_ = 0;
  Digest digest_;
  std::deque<PastEvent> past_;
  std::map<std::uint32_t, KeptRequest> kept_requests_;  // by Name::index()
  std::vector<KeptEvent> kept_;
  std::vector<RequestOutcome> outcomes_;
  std::vector<std::uint32_t> outcome_of_;  // by Name::index(), 1 + index into outcomes_
  std::vector<Span> spans_;
};

}  // namespace lockstep::cache_sim
