#include "cache_sim/report/comparison.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cache_sim/compare/comparison_json.hpp"
#include "cache_sim/report/svg.hpp"
#include "reference/base/shell_words.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kGib = std::int64_t{1} << 30;

// --- Collecting ----------------------------------------------------------------------------------

double hit_ratio(const ComparedPolicy& row) {
  return rounded_ratio(row.measures.hit_tokens, row.measures.input_tokens);
}

/// The name without what stands only on this page: 41.3 %.
std::string percent_text(double ratio) {
  return fmt::format("{:.1f} %", ratio * 100);
}

bool is_hybrid(const ComparedPolicy& row) {
  return row.scheduled &&
         Registry<PolicyEntry>::find(std::string_view(row.policy).substr(0, row.policy.find('@')))
             ->has_states;
}

/// A capacity as --capacity takes it.
std::string capacity_word(const std::optional<std::int64_t>& capacity) {
  if (!capacity) return "inf";
  return *capacity % kGib == 0 ? fmt::format("{}GiB", *capacity / kGib)
                               : fmt::format("{}", *capacity);
}

/// The command that makes this comparison again.
std::string command_of(const CompareRequest& request) {
  std::string policies;
  for (const std::string& policy : request.policies)
    policies += (policies.empty() ? "" : ",") + policy;
  std::string command = fmt::format("lockstep compare {} --policies {}",
                                    shell_quoted(request.workload), shell_quoted(policies));
  for (const auto& capacity : request.capacities)
    command += " --capacity " + capacity_word(capacity);
  if (!request.config.empty()) command += " --config " + shell_quoted(request.config);
  if (request.model != kDefaultModel) command += " --model " + request.model;
  if (request.limit != 0) command += fmt::format(" --limit {}", request.limit);
  return command;
}

/// The rows of a policy by growing capacity.
std::vector<const ComparedPolicy*> curve_of(const Comparison& comparison,
                                            const std::string& policy) {
  std::vector<const ComparedPolicy*> rows;
  for (const ComparedPolicy& row : comparison.policies)
    if (row.policy == policy) rows.push_back(&row);
  std::sort(rows.begin(), rows.end(), [](const auto* a, const auto* b) {
    return a->capacity.value_or(0) < b->capacity.value_or(0);
  });
  return rows;
}

const ComparedPolicy* largest(const Comparison& comparison, const std::string& policy) {
  const auto rows = curve_of(comparison, policy);
  return rows.empty() ? nullptr : rows.back();
}

/// What infinite memory would give, and how much of it each rule for states keeps.
std::string bound_sentence(const Comparison& comparison) {
  const ComparedPolicy* const kv = largest(comparison, "kv-bound");
  const ComparedPolicy* const ends = largest(comparison, "state-at-end");
  const ComparedPolicy* const branches = largest(comparison, "state-at-end-and-branch");
  if (kv == nullptr || ends == nullptr || branches == nullptr) return "";
  const double enough = 0.9 * hit_ratio(*kv);
  return fmt::format(
      "With unlimited memory, attention alone hits {} of the input tokens; a hybrid model with a "
      "state at the end of each request hits {}, and with one at each branch as well {}: {}",
      percent_text(hit_ratio(*kv)), percent_text(hit_ratio(*ends)),
      percent_text(hit_ratio(*branches)),
      hit_ratio(*ends) > enough       ? "a state at each end is nearly enough."
      : hit_ratio(*branches) > enough ? "take a policy that keeps states at branches."
                                      : "take a policy that keeps states in between.");
}

/// Why a policy can stand above its upper bound.
std::string above_bound_sentence(const Comparison& comparison) {
  const ComparedPolicy* const kv = largest(comparison, "kv-bound");
  if (kv == nullptr || comparison.block <= 1) return "";
  for (const ComparedPolicy& row : comparison.policies)
    if (row.scheduled && hit_ratio(row) > hit_ratio(*kv))
      return fmt::format(
          "{} stands above kv-bound ({:.4f} % against {:.4f} %): ideal policies look prompts up in "
          "whole blocks of the workload, {} tokens here, as its publishers count; {} also hits "
          "parts of blocks.",
          row.policy, hit_ratio(row) * 100, hit_ratio(*kv) * 100, comparison.block, row.policy);
  return "";
}

/// What memory beyond the policy's largest capacity can add; the end of a sentence.
std::string more_memory(const Comparison& comparison, const ComparedPolicy& row) {
  const std::string capacity = capacity_text(row.capacity);
  const bool was_short = row.measures.evicted_tokens != 0 || row.measures.evicted_states != 0 ||
                         row.preemptions != 0 || row.refused_requests != 0;
  if (!was_short && row.tells_contents)
    return fmt::format(" With {} nothing was evicted: more memory would add nothing.", capacity);
  const ComparedPolicy* const kv = largest(comparison, "kv-bound");
  if (kv == nullptr && !row.tells_contents)
    return " --policies kv-bound,… says what more memory can add.";
  if (kv == nullptr)
    return fmt::format(" With {} it still evicts; --policies kv-bound,… says what more can add.",
                       capacity);
  return fmt::format(" More than {} can add {:.1f} points at most, up to kv-bound.", capacity,
                     std::max(0.0, (hit_ratio(*kv) - hit_ratio(row)) * 100));
}

/// What one more step of memory is worth to a policy.
std::string memory_sentence(const Comparison& comparison, const std::string& policy) {
  const auto rows = curve_of(comparison, policy);
  const double best = hit_ratio(*rows.back());
  const std::string more = more_memory(comparison, *rows.back());
  if (rows.size() == 1)
    return fmt::format("{} hits {} with {}.", policy, percent_text(best),
                       capacity_text(rows.back()->capacity)) +
           more;
  const auto enough = std::find_if(rows.begin(), rows.end(), [&](const ComparedPolicy* row) {
    return hit_ratio(*row) >= 0.95 * best;
  });
  std::string sentence =
      fmt::format("{} hits {} with {} and {} with {}", policy,
                  percent_text(hit_ratio(*rows.front())), capacity_text(rows.front()->capacity),
                  percent_text(best), capacity_text(rows.back()->capacity));
  if (*enough == rows.back()) {
    const ComparedPolicy& before = **(rows.end() - 2);
    return sentence +
           fmt::format(
               "; each step of memory still pays: the last one, from {}, adds {:.1f} points.",
               capacity_text(before.capacity), (best - hit_ratio(before)) * 100) +
           more;
  }
  return sentence +
         fmt::format("; {} already give nearly all of it.", capacity_text((*enough)->capacity)) +
         more;
}

/// What a hybrid policy's states were worth.
std::string states_sentence(const Comparison& comparison, const std::string& policy) {
  const auto rows = curve_of(comparison, policy);
  const ComparedPolicy& row = *rows[rows.size() / 2];
  if (row.measures.states_admitted == 0) return "";
  return fmt::format(
      "Of the states that {} stored with {}, {} were never hit.", policy,
      capacity_text(row.capacity),
      percent_text(rounded_ratio(row.measures.states_never_hit, row.measures.states_admitted)));
}

/// Which of the hybrid policies to take, where there are several.
std::string choice_sentence(const Comparison& comparison) {
  const ComparedPolicy* best = nullptr;
  const ComparedPolicy* next = nullptr;
  for (const ComparedPolicy& row : comparison.policies) {
    if (!is_hybrid(row) || &row != largest(comparison, row.policy)) continue;
    if (best == nullptr || hit_ratio(row) > hit_ratio(*best)) {
      next = best;
      best = &row;
    } else if (next == nullptr || hit_ratio(row) > hit_ratio(*next)) {
      next = &row;
    }
  }
  if (next == nullptr) return "";
  return fmt::format(
      "Of the hybrid policies, {} serves this workload best: {} against {} of {}, "
      "with {} each.",
      best->policy, percent_text(hit_ratio(*best)), percent_text(hit_ratio(*next)), next->policy,
      capacity_text(best->capacity));
}

/// How much a better choice of what to evict could give.
std::string eviction_sentence(const Comparison& comparison) {
  const auto lru = curve_of(comparison, "lru");
  const auto belady = curve_of(comparison, "belady");
  if (lru.empty() || belady.empty()) return "";
  const double gain = hit_ratio(*belady.front()) - hit_ratio(*lru.front());
  return fmt::format(
      "With {}, evicting what was used longest ago hits {}, and knowing the future "
      "{} (attention alone): {}",
      capacity_text(lru.front()->capacity), percent_text(hit_ratio(*lru.front())),
      percent_text(hit_ratio(*belady.front())),
      gain > 0.02 ? "a better choice of what to evict is worth looking for."
                  : "a better choice of what to evict would gain little.");
}

/// The picture's axis of ratios: a few round steps up to what is reached.
Json ratio_ticks(const Comparison& comparison) {
  double most = 0;
  for (const ComparedPolicy& row : comparison.policies) most = std::max(most, hit_ratio(row));
  const double step = most > 0.5 ? 0.25 : most > 0.2 ? 0.1 : 0.05;
  Json ticks = Json::array();
  for (int i = 0; i == 0 || (i - 1) * step < most; ++i) ticks.push_back(i * step);
  return ticks;
}

}  // namespace

std::vector<std::string> conclusions_of(const Comparison& comparison) {
  std::vector<std::string> sentences{choice_sentence(comparison), bound_sentence(comparison),
                                     above_bound_sentence(comparison)};
  std::vector<std::string> told;
  for (const ComparedPolicy& row : comparison.policies) {
    const bool known = std::find(told.begin(), told.end(), row.policy) != told.end();
    if (!row.scheduled || known) continue;
    told.push_back(row.policy);
    sentences.push_back(memory_sentence(comparison, row.policy));
    if (is_hybrid(row)) sentences.push_back(states_sentence(comparison, row.policy));
  }
  sentences.push_back(eviction_sentence(comparison));
  std::erase(sentences, "");
  return sentences;
}

Result<Json> comparison_of(const ComparisonPlan& plan) {
  return compare(plan.request).map([&](const Comparison& comparison) {
    return shown_comparison(plan, comparison);
  });
}

Json shown_comparison(const ComparisonPlan& plan, const Comparison& comparison) {
  Json json = comparison_json(plan.request, comparison);
  json["title"] = plan.title;
  json["about"] = plan.about;
  json["command"] = command_of(plan.request);
  for (std::size_t i = 0; i < comparison.policies.size(); ++i)
    json["policies"][i]["capacity_text"] = capacity_text(comparison.policies[i].capacity);
  json["ticks"] = ratio_ticks(comparison);
  json["conclusions"] = conclusions_of(comparison);
  return json;
}

// --- The page ------------------------------------------------------------------------------------

namespace {

/// The rows of one policy, by growing capacity.
struct Curve {
  std::string policy;
  std::vector<JsonField> rows;
  bool infinite() const { return rows.front().at("capacity").is_text(); }
};

std::vector<Curve> curves_of(const JsonField& comparison) {
  std::vector<Curve> curves;
  const JsonField rows = comparison.at("policies");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string policy = rows.item(i).at("policy").text();
    if (curves.empty() || curves.back().policy != policy) curves.push_back({policy, {}});
    curves.back().rows.push_back(rows.item(i));
  }
  return curves;
}

constexpr std::size_t kStyles = 12;  // c0 … c11 of style.css
constexpr double kLeft = 62;
constexpr double kWidth = 520;
constexpr double kHeight = 300;
constexpr double kTop = 12;
constexpr double kLabelHeight = 15;

/// Where ratios and capacities lie in the picture; capacities by their logarithm.
class Axes {
 public:
  Axes(const JsonField& comparison, const std::vector<Curve>& curves) {
    const JsonField ticks = comparison.at("ticks");
    most_ = ticks.item(ticks.size() - 1).number();
    for (const Curve& curve : curves)
      if (!curve.infinite())
        for (const JsonField& row : curve.rows) {
          first_ = std::min(first_, log_of(row));
          last_ = std::max(last_, log_of(row));
        }
  }
  double y(const JsonField& ratio) const { return kTop + kHeight * (1 - ratio.number() / most_); }
  double x(const JsonField& row) const {
    if (last_ <= first_) return kLeft + kWidth / 2;
    return kLeft + 14 + (log_of(row) - first_) / (last_ - first_) * (kWidth - 28);
  }

 private:
  static double log_of(const JsonField& row) { return std::log2(row.at("capacity").number()); }
  double most_ = 1;
  double first_ = 64;
  double last_ = 0;
};

void draw_axes(Svg& svg, const JsonField& comparison, const std::vector<Curve>& curves,
               const Axes& axes) {
  const JsonField ticks = comparison.at("ticks");
  for (std::size_t i = 0; i < ticks.size(); ++i) {
    const double y = axes.y(ticks.item(i));
    svg.line({kLeft, y}, {kLeft + kWidth, y}, i == 0 ? "axis" : "faint");
    svg.text({kLeft - 6, y + 4}, "small dim end", percent(ticks.item(i), Medium::svg));
  }
  const auto finite = std::find_if(curves.begin(), curves.end(),
                                   [](const Curve& curve) { return !curve.infinite(); });
  if (finite == curves.end()) return;
  for (const JsonField& row : finite->rows)
    svg.text({axes.x(row), kTop + kHeight + 16}, "small dim middle",
             words(row.at("capacity_text"), Medium::svg));
}

/// How a curve is drawn: a piece of it, from `from` on to the right, with the shape of its points.
void draw_key(Svg& svg, Point from, std::size_t number, bool has_points) {
  const std::string style = fmt::format("curve c{}", number % kStyles);
  svg.line(from, {from.x + 18, from.y}, style);
  if (has_points)
    svg.rect({from.x + 6, from.y - 3, 6, 6}, style + " point", number % 2 == 0 ? 3 : 0);
}

/// The curves' names below the picture, for windows that are too narrow for those beside it.
View keys_view(const JsonField& comparison) {
  View keys = list_view();
  const std::vector<Curve> curves = curves_of(comparison);
  for (std::size_t i = 0; i < curves.size(); ++i) {
    Svg svg(18, 10, "");
    draw_key(svg, {0, 5}, i, !curves[i].infinite());
    View key = object_view();
    key.set("box", svg.markup());
    key.set("name", words(curves[i].rows[0].at("policy"), Medium::html));
    keys.push_back(key);
  }
  return keys;
}

std::string curves_picture(const JsonField& comparison) {
  const std::vector<Curve> curves = curves_of(comparison);
  const Axes axes(comparison, curves);
  Svg svg(kLeft + kWidth + 190, kTop + kHeight + 24, "hit ratio of each policy against capacity");
  draw_axes(svg, comparison, curves, axes);
  struct Label {
    double y;
    std::size_t curve;
  };
  std::vector<Label> labels;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const Curve& curve = curves[i];
    const std::string style = fmt::format("curve c{}", i % kStyles);
    std::vector<Point> points;
    for (const JsonField& row : curve.rows) {
      const double y = axes.y(row.at("hit_ratio"));
      if (curve.infinite()) points.push_back({kLeft, y});
      points.push_back({curve.infinite() ? kLeft + kWidth : axes.x(row), y});
    }
    svg.path(points, style);
    if (!curve.infinite())
      for (const Point& point : points)
        svg.rect({point.x - 3, point.y - 3, 6, 6}, style + " point", i % 2 == 0 ? 3 : 0);
    labels.push_back({points.back().y, i});
  }
  // Names stand at the ends of their curves, and make room for each other.
  std::stable_sort(labels.begin(), labels.end(),
                   [](const Label& a, const Label& b) { return a.y < b.y; });
  for (std::size_t i = 1; i < labels.size(); ++i)
    labels[i].y = std::max(labels[i].y, labels[i - 1].y + kLabelHeight);
  double below = kTop + kHeight;
  for (std::size_t i = labels.size(); i-- > 0;) {
    labels[i].y = std::min(labels[i].y, below);
    below = labels[i].y - kLabelHeight;
  }
  for (const Label& label : labels) {
    const Curve& curve = curves[label.curve];
    const double x = kLeft + kWidth + 8;
    draw_key(svg, {x, label.y}, label.curve, !curve.infinite());
    svg.text({x + 24, label.y + 4}, "small", words(curve.rows[0].at("policy"), Medium::svg));
  }
  return svg.markup();
}

}  // namespace

View comparison_view(const JsonField& comparison) {
  View view = view_of(comparison, {"ticks"});
  view.set("picture", curves_picture(comparison));
  view.set("keys", keys_view(comparison));
  return view;
}

}  // namespace lockstep::cache_sim
