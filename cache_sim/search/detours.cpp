#include "cache_sim/search/detours.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cache_sim/search/swarm.hpp"

namespace lockstep::cache_sim {
namespace {

/// So many configurations show every choice that a search makes in more than one of ten.
constexpr std::uint64_t kDrawn = 64;

/// The features that all subjects accept; nothing where one is no policy and no oracle of one.
std::optional<Accepted> accepted_by_all(const std::vector<std::string>& subjects) {
  std::optional<Accepted> accepted;
  for (std::string_view name : subjects) {
    if (name.starts_with("oracle:")) name.remove_prefix(7);
    const PolicyEntry* const policy = Registry<PolicyEntry>::find(name);
    if (policy == nullptr) return std::nullopt;
    const Accepted own = accepted_by(*policy);
    accepted = accepted ? accepted_by_both(*accepted, own) : own;
  }
  return accepted;
}

bool is_choice(const ConfigOption& option) {
  return !option.number || (option.number->low == 0 && option.number->high == 1);
}

/// Changes a trace of operations in ways that a search does not need to know the reason for.
class Detour {
 public:
  Detour(TraceForm& form, const FieldValues& values, Draw& draw)
      : form_(form), values_(values), draw_(draw) {}

  void change() {
    if (form_.steps.empty()) return;
    switch (draw_.below(8)) {
      case 0: return move();
      case 1: return insert();
      case 2: return set_field();
      case 3: return store_otherwise();
      case 4: return change_fields();
      case 5: return back_up_by_eviction();
      default: form_.steps.erase(place(some_line()));
    }
  }

 private:
  using Index = std::ptrdiff_t;

  Index some_line(std::size_t more = 0) {
    return static_cast<Index>(draw_.below(form_.steps.size() + more));
  }
  Steps::iterator place(Index line) { return form_.steps.begin() + line; }
  Operation& operation(Index line) { return std::get<Operation>(place(line)->statement.what); }

  void move() {
    const Index from = some_line();
    const Step moved = *place(from);
    form_.steps.erase(place(from));
    form_.steps.insert(place(some_line(1)), moved);
  }

  /// A line once more, or one that takes memory away or takes note of copies.
  void insert() {
    constexpr Verb kVerbs[] = {Verb::flush, Verb::evict, Verb::settle};
    Step step = *place(some_line());
    if (draw_.chance(1, 2)) {
      Operation other{.verb = kVerbs[draw_.below(std::size(kVerbs))]};
      if (other.verb == Verb::evict) other.kv = draw_.between(1, 4);
      step = step_of(other);
    }
    form_.steps.insert(place(some_line(1)), step);
  }

  void set_field() {
    if (values_.empty()) return;
    const auto& [field, value] = values_[draw_.below(values_.size())];
    form_.config.set(field, value);
  }

  /// An admission gets, or loses, a reason to wait; or tokens become fewer, or those of another
  /// line.
  void change_fields() {
    Operation& changed = operation(some_line());
    if (changed.verb == Verb::admit && draw_.chance(1, 2)) {
      if (draw_.chance(1, 2))
        changed.late = !changed.late;
      else
        changed.room = changed.room < 0 ? form_.config.kv_tokens : Operation::kAbsent;
      return;
    }
    const Tokens& others = operation(some_line()).tokens;
    if (changed.tokens.empty() || others.empty()) return;
    const auto fewer = static_cast<std::uint32_t>(1 + draw_.below(changed.tokens.size()));
    changed.tokens = draw_.chance(1, 2) ? others : changed.tokens.prefix(fewer);
  }

  /// Copies to the host are made as their sources leave the device, and are told at once.
  void back_up_by_eviction() {
    const auto is = [](const Step& step, Verb verb, std::string_view tier) {
      const auto& operation = std::get<Operation>(step.statement.what);
      return operation.verb == verb && operation.tier.text() == tier;
    };
    const std::pair<std::string, std::string> policy("write_policy", "write_back");
    if (std::ranges::find(values_, policy) == values_.end()) return;
    form_.config.set(policy.first, policy.second);
    for (auto step = form_.steps.begin(); step != form_.steps.end(); ++step) {
      if (!is(*step, Verb::land, "host")) continue;
      Operation evict{.verb = Verb::evict};
      evict.kv = 2;
      *step = step_of(evict);
      const auto next = std::next(step);
      if (next != form_.steps.end() && is(*next, Verb::settle, "")) form_.steps.erase(next);
    }
  }

  /// The prefix that a line stores comes without the other lines of its slot or request: by a slot
  /// of its own, or by a request to which it was transferred.
  void store_otherwise() {
    const Index line = some_line();
    const Operation& storing = operation(line);
    const bool by_slot = storing.verb == Verb::insert;
    if (!by_slot && storing.verb != Verb::finish && storing.verb != Verb::checkpoint) return;
    const Name name = by_slot ? storing.slot : storing.id;
    Tokens stored = by_slot ? storing.tokens : known_to(name, line);
    if (!by_slot && stored.size() > 1 && draw_.chance(1, 2))
      stored = stored.prefix(stored.size() - 1);
    if (stored.empty() || !name.exists()) return;
    Steps steps;
    for (Index i = 0; i < std::ssize(form_.steps); ++i) {
      const Operation& other = operation(i);
      if (i == line)
        draw_.chance(1, 2) ? by_slot_of(name, stored, steps) : by_transfer(name, stored, steps);
      else if (other.id != name && other.slot != name && other.as != name)
        steps.push_back(*place(i));
    }
    form_.steps = std::move(steps);
  }

  /// The tokens that a request has been told before this line.
  Tokens known_to(Name id, Index line) {
    Tokens known;
    for (Index i = 0; i < line; ++i)
      if (const Operation& other = operation(i); other.id == id)
        known = other.verb == Verb::admit ? other.tokens : known.followed_by(other.tokens);
    return known;
  }

  static void by_slot_of(Name name, const Tokens& stored, Steps& steps) {
    Operation next{.verb = Verb::alloc};
    next.as = name;
    next.tokens = stored;
    steps.push_back(step_of(next));
    next = Operation{.verb = Verb::insert};
    next.slot = name;
    next.tokens = stored;
    steps.push_back(step_of(next));
    steps.back().of_slot = true;
  }

  static void by_transfer(Name name, const Tokens& stored, Steps& steps) {
    Operation next{.verb = Verb::admit};
    next.id = name;
    next.tokens = stored.followed_by(Tokens::of_values({stored.values().back() + 1}));
    next.external = stored.size();
    steps.push_back(step_of(next));
    next = Operation{.verb = Verb::finish};
    next.id = name;
    steps.push_back(step_of(next));
  }

  TraceForm& form_;
  const FieldValues& values_;
  Draw& draw_;
};

}  // namespace

FieldValues choices_for(const RunOptions& run) {
  FieldValues choices;
  const std::optional<Accepted> accepted = accepted_by_all(run.subjects);
  if (!accepted) return choices;
  for (std::uint64_t number = 1; number <= kDrawn; ++number) {
    Draw draw(1, number);
    const Config drawn = draw_swarm(draw, *accepted, Config(), {}, SwarmLevel::operations).config;
    for (const ConfigOption& option : Registry<ConfigOption>::all()) {
      const std::string field(option.name);
      if (!is_choice(option) || run.fixed.contains(field)) continue;
      for (const std::string& value : {drawn.text(field), std::string(option.otherwise)})
        if (const std::pair choice(field, value);
            drawn.text(field) != option.otherwise &&
            std::ranges::find(choices, choice) == choices.end())
          choices.push_back(choice);
    }
  }
  return choices;
}

TraceForm detour(const TraceForm& trace, const FieldValues& values, Draw& draw) {
  TraceForm form = trace;
  if (!is_of_operations(trace.steps)) return form;
  Detour changes(form, values, draw);
  for (std::uint64_t left = 1 + draw.below(6); left > 0; --left) changes.change();
  return form;
}

}  // namespace lockstep::cache_sim
