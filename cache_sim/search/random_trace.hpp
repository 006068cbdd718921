// Random traces of single operations, from the swarm that was drawn first. Each operation is legal
// input; which one it is depends on the draw and on what was answered before.
#pragma once

#include <optional>
#include <vector>

#include "cache_sim/search/legality_model.hpp"
#include "cache_sim/search/swarm.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// Requests in any order of their verbs, and tree verbs between them, over few tokens, so that
/// prefixes are shared, split and evicted.
class RandomTrace {
 public:
  /// `model` follows what is played, and outlives this.
  RandomTrace(const Swarm& swarm, const Accepted& accepted, const LegalityModel& model, Draw& draw)
      : swarm_(swarm), draw_(draw), model_(model), has_states_(accepted.has_states) {}

  Operation next();
  /// Whether it depends on what the cache holds if the last operation of next() is bad input.
  bool may_be_bad() const { return may_be_bad_; }
  /// What ends everything that runs or is held now.
  std::vector<Operation> ending();

 private:
  /// What comes next when requests meet, and for whom: for the one that it is about, for one whose
  /// prompt is cut, for one that comes late, or for the last of the two.
  enum class Meeting { step, first, cut, late, last };

  Tokens some_tokens();
  Tokens fresh_tokens(std::int64_t size);
  Name some_salt();
  Name fresh_name(const char* prefix);
  Operation random_request_operation();
  Operation random_tree_operation();
  Operation random_slot_operation();
  Operation admission();
  void draw_keys(Operation& admit);
  bool begin_meeting();
  std::optional<Operation> meet();
  Operation verdict(const LegalityModel::Request& request);
  Operation result(const LegalityModel::Request& request);
  bool is_result_told(const LegalityModel::Request& request);
  Tokens next_turn(const LegalityModel::Request& request);
  Operation forward(const LegalityModel::Request& request);
  Operation block_forward(Operation operation, const LegalityModel::Request& request,
                          std::int64_t most);
  Operation use_of_slot(const LegalityModel::Slot& slot);
  Operation random_sequence_operation(const LegalityModel::Request& request);
  std::optional<Operation> restoration(const LegalityModel::Request& request);
  Operation padded_step();
  Tokens some_way(const LegalityModel::Request& request);
  void plant_tree(Operation& verification);
  /// Of ten; nothing is drawn for what never happens.
  bool sometimes(int times) {
    return times != 0 && draw_.chance(static_cast<std::uint64_t>(times), 10);
  }
  Operation joint_step();
  void overstate_prev(Operation& insert);

  const Swarm& swarm_;
  Draw& draw_;
  const LegalityModel& model_;
  bool has_states_;
  int names_ = 0;
  std::size_t known_running_ = 0;  // requests, before the last operation of one
  bool may_be_bad_ = false;
  Name cloned_;                   // by the last operation
  std::vector<Meeting> meeting_;  // what is to come of it, the next one last
  Name met_;                      // the request that it is about
  std::int64_t met_at_ = 0;       // tokens that it had computed
  std::vector<Name> together_;    // whose extends make the forward that has begun
};

}  // namespace lockstep::cache_sim
