#include "cache_sim/search/shrink.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "cache_sim/check/trace_player.hpp"
#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/search/branch_names.hpp"
#include "cache_sim/search/detours.hpp"
#include "cache_sim/search/operation_player.hpp"
#include "cache_sim/search/rewrites.hpp"
#include "cache_sim/server/simulation.hpp"
#include "reference/base/overloaded.hpp"

namespace lockstep::cache_sim {
namespace {

// --- Playing -------------------------------------------------------------------------------------

bool is_scheduled(const Steps& steps) {
  return std::ranges::any_of(steps, [](const Step& step) {
    return std::holds_alternative<RequestSpec>(step.statement.what);
  });
}

/// The trace of a candidate, without statements about requests that were removed.
Trace as_trace(const TraceForm& candidate) {
  Trace trace;
  trace.config = candidate.config;
  trace.scheduler_level = is_scheduled(candidate.steps);
  std::set<std::uint32_t> ids;
  std::set<std::uint32_t> sessions;
  for (const Step& step : candidate.steps) {
    const bool makes_sense = std::visit(
        Overloaded{
            [&](const RequestSpec& spec) {
              sessions.insert(spec.session.index());
              return ids.insert(spec.id.index()).second;
            },
            [&](const Intervention& stop) { return ids.contains(stop.id.index()); },
            [&](const Expect& expect) {
              return !trace.scheduler_level || ids.contains(expect.id.index());
            },
            [&](const CloseSession& close) { return sessions.contains(close.session.index()); },
            [](const auto&) { return true; }},
        step.statement.what);
    if (!makes_sense) continue;
    trace.statements.push_back(step.statement);
    trace.statements.back().line = static_cast<int>(trace.statements.size());
    trace.statements.back().answer_line = trace.statements.back().line;
  }
  return trace;
}

struct Played {
  std::optional<LocatedFinding> finding;
  Steps steps;  ///< the steps that were played, up to the finding
};

Played play_scheduled(const Trace& trace, ReplaySession& run) {
  Played played;
  play_trace(run, trace);
  std::size_t end = trace.statements.size();
  if (!run.findings().empty() && run.findings().front().line > 0)
    end = std::min(end, static_cast<std::size_t>(run.findings().front().line));
  for (std::size_t i = 0; i < end; ++i) played.steps.push_back({trace.statements[i]});
  return played;
}

Played play_operations(const Steps& steps, ReplaySession& run) {
  OperationPlayer player(run);
  for (const Step& step : steps)
    if (!run.stopped()) player.play(step);
  run.set_place(0, 0);
  run.conclude();
  return {.finding = std::nullopt, .steps = std::move(player.played())};
}

bool has_answers(const Steps& steps) {
  return std::ranges::any_of(steps,
                             [](const Step& step) { return !step.statement.answer.empty(); });
}

/// Plays a trace with expected answers. An answer belongs to the operation as it was written, so a
/// candidate in which an operation would have to be adapted is rejected.
std::optional<Played> play_answered(const Steps& steps, ReplaySession& run) {
  OperationPlayer player(run);
  for (const Step& step : steps) {
    if (run.stopped()) break;
    const Reply* const reply = player.play(step);
    if (reply == nullptr) continue;
    if (std::get<Operation>(player.played().back().statement.what).text() !=
        std::get<Operation>(step.statement.what).text())
      return std::nullopt;
    check_answer(run, player.played().back().statement, *reply);
  }
  run.set_place(0, 0);
  run.conclude();
  Played played{.finding = std::nullopt, .steps = std::move(player.played())};
  if (!run.findings().empty() && run.findings().front().line > 0)
    played.steps.resize(
        std::min(played.steps.size(), static_cast<std::size_t>(run.findings().front().line)));
  return played;
}

// --- Shrinking -----------------------------------------------------------------------------------

/// KV tokens of a pool that is larger than a trace that can be read.
constexpr std::int64_t kSmallPool = 1024;

/// A detour is so many legs of so many traces, each with at most so many lines more; there are
/// fewer legs for a trace of a dozen lines, and none for one of so few.
constexpr std::size_t kFewLines = 8;
constexpr int kLegs = 180, kFewLegs = 30, kLegLength = 400;
constexpr std::size_t kLonger = 4;

/// A field of the config that was lowered early may be what the lines that are left stand for. And
/// a planted defect is shown by any finding that is not there without it.
enum class Way { first, keeps_config, any_finding };

class Shrinker {
 public:
  Shrinker(const RunOptions& run, const ShrinkOptions& options, Way way)
      : run_(run),
        options_(options),
        keeps_config_(way == Way::keeps_config),
        takes_any_(way == Way::any_finding) {
    run_.skip_illegal = true;
    run_.keep_events = false;
  }

  Result<ShrinkOutcome> shrink(const Trace& trace) {
    best_.config = trace.config;
    best_.steps = literal_steps(trace.statements);
    const std::optional<Played> first = play(best_);
    if (!first || !first->finding)
      return fail("the trace ends without a finding, so there is nothing to shrink");
    sought_ = *first->finding;
    first_config_ = trace.config;
    adopt(best_.config, *first);
    const Config numbered = best_.config;
    const bool at_labels = leave_numbers();
    has_branch_names_ = name_by_branch();
    if (!has_branch_names_) tell_repeats_apart();
    set_pool(kSmallPool);
    if (takes_any_) check_early();
    do {
      while (get_smaller() || lower_lists() || take_other_form()) continue;
    } while (std::exchange(keeps_config_, false));
    // A passed deadline can stand for a line.
    on_operation([](Operation& o, Step&) { return set(o.late, false); });
    set_pool(Config().kv_tokens);
    rename();
    if (at_labels) bring_back_numbers(numbered);
    ShrinkOutcome outcome;
    outcome.trace = as_trace(best_);
    outcome.finding = finding_;
    outcome.executions = executions_;
    return outcome;
  }

 private:
  /// Plays a candidate; nothing if it is no legal trace.
  std::optional<Played> play(const TraceForm& candidate) {
    if (executions_ >= options_.most_executions) return std::nullopt;
    if (executions_ != 0 && options_.stops && options_.stops()) return std::nullopt;
    ++executions_;
    if (options_.progress) options_.progress(executions_, best_.steps.size());
    const Trace trace = as_trace(candidate);
    run_.config = candidate.config;
    run_.config.drop_idle();
    std::optional<Played> played;
    const auto run = played_run(run_, [&](ReplaySession& session) {
      played = trace.scheduler_level          ? play_scheduled(trace, session)
               : has_answers(candidate.steps) ? play_answered(candidate.steps, session)
                                              : play_operations(candidate.steps, session);
    });
    if (!run || !played || (*run)->error()) return std::nullopt;
    if (!(*run)->findings().empty()) played->finding = (*run)->findings().front();
    return played;
  }

  /// Takes the candidate if it still shows the finding. It must not be larger.
  bool attempt(const TraceForm& candidate) {
    const std::optional<Played> played = play(candidate);
    if (!played || !shows(*played)) return false;
    adopt(candidate.config, *played);
    return true;
  }

  bool shows(const Played& played) const {
    return played.finding && (takes_any_ || is_same_finding(*played.finding, sought_));
  }

  void adopt(const Config& config, const Played& played) {
    best_.config = config;
    best_.config.drop_idle();
    best_.steps = played.steps;
    finding_ = *played.finding;
  }

  /// Numbers explain a wrong label and decide nothing: smaller traces are sought with labels alone,
  /// which run several times as fast.
  bool leave_numbers() {
    TraceForm labels = best_;
    for (const std::string_view field : {kFidelityField, kModelField})
      labels.config.put(field, *Config().find(field));
    return labels.config.text(kFidelityField) != best_.config.text(kFidelityField) &&
           attempt(labels);
  }

  void bring_back_numbers(const Config& numbered) {
    TraceForm candidate = best_;
    for (const std::string_view field : {kFidelityField, kModelField})
      candidate.config.put(field, numbered.text(field));
    attempt(candidate);
  }

  /// Ends the trace with a check, behind the first line after which that finds something.
  void check_early() {
    for (std::size_t end = 1; end < best_.steps.size(); ++end) {
      TraceForm candidate = best_;
      candidate.steps.resize(end);
      candidate.steps.push_back(step_of(Operation{.verb = Verb::check}));
      if (attempt(candidate)) return;
    }
  }

  /// Whether one of the steps made the trace smaller.
  bool get_smaller() {
    const std::size_t before = size();
    drop_lines();
    drop_padding();
    join_lines();
    drop_features();
    lower_config();
    shorten_tokens();
    has_branch_names_ ? merge_branches() : merge_documents();
    return size() != before;
  }

  /// Whether the trace has got fewer lines. Forms that cost more executions come later.
  bool take_other_form() {
    const TakesForm takes = [this](const TraceForm& form) { return attempt(form); };
    return take_shorter_form(best_, takes) || take_detour() ||
           take_distant_form(best_, field_values(), takes);
  }

  /// The size that shrinking reduces: lines first, then tokens, then everything that differs from
  /// defaults.
  std::size_t size() const {
    std::size_t sum = best_.steps.size() * 1000 + best_.config.changed().size();
    for (const Step& step : best_.steps)
      for (const Tokens& tokens : tokens_of(step.statement)) sum += tokens.size();
    return sum;
  }

  /// Walks from trace to trace, each the one before it with a few random changes and at most a few
  /// lines longer than the first one, until one has fewer lines. Each leg begins at the first one.
  /// A child, which takes milliseconds for a trace, goes one leg.
  bool take_detour() {
    if (best_.steps.size() <= kFewLines || !is_of_operations(best_.steps)) return false;
    const TraceForm start = best_;
    const LocatedFinding found = finding_;
    const FieldValues values = values_on_the_way();
    const int legs = choices_->empty() ? 1 : start.steps.size() > kLongTrace ? kLegs : kFewLegs;
    for (int leg = 0; leg < legs; ++leg) {
      best_ = start;
      for (int i = 0; i < kLegLength; ++i) {
        const TraceForm form = detour(best_, values, way_);
        const std::optional<Played> played = play(form);
        if (!played || !shows(*played) || played->steps.size() > start.steps.size() + kLonger)
          continue;
        adopt(form.config, *played);
        if (best_.steps.size() < start.steps.size()) return true;
      }
    }
    best_ = start;
    finding_ = found;
    return false;
  }

  /// Values that fields may get on a detour. A pool of the default size would make it slow.
  FieldValues values_on_the_way() {
    if (!choices_) choices_ = choices_for(run_);
    FieldValues values = more_of_all();
    for (const FieldValues& more : {*choices_, field_values()})
      values.insert(values.end(), more.begin(), more.end());
    std::erase_if(values, [](const auto& value) { return value.first == "kv_tokens"; });
    return values;
  }

  /// Twice as much of what the trace has little of.
  FieldValues more_of_all() const {
    FieldValues values;
    for (const std::string& field : best_.config.changed()) {
      const Result<std::int64_t> now =
          parse_integer(*best_.config.find(field), 1, std::int64_t{1} << 20);
      if (now && !run_.fixed.contains(field)) values.emplace_back(field, std::to_string(2 * *now));
    }
    return values;
  }

  /// Values of fields that may have been lowered, or left, too early: the default, and what the
  /// trace began with.
  FieldValues field_values() const {
    FieldValues values;
    for (const Config* const config : {&best_.config, &first_config_})
      for (const std::string& field : config->changed()) {
        if (field == "policy" || run_.fixed.contains(field)) continue;
        values.emplace_back(field,
                            *(config == &best_.config ? Config() : first_config_).find(field));
      }
    return values;
  }

  void drop_lines() { drop_lines(std::max<std::size_t>(1, best_.steps.size() / 2)); }

  /// Leaves out runs of so many lines, and then shorter ones.
  void drop_lines(std::size_t piece) {
    for (;;) {
      bool dropped = false;
      for (std::size_t at = 0; at < best_.steps.size();) {
        TraceForm candidate = best_;
        const std::size_t end = std::min(at + piece, candidate.steps.size());
        candidate.steps.erase(candidate.steps.begin() + static_cast<std::ptrdiff_t>(at),
                              candidate.steps.begin() + static_cast<std::ptrdiff_t>(end));
        if (attempt(candidate))
          dropped = true;
        else
          at += piece;
      }
      if (piece > 1)
        piece /= 2;
      else if (!dropped)
        return;
    }
  }

  /// Removes a line that only holds memory together with that memory.
  void drop_padding() {
    for (std::size_t i = 0; i < best_.steps.size();) {
      const auto* const operation = std::get_if<Operation>(&best_.steps[i].statement.what);
      const std::int64_t tokens =
          operation == nullptr ? 0 : std::max<std::int64_t>(0, operation->n);
      if (operation == nullptr ||
          !(drop_with(i, 1, 0) || drop_with(i, 3, 0) || (tokens != 0 && drop_with(i, 0, tokens))))
        ++i;
    }
  }

  bool drop_with(std::size_t line, std::int64_t states, std::int64_t tokens) {
    TraceForm candidate = best_;
    candidate.steps.erase(candidate.steps.begin() + static_cast<std::ptrdiff_t>(line));
    if (!run_.fixed.contains("state_slots")) candidate.config.state_slots -= states;
    if (!run_.fixed.contains("kv_tokens"))
      candidate.config.kv_tokens -= tokens / candidate.config.page * candidate.config.page;
    return candidate.config.state_slots > 0 && candidate.config.kv_tokens > 0 && attempt(candidate);
  }

  /// Joins two advances of one slot, its alloc and an advance, and two extends of one request, into
  /// one operation that computes both tokens, at the place of the first or of the second.
  void join_lines() {
    for (std::size_t i = 0; i < best_.steps.size(); ++i) {
      for (std::size_t j = i + 1; j < best_.steps.size(); ++j) {
        TraceForm earlier = best_;
        Step& first = earlier.steps[i];
        const auto* const one = std::get_if<Operation>(&first.statement.what);
        const auto* const other = std::get_if<Operation>(&earlier.steps[j].statement.what);
        if (one == nullptr || other == nullptr || !can_join(*one, *other)) continue;
        if (!first.statement.answer.empty() || !earlier.steps[j].statement.answer.empty()) continue;
        Operation joined = *one;
        joined.tokens.append(other->tokens);
        if (joined.verb == Verb::extend) joined.n += other->n;
        first.statement.what = joined;
        first.rest = earlier.steps[j].rest;
        TraceForm later = earlier;
        later.steps[j] = first;
        earlier.steps.erase(earlier.steps.begin() + static_cast<std::ptrdiff_t>(j));
        later.steps.erase(later.steps.begin() + static_cast<std::ptrdiff_t>(i));
        if (attempt(earlier) || attempt(later)) --j;
        if (j >= best_.steps.size()) break;
      }
    }
  }

  static bool can_join(const Operation& one, const Operation& other) {
    if (other.verb == Verb::advance)
      return one.verb == Verb::alloc ? one.as == other.slot
                                     : one.verb == Verb::advance && one.slot == other.slot;
    const auto computes = [](const Operation& operation) {
      return operation.verb == Verb::extend && operation.drafts.empty() && !operation.async;
    };
    return computes(one) && computes(other) && one.id == other.id;
  }

  /// Applies a change to a copy of each statement in turn.
  template <class Change>
  void change_each(Change change) {
    for (std::size_t i = 0; i < best_.steps.size(); ++i) {
      TraceForm candidate = best_;
      if (change(candidate.steps[i])) attempt(candidate);
    }
  }

  template <class T>
  static bool set(T& field, const T& value) {
    if (field == value) return false;
    field = value;
    return true;
  }

  /// Tries a change on each operation, and on each request, by itself.
  template <class Change>
  void on_operation(const Change& change) {
    change_each([&](Step& step) {
      auto* const operation = std::get_if<Operation>(&step.statement.what);
      return operation != nullptr && change(*operation, step);
    });
  }
  template <class Change>
  void on_request(const Change& change) {
    change_each([&](Step& step) {
      auto* const spec = std::get_if<RequestSpec>(&step.statement.what);
      return spec != nullptr && change(*spec);
    });
  }

  /// Resets each field to its default.
  void drop_features() {
    drop_features_of_operations();
    drop_features_of_requests();
    change_each([](Step& step) {
      auto* const run = std::get_if<RunStatement>(&step.statement.what);
      if (run == nullptr) return false;
      const bool had_steps = set(run->steps, std::int64_t{-1});
      return set(run->until, Nanoseconds{-1}) || had_steps;
    });
    drop_salts();
  }

  void drop_features_of_operations() {
    on_operation([](Operation& o, Step&) { return set(o.prompt, Operation::kAbsent); });
    on_operation([](Operation& o, Step&) {  // truncate needs the field
      return o.verb != Verb::truncate && set(o.up_to, Operation::kAbsent);
    });
    on_operation([](Operation& o, Step&) { return set(o.partial, false); });
    on_operation([](Operation& o, Step&) { return set(o.limit, Operation::kAbsent); });
    on_operation([](Operation& o, Step&) {
      return o.verb == Verb::admit && set(o.room, Operation::kAbsent);
    });
    on_operation([](Operation& o, Step&) { return set(o.prev, Operation::kAbsent); });
    on_operation([](Operation& o, Step&) { return set(o.insert, true); });
    on_operation([](Operation& o, Step&) {
      o.parents.clear();
      return set(o.drafts, Tokens());
    });
    on_operation([](Operation& o, Step&) { return set(o.parents, std::vector<std::int64_t>()); });
    on_operation([](Operation& o, Step&) { return set(o.padded, Operation::kAbsent); });
    on_operation([](Operation& o, Step&) { return set(o.external, Operation::kAbsent); });
    on_operation([](Operation& o, Step&) { return set(o.lora, Name()); });
    on_operation([](Operation& o, Step&) { return set(o.images, std::vector<ImageSpan>()); });
    on_operation([](Operation& o, Step&) {
      if (o.images.size() < 2) return false;
      o.images.pop_back();
      return true;
    });
    on_operation([](Operation& o, Step& step) {
      return o.verb == Verb::extend && o.drafts.empty() && set(step.rest, std::int64_t{0});
    });
    on_operation([](Operation& o, Step&) { return o.kv > 0 && set(o.kv, std::int64_t{0}); });
    on_operation([](Operation& o, Step&) { return o.state > 0 && set(o.state, std::int64_t{0}); });
  }

  void drop_features_of_requests() {
    on_request([](RequestSpec& spec) { return set(spec.lora, Name()); });
    on_request([](RequestSpec& spec) {
      const bool changed = !spec.drafts.empty();
      spec.drafts.clear();
      spec.accept.clear();
      return changed;
    });
    on_request([](RequestSpec& spec) { return set(spec.branches, std::int64_t{1}); });
    on_request([](RequestSpec& spec) { return set(spec.overrun, std::int64_t{0}); });
    on_request([](RequestSpec& spec) { return set(spec.external, std::int64_t{0}); });
    on_request([](RequestSpec& spec) { return !std::exchange(spec.images, {}).empty(); });
    on_request([](RequestSpec& spec) { return set(spec.at, Nanoseconds{-1}); });
    const auto shorten_output = [](RequestSpec& spec, std::uint32_t to) {
      if (spec.stops || to == 0 || to >= spec.output_size()) return false;
      spec.tokens = spec.tokens.prefix(spec.prompt_size + to);
      return true;
    };
    on_request([&](RequestSpec& spec) { return shorten_output(spec, 1); });
    on_request([&](RequestSpec& spec) { return shorten_output(spec, spec.output_size() / 2); });
    on_request([&](RequestSpec& spec) { return shorten_output(spec, spec.output_size() - 1); });
    on_request([](RequestSpec& spec) { return set(spec.priority, std::int64_t{0}); });
    on_request([](RequestSpec& spec) { return set(spec.session, Name()); });
  }

  void drop_salts() {
    TraceForm unsalted = best_;
    bool salted = false;
    for (Step& step : unsalted.steps) {
      if (auto* operation = std::get_if<Operation>(&step.statement.what))
        salted |= set(operation->salt, Name());
      if (auto* spec = std::get_if<RequestSpec>(&step.statement.what))
        salted |= set(spec->salt, Name());
    }
    if (salted) attempt(unsalted);
  }

  /// Pools of the default size make an execution several times as long, so what the trace needs is
  /// sought with a smaller one.
  void set_pool(std::int64_t kv_tokens) {
    TraceForm candidate = best_;
    candidate.config.kv_tokens = kv_tokens;
    for (Step& step : candidate.steps)  // who asks for a whole pool goes on asking for that
      if (auto* operation = std::get_if<Operation>(&step.statement.what))
        if (operation->room == best_.config.kv_tokens) operation->room = kv_tokens;
    if (!run_.fixed.contains("kv_tokens") && best_.config.kv_tokens >= kSmallPool)
      attempt(candidate);
  }

  void lower_config() {
    if (keeps_config_) return;
    for (const std::string& field : best_.config.changed()) {
      if (field == "policy" || run_.fixed.contains(field)) continue;
      const bool is_pool = field == "kv_tokens";
      if (is_pool && best_.config.kv_tokens == kSmallPool) continue;
      const auto takes = [&](const std::string& value) {
        TraceForm candidate = best_;
        return candidate.config.set(field, value) && attempt(candidate);
      };
      if ((is_pool && takes(std::to_string(kSmallPool))) || takes(*Config().find(field))) continue;
      lower_field(field);
    }
  }

  /// Whether a list has got smaller. A smaller list can ask for more lines, so the lines come
  /// first.
  bool lower_lists() {
    if (keeps_config_) return false;
    const Config before = best_.config;
    for (const std::string& field : before.changed())
      if (field != "policy" && !run_.fixed.contains(field)) lower_list(field);
    return best_.config.fields() != before.fields();
  }

  /// Takes elements out of a list, and lowers the numbers at the ends of those that stay.
  void lower_list(const std::string& field) {
    const auto with = [&](const std::vector<std::string>& elements) {
      TraceForm candidate = best_;
      return candidate.config.set(field, fmt::format("{}", fmt::join(elements, ","))) &&
             attempt(candidate);
    };
    std::vector<std::string> elements;
    std::istringstream list(*best_.config.find(field));
    for (std::string element; std::getline(list, element, ',');) elements.push_back(element);
    for (std::size_t i = elements.size() > 1 ? elements.size() : 0; i-- > 0;) {
      std::vector<std::string> fewer = elements;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      if (!fewer.empty() && with(fewer)) elements = fewer;
    }
    for (std::string& element : elements) {
      const std::size_t begin = element.rfind(':') + 1;  // 0 where there is none
      const Result<std::int64_t> number =
          parse_integer(element.substr(begin), 2, std::int64_t{1} << 40);
      if (begin == 0 || !number) continue;
      const std::string before = element;
      for (const std::int64_t lower : {std::int64_t{1}, *number / 2}) {
        element = before.substr(0, begin) + std::to_string(lower);
        if (with(elements)) break;
        element = before;
      }
    }
  }

  /// Lowers a number towards 1, in large steps first.
  void lower_field(const std::string& field) {
    for (;;) {
      const Result<std::int64_t> now =
          parse_integer(*best_.config.find(field), 1, std::int64_t{1} << 40);
      if (!now || *now == 1) return;
      const auto lowered = [&](std::int64_t value) {
        TraceForm candidate = best_;
        return candidate.config.set(field, std::to_string(value)) && attempt(candidate);
      };
      if (!lowered(1) && !lowered(*now / 2) && !lowered(*now - 1)) return;
    }
  }

  // --- Tokens ------------------------------------------------------------------------------------

  /// The token lists of a statement. An output that is given as a length is no list: no other line
  /// can name its tokens.
  static std::vector<Tokens> tokens_of(const Statement& statement) {
    if (const auto* operation = std::get_if<Operation>(&statement.what))
      return {operation->tokens, operation->drafts};
    if (const auto* spec = std::get_if<RequestSpec>(&statement.what)) {
      std::vector<Tokens> tokens = {spec->tokens.prefix(spec->prompt_size)};
      if (spec->stops) tokens.push_back(spec->tokens.slice(spec->prompt_size, spec->tokens.size()));
      return tokens;
    }
    return {};
  }

  /// A candidate in which `map` replaces every token; a token that it maps to nothing is removed.
  template <class Map>
  TraceForm mapped(Map map) const {
    const auto apply = [&](const Tokens& tokens) {
      std::vector<Token> values;
      for (const Token token : tokens.values())
        if (const std::optional<Token> to = map(token)) values.push_back(*to);
      return Tokens::of_values(values);
    };
    TraceForm candidate = best_;
    for (Step& step : candidate.steps) {
      if (auto* operation = std::get_if<Operation>(&step.statement.what)) {
        if (!operation->tokens.empty()) operation->tokens = apply(operation->tokens);
        if (!operation->drafts.empty()) operation->drafts = apply(operation->drafts);
      }
      if (auto* spec = std::get_if<RequestSpec>(&step.statement.what)) {
        const Tokens prompt = apply(spec->tokens.prefix(spec->prompt_size));
        const Tokens output = spec->tokens.slice(spec->prompt_size, spec->tokens.size());
        spec->tokens = prompt.followed_by(spec->stops ? apply(output) : output);
        spec->prompt_size = prompt.size();
        std::erase_if(spec->images,
                      [&](const RequestSpec::Image& image) { return image.end() > prompt.size(); });
      }
    }
    // A statement whose sequence has become empty has lost its meaning.
    std::erase_if(candidate.steps, [](const Step& step) {
      if (const auto* operation = std::get_if<Operation>(&step.statement.what))
        return operation->tokens.empty() &&
               (operation->verb == Verb::admit || operation->verb == Verb::accept ||
                operation->verb == Verb::advance || operation->verb == Verb::match ||
                operation->verb == Verb::insert || operation->verb == Verb::lock);
      const auto* spec = std::get_if<RequestSpec>(&step.statement.what);
      return spec != nullptr && (spec->prompt_size == 0 || spec->output_size() == 0);
    });
    return candidate;
  }

  /// A candidate in which `map(token, k)` replaces the k-th occurrence, counted from 0, of a token
  /// in its sequence. Tokens of an extend continue the sequence of their request.
  template <class Map>
  TraceForm with_occurrences(Map map) const {
    using Occurrences = std::map<Token, std::uint32_t>;
    const auto apply = [&](Tokens& tokens, Occurrences& seen) {
      std::vector<Token> values = tokens.values();
      for (Token& token : values) token = map(token, seen[token]++);
      tokens = Tokens::of_values(values);
    };
    std::map<std::uint32_t, Occurrences> of_request;
    TraceForm candidate = best_;
    for (Step& step : candidate.steps) {
      if (auto* operation = std::get_if<Operation>(&step.statement.what)) {
        const bool continues = operation->verb == Verb::extend || operation->verb == Verb::accept;
        Occurrences begun;
        Occurrences& seen =
            continues || operation->verb == Verb::admit ? of_request[operation->id.index()] : begun;
        if (!continues) seen.clear();
        apply(operation->tokens, seen);
        Occurrences of_drafts = seen;
        apply(operation->drafts, of_drafts);
      }
      if (auto* spec = std::get_if<RequestSpec>(&step.statement.what)) {
        Occurrences seen;
        apply(spec->tokens, seen);
      }
    }
    return candidate;
  }

  /// A token that occurs several times in a sequence cannot be removed at one place alone. So the
  /// k-th occurrence of an explicit id becomes token k of a document: equal prefixes stay equal,
  /// different ones different.
  void tell_repeats_apart() {
    std::map<Token, Document> document_of;
    with_occurrences([&](Token token, std::uint32_t k) {
      if (k != 0 && token >> 32 == 0) document_of.emplace(token, 0);
      return token;
    });
    if (document_of.empty()) return;
    const std::vector<Document> taken = documents();
    Document next = 1;
    for (auto& [token, document] : document_of) {
      while (std::ranges::find(taken, next) != taken.end()) ++next;
      document = next++;
    }
    attempt(with_occurrences([&](Token token, std::uint32_t k) {
      const auto repeated = document_of.find(token);
      return repeated == document_of.end() ? token : token_of(repeated->second, k);
    }));
  }

  /// Pieces of documents between the positions where some sequence begins, ends or leaves the
  /// document.
  std::vector<std::pair<Token, Token>> pieces() const {
    std::set<Token> edges;
    std::set<Token> present;
    for (const Step& step : best_.steps)
      for (const Tokens& tokens : tokens_of(step.statement)) {
        Token last = 0;
        for (const Token token : tokens.values()) {
          present.insert(token);
          if (token != last + 1) edges.insert({token, last + 1});
          last = token;
        }
        edges.insert(last + 1);
      }
    std::vector<std::pair<Token, Token>> all;
    for (const Token token : present) {
      if (all.empty() || all.back().second != token || edges.contains(token))
        all.push_back({token, token});
      all.back().second = token + 1;
    }
    return all;
  }

  void shorten_tokens() {
    const std::vector<std::pair<Token, Token>> all = pieces();
    for (auto piece = all.rbegin(); piece != all.rend(); ++piece) {
      auto [first, last] = *piece;
      for (Token gone = last - first; gone > 0;) {
        const Token from = last - gone;
        if (attempt(mapped([&, to = last](Token token) {
              return token >= from && token < to ? std::nullopt : std::optional(token);
            })))
          last = from;
        gone = std::min(gone / 2, last - first);
      }
    }
  }

  std::vector<Document> documents() const {
    std::vector<Document> all;
    for (const Step& step : best_.steps)
      for (const Tokens& tokens : tokens_of(step.statement))
        for (const Token token : tokens.values()) {
          const auto document = static_cast<Document>(token >> 32);
          if (std::ranges::find(all, document) == all.end()) all.push_back(document);
        }
    return all;
  }

  static std::optional<Token> moved(Token token, Document from, Document to) {
    return token >> 32 == from ? token_of(to, static_cast<std::uint32_t>(token)) : token;
  }

  void merge_documents() {
    const std::vector<Document> all = documents();
    for (std::size_t i = 1; i < all.size(); ++i)
      for (std::size_t j = 0; j < i; ++j)
        if (attempt(mapped([&](Token token) { return moved(token, all[i], all[j]); }))) break;
  }

  // --- Names -------------------------------------------------------------------------------------

  /// Names tokens by branch. False if the finding depends on the tokens' names.
  bool name_by_branch() { return attempt({best_.config, named_by_branch(best_.steps).steps}); }

  /// Makes a branch continue as a branch beside it does.
  void merge_branches() {
    for (bool merged = true; merged;) {
      merged = false;
      const BranchNames now = named_by_branch(best_.steps);
      if (!attempt({best_.config, now.steps})) return;
      for (auto branch = now.begins_after.rbegin(); branch != now.begins_after.rend() && !merged;
           ++branch)
        merged = merge_branch(branch->first, branch->second, now);
    }
  }

  bool merge_branch(Document branch, Token after, const BranchNames& now) {
    std::vector<Token> beside;  // first tokens of the branches that begin at the same place
    if (after != 0) beside.push_back(after + 1);
    for (const auto& [other, place] : now.begins_after)
      if (other < branch && place == after) beside.push_back(token_of(other, 0));
    return std::ranges::any_of(beside, [&](Token first) {
      const TraceForm merged = mapped([&](Token token) -> std::optional<Token> {
        return token >> 32 == branch ? first + static_cast<std::uint32_t>(token) : token;
      });
      return attempt({merged.config, named_by_branch(merged.steps).steps});
    });
  }

  /// Names documents a, b, … without gaps, and requests r1, r2, …, both in order of appearance.
  /// This does not change the size, so it is done once, and kept only if the finding stays.
  void rename() {
    if (!has_branch_names_ || !name_by_branch()) rename_documents();
    rename_requests_and_slots();
  }

  void rename_documents() {
    const std::vector<Document> all = documents();
    // By the first token of a piece: the number of tokens of its document that are named before it.
    std::map<Token, std::uint32_t> place;
    std::map<Token, std::uint32_t> used;
    for (const auto& [begin, end] : pieces()) {
      std::uint32_t& before = used[begin >> 32];
      place.emplace(begin, before);
      before += static_cast<std::uint32_t>(end - begin);
    }
    Document next = 1;
    std::map<Token, Document> to;
    for (const Document document : all)
      if (document != 0) to.emplace(document, next++);
    attempt(mapped([&](Token token) -> std::optional<Token> {
      const Token document = token >> 32;
      if (document == 0) return token;
      const auto& [begin, before] = *std::prev(place.upper_bound(token));
      return token_of(to.at(document), before + static_cast<std::uint32_t>(token - begin));
    }));
  }

  void rename_requests_and_slots() {
    TraceForm renamed = best_;
    std::map<std::uint32_t, Name> names;
    const auto rename_one = [&](Name& name, char prefix) {
      if (!name.exists()) return;
      const auto found = names.find(name.index());
      if (found == names.end()) {
        const auto count = std::ranges::count_if(
            names, [&](const auto& known) { return known.second.text()[0] == prefix; });
        names.emplace(name.index(), Name::intern(fmt::format("{}{}", prefix, count + 1)));
      }
      name = names.at(name.index());
    };
    for (Step& step : renamed.steps)
      std::visit(Overloaded{[&](Operation& o) {
                              rename_one(o.id, 'r');
                              rename_one(o.slot, 's');
                              rename_one(o.from, 's');
                              rename_one(o.to, 's');
                              rename_one(o.as, o.verb == Verb::lock    ? 'l'
                                               : o.verb == Verb::clone ? 'r'
                                                                       : 's');
                              rename_one(o.lock, 'l');
                              for (Name& id : o.ids) rename_one(id, 'r');
                            },
                            [&](RequestSpec& spec) { rename_one(spec.id, 'r'); },
                            [&](Intervention& stop) { rename_one(stop.id, 'r'); },
                            [&](Expect& expect) { rename_one(expect.id, 'r'); }, [](auto&) {}},
                 step.statement.what);
    attempt(renamed);
  }

  RunOptions run_;
  ShrinkOptions options_;
  bool keeps_config_;  ///< until nothing gets smaller
  bool takes_any_;
  std::optional<FieldValues> choices_;
  Draw way_{1, 1};
  TraceForm best_;
  Config first_config_;
  LocatedFinding finding_;
  LocatedFinding sought_;
  std::int64_t executions_ = 0;
  bool has_branch_names_ = false;
};

}  // namespace

bool is_same_finding(const LocatedFinding& one, const LocatedFinding& other) {
  if (one.finding.kind != other.finding.kind) return false;
  const auto verb = [](const LocatedFinding& located) {
    return located.operation.substr(0, located.operation.find(' '));
  };
  const auto field = [](const LocatedFinding& located) {  // the field of `cached=5`, or a sentence
    const std::size_t end = located.finding.expected.find('=');
    return end == std::string::npos ? "" : located.finding.expected.substr(0, end);
  };
  switch (one.finding.kind) {
    case FindingKind::reply_differs:
    case FindingKind::missed_reuse: return verb(one) == verb(other) && field(one) == field(other);
    case FindingKind::answer_differs: return field(one) == field(other);
    case FindingKind::subject_died:
    case FindingKind::subject_silent:
    case FindingKind::subject_garbled: return verb(one) == verb(other);
    default: return true;
  }
}

std::optional<LocatedFinding> finding_of(const Trace& trace, const RunOptions& run) {
  RunOptions own = run;
  own.config = trace.config;
  own.skip_illegal = false;
  const auto played = played_run(own, [&](ReplaySession& session) { play_trace(session, trace); });
  if (!played || (*played)->error() || (*played)->findings().empty()) return std::nullopt;
  return (*played)->findings().front();
}

Result<ShrinkOutcome> shrink(const Trace& trace, const RunOptions& run,
                             const ShrinkOptions& options) {
  Result<ShrinkOutcome> shrunk = Shrinker(run, options, Way::first).shrink(trace);
  RunOptions sound = run;
  sound.defect = nullptr;
  for (const Way way : {Way::keeps_config, Way::any_finding}) {
    if (!shrunk || line_count(shrunk->trace) <= kLongTrace) return shrunk;
    if (way == Way::any_finding && run.defect == nullptr) return shrunk;
    Result<ShrinkOutcome> other = Shrinker(run, options, way).shrink(trace);
    if (!other || line_count(other->trace) >= line_count(shrunk->trace)) continue;
    if (way == Way::any_finding && finding_of(other->trace, sound)) continue;
    other->executions += shrunk->executions;
    shrunk = std::move(other);
  }
  return shrunk;
}

std::size_t line_count(const Trace& trace) {
  return trace.statements.size();
}

}  // namespace lockstep::cache_sim
