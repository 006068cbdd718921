#include "cache_sim/numbers/placed_model.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep::cache_sim {
namespace {

using reference::AttentionUnit;
using reference::HybridConfig;
using reference::HybridUnit;
using reference::LatentUnit;

/// The kinds of memory that a layer needs and a group has.
enum class Kept : std::uint8_t { nothing, all, window, states };

Kept kept_by(const HybridUnit& unit) {
  if (const auto* const attention = std::get_if<AttentionUnit>(&unit.kind))
    return attention->window > 0 ? Kept::window : Kept::all;
  if (std::holds_alternative<LatentUnit>(unit.kind)) return Kept::all;
  const bool has_state = std::holds_alternative<reference::MambaUnit>(unit.kind) ||
                         std::holds_alternative<reference::DeltaNetUnit>(unit.kind);
  return has_state ? Kept::states : Kept::nothing;
}

Kept kept_by(const GroupSpec& group) {
  if (is_state(group.kind)) return Kept::states;
  return group.kind == GroupKind::window ? Kept::window : Kept::all;
}

std::vector<std::uint32_t> groups_that_keep(const BlockGroups& pool, Kept kept) {
  std::vector<std::uint32_t> found;
  for (std::uint32_t i = 0; i < pool.groups.size(); ++i)
    if (kept_by(pool.groups[i]) == kept) found.push_back(i);
  return found;
}

/// The groups that can have the unit, the best kind alone.
std::vector<std::uint32_t> groups_for(const HybridUnit& unit, const BlockGroups& pool) {
  const Kept kept = kept_by(unit);
  std::vector<std::uint32_t> found = groups_that_keep(pool, kept);
  if (!found.empty() || kept == Kept::states) return found;
  if (kept == Kept::window) return groups_that_keep(pool, Kept::all);
  if (std::holds_alternative<AttentionUnit>(unit.kind)) return groups_that_keep(pool, Kept::window);
  return found;
}

std::string_view layer_text(const HybridUnit& unit) {
  if (std::holds_alternative<LatentUnit>(unit.kind)) return "a layer of latent attention";
  switch (kept_by(unit)) {
    case Kept::states: return "a layer with a state";
    case Kept::window: return "a layer of attention with a window";
    default: return "a layer of full attention";
  }
}

std::string_view group_text(const GroupSpec& group) {
  switch (kept_by(group)) {
    case Kept::states: return "holds states";
    case Kept::window: return "holds the KV of a window";
    default: return "holds KV";
  }
}

void set_window(HybridUnit& unit, const GroupSpec& group) {
  if (auto* const attention = std::get_if<AttentionUnit>(&unit.kind))
    if (group.kind == GroupKind::window) attention->window = group.window;
}

/// A unit like one of the preset's for a group that has none; null where the preset has no such
/// layer.
const HybridUnit* model_of(const HybridConfig& preset, const GroupSpec& group) {
  const Kept kept = kept_by(group);
  for (const HybridUnit& unit : preset.units) {
    const Kept own = kept_by(unit);
    const bool is_attention = std::holds_alternative<AttentionUnit>(unit.kind);
    if (own == kept || (kept == Kept::window && is_attention)) return &unit;
  }
  return nullptr;
}

}  // namespace

Result<PlacedModel> placed_model(const HybridConfig& preset, const BlockGroups& pool) {
  PlacedModel placed{.config = preset, .key = preset.name};
  std::vector<std::int64_t> layers(pool.groups.size());
  for (HybridUnit& unit : placed.config.units) {
    placed.groups.push_back(PlacedModel::kNowhere);
    if (kept_by(unit) == Kept::nothing) continue;
    const std::vector<std::uint32_t> own = groups_for(unit, pool);
    if (own.empty())
      return fail(fmt::format("field model: {} has {}, and no group of blocks can hold it",
                              preset.name, layer_text(unit)));
    const std::uint32_t group = *std::ranges::min_element(
        own, [&](std::uint32_t a, std::uint32_t b) { return layers[a] < layers[b]; });
    ++layers[group];
    placed.groups.back() = group;
    set_window(unit, pool.groups[group]);
  }
  for (std::uint32_t group = 0; group < pool.groups.size(); ++group) {
    const GroupSpec& spec = pool.groups[group];
    if (layers[group] == 0) {
      const HybridUnit* const like = model_of(preset, spec);
      if (like == nullptr)
        return fail(fmt::format("field model: {} has no layer for group {} of the blocks, which {}",
                                preset.name, group, group_text(spec)));
      placed.config.units.push_back({fmt::format("group.{}.norm.weight", group),
                                     fmt::format("group.{}.mixer.", group), like->kind});
      placed.groups.push_back(group);
      set_window(placed.config.units.back(), spec);
    }
    placed.key += fmt::format(" {}:{}:{}", static_cast<int>(kept_by(spec)), spec.window,
                              layers[group] == 0 ? 1 : 0);
  }
  return placed;
}

std::string_view preset_for(const BlockGroups& pool) {
  if (!groups_that_keep(pool, Kept::states).empty()) return "tiny-nemotron-h";
  return groups_that_keep(pool, Kept::window).empty() ? "tiny-qwen3" : "tiny-window";
}

}  // namespace lockstep::cache_sim
