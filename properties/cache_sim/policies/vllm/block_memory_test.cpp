// The rows that vLLM's worker tells the memory of its blocks are complete: whoever has numbers
// instead of labels can run them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/policies/vllm/label_blocks.hpp"
#include "cache_sim/policies/vllm/vllm_policy.hpp"
#include "cache_sim/search/explore.hpp"
#include "properties/support/search.hpp"

namespace lockstep::cache_sim {
namespace {

/// A mistake that the worker could make in a row.
enum class Planted : std::uint8_t {
  none,
  ends_beyond_its_tokens,
  lacks_a_block,
  begins_with_nothing,
  stores_no_end,
  stores_backwards,
  forgets_a_draft,
};
Planted planted = Planted::none;

class RowChecker final : public BlockMemory {
 public:
  RowChecker(const BlockRules& rules, const BlockPool& pool) : labels_(rules, pool) {
    for (const GroupSpec& group : rules.groups) (is_state(group.kind) ? states_ : kv_)++;
  }

  void admit(std::uint32_t place) override { labels_.admit(place); }
  void learn(const std::vector<KeyId>& keys, const Tokens& tokens) override {
    labels_.learn(keys, tokens);
  }
  void copy(const BlockCopy& copy) override { labels_.copy(copy); }
  void receive(const BlockRow& row) override { labels_.receive(row); }
  void move(const BlockMove& move) override {
    expect(move.recurrent != kNullBlock && move.conv != kNullBlock && move.target != kNullBlock,
           "a moved state has blocks");
    labels_.move(move);
  }
  void check(BlockId block) override { labels_.check(block); }
  void forward(const BlockRow& row) override {
    ++rows;
    verifications += row.drafts > 0;
    check_with_mistake(row);
    labels_.forward(row);
  }

  Findings take_findings() {
    Findings all = std::exchange(labels_.findings(), {});
    for (Finding& one : std::exchange(findings_, {})) all.push_back(std::move(one));
    return all;
  }

  static inline std::int64_t rows = 0, verifications = 0;

 private:
  void expect(bool holds, const char* sentence) {
    if (holds) return;
    findings_.push_back({FindingKind::broken_invariant,
                         fmt::format("not true of a row: {}", sentence), "a row that can be run",
                         "this one"});
  }

  void check_with_mistake(const BlockRow& row) {
    BlockRow told = row;
    std::vector<BlockKv> kv(row.kv.begin(), row.kv.end());
    std::vector<BlockStates> states(row.states.begin(), row.states.end());
    switch (planted) {
      case Planted::none: break;
      case Planted::ends_beyond_its_tokens: told.end = row.tokens.size() + 1; break;
      case Planted::lacks_a_block:
        for (BlockKv& one : kv)
          one.columns = one.columns.first(static_cast<std::size_t>((row.end - 1) / one.size));
        break;
      case Planted::begins_with_nothing:
        for (BlockStates& one : states) one.from_nothing = true;
        break;
      case Planted::stores_no_end:
        for (BlockStates& one : states) one.stores.pop_back();
        break;
      case Planted::stores_backwards:
        for (BlockStates& one : states) std::ranges::reverse(one.stores);
        break;
      case Planted::forgets_a_draft:
        for (BlockStates& one : states)
          if (row.verifies && one.stores.size() > 1) one.stores.erase(one.stores.begin());
        break;
    }
    told.kv = kv;
    told.states = states;
    check_row(told);
  }

  void check_row(const BlockRow& row) {
    expect(row.start < row.end && row.end <= row.tokens.size(), "it computes tokens that it has");
    expect(row.drafts <= row.end - row.start, "its drafts are among its tokens");
    expect(std::ssize(row.kv) == kv_ && std::ssize(row.states) == states_, "it has every group");
    for (const BlockKv& kv : row.kv)
      for (std::int64_t column = kv.first / kv.size; column * kv.size < row.end; ++column)
        expect(block_at(kv.columns, column) != kNullBlock, "each of its tokens has a block");
    for (const BlockStates& states : row.states) check_states(row, states);
  }

  void check_states(const BlockRow& row, const BlockStates& states) {
    expect(states.from_nothing == (row.start == 0), "a prompt alone begins with nothing");
    expect(states.from_nothing || (states.recurrent != kNullBlock && states.conv != kNullBlock),
           "it begins with blocks");
    std::int64_t last = row.start;
    for (const BlockStates::Store& store : states.stores) {
      expect(store.size > last && store.size <= row.end, "states are stored in order, within it");
      last = store.size;
    }
    expect(last == row.end, "the state of its end is stored");
    expect(!row.verifies || std::ssize(states.stores) == row.end - row.start,
           "a verification stores a state for each token");
  }

  LabelBlocks labels_;
  std::int64_t kv_ = 0, states_ = 0;
  Findings findings_;
};

/// A policy on a memory that checks its rows.
class CheckedBlocks final : public Subject {
 public:
  explicit CheckedBlocks(std::unique_ptr<Subject> policy)
      : policy_(std::move(policy)),
        vllm_(dynamic_cast<VllmPolicy&>(*policy_)),
        memory_(vllm_.manager().rules(), vllm_.manager().pool()) {
    vllm_.follow(memory_);
  }
  Result<Reply> apply(const Operation& operation) override { return policy_->apply(operation); }
  Findings take_findings() override { return memory_.take_findings(); }
  std::optional<Snapshot> snapshot() const override { return policy_->snapshot(); }

 private:
  std::unique_ptr<Subject> policy_;
  VllmPolicy& vllm_;
  RowChecker memory_;
};

constexpr std::array kPolicies{"vllm-align", "vllm-align-retention-0", "vllm-all"};

template <std::size_t place>
std::unique_ptr<Subject> make_checked(const SubjectOptions& options) {
  return std::make_unique<CheckedBlocks>(
      Registry<PolicyEntry>::find(kPolicies[place])->make(options));
}

/// By the first test that wants them: they are no policies of the project.
template <std::size_t... places>
void add_policies(std::index_sequence<places...>) {
  static const std::array names{fmt::format("blocks-of-{}", kPolicies[places])...};
  if (Registry<PolicyEntry>::find(names[0]) != nullptr) return;
  const auto add = [](std::string_view name, std::string_view policy, auto make) {
    PolicyEntry entry = *Registry<PolicyEntry>::find(policy);
    entry.name = name;
    entry.make = make;
    Registry<PolicyEntry>::add(entry);
  };
  (add(names[places], kPolicies[places], make_checked<places>), ...);
}

ExploreOutcome explored(std::string_view policy, std::int64_t traces) {
  add_policies(std::make_index_sequence<kPolicies.size()>());
  ExploreOptions options;
  options.run.subjects = {fmt::format("blocks-of-{}", policy)};
  options.run.check = CheckLevel::labels;
  options.run.fixed = {"cpu_chunks", "cpu_blocks"};  // a load is told to the policy's own labels
  options.traces = traces;
  options.shrinks = false;
  Result<ExploreOutcome> outcome = explore(options);
  require(outcome.has_value(), outcome ? "" : outcome.error().text);
  return std::move(*outcome);
}

class BlockRows : public testing::TestWithParam<const char*> {};

TEST_P(BlockRows, canBeRun) {
  RowChecker::rows = RowChecker::verifications = 0;
  const ExploreOutcome outcome = explored(GetParam(), 400);
  for (const Discovery& found : outcome.discoveries) ADD_FAILURE() << found.finding.finding.text;
  EXPECT_GT(RowChecker::rows, 2000);
  if (GetParam() != std::string("vllm-all")) {
    EXPECT_GT(RowChecker::verifications, 100);
  }
}

INSTANTIATE_TEST_SUITE_P(Each, BlockRows, testing::ValuesIn(kPolicies),
                         [](const auto& info) { return testing_support::test_name(info.param); });

class PlantedBlockRows : public testing::TestWithParam<std::pair<Planted, const char*>> {
 protected:
  void TearDown() override { planted = Planted::none; }
};

// The check can fail.
TEST_P(PlantedBlockRows, areFound) {
  planted = GetParam().first;
  const ExploreOutcome outcome = explored("vllm-align", 300);
  ASSERT_EQ(outcome.discoveries.size(), 1u);
  const std::string& text = outcome.discoveries.front().finding.finding.text;
  EXPECT_NE(text.find(GetParam().second), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(
    Each, PlantedBlockRows,
    testing::Values(std::pair{Planted::ends_beyond_its_tokens, "tokens that it has"},
                    std::pair{Planted::lacks_a_block, "has a block"},
                    std::pair{Planted::begins_with_nothing, "begins with nothing"},
                    std::pair{Planted::stores_no_end, "state of its end"},
                    std::pair{Planted::stores_backwards, "in order"},
                    std::pair{Planted::forgets_a_draft, "for each token"}),
    [](const auto& info) { return fmt::format("mistake_{}", static_cast<int>(info.param.first)); });

}  // namespace
}  // namespace lockstep::cache_sim
