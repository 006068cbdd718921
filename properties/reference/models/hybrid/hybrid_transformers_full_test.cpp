// The tiny models against the classes of transformers that they name, in float64 on the same drawn
// weights: all positions at once, in chunks, and decoded through the classes' own caches.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>

#include "properties/reference/models/hybrid/hybrid_memory.hpp"
#include "properties/support/program.hpp"
#include "reference/models/safetensors.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::WrittenTensor;

constexpr std::size_t kTexts = 3, kTokens = 48;

/// Writes the preset's weights by their names in a checkpoint, three texts (`tokens`) and the
/// logits after each of their tokens (`logits`).
void write_preset(std::string_view preset, const std::string& path) {
  const HybridModel model = preset_model(preset);
  std::map<std::string, WrittenTensor> tensors;
  for (const auto& [name, tensor] : model.weights().tensors)
    tensors[name] = {tensor.shape, tensor.values};
  const auto table = reference::embedding_table(model.config(), model.weights());
  tensors[model.config().embedding] = {table.shape, table.values};
  Numbers tokens, logits;
  for (std::uint64_t i = 0; i < kTexts; ++i) {
    const Text text = drawn_text(i, kTokens, model.vocabulary());
    tokens.insert(tokens.end(), text.begin(), text.end());
    for (const Numbers& after : plain_run(model, text).logits)
      logits.insert(logits.end(), after.begin(), after.end());
  }
  tensors["tokens"] = {{kTexts, kTokens}, tokens};
  tensors["logits"] = {{kTexts, kTokens, model.config().vocabulary}, logits};
  const Result<void> written = reference::write_safetensors(path, tensors);
  ASSERT_TRUE(written) << written.error().text;
}

// LOCKSTEP_HYBRID_LOGITS=FILE writes the classes' logits that fixtures/models/hybrid_logits.json
// has.
TEST(HybridModels, agreeWithTheClassesOfTransformers) {
  const ScratchFolder folder;
  for (const std::string_view preset : reference::hybrid_presets())
    write_preset(preset, folder.path(std::string(preset) + ".safetensors"));
  const char* const record = std::getenv("LOCKSTEP_HYBRID_LOGITS");
  const std::string script = std::string(LOCKSTEP_SOURCE_DIR) + "/fixtures/subjects/transformers";
  const std::string said = folder.path("said");
  const std::string command = "python3 " + script + " compare " + folder.path("") + " " +
                              (record != nullptr ? record : "") + " >" + said + " 2>&1";
  const int status = std::system(command.c_str());  // NOLINT(cert-env33-c): it runs our own script
  const std::string text = read_text(said);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << text;
  EXPECT_EQ(status, 0) << text;
}

}  // namespace
}  // namespace lockstep
