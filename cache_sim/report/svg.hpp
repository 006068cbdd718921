// Draws an SVG picture as text. Sizes are in pixels; colours are classes of the page's style sheet,
// so that a picture follows the reader's light or dark mode.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cache_sim {

/// Escapes a text for the content and the quoted attributes of HTML and XML.
std::string escaped(std::string_view text);

/// A relative path as a link: every byte that has a meaning in a URL or is not ASCII becomes %XX
/// (RFC 3986, section 2).
std::string encoded_link(std::string_view path);

/// A text cut to `limit` characters of UTF-8, with `…` if it was cut.
std::string shortened(std::string_view text, std::size_t limit);

struct Point {
  double x, y;
};

struct Box {
  double x, y, width, height;
};

class Svg {
 public:
  /// `label` is read by screen readers.
  Svg(double width, double height, std::string_view label);

  /// `style` is a list of class names. `content` and `title` (a <title> element) are markup: the
  /// caller escapes them.
  void rect(const Box& box, std::string_view style, double radius = 0, std::string_view title = {});
  void line(Point from, Point to, std::string_view style);
  /// Straight lines from point to point.
  void path(const std::vector<Point>& points, std::string_view style);
  /// A line that goes across, down and across, as in outlines.
  void elbow(Point from, Point to, std::string_view style);
  /// A line with an arrow head at its end.
  void arrow(Point from, Point to, std::string_view style);
  void text(Point at, std::string_view style, std::string_view content);
  /// A padlock, 10 wide and 12 high, with its upper left corner at this point.
  void padlock(Point at);
  /// A triangle that points down to this point.
  void marker(Point at, std::string_view style, std::string_view title);

  /// Shapes drawn before close_part() form the part with this number, which page.js can hide.
  void open_part(std::size_t number);
  void close_part();

  std::string markup() const;

 private:
  double width_, height_;
  std::string label_;
  std::string body_;
};

}  // namespace lockstep::cache_sim
