#include "reference/protocol/subject.hpp"

#include "reference/base/require.hpp"

namespace lockstep {

std::string_view default_policy() {
  std::string_view name;
  for (const PolicyEntry& entry : Registry<PolicyEntry>::all()) {
    if (!entry.is_default) continue;
    require(name.empty(), "one policy alone is the default");
    name = entry.name;
  }
  require(!name.empty(), "a policy is the default");
  return name;
}

}  // namespace lockstep
