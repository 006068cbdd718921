// The blocks of the policy as labels and as numbers: each call goes to both, so that a finding can
// say both that a block stands for another prefix and by how much that moves an output.
#pragma once

#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/policies/vllm/label_blocks.hpp"

namespace lockstep::cache_sim {

class LabelledBlocks final : public BlockMemory {
 public:
  /// Both outlive it.
  LabelledBlocks(LabelBlocks& labels, NumberedBlocks& numbers)
      : labels_(labels), numbers_(numbers) {}

  void admit(std::uint32_t place) override { numbers_.admit(place), labels_.admit(place); }
  void learn(const std::vector<KeyId>& keys, const Tokens& tokens) override {
    numbers_.learn(keys, tokens), labels_.learn(keys, tokens);
  }
  void lose(BlockId block) override { numbers_.lose(block), labels_.lose(block); }
  void copy(const BlockCopy& copy) override { numbers_.copy(copy), labels_.copy(copy); }
  void receive(const BlockRow& row) override { numbers_.receive(row), labels_.receive(row); }
  void forward(const BlockRow& row) override { numbers_.forward(row), labels_.forward(row); }
  void launch() override { numbers_.launch(), labels_.launch(); }
  void move(const BlockMove& move) override { numbers_.move(move), labels_.move(move); }
  void check(BlockId block) override { numbers_.check(block), labels_.check(block); }

 private:
  LabelBlocks& labels_;
  NumberedBlocks& numbers_;
};

}  // namespace lockstep::cache_sim
