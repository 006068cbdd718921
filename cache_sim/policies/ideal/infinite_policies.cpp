// Policies with infinite memory: nothing is ever evicted. They differ in where a recurrent state is
// kept.
//
//   kv-bound                 attention alone: whatever prefix was stored is a hit
//   state-at-end             a state at the end of what each request left behind
//   state-at-end-and-branch  also where a request branched off something that goes on differently;
//                            that state exists from then on
//   state-every-N            a state at every multiple of N tokens, and nowhere else
//
// A hit is the deepest state within the stored prefix. Prompts are looked up in whole blocks of the
// workload, as their publishers count them, so these are bounds for policies whose pages are such
// blocks: one with smaller pages can also hit a part of the last block.
#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "cache_sim/base/prefix_trie.hpp"
#include "cache_sim/policies/ideal/ideal_policy.hpp"

namespace lockstep::cache_sim {
namespace {

class KvBound final : public IdealPolicy {
 public:
  explicit KvBound(const IdealOptions& options) : IdealPolicy(*options.model) {}

  void serve(const IdealRequest& request) override {
    count(request.input_tokens, trie_.match(request.prompt).size);
    measures_.stored_tokens += request.stored.size() - trie_.match(request.stored).size;
    trie_.insert(request.stored);
  }
  PolicyMeasures finish() override { return measures_; }

 private:
  PrefixTrie trie_;
};

/// Tokens that no stored state makes reachable. A state reaches every token before it: a whole edge
/// where a state lies below the node, else the edge up to its last state. `last_state(node)` is the
/// deepest state within (begin, end].
template <class LastState>
std::int64_t dead_tokens(const PrefixTrie& trie, LastState last_state) {
  std::vector<PrefixTrie::Index> deepest_first(trie.node_count());
  std::iota(deepest_first.begin(), deepest_first.end(), 0);
  std::ranges::sort(deepest_first, [&](auto a, auto b) {
    return std::pair(trie.node(a).end, a) > std::pair(trie.node(b).end, b);
  });
  std::vector<bool> alive_below(trie.node_count());
  std::int64_t dead = 0;
  for (const PrefixTrie::Index index : deepest_first) {
    if (index == PrefixTrie::kRoot) continue;
    const PrefixTrie::Node& node = trie.node(index);
    const std::uint32_t state = alive_below[index] ? node.end : last_state(index);
    if (state > node.begin) alive_below[node.parent] = true;
    dead += node.end - std::max(state, node.begin);
  }
  return dead;
}

class StateAtEnd final : public IdealPolicy {
 public:
  StateAtEnd(const IdealOptions& options, bool at_branches)
      : IdealPolicy(*options.model), at_branches_(at_branches), marks_(1) {}

  void serve(const IdealRequest& request) override {
    count(request.input_tokens, look_up(request.prompt));
    if (request.stored.empty()) return;
    const PrefixTrie::Match known = trie_.match(request.stored);
    measures_.stored_tokens += request.stored.size() - known.size;
    const PrefixTrie::Index end = trie_.insert(request.stored);
    // A node keeps its index for as long as it ends at the same prefix, and so does its state.
    marks_.resize(trie_.node_count());
    // New tokens after `known` branch off there, unless nothing continued `known` before.
    const PrefixTrie::Index branch = trie_.node(end).parent;
    if (at_branches_ && 0 < known.size && known.size < request.stored.size() &&
        trie_.node(branch).child_count > 1)
      add_state(branch);
    add_state(end);
  }

  PolicyMeasures finish() override {
    measures_.states_admitted = measures_.states;
    measures_.states_never_hit = std::ranges::count_if(
        marks_, [](const Mark& mark) { return mark.has_state && !mark.was_hit; });
    measures_.dead_tokens = dead_tokens(trie_, [&](PrefixTrie::Index index) {
      return marks_[index].has_state ? trie_.node(index).end : 0;
    });
    return measures_;
  }

 private:
  struct Mark {
    bool has_state = false;
    bool was_hit = false;
  };

  std::int64_t look_up(const Tokens& prompt) {
    PrefixTrie::Index node = trie_.match(prompt).node;
    while (node != PrefixTrie::kRoot && !marks_[node].has_state) node = trie_.node(node).parent;
    if (node == PrefixTrie::kRoot) return 0;
    marks_[node].was_hit = true;
    return trie_.node(node).end;
  }
  void add_state(PrefixTrie::Index node) {
    measures_.states += marks_[node].has_state ? 0 : 1;
    marks_[node].has_state = true;
  }

  bool at_branches_;
  PrefixTrie trie_;
  std::vector<Mark> marks_;  // by node
};

class StateEveryN final : public IdealPolicy {
 public:
  explicit StateEveryN(const IdealOptions& options)
      : IdealPolicy(*options.model), every_(static_cast<std::uint32_t>(options.number)) {}

  void serve(const IdealRequest& request) override {
    const std::uint32_t hit = states_within(trie_.match(request.prompt).size) * every_;
    count(request.input_tokens, hit);
    if (hit > 0) hit_states_.insert(request.prompt.digest(hit));
    const std::uint32_t known = trie_.match(request.stored).size;
    measures_.stored_tokens += request.stored.size() - known;
    measures_.states += states_within(request.stored.size()) - states_within(known);
    trie_.insert(request.stored);
  }

  PolicyMeasures finish() override {
    measures_.states_admitted = measures_.states;
    measures_.states_never_hit = measures_.states - static_cast<std::int64_t>(hit_states_.size());
    measures_.dead_tokens = dead_tokens(trie_, [&](PrefixTrie::Index index) {
      return states_within(trie_.node(index).end) * every_;
    });
    return measures_;
  }

 private:
  std::uint32_t states_within(std::uint32_t size) const { return size / every_; }

  std::uint32_t every_;
  PrefixTrie trie_;
  std::unordered_set<std::uint64_t> hit_states_;  // digests of the prefixes they stand for
};

const Registration<IdealEntry> kKvBound{
    {"kv-bound", "infinite memory, attention alone: the longest stored prefix, in whole blocks",
     false, [](const IdealOptions& options) -> std::unique_ptr<IdealPolicy> {
       return std::make_unique<KvBound>(options);
     }}};
const Registration<IdealEntry> kStateAtEnd{
    {"state-at-end", "infinite memory, a state at the end of each request", false,
     [](const IdealOptions& options) -> std::unique_ptr<IdealPolicy> {
       return std::make_unique<StateAtEnd>(options, false);
     }}};
const Registration<IdealEntry> kStateAtEndAndBranch{
    {"state-at-end-and-branch", "infinite memory, also where a request branched off", false,
     [](const IdealOptions& options) -> std::unique_ptr<IdealPolicy> {
       return std::make_unique<StateAtEnd>(options, true);
     }}};
const Registration<IdealEntry> kStateEveryN{
    {"state-every-N", "infinite memory, a state at every multiple of N tokens", false,
     [](const IdealOptions& options) -> std::unique_ptr<IdealPolicy> {
       return std::make_unique<StateEveryN>(options);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
