// What a model says without any cache: prompts, and the greedy output that an empty context gives
// after each, recorded beside a server's log (lockstep check-log --truth).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reference/base/result.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

struct Truth {
  std::string place;  ///< file:line
  Tokens prompt;
  std::vector<Token> output;
  std::vector<double> gaps;  ///< by how much each token's logit exceeds the second best one
};

class Truths {
 public:
  /// A difference at a gap below this one is no finding: rounding alone can turn it round. Other
  /// chunks and other requests in the batch move float32 logits of about 10 by 1e-5; a wrong state
  /// moves them by more than 1.
  static constexpr double kGapMin = 0.02;

  /// JSON lines, {"prompt": [token, …], "output": [token, …], "gaps": [number, …]}. Errors name
  /// file, line and field.
  static Result<Truths> read(const std::string& path, double gap_min = kGapMin);

  /// That of the first `prompt_size` tokens, or null.
  const Truth* find(const Tokens& tokens, std::uint32_t prompt_size) const;
  double gap_min() const { return gap_min_; }
  std::size_t size() const { return truths_.size(); }

 private:
  /// Length and digest of the prompt; those that share both are compared by their tokens.
  std::multimap<std::pair<std::uint32_t, std::uint64_t>, Truth> truths_;
  double gap_min_ = kGapMin;
};

}  // namespace lockstep::cache_sim
