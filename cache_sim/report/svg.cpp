#include "cache_sim/report/svg.hpp"

#include <fmt/format.h>

#include <cctype>
#include <cmath>

namespace lockstep::cache_sim {
namespace {

/// A coordinate with at most one decimal. Equal numbers give equal texts.
std::string at(double value) {
  const auto tenths = static_cast<long long>(std::llround(value * 10));
  const long long whole = std::llabs(tenths) / 10;
  const long long rest = std::llabs(tenths) % 10;
  const std::string sign = tenths < 0 ? "-" : "";
  return rest == 0 ? fmt::format("{}{}", sign, whole) : fmt::format("{}{}.{}", sign, whole, rest);
}

std::string titled(std::string_view tag, std::string_view title) {
  if (title.empty()) return "/>\n";
  return fmt::format(">{}</{}>\n", title, tag);
}

bool continues_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

}  // namespace

std::string encoded_link(std::string_view path) {
  std::string link;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_plain =
        byte < 0x80 &&
        (std::isalnum(byte) != 0 || std::string_view("-._~/").find(c) != std::string_view::npos);
    link += is_plain ? std::string(1, c) : fmt::format("%{:02X}", byte);
  }
  return link;
}

std::string escaped(std::string_view text) {
  std::string markup;
  markup.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&': markup += "&amp;"; break;
      case '<': markup += "&lt;"; break;
      case '>': markup += "&gt;"; break;
      case '"': markup += "&quot;"; break;
      case '\'': markup += "&#39;"; break;
      default: markup += c;
    }
  }
  return markup;
}

std::string shortened(std::string_view text, std::size_t limit) {
  std::size_t characters = 0;
  std::size_t keep = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (continues_character(text[i])) continue;
    if (++characters == limit) keep = i;
  }
  return characters <= limit ? std::string(text) : std::string(text.substr(0, keep)) + "…";
}

Svg::Svg(double width, double height, std::string_view label)
    : width_(width), height_(height), label_(label) {}

void Svg::rect(const Box& box, std::string_view style, double radius, std::string_view title) {
  body_ += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"", at(box.x), at(box.y),
                       at(box.width), at(box.height));
  if (radius > 0) body_ += fmt::format(" rx=\"{}\"", at(radius));
  body_ += fmt::format(" class=\"{}\"{}", style, titled("rect", title));
}

void Svg::line(Point from, Point to, std::string_view style) {
  body_ += fmt::format("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" class=\"{}\"/>\n", at(from.x),
                       at(from.y), at(to.x), at(to.y), style);
}

void Svg::path(const std::vector<Point>& points, std::string_view style) {
  if (points.empty()) return;
  std::string drawn;
  for (const Point& point : points)
    drawn += fmt::format("{}{} {}", drawn.empty() ? "M" : "L", at(point.x), at(point.y));
  body_ += fmt::format("<path d=\"{}\" class=\"{}\"/>\n", drawn, style);
}

void Svg::elbow(Point from, Point to, std::string_view style) {
  const double middle = (from.x + to.x) / 2;
  path({from, {middle, from.y}, {middle, to.y}, to}, style);
}

void Svg::arrow(Point from, Point to, std::string_view style) {
  constexpr double kHeadLength = 7;
  constexpr double kHeadWidth = 3.5;
  const double length = std::hypot(to.x - from.x, to.y - from.y);
  const Point along{(to.x - from.x) / length, (to.y - from.y) / length};
  const Point neck{to.x - along.x * kHeadLength, to.y - along.y * kHeadLength};
  line(from, neck, style);
  path({to,
        {neck.x - along.y * kHeadWidth, neck.y + along.x * kHeadWidth},
        {neck.x + along.y * kHeadWidth, neck.y - along.x * kHeadWidth},
        to},
       fmt::format("{} head", style));
}

void Svg::text(Point place, std::string_view style, std::string_view content) {
  body_ += fmt::format("<text x=\"{}\" y=\"{}\" class=\"{}\">{}</text>\n", at(place.x), at(place.y),
                       style, content);
}

void Svg::padlock(Point place) {
  body_ += fmt::format(
      "<path d=\"M{} {}v-2a3 3 0 0 1 6 0v2\" class=\"shackle\"/><rect x=\"{}\" y=\"{}\" "
      "width=\"10\" "
      "height=\"7\" rx=\"1\" class=\"lock\"/>\n",
      at(place.x + 2), at(place.y + 5), at(place.x), at(place.y + 5));
}

void Svg::marker(Point place, std::string_view style, std::string_view title) {
  body_ += fmt::format("<path d=\"M{} {}l-5 -8h10z\" class=\"{}\"{}", at(place.x), at(place.y),
                       style, titled("path", title));
}

void Svg::open_part(std::size_t number) {
  body_ += fmt::format("<g data-part=\"{}\">\n", number);
}
void Svg::close_part() {
  body_ += "</g>\n";
}

std::string Svg::markup() const {
  return fmt::format(
      "<svg role=\"img\" aria-label=\"{0}\" width=\"{1}\" "
      "height=\"{2}\" viewBox=\"0 0 {1} {2}\">\n{3}</svg>\n",
      escaped(label_), at(width_), at(height_), body_);
}

}  // namespace lockstep::cache_sim
