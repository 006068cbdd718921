// Small drawing helpers: an SVG picture as text, with sizes in pixels and colours as classes of the
// page's style sheet, so that a picture follows the reader's light or dark setting.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cache_sim {

/// Text as it stands between tags and inside quoted attributes of HTML and XML.
std::string escaped(std::string_view text);

/// A path below the page's folder as a link: every byte that a URL gives a meaning of its own, or
/// that is not ASCII, as %XX (RFC 3986, section 2).
std::string encoded_link(std::string_view path);

/// At most `limit` characters of UTF-8 text; where it is longer, its beginning and `…`.
std::string shortened(std::string_view text, std::size_t limit);

struct Point {
  double x, y;
};

struct Box {
  double x, y, width, height;
};

class Svg {
 public:
  /// `label` is what a screen reader says.
  Svg(double width, double height, std::string_view label);

  /// `style` arguments are class names. `content` is markup already, and so is `title`, a whole
  /// element of that name: the caller escapes.
  void rect(const Box& box, std::string_view style, double radius = 0, std::string_view title = {});
  void line(Point from, Point to, std::string_view style);
  /// Straight pieces from point to point.
  void path(const std::vector<Point>& points, std::string_view style);
  /// Across, down and across, as outlines have them.
  void elbow(Point from, Point to, std::string_view style);
  /// A line that ends in an arrow head.
  void arrow(Point from, Point to, std::string_view style);
  void text(Point at, std::string_view style, std::string_view content);
  /// A padlock, 10 wide and 12 high, with its upper left corner here.
  void padlock(Point at);
  /// A triangle that points down to this place.
  void marker(Point at, std::string_view style, std::string_view title);

  /// What is drawn until close_part() can be hidden by this number (page.js).
  void open_part(std::size_t number);
  void close_part();

  std::string markup() const;

 private:
  double width_, height_;
  std::string label_;
  std::string body_;
};

}  // namespace lockstep::cache_sim
