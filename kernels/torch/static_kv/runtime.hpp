// The runtime of a model exported with fixed shapes: it owns the cache, cuts prompts into buckets,
// pads them, and applies the new keys and values of the real tokens.
//
// A program serves one bucket, a number Q of queries
// (cache_sim/python/lockstep/static_kv/text_model.py):
//
//   input            shape                       output     shape
//   input_ids        [R, Q] int64                hidden     [R, Q, D]
//   attention_mask   [R, M] bool                 new_k      [L, R, HKV, M, hd], zero except at
//   past_k, past_v   [L, R, HKV, M, hd]          new_v      cache_position
//   cache_position   [Q] int64
//   position_ids     [R, Q] int64
//
// R rows and M positions are fixed. Rows that a batch does not have, and the tail of a bucket, are
// masked and never committed.
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
  at::Tensor head;                          ///< [V, D]; the cache has its device and dtype
  std::map<std::int64_t, Program> buckets;  ///< by Q
  /// The same buckets as programs that write into past_k and past_v themselves and return hidden
  /// states alone, for a GraphRuntime. They write padding rows and columns too; masks hide those.
  std::map<std::int64_t, Program> in_place{};
};

/// One call of a program: `tokens` tokens of the prompt, in the bucket of Q.
struct Call {
  std::int64_t tokens, Q;
  bool operator==(const Call&) const = default;
};

/// The calls that serve `length` tokens after `past` cached ones. Each call takes the smallest
/// bucket that holds the remaining tokens and ends inside the cache; if there is none, the largest
/// bucket that they fill, or one token. Without `split` a prompt longer than the last bucket is
/// refused.
Result<std::vector<Call>> plan_calls(std::int64_t length, std::int64_t past,
                                     const Programs& programs, bool split = true);

/// The calls that serve new columns after `length` cached ones of `rows` rows (0: nothing is
/// cached). Refuses a batch, a token or a number of columns that the programs cannot take.
Result<std::vector<Call>> calls_of(const NewColumns& columns, std::int64_t length,
                                   std::int64_t rows, const Programs& programs, bool split);

/// The first `rows` rows of logits [R, V], on the host.
std::vector<std::vector<float>> rows_of(const at::Tensor& logits, std::int64_t rows);

/// A CachedModel over programs; its cache is on the device of the programs' head.
class Runtime : public CachedModel {
 public:
  explicit Runtime(Programs programs);

  Result<std::vector<std::vector<float>>> append(const NewColumns& columns) override;
  /// append() with logits [B, V] left on the programs' device in their dtype.
  Result<at::Tensor> launch(const NewColumns& columns);
  void reorder(const std::vector<std::int64_t>& rows) override;
  void clear() override;

  /// Continues from a cache that another runtime has filled: keys and values [L, R, HKV, M, hd],
  /// and `real`, which of the first `length` positions each row may see.
  Result<void> adopt(const at::Tensor& keys, const at::Tensor& values,
                     const std::vector<std::vector<char>>& real, std::int64_t length);

  const at::Tensor& keys() const { return keys_; }
  const at::Tensor& values() const { return values_; }
  std::int64_t length() const { return length_; }
  const Programs& programs() const { return programs_; }
  bool split = true;

 protected:
  /// The inputs of one call, in the order of the table above, for columns [begin, begin +
  /// call.tokens).
  virtual std::vector<at::Tensor> inputs_of(const NewColumns& columns, std::int64_t begin,
                                            const Call& call);
  /// Writes keys and values of the call's real tokens to the cache.
  virtual void commit(const at::Tensor& new_k, const at::Tensor& new_v, const Call& call);

  Programs programs_;
  at::Tensor keys_, values_;  ///< [L, R, HKV, M, hd]
  at::Tensor mask_;           ///< [R, M] on the host: real tokens among positions [0, length_)
  std::int64_t length_ = 0;
  std::int64_t rows_ = 0;  ///< rows of the batch; 0 while the cache is empty
};

}  // namespace lockstep::static_kv
