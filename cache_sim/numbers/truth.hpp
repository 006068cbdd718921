// The numbers of a run without a cache, by label: logits, state and KV after each exact prefix.
// Each prefix is computed once, by one decode step from the prefix before it, in memory that no
// policy touches. Prefixes share their beginnings.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "reference/base/mix.hpp"
#include "reference/base/zeroed_array.hpp"
#include "reference/models/hybrid/hybrid_model.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

class Truth {
 public:
  /// Number of a prefix; it holds until at() is called again.
  using Node = std::uint32_t;
  static constexpr Node kEmpty = 0;  ///< the empty prefix: its state is zero

  /// It remembers about `capacity` prefixes: beyond that it forgets all of them and begins again.
  explicit Truth(std::shared_ptr<const reference::HybridModel> model,
                 std::uint32_t capacity = 1u << 14);

  const reference::HybridModel& model() const { return *model_; }

  /// The prefix of `size` tokens.
  Node at(const Tokens& tokens, std::uint32_t size);
  /// The prefix with one token more.
  Node next(Node node, Token token);

  std::span<const double> logits(Node node) const { return logits_pool().slot(node); }
  std::span<const double> state(Node node) const { return states_pool().slot(node); }
  /// KV of the prefix's last token.
  std::span<const double> kv(Node node) const { return kv_pool().slot(node); }
  /// The prefix without its last token. Requires a token.
  Node before(Node node) const { return nodes_[node].before; }
  std::uint32_t size(Node node) const { return nodes_[node].size; }
  /// The prefixes of 1, 2, … tokens up to this one.
  std::vector<Node> path(Node node) { return path_to(node); }

  /// Runs tokens[begin, end) from a given state, which may be wrong, over right KV, and leaves the
  /// state after them in its place. `states_after`, where it is not null, gets the state after each
  /// token, and the given state stays: a verification of the last `drafts` tokens.
  void run(std::span<double> state, const Tokens& tokens, std::uint32_t begin, std::uint32_t end,
           double* states_after = nullptr, std::uint32_t drafts = 0,
           std::span<const std::int64_t> parents = {});

  /// Prefixes that were computed since the beginning.
  std::int64_t computed() const { return computed_; }

 private:
  struct Prefix {
    std::uint64_t digest;
    std::uint32_t size;
    Node before;
  };
  struct Key {
    std::uint64_t digest;
    std::uint32_t size;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const { return mix64(key.digest ^ mix64(key.size)); }
  };
  reference::SlotPool kv_pool() const { return {kv_.data(), model_->kv_size()}; }
  reference::SlotPool states_pool() const { return {states_.data(), model_->state_size()}; }
  reference::SlotPool logits_pool() const { return {logits_.data(), model_->vocabulary()}; }
  void forget();
  /// The KV slots of the prefix, by place.
  std::vector<std::uint32_t>& path_to(Node node);

  /// at() forgets beyond the capacity; texts that are longer, the tokens of one row and run()'s
  /// come on top. Memory is taken where it is written.
  static constexpr std::size_t kRoom = std::size_t{1} << 20;

  std::shared_ptr<const reference::HybridModel> model_;
  std::uint32_t capacity_;
  std::unordered_map<Key, Node, Hash> known_;
  std::vector<Prefix> nodes_;
  // By prefix. A few slots behind the last prefix are free for run().
  mutable ZeroedArray<double> kv_, states_, logits_;
  std::vector<std::uint32_t> path_;  // of path_node_
  Node path_node_ = kEmpty;
  std::int64_t computed_ = 0;
};

}  // namespace lockstep::cache_sim
