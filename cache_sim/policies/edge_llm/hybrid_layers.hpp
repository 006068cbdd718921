// Which layers of a hybrid model keep KV and which keep states, by absolute index, and where each
// is among its kind. From the config field `layers`, or from the config.json of an engine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"
#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

enum class LayerKind : std::uint8_t { attention, mamba };

class HybridLayers {
 public:
  struct Place {
    LayerKind kind;
    std::uint32_t local;  ///< among its kind
  };
  static constexpr std::size_t kMostLayers = 1024;

  /// The error names what is wrong with the list.
  static Result<HybridLayers> of(const std::vector<std::string>& kinds);
  /// `attention,mamba`; empty: mamba,attention.
  static Result<HybridLayers> parse(std::string_view list);
  /// By the fields `layers` and `model_config`; the error names the field.
  static Result<HybridLayers> of(const Config& config);

  /// `absolute` must be the index of a layer.
  const Place& at(std::size_t absolute) const;
  std::size_t size() const { return places_.size(); }
  std::uint32_t count(LayerKind kind) const { return counts_[static_cast<std::size_t>(kind)]; }

 private:
  std::vector<Place> places_;
  std::uint32_t counts_[2] = {0, 0};
};

}  // namespace lockstep::cache_sim
