// A package with torch.ops.lockstep.* inside runs from C++: AOTInductor calls operators that it
// does not know by their schema, so the library that registers them has to be loaded, and no
// Python. LOCKSTEP_EXPORTED_OPS names the folder that
// properties/kernels/torch/torch_export_check.py --package writes.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace lockstep {
namespace {

using nlohmann::json;

at::Tensor tensor_of(const json& told) {
  const auto shape = told["shape"].get<std::vector<std::int64_t>>();
  if (told["integers"].get<bool>())
    return at::tensor(told["values"].get<std::vector<std::int64_t>>(), at::kInt).reshape(shape);
  return at::tensor(told["values"].get<std::vector<float>>(), at::kFloat).reshape(shape);
}

std::vector<at::Tensor> tensors_of(const json& list) {
  std::vector<at::Tensor> tensors;
  for (const json& told : list) tensors.push_back(tensor_of(told));
  return tensors;
}

// A decode of a gated delta net: outputs and both states are the bits that Python was given, and
// the inputs stay as they were. With another token the state is another.
TEST(ExportedOperators, runFromAPackage) {
  const char* const folder = std::getenv("LOCKSTEP_EXPORTED_OPS");
  const char* const library = std::getenv("LOCKSTEP_TORCH_OPS");
  const std::string path = folder == nullptr ? "" : std::string(folder) + "/decode_block.pt2";
  if (library == nullptr || !std::filesystem::exists(path))
    GTEST_SKIP()
        << "no package: `properties/kernels/torch/torch_export_check.py LIBRARY --package FOLDER`, "
           "LOCKSTEP_EXPORTED_OPS=FOLDER and LOCKSTEP_TORCH_OPS=LIBRARY";
  ASSERT_NE(dlopen(library, RTLD_NOW | RTLD_GLOBAL), nullptr) << dlerror();
  std::ifstream file(std::string(folder) + "/decode_block.json");
  const json told = json::parse(file);
  const at::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader loader(path);
  auto inputs = tensors_of(told["inputs"]);
  const auto before = tensors_of(told["inputs"]), expected = tensors_of(told["outputs"]);
  const auto outputs = loader.run(inputs);
  ASSERT_EQ(outputs.size(), expected.size());
  for (std::size_t i = 0; i < outputs.size(); ++i)
    EXPECT_TRUE(at::equal(outputs[i], expected[i])) << i;
  for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(at::equal(inputs[i], before[i])) << i;
  inputs[0] = inputs[0] + 1;
  EXPECT_FALSE(at::equal(loader.run(inputs)[2], expected[2]));
}

}  // namespace
}  // namespace lockstep
