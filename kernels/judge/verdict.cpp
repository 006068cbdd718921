#include "kernels/judge/verdict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "reference/base/counted.hpp"
#include "reference/base/parallel.hpp"

namespace lockstep::judging {
namespace {

/// The offset of a tensor's allocation in a run's bytes.
std::int64_t offset_of(const Case& c, const Tensor& tensor) {
  std::int64_t offset = 0;
  for (const Tensor& one : c.tensors) {
    if (&one == &tensor) return offset;
    offset += one.allocation_bytes();
  }
  return offset;
}

std::string index_text(const Tensor& tensor, std::int64_t flat) {
  Extents index(tensor.extents.size());
  for (std::size_t d = index.size(); d-- > 0;) {
    index[d] = flat % tensor.extents[d];
    flat /= tensor.extents[d];
  }
  std::string text = "[";
  for (std::size_t d = 0; d < index.size(); ++d) text += (d ? ", " : "") + std::to_string(index[d]);
  return text + "]";
}

/// Whether elements with index i in dimension 0 may be written.
bool may_write(const Case& c, const Tensor& tensor, std::int64_t i) {
  if (tensor.axes.empty()) return true;
  const auto n = static_cast<std::size_t>(i);
  if (tensor.axes[0] == "slot") return c.slots[n].use == SlotUse::written;
  if (tensor.axes[0] == "token" && tensor.role == Role::state) return !c.tokens[n].padding;
  return true;
}

std::string slot_story(const Case& c, std::int64_t slot) {
  const CaseSlot& named = c.slots[static_cast<std::size_t>(slot)];
  std::string story = named.use == SlotUse::read  ? " (a row reads it, none writes it)"
                      : named.token.row_size == 0 ? " (its row has no token)"
                                                  : " (no row names it)";
  const bool has_padding =
      std::any_of(c.tokens.begin(), c.tokens.end(),
                  [](const CaseToken& token) { return token.padding && token.row >= 0; });
  if (named.use == SlotUse::unused && has_padding && slot == 0)
    story += ": padding entries seem to be taken for slot 0";
  if (named.use == SlotUse::unused && has_padding &&
      slot + 1 == static_cast<std::int64_t>(c.slots.size()))
    story += ": padding entries of -1 seem to wrap around to the last slot";
  return story;
}

// --- Forbidden writes ----------------------------------------------------------------------------

/// Finds bytes that a run has changed although it must not: guards, holes, inputs, and elements of
/// states that no row writes.
class Touched {
 public:
  Touched(const Case& c, const Tensor& tensor, Fill fill, const Bytes& after)
      : case_(c),
        tensor_(tensor),
        before_(allocation_of(tensor, fill)),
        after_(after.data() + offset_of(c, tensor)) {}

  void find(std::vector<Finding>& findings) const {
    const std::int64_t end = kGuardBytes + tensor_.span() * size_of(tensor_.type);
    const auto size = static_cast<std::int64_t>(before_.size());
    guard(findings, 0, kGuardBytes, "in front of");
    guard(findings, end, size, "after");
    const std::int64_t outers = tensor_.extents.empty() ? 1 : tensor_.extents[0];
    const std::int64_t inner = outers == 0 ? 0 : tensor_.count() / outers;
    const auto allowed = [&](std::int64_t outer) {
      return tensor_.role == Role::output ||
             (tensor_.role == Role::state && may_write(case_, tensor_, outer));
    };
    bool all_allowed = true;
    for (std::int64_t outer = 0; outer < outers; ++outer) all_allowed &= allowed(outer);
    const bool has_holes = tensor_.span() != tensor_.count();
    if (all_allowed && !has_holes) return;
    const std::vector<std::int64_t> offsets = byte_offsets(tensor_);
    std::int64_t first = -1, changed = 0;
    std::set<std::int64_t> slots;
    for (std::int64_t outer = 0; outer < outers; ++outer) {
      if (allowed(outer)) continue;
      for (std::int64_t i = outer * inner; i < (outer + 1) * inner; ++i) {
        if (!differs(offsets[static_cast<std::size_t>(i)], size_of(tensor_.type))) continue;
        if (first < 0) first = i;
        ++changed;
        slots.insert(outer);
      }
    }
    if (first >= 0) report_elements(findings, first, changed, slots);
    if (has_holes) holes(findings, offsets, end);
  }

 private:
  bool differs(std::int64_t at, std::int64_t size) const {
    return std::memcmp(before_.data() + at, after_ + at, static_cast<std::size_t>(size)) != 0;
  }

  void guard(std::vector<Finding>& findings, std::int64_t begin, std::int64_t end,
             std::string_view side) const {
    std::int64_t count = 0, near = -1;
    for (std::int64_t b = begin; b < end; ++b) {
      if (!differs(b, 1)) continue;
      ++count;
      if (near < 0 || begin == 0) near = begin == 0 ? kGuardBytes - b : b - begin;
    }
    if (count == 0) return;
    findings.push_back({FindingKind::out_of_range,
                        fmt::format("{}: {} {} the tensor {} written, the nearest {} away",
                                    tensor_.name, counted(count, "byte"), side,
                                    count == 1 ? "was" : "were", counted(near, "byte")),
                        "nothing written outside of a tensor", counted(count, "byte")});
  }

  void holes(std::vector<Finding>& findings, const std::vector<std::int64_t>& offsets,
             std::int64_t end) const {
    std::vector<bool> element(before_.size(), false);
    for (const std::int64_t offset : offsets)
      for (std::int64_t b = 0; b < size_of(tensor_.type); ++b)
        element[static_cast<std::size_t>(offset + b)] = true;
    for (std::int64_t b = kGuardBytes; b < end; ++b)
      if (!element[static_cast<std::size_t>(b)] && differs(b, 1)) {
        findings.push_back({FindingKind::out_of_range,
                            fmt::format("{}: memory between its elements was written (byte {} "
                                        "after its first element): a stride is not honoured",
                                        tensor_.name, b - kGuardBytes),
                            "nothing written", "written"});
        return;
      }
  }

  void report_elements(std::vector<Finding>& findings, std::int64_t first, std::int64_t changed,
                       const std::set<std::int64_t>& slots) const {
    std::string text;
    if (tensor_.role == Role::input)
      text = fmt::format("{}: an input was written ({}, first {})", tensor_.name,
                         counted(changed, "element"), index_text(tensor_, first));
    else if (tensor_.axes[0] == "slot")
      text = fmt::format("{}: slot {} was written{}{}", tensor_.name, *slots.begin(),
                         slot_story(case_, *slots.begin()),
                         slots.size() > 1 ? fmt::format("; {} such slots", slots.size()) : "");
    else
      text = fmt::format("{}: {} of a padding {} was written ({})", tensor_.name,
                         index_text(tensor_, first), tensor_.axes[0], counted(changed, "element"));
    findings.push_back({FindingKind::out_of_range, text, "the bytes that were there",
                        fmt::format("{} changed", counted(changed, "element"))});
  }

  const Case& case_;
  const Tensor& tensor_;
  Bytes before_;
  const char* after_;
};

/// A run's number and the bytes that it left.
struct RunBytes {
  std::size_t run;
  const Bytes& bytes;
};

/// The first element of a result whose bits differ between two runs, and their `count`; -1 if there
/// is none. Elements that must not be written are skipped (Touched checks them), and so are
/// elements that neither run wrote: they keep their fill.
std::int64_t first_difference(const Case& c, const Tensor& tensor, const RunBytes& a,
                              const RunBytes& b, std::int64_t& count) {
  const std::int64_t begin = offset_of(c, tensor), size = size_of(tensor.type);
  const auto same = [&](const char* one, const char* other) {
    return std::memcmp(one, other, static_cast<std::size_t>(size)) == 0;
  };
  count = 0;
  if (std::memcmp(a.bytes.data() + begin, b.bytes.data() + begin,
                  static_cast<std::size_t>(tensor.allocation_bytes())) == 0)
    return -1;
  Bytes before[2];
  if (tensor.role == Role::state)
    before[0] = allocation_of(tensor, kRunFills[a.run]),
    before[1] = allocation_of(tensor, kRunFills[b.run]);
  const std::int64_t inner =
      tensor.extents.empty() || tensor.extents[0] == 0 ? 1 : tensor.count() / tensor.extents[0];
  const std::vector<std::int64_t> offsets = byte_offsets(tensor);
  std::int64_t first = -1;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    if (!may_write(c, tensor, static_cast<std::int64_t>(i) / inner)) continue;
    const char* const one = a.bytes.data() + begin + offsets[i];
    const char* const other = b.bytes.data() + begin + offsets[i];
    if (same(one, other)) continue;
    if (!before[0].empty() && same(one, before[0].data() + offsets[i]) &&
        same(other, before[1].data() + offsets[i]))
      continue;
    if (first < 0) first = static_cast<std::int64_t>(i);
    ++count;
  }
  return first;
}

// --- Positions of wrong elements -----------------------------------------------------------------

std::string plural(const std::string& axis) {
  return axis + "s";
}

std::string ranges(const std::set<std::int64_t>& numbers) {
  std::string text;
  int pieces = 0;
  for (auto i = numbers.begin(); i != numbers.end();) {
    const std::int64_t begin = *i;
    std::int64_t end = begin;
    while (++i != numbers.end() && *i == end + 1) end = *i;
    if (++pieces > 6) return text + ", …";
    if (!text.empty()) text += ", ";
    text += begin == end ? std::to_string(begin) : fmt::format("{} to {}", begin, end);
  }
  return text;
}

/// Whether the wrong indices are exactly those for which `rule` holds.
template <class Rule>
bool exactly(const std::set<std::int64_t>& wrong, std::int64_t extent, Rule rule) {
  for (std::int64_t i = 0; i < extent; ++i)
    if (rule(i) != wrong.contains(i)) return false;
  return true;
}

/// Whether `rule` holds for all wrong indices, but not for all indices.
template <class Rule>
bool only(const std::set<std::int64_t>& wrong, std::int64_t extent, Rule rule) {
  for (const std::int64_t i : wrong)
    if (!rule(i)) return false;
  for (std::int64_t i = 0; i < extent; ++i)
    if (!rule(i)) return true;
  return false;
}

using TokenOf = std::function<const CaseToken&(std::int64_t)>;

std::string token_rule(const std::set<std::int64_t>& wrong, std::int64_t extent,
                       const TokenOf& token, const std::function<bool(std::int64_t)>& counts) {
  const auto holds = [&](auto rule) {
    return only(wrong, extent, [&](std::int64_t i) { return counts(i) && rule(token(i)); });
  };
  const auto sometimes_not = [&](auto rule) {  // not for all indices that count
    for (std::int64_t i = 0; i < extent; ++i)
      if (counts(i) && !token(i).padding && !rule(token(i))) return true;
    return false;
  };
  struct Rule {
    bool (*rule)(const CaseToken&);
    const char* text;
  };
  const Rule rules[] = {
      {[](const CaseToken& t) { return t.row < 0; }, "only after the last row"},
      {[](const CaseToken& t) { return t.padding && t.row >= 0; },
       "only rows whose slot is padding"},
      {[](const CaseToken& t) { return t.row_size == 0; }, "only rows without a token"},
      {[](const CaseToken& t) { return t.position > 0 && t.position + 1 == t.row_size; },
       "only the last tokens of rows"},
      {[](const CaseToken& t) { return t.position > 0; },
       "only tokens after the first of their row"},
      {[](const CaseToken& t) { return t.accepted > 1; },
       "only rows that had accepted more than one token"},
      {[](const CaseToken& t) { return t.row == 0; }, "only the first row"},
      {[](const CaseToken& t) { return t.row != 0; }, "no token of the first row"},
  };
  for (const Rule& one : rules)
    if (holds(one.rule) && sometimes_not(one.rule)) return one.text;
  return "";
}

std::string head_rule(const std::set<std::int64_t>& wrong, std::int64_t extent,
                      std::int64_t group) {
  if (group > 1) {
    if (exactly(wrong, extent, [&](std::int64_t h) { return h >= group; }))
      return fmt::format("only heads of groups after the first (h >= {})", group);
    if (exactly(wrong, extent, [&](std::int64_t h) { return h % group != 0; }))
      return "only heads that are not the first of their group";
    const std::int64_t groups = extent / group;
    if (exactly(wrong, extent, [&](std::int64_t h) { return h / group != h % groups; }))
      return "only heads whose group h // (H / G) is not h % G: the group mapping";
  }
  return "";
}

std::string axis_text(const Case& c, const Tensor& tensor, std::size_t d,
                      const std::set<std::int64_t>& wrong) {
  const std::string& axis = tensor.axes[d];
  const std::int64_t extent = tensor.extents[d];
  if (axis == "token" && !c.tokens.empty()) {
    const auto used = [&](std::int64_t i) {
      return !c.tokens[static_cast<std::size_t>(i)].padding;
    };
    if (exactly(wrong, extent, used)) return "";
    const std::string rule = token_rule(
        wrong, extent,
        [&](std::int64_t i) -> const CaseToken& { return c.tokens[static_cast<std::size_t>(i)]; },
        [](std::int64_t) { return true; });
    if (!rule.empty()) return rule + fmt::format(" ({} {})", plural(axis), ranges(wrong));
  }
  if (axis == "slot" && !c.slots.empty()) {
    const auto written = [&](std::int64_t i) {
      return c.slots[static_cast<std::size_t>(i)].use == SlotUse::written;
    };
    if (exactly(wrong, extent, written)) return "";
    const std::string rule = token_rule(
        wrong, extent,
        [&](std::int64_t i) -> const CaseToken& {
          return c.slots[static_cast<std::size_t>(i)].token;
        },
        written);
    if (!rule.empty()) return rule + fmt::format(" ({} {})", plural(axis), ranges(wrong));
  }
  if (static_cast<std::int64_t>(wrong.size()) == extent) return "";
  if (axis.ends_with("head"))
    if (std::string rule = head_rule(wrong, extent, c.heads_per_group); !rule.empty()) return rule;
  if (*wrong.rbegin() == extent - 1 &&
      static_cast<std::int64_t>(wrong.size()) == extent - *wrong.begin())
    return fmt::format("only {} {} and beyond", plural(axis), *wrong.begin());
  if (extent > 2 && exactly(wrong, extent, [](std::int64_t i) { return i % 2 == 1; }))
    return fmt::format("only odd {}", plural(axis));
  if (extent > 2 && exactly(wrong, extent, [](std::int64_t i) { return i % 2 == 0; }))
    return fmt::format("only even {}", plural(axis));
  std::int64_t pieces = 0;
  for (const std::int64_t i : wrong) pieces += !wrong.contains(i - 1);
  // Many pieces that are much of the extent: no pattern worth a sentence.
  if (pieces > 4 && static_cast<std::int64_t>(wrong.size()) * 4 > extent) return "";
  return fmt::format("only {} {}", wrong.size() == 1 ? axis : plural(axis), ranges(wrong));
}

bool off(double a, double e, double bound) {
  if (std::isnan(a) || std::isnan(e)) return std::isnan(a) != std::isnan(e);
  if (std::isinf(a) || std::isinf(e)) return a != e;
  return std::abs(a - e) > bound;
}

std::string where_wrong(const Case& c, const Tensor& tensor, const std::vector<double>& got,
                        const std::vector<double>& want, double bound) {
  std::vector<std::set<std::int64_t>> wrong(tensor.extents.size());
  std::int64_t count = 0, not_finite = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!off(got[i], want[i], bound)) continue;
    ++count;
    not_finite += std::isfinite(want[i]) && !std::isfinite(got[i]);
    auto flat = static_cast<std::int64_t>(i);
    for (std::size_t d = wrong.size(); d-- > 0;) {
      wrong[d].insert(flat % tensor.extents[d]);
      flat /= tensor.extents[d];
    }
  }
  if (count == 0) return "a little everywhere: no element stands out";
  std::string text = fmt::format("{} of {}", count, counted(got.size(), "element"));
  if (not_finite > 0) text += fmt::format(", {} of them NaN or infinite", not_finite);
  for (std::size_t d = 0; d < wrong.size(); ++d)
    if (const std::string part = axis_text(c, tensor, d, wrong[d]); !part.empty())
      text += "; " + part;
  return text;
}

// --- The yardstick -------------------------------------------------------------------------------

template <std::size_t Rank>
Verdict verdict_of(const Tensor& tensor, const std::vector<double>& got,
                   const std::vector<double>& yardstick, const std::vector<double>& truth) {
  if constexpr (Rank > 1)
    if (tensor.extents.size() < Rank) return verdict_of<Rank - 1>(tensor, got, yardstick, truth);
  return lockstep::judge(array_of<double, Rank>(tensor, got),
                         array_of<double, Rank>(tensor, yardstick),
                         array_of<double, Rank>(tensor, truth), {.format = format_of(tensor.type)});
}

Verdict bits_verdict(const Tensor& tensor, const std::vector<double>& got,
                     const std::vector<double>& truth) {
  Verdict verdict{.pass = true};
  std::int64_t count = 0, first = -1;
  for (std::size_t i = 0; i < got.size(); ++i)
    if (off(got[i], truth[i], 0) || std::signbit(got[i]) != std::signbit(truth[i])) {
      if (first < 0) first = static_cast<std::int64_t>(i);
      ++count;
    }
  if (count == 0) return verdict;
  const auto n = static_cast<std::size_t>(first);
  verdict.pass = false;
  verdict.error = static_cast<double>(count) / static_cast<double>(got.size());
  verdict.text = fmt::format("{} of {} {} not the copy, the first at {}: {} for {}", count,
                             counted(got.size(), "element"), is_or_are(count),
                             index_text(tensor, first), got[n], truth[n]);
  return verdict;
}

Verdict compare(const JudgedKernel& operation, const Tensor& tensor, const std::vector<double>& got,
                const std::vector<double>& yardstick, const std::vector<double>& truth) {
  if (operation.exact) return bits_verdict(tensor, got, truth);
  return verdict_of<5>(tensor, got, yardstick, truth);
}

double largest_error(const std::vector<double>& a, const std::vector<double>& e) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::isfinite(a[i]) && std::isfinite(e[i]))
      largest = std::max(largest, std::abs(a[i] - e[i]));
  return largest;
}

/// The values of a run's result. Elements that must not be written get the truth: Touched checks
/// them.
std::vector<double> results_of(const Case& c, const Tensor& tensor, const Bytes& run,
                               const std::vector<double>& truth) {
  std::vector<double> values = values_in(tensor, run.data() + offset_of(c, tensor));
  const std::int64_t inner =
      tensor.extents.empty() || tensor.extents[0] == 0 ? 1 : tensor.count() / tensor.extents[0];
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!may_write(c, tensor, static_cast<std::int64_t>(i) / inner)) values[i] = truth[i];
  return values;
}

void compare_runs(const Case& c, const CaseRuns& runs, std::vector<Finding>& findings) {
  for (const Tensor& tensor : c.tensors) {
    if (tensor.role == Role::input) continue;
    std::int64_t count = 0;
    const std::int64_t unstable =
        first_difference(c, tensor, {0, runs.runs[0]}, {1, runs.runs[1]}, count);
    if (unstable >= 0) {
      findings.push_back(
          {FindingKind::nondeterministic,
           fmt::format("{}: two runs on the same bytes differ in {}, the first at {}", tensor.name,
                       counted(count, "element"), index_text(tensor, unstable)),
           "the same bits", "other bits in " + counted(count, "element")});
      continue;
    }
    const std::int64_t leak =
        first_difference(c, tensor, {0, runs.runs[0]}, {2, runs.runs[2]}, count);
    if (leak < 0) continue;
    const std::vector<double> poisoned =
        values_in(tensor, runs.runs[0].data() + offset_of(c, tensor));
    const double value = poisoned[static_cast<std::size_t>(leak)];
    findings.push_back(
        {FindingKind::padding_leak,
         fmt::format("{}: what lies in padding, unused slots, holes or an output's old bytes "
                     "reaches {}, the first at {} ({} with NaN there)",
                     tensor.name, counted(count, "element"), index_text(tensor, leak), value),
         "the same bits whatever stands there", "other bits in " + counted(count, "element")});
  }
}

}  // namespace

bool Judgement::wrong() const {
  return std::any_of(measured.begin(), measured.end(),
                     [](const Measured& one) { return !one.verdict.pass; });
}

bool agrees(const JudgedKernel& operation, const Case& c, const Answer& candidate,
            std::string_view mistake) try {
  const Answer truth = operation.truth(c, mistake);
  for (const auto& [name, values] : truth) {
    // A candidate far from the mistake's answer needs no comparison by the yardstick.
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (off(candidate.at(name)[i], values[i], std::numeric_limits<double>::infinity()))
        return false;
      if (!std::isfinite(values[i])) continue;
      difference += std::pow(candidate.at(name)[i] - values[i], 2);
      size += values[i] * values[i];
    }
    if (difference > 0.01 * size + 1e-12) return false;
  }
  const Answer yardstick = operation.yardstick(c, mistake);
  for (const auto& [name, values] : truth)
    if (!compare(operation, c.tensor(name), candidate.at(name), yardstick.at(name), values).pass)
      return false;
  return true;
} catch (const ContractViolation&) {
  return false;  // the mistake does not change this case's answer
}

Judgement judgement_of(const JudgedKernel& operation, const Case& c, const CaseRuns& runs) {
  Judgement judged;
  struct Touches {
    std::size_t run;
    std::vector<Finding> found;
  };
  std::vector<Touches> touches;
  for (std::size_t run = 0; run < runs.runs.size(); ++run) touches.push_back({run, {}});
  in_parallel(touches, [&](Touches& one) {
    for (const Tensor& tensor : c.tensors)
      Touched(c, tensor, kRunFills[one.run], runs.runs[one.run]).find(one.found);
  });
  for (Touches& one : touches)
    if (judged.findings.empty()) judged.findings = std::move(one.found);
  if (!runs.strayed.empty())
    judged.findings.push_back(
        {FindingKind::out_of_range,
         fmt::format("{}: memory between its elements, which lie far apart, was written",
                     runs.strayed),
         "nothing written", "written"});
  compare_runs(c, runs, judged.findings);
  struct Computed {
    const decltype(JudgedKernel::truth)& definition;
    Answer answer;
  };
  std::vector<Computed> computed{{operation.truth, {}}, {operation.yardstick, {}}};
  in_parallel(computed, [&](Computed& one) { one.answer = one.definition(c, ""); });
  const Answer &truth = computed[0].answer, &yardstick = computed[1].answer;
  for (const Tensor& tensor : c.tensors) {
    if (tensor.role == Role::input) continue;
    const std::vector<double>&want = truth.at(tensor.name), &allowed = yardstick.at(tensor.name);
    judged.answer[tensor.name] = results_of(c, tensor, runs.runs[0], want);
    const std::vector<double>& got = judged.answer[tensor.name];
    Measured one{.name = tensor.name, .verdict = compare(operation, tensor, got, allowed, want)};
    if (!one.verdict.pass) {
      double largest = 0;
      for (const double x : want)
        if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
      const double bound = operation.exact
                               ? 0
                               : 4 * largest_error(allowed, want) +
                                     unit_in_last_place(largest, format_of(tensor.type));
      one.where = where_wrong(c, tensor, got, want, bound);
      judged.findings.push_back(
          {FindingKind::output_differs,
           fmt::format("{}: {}; {}", tensor.name, one.where, one.verdict.text),
           "within the yardstick", "beyond it"});
    }
    judged.measured.push_back(std::move(one));
  }
  std::stable_sort(judged.findings.begin(), judged.findings.end(),
                   [](const Finding& a, const Finding& b) { return a.kind < b.kind; });
  return judged;
}

std::vector<Finding> findings_of_calls(const JudgedKernel& operation, const Case& c,
                                       const TimedRuns& calls, std::string_view call) {
  std::vector<Finding> findings;
  if (calls.reported_us > 0)
    findings.push_back({FindingKind::answer_differs,
                        fmt::format("the candidate's process reports {:.2f} us for a call, and the "
                                    "judge's clock counts {:.2f} us",
                                    calls.reported_us, calls.us),
                        fmt::format("{:.2f} us", calls.us),
                        fmt::format("{:.2f} us", calls.reported_us)});
  if (calls.wrong == 0) return findings;
  const std::string which =
      fmt::format("{} of {} left other bytes than an untimed one on the same inputs", calls.wrong,
                  counted(calls.compared, call));
  const Answer truth = operation.truth(c, ""), yardstick = operation.yardstick(c, "");
  for (const Tensor& tensor : c.tensors) {
    if (tensor.role == Role::input) continue;
    const std::vector<double>&want = truth.at(tensor.name), &allowed = yardstick.at(tensor.name);
    const std::vector<double> got = results_of(c, tensor, calls.wrong_bytes, want);
    const Verdict verdict = compare(operation, tensor, got, allowed, want);
    if (!verdict.pass)
      findings.push_back({FindingKind::output_differs,
                          fmt::format("{}: {}; {}", which, tensor.name, verdict.text),
                          "the results of the untimed call", "others"});
  }
  if (findings.empty())
    findings.push_back({FindingKind::nondeterministic, which, "the same bits",
                        "other bits in " + counted(calls.wrong, "call")});
  return findings;
}

}  // namespace lockstep::judging
