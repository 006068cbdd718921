#include "cache_sim/policies/edge_llm/hybrid_layers.hpp"

#include <fmt/format.h>

#include "cache_sim/policies/edge_llm/runtime_config.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

Result<HybridLayers> HybridLayers::of(const std::vector<std::string>& kinds) {
  HybridLayers layers;
  if (kinds.empty()) return fail("a model has at least one layer with KV or a state");
  if (kinds.size() > kMostLayers)
    return fail(fmt::format("{} layers are more than {}", kinds.size(), kMostLayers));
  for (const std::string& name : kinds) {
    if (name != "attention" && name != "mamba")
      return fail(fmt::format("layer {}: `{}` is neither attention nor mamba",
                              layers.places_.size(), name.substr(0, 60)));
    const LayerKind kind = name == "mamba" ? LayerKind::mamba : LayerKind::attention;
    layers.places_.push_back({kind, layers.counts_[static_cast<std::size_t>(kind)]++});
  }
  return layers;
}

Result<HybridLayers> HybridLayers::parse(std::string_view list) {
  if (list.empty()) list = "mamba,attention";
  std::vector<std::string> kinds;
  for (;;) {
    const std::size_t comma = list.find(',');
    kinds.emplace_back(list.substr(0, comma));
    if (comma == std::string_view::npos) return of(kinds);
    list.remove_prefix(comma + 1);
  }
}

Result<HybridLayers> HybridLayers::of(const Config& config) {
  const auto named = [](std::string_view field) {
    return [field](const Error& error) {
      return Error{.text = fmt::format("field {}: {}", field, error.text)};
    };
  };
  if (config.text("model_config").empty())
    return parse(config.text("layers")).map_error(named("layers"));
  if (!config.text("layers").empty())
    return fail("field layers: the file of model_config says which layers there are");
  return read_runtime_config(config.text("model_config"))
      .map([](const RuntimeConfig& file) { return file.layers; })
      .map_error(named("model_config"));
}

const HybridLayers::Place& HybridLayers::at(std::size_t absolute) const {
  require(absolute < places_.size(), "a layer's index is below their number");
  return places_[absolute];
}

}  // namespace lockstep::cache_sim
