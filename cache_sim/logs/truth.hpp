// Recorded outputs of a model without any cache: prompts, and the greedy output after each, beside
// which the log of a server is checked (lockstep check-log --truth).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reference/base/result.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

struct Truth {
  std::string place;  ///< file:line
  Tokens tokens;      ///< prompt, then output
  std::uint32_t prompt_size = 0;
  /// by how much the logit of each output token exceeds the second best one
  std::vector<double> gaps;
};

class Truths {
 public:
  /// A difference at a token whose gap is smaller than this is no finding, because rounding alone
  /// can swap the two best tokens. Other chunks and other requests in the batch move float32 logits
  /// of about 10 by 1e-5; a wrong state moves them by more than 1.
  static constexpr double kGapMin = 0.02;

  /// Reads JSON lines, {"prompt": [token, …], "output": [token, …], "gaps": [number, …]}. Errors
  /// name the file, the line and the field.
  static Result<Truths> read(const std::string& path, double gap_min = kGapMin);

  struct Following {
    std::shared_ptr<const Truth> truth;
    std::uint32_t at = 0;  ///< a place in its output
  };
  /// The tokens known to follow the first `size` tokens: a truth with this prompt, else one whose
  /// prompt and output begin with them; null where there is none.
  Following find(const Tokens& tokens, std::uint32_t size) const;
  double gap_min() const { return gap_min_; }

 private:
  /// By length and digest of what comes before. Tokens tell apart what shares both.
  std::multimap<std::pair<std::uint32_t, std::uint64_t>, Following> following_;
  double gap_min_ = kGapMin;
};

}  // namespace lockstep::cache_sim
