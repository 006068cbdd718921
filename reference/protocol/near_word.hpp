// Suggests the known word that a mistyped word may stand for.
#pragma once

#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// `, but `known` is one` for the known word that one typing mistake, or two in a long word, makes
/// of it; nothing where none is as near. It follows a word that was not found.
std::string but_near(std::string_view word, const std::vector<std::string_view>& known);

/// The names of all entries of a registry.
template <class Entries>
std::vector<std::string_view> names_in(const Entries& entries) {
  std::vector<std::string_view> names;
  names.reserve(std::size(entries));
  for (const auto& entry : entries) names.push_back(entry.name);
  return names;
}

}  // namespace lockstep
