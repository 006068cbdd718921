// The tiny models against the classes of transformers that they name, in float64 on the same drawn
// weights: all positions at once, in chunks, and decoded through the classes' own caches; and their
// draft modules.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>

#include "properties/reference/models/hybrid/hybrid_memory.hpp"
#include "properties/support/program.hpp"
#include "reference/models/hybrid/hybrid_checkpoint.hpp"
#include "reference/models/safetensors.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::WrittenTensor;

constexpr std::size_t kTexts = 3, kTokens = 48;

using Tensors = std::map<std::string, WrittenTensor>;

void append(Numbers& all, const PlainRun& run) {
  for (const Numbers& after : run.logits) all.insert(all.end(), after.begin(), after.end());
}

/// Writes three texts (`tokens`), the logits after each of their tokens (`logits`) and, where there
/// is a draft module, its own (`drafts`), beside other tensors.
void write_logits(const HybridModel& model, const HybridModel* module, Tensors tensors,
                  const std::string& path) {
  Numbers tokens, logits, drafts;
  for (std::uint64_t i = 0; i < kTexts; ++i) {
    const Text text = drawn_text(i, kTokens, model.vocabulary());
    tokens.insert(tokens.end(), text.begin(), text.end());
    const PlainRun plain = plain_run(model, text);
    append(logits, plain);
    if (module != nullptr) append(drafts, draft_run(*module, text, plain));
  }
  tensors["tokens"] = {{kTexts, kTokens}, tokens};
  tensors["logits"] = {{kTexts, kTokens, model.config().vocabulary}, logits};
  if (module != nullptr)
    tensors["drafts"] = {{kTexts, kTokens - 1, model.config().vocabulary}, drafts};
  const Result<void> written = reference::write_safetensors(path, tensors);
  ASSERT_TRUE(written) << written.error().text;
}

/// The preset's weights and its draft module's by their names in a checkpoint, and their logits.
void write_preset(std::string_view preset, const std::string& path) {
  const HybridModel model = preset_model(preset);
  const std::optional<HybridModel> module = draft_module(preset);
  Tensors tensors;
  for (const HybridModel* const part : {&model, module ? &*module : &model})
    for (const auto& [name, tensor] : part->weights().tensors)
      tensors[name] = {tensor.shape, tensor.values};
  const auto table = reference::embedding_table(model.config(), model.weights());
  tensors[model.config().embedding] = {table.shape, table.values};
  write_logits(model, module ? &*module : nullptr, tensors, path);
}

/// The exit status of the script with these words; `said` is what it prints.
int script(const std::string& words, const ScratchFolder& folder, std::string& said) {
  const std::string log = folder.path("said");
  const std::string command = "python3 " + std::string(LOCKSTEP_SOURCE_DIR) +
                              "/fixtures/subjects/transformers " + words + " >" + log + " 2>&1";
  const int status = std::system(command.c_str());  // NOLINT(cert-env33-c): it runs our own script
  said = read_text(log);
  return WEXITSTATUS(status);
}

constexpr int kSkipped = 77;

// LOCKSTEP_HYBRID_LOGITS=FILE writes the classes' logits that fixtures/models/hybrid_logits.json
// has.
TEST(HybridModels, agreeWithTheClassesOfTransformers) {
  const ScratchFolder folder;
  for (const std::string_view preset : reference::hybrid_presets())
    write_preset(preset, folder.path(std::string(preset) + ".safetensors"));
  const char* const record = std::getenv("LOCKSTEP_HYBRID_LOGITS");
  std::string said;
  const int status =
      script("compare " + folder.path("") + " " + (record != nullptr ? record : ""), folder, said);
  if (status == kSkipped) GTEST_SKIP() << said;
  EXPECT_EQ(status, 0) << said;
}

// Checkpoints that the classes write are read with their own config.json.
TEST(HybridModels, ofCheckpointsAgreeWithTheClassesThatWroteThem) {
  const ScratchFolder folder;
  std::string said;
  const int status = script("save " + folder.path(""), folder, said);
  if (status == kSkipped) GTEST_SKIP() << said;
  ASSERT_EQ(status, 0) << said;
  for (const std::string_view preset : reference::hybrid_presets()) {
    const std::string path = folder.path(std::string(preset));
    const Result<reference::HybridConfig> read = reference::read_hybrid(path);
    ASSERT_TRUE(read) << read.error().text;
    write_logits({*read, reference::hybrid_weights(*read)}, nullptr, {}, path + ".safetensors");
  }
  EXPECT_EQ(script("compare " + folder.path(""), folder, said), 0) << said;
}

}  // namespace
}  // namespace lockstep
