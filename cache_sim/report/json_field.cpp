#include "cache_sim/report/json_field.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "cache_sim/report/svg.hpp"

namespace lockstep::cache_sim {

JsonField JsonField::at(std::string_view key) const {
  return {value_->at(std::string(key)), pointer_ + "/" + std::string(key)};
}

JsonField JsonField::item(std::size_t index) const {
  return {value_->at(index), pointer_ + "/" + std::to_string(index)};
}

bool JsonField::has(std::string_view key) const {
  return value_->contains(std::string(key)) && !value_->at(std::string(key)).is_null();
}

std::vector<std::string> JsonField::keys() const {
  std::vector<std::string> all;
  for (const auto& [key, value] : value_->items()) all.push_back(key);
  return all;
}

std::size_t JsonField::size() const {
  return value_->size();
}
bool JsonField::is_null() const {
  return value_->is_null();
}
bool JsonField::is_text() const {
  return value_->is_string();
}
bool JsonField::is_integer() const {
  return value_->is_number_integer();
}
bool JsonField::is_flag() const {
  return value_->is_boolean();
}
bool JsonField::is_array() const {
  return value_->is_array();
}
bool JsonField::is_object() const {
  return value_->is_object();
}
std::int64_t JsonField::integer() const {
  return value_->get<std::int64_t>();
}
double JsonField::number() const {
  return value_->get<double>();
}
bool JsonField::flag() const {
  return value_->get<bool>();
}
std::string JsonField::text() const {
  return value_->get<std::string>();
}
std::string JsonField::json() const {
  return value_->dump();
}

namespace {

std::string as_attribute(std::string_view as) {
  return as.empty() ? "" : fmt::format(" data-as=\"{}\"", as);
}

std::string marked_figure(const JsonField& field, Medium medium, std::string_view as,
                          std::string_view shown) {
  const bool html = medium == Medium::html;
  return fmt::format("<{0} {1}=\"{2}\" data-path=\"{3}\"{4}>{5}</{0}>", html ? "data" : "tspan",
                     html ? "value" : "data-value", field.json(), escaped(field.pointer()),
                     as_attribute(as), shown);
}

std::string marked_words(const JsonField& field, std::string_view tag, std::size_t limit) {
  const std::string text = field.text();
  const std::string shown = limit == 0 ? text : shortened(text, limit);
  return fmt::format("<{0} data-path=\"{1}\"{2}>{3}</{0}>", tag, escaped(field.pointer()),
                     as_attribute(shown == text ? "" : "shortened"), escaped(shown));
}

/// Text whose words between backticks are code.
std::string with_code(std::string_view text) {
  std::string shown;
  for (bool is_code = false;; is_code = !is_code) {
    const std::size_t end = text.find('`');
    const std::string words = escaped(text.substr(0, end));
    shown += is_code ? "<code>" + words + "</code>" : words;
    if (end == text.npos) return shown;
    text.remove_prefix(end + 1);
  }
}

std::string with_commas(std::int64_t value) {
  std::string digits = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

/// At most one decimal, none if it would be 0.
std::string short_decimal(double value) {
  std::string text = fmt::format("{:.1f}", value);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

}  // namespace

std::string count(const JsonField& field, Medium medium) {
  return marked_figure(field, medium, "", with_commas(field.integer()));
}

std::string percent(const JsonField& field, Medium medium) {
  return marked_figure(field, medium, "percent", fmt::format("{:.1f} %", field.number() * 100));
}

std::string moment_text(std::int64_t nanoseconds) {
  struct Unit {
    std::int64_t nanoseconds;
    std::string_view name;
  };
  constexpr std::array kUnits{Unit{1'000'000'000, "s"}, Unit{1'000'000, "ms"}, Unit{1'000, "µs"},
                              Unit{1, "ns"}};
  if (nanoseconds == 0) return "0 ms";
  std::size_t unit = 0;
  while (nanoseconds < kUnits[unit].nanoseconds && unit + 1 < kUnits.size()) ++unit;
  const auto whole = static_cast<double>(kUnits[unit].nanoseconds);
  return fmt::format("{} {}", short_decimal(static_cast<double>(nanoseconds) / whole),
                     kUnits[unit].name);
}

std::string moment(const JsonField& field, Medium medium) {
  return marked_figure(field, medium, "time", moment_text(field.integer()));
}

std::string words(const JsonField& field, Medium medium, std::size_t limit) {
  const std::string text = field.text();
  const auto ticks = std::ranges::count(text, '`');
  if (medium == Medium::html && ticks > 0 && ticks % 2 == 0 && (limit == 0 || text.size() <= limit))
    return fmt::format("<span data-path=\"{}\"{}>{}</span>", escaped(field.pointer()),
                       as_attribute("code"), with_code(text));
  return marked_words(field, medium == Medium::html ? "span" : "tspan", limit);
}

std::string hover_title(const JsonField& field) {
  return marked_words(field, "title", 0);
}

std::string code(const JsonField& field, std::size_t limit) {
  return marked_words(field, "code", limit);
}

}  // namespace lockstep::cache_sim
