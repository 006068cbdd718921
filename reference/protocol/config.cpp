#include "reference/protocol/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <variant>

#include "reference/base/overloaded.hpp"
#include "reference/base/registry.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/near_word.hpp"

namespace lockstep {
namespace {

constexpr std::int64_t kMostSlots = std::int64_t{1}
                                    << 30;  // slots and tokens are indexed by 32 bits

struct Integer {
  std::int64_t Config::*member;
  std::int64_t low;
  std::int64_t high;
};
struct Time {
  Nanoseconds Config::*member;
};
struct Text {
  std::string Config::*member;
};

struct Field {
  std::string_view name;
  std::variant<Integer, Time, Text> kind;
};

constexpr Integer flag(std::int64_t Config::*member) {
  return {member, 0, 1};
}
constexpr Integer bytes(std::int64_t Config::*member) {
  return {member, 0, kMostInteger};
}

// The common fields.
const std::array kFields{
    Field{"chunked_prefill", Integer{&Config::chunked_prefill, 1, kMostSlots}},
    Field{"drafts", Integer{&Config::drafts, 0, 1024}},
    Field{"graph_batches", Text{&Config::graph_batches}},
    Field{"kv_stride", Integer{&Config::kv_stride, 0, kMostSlots}},
    Field{"kv_tokens", Integer{&Config::kv_tokens, 1, kMostSlots}},
    Field{"max_running", Integer{&Config::max_running, 1, 1 << 20}},
    Field{"model_chunk", Integer{&Config::model_chunk, 1, 1 << 20}},
    Field{"overlap", flag(&Config::overlap)},
    Field{"page", Integer{&Config::page, 1, 1 << 20}},
    Field{"policy", Text{&Config::policy}},
    Field{"pool_bytes", bytes(&Config::pool_bytes)},
    Field{"ranks", Integer{&Config::ranks, 1, 1024}},
    Field{"request_rows", Integer{&Config::request_rows, 0, 1 << 20}},
    Field{"routing", Text{&Config::routing}},
    Field{"scheduler", Text{&Config::scheduler}},
    Field{"state_share", Integer{&Config::state_share, 0, 1000}},
    Field{"state_slots", Integer{&Config::state_slots, 0, kMostSlots}},
    Field{"state_stride", Integer{&Config::state_stride, 0, kMostSlots}},
    Field{"step_time", Time{&Config::step_time}},
};

const Field* find_field(std::string_view name) {
  const auto* const field = std::ranges::find(kFields, name, &Field::name);
  return field == kFields.end() ? nullptr : field;
}

const ConfigOption& option_of(std::string_view name) {
  const auto* const option = Registry<ConfigOption>::find(name);
  require(option != nullptr, "an option of the configuration is registered");
  return *option;
}

/// A blank would break a child's greeting.
bool holds_blank(std::string_view value) {
  return std::ranges::any_of(value, [](char c) { return static_cast<unsigned char>(c) <= 0x20; });
}

std::string value_text(const Config& config, const Field& field) {
  return std::visit(Overloaded{[&](const Integer& i) { return std::to_string(config.*i.member); },
                               [&](const Time& t) { return time_text(config.*t.member); },
                               [&](const Text& t) { return config.*t.member; }},
                    field.kind);
}

}  // namespace

Result<std::int64_t> parse_integer(std::string_view text, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc::result_out_of_range)
    return fail(fmt::format("`{}` does not fit 64 bits", text.substr(0, 60)));
  if (error != std::errc{} || stop != end)
    return fail(fmt::format("`{}` is not a whole number", text.substr(0, 60)));
  if (value < low) return fail(fmt::format("{} is below {}", value, low));
  if (value > high) return fail(fmt::format("{} is above {}", value, high));
  return value;
}

namespace {

struct Unit {
  std::string_view name;
  Nanoseconds nanoseconds;
};
// The longest unit first: it prints a time in the largest unit that divides it.
constexpr std::array kUnits{Unit{"s", 1'000'000'000}, Unit{"ms", 1'000'000}, Unit{"us", 1'000},
                            Unit{"ns", 1}};

}  // namespace

Result<Nanoseconds> parse_time(std::string_view text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  for (const Unit& unit : kUnits) {
    if (digits == 0 || text.substr(digits) != unit.name) continue;
    return parse_integer(text.substr(0, digits), 0, kMostInteger / unit.nanoseconds)
        .map([&](std::int64_t count) { return count * unit.nanoseconds; });
  }
  return fail(fmt::format("`{}` is not a time like 5ms (digits, then ns, us, ms or s)",
                          text.substr(0, 60)));
}

std::string time_text(Nanoseconds time) {
  for (const Unit& unit : kUnits)
    if (time % unit.nanoseconds == 0)
      return fmt::format("{}{}", time / unit.nanoseconds, unit.name);
  return fmt::format("{}ns", time);
}

Result<void> Config::set(std::string_view name, std::string_view value) {
  const auto named = [&](const Error& error) {
    return Error{.text = fmt::format("field {}: {}", name, error.text)};
  };
  if (holds_blank(value))
    return fail(fmt::format("field {}: a blank cannot stand in its value", name.substr(0, 60)));
  if (const auto* const option = Registry<ConfigOption>::find(name)) {
    if (!option->number) return put(name, value), Result<void>();
    return parse_integer(value, option->number->low, option->number->high)
        .map([&](std::int64_t v) { put(name, v); })
        .map_error(named);
  }
  const Field* const field = find_field(name);
  if (field == nullptr) {
    std::vector<std::string_view> known = names_in(kFields);
    for (const std::string_view option : names_in(Registry<ConfigOption>::all()))
      known.push_back(option);
    return fail(
        fmt::format("config has no field `{}`{}", name.substr(0, 60), but_near(name, known)));
  }
  return std::visit(
      Overloaded{[&](const Integer& i) -> Result<void> {
                   return parse_integer(value, i.low, i.high)
                       .map([&](std::int64_t v) { this->*i.member = v; })
                       .map_error(named);
                 },
                 [&](const Time& t) -> Result<void> {
                   Result<Nanoseconds> time = parse_time(value);
                   if (time && *time == 0) time = fail("a step takes time");
                   return time.map([&](Nanoseconds v) { this->*t.member = v; }).map_error(named);
                 },
                 [&](const Text& t) -> Result<void> {
                   this->*t.member = std::string(value);
                   return {};
                 }},
      field->kind);
}

std::string Config::text(std::string_view option) const {
  const auto set_one = options.find(option);
  return set_one != options.end() ? set_one->second : std::string(option_of(option).otherwise);
}

std::int64_t Config::number(std::string_view option) const {
  const ConfigOption& known = option_of(option);
  require(known.number.has_value(), "the option is a number");
  return *parse_integer(text(option), known.number->low, known.number->high);
}

void Config::put(std::string_view option, std::string_view value) {
  const ConfigOption& known = option_of(option);
  require(!holds_blank(value) &&
              (!known.number || parse_integer(value, known.number->low, known.number->high)),
          "an option's value is one that it can have");
  if (value == known.otherwise)
    options.erase(std::string(option));
  else
    options.insert_or_assign(std::string(option), std::string(value));
}

std::string_view take_setting(std::string_view& list) {
  // Some values hold commas (graph_batches=4,8) or `=` (scheduler=NAME:option=3). So a value ends
  // at the last comma before the next `=`; a `=` without a comma before it belongs to the value.
  const std::size_t equals = list.find('=');
  std::size_t end = list.size();
  for (std::size_t next = equals; equals != std::string_view::npos && end == list.size();) {
    next = list.find('=', next + 1);
    if (next == std::string_view::npos) break;
    const std::size_t comma = list.rfind(',', next);
    if (comma != std::string_view::npos && comma > equals) end = comma;
  }
  const std::string_view setting = list.substr(0, end);
  list.remove_prefix(std::min(end + 1, list.size()));
  return setting;
}

Result<void> Config::set_all(std::string_view list, ConfigFields* named) {
  ConfigFields given;
  while (!list.empty()) {
    const std::string_view from_here = list, setting = take_setting(list);
    const std::size_t equals = setting.find('=');
    if (equals == std::string_view::npos || equals == 0)
      return fail(fmt::format("`{}` is not key=value", from_here.substr(0, 60)));
    const std::string_view name = setting.substr(0, equals);
    if (auto set_one = set(name, setting.substr(equals + 1)); !set_one) return set_one;
    if (given.contains(name)) return fail(fmt::format("field {} stands twice", name));
    given.add(name);
    if (named != nullptr) named->add(name);
  }
  return {};
}

std::vector<std::int64_t> Config::graphs() const {
  std::vector<std::int64_t> rows;
  for (std::string_view rest = graph_batches; !rest.empty();) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const Result<std::int64_t> one = parse_integer(rest.substr(0, comma), 1, kMostSlots);
    if (!one || (!rows.empty() && *one <= rows.back())) return {};
    rows.push_back(*one);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return rows;
}

std::vector<std::pair<std::string, std::string>> Config::fields() const {
  std::vector<std::pair<std::string, std::string>> all;
  all.reserve(kFields.size());
  for (const Field& field : kFields) all.emplace_back(field.name, value_text(*this, field));
  for (const ConfigOption& option : Registry<ConfigOption>::all())
    all.emplace_back(option.name, text(option.name));
  std::ranges::sort(all);
  return all;
}

std::optional<std::string> Config::find(std::string_view name) const {
  if (const Field* const field = find_field(name)) return value_text(*this, *field);
  if (Registry<ConfigOption>::find(name) != nullptr) return text(name);
  return std::nullopt;
}

ConfigFields fields_for_children() {
  ConfigFields fields{"kv_tokens", "state_slots", "max_running", "request_rows",
                      "page",      "overlap",     "drafts"};
  for (const ConfigOption& option : Registry<ConfigOption>::all())
    if (option.for_children) fields.add(option.name);
  return fields;
}

ConfigFields needs_of(std::string_view field) {
  if (field == "routing") return {"ranks"};
  const auto* const option = Registry<ConfigOption>::find(field);
  return option == nullptr ? ConfigFields{} : option->needs;
}

std::optional<std::string_view> config_field_from(std::string_view name) {
  if (const Field* const field = find_field(name)) return field->name;
  if (const auto* const option = Registry<ConfigOption>::find(name)) return option->name;
  return std::nullopt;
}

std::vector<Config::Idle> Config::idle() const {
  static const Config defaults;
  std::vector<Idle> all;
  const auto is_set = [&](const std::string& field) { return find(field) != defaults.find(field); };
  const auto add = [&](std::string_view field) {
    for (const std::string& needed : needs_of(field))
      if (!is_set(needed)) all.push_back({std::string(field), fmt::format("without {}=", needed)});
  };
  if (!routing.empty()) add("routing");
  for (const auto& [option, value] : options) {
    add(option);
    for (const std::string& other : option_of(option).overruled_by)
      if (is_set(other)) all.push_back({option, fmt::format("beside {}=", other)});
  }
  return all;
}

void Config::drop_idle() {
  for (const Idle& one : idle())
    if (options.erase(one.field) == 0) routing.clear();
}

std::vector<std::string> Config::changed() const {
  static const Config defaults;
  std::vector<std::string> fields;
  for (const Field& field : kFields)
    if (value_text(*this, field) != value_text(defaults, field)) fields.emplace_back(field.name);
  for (const auto& [name, value] : options) fields.push_back(name);
  std::ranges::sort(fields);
  return fields;
}

}  // namespace lockstep
