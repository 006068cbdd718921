// `sglang-w1`: 2,000 multi-turn requests made from a seed. They are played by their own driver
// (cache_sim/replay/sglang_w1_driver.hpp); here they are data.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

struct SglangW1Options {
  std::uint64_t seed = 0x5EED2026;  ///< replaces the constant in the token hash
  std::int64_t requests = 2000;     ///< the first N of the same sequence, then the drain
  std::int64_t kv_tokens = 131072;
  std::int64_t state_slots = 256;

  /// Parses `seed=…,requests=…`; numbers may be hexadecimal (0x…).
  static Result<SglangW1Options> parse(std::string_view parameters);
};

/// One request: its prompt and, right after it in the same storage, the tokens it will output.
struct SglangW1Request {
  Name id;  ///< r0, r1, …
  std::int64_t conversation;
  std::int64_t previous;  ///< the conversation's previous request, -1 for none
  std::uint32_t prompt_size;
  Tokens tokens;  ///< prompt + output
};

struct SglangW1 {
  SglangW1Options options;
  std::vector<SglangW1Request> requests;

  static SglangW1 generate(const SglangW1Options& options);
  /// Digest over all tokens in order, 7a04faa0e91ab547 for the defaults.
  std::uint64_t token_digest() const;
};

}  // namespace lockstep::cache_sim
