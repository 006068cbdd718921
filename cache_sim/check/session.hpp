// A replay session: the same operations to every subject, their replies compared, their insides
// audited, and the first wrong event named.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "cache_sim/check/outcomes.hpp"
#include "cache_sim/check/run_options.hpp"
#include "cache_sim/check/start_subject.hpp"
#include "reference/base/mix.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

// How a run stands.
struct GoesOn {};
struct HasFound {};  ///< a finding ended it
struct HadBadInput {
  Error error;
};
/// A child does not support an operation without which the run cannot go on.
struct IsBlocked {
  std::string why;
};
/// A child said that it does not support an operation only after others had done it, so the
/// subjects have parted. Started again with the same RunOptions::children, the run leaves such
/// operations out from the beginning.
struct MustRestart {};
using RunState = std::variant<GoesOn, HasFound, HadBadInput, IsBlocked, MustRestart>;

/// What an operation came to.
struct Applied {
  /// The first subject's answer; null where the run has ended or where bad input was left out.
  const Reply* reply = nullptr;
  /// It was sent to nobody, because a child does not support it. Where whoever drives the run can
  /// do without, the reply is one that says that nothing happened.
  bool left_out = false;
  operator const Reply*() const { return reply; }  // NOLINT: most callers want nothing else
};

class ReplaySession {
 public:
  /// Starts the subjects. Errors: unknown names, config fields that a policy does not have,
  /// children that do not start.
  static Result<std::unique_ptr<ReplaySession>> start(const RunOptions& options);
  ~ReplaySession();

  /// Sends the operation to every subject.
  Applied apply(const Operation& operation);
  const RunState& state() const { return state_; }
  bool stopped() const { return !std::holds_alternative<GoesOn>(state_); }
  /// The bad input that ended the run; null where none did.
  const Error* error() const {
    const auto* const bad = std::get_if<HadBadInput>(&state_);
    return bad == nullptr ? nullptr : &bad->error;
  }

  /// By form of operation: what was left out because a child does not support it.
  const std::map<std::string, LeftOut>& left_out() const { return left_out_; }

  /// Who asks for operations: a trace of them, until this is called. Before the first operation.
  void set_driver(Children::Driver driver);
  /// Where the next operations come from.
  void set_place(int line, Nanoseconds now) {
    line_ = line;
    now_ = now;
  }
  /// The last checks: everything from nothing. Called once, at the end; children are let go.
  void conclude();

  /// A finding that the driver makes itself, at the current place; `stop` ends the run.
  void add(Finding finding, const std::string& request, bool stop);
  /// Keeps what add_about() needs to know of the request; before it is admitted.
  void keep_events_of(Name request) { kept_requests_[request.index()]; }
  /// A finding about an answer that the request got before: at its first admission or, for what it
  /// came to, at its last operation. At the current event where it had none.
  void add_about(Name request, bool is_of_admission, Finding finding);
  /// Bad input that shows only when it runs; ends the run.
  void fail(Error error);

  RequestOutcome& outcome(Name id);
  const RequestOutcome* find_outcome(Name id) const;
  const std::vector<RequestOutcome>& outcomes() const { return outcomes_; }
  std::vector<Span>& spans() { return spans_; }
  const std::vector<Span>& spans() const { return spans_; }
  const std::vector<LocatedFinding>& findings() const { return findings_; }
  const std::vector<KeptEvent>& kept_events() const { return kept_; }

  /// With config ranks=N every subject is there N times, each with its own memory: operations go to
  /// those of one rank.
  void set_rank(std::size_t rank) { rank_ = rank; }

  /// The first subject is a child: it may answer less than a policy does.
  bool first_is_child() const { return !seats_.empty() && seats_.front()->is_child; }
  std::size_t subject_count() const { return options_.subjects.size(); }
  const std::string& subject_name(std::size_t i) const { return options_.subjects[i]; }
  SubjectTotals totals(std::size_t i) const;  ///< over all ranks
  std::optional<Snapshot> snapshot(std::size_t i, std::size_t rank = 0) const;
  /// What the first subject's last operation decided in detail.
  std::string decided() const { return seats_.front()->subject->decided(); }
  std::int64_t event_count() const { return events_; }
  std::uint64_t digest() const { return digest_.value; }
  const RunOptions& options() const { return options_; }
  Nanoseconds now() const { return now_; }

 private:
  struct PastEvent {
    Operation operation;
    std::optional<Reply> reply;  // none: the subject failed
    std::string answer() const { return reply ? reply->text() : "no answer"; }
  };

  /// An event that is over, with those before it.
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
  std::string who_lacks_level(const Operation& operation) const;
  bool ask_all(const Operation& operation);
  bool ask(std::size_t subject, const Operation& operation,
           std::vector<std::optional<Error>>& refusals);
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
  void keep_moment(const Operation& operation, const Reply& reply);
  void locate(SubjectSeat* seat, Finding finding, const std::string& request) {
    locate(seat, std::move(finding), request, events_, past_);
  }
  void locate(SubjectSeat* seat, Finding finding, const std::string& request, std::int64_t event,
              const std::deque<PastEvent>& past);
  SubjectSeat& seat_at(std::size_t i) { return *seats_[rank_ * subject_count() + i]; }

  RunOptions options_;
  std::vector<std::unique_ptr<SubjectSeat>> seats_;  // rank by rank
  std::size_t rank_ = 0;
  std::vector<std::int64_t> holders_;  // by rank: requests, slots and locks that hold something
  std::vector<Reply> replies_;
  std::vector<LocatedFinding> findings_;
  RunState state_;
  Children::Driver driver_ = Children::Driver::operations;
  Children::Unsupported unsupported_;  // what is left out
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
