// The division of a policy's memory into pools, for families whose pools are not a pool of KV slots
// and a pool of state slots. A family registers its layout beside its policies.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cache_sim/model/model.hpp"
#include "reference/base/registry.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// A number of bytes that a policy divides among its pools.
struct PoolMemory {
  const PolicyEntry& policy;
  const Model& model;
  std::int64_t bytes;
  std::int64_t page = 1;  ///< tokens of a KV page
  ConfigFields fixed{};   ///< config fields that the user has set
};

/// The contents of the pools, for a table of policies.
struct PoolContents {
  std::int64_t kv_tokens = 0;    ///< at most
  std::int64_t state_slots = 0;  ///< at most
  std::int64_t blocks = 0;       ///< 0: the pools have no blocks
  std::int64_t lookup = 0;       ///< prompts are looked up in pieces of this many tokens; 0: in any
};

struct PoolLayout {
  std::string_view name;  ///< of the family
  bool (*applies)(const PolicyEntry& policy);
  /// The error is a sentence without the policy's name: a field that cannot be set beside a number
  /// of bytes, or too few bytes.
  Result<PoolContents> (*contents)(const PoolMemory& memory);
  /// The config fields K=V,… that give the policy these pools.
  std::string (*fields)(const PoolMemory& memory);
  struct Blocks {
    std::int64_t count, tokens;  ///< tokens: of each block
  };
  /// The one pool of blocks that KV and states share; null: the family has no blocks.
  Blocks (*blocks)(const Config& config) = nullptr;
  struct Host {
    std::int64_t kv_tokens, state_slots;  ///< at most
    std::string fields;                   ///< K=V,… that give the policy this host tier
  };
  std::string_view scheduler{};  ///< that serves its requests; empty: the config's
  /// A host tier of memory.bytes. The error is a sentence, as above. Null: host_kv and host_states
  /// divide the bytes.
  Result<Host> (*host)(const PoolMemory& memory, const Config& config) = nullptr;
  /// Bytes of a copy of blocks of so many tokens: of KV in one group, and of states of one. Null
  /// where KV and states have a size each.
  std::int64_t (*copied)(const Model& model, std::int64_t block,
                         const SnapshotHost::Copied& what) = nullptr;
};

/// Config fields that count slots or blocks have this limit.
inline constexpr std::int64_t kMostSlots = std::int64_t{1} << 30;

/// The layout of the policy's family; null: a pool of KV slots, and a pool of state slots if the
/// policy has states.
const PoolLayout* pool_layout_of(const PolicyEntry& policy);

/// Whether the policy has one pool of blocks.
bool has_blocks(const PolicyEntry& policy);

/// An error of PoolLayout::contents: the bytes have no room for one `unit`.
tl::unexpected<Error> no_room_for(std::string_view unit, const PoolMemory& memory);

}  // namespace lockstep::cache_sim
