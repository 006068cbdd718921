// Parameters of generated workloads: `key=value,…` with whole numbers, decimal or 0x hexadecimal.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

struct Parameter {
  std::string_view name;
  std::int64_t low, high;
  std::int64_t* value;
};

/// Sets the parameters that `text` names. The error is a sentence that begins with the name of the
/// workload.
Result<void> parse_parameters(std::string_view workload, std::string_view text,
                              std::span<const Parameter> known);

}  // namespace lockstep::cache_sim
