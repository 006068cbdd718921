#include "cache_sim/search/rewrites.hpp"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::cache_sim {
namespace {

auto at(Steps& steps, std::size_t line) {
  return steps.begin() + static_cast<std::ptrdiff_t>(line);
}

const Operation* operation_in(const Step& step) {
  return std::get_if<Operation>(&step.statement.what);
}

class Rewrites {
 public:
  Rewrites(const TraceForm& trace, const TakesForm& takes)
      : trace_(trace), lines_(trace.steps.size()), takes_(takes) {}

  /// A server that is flushed has landed and settled its copies and has evicted what it can: one
  /// line for many.
  bool flush_for_lines() const {
    for (std::size_t size = lines_; size >= 2; --size)
      for (std::size_t first = 0; first + size <= lines_; ++first) {
        TraceForm form = without(first, size);
        form.steps.insert(at(form.steps, first), step_of(Operation{.verb = Verb::flush}));
        if (takes_(form)) return true;
      }
    return false;
  }

  /// Two lines that need each other, whatever stands between them.
  bool drop_two_lines() const {
    for (std::size_t apart = 2; apart < lines_; ++apart)
      for (std::size_t first = 0; first + apart < lines_; ++first) {
        TraceForm form = without(first + apart, 1);
        form.steps.erase(at(form.steps, first));
        if (takes_(form)) return true;
      }
    return false;
  }

  /// Lines that a value of a config field asks for go with that value.
  bool drop_lines_with_field(const FieldValues& values) const {
    for (const auto& [field, value] : values) {
      if (trace_.config.find(field) == value) continue;
      for (std::size_t size = 1; size < lines_; ++size)
        for (std::size_t first = 0; first + size <= lines_; ++first) {
          TraceForm form = without(first, size);
          if (form.config.set(field, value) && takes_(form)) return true;
        }
    }
    return false;
  }

  /// A slot can leave in the cache what a request leaves there: two lines, however many the
  /// request has.
  bool store_by_slot() const {
    std::set<std::uint32_t> seen;
    for (const Step& step : trace_.steps) {
      const Name id = operation_in(step)->id;
      if (id.exists() && seen.insert(id.index()).second && store_by_slot(id)) return true;
    }
    return false;
  }

  /// A slot that begins as a copy of another one may begin empty, and a line of that one can go.
  bool alloc_for_fork() const {
    for (std::size_t line = 0; line < lines_; ++line) {
      if (operation(line).verb != Verb::fork) continue;
      Operation alloc{.verb = Verb::alloc};
      alloc.as = operation(line).as;
      for (std::size_t gone = 0; gone < lines_; ++gone) {
        if (gone == line) continue;
        TraceForm form = trace_;
        form.steps[line] = step_of(alloc);
        form.steps.erase(at(form.steps, gone));
        if (takes_(form)) return true;
      }
    }
    return false;
  }

  /// Of two lines of one verb, one does the work of both if another line stands beside it.
  bool drop_and_move() const {
    for (std::size_t gone = 0; gone < lines_; ++gone)
      for (std::size_t twin = 0; twin < lines_; ++twin)
        if (twin != gone && operation(twin).verb == operation(gone).verb)
          for (std::size_t moved = 0; moved < lines_; ++moved)
            if (moved != gone && moved != twin && drop_and_move(gone, twin, moved)) return true;
    return false;
  }

 private:
  const Operation& operation(std::size_t line) const { return *operation_in(trace_.steps[line]); }

  TraceForm without(std::size_t first, std::size_t size) const {
    TraceForm form = trace_;
    form.steps.erase(at(form.steps, first), at(form.steps, first + size));
    return form;
  }

  bool store_by_slot(Name id) const {
    std::vector<std::size_t> own;
    for (std::size_t line = 0; line < lines_; ++line)
      if (operation(line).id == id) own.push_back(line);
    if (own.size() <= 2) return false;
    Tokens known;
    std::int64_t rest = 0;  // of these tokens, those that the last chunk did not compute
    for (const std::size_t line : own) {
      const Operation& now = operation(line);
      if (now.verb == Verb::extend) rest = std::max<std::int64_t>(0, trace_.steps[line].rest);
      if (now.verb == Verb::admit) known = Tokens();
      if (now.verb != Verb::finish && now.verb != Verb::checkpoint) {
        known = known.followed_by(now.tokens);
        continue;
      }
      for (const std::int64_t left : {std::int64_t{0}, std::int64_t{1}, rest})
        if (left < known.size() &&
            takes_(
                by_slot(id, line, known.prefix(known.size() - static_cast<std::uint32_t>(left)))))
          return true;
    }
    return false;
  }

  /// The request's lines are left out, and at this one a slot is filled and given to the cache. It
  /// has the request's name.
  TraceForm by_slot(Name id, std::size_t line, const Tokens& stored) const {
    TraceForm form{trace_.config, {}};
    for (std::size_t i = 0; i < lines_; ++i) {
      if (operation(i).id != id) form.steps.push_back(trace_.steps[i]);
      if (i != line) continue;
      Operation next{.verb = Verb::alloc};
      next.as = id;
      next.tokens = stored;
      form.steps.push_back(step_of(next));
      next = Operation{.verb = Verb::insert};
      next.slot = id;
      next.tokens = stored;
      form.steps.push_back(step_of(next));
    }
    return form;
  }

  bool drop_and_move(std::size_t gone, std::size_t twin, std::size_t moved) const {
    for (const bool after : {false, true}) {
      TraceForm form{trace_.config, {}};
      for (std::size_t i = 0; i < lines_; ++i) {
        if (i == twin && !after) form.steps.push_back(trace_.steps[moved]);
        if (i != gone && i != moved) form.steps.push_back(trace_.steps[i]);
        if (i == twin && after) form.steps.push_back(trace_.steps[moved]);
      }
      if (takes_(form)) return true;
    }
    return false;
  }

  const TraceForm& trace_;
  std::size_t lines_;
  const TakesForm& takes_;
};

}  // namespace

Step step_of(Operation operation) {
  Step step;
  step.statement.what = std::move(operation);
  return step;
}

bool is_of_operations(const Steps& steps) {
  return std::ranges::all_of(steps, [](const Step& step) {
    return operation_in(step) != nullptr && step.statement.answer.empty();
  });
}

bool take_shorter_form(const TraceForm& trace, const TakesForm& takes) {
  if (trace.steps.size() <= kShortTrace) return false;
  // The form that is taken may take the place of `trace` while it is looked at.
  const TraceForm now = trace;
  const Rewrites rewrites(now, takes);
  const bool of_operations = is_of_operations(now.steps);
  if (of_operations &&
      (rewrites.flush_for_lines() || rewrites.store_by_slot() || rewrites.alloc_for_fork()))
    return true;
  return rewrites.drop_two_lines();
}

bool take_distant_form(const TraceForm& trace, const FieldValues& values, const TakesForm& takes) {
  if (trace.steps.size() <= kLongTrace) return false;
  const TraceForm now = trace;
  const Rewrites rewrites(now, takes);
  return rewrites.drop_lines_with_field(values) ||
         (is_of_operations(now.steps) && rewrites.drop_and_move());
}

}  // namespace lockstep::cache_sim
