// Operations that every subject must refuse: unknown names, more tokens than there are, results
// that are not due. A subject that accepts one that another subject refuses is a finding.
#pragma once

#include <optional>

#include "cache_sim/search/legality_model.hpp"
#include "cache_sim/search/swarm.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

class BadInput {
 public:
  /// `model` follows the operations that are played, and must outlive this object.
  BadInput(const Swarm& swarm, const Accepted& accepted, const LegalityModel& model, Draw& draw)
      : swarm_(swarm), draw_(draw), model_(model), accepted_(accepted) {}

  /// At the rate of the swarm, an operation that is bad input whatever the cache holds.
  std::optional<Operation> next();

 private:
  using Request = LegalityModel::Request;

  Tokens fresh_tokens(std::int64_t size) { return drawn_tokens(swarm_, draw_, size); }
  Operation use_of_refused_request();
  Operation bad_forward(const Request& request);
  Operation bad_server_field(const Request& request);
  Operation bad_result(const Request& request);
  Operation bad_admission();
  Operation bad_tree_operation();
  Operation bad_slot_operation();

  const Swarm& swarm_;
  Draw& draw_;
  const LegalityModel& model_;
  Accepted accepted_;
};

}  // namespace lockstep::cache_sim
