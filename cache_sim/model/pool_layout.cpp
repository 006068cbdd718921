#include "cache_sim/model/pool_layout.hpp"

#include <fmt/format.h>

namespace lockstep::cache_sim {

const PoolLayout* pool_layout_of(const PolicyEntry& policy) {
  for (const PoolLayout& layout : Registry<PoolLayout>::all())
    if (layout.applies(policy)) return Registry<PoolLayout>::find(layout.name);
  return nullptr;
}

bool has_blocks(const PolicyEntry& policy) {
  const PoolLayout* const layout = pool_layout_of(policy);
  return layout != nullptr && layout->blocks != nullptr;
}

tl::unexpected<Error> no_room_for(std::string_view unit, const PoolMemory& memory) {
  return fail(fmt::format("{} bytes have no room for one {} of model {}", memory.bytes, unit,
                          memory.model.name));
}

}  // namespace lockstep::cache_sim
