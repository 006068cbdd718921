// Random configurations of TensorRT-Edge-LLM's cache: the order of its layers.
#include <iterator>

#include "cache_sim/model/fidelity.hpp"

#include "cache_sim/draw/swarm.hpp"
#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {
namespace {

void configure(SwarmDraw& part) {
  constexpr const char* kLayers[] = {"", "mamba", "attention", "mamba,attention,mamba",
                                     "attention,mamba,mamba,attention"};
  Draw draw = part.draw.stream("edge-llm layers");
  if (!part.fields.free("layers")) return;
  const bool has_numbers = part.swarm.config.text(kFidelityField) != "label";  // of such layers
  part.swarm.config.put(
      "layers", has_numbers ? "mamba,attention,mamba" : kLayers[draw.below(std::size(kLayers))]);
}

const Registration<SwarmEntry> kRegistered{
    {.name = "edge-llm",
     .applies = [](const Accepted& accepted) { return accepted.fields.contains("layers"); },
     .configure = configure}};

}  // namespace
}  // namespace lockstep::cache_sim
