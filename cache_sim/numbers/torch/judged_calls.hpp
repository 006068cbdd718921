// Each call of an operator, and of a layer, beside its definition on the same inputs, by the
// yardstick (reference/tensors/yardstick.hpp): the operators' definitions are those of `lockstep
// judge` (kernels/judge/operations), the layers' those of ATen in double.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cache_sim/numbers/torch/tensor_call.hpp"
#include "cache_sim/numbers/torch/tensor_layers.hpp"

namespace lockstep::cache_sim {

/// While it lives, the calls of this thread are judged.
class JudgedCalls final : public CallListener {
 public:
  JudgedCalls();
  ~JudgedCalls() override;
  std::vector<c10::IValue> hear(const std::string& name, const Arguments& arguments,
                                const std::function<std::vector<c10::IValue>()>& run) override;

  /// A sentence for each result that is beyond its yardstick.
  const std::vector<std::string>& wrong() const { return wrong_; }
  std::int64_t judged() const { return judged_; }

  /// The one that listens in this thread; null where none does.
  static JudgedCalls* active();
  /// Judges a result: `yardstick` is the definition in float, `truth` in double.
  void judge(const std::string& what, const at::Tensor& actual, const at::Tensor& yardstick,
             const at::Tensor& truth);

 private:
  JudgedCalls* before_;
  std::vector<std::string> wrong_;
  std::int64_t judged_ = 0;
};

/// These layers, judged while a JudgedCalls lives.
std::shared_ptr<const TensorLayers> judged_layers(std::shared_ptr<const TensorLayers> layers);

}  // namespace lockstep::cache_sim
