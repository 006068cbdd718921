// Fields of a report's document, and their text on a page. Every function returns markup with the
// JSON pointer of the field, so that each figure on a page names its source.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// A value of the document and its JSON pointer.
class JsonField {
 public:
  explicit JsonField(const Json& document) : value_(&document) {}

  JsonField at(std::string_view key) const;
  JsonField item(std::size_t index) const;

  std::size_t size() const;
  bool has(std::string_view key) const;  ///< and it is not null
  bool is_null() const;
  bool is_text() const;
  bool is_integer() const;
  bool is_flag() const;
  bool is_array() const;
  bool is_object() const;
  std::vector<std::string> keys() const;
  std::int64_t integer() const;
  double number() const;
  bool flag() const;
  std::string text() const;
  std::string json() const;
  const std::string& pointer() const { return pointer_; }

 private:
  JsonField(const Json& value, std::string pointer)
      : value_(&value), pointer_(std::move(pointer)) {}

  const Json* value_;
  std::string pointer_;
};

/// The kind of markup: pages and pictures mark figures with different elements.
enum class Medium { html, svg };

std::string count(const JsonField& field, Medium medium = Medium::html);    ///< 1,776,161
std::string percent(const JsonField& field, Medium medium = Medium::html);  ///< 66.7 %, of a ratio
std::string moment(const JsonField& field, Medium medium = Medium::html);  ///< 3 ms, of nanoseconds

std::string moment_text(std::int64_t nanoseconds);  ///< 3 ms, without markup

/// A text of the document, cut after `limit` characters; 0: never cut.
std::string words(const JsonField& field, Medium medium = Medium::html, std::size_t limit = 0);
/// A text as the <title> element of a part of a picture, which is shown under the pointer.
std::string hover_title(const JsonField& field);
/// A text in the font of commands and traces.
std::string code(const JsonField& field, std::size_t limit = 0);

}  // namespace lockstep::cache_sim
