// A preset as the checkpoint that transformers would write of it.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "properties/support/program.hpp"
#include "reference/models/hybrid/hybrid_checkpoint.hpp"
#include "reference/models/hybrid/hybrid_weights.hpp"

namespace lockstep::testing_support {

struct Floats {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

inline std::string safetensors_of(const std::map<std::string, Floats>& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t begin = data.size(), bytes = tensor.values.size() * sizeof(float);
    data.append(reinterpret_cast<const char*>(tensor.values.data()), bytes);
    header[name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, begin + bytes}}};
  }
  const std::string text = header.dump();
  const std::uint64_t size = text.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + text + data;
}

/// A preset as a checkpoint: numbers are rounded to float, experts stand one by one.
struct Checkpoint {
  explicit Checkpoint(const std::string& preset) {
    config = nlohmann::json::parse(read_text(std::string(LOCKSTEP_SOURCE_DIR) +
                                             "/fixtures/models/hybrid_configs.json"))[preset];
    model = *reference::hybrid_preset(preset);
    weights = reference::drawn_hybrid(model);
    weights.embedding = reference::embedding_table(model, weights);
    for (auto& [name, tensor] : weights.tensors) round(tensor);
    round(weights.embedding);
    for (const auto& [name, tensor] : weights.tensors) store(name, tensor);
    store(model.embedding, weights.embedding);
  }

  static void round(reference::HybridTensor& tensor) {
    for (double& x : tensor.values) x = static_cast<double>(static_cast<float>(x));
  }
  void add(const std::string& name, std::vector<std::int64_t> shape,
           std::span<const double> values) {
    const bool is_nemotron = config["model_type"] == "nemotron_h" && name.starts_with("model.");
    Floats& stored = tensors[is_nemotron ? "backbone." + name.substr(6) : name];
    stored = {std::move(shape), {values.begin(), values.end()}};
  }
  void store(const std::string& name, const reference::HybridTensor& tensor) {
    const std::size_t at = name.rfind(".experts.");
    if (at == std::string::npos || name.find("shared") != std::string::npos)
      return add(name, tensor.shape, tensor.values);
    const std::string part = name.substr(at + 9);
    const bool is_pair = part == "gate_up_proj";
    const std::int64_t rows = tensor.shape[1] / (is_pair ? 2 : 1), columns = tensor.shape[2];
    const auto size = static_cast<std::size_t>(rows * columns);
    std::span<const double> rest = tensor.values;
    for (std::int64_t expert = 0; expert < tensor.shape[0]; ++expert)
      for (const std::string& one :
           is_pair ? std::vector<std::string>{"gate_proj", "up_proj"} : std::vector{part}) {
        add(name.substr(0, at + 9) + std::to_string(expert) + "." + one + ".weight",
            {rows, columns}, rest.first(size));
        rest = rest.subspan(size);
      }
  }

  /// Writes the checkpoint and gives its folder.
  std::string written() const {
    folder.write("config.json", config.dump());
    folder.write("model.safetensors", safetensors_of(tensors));
    return folder.path("");
  }
  Result<reference::HybridConfig> read() const { return reference::read_hybrid(written()); }
  /// The sentence, without the folder.
  std::string refusal() const {
    const auto found = read();
    if (found) return "";
    const std::string path = folder.path("");
    std::string text = found.error().text;
    if (text.starts_with(path)) text = text.substr(path.size());
    return text.starts_with("/") ? text.substr(1) : text;
  }

  ScratchFolder folder;
  nlohmann::json config;
  reference::HybridConfig model;
  reference::HybridWeights weights;
  std::map<std::string, Floats> tensors;
};

}  // namespace lockstep::testing_support
