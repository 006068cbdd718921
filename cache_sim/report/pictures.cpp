#include "cache_sim/report/pictures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <vector>

#include "cache_sim/report/svg.hpp"

namespace lockstep::cache_sim {
namespace {

// --- The tree ------------------------------------------------------------------------------------

constexpr double kNodeHeight = 38;
constexpr double kNodeGap = 10;
constexpr double kHiddenHeight = 12;
constexpr double kLevelGap = 34;
constexpr double kMonoAdvance = 6.7;   // width of an 11 px character
constexpr double kSmallAdvance = 5.8;  // average width of a character that is not monospaced
constexpr std::size_t kMostEdgeCharacters = 20;
constexpr double kRootWidth = 44;

/// The place of a node in the picture.
struct DrawnNode {
  std::size_t level = 0;
  double y = 0;
  std::vector<std::size_t> children;
  double hidden_y = 0;  // place of the note on hidden children
};

std::string node_style(const JsonField& node, bool has_states) {
  const std::string guilty = node.at("guilty").flag() ? " guilty" : "";
  if (!has_states) return "node kv" + guilty;
  return (node.at("state").flag() ? "node state" : "node tombstone") + guilty;
}

class TreeDrawing {
 public:
  explicit TreeDrawing(const JsonField& tree)
      : tree_(tree),
        nodes_(tree.at("nodes")),
        shown_(static_cast<std::size_t>(tree.at("shown_count").integer())) {}

  std::string markup() {
    lay_out();
    Svg svg(left_of(widths_.size()) + hidden_width_, next_y_ - kNodeGap + 2,
            "the cache's tree, root on the left");
    constexpr double kRootMiddle = kNodeHeight / 2 + 1;
    for (const std::size_t root : roots_)
      svg.elbow({kRootWidth, kRootMiddle}, {left_of(0), middle_of(root)}, "edge");
    if (hidden_at_root_y_ > 0)
      draw_hidden(svg, tree_.at("hidden_at_root"), {kRootWidth, kRootMiddle}, 0, hidden_at_root_y_);
    svg.rect({1, kRootMiddle - 12, kRootWidth - 1, 24}, "node root", 12);
    svg.text({kRootWidth / 2 + 0.5, kRootMiddle + 4}, "small middle", "root");
    for (std::size_t i = 0; i < shown_; ++i) draw(svg, i);
    return svg.markup();
  }

 private:
  /// Lays the tree out as an outline: a node stands beside its first child, the others follow
  /// below.
  void lay_out() {
    drawn_.resize(shown_);
    for (std::size_t i = 0; i < shown_; ++i) {
      const std::int64_t parent = nodes_.item(i).at("parent").integer();
      if (parent < 0) {
        roots_.push_back(i);
      } else {
        DrawnNode& above = drawn_[static_cast<std::size_t>(parent)];
        above.children.push_back(i);
        drawn_[i].level = above.level + 1;
      }
      if (widths_.size() <= drawn_[i].level) widths_.resize(drawn_[i].level + 1);
      widths_[drawn_[i].level] = std::max(widths_[drawn_[i].level], width_of(nodes_.item(i)));
    }
    for (const std::size_t root : roots_) place(root);
    if (tree_.at("hidden_at_root").integer() > 0) hidden_at_root_y_ = place_hidden();
  }

  void place(std::size_t i) {
    DrawnNode& node = drawn_[i];
    const double top = next_y_;
    for (const std::size_t child : node.children) place(child);
    node.y = node.children.empty() ? top : drawn_[node.children.front()].y;
    next_y_ = std::max(next_y_, top + kNodeHeight + kNodeGap);
    if (nodes_.item(i).at("hidden_below").integer() > 0) node.hidden_y = place_hidden();
  }

  double place_hidden() {
    hidden_width_ = 90;
    const double y = next_y_ + 8;
    next_y_ += kHiddenHeight + kNodeGap;
    return y;
  }

  double middle_of(std::size_t i) const { return drawn_[i].y + kNodeHeight / 2 + 1; }
  double left_of(std::size_t level) const {
    double x = kRootWidth + kLevelGap;
    for (std::size_t i = 0; i < level; ++i)
      x += widths_[i] + (i + 1 < widths_.size() ? kLevelGap : 2);
    return x;
  }

  double width_of(const JsonField& node) const {
    const std::size_t edge = std::min(node.at("edge").text().size(), kMostEdgeCharacters);
    const std::int64_t depth = node.at("depth").integer();
    const std::size_t digits = std::to_string(depth).size() + (depth >= 1000 ? 1 : 0);
    const std::size_t below =
        digits + std::string_view(has_states() ? " deep · state slot 00" : " deep").size();
    const double lock = node.at("locked").flag() ? 20 : 0;
    return std::max(static_cast<double>(edge) * kMonoAdvance + 16 + lock,
                    static_cast<double>(below) * kSmallAdvance + 16);
  }
  bool has_states() const { return tree_.at("has_states").flag(); }

  void draw(Svg& svg, std::size_t i) const {
    const JsonField node = nodes_.item(i);
    const std::size_t level = drawn_[i].level;
    const double x = left_of(level);
    const double y = drawn_[i].y + 1;
    const double width = widths_[level];
    const Point right{x + width, middle_of(i)};
    for (const std::size_t child : drawn_[i].children)
      svg.elbow(right, {left_of(level + 1), middle_of(child)}, "edge");
    if (drawn_[i].hidden_y > 0)
      draw_hidden(svg, node.at("hidden_below"), right, level + 1, drawn_[i].hidden_y);
    svg.rect({x, y, width, kNodeHeight}, node_style(node, has_states()), 5,
             hover_title(node.at("edge")));
    svg.text({x + 8, y + 15}, "mono", words(node.at("edge"), Medium::svg, kMostEdgeCharacters));
    std::string below = count(node.at("depth"), Medium::svg) + " deep";
    if (node.has("state_slot"))
      below += " · state slot " + count(node.at("state_slot"), Medium::svg);
    else if (has_states())
      below += node.at("state").flag() ? " · state" : " · tombstone";
    svg.text({x + 8, y + 30}, "small", below);
    if (node.at("locked").flag()) svg.padlock({x + width - 17, y + 5});
    if (node.at("guilty").flag())
      svg.marker({x + width / 2, y + 1}, "retracted", "<title>the finding is about it</title>");
  }

  void draw_hidden(Svg& svg, const JsonField& hidden, Point from, std::size_t level,
                   double y) const {
    const double x = left_of(level) + (level == widths_.size() ? kLevelGap : 0);
    svg.elbow(from, {x, y}, "edge");
    svg.text({x + 5, y + 4}, "small dim", "and " + count(hidden, Medium::svg) + " more");
  }

  const JsonField& tree_;
  JsonField nodes_;
  std::size_t shown_;
  std::vector<DrawnNode> drawn_;
  std::vector<std::size_t> roots_;
  std::vector<double> widths_;  // by level
  double next_y_ = 0;
  double hidden_at_root_y_ = 0;
  double hidden_width_ = 2;
};

// --- Strips and rows -----------------------------------------------------------------------------

constexpr double kChartWidth = 490;  // two charts stand side by side

/// The number, from 1, of the event that the run's first finding names; 0 if there is none.
std::int64_t wrong_event(const JsonField& run) {
  const JsonField findings = run.at("run").at("findings");
  return findings.size() == 0 ? 0 : findings.item(0).at("event").integer();
}

/// The label of a pool, and the keys of its figures.
struct Strip {
  std::string_view title, used, used_max, total;
};

constexpr double kPoolsLeft = 58;  // room for the figures of the axis

double event_x(std::int64_t event, std::size_t count) {
  return kPoolsLeft + static_cast<double>(event) * (kChartWidth - kPoolsLeft) /
                          static_cast<double>(std::max<std::size_t>(count, 1));
}

double middle_of_event(std::int64_t event, std::size_t count) {
  return (event_x(event - 1, count) + event_x(event, count)) / 2;
}

/// Draws the first and the last event below the line at `bottom`, and through it the wrong event.
void draw_event_axis(Svg& svg, const JsonField& run, double bottom) {
  const JsonField events = run.at("events");
  if (events.size() == 0) return;
  const std::int64_t wrong = wrong_event(run);
  const double x = middle_of_event(wrong, events.size());
  constexpr double kWords = 110;  // room for "event 1,234 is wrong", and for an end of the axis
  if (wrong > 0) {
    svg.line({x, 18}, {x, bottom}, "wrong");
    svg.text({x, bottom + 15}, x > kChartWidth / 2 ? "small wrongtext end" : "small wrongtext",
             "event " + count(run.at("run").at("findings").item(0).at("event"), Medium::svg) +
                 " is wrong");
  }
  if (wrong == 0 || x > kPoolsLeft + 2 * kWords)
    svg.text({kPoolsLeft, bottom + 15}, "small dim",
             "event " + count(events.item(0).at("event"), Medium::svg));
  if (wrong == 0 || x < kChartWidth - 2 * kWords)
    svg.text({kChartWidth, bottom + 15}, "small dim end",
             "event " + count(events.item(events.size() - 1).at("event"), Medium::svg));
}

/// Draws a pool as a step line over the events; the largest value is at the top.
void draw_strip(Svg& svg, const JsonField& run, const Strip& strip, double top, double height) {
  const JsonField pools = run.at("pools");
  const JsonField events = run.at("events");
  svg.text({0, top + 12}, "label",
           fmt::format("{}, of {}", strip.title, count(pools.at(strip.total), Medium::svg)));
  const double base = top + height;
  const double room = height - 28;
  const auto total = static_cast<double>(pools.at(strip.total).integer());
  const auto most =
      static_cast<double>(std::max<std::int64_t>(pools.at(strip.used_max).integer(), 1));
  const bool shows_total = total <= 2 * most;
  const double scale = room / (shows_total ? total : most);
  const auto tick = [&](double value, std::string_view style, const std::string& text) {
    svg.line({kPoolsLeft, base - value * scale}, {kChartWidth, base - value * scale}, style);
    svg.text({kPoolsLeft - 6, base - value * scale + 4}, "small dim end", text);
  };
  svg.line({kPoolsLeft, base}, {kChartWidth, base}, "axis");
  if (shows_total) tick(total, "limit", count(pools.at(strip.total), Medium::svg));
  if (!shows_total || (total - most) * scale > 11)
    tick(most, "faint", count(pools.at(strip.used_max), Medium::svg));
  std::vector<Point> points{{kPoolsLeft, base}};
  double last = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const double y = static_cast<double>(events.item(i).at(strip.used).integer()) * scale;
    if (y == last) continue;
    const double x = event_x(static_cast<std::int64_t>(i), events.size());
    points.push_back({x, base - last});
    points.push_back({x, base - y});
    last = y;
  }
  points.push_back({kChartWidth, base - last});
  std::vector<Point> area = points;
  area.push_back({kChartWidth, base});
  svg.path(area, "area");
  svg.path(points, "step");
}

constexpr double kRowHeight = 24;
constexpr double kNameWidth = 96;
constexpr std::size_t kMostRows = 30;

/// The places of requests' rows, and the width of a nanosecond.
struct RequestRows {
  std::map<std::string, std::size_t> row_of;
  double scale = 0;
};

void draw_span(Svg& svg, const JsonField& span, const RequestRows& rows) {
  const auto row = rows.row_of.find(span.at("request").text());
  if (row == rows.row_of.end()) return;
  const std::string name = span.at("name").text();
  const double y = static_cast<double>(row->second) * kRowHeight + 4;
  const double begin = kNameWidth + static_cast<double>(span.at("begin_ns").integer()) * rows.scale;
  const double end = kNameWidth + static_cast<double>(span.at("end_ns").integer()) * rows.scale;
  if (name == "retracted") {
    svg.marker({begin, y + 10}, "retracted", hover_title(span.at("name")));
    return;
  }
  const double width = std::max(end - begin, 2.0);
  const std::string style =
      name == "queued" || name == "prefill" || name == "decode" ? name : "other";
  if (name == "queued")
    svg.rect({begin, y + 5, width, kRowHeight - 18}, "queued", 0, hover_title(span.at("name")));
  else
    svg.rect({begin, y, width, kRowHeight - 8}, style, 2, hover_title(span.at("name")));
  if (width > static_cast<double>(name.size()) * 6.2 + 8 && name != "queued")
    svg.text({begin + 5, y + 12}, "small", words(span.at("name"), Medium::svg));
}

}  // namespace

std::string tree_picture(const JsonField& tree) {
  return TreeDrawing(tree).markup();
}

std::string pools_picture(const JsonField& run) {
  constexpr double kStripHeight = 84;
  constexpr double kStripGap = 14;
  const JsonField pools = run.at("pools");
  std::vector<Strip> strips{{"KV tokens in use", "kv_used", "kv_used_max", "kv_total"}};
  if (pools.at("states_total").integer() > 0)
    strips.push_back({"state slots in use", "states_used", "states_used_max", "states_total"});
  const double bottom = static_cast<double>(strips.size()) * (kStripHeight + kStripGap) - kStripGap;
  Svg svg(kChartWidth, bottom + 20, "pools in use over the events");
  for (std::size_t i = 0; i < strips.size(); ++i)
    draw_strip(svg, run, strips[i], static_cast<double>(i) * (kStripHeight + kStripGap),
               kStripHeight);
  draw_event_axis(svg, run, bottom);
  return svg.markup();
}

std::string copies_picture(const JsonField& run) {
  constexpr std::size_t kMostLanes = 12;
  constexpr double kLane = 20;
  const JsonField copies = run.at("copies");
  const std::size_t events = run.at("events").size();
  // A lane is free again behind the bar that was drawn there last.
  std::vector<std::int64_t> lanes;
  std::vector<std::size_t> lane_of(copies.size());
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const std::int64_t queued = copies.item(i).at("queued").integer();
    const auto free = std::ranges::find_if(lanes, [&](std::int64_t end) { return end <= queued; });
    lane_of[i] = static_cast<std::size_t>(free - lanes.begin());
    if (free == lanes.end()) lanes.push_back(0);
    lanes[lane_of[i]] = copies.item(i).has("landed") ? copies.item(i).at("landed").integer()
                                                     : std::numeric_limits<std::int64_t>::max();
  }
  const double bottom = 18 + static_cast<double>(std::min(lanes.size(), kMostLanes)) * kLane;
  Svg svg(kChartWidth, bottom + 20, "copies in flight over the events");
  svg.text({0, 12}, "label",
           lanes.size() > kMostLanes ? fmt::format("copies, {} at once and more", kMostLanes)
                                     : "copies in flight");
  svg.line({kPoolsLeft, bottom}, {kChartWidth, bottom}, "axis");
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (lane_of[i] >= kMostLanes) continue;
    const JsonField copy = copies.item(i);
    const bool to_host = copy.at("to").text() == "host";
    const double begin = middle_of_event(copy.at("queued").integer(), events);
    const double end =
        copy.has("landed") ? middle_of_event(copy.at("landed").integer(), events) : kChartWidth;
    const double y = 20 + static_cast<double>(lane_of[i]) * kLane;
    svg.rect({begin, y, std::max(end - begin, 2.0), kLane - 4}, to_host ? "decode" : "prefill", 2,
             hover_title(copy.at("text")));
    const auto length = static_cast<double>(copy.at("text").text().size() + 4);
    const std::string arrow = to_host ? "↓" : "↑";
    svg.text({begin + 5, y + 12}, "small",
             end - begin > length * kSmallAdvance
                 ? arrow + " " + words(copy.at("text"), Medium::svg)
                 : arrow);
  }
  draw_event_axis(svg, run, bottom);
  return svg.markup();
}

std::string requests_picture(const JsonField& run) {
  const JsonField requests = run.at("run").at("requests");
  const JsonField spans = run.at("spans");
  const std::size_t shown = std::min(requests.size(), kMostRows);
  const double bottom = static_cast<double>(shown) * kRowHeight + 2;
  Svg svg(kChartWidth, bottom + 18, "what each request did over time");
  RequestRows rows;
  const auto end = static_cast<double>(std::max<std::int64_t>(run.at("end_ns").integer(), 1));
  rows.scale = (kChartWidth - kNameWidth - 2) / end;
  for (std::size_t i = 0; i < shown; ++i) {
    const double y = static_cast<double>(i) * kRowHeight;
    rows.row_of[requests.item(i).at("id").text()] = i;
    svg.text({0, y + 16}, "mono", words(requests.item(i).at("id"), Medium::svg, 13));
    svg.line({kNameWidth, y + kRowHeight}, {kChartWidth, y + kRowHeight}, "faint");
  }
  // Waiting is drawn below everything else, a retraction above.
  const auto layer_of = [](const std::string& name) {
    return name == "queued" ? 0 : name == "retracted" ? 2 : 1;
  };
  for (int layer = 0; layer <= 2; ++layer)
    for (std::size_t i = 0; i < spans.size(); ++i)
      if (layer_of(spans.item(i).at("name").text()) == layer) draw_span(svg, spans.item(i), rows);
  const std::int64_t wrong = wrong_event(run);
  if (wrong > 0 && static_cast<std::size_t>(wrong) <= run.at("events").size()) {
    const JsonField event = run.at("events").item(static_cast<std::size_t>(wrong) - 1);
    const double x = kNameWidth + static_cast<double>(event.at("time_ns").integer()) * rows.scale;
    svg.line({x, 0}, {x, bottom}, "wrong");
  }
  svg.text({kNameWidth, bottom + 14}, "small dim", "start");
  svg.text({kChartWidth, bottom + 14}, "small dim end", moment(run.at("end_ns"), Medium::svg));
  return svg.markup();
}

std::string hit_ratio_picture(const JsonField& workload) {
  constexpr double kBarHeight = 26;
  constexpr double kBarStart = 140;
  constexpr double kBarRoom = 280;  // width of a hit ratio of one
  const JsonField runs = workload.at("runs");
  const double bottom = static_cast<double>(runs.size()) * (kBarHeight + 10);
  Svg svg(kChartWidth, bottom + 2, "hit ratio of each policy");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const double y = static_cast<double>(i) * (kBarHeight + 10);
    const JsonField ratio = runs.item(i).at("run").at("totals").at("hit_ratio");
    const double width = ratio.number() * kBarRoom;
    svg.text({0, y + 18}, "mono", words(runs.item(i).at("policy"), Medium::svg, 20));
    svg.rect({kBarStart, y, kBarRoom, kBarHeight}, "barroom", 2);
    svg.rect({kBarStart, y, width, kBarHeight}, "bar", 2);
    svg.text({kBarStart + kBarRoom + 10, y + 18}, "label", percent(ratio, Medium::svg));
  }
  return svg.markup();
}

std::string legend_box(std::string_view kind) {
  Svg svg(64, kNodeHeight - 10, kind);
  const std::string style = kind == "tombstone" ? "node tombstone"
                            : kind == "kv"      ? "node kv"
                                                : "node state";
  svg.rect({1, 1, 62, kNodeHeight - 12}, style, 5);
  if (kind == "locked") svg.padlock({48, 7});
  return svg.markup();
}

std::string idea_picture() {
  struct Listener {
    std::string_view name, what;
  };
  constexpr std::array kListeners{Listener{"policy", "the real structure, a tree"},
                                  Listener{"oracle", "the same rules, in a sorted map"},
                                  Listener{"server", "your own, at the end of a pipe"}};
  Svg svg(860, 200,
          "the same operations go to policy, oracle and server; a checker compares their replies");
  svg.rect({1, 62, 170, 76}, "idea", 6);
  svg.text({86, 90}, "label middle strong", "a trace");
  svg.text({86, 108}, "small middle", "admit · extend · accept");
  svg.text({86, 124}, "small middle", "checkpoint · finish · evict");
  for (std::size_t i = 0; i < kListeners.size(); ++i) {
    const double y = 8 + static_cast<double>(i) * 66;
    const std::string style = i == 2 ? " optional" : "";
    svg.arrow({171, 100}, {278, y + 26}, "flow" + style);
    svg.rect({280, y, 224, 52}, "idea" + style, 6);
    svg.text({392, y + 22}, "label middle strong", kListeners[i].name);
    svg.text({392, y + 40}, "small middle", kListeners[i].what);
    svg.arrow({504, y + 26}, {618, 100}, "flow" + style);
  }
  svg.text({190, 46}, "small dim end", "the same line to each");
  svg.text({562, 46}, "small dim", "replies, and what is inside");
  svg.rect({620, 54, 239, 92}, "idea checker", 6);
  svg.text({739, 79}, "label middle strong", "the checker");
  svg.text({739, 98}, "small middle", "Do the replies agree?");
  svg.text({739, 115}, "small middle", "Is each state that of its exact prefix?");
  svg.text({739, 132}, "small middle", "Does every slot have one owner?");
  return svg.markup();
}

}  // namespace lockstep::cache_sim
