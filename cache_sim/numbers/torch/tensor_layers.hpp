// The layers of a hybrid model that have no operator for PyTorch: from ATen on a CPU, from the
// project's own launches (kernels/layers, kernels/attention) on a GPU.
//
// A row of a result depends on that row of the arguments alone, bit by bit, on both: comparisons of
// a batch with a run of each row alone rely on it. ATen's matrix products do not promise that, so a
// product here is a multiplication of elements and a sum over the last dimension, and functions
// that ATen computes by vectors and, for what is left over, by numbers get rows of whole vectors.
//
//   here                shape                   type
//   activations, pools  as below                that of the model: float32, bfloat16
//   matrices            [out, in]               the same
//   vectors             [channels]              float32
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "reference/models/hybrid/hybrid_config.hpp"

namespace lockstep::cache_sim {

/// The slots that queries see. Tokens starts[i] to starts[i + 1] are those of row i: the last of
/// them sees the first lengths[i] slots of table[i], each one before it a slot less.
struct SeenSlots {
  at::Tensor table;    // [N, longest] int32, -1 behind the last slot
  at::Tensor lengths;  // [N] int32
  at::Tensor starts;   // [N + 1] int32
};

struct Routes {
  at::Tensor experts;  // [T, k] int32
  at::Tensor weights;  // [T, k] float32
};

/// Two matrices for each expert; with a gate, `up` has the gate's rows first.
struct ExpertMatrices {
  at::Tensor up;    // [E, F or 2 F, D]
  at::Tensor down;  // [E, D, F]
};

class TensorLayers {
 public:
  virtual ~TensorLayers() = default;
  virtual at::Device device() const = 0;

  /// x [T, K] weight [N, K] -> [T, N]
  virtual at::Tensor product(const at::Tensor& x, const at::Tensor& weight) const = 0;
  /// The same in float32.
  virtual at::Tensor logits(const at::Tensor& x, const at::Tensor& head) const = 0;
  /// x [G, T, K] weight [G, N, K] -> [G, T, N]
  virtual at::Tensor products(const at::Tensor& x, const at::Tensor& weight) const = 0;
  /// x [T, D]
  virtual at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) const = 0;
  /// x, gate [T, D]; each D / groups channels have a norm of their own.
  virtual at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate,
                                    const at::Tensor& weight, double eps, bool gate_before_norm,
                                    std::int64_t groups) const = 0;
  /// Rotates the first dimensions of x [T, heads, d] by positions [T] int32 and frequencies [half]
  /// float32; returns the result.
  virtual at::Tensor rope(const at::Tensor& x, const at::Tensor& positions,
                          const at::Tensor& frequencies, double magnitude,
                          bool interleaved) const = 0;
  /// Writes x [T, heads, d] to the slots [T] int32 of a pool [slots, heads, d]; one below 0 is
  /// none.
  virtual void store(const at::Tensor& pool, const at::Tensor& x,
                     const at::Tensor& slots) const = 0;
  /// q [T, HQ, d] over keys and values [slots, HKV, d] -> [T, HQ, d]. `seen` names all queries; the
  /// output of one that sees nothing is 0.
  virtual at::Tensor attention(const at::Tensor& q, const at::Tensor& keys,
                               const at::Tensor& values, const SeenSlots& seen,
                               double scale) const = 0;
  virtual Routes route(const at::Tensor& logits, const std::optional<at::Tensor>& bias,
                       const reference::ExpertsUnit& unit) const = 0;
  /// silu(gate) up, [T, F]
  virtual at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) const = 0;
  virtual at::Tensor squared_relu(const at::Tensor& x) const = 0;
  /// x sigmoid(gate); gate has the shape of x, or one column.
  virtual at::Tensor sigmoid_gated(const at::Tensor& x, const at::Tensor& gate) const = 0;
  /// The weighted sum of the experts of each token of x [T, D].
  virtual at::Tensor experts(const at::Tensor& x, const Routes& routes,
                             const ExpertMatrices& matrices,
                             const reference::ExpertsUnit& unit) const = 0;

  /// `work` for later, to be run again and again over the same tensors: on a GPU a captured graph.
  virtual std::function<void()> captured(std::function<void()> work) const { return work; }
};

/// ATen's, with sums in float32.
std::shared_ptr<const TensorLayers> host_layers();
/// The same in double.
std::shared_ptr<const TensorLayers> exact_layers();

/// The launches of kernels/, for bfloat16; null, and a reason, where there is no GPU or they were
/// not compiled.
struct DeviceLayers {
  std::shared_ptr<const TensorLayers> layers;
  std::string reason;
};
DeviceLayers device_layers();

}  // namespace lockstep::cache_sim
