// A block cache with one request, over doubles or tensors, and what holds for both: right use is
// never reported, each wrong one is, and the finding names the unit, the part and the block.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/numbers/placed_model.hpp"

namespace lockstep::cache_sim {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

inline constexpr std::int64_t kBlock = 4, kDrafts = 2;

inline GroupSpec attention() {
  return {.kind = GroupKind::attention, .block = kBlock};
}
inline GroupSpec window(std::int64_t tokens) {
  return {.kind = GroupKind::window, .block = kBlock, .window = tokens};
}
inline GroupSpec states() {
  return {.kind = GroupKind::mamba, .block = kBlock};
}

inline BlockGroups pool_of(std::vector<GroupSpec> groups) {
  return {.groups = std::move(groups), .blocks = 32, .drafts = kDrafts};
}

inline Tokens text(const char* terms) {
  return *parse_tokens(terms);
}

struct BlocksMaker {
  const char* of;
  std::unique_ptr<NumberedBlocks> (*make)(const PlacedModel&, const BlockGroups&);
  friend std::ostream& operator<<(std::ostream& out, const BlocksMaker& maker) {
    return out << maker.of;
  }
};

/// A cache with one request. The KV of group g lies in blocks 1 + 8 g …, its states, running and
/// scratch, in blocks 5 + 8 g …
struct OneRequest {
  explicit OneRequest(const BlocksMaker& maker, std::string_view preset = "tiny-nemotron-h",
                      std::vector<GroupSpec> groups = {attention(), states()})
      : pool(pool_of(std::move(groups))),
        placed(*placed_model(*reference::hybrid_preset(preset), pool)),
        kept(maker.make(placed, pool)),
        memory(*kept) {
    for (std::uint32_t group = 0; group < pool.groups.size(); ++group)
      for (BlockId column = 0; column < 4; ++column)
        columns[group].push_back(8 * group + 1 + column);
  }

  BlockId state_of(std::uint32_t group, std::int64_t scratch = 0) const {
    return static_cast<BlockId>(8 * group + 5 + scratch);
  }

  /// The row of these tokens; of a verification where it has drafts, begun at `offset` of the last
  /// one's states.
  void run(const Tokens& tokens, std::int64_t start, std::int64_t end, std::int64_t drafts = 0,
           std::int64_t offset = 0) {
    forward(tokens, start, end, drafts, offset);
    memory.launch();
  }
  void forward(const Tokens& tokens, std::int64_t start, std::int64_t end, std::int64_t drafts = 0,
               std::int64_t offset = 0) {
    std::vector<BlockKv> kv;
    std::vector<BlockStates> begun;
    for (std::uint32_t group = 0; group < pool.groups.size(); ++group) {
      const GroupSpec& spec = pool.groups[group];
      if (!is_state(spec.kind)) {
        const std::int64_t first =
            spec.window > 0 ? std::max<std::int64_t>(0, start - spec.window + 1) : 0;
        kv.push_back({group, columns.at(group), spec.block, first});
        continue;
      }
      BlockStates one{.group = group,
                      .from_nothing = start == 0,
                      .recurrent = state_of(group, offset),
                      .conv = state_of(group),
                      .conv_begin = offset,
                      .stores = {}};
      for (std::int64_t i = start; drafts > 0 && i < end; ++i)
        one.stores.push_back({i + 1, state_of(group, i - start)});
      if (drafts == 0) one.stores.push_back({end, state_of(group)});
      begun.push_back(one);
    }
    memory.forward({.place = 0,
                    .tokens = tokens,
                    .start = start,
                    .end = end,
                    .drafts = drafts,
                    .external = 0,
                    .verifies = drafts > 0,
                    .kv = kv,
                    .states = begun});
  }

  std::string found() {
    const Findings findings = memory.drain();
    return findings.empty() ? ""
                            : std::string(to_string(findings[0].kind)) + ": " + findings[0].text;
  }

  BlockGroups pool;
  PlacedModel placed;
  std::unique_ptr<NumberedBlocks> kept;
  NumberedBlocks& memory;
  std::map<std::uint32_t, std::vector<BlockId>> columns;
};

class BlocksOfNumbers : public testing::TestWithParam<BlocksMaker> {};

// Chunks, decodes and a verification whose third state is the accepted one, in every preset.
TEST_P(BlocksOfNumbers, ofARightRunAreNeverReported) {
  for (const std::string_view preset : reference::hybrid_presets()) {
    const bool has_states = preset == "tiny-nemotron-h" || preset == "tiny-qwen3-next";
    OneRequest one(GetParam(), preset,
                   has_states ? std::vector{attention(), states(), states(), states()}
                              : std::vector{attention()});
    one.run(text("a12"), 0, 5);
    one.run(text("a12"), 5, 6);
    one.run(text("a8+c1"), 6, 9, 2);  // c0 is rejected
    one.run(text("a11"), 8, 11, 2, 1);
    for (std::uint32_t group = 0; has_states && group < 4; ++group)
      if (group > 0)
        one.memory.move({.group = group,
                         .recurrent = one.state_of(group, 2),
                         .conv = one.state_of(group),
                         .target = one.state_of(group),
                         .bias = 2});
    one.run(text("a16"), 11, 16);
    EXPECT_EQ(one.found(), "") << preset;
  }
}

// A window group gives its window to its layers, whatever the preset says.
TEST_P(BlocksOfNumbers, ofAWindowNeedNoBlockBelowIt) {
  for (const std::int64_t tokens : {2, 5, 9}) {
    OneRequest one(GetParam(), "tiny-window", {attention(), window(tokens)});
    one.run(text("a12"), 0, 11);
    for (std::int64_t i = 0; i < 11 - tokens + 1; ++i)
      if ((i + 1) % kBlock == 0) one.columns[1][static_cast<std::size_t>(i / kBlock)] = kNullBlock;
    one.run(text("a12"), 11, 12);
    EXPECT_EQ(one.found(), "") << tokens;
    OneRequest other(GetParam(), "tiny-window", {attention(), window(tokens)});
    other.run(text("a12"), 0, 11);
    other.columns[1][static_cast<std::size_t>((11 - tokens + 1) / kBlock)] = kNullBlock;
    other.run(text("a12"), 11, 12);
    EXPECT_THAT(other.found(), HasSubstr("which holds what block 0 had before anybody wrote it"));
  }
}

// Each way to be wrong, and the words that name it.
TEST_P(BlocksOfNumbers, ofAWrongBlockAreReportedByUnitAndPart) {
  const auto found = [&](const auto& spoil) {
    OneRequest one(GetParam());
    one.run(text("a10"), 0, 10);
    EXPECT_EQ(one.found(), "");
    spoil(one);
    one.run(text("a12"), 10, 12);
    return one.found();
  };
  EXPECT_EQ(found([](OneRequest&) {}), "");
  // Attention is blind to the order of what it reads: two whole blocks that changed places would
  // differ by the rounding of a processor's sums, or by nothing.
  EXPECT_THAT(found([](OneRequest& one) { one.columns[0][1] = one.columns[0][0]; }),
              AllOf(HasSubstr("number-differs: a row over tokens 10 to 12 of a12: logits after 12 "
                              "tokens are "),
                    Not(HasSubstr("NaN")), HasSubstr("unit 2: KV of token 4 in group 0 differs")));
  EXPECT_THAT(found([](OneRequest& one) { one.columns[0][1] = kNullBlock; }),
              HasSubstr("logits after 12 tokens are NaN off; unit 2: KV of token 4 in group 0 "
                        "differs, which holds what block 0 had before anybody wrote it"));
  EXPECT_THAT(found([](OneRequest& one) { one.memory.lose(one.columns[0][0]); }),
              HasSubstr("which holds what block 1 had before anybody wrote it"));
  EXPECT_THAT(found([](OneRequest& one) {
                one.memory.move({.group = 1, .recurrent = 13, .conv = 13, .target = 13, .bias = 1});
              }),
              HasSubstr("unit 0: the conv part of block 13 differs"));
  EXPECT_THAT(
      found([](OneRequest& one) {
        one.memory.move({.group = 1, .recurrent = 20, .conv = 13, .target = 13, .bias = 0});
      }),
      HasSubstr("unit 0: the recurrent part of block 13 differs, which holds what block 20"));
  EXPECT_EQ(found([](OneRequest& one) { one.run(text("a12"), 3, 14); }),
            "out-of-range: a row computes tokens 3 to 14 of a12");
}

// One pool: what a block held as KV is what a group of states finds in it, and the reverse.
TEST_P(BlocksOfNumbers, holdWhatAnotherGroupHasLeft) {
  OneRequest one(GetParam());
  one.run(text("a10"), 0, 10);
  one.memory.copy({.source = 1, .target = 13, .group = 0});
  one.run(text("a12"), 10, 12);
  EXPECT_THAT(one.found(), HasSubstr("unit 0: the recurrent part of block 13 differs"));
  OneRequest other(GetParam());
  other.run(text("a10"), 0, 10);
  other.memory.copy({.source = 13, .target = 1, .group = 1});
  other.run(text("a12"), 10, 12);
  EXPECT_THAT(other.found(), HasSubstr("unit 2: KV of token 0 in group 0 differs"));
}

// KV and states from another server have the numbers of a run without a cache.
TEST_P(BlocksOfNumbers, thatAreReceivedAreThoseOfTheirTokens) {
  OneRequest one(GetParam(), "tiny-qwen3-next");
  const Tokens tokens = text("a9");
  const std::vector<BlockKv> kv{{0, one.columns[0], kBlock, 0}};
  std::vector<BlockStates> begun{{.group = 1,
                                  .from_nothing = false,
                                  .recurrent = kNullBlock,
                                  .conv = kNullBlock,
                                  .conv_begin = 0,
                                  .stores = {{7, one.state_of(1)}}}};
  const BlockRow sent{.place = 0,
                      .tokens = tokens,
                      .start = 7,
                      .end = 9,
                      .drafts = 0,
                      .external = 7,
                      .verifies = false,
                      .kv = kv,
                      .states = begun};
  one.memory.receive(sent);
  one.run(tokens, 7, 9);
  EXPECT_EQ(one.found(), "");
}

// A row may read what an earlier row of its batch writes; one that writes what an earlier row reads
// comes after it.
TEST_P(BlocksOfNumbers, ofRowsThatShareBlocksAreThoseOfRunsInOrder) {
  OneRequest one(GetParam(), "tiny-qwen3", {attention()});
  one.forward(text("a8"), 0, 8);
  one.forward(text("a8+b1"), 8, 9);
  one.forward(text("a6+c3"), 6, 9);
  one.memory.launch();
  EXPECT_EQ(one.found(), "");
  OneRequest other(GetParam());
  other.forward(text("a10"), 0, 4);
  other.forward(text("a10"), 4, 9);
  other.memory.launch();
  EXPECT_EQ(other.found(), "");
}

}  // namespace lockstep::cache_sim
