#include "cache_sim/base/settings.hpp"

#include <vector>

namespace lockstep::cache_sim {
namespace {

std::string_view field_of(std::string_view setting) {
  return setting.substr(0, setting.find('='));
}

std::vector<std::string_view> settings_in(std::string_view list) {
  std::vector<std::string_view> settings;
  while (!list.empty()) settings.push_back(take_setting(list));
  return settings;
}

}  // namespace

ConfigFields fields_of(std::initializer_list<std::string_view> lists) {
  ConfigFields fields;
  for (const std::string_view list : lists)
    for (const std::string_view setting : settings_in(list)) fields.add(field_of(setting));
  return fields;
}

std::string settings_without(std::string_view list, const ConfigFields& fields,
                             std::string* taken) {
  std::string rest;
  for (const std::string_view setting : settings_in(list)) {
    std::string* const to = fields.contains(field_of(setting)) ? taken : &rest;
    if (to != nullptr) to->append(to->empty() ? "" : ",").append(setting);
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
