// The runtime of runtime.hpp with one CUDA graph for each bucket: the host writes a call's tokens
// to the bucket's inputs and replays the graph; everything else stays on the device. Programs that
// return hidden states alone write the cache in place (Programs::in_place).
//
//   a bucket's inputs     shape            written by the host before each replay
//   ids, positions, real  [R, Q] int64     0 where there is no token: in the bucket's tail, and in
//                                          rows that the batch does not have
//   tokens, rows          [] int64         number of columns and rows of the call
//
//   state                 shape            read and written by every graph
//   length                [] int64         columns cached; cache_position of column i is length + i
//   mask                  [R, M] bool      real tokens
//   keys, values          [L, R, HKV, M, hd]
//
// A graph holds addresses only; lengths, masks and counts of rows are read from the tensors at each
// replay. Warm-up runs write to the state, so the state is cleared after each.
#pragma once

#include "kernels/torch/static_kv/runtime.hpp"

namespace lockstep::static_kv {

/// Runs a step to warm it up, clears the state after each run (a bucket may fill the cache, and
/// then a second run would have no room), records the step, and returns a function that replays it
/// on the tensors with which it was recorded.
using Record = std::function<std::function<void()>(const std::function<void()>& step,
                                                   const std::function<void()>& clear)>;

constexpr int kWarmUps = 3;

/// A Record for devices without graphs: a replay calls the step.
std::function<void()> called(const std::function<void()>& step, const std::function<void()>& clear);

class GraphRuntime : public CachedModel {
 public:
  /// Allocates the state on the device of the programs' head.
  explicit GraphRuntime(Programs programs);
  ~GraphRuntime() override = default;
  GraphRuntime(const GraphRuntime&) = delete;
  GraphRuntime& operator=(const GraphRuntime&) = delete;

  /// Records every bucket. Called once, before the first text.
  void capture(const Record& record);

  Result<std::vector<std::vector<float>>> append(const NewColumns& columns) override;
  /// append() with logits [R, V] left on the programs' device in their dtype; the next call
  /// overwrites them.
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
    at::Tensor host, inputs;  ///< [n] int64: a bucket's inputs, each at a multiple of 16 bytes
    at::Tensor logits;        ///< [R, V]
    std::function<void()> replay;
  };

  /// Positions [Q] of a bucket's columns in the cache.
  virtual at::Tensor cache_position(const State& state, std::int64_t Q) const;
  /// Mask [R, Q] of the columns whose keys and values are committed.
  virtual at::Tensor committed(const at::Tensor& tokens, const at::Tensor& rows,
                               std::int64_t Q) const;
  /// Clears everything that warm-up runs have written, keys and values too.
  virtual void forget_warm_ups();

  Programs programs_;
  State state_;

 private:
  /// The step that a graph records. It gets its tensors as arguments, so a replay uses the same
  /// ones.
  void step(const State& state, const Bucket& bucket, const Program& program) const;
  void fill(Bucket& bucket, const NewColumns& columns, std::int64_t begin, const Call& call) const;

  std::map<std::int64_t, Bucket> buckets_;
  std::int64_t length_ = 0;  ///< the host's copy of state_.length
  std::int64_t rows_ = 0;    ///< rows of the batch; 0 while the cache is empty
};

}  // namespace lockstep::static_kv
