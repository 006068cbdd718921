// `sglang-w1`: 2,000 multi-turn requests made from a seed, with their own driver, an operation
// stream. The decision digest over its replies is recorded for SGLang's own caches, so whoever
// answers these operations can be held against them.
#pragma once

#include <cstdint>
#include <functional>
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

/// One request: its prompt and, right behind it in the same storage, the tokens it will output.
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

/// The apply step of a run: null where the run stops here.
using ApplyOperation = std::function<const Reply*(const Operation&)>;

struct SglangW1Outcome {
  std::uint64_t decision_digest = 0;
  std::int64_t hit_tokens = 0;
  std::int64_t input_tokens = 0;
  std::vector<std::int64_t> prefixes;  ///< cached tokens by request, in order of admission
  bool complete = false;  ///< false where the run stopped early or an operation was refused
};

/// Called before request k is admitted (k = requests.size() before the final drain), with the
/// digest and hit tokens so far.
using SglangW1Progress =
    std::function<void(std::int64_t k, std::uint64_t digest, std::int64_t hit_tokens)>;

/// Drives the workload: FIFO, at most 8 in flight, prefill chunks of 1,024, the finish allocates
/// all outputs in one extend. Operations: admit, extend + checkpoint per chunk, extend (out - 1
/// output tokens), finish.
SglangW1Outcome drive(const SglangW1& workload, const ApplyOperation& apply,
                      const SglangW1Progress& progress = {});

}  // namespace lockstep::cache_sim
