#include "cache_sim/numbers/torch/tensor_call.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

thread_local CallListener* listener = nullptr;

const c10::OperatorHandle& operator_named(const std::string& name) {
  thread_local std::map<std::string, c10::OperatorHandle> known;
  auto found = known.find(name);
  if (found == known.end())
    found = known
                .emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(
                                   ("lockstep::" + name).c_str(), ""))
                .first;
  return found->second;
}

std::vector<c10::IValue> run(const std::string& name, const Arguments& given) {
  const c10::OperatorHandle& op = operator_named(name);
  std::vector<c10::IValue> stack;
  std::size_t used = 0;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto found = given.find(argument.name());
    used += found != given.end() ? 1 : 0;
    require(found != given.end() || argument.default_value().has_value(),
            "an operator is given its arguments");
    stack.push_back(found != given.end() ? found->second : *argument.default_value());
  }
  require(used == given.size(), "an argument is one of the schema");
  op.callBoxed(stack);
  return stack;
}

}  // namespace

CallListener::CallListener() : before_(std::exchange(listener, this)) {}
CallListener::~CallListener() {
  listener = before_;
}

std::vector<c10::IValue> call(const std::string& name, const Arguments& arguments) {
  if (listener == nullptr) return run(name, arguments);
  return listener->hear(name, arguments, [&] { return run(name, arguments); });
}

at::Tensor called(const std::string& name, const Arguments& arguments) {
  return call(name, arguments).at(0).toTensor();
}

bool writes(const std::string& name, const std::string& argument) {
  for (const c10::Argument& one : operator_named(name).schema().arguments())
    if (one.name() == argument) return one.alias_info() != nullptr && one.alias_info()->isWrite();
  return false;
}

}  // namespace lockstep::cache_sim
