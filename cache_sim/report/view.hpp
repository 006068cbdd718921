// The data of the templates in cache_sim/report/templates/ (Mustache). A figure or text of the
// document becomes an object whose members are markup with its JSON pointer:
//
//   integer   count 1,776,161 · moment 3 ms (of nanoseconds) · positive, a condition ·
//             s, the plural ending of a noun after this number
//   real      percent 66.7 % (of a ratio)
//   text      words · code · words_600, code_60, code_240 cut to that many characters ·
//             filled, a condition
//
// So `{{{events.count}}}` is the number of events, marked with its place in report.json. null is
// false.
#pragma once

#include <kainjow/mustache.hpp>

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>

#include "cache_sim/report/json_field.hpp"

namespace lockstep::cache_sim {

using View = kainjow::mustache::data;

View object_view();
View list_view();

View view_of(const JsonField& field, std::initializer_list<std::string_view> left_out = {});

/// A list of the views that `item` makes of the elements of an array, at most `most` of them.
template <class Item>
View views_of(const JsonField& array, Item&& item, std::size_t most = SIZE_MAX) {
  View list = list_view();
  for (std::size_t i = 0; i < array.size() && i < most; ++i) list.push_back(item(array.item(i), i));
  return list;
}

/// The files of cache_sim/report/templates/, by name.
const std::map<std::string_view, std::string_view>& report_templates();

/// A filled-in template. `{{>run.html}}` in it includes that file. A template that cannot be parsed
/// is a bug, and throws.
std::string filled_template(std::string_view name, View view);

}  // namespace lockstep::cache_sim
