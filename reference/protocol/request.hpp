// A request as a client sends it: workloads and trace files contain them, the scheduler serves
// them.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep {

/// A line `request …`: one request to the scheduler.
struct RequestSpec {
  Name id;
  std::int64_t number = 0;  ///< of a workload, whose requests have no ids: its place in it
  Name session;
  Name salt;
  Name lora;      ///< the adapter that computes its KV and states
  Tokens tokens;  ///< prompt and, after it, every token that will be sampled
  std::uint32_t prompt_size = 0;
  bool stops = false;   ///< the output was given as tokens: it ends by itself, not by its length
  Nanoseconds at = -1;  ///< arrival; -1: when the scheduler comes to this line
  std::vector<std::int64_t> accept;  ///< per verification, the tokens kept
  std::vector<std::int64_t> drafts;  ///< per verification, the draft tokens
  std::int64_t branches = 1;  ///< children of a draft in the tree that is verified; 1: a chain
  std::int64_t overrun = 0;   ///< tokens that the last verification accepts after the output's end
  using Image = ImageSpan;
  std::vector<Image> images;  ///< tokens that an encoder makes, ascending
  std::int64_t external = 0;  ///< tokens whose KV and state come from another server
  std::int64_t priority = 0;
  std::int64_t rank = -1;  ///< the rank that serves it; -1: the routing decides
  std::uint32_t output_size() const { return tokens.size() - prompt_size; }
  /// Tokens that a verification of so many drafts can keep: the drafts on its tree's longest way,
  /// which goes from first child to first child, and one more. Draft i stands after draft
  /// (i - 1) / branches, 0 being the last known token.
  std::int64_t most_kept(std::int64_t of_drafts) const {
    std::int64_t kept = 1;
    for (std::int64_t draft = 1; draft <= of_drafts; draft = branches * draft + 1) ++kept;
    return kept;
  }
};

}  // namespace lockstep
