#include "cache_sim/search/explore.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <set>
#include <utility>

#include "cache_sim/check/exec_subject.hpp"
#include "cache_sim/check/start_subject.hpp"
#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/search/bad_input.hpp"
#include "cache_sim/search/operation_player.hpp"
#include "cache_sim/search/random_requests.hpp"
#include "cache_sim/search/random_trace.hpp"
#include "cache_sim/server/simulation.hpp"
#include "reference/base/mark.hpp"
#include "reference/protocol/near_word.hpp"

namespace lockstep::cache_sim {
namespace {

using Clock = std::chrono::steady_clock;  // for time limits and reported times alone

constexpr std::int64_t kTwiceEvery = 20;
constexpr std::size_t kMostCorpus = 512;

/// A trace to play, and the player for it.
struct Candidate {
  std::size_t player = 0;  // index into the explorer's players
  Config config;
  bool scheduled = false;
  Steps steps;
};

/// The result of a played trace. Its steps are those that were played, without adaptation.
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

/// The code marks that the last trace reached.
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
  /// Whether the last trace reached two marks together that no trace before it reached together.
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
  /// The names of the marks that the trace reached for which reached_new_pair() was asked last.
  std::vector<std::string> reached() const {
    std::vector<std::string> names;
    for (const std::size_t i : reached_) names.push_back(names_[i]);
    std::ranges::sort(names);
    return names;
  }
  std::vector<std::string> missed() const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < counts_.size(); ++i)
      if (*counts_[i] == first_[i]) names.push_back(names_[i]);
    return names;
  }

 private:
  std::vector<std::string> names_;
  std::vector<std::uint64_t> first_;  // the counts before the search
  std::vector<const std::uint64_t*> counts_;
  std::vector<std::uint64_t> before_;
  std::vector<std::size_t> reached_;
  std::set<std::pair<std::size_t, std::size_t>> pairs_;
};

/// A group of subjects that play a trace together, and what is common to all of them.
struct Player {
  std::vector<std::string> subjects;
  Accepted accepted;
  ConfigFields fixed;  ///< config fields that no trace changes
  bool has_child = false;
};

class Explorer {
 public:
  Explorer(const ExploreOptions& options, std::vector<Player> players)
      : options_(options), players_(std::move(players)) {
    for (const auto& [field, value] : Config().fields())
      if (Registry<ConfigOption>::find(field) == nullptr) common_fields_.push_back(field);
  }

  Result<ExploreOutcome> explore() {
    const auto start = Clock::now();
    play_given_corpus();
    Digest digest;
    for (std::int64_t number = 1; goes_on(number, start); ++number) {
      Draw draw(options_.seed, static_cast<std::uint64_t>(number));
      marks_.start();
      Result<Execution> played = one_trace(draw);
      if (!played) {
        Error error = played.error();
        error.text =
            fmt::format("trace {} of seed {} is bad input: {}{}", number, options_.seed, error.text,
                        players_.size() > 1 ? "; --subject chooses the policy" : "");
        return tl::unexpected(std::move(error));
      }
      ++outcome_.traces;
      outcome_.operations += played->operations;
      digest.add(played->digest);
      if (!played->finding && number % kTwiceEvery == 0) check_replays_identically(*played);
      if (played->finding) {
        note(number, std::move(*played));
      } else if (marks_.reached_new_pair() && outcome_.added.size() < kMostCorpus) {
        outcome_.added.push_back({players_[played->candidate.player].subjects,
                                  as_trace(played->candidate), marks_.reached()});
        corpus_.push_back(std::move(played->candidate));
      }
      report(number, false);
    }
    count_defaults();
    outcome_.corpus = corpus_.size();
    outcome_.digest = digest.value;
    outcome_.marks_missed = marks_.missed();
    outcome_.wall_s = std::chrono::duration<double>(Clock::now() - start).count();
    return std::move(outcome_);
  }

 private:
  void play_given_corpus() {
    for (const CorpusTrace& given : options_.corpus) {
      const auto player = std::ranges::find(players_, given.subjects, &Player::subjects);
      if (player == players_.end()) {
        leave_out(given, "its subjects do not play here");
        continue;
      }
      if (!goes_on(0, Clock::now())) return;
      marks_.start();
      Config config = given.trace.config;
      config.drop_idle();
      Result<Execution> played =
          play({.player = static_cast<std::size_t>(player - players_.begin()),
                .config = std::move(config),
                .scheduled = given.trace.scheduler_level,
                .steps = literal_steps(given.trace.statements)});
      if (!played)
        leave_out(given, played.error().text);
      else if (played->finding)
        note(0, std::move(*played));
      else if (marks_.reached_new_pair())
        corpus_.push_back(std::move(played->candidate));
    }
    if (!options_.corpus.empty()) report(0, false);
  }

  void leave_out(const CorpusTrace& given, const std::string& why) {
    if (outcome_.left_out++ == 0)
      outcome_.first_left_out = fmt::format("{}: {}", given.trace.path, why);
  }

  static std::string bucket_of(const std::string& value) {
    constexpr std::uint64_t kExactTo = 16;
    std::uint64_t number = 0;
    const char* const end = value.data() + value.size();
    const std::from_chars_result read = std::from_chars(value.data(), end, number);
    if (read.ec != std::errc() || read.ptr != end || number <= kExactTo) return value;
    return std::to_string(std::bit_floor(number));
  }

  void count_drawn(const Candidate& fresh) {
    const auto count = [&](const std::string& field, const std::string& value) {
      ++outcome_.drawn[field][bucket_of(value)];
    };
    count("subject", players_[fresh.player].subjects.front());
    count("level", fresh.scheduled ? "requests" : "operations");
    for (const std::string& field : common_fields_) count(field, *fresh.config.find(field));
    for (const auto& [field, value] : fresh.config.options) count(field, value);
  }

  /// Options are counted above only where they are not at their defaults.
  void count_defaults() {
    const std::int64_t fresh = outcome_.traces - outcome_.from_corpus;
    for (auto& [field, counts] : outcome_.drawn) {
      const ConfigOption* const option = Registry<ConfigOption>::find(field);
      if (option == nullptr) continue;
      std::int64_t others = 0;
      for (const auto& [value, traces] : counts) others += traces;
      if (fresh > others) counts[bucket_of(std::string(option->otherwise))] += fresh - others;
    }
  }

  bool goes_on(std::int64_t number, Clock::time_point start) const {
    if (static_cast<std::int64_t>(outcome_.discoveries.size()) >= options_.findings) return false;
    if (stops()) return false;
    if (options_.time.count() != 0 && Clock::now() - start >= options_.time) return false;
    return number <= options_.traces;
  }

  bool stops() const { return options_.stops && options_.stops(); }

  void report(std::int64_t number, bool shrinking) const {
    if (options_.progress) options_.progress({number, outcome_.discoveries.size(), shrinking});
  }

  /// Plays one trace. One in four is a mutated trace of the corpus; the others are new.
  Result<Execution> one_trace(Draw& draw) {
    if (!corpus_.empty() && draw.chance(1, 4)) {
      ++outcome_.from_corpus;
      return play(mutated(draw));
    }
    Candidate fresh;
    fresh.player = draw.below(players_.size());
    const Swarm swarm = draw_swarm(draw, players_[fresh.player].accepted, options_.run.config,
                                   players_[fresh.player].fixed);
    fresh.config = swarm.config;
    fresh.scheduled = swarm.scheduled;
    count_drawn(fresh);
    if (!swarm.scheduled) return play_fresh(std::move(fresh), swarm, draw);
    fresh.steps = literal_steps(random_requests(swarm, draw));
    return play(std::move(fresh));
  }

  RunOptions options_for(const Candidate& candidate, bool skip_illegal) const {
    RunOptions run = options_.run;
    run.subjects = players_[candidate.player].subjects;
    run.config = candidate.config;
    run.skip_illegal = skip_illegal;
    return run;
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

  Result<Execution> play_fresh(Candidate candidate, const Swarm& swarm, const Draw& draw) const {
    std::string mistake;
    const auto run = played_run(options_for(candidate, true), [&](ReplaySession& session) {
      Draw own = draw;
      mistake = play_drawn(candidate, session, swarm, own);
    });
    if (!run) return tl::unexpected(run.error());
    if (!mistake.empty()) return fail(mistake);
    return executed(std::move(candidate), **run);
  }

  /// Plays operations that are generated one after another, each from the replies before it. An
  /// operation generated as legal must be legal, and one generated as bad input must be refused. If
  /// all subjects agree otherwise, the generator is wrong, and the returned sentence says so; if
  /// the subjects disagree, that is a finding.
  std::string play_drawn(Candidate& candidate, ReplaySession& run, const Swarm& swarm,
                         Draw& draw) const {
    const Player& who = players_[candidate.player];
    OperationPlayer player(run);
    std::string mistake;
    enum class Made { legal, bad, either };
    const auto say = [&](const Operation& operation, Made made = Made::legal) {
      Step step;
      step.statement.what = operation;
      step.stands = made == Made::bad;
      const Reply* const reply = player.play(std::move(step));
      const bool certain = made != Made::either && !who.has_child;
      if (certain && (reply == nullptr) != (made == Made::bad) && !run.stopped())
        mistake =
            fmt::format("`{}` {}", operation.text(),
                        reply == nullptr ? "is bad input" : "should be bad input and was answered");
    };
    RandomTrace random(swarm, who.accepted, player.model(), draw);
    BadInput bad_input(swarm, who.accepted, player.model(), draw);
    for (int i = 0; i < swarm.operations && !run.stopped() && mistake.empty(); ++i) {
      if (!who.has_child)  // a child may accept bad input
        if (const std::optional<Operation> bad = bad_input.next()) say(*bad, Made::bad);
      if (run.stopped()) break;
      const Operation next = random.next();
      say(next, random.may_be_bad() ? Made::either : Made::legal);
    }
    for (const Operation& operation : random.ending())
      if (!run.stopped()) say(operation);
    for (const Verb verb : {Verb::flush, Verb::check})
      if (!run.stopped()) say(Operation{.verb = verb});
    run.conclude();
    candidate.steps = std::move(player.played());
    return mistake;
  }

  Result<Execution> play(Candidate candidate) const {
    Steps played;
    const RunOptions options = options_for(candidate, !candidate.scheduled);
    const auto run = played_run(options, [&](ReplaySession& session) {
      if (candidate.scheduled) {
        play_trace(session, as_trace(candidate));
        return;
      }
      OperationPlayer player(session);
      for (const Step& step : candidate.steps)
        if (!session.stopped()) player.play(step);
      session.conclude();
      played = std::move(player.played());
    });
    if (!run) return tl::unexpected(run.error());
    if (!candidate.scheduled) candidate.steps = std::move(played);
    return executed(std::move(candidate), **run);
  }

  /// A mutated trace of the corpus: one piece is dropped, doubled, or replaced by a piece of
  /// another trace of the same level.
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

  /// Repairs a mutated trace of requests: a repeated request is renamed, an intervention on an
  /// unknown request is dropped, and times are cleared or made to increase.
  void make_sensible(Candidate& candidate) const {
    const bool server_fields = players_[candidate.player].accepted.can(Capability::draft_trees);
    const bool content_keys = players_[candidate.player].accepted.can(Capability::content_keys);
    std::set<std::uint32_t> ids;
    std::set<std::uint32_t> sessions;
    Nanoseconds latest = 0;
    int line = 0;
    std::erase_if(candidate.steps, [&](Step& step) {
      step.statement.line = ++line;
      if (auto* const spec = std::get_if<RequestSpec>(&step.statement.what)) {
        spec->at = -1;
        // A piece of another player's trace may have fields that this player does not take.
        if (!content_keys) {
          spec->lora = Name();
          for (RequestSpec::Image& image : spec->images) image.name = Name();
        }
        if (!server_fields) {
          spec->branches = 1;
          spec->overrun = spec->external = 0;
        }
        if (spec->rank >= candidate.config.ranks) spec->rank = -1;
        for (int other = line; !ids.insert(spec->id.index()).second; ++other)
          spec->id = Name::intern(fmt::format("x{}", other));
        sessions.insert(spec->session.index());
      }
      if (auto* const run = std::get_if<RunStatement>(&step.statement.what); run && run->until >= 0)
        run->until = latest = std::max(latest, run->until);
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

  /// Replays the trace as it would be written to a file; a run with another digest is a finding.
  void check_replays_identically(Execution& first) const {
    const Trace trace = as_trace(first.candidate);
    const auto again = played_run(options_for(first.candidate, false),
                                  [&](ReplaySession& session) { play_trace(session, trace); });
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

  void note(std::int64_t number, Execution execution) {
    Discovery found;
    found.trace_number = number;
    const Player& who = players_[execution.candidate.player];
    found.subjects = who.subjects;
    found.finding = *execution.finding;
    found.trace = as_trace(execution.candidate);
    found.lines_before = line_count(found.trace);
    if (found.finding.finding.kind != FindingKind::nondeterministic) shrink_discovery(found, who);
    found.lines = line_count(found.trace);
    if (options_.found) {
      options_.found(found);
      // The callback has written the trace; a search with a million findings keeps none in memory.
      found.trace = Trace();
      found.finding.around = {};
    }
    outcome_.discoveries.push_back(std::move(found));
  }

  /// Makes the discovery smaller. A finding that does not show again becomes one of kind
  /// `nondeterministic`.
  void shrink_discovery(Discovery& found, const Player& who) const {
    RunOptions run = options_.run;
    run.subjects = found.subjects;
    run.fixed = who.fixed;
    const auto shows = [&](const Trace& trace, const LocatedFinding& finding) {
      const std::optional<LocatedFinding> again = finding_of(trace, run);
      return again && is_same_finding(*again, finding);
    };
    if (!shows(found.trace, found.finding)) return call_nondeterministic(found, "is not there");
    if (!options_.shrinks) return;
    const auto start = Clock::now();
    ShrinkOptions shrinking;
    shrinking.stops = [&] {
      return stops() ||
             (options_.shrink_time.count() != 0 && Clock::now() - start >= options_.shrink_time);
    };
    shrinking.progress = [&](std::int64_t, std::size_t) { report(found.trace_number, true); };
    Result<ShrinkOutcome> shrunk = shrink(found.trace, run, shrinking);
    const bool is_shown =
        shrunk && (run.defect != nullptr || is_same_finding(shrunk->finding, found.finding));
    if (!is_shown || !shows(shrunk->trace, shrunk->finding))
      return call_nondeterministic(found, "comes and goes");
    found.trace = std::move(shrunk->trace);
    found.finding = std::move(shrunk->finding);
    found.shrink_executions = shrunk->executions;
    found.shrink_s = std::chrono::duration<double>(Clock::now() - start).count();
  }

  void call_nondeterministic(Discovery& found, const char* what_happens) const {
    Finding& finding = found.finding.finding;
    finding = {FindingKind::nondeterministic,
               fmt::format("trace {} of seed {} shows `{}` ({}), which {} when the trace is played "
                           "again",
                           found.trace_number, options_.seed, to_string(finding.kind), finding.text,
                           what_happens),
               finding.expected, finding.actual};
  }

  const ExploreOptions& options_;
  const std::vector<Player> players_;
  Marks marks_;
  std::vector<std::string> common_fields_;  // of every policy's configuration
  std::vector<Candidate> corpus_;
  ExploreOutcome outcome_;
};

Result<Accepted> accepted_by_policy(std::string_view name) {
  const PolicyEntry* const policy = Registry<PolicyEntry>::find(name);
  if (policy == nullptr)
    return fail(fmt::format("there is no policy `{}` to explore{}", name,
                            but_near(name, names_in(Registry<PolicyEntry>::all()))));
  return accepted_by(*policy);
}

/// Sets what the children of a search accept. A child announces the levels of verbs that it
/// understands, and may announce the config fields that it obeys. Other fields keep their defaults.
/// `alone`: all subjects are children.
Result<void> ask_children(const RunOptions& run, bool alone, Player& player) {
  ConfigFields& fields = player.accepted.fields;
  const bool say_all = alone && run.config.policy.empty();
  fields = say_all ? fields_for_children() : fields & fields_for_children();
  player.accepted.has_child = true;
  // No policy has the first one, and the default one lacks the second.
  if (alone) player.accepted.capabilities |= {Capability::sequences, Capability::content_keys};
  for (const std::string& name : player.subjects) {
    const Result<std::unique_ptr<SubjectSeat>> seat = start_subject(name, run);
    if (!seat && seat.error().finding) {  // the first trace reports it
      for (const std::string& field : fields_for_children()) player.fixed.add(field);
      player.accepted.capabilities &= {Capability::tree, Capability::slots, Capability::sequences};
      continue;
    }
    if (!seat) return tl::unexpected(seat.error());
    if (!(*seat)->is_child) continue;
    const ChildGreeting& said = said_by(*(*seat)->subject);
    player.accepted.capabilities &= said.capabilities | Capabilities{Capability::slots};
    const std::optional<ConfigFields>& honoured = said.honoured;
    if (say_all) fields = fields & honoured.value_or(ConfigFields{"page", "overlap"});
    if (!honoured) continue;
    for (const std::string& field : fields_for_children())
      if (!honoured->contains(field)) player.fixed.add(field);
    if (alone && !honoured->contains("state_slots")) player.accepted.has_states = false;
  }
  return {};
}

Result<Player> player_of(std::vector<std::string> subjects, const RunOptions& run) {
  Player player{.subjects = std::move(subjects), .fixed = run.fixed};
  std::vector<std::string_view> policies;
  for (std::string_view subject : player.subjects) {
    if (subject.starts_with("oracle:")) subject.remove_prefix(7);
    if (subject.starts_with("exec:"))
      player.has_child = true;
    else
      policies.push_back(subject);
  }
  // If all subjects are children, their announcements decide which config fields are drawn.
  const bool is_alone = policies.empty();
  if (is_alone)
    policies.push_back(run.config.policy.empty() ? default_policy() : run.config.policy);
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const Result<Accepted> accepted = accepted_by_policy(policies[i]);
    if (!accepted) return tl::unexpected(accepted.error());
    player.accepted = i == 0 ? *accepted : accepted_by_both(player.accepted, *accepted);
  }
  if (player.has_child)
    if (const Result<void> asked = ask_children(run, is_alone, player); !asked)
      return tl::unexpected(asked.error());
  return player;
}

/// The players of a search without subjects: every policy beside its oracle; with numbers in the
/// slots every policy that can have some.
Result<std::vector<Player>> players_of(const RunOptions& run) {
  std::vector<std::vector<std::string>> all;
  if (!run.subjects.empty()) all.push_back(run.subjects);
  for (const OracleEntry& oracle : Registry<OracleEntry>::all()) {
    const PolicyEntry* const policy = Registry<PolicyEntry>::find(oracle.name);
    if (!run.subjects.empty() || policy == nullptr) continue;
    if (policy->tells_forwards || run.config.text(kFidelityField) == "label")
      all.push_back({std::string(oracle.name), fmt::format("oracle:{}", oracle.name)});
  }
  std::vector<Player> players;
  for (std::vector<std::string>& subjects : all) {
    Result<Player> player = player_of(std::move(subjects), run);
    if (!player) return tl::unexpected(player.error());
    players.push_back(std::move(*player));
  }
  return players;
}

/// A search for a planted defect keeps the config that the defect needs, unless the caller has
/// fixed a field of it, or numbers, which not every config can have.
Result<void> keep_needs(RunOptions& run) {
  const DefectEntry* const entry = Registry<DefectEntry>::find(run.defect_name);
  if (entry == nullptr || run.config.text(kFidelityField) != "label") return {};
  Config config = run.config;
  ConfigFields needed;
  if (Result<void> set = config.set_all(entry->needs, &needed); !set) return set;
  for (const std::string& field : needed)
    if (run.fixed.contains(field)) return {};
  run.config = std::move(config);
  for (const std::string& field : needed) run.fixed.add(field);
  return {};
}

}  // namespace

Result<ExploreOutcome> explore(const ExploreOptions& asked) {
  ExploreOptions options = asked;
  if (Result<void> kept = keep_needs(options.run); !kept) return tl::unexpected(kept.error());
  Result<std::vector<Player>> players = players_of(options.run);
  if (!players) return tl::unexpected(players.error());
  return Explorer(options, std::move(*players)).explore();
}

}  // namespace lockstep::cache_sim
