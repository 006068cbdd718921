// The options of SGLang's policies, read once.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

/// When nodes are copied to the host: by the first or the second insert over them, or as they leave
/// the device.
enum class WritePolicy : std::uint8_t { through, selective, back };
/// Their names in a config, in that order.
inline constexpr std::string_view kWritePolicies[] = {"write_through", "write_through_selective",
                                                      "write_back"};

/// The field write_policy; nothing where it names none.
std::optional<WritePolicy> write_policy_of(const Config& config);

/// A request that asks again while its prefetch is in flight: waits until the deadline, stops it,
/// or waits.
enum class PrefetchPolicy : std::uint8_t { timeout, best_effort, wait_complete };
/// Their names in a config, in that order.
inline constexpr std::string_view kPrefetchPolicies[] = {"timeout", "best_effort", "wait_complete"};

/// The field prefetch_policy; nothing where it names none.
std::optional<PrefetchPolicy> prefetch_policy_of(const Config& config);

struct SglangOptions {
  /// Tokens between checkpoints while decoding (extra buffer), or between flushes of the ring.
  std::int64_t track_interval;
  bool lazy;              ///< second tracking slot on demand (extra buffer)
  bool strip_thinking;    ///< a finished request leaves only its prompt in the cache
  bool skip_decode_lock;  ///< no state lock while decoding
  std::int64_t path_cap;  ///< states per path; -1: no cap
  std::int64_t ring;      ///< decode steps for each write of a state; 0: no ring
  std::int64_t host_kv;   ///< KV tokens of the host tier; 0: there is no such tier
  std::int64_t host_states;
  WritePolicy write_policy;
  bool disk;  ///< there is a storage behind the host
  PrefetchPolicy prefetch_policy;
  std::int64_t prefetch_least;  ///< tokens for which a prefetch is made
  std::int64_t window;     ///< tokens that a token of the windows sees, itself included; 0: none
  std::int64_t window_kv;  ///< KV tokens of the windows
  std::int64_t window_interval;  ///< tokens that decoding leaves behind before it gives them back
  bool window_release;           ///< decoding gives up the lock on its prefix's window
  std::int64_t host_window_kv;   ///< KV tokens of the windows on the host
  std::int64_t storage_ranks;    ///< tensor-parallel ranks, each with a storage of its own
  bool index_keys;               ///< a sparse attention keeps one beside each token's KV

  static SglangOptions of(const Config& config);
};

}  // namespace lockstep::cache_sim
