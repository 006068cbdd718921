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
#pragma once

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

}  // namespace lockstep::cache_sim
