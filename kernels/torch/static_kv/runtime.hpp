// The runtime of a model exported with fixed shapes: it owns the cache, cuts prompts into buckets,
// pads them, and applies the new keys and values of the real tokens.
//
// A program serves one bucket, a number Q of queries (lockstep.static_kv's text_model.py):
//
//   input            shape                       output     shape
//   input_ids        [R, Q] int64                hidden     [R, Q, D]
//   attention_mask   [R, M] bool                 new_k      [L, R, HKV, M, hd], zero except at
//   past_k, past_v   [L, R, HKV, M, hd]          new_v      cache_position
//   cache_position   [Q] int64
//   position_ids     [R, Q] int64
//
// R rows and M positions are fixed. Rows that a batch does not have are masked, and so is the tail
// of a bucket: neither is committed.
#pragma once

#include <ATen/Tensor.h>

#include <functional>
#include <map>
#include <memory>

#include "kernels/torch/static_kv/generate.hpp"
#include "reference/models/qwen3_checkpoint.hpp"

namespace lockstep::static_kv {

using Program = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

struct Programs {
  reference::Qwen3Config config;
  std::int64_t rows;                        ///< R
  std::int64_t positions;                   ///< M
  at::Tensor head;                          ///< [V, D]; its device and dtype are the cache's
  std::map<std::int64_t, Program> buckets;  ///< by Q
  /// Buckets once more that write into past_k and past_v themselves and give hidden states alone,
  /// for a GraphRuntime. Rows and columns that are padding are written too; masks hide them.
  std::map<std::int64_t, Program> in_place{};
};

/// One call: `tokens` of the prompt in a bucket of Q.
struct Call {
  std::int64_t tokens, Q;
  bool operator==(const Call&) const = default;
};

/// How `length` tokens after `past` are served: by the smallest bucket that holds them and ends
/// inside the cache; where there is none, by the largest that they fill, and at last one by one.
/// Without `split` a prompt beyond the last bucket is refused.
Result<std::vector<Call>> plan_calls(std::int64_t length, std::int64_t past,
                                     const Programs& programs, bool split = true);

/// The calls that serve new columns after `length` cached ones of `rows` rows (0: nothing is
/// cached); refused where the batch, a token or the number of columns is not what the programs
/// take.
Result<std::vector<Call>> calls_of(const NewColumns& columns, std::int64_t length,
                                   std::int64_t rows, const Programs& programs, bool split);

/// The first `rows` rows of logits [R, V], on the host.
std::vector<std::vector<float>> rows_of(const at::Tensor& logits, std::int64_t rows);

/// The cache is where the programs' head is.
class Runtime : public CachedModel {
 public:
  explicit Runtime(Programs programs);

  Result<std::vector<std::vector<float>>> append(const NewColumns& columns) override;
  /// The same with logits [B, V] of the programs' dtype where the programs are.
  Result<at::Tensor> launch(const NewColumns& columns);
  void reorder(const std::vector<std::int64_t>& rows) override;
  void clear() override;

  /// Goes on from a cache that another one filled: keys and values [L, R, HKV, M, hd], and which
  /// of its first `length` positions each row may see.
  Result<void> adopt(const at::Tensor& keys, const at::Tensor& values,
                     const std::vector<std::vector<char>>& real, std::int64_t length);

  const at::Tensor& keys() const { return keys_; }
  const at::Tensor& values() const { return values_; }
  std::int64_t length() const { return length_; }
  const Programs& programs() const { return programs_; }
  bool split = true;

 protected:
  /// The inputs of one call, in the order above. Columns [begin, begin + call.tokens) of `columns`.
  virtual std::vector<at::Tensor> inputs_of(const NewColumns& columns, std::int64_t begin,
                                            const Call& call);
  /// Keys and values of the call's real tokens go into the cache.
  virtual void commit(const at::Tensor& new_k, const at::Tensor& new_v, const Call& call);

  Programs programs_;
  at::Tensor keys_, values_;  ///< [L, R, HKV, M, hd]
  at::Tensor mask_;           ///< [R, M] on the host, real tokens of [0, length_)
  std::int64_t length_ = 0;
  std::int64_t rows_ = 0;  ///< of the batch, 0 while the cache is empty
};

}  // namespace lockstep::static_kv
