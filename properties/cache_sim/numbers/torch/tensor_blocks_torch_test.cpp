// Tensors in the blocks of a cache.
#include "cache_sim/numbers/torch/tensor_blocks.hpp"

#include <gtest/gtest.h>

#include <memory>

#include "cache_sim/numbers/torch/judged_calls.hpp"
#include "properties/support/blocks_of_one_request.hpp"

namespace lockstep::cache_sim {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Each, BlocksOfNumbers,
    testing::Values(BlocksMaker{
        "tensors",
        [](const PlacedModel& placed, const BlockGroups& pool) -> std::unique_ptr<NumberedBlocks> {
          return std::make_unique<TensorBlocks>(
              std::make_shared<TensorTruth>(std::make_shared<const TensorModel>(
                  placed.config, reference::drawn_hybrid(placed.config),
                  judged_layers(host_layers()), at::kFloat)),
              placed, pool);
        }}));

}  // namespace
}  // namespace lockstep::cache_sim
