#include "reference/base/ids.hpp"

#include <deque>
#include <mutex>
#include <unordered_map>

namespace lockstep {
namespace {

struct NameTable {
  std::mutex mutex;
  std::deque<std::string> texts{
      ""};  // a deque never moves its texts, to which the map's keys point
  std::unordered_map<std::string_view, std::uint32_t> index_of;
};

NameTable& names() {
  static NameTable table;
  return table;
}

}  // namespace

Name Name::intern(std::string_view text) {
  Name name;
  if (text.empty()) return name;
  NameTable& table = names();
  const std::lock_guard lock(table.mutex);
  const auto found = table.index_of.find(text);
  if (found != table.index_of.end()) {
    name.index_ = found->second;
    return name;
  }
  name.index_ = static_cast<std::uint32_t>(table.texts.size());
  table.index_of.emplace(table.texts.emplace_back(text), name.index_);
  return name;
}

const std::string& Name::text() const {
  NameTable& table = names();
  const std::lock_guard lock(table.mutex);
  return table.texts[index_];
}

}  // namespace lockstep
