// Random traces of single operations, for a swarm that was drawn before. Each operation is legal;
// it depends on the draw and on the replies so far.
#pragma once

#include <optional>
#include <vector>

#include "cache_sim/search/legality_model.hpp"
#include "cache_sim/search/swarm.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// Mixes requests in every order of their verbs with tree verbs, over few different tokens, so that
/// prefixes are shared, split and evicted.
class RandomTrace {
 public:
  /// `model` follows the operations that are played, and must outlive this object.
  RandomTrace(const Swarm& swarm, const Accepted& accepted, const LegalityModel& model, Draw& draw)
      : swarm_(swarm), draw_(draw), model_(model), has_states_(accepted.has_states) {}

  Operation next();
  /// Whether the cache's content decides if the last operation of next() is bad input.
  bool may_be_bad() const { return may_be_bad_; }
  /// Operations that end all requests and release all slots and locks.
  std::vector<Operation> ending();

 private:
  /// The operations of a meeting (begin_meeting): a step; an extend of the request that fills
  /// blocks; an admission with a prompt that is cut inside the first block; an admission in the
  /// step that fills the blocks; an extend of the request that was admitted last.
  enum class Meeting { step, first, cut, late, last };

  Tokens some_tokens();
  Tokens fresh_tokens(std::int64_t size);
  Name some_salt();
  Name fresh_name(const char* prefix);
  Operation random_request_operation();
  Operation random_tree_operation();
  Operation random_slot_operation();
  Operation random_copy_operation();
  Operation random_move_operation();
  void store_by_slot(const Tokens& tokens, std::int64_t prev, std::vector<Operation>& order);
  void store_apart_on_ranks();
  void add_state_to_held_prefix();
  Operation random_disk_operation();
  void shrink_while_waiting();
  void ask_again();
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
  /// True at `times` of ten. A rate of 0 consumes no random number.
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
  std::size_t known_running_ = 0;  // running requests before the last admission
  bool may_be_bad_ = false;
  Name cloned_;                   // the clone made by the last operation
  std::vector<Meeting> meeting_;  // the operations of the meeting that are left, the next one last
  Name met_;                      // the request that fills blocks
  std::int64_t met_at_ = 0;       // its computed tokens when the meeting began
  std::optional<Operation> refused_;  // the last admission, where it was refused and may ask again
  std::vector<Operation> asking_;     // what it waits for, and itself: the next one last
  std::vector<Name> together_;        // requests whose extends complete the forward
};

}  // namespace lockstep::cache_sim
