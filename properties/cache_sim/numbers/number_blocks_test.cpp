// Doubles in the blocks of a cache, and models whose layers lie in groups of blocks.
#include "cache_sim/numbers/number_blocks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "properties/support/blocks_of_one_request.hpp"

namespace lockstep::cache_sim {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Each, BlocksOfNumbers,
    testing::Values(BlocksMaker{
        "doubles",
        [](const PlacedModel& placed, const BlockGroups& pool) -> std::unique_ptr<NumberedBlocks> {
          return std::make_unique<NumberBlocks>(
              std::make_shared<Truth>(std::make_shared<const reference::HybridModel>(
                                          placed.config, reference::drawn_hybrid(placed.config)),
                                      1u << 10),
              placed, pool);
        }}));

std::string refused(std::string_view preset, std::vector<GroupSpec> groups) {
  const auto placed = placed_model(*reference::hybrid_preset(preset), pool_of(std::move(groups)));
  return placed ? "" : placed.error().text;
}

TEST(PlacedModel, isRefusedWhereALayerHasNoGroupOrAGroupNoLayer) {
  EXPECT_EQ(refused("tiny-nemotron-h", {attention(), window(5), states(), states(), states()}), "");
  EXPECT_EQ(refused("tiny-nemotron-h", {attention()}),
            "field model: tiny-nemotron-h has a layer with a state, and no group of blocks can "
            "hold it");
  EXPECT_EQ(refused("tiny-qwen3", {attention(), states()}),
            "field model: tiny-qwen3 has no layer for group 1 of the blocks, which holds states");
  EXPECT_EQ(refused("tiny-deepseek-v3", {window(5)}),
            "field model: tiny-deepseek-v3 has a layer of latent attention, and no group of blocks "
            "can hold it");
  EXPECT_EQ(refused("tiny-deepseek-v3", {attention(), window(5)}),
            "field model: tiny-deepseek-v3 has no layer for group 1 of the blocks, which holds the "
            "KV of a window");
  EXPECT_EQ(refused("tiny-window", {attention()}), "");
  EXPECT_EQ(refused("tiny-qwen3", {window(5)}), "");
}

// Layers take turns, and a group that is left gets one of its kind with its window.
TEST(PlacedModel, hasALayerInEachGroup) {
  const PlacedModel placed =
      *placed_model(*reference::hybrid_preset("tiny-nemotron-h"),
                    pool_of({states(), attention(), states(), window(7), states()}));
  constexpr std::uint32_t kNowhere = PlacedModel::kNowhere;
  EXPECT_EQ(placed.groups, (std::vector<std::uint32_t>{0, kNowhere, 1, 2, kNowhere, 3, 4}));
  EXPECT_EQ(std::get<reference::AttentionUnit>(placed.config.units[2].kind).window, 0);
  EXPECT_EQ(std::get<reference::AttentionUnit>(placed.config.units[5].kind).window, 7);
  EXPECT_TRUE(std::holds_alternative<reference::MambaUnit>(placed.config.units[6].kind));
}

}  // namespace
}  // namespace lockstep::cache_sim
