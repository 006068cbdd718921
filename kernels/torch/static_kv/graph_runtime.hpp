// The runtime of runtime.hpp with one graph for each bucket: the host writes a call's tokens into
// the bucket's inputs and replays; everything else stays on the device. Programs that give hidden
// states alone have written the cache in place (Programs::in_place).
//
//   a bucket's inputs     shape            written by the host before each replay
//   ids, positions, real  [R, Q] int64     0 where there is no token: in the bucket's tail and in
//   the
//                                          rows that the batch does not have
//   tokens, rows          [] int64         how many columns and rows are the call's
//
//   state                 shape            read and written by every graph
//   length                [] int64         where the next column goes: cache_position is length + i
//   mask                  [R, M] bool      real tokens
//   keys, values          [L, R, HKV, M, hd]
//
// A graph knows addresses and nothing that changes: no length, no mask and no count of rows of the
// time when it was captured. Warm-up runs write to the state, so that it is cleared after each.
#pragma once

#include "kernels/torch/static_kv/runtime.hpp"

namespace lockstep::static_kv {

/// Warms a step up, clears the state after each run (a bucket may fill the cache: a second run has
/// no room after the first), records the step, and gives what replays it on the tensors that it
/// was recorded with.
using Record = std::function<std::function<void()>(const std::function<void()>& step,
                                                   const std::function<void()>& clear)>;

constexpr int kWarmUps = 3;

/// Records nothing: a replay is a call. For devices without graphs.
std::function<void()> called(const std::function<void()>& step, const std::function<void()>& clear);

class GraphRuntime : public CachedModel {
 public:
  /// The state is where the programs' head is.
  explicit GraphRuntime(Programs programs);
  ~GraphRuntime() override = default;
  GraphRuntime(const GraphRuntime&) = delete;
  GraphRuntime& operator=(const GraphRuntime&) = delete;

  /// Records every bucket; once, before the first text.
  void capture(const Record& record);

  Result<std::vector<std::vector<float>>> append(const NewColumns& columns) override;
  /// The same with logits [R, V] of the programs' dtype where the programs are, overwritten by the
  /// next call.
  Result<at::Tensor> launch(const NewColumns& columns);
  void reorder(const std::vector<std::int64_t>& rows) override;
  void clear() override;

  const at::Tensor& keys() const { return state_.keys; }
  const at::Tensor& values() const { return state_.values; }
  std::int64_t length() const { return length_; }
  bool split = true;

 protected:
  struct State {
    at::Tensor keys, values, mask, length;
  };
  struct Bucket {
    std::int64_t Q;
    at::Tensor host, inputs;  ///< [n] int64, what stands above, each at a multiple of 16 bytes
    at::Tensor logits;        ///< [R, V]
    std::function<void()> replay;
  };

  /// Positions [Q] of a bucket's columns in the cache.
  virtual at::Tensor cache_position(const State& state, std::int64_t Q) const;
  /// Where keys and values are committed, [R, Q] bool.
  virtual at::Tensor committed(const at::Tensor& tokens, const at::Tensor& rows,
                               std::int64_t Q) const;
  /// What the warm-up runs left goes, keys and values too.
  virtual void forget_warm_ups();

  Programs programs_;
  State state_;

 private:
  /// What a graph records. Tensors are held, not looked up: a replay finds the same ones.
  void step(const State& state, const Bucket& bucket, const Program& program) const;
  void fill(Bucket& bucket, const NewColumns& columns, std::int64_t begin, const Call& call) const;

  std::map<std::int64_t, Bucket> buckets_;
  std::int64_t length_ = 0;  ///< state_.length as the host counts it
  std::int64_t rows_ = 0;    ///< of the batch, 0 while the cache is empty
};

}  // namespace lockstep::static_kv
