// Registries of named objects. A Registration at a file's foot adds its entries, so that a new
// policy is a new file without an edit elsewhere.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "reference/base/require.hpp"

namespace lockstep {

/// All entries of one kind that linked files have registered. `Entry` has a `std::string_view
/// name`.
template <class Entry>
class Registry {
 public:
  /// All entries sorted by name, so that the order of linking does not show.
  static std::vector<Entry> all() {
    std::vector<Entry> sorted = entries();
    std::ranges::sort(sorted, {}, &Entry::name);
    return sorted;
  }

  static const Entry* find(std::string_view name) {
    for (const Entry& entry : entries())
      if (entry.name == name) return &entry;
    return nullptr;
  }

  static void add(Entry entry) {
    require(find(entry.name) == nullptr, "a registered name is unique among its kind");
    entries().push_back(entry);
  }

 private:
  static std::vector<Entry>& entries() {
    static std::vector<Entry> list;
    return list;
  }
};

template <class Entry>
struct Registration {
  explicit Registration(std::initializer_list<Entry> entries) {
    for (const Entry& entry : entries) Registry<Entry>::add(entry);
  }
};

}  // namespace lockstep
