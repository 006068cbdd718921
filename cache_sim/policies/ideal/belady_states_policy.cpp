// `belady-states`: a hybrid cache that knows the future. `belady` bounds what any policy can hit
// with KV alone; here states take their bytes too, and a hit needs one.
//
// For each request the best position to resume from is the end of the longest part of its prompt
// that any earlier request stored. A request that computes past a position that a later one wants
// leaves a state there, and nowhere else. States are kept with the KV up to them. Where they exceed
// the capacity, the state that is wanted last goes, and with it the KV that no other state needs.
//
// With room for everything it hits what `kv-bound` hits, with no state that is never hit. With
// less it is a policy like any other and not an optimum: items of different sizes make that a hard
// problem. As for all ideal policies, memory that a request needs while it runs is not counted.
#include <algorithm>
#include <set>
#include <vector>

#include "cache_sim/base/prefix_trie.hpp"
#include "cache_sim/policies/ideal/ideal_policy.hpp"

namespace lockstep::cache_sim {
namespace {

class BeladyStates final : public IdealPolicy {
 public:
  explicit BeladyStates(const IdealOptions& options)
      : IdealPolicy(*options.model), capacity_(options.capacity_tokens) {}

  void serve(const IdealRequest& request) override {
    const std::uint32_t known = trie_.match(request.prompt).size;
    Visit visit{PrefixTrie::kRoot, 0, 0, request.input_tokens};
    if (known > 0) visit.wanted = trie_.insert(request.prompt.prefix(known));
    visit.prompt = trie_.insert(request.prompt);
    visit.stored = trie_.insert(request.stored);
    visits_.push_back(visit);
  }

  /// Makes all decisions, because they need the future requests.
  PolicyMeasures finish() override {
    places_.resize(trie_.node_count());
    for (std::uint32_t i = 0; i < visits_.size(); ++i)
      if (visits_[i].wanted != PrefixTrie::kRoot) places_[visits_[i].wanted].wanted_by.push_back(i);
    for (std::uint32_t i = 0; i < visits_.size(); ++i) replay(i);
    for (const Place& place : places_) {
      measures_.states_admitted += place.was_kept ? 1 : 0;
      measures_.states_never_hit += place.was_kept && !place.was_hit ? 1 : 0;
    }
    return measures_;
  }

 private:
  struct Visit {
    PrefixTrie::Index wanted;  // the node that ends where it could hit; the root: nowhere
    PrefixTrie::Index prompt, stored;
    std::int64_t input_tokens;
  };
  struct Place {
    std::vector<std::uint32_t> wanted_by;  // numbers of requests
    std::size_t next = 0;                  // of these, the first one that is still to come
    bool has_state = false;
    bool was_kept = false, was_hit = false;
    std::uint32_t states_below = 0;  // its own among them; KV is kept where there are any
  };
  using Kept = std::pair<std::uint32_t, PrefixTrie::Index>;  // the next request that wants it

  std::int64_t edge_size(PrefixTrie::Index node) const {
    return trie_.node(node).end - trie_.node(node).begin;
  }

  void keep(PrefixTrie::Index node) {
    Place& place = places_[node];
    place.has_state = place.was_kept = true;
    ++measures_.states;
    kept_.insert({place.wanted_by[place.next], node});
    for (; node != PrefixTrie::kRoot; node = trie_.node(node).parent)
      if (places_[node].states_below++ == 0) measures_.stored_tokens += edge_size(node);
  }

  std::int64_t drop(PrefixTrie::Index node) {
    Place& place = places_[node];
    kept_.erase({place.wanted_by[place.next], node});
    place.has_state = false;
    --measures_.states;
    std::int64_t freed = 0;
    for (; node != PrefixTrie::kRoot; node = trie_.node(node).parent)
      if (--places_[node].states_below == 0) freed += edge_size(node);
    measures_.stored_tokens -= freed;
    return freed;
  }

  void replay(std::uint32_t number) {
    const Visit& visit = visits_[number];
    PrefixTrie::Index used = visit.prompt;
    while (used != PrefixTrie::kRoot && !places_[used].has_state) used = trie_.node(used).parent;
    const std::uint32_t hit = trie_.node(used).end;
    if (hit > 0) places_[used].was_hit = true;
    count(visit.input_tokens, hit);
    if (visit.wanted != PrefixTrie::kRoot) use_up(visit.wanted);
    PrefixTrie::Index node = visit.stored;
    for (; node != PrefixTrie::kRoot && trie_.node(node).end > hit; node = trie_.node(node).parent)
      if (!places_[node].has_state && places_[node].next < places_[node].wanted_by.size())
        keep(node);
    while (over_capacity()) {
      measures_.evicted_tokens += drop(kept_.rbegin()->second);
      ++measures_.evicted_states;
    }
  }

  /// Called when the request that wanted the position has come. A position that no later request
  /// wants is not kept.
  void use_up(PrefixTrie::Index node) {
    Place& place = places_[node];
    const bool had_state = place.has_state;
    if (had_state) drop(node);
    ++place.next;
    if (had_state && place.next < place.wanted_by.size()) keep(node);
  }

  /// The number of whole states that fit into the bytes that KV leaves free.
  bool over_capacity() const {
    return measures_.stored_tokens > capacity_ ||
           (capacity_ - measures_.stored_tokens) / tokens_per_state() < measures_.states;
  }
  /// Tokens of KV that take as many bytes as a state, rounded up.
  std::int64_t tokens_per_state() const {
    return std::max<std::int64_t>(
        1, (model_.state_bytes + model_.token_bytes - 1) / model_.token_bytes);
  }

  std::int64_t capacity_;  // in tokens of KV
  PrefixTrie trie_;
  std::vector<Visit> visits_;
  std::vector<Place> places_;  // by node
  std::set<Kept> kept_;        // in reverse order of eviction
};

const Registration<IdealEntry> kBeladyStates{
    {"belady-states", "KV and states, a capacity, states where the future wants them", true,
     [](const IdealOptions& options) -> std::unique_ptr<IdealPolicy> {
       return std::make_unique<BeladyStates>(options);
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
