// `vllm-w1`: 2,000 requests over 64 shared prefixes, generated from fixed seeds, each decoding 32
// tokens. Their driver (cache_sim/replay/vllm_w1_driver.hpp) plays them; this file generates the
// data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

struct VllmW1Options {
  std::int64_t requests = 2000;  ///< the first N requests of the sequence
  std::int64_t blocks = 4096;    ///< including block 0
  std::int64_t hash = 256;       ///< tokens per hash
  std::string retention = "none";

  /// Parses `requests=…,blocks=…,retention=none|N,hash=…`; numbers may be hexadecimal (0x…).
  static Result<VllmW1Options> parse(std::string_view parameters);
};

struct VllmW1Request {
  Name id;               ///< 0, 1, …
  std::uint32_t prefix;  ///< the shared prefix that it begins with
  std::uint32_t prompt_size;
  Tokens tokens;  ///< prompt, then the tokens that it decodes
};

struct VllmW1 {
  VllmW1Options options;
  std::vector<VllmW1Request> requests;

  static VllmW1 generate(const VllmW1Options& options);
};

inline constexpr std::uint32_t kVllmW1Block = 256;
inline constexpr std::uint32_t kVllmW1Outputs = 32;

}  // namespace lockstep::cache_sim
