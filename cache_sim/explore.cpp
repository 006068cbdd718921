#include "cache_sim/explore.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "cache_sim/random_trace.hpp"
#include "cache_sim/simulation.hpp"
#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {
namespace {

using Clock = std::chrono::steady_clock;  // budgets and reported times alone

constexpr std::int64_t kTwiceEvery = 20;
constexpr std::size_t kMostCorpus = 512;

/// What a trace came to, and the trace itself, as it can be written down.
struct Execution {
  Trace trace;
  std::optional<LocatedFinding> finding;
  std::uint64_t digest = 0;
  std::int64_t operations = 0;
};

/// Which marks the last trace reached.
class Marks {
 public:
  Marks() {
    for (const MarkEntry& mark : Registry<MarkEntry>::all()) counts_.push_back(mark.count);
    before_.resize(counts_.size());
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

 private:
  std::vector<const std::uint64_t*> counts_;
  std::vector<std::uint64_t> before_;
  std::vector<std::size_t> reached_;
  std::set<std::pair<std::size_t, std::size_t>> pairs_;
};

class Explorer {
 public:
  Explorer(const ExploreOptions& options, const PolicyEntry& policy)
      : options_(options), policy_(policy) {}

  Result<ExploreOutcome> explore() {
    const auto start = Clock::now();
    Digest digest;
    for (std::int64_t number = 1; goes_on(number, start); ++number) {
      Draw draw(options_.seed, static_cast<std::uint64_t>(number));
      marks_.start();
      Result<Execution> played = one_trace(draw);
      if (!played) return tl::unexpected(played.error());
      ++outcome_.traces;
      outcome_.operations += played->operations;
      digest.add(played->digest);
      if (!played->finding && number % kTwiceEvery == 0) hold_to_itself(*played);
      if (played->finding) {
        if (const Result<void> noted = note(number, std::move(*played)); !noted)
          return tl::unexpected(noted.error());
      } else if (marks_.reached_new_pair() && corpus_.size() < kMostCorpus) {
        corpus_.push_back(std::move(played->trace));
      }
      if (options_.progress) options_.progress(number, outcome_.discoveries.size());
    }
    outcome_.corpus = corpus_.size();
    outcome_.digest = digest.value;
    outcome_.wall_s = std::chrono::duration<double>(Clock::now() - start).count();
    return std::move(outcome_);
  }

 private:
  bool goes_on(std::int64_t number, Clock::time_point start) const {
    if (static_cast<std::int64_t>(outcome_.discoveries.size()) >= options_.findings) return false;
    if (options_.time.count() != 0) return Clock::now() - start < options_.time;
    return number <= options_.traces;
  }

  Result<Execution> one_trace(Draw& draw) {
    // Half of what the corpus gives is cut up, spliced and doubled; the rest is new.
    if (!corpus_.empty() && draw.chance(1, 4)) {
      ++outcome_.from_corpus;
      return play(mutated(draw));
    }
    const Swarm swarm = draw_swarm(draw, policy_, options_.run.config);
    if (swarm.scheduled) {
      Trace trace;
      trace.config = swarm.config;
      trace.scheduler_level = true;
      trace.statements = random_requests(swarm, draw);
      return play(std::move(trace));
    }
    return play_operations(swarm, draw);
  }

  Result<std::unique_ptr<Run>> start(const Config& config) const {
    RunOptions run = options_.run;
    run.config = config;
    run.skip_illegal = true;
    return Run::start(run);
  }

  static Result<Execution> executed(Trace trace, Run& run) {
    if (run.error()) return tl::unexpected(*run.error());
    Execution execution;
    execution.trace = std::move(trace);
    execution.digest = run.digest();
    execution.operations = run.event_count();
    if (!run.findings().empty()) execution.finding = run.findings().front();
    return execution;
  }

  Result<Execution> play_operations(const Swarm& swarm, Draw& draw) const {
    Result<std::unique_ptr<Run>> started = start(swarm.config);
    if (!started) return tl::unexpected(started.error());
    Run& run = **started;
    Trace trace;
    trace.config = swarm.config;
    const auto say = [&](const Operation& operation) {
      trace.statements.push_back(
          {.line = static_cast<int>(trace.statements.size()) + 1, .what = operation});
      run.set_place(trace.statements.back().line, 0);
      return run.apply(operation);
    };
    RandomTrace random(swarm, policy_, draw);
    for (int i = 0; i < swarm.operations && !run.stopped(); ++i)
      if (const Reply* const reply = say(random.next())) random.answered(*reply);
    for (Operation end; !run.stopped() && random.next_of_the_end(end);) say(end);
    for (const Verb verb : {Verb::flush, Verb::check}) {
      Operation operation;
      operation.verb = verb;
      if (!run.stopped()) say(operation);
    }
    run.conclude();
    return executed(std::move(trace), run);
  }

  Result<Execution> play(Trace trace) const {
    Result<std::unique_ptr<Run>> started = start(trace.config);
    if (!started) return tl::unexpected(started.error());
    Simulation(**started).play(trace);
    return executed(std::move(trace), **started);
  }

  /// A trace of the corpus with a piece dropped, doubled or replaced by a piece of another one of
  /// the same level.
  Trace mutated(Draw& draw) const {
    Trace trace = corpus_[draw.below(corpus_.size())];
    const Trace& other = corpus_[draw.below(corpus_.size())];
    auto& statements = trace.statements;
    for (std::uint64_t times = 1 + draw.below(3); times > 0 && !statements.empty(); --times) {
      const std::size_t first = draw.below(statements.size());
      const std::size_t last =
          first + 1 + draw.below(std::min<std::size_t>(12, statements.size() - first));
      const auto at = [&](std::size_t i) {
        return statements.begin() + static_cast<std::ptrdiff_t>(i);
      };
      const std::uint64_t kind = draw.below(3);
      if (kind == 0) {
        statements.erase(at(first), at(last));
      } else if (kind == 1 && !trace.scheduler_level) {  // a request arrives once
        const std::vector<Statement> piece(at(first), at(last));
        statements.insert(at(last), piece.begin(), piece.end());
      } else if (trace.scheduler_level == other.scheduler_level && !trace.scheduler_level) {
        const std::size_t from = draw.below(other.statements.size());
        statements.erase(at(first), statements.end());
        statements.insert(statements.end(),
                          other.statements.begin() + static_cast<std::ptrdiff_t>(from),
                          other.statements.end());
      }
    }
    return sensible(std::move(trace));
  }

  /// Lines numbered anew; interventions on requests that are gone go as well.
  static Trace sensible(Trace trace) {
    std::set<std::uint32_t> ids;
    std::erase_if(trace.statements, [&](const Statement& statement) {
      if (const auto* spec = std::get_if<RequestSpec>(&statement.what))
        return !ids.insert(spec->id.index()).second;
      const auto* stop = std::get_if<Intervention>(&statement.what);
      return stop != nullptr && !ids.contains(stop->id.index());
    });
    int line = 0;
    for (Statement& statement : trace.statements) statement.line = ++line;
    return trace;
  }

  void hold_to_itself(Execution& first) const {
    const Result<Execution> again = play(first.trace);
    if (again && again->digest == first.digest) return;
    LocatedFinding located;
    located.finding = {FindingKind::nondeterministic,
                       "the same trace gives another digest when it is played again",
                       fmt::format("{:016x}", first.digest),
                       again ? fmt::format("{:016x}", again->digest) : again.error().text};
    located.subject = options_.run.subjects.front();
    first.finding = located;
  }

  Result<void> note(std::int64_t number, Execution execution) {
    Discovery found;
    found.trace_number = number;
    found.finding = *execution.finding;
    found.lines_before = line_count(execution.trace);
    found.trace = std::move(execution.trace);
    if (options_.shrinks && found.finding.finding.kind != FindingKind::nondeterministic) {
      const auto start = Clock::now();
      Result<ShrinkOutcome> shrunk = shrink(found.trace, options_.run);
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
  const PolicyEntry& policy_;
  Marks marks_;
  std::vector<Trace> corpus_;
  ExploreOutcome outcome_;
};

}  // namespace

Result<ExploreOutcome> explore(const ExploreOptions& options) {
  const std::string& first = options.run.subjects.front();
  const std::string_view name = std::string_view(first).starts_with("oracle:")
                                    ? std::string_view(first).substr(7)
                                    : std::string_view(first);
  const PolicyEntry* policy = Registry<PolicyEntry>::find(name);
  // A child is asked what its config's policy understands.
  if (policy == nullptr)
    policy = Registry<PolicyEntry>::find(
        options.run.config.policy.empty() ? "sglang-no-buffer" : options.run.config.policy);
  if (policy == nullptr) return fail(fmt::format("there is no policy `{}` to explore", name));
  return Explorer(options, *policy).explore();
}

}  // namespace lockstep::cache_sim
