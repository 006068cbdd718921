#include "cache_sim/base/parameters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <string_view>

#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {
namespace {

Result<std::int64_t> parse_number(std::string_view text, std::int64_t low, std::int64_t high) {
  if (!text.starts_with("0x")) return parse_integer(text, low, high);
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + 2, end, value, 16);
  if (error != std::errc{} || stop != end || value < low || value > high)
    return fail(fmt::format("`{}` is not a hexadecimal number between {} and {}",
                            text.substr(0, 60), low, high));
  return value;
}

}  // namespace

Result<void> parse_parameters(std::string_view workload, std::string_view text,
                              std::span<const Parameter> known) {
  std::set<std::string_view> given;
  while (!text.empty()) {
    const std::string_view piece = text.substr(0, text.find(','));
    text.remove_prefix(std::min(piece.size() + 1, text.size()));
    const std::size_t equals = std::min(piece.find('='), piece.size());
    const std::string_view name = piece.substr(0, equals);
    const auto parameter = std::ranges::find(known, name, &Parameter::name);
    if (parameter == known.end())
      return fail(fmt::format("{} has no parameter `{}`", workload, name.substr(0, 60)));
    if (!given.insert(name).second)
      return fail(fmt::format("{}: parameter {} stands twice", workload, name));
    if (equals == piece.size())
      return fail(fmt::format("{}: parameter {} has no value", workload, name));
    const Result<std::int64_t> value =
        parse_number(piece.substr(equals + 1), parameter->low, parameter->high);
    if (!value)
      return fail(fmt::format("{}: parameter {}: {}", workload, name, value.error().text));
    *parameter->value = *value;
  }
  return {};
}

}  // namespace lockstep::cache_sim
