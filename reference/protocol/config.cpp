#include "reference/protocol/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <variant>

#include "reference/base/overloaded.hpp"

namespace lockstep {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
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
  return {member, 0, kMost};
}

// Sorted by name, as ConfigField is: the order in which fields are printed.
const std::array kFields{
    Field{"alpha", Text{&Config::alpha}},
    Field{"block", Integer{&Config::block, 1, kMostSlots}},
    Field{"blocks", Integer{&Config::blocks, 1, kMostSlots}},
    Field{"bootstrap", Integer{&Config::bootstrap, 0, 1 << 20}},
    Field{"checkpoint", Integer{&Config::checkpoint, 0, kMostSlots}},
    Field{"chunked_prefill", Integer{&Config::chunked_prefill, 1, kMostSlots}},
    Field{"drafts", Integer{&Config::drafts, 0, 1024}},
    Field{"eagle", Integer{&Config::eagle, 0, 2}},
    Field{"flops_pair", bytes(&Config::flops_pair)},
    Field{"flops_token", bytes(&Config::flops_token)},
    Field{"graph_batches", Text{&Config::graph_batches}},
    Field{"groups", Text{&Config::groups}},
    Field{"hash_algorithm", Text{&Config::hash_algorithm}},
    Field{"hash_block", Integer{&Config::hash_block, 1, kMostSlots}},
    Field{"kv_stride", Integer{&Config::kv_stride, 0, kMostSlots}},
    Field{"kv_tokens", Integer{&Config::kv_tokens, 1, kMostSlots}},
    Field{"layers", Text{&Config::layers}},
    Field{"lazy", flag(&Config::lazy)},
    Field{"max_running", Integer{&Config::max_running, 1, 1 << 20}},
    Field{"model_chunk", Integer{&Config::model_chunk, 1, 1 << 20}},
    Field{"model_config", Text{&Config::model_config}},
    Field{"modules", Integer{&Config::modules, 1, 1024}},
    Field{"overlap", flag(&Config::overlap)},
    Field{"page", Integer{&Config::page, 1, 1 << 20}},
    Field{"path_cap", Integer{&Config::path_cap, -1, kMostSlots}},
    Field{"policy", Text{&Config::policy}},
    Field{"pool_bytes", bytes(&Config::pool_bytes)},
    Field{"ranks", Integer{&Config::ranks, 1, 1024}},
    Field{"request_rows", Integer{&Config::request_rows, 0, 1 << 20}},
    Field{"retention", Text{&Config::retention}},
    Field{"routing", Text{&Config::routing}},
    Field{"scheduler", Text{&Config::scheduler}},
    Field{"shared_prefix_checkpoint", flag(&Config::shared_prefix_checkpoint)},
    Field{"skip_decode_lock", flag(&Config::skip_decode_lock)},
    Field{"state_bytes", bytes(&Config::state_bytes)},
    Field{"state_share", Integer{&Config::state_share, 0, 1000}},
    Field{"state_slots", Integer{&Config::state_slots, 0, kMostSlots}},
    Field{"state_stride", Integer{&Config::state_stride, 0, kMostSlots}},
    Field{"step_time", Time{&Config::step_time}},
    Field{"strip_thinking", flag(&Config::strip_thinking)},
    Field{"token_bytes", bytes(&Config::token_bytes)},
    Field{"track_interval", Integer{&Config::track_interval, 1, kMostSlots}},
};

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
    return parse_integer(text.substr(0, digits), 0, kMost / unit.nanoseconds)
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
  const auto* const field =
      std::find_if(kFields.begin(), kFields.end(), [&](const Field& f) { return f.name == name; });
  if (field == kFields.end())
    return fail(fmt::format("config has no field `{}`", name.substr(0, 60)));
  const auto named = [&](const Error& error) {
    return Error{.text = fmt::format("field {}: {}", name, error.text)};
  };
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
                   for (const char c : value)  // a blank would break a child's greeting
                     if (static_cast<unsigned char>(c) <= 0x20)
                       return fail(
                           fmt::format("field {}: a blank cannot stand in its value", name));
                   this->*t.member = std::string(value);
                   return {};
                 }},
      field->kind);
}

Result<void> Config::set_all(std::string_view list, ConfigFields* named) {
  // A comma also stands inside the values of graph_batches and groups: a piece without `=` goes on
  // the value before it. So does a `=` inside that of scheduler, with no comma before it.
  while (!list.empty()) {
    const std::size_t equals = list.find('=');
    if (equals == std::string_view::npos || equals == 0)
      return fail(fmt::format("`{}` is not key=value", list.substr(0, 60)));
    std::size_t end = list.size();
    for (std::size_t next = equals; end == list.size();) {
      next = list.find('=', next + 1);
      if (next == std::string_view::npos) break;
      const std::size_t comma = list.rfind(',', next);
      if (comma != std::string_view::npos && comma > equals) end = comma;
    }
    if (auto set_one = set(list.substr(0, equals), list.substr(equals + 1, end - equals - 1));
        !set_one)
      return set_one;
    if (named != nullptr) named->add(*config_field_from(list.substr(0, equals)));
    list.remove_prefix(std::min(end + 1, list.size()));
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
  all.reserve(std::size(kFields));
  for (const Field& field : kFields) all.emplace_back(field.name, value_text(*this, field));
  return all;
}

std::string_view to_string(ConfigField field) {
  return kFields[static_cast<std::size_t>(field)].name;
}

std::optional<ConfigField> config_field_from(std::string_view name) {
  for (std::size_t i = 0; i < kFields.size(); ++i)
    if (kFields[i].name == name) return static_cast<ConfigField>(i);
  return std::nullopt;
}

std::vector<ConfigField> Config::changed() const {
  static const Config defaults;
  std::vector<ConfigField> fields;
  for (std::size_t i = 0; i < kFields.size(); ++i)
    if (value_text(*this, kFields[i]) != value_text(defaults, kFields[i]))
      fields.push_back(static_cast<ConfigField>(i));
  return fields;
}

}  // namespace lockstep
