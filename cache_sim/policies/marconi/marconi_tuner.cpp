#include "cache_sim/policies/marconi/marconi_tuner.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

MarconiTuner::MarconiTuner(const MarconiOptions& options, std::int64_t capacity,
                           const MarconiRules& rules)
    : is_tuned_(options.alpha == "tuned"),
      bootstrap_(options.bootstrap),
      capacity_(capacity),
      tunes_on_cache_of_now_(rules.tunes_on_cache_of_now) {
  if (!is_tuned_)
    alpha_ = static_cast<double>(std::strtol(options.alpha.c_str(), nullptr, 10)) / 1000;
}

void MarconiTuner::evicted(MarconiTree before) {
  snapshot_ = std::move(before);
  window_ = std::max<std::int64_t>(1, bootstrap_ * std::max<std::int64_t>(1, finished_));
}

void MarconiTuner::finished(const MarconiTree& now, Tokens prompt, Tokens stored, Name salt) {
  ++finished_;
  if (window_ == 0) return;
  served_.push_back({std::move(prompt), std::move(stored), salt});
  if (static_cast<std::int64_t>(served_.size()) < window_) return;
  tune(tunes_on_cache_of_now_ ? now.counting_copy() : *snapshot_);
  window_ = 0;
  served_.clear();
  served_.shrink_to_fit();
  snapshot_ = MarconiTree(now.costs(), nullptr);  // wanted no more
}

void MarconiTuner::tune(const MarconiTree& start) {
  double most = -1;
  for (int step = 0; step <= kSteps; ++step) {
    const double alpha = step * 100 / 1000.0;
    const double saved = saved_with(alpha, start);
    if (saved <= most) continue;
    most = saved;
    alpha_ = alpha;
  }
  if (alpha_ != 0) LOCKSTEP_MARK("marconi.tuned_above_zero");
}

bool MarconiTuner::make_room(std::int64_t bytes, double alpha, MarconiTree& tree) const {
  if (bytes > capacity_ - (tree.bytes() - tree.evictable_bytes())) return false;
  MarconiTree::Evicted unused;
  while (bytes > capacity_ - tree.bytes())
    if (!tree.evict_one(alpha, unused)) return false;
  return true;
}

double MarconiTuner::saved_with(double alpha, const MarconiTree& start) const {
  MarconiTree tree = start;
  const MarconiCosts& costs = tree.costs();
  double saved = 0;
  for (const Served& served : served_) {
    const MarconiTree::Match match =
        tree.match(served.prompt, served.prompt.size() - 1, served.salt);
    saved += costs.flops.of(match.prefix);
    MarconiTree::Index used = match.node;
    tree.lock(used);
    const std::uint32_t size = served.stored.size();
    if (match.full > match.prefix && match.full <= size &&
        make_room(costs.state_bytes, alpha, tree)) {
      const MarconiTree::Index branch =
          tree.insert(served.prompt, match.full, served.salt, nullptr, StateSlot::none()).end;
      tree.unlock(used);
      used = branch;
      tree.lock(used);
    }
    // A replay may hit more than the request stored, and then stores a state alone.
    const std::int64_t more = std::int64_t{size} - tree.node(used).end;
    const std::int64_t bytes =
        more == 0 ? 0 : std::max<std::int64_t>(more, 0) * costs.token_bytes + costs.state_bytes;
    if (size > 0 && make_room(bytes, alpha, tree))
      tree.insert(served.stored, size, served.salt, nullptr, StateSlot::none());
    tree.unlock(used);
  }
  return saved;
}

}  // namespace lockstep::cache_sim
