#include "cache_sim/numbers/truth.hpp"

#include <algorithm>
#include <numeric>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

using reference::HybridRow;

Truth::Truth(std::shared_ptr<const reference::HybridModel> model, std::uint32_t capacity)
    : model_(std::move(model)),
      capacity_(capacity),
      kv_(kRoom * model_->kv_size()),
      states_(kRoom * model_->state_size()),
      logits_(kRoom * model_->vocabulary()) {
  require(capacity <= kRoom / 2, "truth has room for what it remembers");
  forget();
}

void Truth::forget() {
  known_.clear();
  nodes_.assign(1, {0, 0, kEmpty});
  path_.clear();
  path_node_ = kEmpty;
}

Truth::Node Truth::at(const Tokens& tokens, std::uint32_t size) {
  require(size <= tokens.size(), "truth holds as many tokens as were asked for");
  if (size == 0) return kEmpty;
  if (const auto found = known_.find({tokens.digest(size), size}); found != known_.end())
    return found->second;
  if (nodes_.size() + size > capacity_) forget();
  Node node = kEmpty;
  std::uint32_t known = 0;
  if (size > 1)
    if (const auto found = known_.find({tokens.digest(size - 1), size - 1});
        found != known_.end()) {
      node = found->second;
      known = size - 1;
    }
  for (; known < size; ++known) node = next(node, tokens[known]);
  return node;
}

Truth::Node Truth::next(Node node, Token token) {
  const Prefix before = nodes_[node];
  const Key key{extend_digest(before.digest, token), before.size + 1};
  if (const auto found = known_.find(key); found != known_.end()) return found->second;
  const auto own = static_cast<Node>(nodes_.size());
  require(own < kRoom, "truth has room for the tokens of a row");
  path_to(node).push_back(own);
  path_node_ = own;
  nodes_.push_back({key.digest, key.size, node});
  known_.emplace(key, own);
  if (node == kEmpty)
    std::ranges::fill(states_pool().slot(own), 0.0);
  else
    std::ranges::copy(state(node), states_pool().at(own));
  const HybridRow row{.tokens = {&token, 1}, .begin = before.size, .kv = path_, .state = own};
  model_->forward({&row, 1}, kv_pool(), states_pool(), logits_pool().slot(own));
  ++computed_;
  return own;
}

std::vector<std::uint32_t>& Truth::path_to(Node node) {
  if (path_node_ == node) return path_;
  path_.resize(nodes_[node].size);
  path_node_ = node;
  for (std::size_t place = path_.size(); place > 0; node = nodes_[node].before)
    path_[--place] = node;
  return path_;
}

void Truth::run(std::span<double> state, const Tokens& tokens, std::uint32_t begin,
                std::uint32_t end, double* states_after, std::uint32_t drafts,
                std::span<const std::int64_t> parents) {
  const std::uint32_t count = end - begin;
  if (count == 0) return;
  std::vector<std::uint32_t> kv = path_to(at(tokens, begin));
  const auto free = static_cast<std::uint32_t>(nodes_.size());
  require(count < kRoom - free, "truth has room for the tokens of a row");
  kv.resize(end);
  std::iota(kv.begin() + begin, kv.end(), free);
  std::vector<Token> ids(count);
  for (std::uint32_t i = 0; i < count; ++i) ids[i] = tokens[begin + i];
  std::ranges::copy(state, states_pool().at(free));
  const HybridRow row{.tokens = ids,
                      .begin = begin,
                      .kv = kv,
                      .state = free,
                      .states_after = states_after,
                      .drafts = drafts,
                      .parents = parents};
  std::vector<double> logits(row.sampled() * model_->vocabulary());
  model_->forward({&row, 1}, kv_pool(), states_pool(), logits);
  if (states_after == nullptr) std::ranges::copy(states_pool().slot(free), state.begin());
}

}  // namespace lockstep::cache_sim
