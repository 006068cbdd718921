// Texts from a model with a cache, by the rules of transformers' `generate`: greedy and sampled
// continuations of a batch, and beam search over one prompt.
//
//   here           transformers                    shape
//   ids            input_ids                       [B][T]
//   real           attention_mask                  [B][T], padding on either side
//   new_tokens     max_new_tokens
//   stop           eos_token_id                    a row that has one of these is filled with pad
//   beams          num_beams, length_penalty 1, early_stopping False
//
// Draws are those of reference/layers/sampling.hpp: of (seed + row, number of the new token).
#pragma once

#include <cstdint>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::static_kv {

using Tokens = std::vector<std::int32_t>;

/// Columns that come after what the cache holds; every row has the same number.
struct NewColumns {
  std::vector<Tokens> ids;              ///< [B][n]
  std::vector<std::vector<char>> real;  ///< [B][n], 0 is padding
  std::vector<Tokens> positions;        ///< [B][n], padding not counted
};

/// A model and the cache that it appends to.
class CachedModel {
 public:
  virtual ~CachedModel() = default;
  /// Logits [B][V] after the last column. On an error nothing of these columns is cached.
  virtual Result<std::vector<std::vector<float>>> append(const NewColumns& columns) = 0;
  /// Row i becomes what row rows[i] was.
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

/// Prompts and what follows, [B][T + n]. Beams take one prompt and give the best text alone.
Result<std::vector<Tokens>> generate(CachedModel& model, const Prompts& prompts,
                                     const GenerateOptions& options);

}  // namespace lockstep::static_kv
