// Calls of torch.ops.lockstep.* by the names of their arguments (kernels/torch/operators.md).
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace lockstep::cache_sim {

using Arguments = std::map<std::string, c10::IValue>;

/// Runs the operator; arguments that are not named have their defaults. Results are in the order of
/// the schema. Errors: an exception where the operator refuses an argument.
std::vector<c10::IValue> call(const std::string& name, const Arguments& arguments);

/// The same, for an operator with one tensor as its result.
at::Tensor called(const std::string& name, const Arguments& arguments);

/// Is told every call of this thread while it lives, and runs it.
class CallListener {
 public:
  CallListener();
  virtual ~CallListener();
  CallListener(const CallListener&) = delete;
  CallListener& operator=(const CallListener&) = delete;
  /// `run` runs the operator on the arguments.
  virtual std::vector<c10::IValue> hear(const std::string& name, const Arguments& arguments,
                                        const std::function<std::vector<c10::IValue>()>& run) = 0;

 private:
  CallListener* before_;
};

/// Whether the operator writes this argument.
bool writes(const std::string& name, const std::string& argument);

}  // namespace lockstep::cache_sim
