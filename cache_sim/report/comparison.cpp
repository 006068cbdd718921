#include "cache_sim/report/comparison.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "cache_sim/compare/comparison_json.hpp"
#include "cache_sim/report/svg.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/shell_words.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kGib = std::int64_t{1} << 30;

// --- Collecting ----------------------------------------------------------------------------------

double hit_ratio(const ComparedPolicy& row) {
  return rounded_ratio(row.measures.hit_tokens, row.measures.input_tokens);
}

/// A ratio as text that stands on this page alone: 41.3 %.
std::string percent_text(double ratio) {
  return fmt::format("{:.1f} %", ratio * 100);
}

bool is_hybrid(const ComparedPolicy& row) {
  return row.scheduled &&
         Registry<PolicyEntry>::find(std::string_view(row.policy).substr(0, row.policy.find('@')))
             ->has_states;
}

/// A capacity in the form of --capacity.
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
  for (const std::int64_t bytes : request.hosts) command += " --host " + capacity_word(bytes);
  if (!request.config.empty()) command += " --config " + shell_quoted(request.config);
  if (request.model != kDefaultModel) command += " --model " + request.model;
  if (request.cost != kModelCost) command += " --cost " + shell_quoted(request.cost);
  if (request.evidence != kDefaultEvidence)
    command += " --evidence " + shell_quoted(request.evidence);
  if (request.limit != 0) command += fmt::format(" --limit {}", request.limit);
  return command;
}

/// The bytes in which the rows of a policy differ; nothing: it has one row for all.
std::optional<std::int64_t> memory_of(const Comparison& comparison, const ComparedPolicy& row) {
  return comparison.by_host ? row.host_bytes : row.capacity;
}

/// The memory of a row: 16 GiB, or 64 GiB on the host.
std::string memory_text(const Comparison& comparison, const ComparedPolicy& row) {
  return comparison.by_host && row.host_bytes ? capacity_text(row.host_bytes) + " on the host"
                                              : capacity_text(row.capacity);
}

/// The rows of a policy, by growing memory.
std::vector<const ComparedPolicy*> curve_of(const Comparison& comparison,
                                            const std::string& policy) {
  std::vector<const ComparedPolicy*> rows;
  for (const ComparedPolicy& row : comparison.policies)
    if (row.policy == policy) rows.push_back(&row);
  std::ranges::sort(rows, [&](const auto* a, const auto* b) {
    return memory_of(comparison, *a).value_or(0) < memory_of(comparison, *b).value_or(0);
  });
  return rows;
}

const ComparedPolicy* largest(const Comparison& comparison, const std::string& policy) {
  const auto rows = curve_of(comparison, policy);
  return rows.empty() ? nullptr : rows.back();
}

/// A sentence on the hit ratio with infinite memory, and how much of it each rule for states keeps.
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

/// A sentence on why a policy can be above its upper bound.
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

/// The end of a sentence: the gain from more memory than the policy's largest capacity.
std::string more_memory(const Comparison& comparison, const ComparedPolicy& row) {
  const std::string capacity = memory_text(comparison, row);
  const bool was_short = row.measures.evicted_tokens != 0 || row.measures.evicted_states != 0 ||
                         row.preemptions != 0 || row.refused_requests != 0;
  if (!was_short && row.tells_contents)
    return fmt::format(" With {} nothing was evicted: more memory would add nothing.", capacity);
  const ComparedPolicy* const kv = largest(comparison, "kv-bound");
  if (kv == nullptr && !row.tells_contents)
    return " --policies kv-bound,… says what more memory can add.";
  if (kv == nullptr)
    return fmt::format(" With {} it {}; --policies kv-bound,… says what more can add.", capacity,
                       row.measures.evicted_tokens + row.measures.evicted_states == 0
                           ? "is short"
                           : "still evicts");
  return fmt::format(" More than {} can add {:.1f} points at most, up to kv-bound.", capacity,
                     std::max(0.0, (hit_ratio(*kv) - hit_ratio(row)) * 100));
}

/// A sentence on the gain of a policy from one more step of memory.
std::string memory_sentence(const Comparison& comparison, const std::string& policy) {
  const auto rows = curve_of(comparison, policy);
  const double best = hit_ratio(*rows.back());
  const std::string more = more_memory(comparison, *rows.back());
  if (rows.size() == 1)
    return fmt::format("{} hits {} with {}.", policy, percent_text(best),
                       memory_text(comparison, *rows.back())) +
           more;
  const auto enough = std::ranges::find_if(
      rows, [&](const ComparedPolicy* row) { return hit_ratio(*row) >= 0.95 * best; });
  std::string sentence =
      fmt::format("{} hits {} with {} and {} with {}", policy,
                  percent_text(hit_ratio(*rows.front())), memory_text(comparison, *rows.front()),
                  percent_text(best), memory_text(comparison, *rows.back()));
  if (*enough == rows.back()) {
    const ComparedPolicy& before = **(rows.end() - 2);
    return sentence +
           fmt::format(
               "; each step of memory still pays: the last one, from {}, adds {:.1f} points.",
               memory_text(comparison, before), (best - hit_ratio(before)) * 100) +
           more;
  }
  return sentence +
         fmt::format("; {} already give nearly all of it.", memory_text(comparison, **enough)) +
         more;
}

/// A sentence on the requests for which a row has no room. Its hits and times are those of others.
std::string refused_sentence(const Comparison& comparison, const ComparedPolicy& row) {
  if (row.refused_requests == 0) return "";
  return fmt::format(
      "With {} {} refuses {} of {}, which have no room even alone: their tokens count as missed, "
      "and they are in none of its times.",
      memory_text(comparison, row), row.policy, row.refused_requests,
      counted(row.measures.requests, "request"));
}

/// A sentence on the use of a hybrid policy's states.
std::string states_sentence(const Comparison& comparison, const std::string& policy) {
  const auto rows = curve_of(comparison, policy);
  const ComparedPolicy& row = *rows[rows.size() / 2];
  if (row.measures.states_admitted == 0) return "";
  return fmt::format(
      "Of the states that {} stored with {}, {} were never hit.", policy,
      memory_text(comparison, row),
      percent_text(rounded_ratio(row.measures.states_never_hit, row.measures.states_admitted)));
}

/// A sentence on the host tier of a policy.
std::string host_sentence(const Comparison& comparison, const std::string& policy) {
  const auto rows = curve_of(comparison, policy);
  const ComparedPolicy& row = *rows[rows.size() / 2];
  if (!row.host) return "";
  return fmt::format(
      "Of what {} hits with {}, {} comes from the host: {} GiB went there, and {} GiB came "
      "back.{}",
      policy, memory_text(comparison, row),
      percent_text(rounded_ratio(row.host->hit_tokens, row.measures.hit_tokens)),
      gib_text(row.host->bytes_to_host), gib_text(row.host->bytes_to_device),
      row.blocks > 0 ? " Its host has one pool for KV and states, which nobody splits." : "");
}

/// A sentence on the ranks of a policy.
std::string ranks_sentence(const Comparison& comparison, const std::string& policy) {
  const auto rows = curve_of(comparison, policy);
  const ComparedPolicy& row = *rows[rows.size() / 2];
  if (!row.idle_share) return "";
  return fmt::format("With {} the ranks of {} wait {} of their time for the slowest one.",
                     memory_text(comparison, row), policy, percent_text(*row.idle_share));
}

/// The policies to choose from with this memory, with the most hits first: hybrid policies or, if
/// there are none, all policies of servers.
std::vector<const ComparedPolicy*> choices_at(const Comparison& comparison, std::int64_t memory) {
  const bool hybrid = std::ranges::any_of(comparison.policies, is_hybrid);
  std::vector<const ComparedPolicy*> rows;
  for (const ComparedPolicy& row : comparison.policies)
    if (row.scheduled && is_hybrid(row) == hybrid && memory_of(comparison, row) == memory)
      rows.push_back(&row);
  std::ranges::stable_sort(
      rows, [](const auto* a, const auto* b) { return hit_ratio(*a) > hit_ratio(*b); });
  return rows;
}

std::set<std::int64_t> memories_of(const Comparison& comparison) {
  std::set<std::int64_t> memories;
  for (const ComparedPolicy& row : comparison.policies)
    if (const auto memory = memory_of(comparison, row)) memories.insert(*memory);
  return memories;
}

/// A sentence on the best policy for this memory, if there are several.
std::string choice_sentence(const Comparison& comparison, std::int64_t memory) {
  const auto rows = choices_at(comparison, memory);
  if (rows.size() < 2) return "";
  const std::string best = percent_text(hit_ratio(*rows[0]));
  std::vector<std::string> first{rows[0]->policy};
  std::size_t next = 1;
  for (; next < rows.size() && percent_text(hit_ratio(*rows[next])) == best; ++next)
    first.push_back(rows[next]->policy);
  const std::string with = fmt::format("With {}", memory_text(comparison, *rows[0]));
  if (next == rows.size())
    return fmt::format("{} all {}policies reuse as much: {} of the input tokens.", with,
                       is_hybrid(*rows[0]) ? "hybrid " : "", best);
  return fmt::format("{} {} reuse{} the most{}: {} of the input tokens; then {} with {}.", with,
                     fmt::join(first, " and "), next == 1 ? "s" : "",
                     is_hybrid(*rows[0]) ? " among hybrid policies" : "", best, rows[next]->policy,
                     percent_text(hit_ratio(*rows[next])));
}

/// A sentence on why a policy with blocks has no hit in a prompt that others hit in part.
std::string block_sentence(const Comparison& comparison) {
  std::vector<std::string> policies;
  std::int64_t block = 0;
  for (const ComparedPolicy& row : comparison.policies)
    if (row.block > 0 && std::ranges::find(policies, row.policy) == policies.end()) {
      policies.push_back(row.policy);
      block = row.block;
    }
  if (policies.empty()) return "";
  return fmt::format(
      "{} look{} prompts up in whole blocks of {} tokens, whose KV is as large as a state of {}: a "
      "request that shares less with an earlier one hits nothing.",
      fmt::join(policies, " and "), policies.size() == 1 ? "s" : "", block, comparison.model.name);
}

/// A sentence on the possible gain from better eviction.
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

/// A sentence for each kernel of `measured:CARD` on where its times come from.
std::vector<std::string> evidence_sentences(const Comparison& comparison) {
  std::vector<std::string> sentences;
  if (comparison.measured == nullptr) return sentences;
  for (const KernelEvidence& one : comparison.measured->evidence)
    sentences.push_back(
        one.is_used ? fmt::format("Times of {} are measured on {}: {}, commit {:.8}, {}.",
                                  one.operation, one.gpu, one.file, one.commit, one.date)
                    : fmt::format("Times of {} are modelled: {} was measured on {}, not on {}.",
                                  one.operation, one.file, one.gpu, comparison.measured->gpu));
  return sentences;
}

/// A sentence on which parts of the time of a row's steps are measured, and which modelled.
std::string cost_sentence(const ComparedPolicy& row) {
  const Nanoseconds total = row.step_time();
  if (total == 0) return "";
  const auto parts = [&](Nanoseconds CostPart::*const kind) {
    std::vector<std::string> list;
    for (const CostPart& part : row.cost_parts)
      if (const double share = rounded_ratio(part.*kind, total); share >= 0.0005)
        list.push_back(fmt::format("{} {}", part.name, percent_text(share)));
    return list.empty() ? "" : fmt::format(" ({})", fmt::join(list, ", "));
  };
  const double measured = row.measured_share();
  return fmt::format(
      "{}, {}: {} of the time of its steps are measured{}, {} modelled{}; its times and tokens a "
      "second follow from these.",
      row.policy, capacity_text(row.capacity), percent_text(measured), parts(&CostPart::measured),
      percent_text(1 - measured), parts(&CostPart::modelled));
}

/// The axis of ratios: a few round steps up to the largest ratio.
Json ratio_ticks(const Comparison& comparison) {
  double most = 0;
  for (const ComparedPolicy& row : comparison.policies) most = std::max(most, hit_ratio(row));
  const double step = most > 0.5 ? 0.25 : most > 0.2 ? 0.1 : 0.05;
  Json ticks = Json::array();
  for (int i = 0; i == 0 || (i - 1) * step < most; ++i) ticks.push_back(i * step);
  return ticks;
}

/// The axis of times: 1, 2, 5, 10, … from below all times to above all times.
Json time_ticks(const Comparison& comparison) {
  Nanoseconds least = 0, most = 0;
  for (const ComparedPolicy& row : comparison.policies) {
    if (!row.ttft || row.ttft->mean <= 0) continue;
    least = least == 0 ? row.ttft->mean : std::min(least, row.ttft->mean);
    most = std::max(most, row.ttft->mean);
  }
  Json ticks = Json::array();
  const auto next = [](Nanoseconds tick) {
    return std::to_string(tick).front() == '2' ? tick / 2 * 5 : tick * 2;
  };
  for (Nanoseconds tick = 1; most > 0 && (ticks.empty() || ticks.back() < most); tick = next(tick))
    if (next(tick) > least) ticks.push_back(tick);
  return ticks;
}

}  // namespace

Conclusions conclusions_of(const Comparison& comparison) {
  Conclusions conclusions;
  for (const std::int64_t memory : memories_of(comparison))
    conclusions.general.push_back(choice_sentence(comparison, memory));
  for (const auto sentence :
       {bound_sentence, above_bound_sentence, eviction_sentence, block_sentence})
    conclusions.general.push_back(sentence(comparison));
  std::vector<std::string> told;
  for (const ComparedPolicy& row : comparison.policies) {
    const bool known = std::ranges::find(told, row.policy) != told.end();
    if (!row.scheduled || known) continue;
    told.push_back(row.policy);
    conclusions.of_policies.push_back(memory_sentence(comparison, row.policy));
    for (const ComparedPolicy* const one : curve_of(comparison, row.policy))
      conclusions.of_policies.push_back(refused_sentence(comparison, *one));
    if (is_hybrid(row)) conclusions.of_policies.push_back(states_sentence(comparison, row.policy));
    conclusions.of_policies.push_back(host_sentence(comparison, row.policy));
    conclusions.of_policies.push_back(ranks_sentence(comparison, row.policy));
  }
  for (std::string& sentence : evidence_sentences(comparison))
    conclusions.general.push_back(std::move(sentence));
  for (const ComparedPolicy& row : comparison.policies)
    conclusions.of_policies.push_back(cost_sentence(row));
  std::erase(conclusions.general, "");
  std::erase(conclusions.of_policies, "");
  return conclusions;
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
  for (std::size_t i = 0; i < comparison.policies.size(); ++i) {
    const ComparedPolicy& row = comparison.policies[i];
    Json& shown = json["policies"][i];
    const std::optional<std::int64_t> memory = memory_of(comparison, row);
    shown["capacity_text"] = capacity_text(row.capacity);
    if (row.host_bytes) shown["host_text"] = capacity_text(row.host_bytes);
    shown["memory"] = memory ? Json(*memory) : Json();
    shown["memory_text"] = capacity_text(memory);
    const std::string where = fmt::format("{}, {}: ", row.policy, memory_text(comparison, row));
    shown["hit_text"] = where + percent_text(hit_ratio(row));
    if (row.ttft) shown["ttft_text"] = where + moment_text(row.ttft->mean);
    if (row.ttft) shown["speed_text"] = fmt::format("{:.1f}", row.output_tokens_per_s);
    const auto choices =
        memory ? choices_at(comparison, *memory) : std::vector<const ComparedPolicy*>{};
    shown["is_best"] = choices.size() > 1 && row.scheduled &&
                       is_hybrid(row) == is_hybrid(*choices[0]) &&
                       hit_ratio(row) == hit_ratio(*choices[0]);
  }
  json["by_host"] = comparison.by_host;
  json["ticks"] = ratio_ticks(comparison);
  json["ttft_ticks"] = time_ticks(comparison);
  const Conclusions conclusions = conclusions_of(comparison);
  json["conclusions"] = conclusions.general;
  json["of_policies"] = conclusions.of_policies;
  return json;
}

// --- The page ------------------------------------------------------------------------------------

namespace {

/// The rows of one policy, by growing memory.
struct Curve {
  std::string policy;
  std::vector<JsonField> rows;
  bool is_one_row() const { return !rows.front().has("memory"); }
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

constexpr std::size_t kStyles = 12;  // the classes c0 … c11 of style.css
constexpr double kLeft = 52;
constexpr double kWidth = 430;
constexpr double kHeight = 280;
constexpr double kTop = 12;

/// One figure of each row, for the vertical axis of a picture.
struct Plot {
  std::string_view label, ticks, text;
  bool is_time;
  std::optional<double> value(const JsonField& row) const {
    if (!is_time) return row.at("hit_ratio").number();
    if (!row.has("ttft") || row.at("ttft").at("mean_ns").number() <= 0) return std::nullopt;
    return std::log10(row.at("ttft").at("mean_ns").number());
  }
  double tick(const JsonField& field) const {
    return is_time ? std::log10(field.number()) : field.number();
  }
};
constexpr Plot kHits{"hit ratio of each policy against memory", "ticks", "hit_text", false};
constexpr Plot kTimes{"time to the first token against memory", "ttft_ticks", "ttft_text", true};

/// The axes of a picture: figures vertically, the logarithm of memory horizontally.
class Axes {
 public:
  Axes(const Plot& plot, const JsonField& ticks, const std::vector<Curve>& curves)
      : least_(plot.tick(ticks.item(0))), most_(plot.tick(ticks.item(ticks.size() - 1))) {
    for (const Curve& curve : curves)
      if (!curve.is_one_row())
        for (const JsonField& row : curve.rows) {
          first_ = std::min(first_, log_of(row));
          last_ = std::max(last_, log_of(row));
        }
  }
  double y(double value) const {
    return kTop + kHeight * (1 - (value - least_) / std::max(most_ - least_, 1e-9));
  }
  double x(const JsonField& row) const {
    if (last_ <= first_) return kLeft + kWidth / 2;
    return kLeft + 14 + (log_of(row) - first_) / (last_ - first_) * (kWidth - 28);
  }

 private:
  static double log_of(const JsonField& row) { return std::log2(row.at("memory").number()); }
  double least_, most_;
  double first_ = 64;
  double last_ = 0;
};

void draw_axes(Svg& svg, const Plot& plot, const JsonField& ticks, const std::vector<Curve>& curves,
               const Axes& axes) {
  for (std::size_t i = 0; i < ticks.size(); ++i) {
    const double y = axes.y(plot.tick(ticks.item(i)));
    svg.line({kLeft, y}, {kLeft + kWidth, y}, i == 0 ? "axis" : "faint");
    svg.text(
        {kLeft - 6, y + 4}, "small dim end",
        plot.is_time ? moment(ticks.item(i), Medium::svg) : percent(ticks.item(i), Medium::svg));
  }
  const auto finite =
      std::ranges::find_if(curves, [](const Curve& curve) { return !curve.is_one_row(); });
  if (finite == curves.end()) return;
  for (const JsonField& row : finite->rows)
    svg.text({axes.x(row), kTop + kHeight + 16}, "small dim middle",
             words(row.at("memory_text"), Medium::svg));
}

std::string curve_style(std::size_t number) {
  return fmt::format("curve c{}", number % kStyles);
}

/// The legend below the pictures; clearing a box hides its curve.
View keys_view(const std::vector<Curve>& curves) {
  View keys = list_view();
  for (std::size_t i = 0; i < curves.size(); ++i) {
    Svg svg(42, 10, "");
    svg.line({0, 5}, {42, 5}, curve_style(i));  // as long as two strokes of the longest dashes
    if (!curves[i].is_one_row())
      svg.rect({18, 2, 6, 6}, curve_style(i) + " point", i % 2 == 0 ? 3 : 0);
    View key = object_view();
    key.set("number", std::to_string(i));
    key.set("box", svg.markup());
    key.set("name", words(curves[i].rows[0].at("policy"), Medium::html));
    keys.push_back(key);
  }
  return keys;
}

std::string curves_picture(const JsonField& comparison, const std::vector<Curve>& curves,
                           const Plot& plot) {
  const JsonField ticks = comparison.at(plot.ticks);
  if (ticks.size() == 0) return "";
  const Axes axes(plot, ticks, curves);
  Svg svg(kLeft + kWidth + 24, kTop + kHeight + 24, plot.label);
  draw_axes(svg, plot, ticks, curves, axes);
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const Curve& curve = curves[i];
    struct Place {
      Point at;
      JsonField row;
    };
    std::vector<Place> places;
    std::vector<Point> points;
    for (const JsonField& row : curve.rows) {
      const std::optional<double> value = plot.value(row);
      if (!value) continue;
      const double y = axes.y(*value);
      if (curve.is_one_row()) points.push_back({kLeft, y});
      points.push_back({curve.is_one_row() ? kLeft + kWidth : axes.x(row), y});
      places.push_back({points.back(), row});
    }
    svg.open_part(i);
    svg.path(points, curve_style(i));
    for (const Place& place : places)
      svg.rect({place.at.x - 3, place.at.y - 3, 6, 6}, curve_style(i) + " point",
               i % 2 == 0 ? 3 : 0, hover_title(place.row.at(plot.text)));
    svg.close_part();
  }
  return svg.markup();
}

/// A table of hit ratios: a row for each policy, a column for each memory.
void set_table(View& view, const std::vector<Curve>& curves) {
  const auto finite =
      std::ranges::find_if(curves, [](const Curve& curve) { return !curve.is_one_row(); });
  View columns = list_view(), rows = list_view();
  if (finite != curves.end())
    for (const JsonField& row : finite->rows) columns.push_back(view_of(row.at("memory_text")));
  for (const Curve& curve : curves) {
    View row = object_view(), cells = list_view();
    for (const JsonField& cell : curve.rows) {
      View one = view_of(cell.at("hit_ratio"));
      one.set("is_best", cell.at("is_best").flag());
      one.set("is_one_row", curve.is_one_row());
      cells.push_back(one);
    }
    row.set("policy", view_of(curve.rows[0].at("policy")));
    row.set("cells", cells);
    rows.push_back(row);
  }
  view.set("columns", columns);
  view.set("column_count", std::to_string(finite == curves.end() ? 1 : finite->rows.size()));
  view.set("rows", rows);
}

}  // namespace

View comparison_view(const JsonField& comparison) {
  View view = view_of(comparison, {"ticks", "ttft_ticks"});
  const std::vector<Curve> curves = curves_of(comparison);
  view.set("picture", curves_picture(comparison, curves, kHits));
  const std::string times = curves_picture(comparison, curves, kTimes);
  view.set("times", times.empty() ? View(false) : View(times));
  view.set("keys", keys_view(curves));
  set_table(view, curves);
  return view;
}

}  // namespace lockstep::cache_sim
