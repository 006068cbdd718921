// `belady`: the most tokens that any policy could hit, if it knew the future. Belady 1966, "A study
// of replacement algorithms for a virtual-storage computer", the MIN rule, with bypassing.
//
// Optimal among which policies? Attention alone: KV blocks of one size, each worth its tokens
// wherever it lies; a request hits the blocks of its prompt from the first one on that are cached
// without a gap. Requests come one after the other, in the given order. After each, the policy
// keeps any choice of at most `capacity` tokens of what was cached and what the request left
// behind; memory that a request needs while it runs is not counted. Among all such policies, those
// that know the future included, none hits more tokens in sum. (FLOPs saved are those of this
// choice; another one with as many hits could save more, because attention is quadratic.)
//
// Why. From one use of a block to its next one is an interval, and keeping the block through it is
// worth one hit. At no moment may more than `capacity` of them overlap; with equal weights the most
// intervals are kept by dropping, whenever there are too many, those that end last. A prompt that
// uses a block uses all blocks before it, so their next use is never later; with ties broken
// against the deeper block, what is kept has no gap, and every kept interval is a hit.
//
// A hybrid policy of the same bytes for KV and states together hits no more than this either,
// served in this order: its states only take room and rule hits out.
#include <algorithm>
#include <set>
#include <vector>

#include "cache_sim/base/prefix_trie.hpp"
#include "cache_sim/policies/ideal/ideal_policy.hpp"

namespace lockstep::cache_sim {

class Belady final : public IdealPolicy {
 public:
  explicit Belady(const IdealOptions& options);

  void serve(const IdealRequest& request) override;
  /// Makes all decisions, because they need the future requests.
  PolicyMeasures finish() override;

 private:
  struct Visit {
    PrefixTrie::Index prompt;  // nodes that end with the prompt and with what was left behind
    PrefixTrie::Index stored;
    std::int64_t input_tokens;
  };
  /// An edge of the final tree. No request ends within one, so its tokens are used together.
  struct Segment {
    std::vector<std::uint32_t> uses;  // numbers of the requests whose prompts contain it
    std::size_t next = 0;             // of `uses`, the first one that is still to come
    std::uint32_t cached = 0;         // its first tokens are in the cache
  };
  struct Kept {
    std::uint32_t next_use;
    std::uint32_t depth;
    PrefixTrie::Index node;
    auto operator<=>(const Kept&) const = default;
  };

  void path_to(PrefixTrie::Index node);
  Kept key_of(PrefixTrie::Index node) const;
  void replay(std::uint32_t number);
  void drop_last();

  std::int64_t block_;
  std::int64_t capacity_;
  PrefixTrie trie_;
  std::vector<Visit> visits_;
  std::vector<Segment> segments_;        // by node
  std::vector<PrefixTrie::Index> path_;  // from the root down
  std::set<Kept> kept_;                  // in reverse order of eviction
};

Belady::Belady(const IdealOptions& options)
    : IdealPolicy(*options.model),
      block_(options.block),
      capacity_(options.capacity_tokens - options.capacity_tokens % options.block) {}

void Belady::serve(const IdealRequest& request) {
  const PrefixTrie::Index prompt = trie_.insert(request.prompt);
  visits_.push_back({prompt, trie_.insert(request.stored), request.input_tokens});
}

/// Sets path_ to the nodes from below the root to this one.
void Belady::path_to(PrefixTrie::Index node) {
  path_.clear();
  for (; node != PrefixTrie::kRoot; node = trie_.node(node).parent) path_.push_back(node);
  std::ranges::reverse(path_);
}

Belady::Kept Belady::key_of(PrefixTrie::Index node) const {
  const Segment& segment = segments_[node];
  return {segment.uses[segment.next], trie_.node(node).end, node};
}

PolicyMeasures Belady::finish() {
  segments_.resize(trie_.node_count());
  for (std::uint32_t i = 0; i < visits_.size(); ++i) {
    path_to(visits_[i].prompt);
    for (const PrefixTrie::Index node : path_) segments_[node].uses.push_back(i);
  }
  for (std::uint32_t i = 0; i < visits_.size(); ++i) replay(i);
  return measures_;
}

void Belady::replay(std::uint32_t number) {
  const Visit& visit = visits_[number];
  path_to(visit.prompt);
  std::int64_t hit = 0;
  for (const PrefixTrie::Index node : path_) {
    hit += segments_[node].cached;
    if (segments_[node].cached < trie_.node(node).end - trie_.node(node).begin) break;
  }
  count(visit.input_tokens, hit);
  path_to(visit.stored);
  for (const PrefixTrie::Index node : path_) {
    Segment& segment = segments_[node];
    const std::uint32_t size = trie_.node(node).end - trie_.node(node).begin;
    if (segment.cached > 0) kept_.erase(key_of(node));
    while (segment.next < segment.uses.size() && segment.uses[segment.next] <= number)
      ++segment.next;
    // Tokens that are never used again are not kept.
    const std::uint32_t keep = segment.next == segment.uses.size() ? 0 : size;
    measures_.stored_tokens += std::int64_t{keep} - segment.cached;
    if (keep < segment.cached) measures_.evicted_tokens += segment.cached - keep;
    segment.cached = keep;
    if (keep > 0) kept_.insert(key_of(node));
  }
  while (measures_.stored_tokens > capacity_) drop_last();
}

/// Drops the tokens that will be used last, a segment's last ones first.
void Belady::drop_last() {
  const PrefixTrie::Index node = kept_.rbegin()->node;
  Segment& segment = segments_[node];
  const std::int64_t excess = measures_.stored_tokens - capacity_;
  const std::int64_t whole = (excess + block_ - 1) / block_ * block_;
  const auto size = static_cast<std::uint32_t>(std::min<std::int64_t>(whole, segment.cached));
  if (size == segment.cached) kept_.erase(std::prev(kept_.end()));
  segment.cached -= size;
  measures_.stored_tokens -= size;
  measures_.evicted_tokens += size;
}

namespace {

const Registration<IdealEntry> kBelady{
    {"belady", "attention alone, a capacity, the most tokens that could be hit knowing the future",
     true, [](const IdealOptions& options) -> std::unique_ptr<IdealPolicy> {
       return std::make_unique<Belady>(options);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
