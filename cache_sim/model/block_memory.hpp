// The memory of a block cache, as a forward reads and writes it. One pool of blocks serves several
// groups of layers: a block holds the KV of one group now and a state of another one later. A
// policy decides which block a state or the KV of a token lies in; the memory holds what lies
// there: labels, or numbers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/base/ids.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

using BlockId = std::uint32_t;
inline constexpr BlockId kNullBlock = 0;  ///< stands for "no block"; nothing is stored there
using KeyId = std::uint32_t;              ///< of a hash that stands for a prefix

enum class GroupKind : std::uint8_t {
  attention,  ///< every block, from the first to the last token
  window,     ///< a sliding window: blocks below it are given back
  mamba,      ///< one running state, and the states of block ends that are kept
  mamba_all,  ///< a state in every block that the forward passes
};
inline bool is_state(GroupKind kind) {
  return kind == GroupKind::mamba || kind == GroupKind::mamba_all;
}

struct GroupSpec {
  GroupKind kind = GroupKind::attention;
  std::int64_t block = 0;   ///< tokens
  std::int64_t window = 0;  ///< tokens that a token sees, itself included, of a sliding window
  bool operator==(const GroupSpec&) const = default;
};

/// The pool of a block cache, and the groups that take blocks from it.
struct BlockGroups {
  std::vector<GroupSpec> groups;
  std::int64_t blocks = 0;  ///< the null block among them
  std::int64_t drafts = 0;  ///< the conv rows of a block are W - 1 + drafts
};

/// The null block where there is no such column.
inline BlockId block_at(std::span<const BlockId> columns, std::int64_t column) {
  if (column < 0 || column >= std::ssize(columns)) return kNullBlock;
  return columns[static_cast<std::size_t>(column)];
}

/// A copy that runs before the forward.
struct BlockCopy {
  BlockId source;
  BlockId target;
  std::uint32_t group;
};

/// A row's KV in one group: that of token i lies in column i / size, at place i % size.
struct BlockKv {
  std::uint32_t group;
  std::span<const BlockId> columns;
  std::int64_t size;   ///< tokens of a block
  std::int64_t first;  ///< the row reads tokens first … start - 1
};

/// A row's states in one group. The conv rows of a block are those of the last tokens before its
/// state; behind them, in a verification, those of the row's tokens. A block of states may have a
/// ring beside them, of what tokens after the recurrent state have added to it.
struct BlockStates {
  struct Store {
    std::int64_t size;  ///< tokens of the request that the state has seen
    BlockId block;      ///< the null block: it is not stored
  };

  std::uint32_t group;
  bool from_nothing;          ///< the row begins with the state of the empty prefix
  BlockId recurrent, conv;    ///< otherwise with the states of these blocks
  std::int64_t conv_begin;    ///< at which of its rows the conv block's window begins
  BlockId ring = kNullBlock;  ///< whose ring the row reads behind the recurrent state
  std::int64_t pending = 0;   ///< its first entries
  bool appends = false;  ///< the row's token becomes the next one, and `stores` get windows alone
  std::vector<Store> stores;  ///< of a verification, in the order of tokens
};

/// One request's part of a step. Spans live as long as the call that is given the row.
struct BlockRow {
  std::uint32_t place;      ///< of the request, in the batch
  Name request{};           ///< for reports alone
  const Tokens& tokens;     ///< all that are known, then the drafts
  std::int64_t start, end;  ///< the step computes tokens start … end - 1
  std::int64_t drafts;      ///< the last ones of these
  std::int64_t external;    ///< tokens before `start` that another server has sent
  bool verifies;            ///< stores a state for each token, and all conv rows in block `conv`
  std::span<const BlockKv> kv;
  std::span<const BlockStates> states;
};

/// A state that goes to another block, with the conv rows from `bias` on.
struct BlockMove {
  std::uint32_t group;
  BlockId recurrent, conv, target;
  std::int64_t bias;
};

class BlockMemory {
 public:
  virtual ~BlockMemory() = default;

  /// Another request comes into the batch at this place.
  virtual void admit(std::uint32_t /*place*/) {}
  /// These keys stand for the prefixes of `tokens`, one per hash block.
  virtual void learn(const std::vector<KeyId>& /*keys*/, const Tokens& /*tokens*/) {}
  /// The block is free and has no key, so nobody can find what it holds.
  virtual void lose(BlockId /*block*/) {}
  virtual void copy(const BlockCopy& copy) = 0;
  /// The KV of the row's `external` tokens, and the states that the row stores, come from another
  /// server.
  virtual void receive(const BlockRow& row) = 0;
  virtual void forward(const BlockRow& row) = 0;
  /// The batch is complete: the rows since the last launch run together. Copies, moves and what is
  /// received come before all rows or after them.
  virtual void launch() {}
  virtual void move(const BlockMove& move) = 0;
  /// The block's content is complete, for the moment.
  virtual void check(BlockId /*block*/) {}
};

}  // namespace lockstep::cache_sim
