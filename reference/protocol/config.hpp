// What a run is configured with: the fields of a `config` line, of --config and of a child's
// `hello` line.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"
#include "reference/protocol/enum_set.hpp"

namespace lockstep {

using Nanoseconds = std::int64_t;

/// The fields of a configuration, sorted by name.
enum class ConfigField : std::uint8_t {
  alpha,
  block,
  blocks,
  bootstrap,
  checkpoint,
  chunked_prefill,
  drafts,
  eagle,
  flops_pair,
  flops_token,
  graph_batches,
  groups,
  hash_algorithm,
  hash_block,
  kv_stride,
  kv_tokens,
  layers,
  lazy,
  max_running,
  model_chunk,
  model_config,
  modules,
  overlap,
  page,
  path_cap,
  policy,
  pool_bytes,
  ranks,
  request_rows,
  retention,
  routing,
  scheduler,
  shared_prefix_checkpoint,
  skip_decode_lock,
  state_bytes,
  state_share,
  state_slots,
  state_stride,
  step_time,
  strip_thinking,
  token_bytes,
  track_interval,
};
/// The field's name in files.
std::string_view to_string(ConfigField field);
std::optional<ConfigField> config_field_from(std::string_view name);

/// Some of the fields.
using ConfigFields = EnumSet<ConfigField>;

/// Integers count tokens, slots, rows, bytes or tokens per something, as the name says; flags are 0
/// or 1.
struct Config {
  std::string policy;               ///< empty: sglang-no-buffer beside its oracle
  std::int64_t kv_tokens = 131072;  ///< KV slots that requests can use
  std::int64_t state_slots =
      256;                ///< state slots that requests can use; the reserved slot 0 is extra
  std::int64_t page = 1;  ///< tokens per KV page
  std::int64_t chunked_prefill = 8192;  ///< tokens that one prefill step spends at most
  std::int64_t max_running = 256;       ///< requests that run at once
  std::int64_t request_rows = 0;        ///< rows of the request table; 0: max_running
  Nanoseconds step_time = 1'000'000;    ///< what one step takes under the constant cost model
  std::int64_t model_chunk = 64;      ///< tokens between the states that a prefill kernel can show
  std::int64_t track_interval = 256;  ///< tokens between checkpoints while decoding (extra buffer)
  std::int64_t overlap = 0;           ///< decisions one step ahead of results
  std::int64_t lazy = 0;              ///< second tracking slot on demand (extra buffer)
  std::int64_t strip_thinking = 0;    ///< a finished request leaves only its prompt in the cache
  std::int64_t skip_decode_lock = 0;  ///< no state lock while decoding
  std::int64_t path_cap = -1;         ///< states per path; -1: no cap
  std::int64_t blocks = 4096;         ///< blocks of a block cache
  std::int64_t block = 256;           ///< tokens per block
  std::int64_t hash_block = 256;      ///< tokens per hash
  std::string hash_algorithm = "none";  ///< vLLM's: sha256, sha256_cbor, xxhash or xxhash_cbor
  std::string retention = "none";       ///< `none` or tokens
  std::int64_t checkpoint = 0;  ///< tokens: kernels store a state inside the last chunk, at a
                                ///< multiple of so many after its start; 0: they do not
  std::int64_t shared_prefix_checkpoint = 0;  ///< a junction inside a block is kept
  std::string groups;                         ///< attention:816,mamba:1648
  std::int64_t kv_stride = 0;                 ///< elements from one KV slot of a layer to the next
  std::int64_t state_stride = 0;  ///< the same of state slots; 0: offsets are not looked at
  std::int64_t eagle = 0;
  std::int64_t modules = 1;     ///< of MTP: each reads one token further ahead in a prefill
  std::int64_t drafts = 0;      ///< draft tokens per verification
  std::string graph_batches;    ///< captured batch sizes, 4,8
  std::int64_t ranks = 1;       ///< data-parallel ranks
  std::string routing;          ///< load or prefix
  std::string scheduler;        ///< sglang: SGLang's rules where memory is short
  std::int64_t pool_bytes = 0;  ///< one pool for KV and states; 0: counted pools
  std::int64_t token_bytes = 0;
  std::int64_t state_bytes = 0;
  std::int64_t state_share =
      0;  ///< per mille of pool_bytes for states, where a policy has two pools
  std::string alpha = "tuned";   ///< weight of FLOPs against recency, per mille, or `tuned`
  std::int64_t bootstrap = 5;    ///< alpha is tuned on so many times the requests before pressure
  std::int64_t flops_token = 0;  ///< FLOPs of a token in a prefill, whatever stands before it
  std::int64_t flops_pair = 0;   ///< FLOPs of a token for each token that it attends to
  std::string layers;            ///< mamba,attention,mamba: by their absolute index
  std::string model_config;      ///< a file whose layers these are

  std::int64_t rows() const { return request_rows != 0 ? request_rows : max_running; }
  /// The numbers of graph_batches, ascending; empty where it is not such a list (start_subject
  /// refuses it).
  std::vector<std::int64_t> graphs() const;
  bool operator==(const Config&) const = default;

  /// Sets one field from its text. The error is a sentence without file and line.
  Result<void> set(std::string_view field, std::string_view value);

  /// Sets `key=value,key=value`, the form of --config. `named`: the fields of the list are added.
  Result<void> set_all(std::string_view list, ConfigFields* named = nullptr);

  /// Every field as `key=value`, sorted by key: what a child is greeted with and a run's JSON
  /// shows.
  std::vector<std::pair<std::string, std::string>> fields() const;

  /// The fields whose value is not the default, sorted by name.
  std::vector<ConfigField> changed() const;
};

/// A time of the grammar: digits and ns, us, ms or s.
Result<Nanoseconds> parse_time(std::string_view text);
std::string time_text(Nanoseconds time);

/// A decimal (or 0x hexadecimal, where `hexadecimal`) number within [low, high]; the error says
/// what was wrong with it.
Result<std::int64_t> parse_integer(std::string_view text, std::int64_t low, std::int64_t high);

}  // namespace lockstep
