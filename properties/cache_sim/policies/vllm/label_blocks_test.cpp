// A block holds the KV of one group or a state of another, as a label too: who writes it for a
// group destroys what it held for others.
#include "cache_sim/policies/vllm/label_blocks.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lockstep::cache_sim {
namespace {

BlockRules rules_of(std::string_view groups) {
  Config config;
  config.put("groups", groups);
  config.put("hash_block", 4);
  config.put("blocks", 16);
  return *BlockRules::of(config);
}

/// Two groups of the same kind, with one block for each.
struct TwoGroups {
  explicit TwoGroups(std::string_view groups)
      : rules(rules_of(groups)), pool(rules), labels(rules, pool) {
    labels.admit(0);
  }

  /// A row over tokens [start, end), whose KV of group 0 and 1 lies in these blocks, and the state
  /// of each state group in the same.
  void run(std::int64_t start, std::int64_t end, BlockId first, BlockId second) {
    const std::vector<BlockId> columns[] = {{first}, {second}};
    std::vector<BlockKv> kv;
    std::vector<BlockStates> states;
    for (std::uint32_t group = 0; group < 2; ++group)
      if (is_state(rules.groups[group].kind))
        states.push_back({.group = group,
                          .from_nothing = start == 0,
                          .recurrent = columns[group][0],
                          .conv = columns[group][0],
                          .conv_begin = 0,
                          .stores = {{end, columns[group][0]}}});
      else
        kv.push_back({group, columns[group], 4, 0});
    labels.forward({.place = 0,
                    .tokens = tokens,
                    .start = start,
                    .end = end,
                    .drafts = 0,
                    .external = 0,
                    .verifies = false,
                    .kv = kv,
                    .states = states});
  }
  std::string found() { return labels.findings().empty() ? "" : labels.findings().front().text; }

  Tokens tokens = *parse_tokens("a4");
  BlockRules rules;
  BlockPool pool;
  LabelBlocks labels;
};

TEST(LabelBlocks, belongToOneGroup) {
  for (const char* const groups : {"attention:4,attention:4", "mamba:4,mamba:4",
                                   "attention:4,mamba:4", "mamba:4,attention:4"}) {
    TwoGroups sound(groups);
    sound.run(0, 2, 1, 2);
    sound.run(2, 3, 1, 2);
    EXPECT_EQ(sound.found(), "") << groups;
    TwoGroups shared(groups);
    shared.run(0, 2, 1, 1);
    shared.run(2, 3, 1, 1);
    EXPECT_NE(shared.found(), "") << groups;
  }
}

TEST(LabelBlocks, loseWhatTheyHold) {
  for (const BlockId lost : {1, 2}) {
    TwoGroups one("attention:4,mamba:4");
    one.run(0, 2, 1, 2);
    one.labels.lose(lost);
    one.run(2, 3, 1, 2);
    EXPECT_NE(one.found(), "");
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
