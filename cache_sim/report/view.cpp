#include "cache_sim/report/view.hpp"

#include <algorithm>

#include "cache_sim/report/svg.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

View leaf_view(const JsonField& field) {
  View view = object_view();
  if (field.is_text()) {
    view.set("words", words(field));
    view.set("words_600", words(field, Medium::html, 600));
    view.set("code", code(field));
    view.set("code_60", code(field, 60));
    view.set("code_240", code(field, 240));
    view.set("filled", !field.text().empty());
  } else if (field.is_integer()) {
    view.set("count", count(field));
    view.set("moment", moment(field));
    view.set("positive", field.integer() > 0);
    view.set("s", field.integer() == 1 ? "" : "s");
  } else {
    view.set("percent", percent(field));
  }
  return view;
}

}  // namespace

View object_view() {
  return View(View::type::object);
}

View list_view() {
  return View(View::type::list);
}

View view_of(const JsonField& field, std::initializer_list<std::string_view> left_out) {
  if (field.is_null()) return View(false);
  if (field.is_flag()) return View(field.flag());
  if (field.is_array())
    return views_of(field, [](const JsonField& item, std::size_t) { return view_of(item); });
  if (!field.is_object()) return leaf_view(field);
  View view = object_view();
  for (const std::string& key : field.keys())
    if (std::ranges::find(left_out, key) == left_out.end()) view.set(key, view_of(field.at(key)));
  return view;
}

std::string filled_template(std::string_view name, View view) {
  for (const auto& [file, text] : report_templates())
    view.set(std::string(file),
             View(kainjow::mustache::partial([text = text] { return std::string(text); })));
  kainjow::mustache::mustache page{std::string(report_templates().at(name))};
  page.set_custom_escape([](const std::string& text) { return escaped(text); });
  require(page.is_valid(), std::string(name) + ": " + page.error_message());
  return page.render(view);
}

}  // namespace lockstep::cache_sim
