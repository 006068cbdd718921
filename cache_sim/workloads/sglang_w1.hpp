// `sglang-w1`: 2,000 multi-turn requests, generated from a seed. Their driver
// (cache_sim/replay/sglang_w1_driver.hpp) plays them; this file generates the data.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

struct SglangW1Options {
  std::uint64_t seed = 0x5EED2026;  ///< replaces the constant of the token hash
  std::int64_t requests = 2000;     ///< the first N requests of the sequence, then the drain
  std::int64_t kv_tokens = 131072;
  std::int64_t state_slots = 256;

  /// Parses `seed=…,requests=…`; numbers may be hexadecimal (0x…).
  static Result<SglangW1Options> parse(std::string_view parameters);
};

/// One request: its prompt, followed by the tokens of its output.
struct SglangW1Request {
  Name id;  ///< r0, r1, …
  std::int64_t conversation;
  std::int64_t previous;  ///< the previous request of the conversation; -1: none
  std::uint32_t prompt_size;
  Tokens tokens;  ///< prompt and output
};

struct SglangW1 {
  SglangW1Options options;
  std::vector<SglangW1Request> requests;

  static SglangW1 generate(const SglangW1Options& options);
  /// Digest of all tokens in order; 7a04faa0e91ab547 for the defaults.
  std::uint64_t token_digest() const;
};

}  // namespace lockstep::cache_sim
