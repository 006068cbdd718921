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

  JsonField at(std::string_view key) const {
    return {value_->at(std::string(key)), pointer_ + "/" + std::string(key)};
  }
  JsonField item(std::size_t index) const {
    return {value_->at(index), pointer_ + "/" + std::to_string(index)};
  }

  std::size_t size() const { return value_->size(); }
  bool has(std::string_view key) const {
    return value_->contains(std::string(key)) && !value_->at(std::string(key)).is_null();
  }
  bool is_null() const { return value_->is_null(); }
  bool is_text() const { return value_->is_string(); }
  bool is_integer() const { return value_->is_number_integer(); }
  bool is_flag() const { return value_->is_boolean(); }
  bool is_array() const { return value_->is_array(); }
  bool is_object() const { return value_->is_object(); }
  std::vector<std::string> keys() const {
    std::vector<std::string> all;
    for (const auto& [key, value] : value_->items()) all.push_back(key);
    return all;
  }
  std::int64_t integer() const { return value_->get<std::int64_t>(); }
  double number() const { return value_->get<double>(); }
  bool flag() const { return value_->get<bool>(); }
  std::string text() const { return value_->get<std::string>(); }
  std::string json() const { return value_->dump(); }
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
