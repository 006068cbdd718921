// Qwen3 in eager LibTorch, to compare exported programs with (equations:
// reference/models/qwen3.hpp). logits() computes a whole text without a cache; step() is a program
// with the inputs and outputs of an exported one.
#pragma once

#include "kernels/torch/static_kv/runtime.hpp"

namespace lockstep::static_kv {

class TorchQwen3 {
 public:
  TorchQwen3(const reference::Qwen3Checkpoint& checkpoint, at::ScalarType dtype,
             at::Device device = at::kCPU);

  const reference::Qwen3Config& config() const { return config_; }
  /// [V, D]
  at::Tensor head() const;

  /// Logits [B, T, V]. ids, positions [B, T] int64; real [B, T] bool.
  at::Tensor logits(const at::Tensor& ids, const at::Tensor& positions,
                    const at::Tensor& real) const;

  /// A program as runtime.hpp describes it.
  std::vector<at::Tensor> step(const std::vector<at::Tensor>& inputs) const;

  /// step() that writes new keys and values into past_k and past_v, and returns hidden states
  /// alone.
  std::vector<at::Tensor> step_in_place(const std::vector<at::Tensor>& inputs) const;

 private:
  at::Tensor weight(const std::string& name) const { return weights_.at(name + ".weight"); }
  at::Tensor normed(const at::Tensor& x, const std::string& name) const;
  /// The layers, with attention by attend(layer, q, k, v): q [B, HQ, Q, hd], k and v [B, HKV, Q,
  /// hd], all rotated; it returns [B, HQ, Q, hd].
  template <class Attend>
  at::Tensor decode(const at::Tensor& ids, const at::Tensor& positions, const Attend& attend) const;

  reference::Qwen3Config config_;
  std::map<std::string, at::Tensor> weights_;
};

/// The eager model as a CachedModel: it keeps the text and recomputes all of it in each call.
class Recomputed : public CachedModel {
 public:
  explicit Recomputed(const TorchQwen3& model) : model_(model) {}
  Result<std::vector<std::vector<float>>> append(const NewColumns& columns) override;
  void reorder(const std::vector<std::int64_t>& rows) override;
  void clear() override;

 private:
  const TorchQwen3& model_;
  at::Tensor ids_, positions_, real_;  ///< [B, T]; undefined while there is no text
};

}  // namespace lockstep::static_kv
