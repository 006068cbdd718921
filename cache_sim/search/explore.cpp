#include "cache_sim/search/explore.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "cache_sim/search/bad_input.hpp"
#include "cache_sim/search/operation_player.hpp"
#include "cache_sim/search/random_requests.hpp"
#include "cache_sim/search/random_trace.hpp"
#include "cache_sim/server/simulation.hpp"
#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {
namespace {

using Clock = std::chrono::steady_clock;  // budgets and reported times alone

constexpr std::int64_t kTwiceEvery = 20;
constexpr std::size_t kMostCorpus = 512;

/// A trace to play, and who plays it.
struct Candidate {
  std::size_t player = 0;  // index into the explorer's players
  Config config;
  bool scheduled = false;
  Steps steps;
};

/// What a trace came to; its steps are what was played, literally.
struct Execution {
  Candidate candidate;
  std::optional<LocatedFinding> finding;
  std::uint64_t digest = 0;
  std::int64_t operations = 0;
};

Trace as_trace(const Candidate& candidate) {
  Trace trace;
  trace.config = candidate.config;
  trace.scheduler_level = candidate.scheduled;
  for (const Step& step : candidate.steps) trace.statements.push_back(step.statement);
  return trace;
}

/// Which marks the last trace reached.
class Marks {
 public:
  Marks() {
    for (const MarkEntry& mark : Registry<MarkEntry>::all()) {
      names_.emplace_back(mark.name);
      counts_.push_back(mark.count);
    }
    before_.resize(counts_.size());
    start();
    first_ = before_;
  }
  void start() {
    for (std::size_t i = 0; i < counts_.size(); ++i) before_[i] = *counts_[i];
  }
  /// Whether two marks were reached together that no trace before reached together.
  bool reached_new_pair() {
    reached_.clear();
    for (std::size_t i = 0; i < counts_.size(); ++i)
      if (*counts_[i] != before_[i]) reached_.push_back(i);
    bool fresh = false;
    for (std::size_t i = 0; i < reached_.size(); ++i)
      for (std::size_t j = i; j < reached_.size(); ++j)
        fresh |= pairs_.emplace(reached_[i], reached_[j]).second;
    return fresh;
  }
  std::vector<std::string> missed() const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < counts_.size(); ++i)
      if (*counts_[i] == first_[i]) names.push_back(names_[i]);
    return names;
  }

 private:
  std::vector<std::string> names_;
  std::vector<std::uint64_t> first_;  // before the search
  std::vector<const std::uint64_t*> counts_;
  std::vector<std::uint64_t> before_;
  std::vector<std::size_t> reached_;
  std::set<std::pair<std::size_t, std::size_t>> pairs_;
};

/// Who plays a trace: the policy that the swarm is drawn for, and all subjects.
struct Player {
  const PolicyEntry* policy;
  std::vector<std::string> subjects;
};

class Explorer {
 public:
  Explorer(const ExploreOptions& options, std::vector<Player> players)
      : options_(options), players_(std::move(players)) {}

  Result<ExploreOutcome> explore() {
    const auto start = Clock::now();
    Digest digest;
    for (std::int64_t number = 1; goes_on(number, start); ++number) {
      Draw draw(options_.seed, static_cast<std::uint64_t>(number));
      marks_.start();
      Result<Execution> played = one_trace(draw);
      if (!played) {
        Error error = played.error();
        error.text =
            fmt::format("trace {} of seed {} is bad input: {}", number, options_.seed, error.text);
        return tl::unexpected(std::move(error));
      }
      ++outcome_.traces;
      outcome_.operations += played->operations;
      digest.add(played->digest);
      if (!played->finding && number % kTwiceEvery == 0) hold_to_itself(*played);
      if (played->finding) {
        if (const Result<void> noted = note(number, std::move(*played)); !noted)
          return tl::unexpected(noted.error());
      } else if (marks_.reached_new_pair() && corpus_.size() < kMostCorpus) {
        corpus_.push_back(std::move(played->candidate));
      }
      report(number, false);
    }
    outcome_.corpus = corpus_.size();
    outcome_.digest = digest.value;
    outcome_.marks_missed = marks_.missed();
    outcome_.wall_s = std::chrono::duration<double>(Clock::now() - start).count();
    return std::move(outcome_);
  }

 private:
  bool goes_on(std::int64_t number, Clock::time_point start) const {
    if (static_cast<std::int64_t>(outcome_.discoveries.size()) >= options_.findings) return false;
    if (options_.time.count() != 0) return Clock::now() - start < options_.time;
    return number <= options_.traces;
  }

  void report(std::int64_t number, bool shrinking) const {
    if (options_.progress) options_.progress({number, outcome_.discoveries.size(), shrinking});
  }

  /// One trace in four is an earlier one, cut up, spliced and doubled; the others are new.
  Result<Execution> one_trace(Draw& draw) {
    if (!corpus_.empty() && draw.chance(1, 4)) {
      ++outcome_.from_corpus;
      return play(mutated(draw));
    }
    Candidate fresh;
    fresh.player = draw.below(players_.size());
    const PolicyEntry& policy = *players_[fresh.player].policy;
    const Swarm swarm = draw_swarm(draw, policy, options_.run.config);
    fresh.config = swarm.config;
    fresh.scheduled = swarm.scheduled;
    if (!swarm.scheduled) return play_fresh(std::move(fresh), swarm, draw);
    fresh.steps = literal_steps(random_requests(swarm, draw));
    return play(std::move(fresh));
  }

  Result<std::unique_ptr<ReplaySession>> start(const Candidate& candidate,
                                               bool skip_illegal) const {
    RunOptions run = options_.run;
    run.subjects = players_[candidate.player].subjects;
    run.config = candidate.config;
    run.skip_illegal = skip_illegal;
    return ReplaySession::start(run);
  }

  static Result<Execution> executed(Candidate candidate, const ReplaySession& run) {
    if (run.error()) return tl::unexpected(*run.error());
    Execution execution;
    execution.candidate = std::move(candidate);
    execution.digest = run.digest();
    execution.operations = run.event_count();
    if (!run.findings().empty()) execution.finding = run.findings().front();
    return execution;
  }

  /// Operations that are made one after the other, each from what was answered before. What is made
  /// as legal is, and what is made as bad input is not: anything else is an error, or a finding
  /// where the subjects are of two opinions.
  Result<Execution> play_fresh(Candidate candidate, const Swarm& swarm, Draw& draw) const {
    Result<std::unique_ptr<ReplaySession>> started = start(candidate, true);
    if (!started) return tl::unexpected(started.error());
    ReplaySession& run = **started;
    OperationPlayer player(run);
    std::string mistake;
    enum class Made { legal, bad, either };
    const auto say = [&](const Operation& operation, Made made = Made::legal) {
      Step step;
      step.statement.what = operation;
      step.stands = made == Made::bad;
      const Reply* const reply = player.play(std::move(step));
      const bool certain = made != Made::either && !has_child(candidate);
      if (certain && (reply == nullptr) != (made == Made::bad) && !run.stopped())
        mistake =
            fmt::format("`{}` {}", operation.text(),
                        reply == nullptr ? "is bad input" : "should be bad input and was answered");
    };
    const PolicyEntry& policy = *players_[candidate.player].policy;
    RandomTrace random(swarm, policy, player.model(), draw);
    BadInput bad_input(swarm, policy, player.model(), draw);
    for (int i = 0; i < swarm.operations && !run.stopped() && mistake.empty(); ++i) {
      if (!has_child(candidate))
        if (const std::optional<Operation> bad = bad_input.next()) say(*bad, Made::bad);
      if (run.stopped()) break;
      const Operation next = random.next();
      say(next, random.may_be_bad() ? Made::either : Made::legal);
    }
    for (const Operation& operation : random.ending())
      if (!run.stopped()) say(operation);
    for (const Verb verb : {Verb::flush, Verb::check}) {
      Operation operation;
      operation.verb = verb;
      if (!run.stopped()) say(operation);
    }
    run.conclude();
    if (!mistake.empty()) return fail(mistake);
    candidate.steps = std::move(player.played());
    return executed(std::move(candidate), run);
  }

  /// A child is not held to say what is bad input, and may know no tree verbs.
  bool has_child(const Candidate& candidate) const {
    const std::vector<std::string>& subjects = players_[candidate.player].subjects;
    return std::any_of(subjects.begin(), subjects.end(),
                       [](const std::string& name) { return name.starts_with("exec:"); });
  }

  Result<Execution> play(Candidate candidate) const {
    Result<std::unique_ptr<ReplaySession>> started = start(candidate, !candidate.scheduled);
    if (!started) return tl::unexpected(started.error());
    ReplaySession& run = **started;
    if (candidate.scheduled) {
      const Trace trace = as_trace(candidate);
      Simulation(run).play(trace);
      return executed(std::move(candidate), run);
    }
    OperationPlayer player(run);
    for (const Step& step : candidate.steps)
      if (!run.stopped()) player.play(step);
    run.conclude();
    candidate.steps = std::move(player.played());
    return executed(std::move(candidate), run);
  }

  /// A trace of the corpus with a piece dropped, doubled or replaced by a piece of another one of
  /// the same level.
  Candidate mutated(Draw& draw) const {
    Candidate candidate = corpus_[draw.below(corpus_.size())];
    const Candidate& other = corpus_[draw.below(corpus_.size())];
    Steps& steps = candidate.steps;
    for (std::uint64_t times = 1 + draw.below(3); times > 0 && !steps.empty(); --times) {
      const std::size_t first = draw.below(steps.size());
      const std::size_t last =
          first + 1 + draw.below(std::min<std::size_t>(12, steps.size() - first));
      const auto at = [](auto& all, std::size_t i) {
        return all.begin() + static_cast<std::ptrdiff_t>(i);
      };
      const std::uint64_t kind = draw.below(3);
      if (kind == 0) {
        steps.erase(at(steps, first), at(steps, last));
      } else if (kind == 1) {
        const Steps piece(at(steps, first), at(steps, last));
        steps.insert(at(steps, last), piece.begin(), piece.end());
      } else if (candidate.scheduled == other.scheduled) {
        const std::size_t from = draw.below(other.steps.size());
        steps.erase(at(steps, first), steps.end());
        steps.insert(steps.end(), at(other.steps, from), other.steps.end());
      }
    }
    if (candidate.scheduled) make_sensible(candidate);
    return candidate;
  }

  /// A request that comes twice is another one; who was not asked for is not stopped; times, which
  /// never go back, are those of the schedule.
  static void make_sensible(Candidate& candidate) {
    std::set<std::uint32_t> ids;
    std::set<std::uint32_t> sessions;
    int line = 0;
    std::erase_if(candidate.steps, [&](Step& step) {
      step.statement.line = ++line;
      if (auto* const spec = std::get_if<RequestSpec>(&step.statement.what)) {
        spec->at = -1;
        if (spec->rank >= candidate.config.ranks) spec->rank = -1;
        for (int other = line; !ids.insert(spec->id.index()).second; ++other)
          spec->id = Name::intern(fmt::format("x{}", other));
        sessions.insert(spec->session.index());
      }
      if (auto* const stop = std::get_if<Intervention>(&step.statement.what)) {
        stop->at = -1;
        return !ids.contains(stop->id.index());
      }
      const auto* const close = std::get_if<CloseSession>(&step.statement.what);
      return close != nullptr && !sessions.contains(close->session.index());
    });
    line = 0;
    for (Step& step : candidate.steps) step.statement.line = ++line;
  }

  /// The trace that was played, as it is written down and replayed, gives the same run.
  void hold_to_itself(Execution& first) const {
    const Result<std::unique_ptr<ReplaySession>> again = start(first.candidate, false);
    const Trace trace = as_trace(first.candidate);
    if (again) Simulation(**again).play(trace);
    if (again && !(*again)->error() && (*again)->digest() == first.digest) return;
    LocatedFinding located;
    located.finding = {FindingKind::nondeterministic,
                       "the same trace gives another digest when it is played again",
                       fmt::format("{:016x}", first.digest),
                       !again              ? again.error().text
                       : (*again)->error() ? (*again)->error()->text
                                           : fmt::format("{:016x}", (*again)->digest())};
    located.subject = players_[first.candidate.player].subjects.front();
    first.finding = located;
  }

  Result<void> note(std::int64_t number, Execution execution) {
    Discovery found;
    found.trace_number = number;
    found.subjects = players_[execution.candidate.player].subjects;
    found.finding = *execution.finding;
    found.trace = as_trace(execution.candidate);
    found.lines_before = line_count(found.trace);
    if (options_.shrinks && found.finding.finding.kind != FindingKind::nondeterministic) {
      const auto start = Clock::now();
      RunOptions run = options_.run;
      run.subjects = found.subjects;
      ShrinkOptions shrinking;
      shrinking.progress = [&](std::int64_t, std::size_t) { report(number, true); };
      Result<ShrinkOutcome> shrunk = shrink(found.trace, run, shrinking);
      if (!shrunk)
        return fail(fmt::format("trace {} of seed {} shows `{}` and not again when it is replayed",
                                number, options_.seed, to_string(found.finding.finding.kind)));
      found.trace = std::move(shrunk->trace);
      found.finding = std::move(shrunk->finding);
      found.shrink_executions = shrunk->executions;
      found.shrink_s = std::chrono::duration<double>(Clock::now() - start).count();
    }
    outcome_.discoveries.push_back(std::move(found));
    return {};
  }

  const ExploreOptions& options_;
  const std::vector<Player> players_;
  Marks marks_;
  std::vector<Candidate> corpus_;
  ExploreOutcome outcome_;
};

/// Without subjects: every policy beside its oracle.
Result<std::vector<Player>> players_of(const RunOptions& run) {
  std::vector<Player> players;
  if (run.subjects.empty()) {
    for (const OracleEntry& oracle : Registry<OracleEntry>::all())
      if (const PolicyEntry* const policy = Registry<PolicyEntry>::find(oracle.name))
        players.push_back(
            {policy, {std::string(oracle.name), fmt::format("oracle:{}", oracle.name)}});
    return players;
  }
  std::string_view name = run.subjects.front();
  if (name.starts_with("oracle:")) name.remove_prefix(7);
  const PolicyEntry* policy = Registry<PolicyEntry>::find(name);
  // A child is asked what its config's policy understands.
  if (policy == nullptr)
    policy =
        Registry<PolicyEntry>::find(run.config.policy.empty() ? kDefaultPolicy : run.config.policy);
  if (policy == nullptr) return fail(fmt::format("there is no policy `{}` to explore", name));
  players.push_back({policy, run.subjects});
  return players;
}

}  // namespace

Result<ExploreOutcome> explore(const ExploreOptions& options) {
  Result<std::vector<Player>> players = players_of(options.run);
  if (!players) return tl::unexpected(players.error());
  return Explorer(options, std::move(*players)).explore();
}

}  // namespace lockstep::cache_sim
