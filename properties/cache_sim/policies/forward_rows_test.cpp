// The rows that policies tell a LayerState are complete: whoever has numbers instead of labels can
// run them. Each policy plays random traces with a LayerState that compares every row with the
// labels of its slots before it passes the row on.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/search/explore.hpp"
#include "properties/support/search.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {
namespace {

/// A mistake that a policy could make in a row.
enum class Planted : std::uint8_t {
  none,
  begins_late,
  ends_beyond_its_tokens,
  other_request,
  other_text,
  lacks_a_slot,
  slot_twice,
  other_state,
  forgets_drafts,
  forgets_parents,
  take_out_of_order,
  take_into_itself,
};
Planted planted = Planted::none;

class RowChecker final : public LayerState {
 public:
  RowChecker(std::int64_t states, std::int64_t kv_end) : labels_(states, kv_end) {}

  void forward(const ForwardRow& row) override {
    ++rows;
    check_with_mistake(row);
    if (const auto shared = open_.find(row.state.value); shared != open_.end())
      expect(shared->second == row.request, "its state is that of another row of the batch");
    LayerState::forward(row);
    if (row.state.exists()) open_[row.state.value] = row.request;
  }
  void launch(std::span<const StateSlot> padding) override {
    ++launches;
    open_.clear();
    LayerState::launch(padding);
  }

  void allocate_state(StateSlot slot) override { labels_.allocate_state(slot); }
  void zero_state(StateSlot slot, StatePart part) override {
    closes({slot});
    labels_.zero_state(slot, part);
  }
  void copy_state(StateSlot source, StateSlot target, StatePart part) override {
    closes({source, target});
    labels_.copy_state(source, target, part);
  }
  void advance_state(StateSlot slot, StatePart part, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override {
    labels_.advance_state(slot, part, tokens, begin, end);
  }
  void free_state(StateSlot slot) override {
    closes({slot});
    labels_.free_state(slot);
  }
  void verify_state(StateSlot slot, StatePart part, const VerifiedRow& row) override {
    labels_.verify_state(slot, part, row);
  }
  void commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                    StatePart part) override {
    closes({verified, target});
    labels_.commit_state(verified, at, target, part);
  }
  void replay_state(StateSlot slot, StatePart part, const Tokens& tokens, std::uint32_t begin,
                    std::uint32_t end) override {
    closes({slot});
    labels_.replay_state(slot, part, tokens, begin, end);
  }
  void step_ring(StateSlot slot, const RingStep& step, const Tokens& tokens,
                 std::uint32_t begin) override {
    ++ring_steps;
    expect(usable(step.slot), "its ring's slot is in use");
    labels_.step_ring(slot, step, tokens, begin);
  }
  void fold_ring(StateSlot slot, std::uint32_t live, const Tokens& tokens,
                 std::uint32_t size) override {
    closes({slot});
    labels_.fold_ring(slot, live, tokens, size);
  }
  void rewind_conv(StateSlot slot) override {
    closes({slot});
    labels_.rewind_conv(slot);
  }
  void receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                     std::uint32_t size) override {
    labels_.receive_state(slot, part, tokens, size);
  }
  void run_padding_row(StateSlot slot) override { labels_.run_padding_row(slot); }
  void allocate_kv(KvSlots slots) override { labels_.allocate_kv(slots); }
  void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override {
    labels_.write_kv(slots, tokens, begin);
  }
  void receive_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override {
    labels_.receive_kv(slots, tokens, begin);
  }
  void free_kv(KvSlots slots) override { labels_.free_kv(slots); }
  void copy_kv(KvSlots sources, KvSlots targets) override { labels_.copy_kv(sources, targets); }
  Lengths state_lengths(StateSlot slot, std::int64_t expected) const override {
    return labels_.state_lengths(slot, expected);
  }

  Findings take_findings() {
    Findings all = labels_.drain();
    for (Finding& one : std::exchange(findings_, {})) all.push_back(std::move(one));
    return all;
  }

  static inline std::int64_t rows = 0, verifications = 0, launches = 0, ring_steps = 0;

 private:
  /// A call beside the rows comes after everything that was told of its slots.
  void closes(std::initializer_list<StateSlot> slots) {
    for (const StateSlot slot : slots)
      if (open_.contains(slot.value)) return open_.clear();
  }

  void expect(bool holds, const char* sentence) {
    if (holds) return;
    findings_.push_back({FindingKind::broken_invariant,
                         fmt::format("not true of a row: {}", sentence), "a row that can be run",
                         "this one"});
  }

  void check_with_mistake(const ForwardRow& row) {
    ForwardRow told = row;
    const Tokens other = Tokens::of_document(1000, 0, row.tokens.size());
    std::vector<KvRun> kv(row.kv.begin(), row.kv.end());
    std::vector<StateTake> takes_told(row.takes.begin(), row.takes.end());
    switch (planted) {
      case Planted::none: break;
      case Planted::begins_late: told.begin += told.end > told.begin + 1 ? 1 : 0; break;
      case Planted::ends_beyond_its_tokens: told.end = row.tokens.size() + 1; break;
      case Planted::other_request: told.request = Name(); break;
      case Planted::other_text: return check(with_tokens(told, other));
      case Planted::lacks_a_slot: drop_last(kv, row.end); break;
      case Planted::slot_twice:
        if (row.end > 1) kv.insert(kv.begin(), {kv[0].array, kv[0].begin, 1});
        break;
      case Planted::other_state: told.state.value += 1; break;
      case Planted::forgets_drafts: told.drafts = 0; break;
      case Planted::forgets_parents:
        if (!row.parents.empty()) told.parents = row.parents.first(row.parents.size() - 1);
        break;
      case Planted::take_out_of_order:
        if (!takes_told.empty()) takes_told.back().after = row.begin == 0 ? row.end + 1 : 0;
        break;
      case Planted::take_into_itself:
        if (!takes_told.empty()) takes_told.back().target = row.state;
        break;
    }
    told.kv = kv;
    told.takes = takes_told;
    check(told);
  }

  static ForwardRow with_tokens(const ForwardRow& row, const Tokens& tokens) {
    ForwardRow other{.request = row.request, .tokens = tokens, .begin = row.begin, .end = row.end};
    other.state = row.state;
    other.kv = row.kv;
    return other;
  }

  /// Cuts the runs, so that they do not reach the last token.
  static void drop_last(std::vector<KvRun>& kv, std::uint32_t end) {
    std::vector<KvRun> cut;
    for_slots(kv, 0, end - 1, [&](KvSlots slots, std::uint32_t) {
      std::shared_ptr<std::uint32_t[]> array(new std::uint32_t[slots.size()]);
      std::ranges::copy(slots, array.get());
      cut.push_back({array, 0, static_cast<std::uint32_t>(slots.size())});
    });
    kv.swap(cut);
  }

  void check(const ForwardRow& row) {
    verifications += row.drafts != 0;
    expect(row.request.exists(), "it has a request");
    expect(row.begin < row.end && row.end <= row.tokens.size(), "it computes tokens that it has");
    expect(row.drafts <= row.end - row.begin, "its drafts are among its tokens");
    expect((row.drafts != 0) == (!row.keeps.recurrent && !row.keeps.conv) || !row.state.exists(),
           "a verification alone leaves its states elsewhere");
    expect(row.parents.empty() || row.parents.size() == row.drafts, "each draft has a parent");
    if (row.begin >= row.end || row.end > row.tokens.size()) return;
    const bool has_attention = labels_.kv_exists(1);
    if (has_attention)
      for_layers(row.kv_layers, [&](std::uint32_t distance) { check_kv(row, distance); });
    if (!row.state.exists()) return;
    for_layers(row.state_layers, [&](std::uint32_t distance) { check_states(row, distance); });
  }

  template <class Act>
  static void for_layers(std::span<const std::uint32_t> layers, Act act) {
    if (layers.empty()) act(0u);
    for (const std::uint32_t distance : layers) act(distance);
  }

  void check_kv(const ForwardRow& row, std::uint32_t distance) {
    std::vector<std::uint32_t> slots;
    for_slots(row.kv, 0, row.end, [&](KvSlots piece, std::uint32_t place) {
      expect(place == slots.size(), "its KV slots are those of its places");
      for (const std::uint32_t slot : piece) slots.push_back(slot + distance);
    });
    expect(slots.size() == row.end, "it has a KV slot for each token");
    std::vector<std::uint64_t> expected(row.begin);
    row.tokens.prefix_fingerprints(0, row.begin, expected);
    for (std::uint32_t i = 0; i < std::min<std::size_t>(row.begin, slots.size()); ++i)
      expect(labels_.kv_fingerprint(slots[i]) == expected[i], "it reads KV of its own tokens");
    for (const std::uint32_t slot : slots)
      expect(labels_.kv_exists(slot) && labels_.kv_in_use(slot), "its KV slots are in use");
    std::ranges::sort(slots);
    expect(std::ranges::adjacent_find(slots) == slots.end(), "its KV slots differ from each other");
  }

  bool usable(StateSlot slot) const {
    return labels_.state_exists(slot) && labels_.state_in_use(slot);
  }

  void check_states(const ForwardRow& row, std::uint32_t distance) {
    const StateSlot state{row.state.value + distance};
    if (!usable(state)) return expect(false, "its state is in use");
    for (const StatePart part : kStateParts)
      if (!row.ring || part == StatePart::conv)
        expect(labels_.label(state, part) == label_of(row.tokens, row.begin),
               "its state has seen the tokens before it");
    if (row.ring)
      expect(!labels_.wrong_ring(state, {row.ring->slot.value + distance}, row.ring->live,
                                 row.tokens, row.begin),
             "its state and its ring have seen the tokens before it");
    std::uint32_t last = row.begin;
    for (const StateTake& take : row.takes) {
      const StateSlot target{take.target.value + distance};
      expect(usable(target) && target != state, "a state is taken into another slot in use");
      expect(take.after >= last && take.after <= row.end, "states are taken in order, within it");
      last = take.after;
    }
  }

  LabelState labels_;
  std::map<std::uint32_t, Name> open_;  // by state slot: the request whose row was told
  Findings findings_;
};

/// A policy on a LayerState that checks its rows.
class CheckedRows final : public Subject {
 public:
  CheckedRows(SubjectOptions options, const PolicyEntry& policy, PolicyEntry::SlotCounts slots)
      : layers_(slots.states, slots.kv_end) {
    options.layers = &layers_;
    policy_ = policy.make(options);
  }
  Result<Reply> apply(const Operation& operation) override { return policy_->apply(operation); }
  Findings take_findings() override { return layers_.take_findings(); }
  std::optional<Snapshot> snapshot() const override { return policy_->snapshot(); }

 private:
  RowChecker layers_;
  std::unique_ptr<Subject> policy_;
};

constexpr std::array kPolicies{
    "radix",   "sglang-no-buffer", "sglang-legacy", "sglang-v0",   "sglang-extra-buffer",
    "marconi", "marconi-artifact", "edge-llm",      "edge-llm-v0", "static-kv"};

template <std::size_t place>
std::unique_ptr<Subject> make_checked(const SubjectOptions& options) {
  const PolicyEntry& policy = *Registry<PolicyEntry>::find(kPolicies[place]);
  const Config& config = options.config;
  const PolicyEntry::SlotCounts usual{config.state_slots, config.kv_tokens + config.page};
  return std::make_unique<CheckedRows>(options, policy,
                                       policy.slots == nullptr ? usual : policy.slots(config));
}

std::string checked(std::string_view policy) {
  return fmt::format("rows-of-{}", policy);
}

/// By the first test that wants them: they are no policies of the project.
template <std::size_t... places>
void add_policies(std::index_sequence<places...>) {
  static const std::array names{checked(kPolicies[places])...};
  if (Registry<PolicyEntry>::find(names[0]) != nullptr) return;
  const auto add = [](std::string_view name, std::string_view policy, auto make) {
    PolicyEntry entry = *Registry<PolicyEntry>::find(policy);
    entry.name = name;
    entry.make = make;
    entry.is_default = false;
    Registry<PolicyEntry>::add(entry);
  };
  (add(names[places], kPolicies[places], make_checked<places>), ...);
}

ExploreOutcome explored(std::string_view policy, std::int64_t traces) {
  add_policies(std::make_index_sequence<kPolicies.size()>());
  ExploreOptions options;
  options.run.subjects = {checked(policy)};
  options.run.check = CheckLevel::labels;
  options.traces = traces;
  options.shrinks = false;
  Result<ExploreOutcome> outcome = explore(options);
  require(outcome.has_value(), outcome ? "" : outcome.error().text);
  return std::move(*outcome);
}

class Rows : public testing::TestWithParam<const char*> {
 protected:
  void TearDown() override { planted = Planted::none; }
};

TEST_P(Rows, canBeRun) {
  RowChecker::rows = RowChecker::verifications = RowChecker::launches = 0;
  RowChecker::ring_steps = 0;
  const ExploreOutcome outcome = explored(GetParam(), 600);
  for (const Discovery& found : outcome.discoveries) ADD_FAILURE() << found.finding.finding.text;
  EXPECT_GT(RowChecker::rows, 2000);
  EXPECT_GT(RowChecker::verifications, 100);
  EXPECT_GT(RowChecker::launches, 500);
  const bool has_rings =
      Registry<PolicyEntry>::find(GetParam())->config_fields.contains("replay_ring");
  EXPECT_EQ(RowChecker::ring_steps > 100, has_rings) << RowChecker::ring_steps;
}

INSTANTIATE_TEST_SUITE_P(Each, Rows, testing::ValuesIn(kPolicies),
                         [](const auto& info) { return testing_support::test_name(info.param); });

class PlantedRows : public testing::TestWithParam<std::pair<Planted, const char*>> {
 protected:
  void TearDown() override { planted = Planted::none; }
};

// The check can fail.
TEST_P(PlantedRows, areFound) {
  planted = GetParam().first;
  const ExploreOutcome outcome = explored("sglang-extra-buffer", 300);
  ASSERT_EQ(outcome.discoveries.size(), 1u);
  const std::string& text = outcome.discoveries.front().finding.finding.text;
  EXPECT_NE(text.find(GetParam().second), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(
    Each, PlantedRows,
    testing::Values(std::pair{Planted::begins_late, "KV of its own tokens"},
                    std::pair{Planted::ends_beyond_its_tokens, "tokens that it has"},
                    std::pair{Planted::other_request, "a request"},
                    std::pair{Planted::other_text, "its own tokens"},
                    std::pair{Planted::lacks_a_slot, "a KV slot for each token"},
                    std::pair{Planted::slot_twice, "differ from each other"},
                    std::pair{Planted::other_state, "its state"},
                    std::pair{Planted::forgets_drafts, "a verification alone"},
                    std::pair{Planted::forgets_parents, "has a parent"},
                    std::pair{Planted::take_out_of_order, "in order"},
                    std::pair{Planted::take_into_itself, "another slot"}),
    [](const auto& info) { return fmt::format("mistake_{}", static_cast<int>(info.param.first)); });

}  // namespace
}  // namespace lockstep::cache_sim
