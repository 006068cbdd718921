// A run: the same operations to every subject, their replies compared, their insides audited, and
// the first wrong event named.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache_sim/base/prefix_trie.hpp"
#include "cache_sim/model/label_state.hpp"
#include "reference/base/mix.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

enum class CheckLevel { off, labels, all };

/// A finding with its place: what a user reads and what the JSON holds.
struct LocatedFinding {
  Finding finding;
  std::string subject;
  std::string file;
  int line = 0;
  std::int64_t event = 0;  ///< counted from 1
  std::string request;
  std::string operation;            ///< the event's line, long token lists cut
  std::vector<std::string> around;  ///< the events before it and itself, `operation → reply`
};

/// What became of one request.
struct RequestOutcome {
  Name id;
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = -1;  ///< at its first admission; -1: never admitted
  std::int64_t output_tokens = 0;
  FinishReason finish = FinishReason::running;
  Nanoseconds arrival = 0;
  Nanoseconds first_token = -1;
  Nanoseconds end = -1;
};

/// One bar of the timeline.
struct Span {
  std::string name;
  Name request;
  Nanoseconds begin;
  Nanoseconds end;
};

/// Per subject, what a table of policies shows.
struct SubjectTotals {
  std::int64_t input_tokens = 0;  ///< of admitted requests' first admissions
  std::int64_t hit_tokens = 0;
  std::int64_t evicted_kv = 0;  ///< as far as replies report it
  std::int64_t evicted_states = 0;
  std::int64_t preemptions = 0;
};

struct RunOptions {
  std::vector<std::string>
      subjects;  ///< names as on the command line; the first one's replies drive the run
  Config config;
  const Defect* defect = nullptr;  ///< planted into the policy that it belongs to
  std::string_view defect_name;
  CheckLevel check = CheckLevel::all;
  std::chrono::milliseconds timeout{10'000};
  std::string file;          ///< named in findings
  bool keep_events = false;  ///< every event's text and the pools after it, for reports
  /// Sees every operation and the first subject's reply; for whoever measures.
  std::function<void(const Operation&, const Reply&)> watch{};
  /// An operation that every subject refuses as bad input is left out.
  bool skip_illegal = false;
};

/// One event as a report shows it.
struct KeptEvent {
  int line;
  Nanoseconds time;
  std::string operation;
  std::string reply;
  std::int64_t kv_used = 0;
  std::int64_t states_used = 0;
};

class Run {
 public:
  /// Starts the subjects. Errors: unknown names, config fields that a policy does not have,
  /// children that do not start.
  static Result<std::unique_ptr<Run>> start(const RunOptions& options);
  ~Run();

  /// Sends the operation to every subject. The first one's reply, or null where the run has
  /// stopped.
  const Reply* apply(const Operation& operation);
  bool stopped() const { return stopped_; }

  /// Where the next operations come from.
  void set_place(int line, Nanoseconds now) {
    line_ = line;
    now_ = now;
  }
  /// The last checks: everything from nothing. Called once, at the end.
  void conclude();

  /// A finding that the driver makes itself, at the current place; `stop` ends the run.
  void add(Finding finding, const std::string& request, bool stop);
  /// Bad input that shows only when it runs; ends the run.
  void fail(Error error);

  RequestOutcome& outcome(Name id);
  const RequestOutcome* find_outcome(Name id) const;
  const std::vector<RequestOutcome>& outcomes() const { return outcomes_; }
  std::vector<Span>& spans() { return spans_; }
  const std::vector<Span>& spans() const { return spans_; }
  const std::vector<LocatedFinding>& findings() const { return findings_; }
  const std::optional<Error>& error() const { return error_; }
  const std::vector<KeptEvent>& kept_events() const { return kept_; }

  /// With config ranks=N every subject is there N times, each with its own memory: operations go to
  /// those of one rank.
  void set_rank(std::size_t rank) { rank_ = rank; }

  std::size_t subject_count() const { return options_.subjects.size(); }
  const std::string& subject_name(std::size_t i) const { return options_.subjects[i]; }
  SubjectTotals totals(std::size_t i) const;  ///< over all ranks
  std::optional<Snapshot> snapshot(std::size_t i, std::size_t rank = 0) const;
  std::int64_t event_count() const { return events_; }
  std::uint64_t digest() const { return digest_.value; }
  const RunOptions& options() const { return options_; }
  Nanoseconds now() const { return now_; }

 private:
  struct Seat;  // a subject with its labels, auditor and totals
  struct PastEvent {
    Operation operation;
    std::optional<Reply> reply;  // none: the subject failed
    std::string answer() const { return reply ? reply->text() : "no answer"; }
  };

  explicit Run(const RunOptions& options);
  Result<void> seat(const std::string& name);
  static Result<Reply> answer(Seat& seat, const Operation& operation);
  bool ask_all(const Operation& operation);
  void take_refusal(const Operation& operation, const std::vector<std::optional<Error>>& refusals);
  void check(Seat& seat, const Operation& operation, const Reply& reply);
  void audit(Seat& seat, const Operation* operation, const Reply* reply);
  void check_cached(Seat& seat, const Operation& operation, const Reply& reply, Findings& findings);
  void check_emptied(const Seat& seat, Findings& findings) const;
  void compare(const Operation& operation);
  void remember(const Operation& operation, const Reply* reply);
  void follow(const Operation& operation, const Reply& reply);
  void count(const Operation& operation, const Reply& reply, Seat& seat);
  void locate(Seat* seat, Finding finding, const std::string& request);
  Seat& seat_at(std::size_t i) { return *seats_[rank_ * subject_count() + i]; }

  RunOptions options_;
  NoLayerState no_layers_;
  std::vector<std::unique_ptr<Seat>> seats_;  // rank by rank
  std::size_t rank_ = 0;
  std::vector<std::int64_t> holders_;  // by rank: requests, slots and locks that hold something
  std::vector<Reply> replies_;
  std::vector<LocatedFinding> findings_;
  std::optional<Error> error_;
  bool stopped_ = false;
  int line_ = 0;
  Nanoseconds now_ = 0;
  std::int64_t events_ = 0;
  Digest digest_;
  std::deque<PastEvent> past_;
  std::vector<KeptEvent> kept_;
  std::vector<RequestOutcome> outcomes_;
  std::vector<std::uint32_t> outcome_of_;  // by Name::index(), 1 + index into outcomes_
  std::vector<Span> spans_;
};

}  // namespace lockstep::cache_sim
