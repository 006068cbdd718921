// Chooses Marconi's alpha (reference/caches/marconi.md, 7): keeps a copy of the cache from before
// the first eviction and the requests of a window, and replays them with each alpha on a copy that
// only counts bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache_sim/policies/marconi/marconi_options.hpp"
#include "cache_sim/policies/marconi/marconi_tree.hpp"
#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

class MarconiTuner {
 public:
  static constexpr int kSteps = 20;  ///< alphas 0, 0.1, … 2

  MarconiTuner(const MarconiOptions& options, std::int64_t capacity, const MarconiRules& rules);

  double alpha() const { return alpha_; }
  /// Whether the tuner wants a copy of the cache as it is before its first eviction.
  bool wants_snapshot() const { return is_tuned_ && !snapshot_; }
  void evicted(MarconiTree before);

  /// A request has finished: its prompt and what it left in the cache.
  void finished(const MarconiTree& now, Tokens prompt, Tokens stored, Name salt);

  /// FLOPs saved by the window's requests, one after the other, from `start` on.
  double saved_with(double alpha, const MarconiTree& start) const;

 private:
  struct Served {
    Tokens prompt, stored;
    Name salt;
  };
  bool make_room(std::int64_t bytes, double alpha, MarconiTree& tree) const;
  void tune(const MarconiTree& start);

  bool is_tuned_;
  double alpha_ = 0;
  std::int64_t bootstrap_;
  std::int64_t capacity_;
  bool tunes_on_cache_of_now_;
  std::int64_t finished_ = 0;
  std::optional<MarconiTree> snapshot_;
  std::int64_t window_ = 0;  // finishes to replay; 0: not waiting for any
  std::vector<Served> served_;
};

}  // namespace lockstep::cache_sim
