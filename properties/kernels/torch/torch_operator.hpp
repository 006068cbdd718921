// The operators of liblockstep_torch.so as a program without Python calls them: by the names of
// their arguments, through LibTorch's dispatcher. Only _torch_test.cpp files include this.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "reference/base/require.hpp"
#include "reference/tensors/storage.hpp"

namespace lockstep::testing_support {

using Named = std::map<std::string, c10::IValue>;

/// The operators, as torch.ops.load_library registers them.
inline c10::OperatorHandle operator_named(const std::string& name) {
  static void* const library = dlopen(LOCKSTEP_TORCH_OPS, RTLD_NOW);
  if (!library) throw std::runtime_error(dlerror());
  return c10::Dispatcher::singleton().findSchemaOrThrow(("lockstep::" + name).c_str(), "");
}

/// Of the types that activations and states have.
inline Format format_of(at::ScalarType type) {
  return type == at::kFloat ? Format::float32 : type == at::kHalf ? Format::fp16 : Format::bf16;
}

/// The bytes of a tensor's elements, in their order.
inline std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor packed = tensor.contiguous();
  return {static_cast<const char*>(packed.data_ptr()), packed.nbytes()};
}

/// The operator's results on the stack for these arguments; the others have their defaults.
inline std::vector<c10::IValue> call(const std::string& name, const Named& given) {
  const c10::OperatorHandle op = operator_named(name);
  std::vector<c10::IValue> stack;
  std::size_t used = 0;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto found = given.find(argument.name());
    used += found != given.end();
    require(found != given.end() || argument.default_value(), "an argument has a value");
    stack.push_back(found != given.end() ? found->second : *argument.default_value());
  }
  require(used == given.size(), "an argument is one of the schema");
  op.callBoxed(stack);
  return stack;
}

/// Every tensor among the arguments, replaced.
template <class Change>
Named with_tensors(Named arguments, Change change) {
  for (auto& [name, value] : arguments)
    if (value.isTensor()) value = change(name, value.toTensor());
  return arguments;
}
inline Named copies_of(const Named& arguments) {
  return with_tensors(arguments, [](const auto&, const at::Tensor& t) { return t.clone(); });
}

/// Whether the schema says that the operator writes this argument.
inline bool is_written(const std::string& name, const std::string& argument) {
  for (const c10::Argument& a : operator_named(name).schema().arguments())
    if (a.name() == argument) return a.alias_info() && a.alias_info()->isWrite();
  return false;
}

/// A call of which is held true what holds for every operator: arguments that the schema does not
/// call written keep their bytes, and meta tensors give the same shapes, strides and types.
inline std::vector<c10::IValue> checked_call(const std::string& name, const Named& arguments) {
  const Named before = copies_of(arguments);
  const std::vector<c10::IValue> results = call(name, arguments);
  for (const auto& [argument, value] : arguments) {
    if (!value.isTensor() || is_written(name, argument)) continue;
    EXPECT_EQ(bytes_of(value.toTensor()), bytes_of(before.at(argument).toTensor()))
        << name << " wrote its argument " << argument;
  }
  const auto shapes = call(name, with_tensors(arguments, [](const auto&, const at::Tensor& t) {
                             return t.to(at::kMeta);
                           }));
  EXPECT_EQ(shapes.size(), results.size());
  for (std::size_t i = 0; i < std::min(shapes.size(), results.size()); ++i) {
    const at::Tensor &shape = shapes[i].toTensor(), &result = results[i].toTensor();
    EXPECT_TRUE(shape.is_meta());
    EXPECT_EQ(shape.sizes(), result.sizes());
    EXPECT_EQ(shape.strides(), result.strides());
    EXPECT_EQ(shape.scalar_type(), result.scalar_type());
  }
  return results;
}

/// The operator's complaint about arguments that it refuses; empty where it takes them.
inline std::string complaint_of(const std::string& name, const Named& arguments) {
  try {
    call(name, arguments);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// An argument that is replaced, and the name that the complaint holds.
struct Refusal {
  std::string argument;
  c10::IValue value;
  std::string named = argument;
};

/// Whether the complaint's first line has the name as a word.
inline bool names(const std::string& complaint, const std::string& name) {
  std::string line(1, ' ');
  line.append(complaint, 0, complaint.find('\n')).push_back(' ');
  const auto is_word = [&](std::size_t at) { return std::isalnum(line[at]) || line[at] == '_'; };
  for (std::size_t at = 0; (at = line.find(name, at)) != std::string::npos; ++at)
    if (!is_word(at - 1) && !is_word(at + name.size())) return true;
  return false;
}

/// Each refusal names its argument, and leaves what the operator writes as it was.
inline void expect_refusals(const std::string& name, const Named& good,
                            const std::vector<Refusal>& refusals) {
  EXPECT_EQ(complaint_of(name, copies_of(good)), "");
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(name + ": " + refusal.argument);
    Named bad = copies_of(good);
    bad[refusal.argument] = refusal.value;
    const Named before = copies_of(bad);
    const std::string complaint = complaint_of(name, bad);
    EXPECT_TRUE(names(complaint, refusal.named)) << "it said: " << complaint;
    for (const auto& [argument, value] : bad)
      if (value.isTensor() && !value.toTensor().is_meta() && is_written(name, argument)) {
        EXPECT_EQ(bytes_of(value.toTensor()), bytes_of(before.at(argument).toTensor()));
      }
  }
}

}  // namespace lockstep::testing_support
