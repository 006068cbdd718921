// `lru`: attention alone, a capacity of whole blocks, the least recently used block goes first. A
// request uses all blocks of its path, so a block is never used later than the one before it, and
// of blocks used at the same time the deepest goes first: eviction trims leaves from their ends.
#include <set>

#include "cache_sim/base/prefix_trie.hpp"
#include "cache_sim/policies/ideal/ideal_policy.hpp"

namespace lockstep::cache_sim {
namespace {

class Lru final : public IdealPolicy, private PrefixTrie::SplitListener {
 public:
  explicit Lru(const IdealOptions& options)
      : IdealPolicy(*options.model),
        block_(options.block),
        capacity_(options.capacity_tokens - options.capacity_tokens % options.block),
        used_(1) {}

  void serve(const IdealRequest& request) override {
    ++now_;
    count(request.input_tokens, trie_.match(request.prompt).size);
    if (request.stored.empty()) return;
    measures_.stored_tokens += request.stored.size() - trie_.match(request.stored).size;
    const PrefixTrie::Index end = trie_.insert(request.stored, Name(), this);
    used_.resize(trie_.node_count());
    for (PrefixTrie::Index node = end; node != PrefixTrie::kRoot; node = trie_.node(node).parent) {
      leaves_.erase({used_[node], node});
      used_[node] = now_;
    }
    if (trie_.node(end).child_count == 0) leaves_.insert({now_, end});
    while (measures_.stored_tokens > capacity_) evict();
  }

  PolicyMeasures finish() override { return measures_; }

 private:
  /// Trims the least recently used leaf as far as needed, or away.
  void evict() {
    const auto [used, leaf] = *leaves_.begin();
    const PrefixTrie::Node& node = trie_.node(leaf);
    const std::int64_t excess = measures_.stored_tokens - capacity_;
    const std::int64_t whole = (excess + block_ - 1) / block_ * block_;
    const std::uint32_t size =
        static_cast<std::uint32_t>(std::min<std::int64_t>(whole, node.end - node.begin));
    const PrefixTrie::Index parent = node.parent;
    trie_.trim(leaf, node.end - size);
    measures_.stored_tokens -= size;
    measures_.evicted_tokens += size;
    if (trie_.node(leaf).begin != trie_.node(leaf).end) return;
    leaves_.erase(leaves_.begin());
    if (parent != PrefixTrie::kRoot && trie_.node(parent).child_count == 0)
      leaves_.insert({used_[parent], parent});
  }

  /// Both halves were used together so far.
  void split(PrefixTrie::Index above, PrefixTrie::Index below) override {
    used_.resize(trie_.node_count());
    used_[above] = used_[below];
  }

  std::int64_t block_;
  std::int64_t capacity_;
  PrefixTrie trie_;
  std::int64_t now_ = 0;
  std::vector<std::int64_t> used_;  // by node: the last request that used it
  std::set<std::pair<std::int64_t, PrefixTrie::Index>> leaves_;
};

const Registration<IdealEntry> kLru{
    {"lru", "attention alone, a capacity, the least recently used block goes first", true,
     [](const IdealOptions& options) -> std::unique_ptr<IdealPolicy> {
       return std::make_unique<Lru>(options);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
