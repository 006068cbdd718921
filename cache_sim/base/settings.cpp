#include "cache_sim/base/settings.hpp"

#include <algorithm>
#include <vector>

namespace lockstep::cache_sim {
namespace {

std::string_view field_of(std::string_view setting) {
  return setting.substr(0, setting.find('='));
}

/// The settings of a list. A word without `=` belongs to the value before it.
std::vector<std::string> settings_in(std::string_view list) {
  std::vector<std::string> settings;
  while (!list.empty()) {
    const std::string_view word = list.substr(0, list.find(','));
    list.remove_prefix(std::min(word.size() + 1, list.size()));
    if (settings.empty() || word.find('=') != std::string_view::npos)
      settings.emplace_back(word);
    else
      settings.back().append(",").append(word);
  }
  return settings;
}

}  // namespace

ConfigFields fields_of(std::initializer_list<std::string_view> lists) {
  ConfigFields fields;
  for (const std::string_view list : lists)
    for (const std::string& setting : settings_in(list)) fields.add(field_of(setting));
  return fields;
}

std::string settings_without(std::string_view list, const ConfigFields& fields,
                             std::string* taken) {
  std::string rest;
  for (const std::string& setting : settings_in(list)) {
    std::string* const to = fields.contains(field_of(setting)) ? taken : &rest;
    if (to != nullptr) *to += (to->empty() ? "" : ",") + setting;
  }
  return rest;
}

std::string joined_settings(std::initializer_list<std::string_view> lists) {
  std::string all;
  for (const std::string_view list : lists)
    if (const std::string more = settings_without(list, fields_of({all})); !more.empty())
      all += (all.empty() ? "" : ",") + more;
  return all;
}

}  // namespace lockstep::cache_sim
