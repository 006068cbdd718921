#include "cache_sim/policies/ideal/belady_policy.hpp"

#include <algorithm>

namespace lockstep::cache_sim {

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
