// A preset of a hybrid model whose layers lie in the groups of a block cache: layers of full
// attention in attention groups, those with a window in window groups, those with a state in groups
// of states; several groups of a kind take turns.
//
// - A layer in a window group sees that group's window. Without a window group, layers with a
//   window lie in attention groups, which keep more than they see; without an attention group,
//   layers of full attention get the window of a window group.
// - A group that is left without a layer gets one more of its kind, behind the preset's units. So a
//   forward reads every group.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/model/block_memory.hpp"
#include "reference/base/result.hpp"
#include "reference/models/hybrid/hybrid_config.hpp"

namespace lockstep::cache_sim {

struct PlacedModel {
  static constexpr std::uint32_t kNowhere = std::numeric_limits<std::uint32_t>::max();

  reference::HybridConfig config;
  std::vector<std::uint32_t> groups{};  ///< by unit; kNowhere: it keeps nothing
  std::string key{};                    ///< equal exactly where the models are
};

/// The error is a sentence that names the field `model`: a layer without a group, or a group
/// without a layer.
Result<PlacedModel> placed_model(const reference::HybridConfig& preset, const BlockGroups& pool);

/// The preset that such groups get where none is named.
std::string_view preset_for(const BlockGroups& pool);

}  // namespace lockstep::cache_sim
