// Generates texts with a cached model, by the rules of transformers' `generate`: greedy and sampled
// continuations of a batch, and beam search for one prompt.
//
//   here           transformers                    shape
//   ids            input_ids                       [B][T]
//   real           attention_mask                  [B][T], padding on either side
//   new_tokens     max_new_tokens
//   stop           eos_token_id                    a row that has reached one is filled with pad
//   beams          num_beams, length_penalty 1, early_stopping False
//
// A draw is that of reference/layers/sampling.hpp for seed + row and the number of the new token.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::static_kv {

using Tokens = std::vector<std::int32_t>;

/// New columns, behind those that the cache holds; every row has the same number of them.
struct NewColumns {
  std::vector<Tokens> ids;              ///< [B][n]
  std::vector<std::vector<char>> real;  ///< [B][n], 0 is padding
  std::vector<Tokens> positions;        ///< [B][n], number of real tokens before
};

/// A model and the cache that it appends to.
class CachedModel {
 public:
  virtual ~CachedModel() = default;
  /// Caches the columns and returns the logits [B][V] after the last one. On an error none of them
  /// is cached.
  virtual Result<std::vector<std::vector<float>>> append(const NewColumns& columns) = 0;
  /// Row i of the cache becomes a copy of the former row rows[i].
  virtual void reorder(const std::vector<std::int64_t>& rows) = 0;
  virtual void clear() = 0;
};

struct Prompts {
  std::vector<Tokens> ids;
  std::vector<std::vector<char>> real;
};

struct GenerateOptions {
  std::int64_t new_tokens = 16;
  float temperature = 0;  ///< 0: the likeliest token
  std::int32_t top_k = 0;
  float top_p = 1;
  std::uint64_t seed = 0;
  Tokens stop{};
  std::int64_t beams = 1;
  std::int32_t pad = 0;
};

/// Prompts with their continuations, [B][T + n]. Beam search takes one prompt and returns the best
/// text only.
Result<std::vector<Tokens>> generate(CachedModel& model, const Prompts& prompts,
                                     const GenerateOptions& options);

}  // namespace lockstep::static_kv
