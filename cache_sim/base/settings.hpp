// Lists K=V,… of config fields, the form of --config (take_setting()).
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

/// The fields that the lists set.
ConfigFields fields_of(std::initializer_list<std::string_view> lists);

/// The list without the fields named. Their text goes to `taken`.
std::string settings_without(std::string_view list, const ConfigFields& fields,
                             std::string* taken = nullptr);

/// One list of all: a field that an earlier list sets is that one's.
std::string joined_settings(std::initializer_list<std::string_view> lists);

}  // namespace lockstep::cache_sim
