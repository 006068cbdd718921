// vLLM's worker, which fills the blocks that the block manager gives out ("align" mode, with and
// without speculative decoding): it decides which blocks a forward begins with, and where each
// state goes. What the blocks hold is the memory's (block_memory.hpp). (The rules were worked out
// from vLLM 0.33: its GDN attention metadata, causal_conv1d_update, and the Mamba state copies of
// its model runner.)
//
// With drafts a state group has a running state in column `current` and a scratch state after it
// for each draft: the state after the row's token i goes to column current + i. The conv rows of
// all of them lie in column `current` alone. `accepted`, a number of the request's row in the
// batch, says at which of these states the next step begins.
//
//   before the forward   block copies (copy-on-write) and the tokens that another server has sent;
//                        then, where the running column changes, the state at column previous +
//                        accepted - 1 goes to the new one, the conv rows shifted by accepted - 1,
//                        and accepted becomes 1
//   forward              a row that verifies drafts, or computes one token after the prompt,
//                        begins at state `accepted - 1` and stores every state; any other row
//                        begins at column `current` and stores its last state there
//   after the forward    accepted is what the verification kept; where a block end was passed, the
//                        state of that end goes to the block's column
//
// With replay rings a block of states has one. A decode step may read the state and the ring's
// first entries, write its token behind them, and leave the state as it is (RingStep; vllm.md, rule
// 52).
//
// In "all" mode a forward stores the state of every block end that it passes in that block's column
// and begins with the one in the column of the token before; nothing is moved.
//
// Vocabulary: a batch row is a place; it is used by one request after another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache_sim/model/block_memory.hpp"
#include "cache_sim/policies/vllm/block_manager.hpp"

namespace lockstep::cache_sim {

/// Of a row that begins with a state and what is pending in its block's ring.
struct RingStep {
  std::int64_t pending = 0;  ///< entries that it reads
  bool appends = false;      ///< it adds its token to them, and writes no state
};

/// One request's part of a step.
struct WorkerRow {
  std::uint32_t place;
  const BlockRequest* request;
  Name name;
  Tokens tokens;       ///< all that are known, then the drafts
  std::int64_t start;  ///< the step computes tokens start … end - 1
  std::int64_t end;
  std::int64_t drafts;        ///< the last ones of these
  std::int64_t external = 0;  ///< tokens before `start` that another server has sent
  RingStep ring{};
};

class AlignWorker {
 public:
  /// Rules and memory must outlive the worker.
  AlignWorker(const BlockRules& rules, BlockMemory& memory);

  /// A request comes into the batch at this place.
  void admit(std::uint32_t place);
  /// Notes that these keys stand for the prefixes of `tokens`, one per hash block.
  void learn(const std::vector<KeyId>& keys, const Tokens& tokens) { memory_.learn(keys, tokens); }
  /// Runs the step's copies and rows. The content of the rows' blocks is complete then.
  void forward(const std::vector<BlockCopy>& copies, std::span<const WorkerRow> rows);
  /// The KV of a row's `external` tokens, and the state after the last one, have come.
  void receive(const WorkerRow& row);
  /// Of the verification in the place's last row, `kept` tokens stay: accepted drafts and one more.
  void accept(std::uint32_t place, const BlockRequest& request, std::int64_t kept);

 private:
  struct Seat {
    std::int64_t running = kNone;  // column of the running state in the last step
    std::int64_t ring = kNone;     // and in the step before it
    std::int64_t accepted = 1;
    bool verifies = false;     // in the last step
    bool settled = false;      // at least its first token
    std::int64_t decided = 0;  // of the last row: the tokens that are no drafts, with those before
    std::vector<std::vector<BlockId>> columns;  // by state group: each column's first block
  };
  static constexpr std::int64_t kNone = -1;

  void copy_blocks(const std::vector<BlockCopy>& copies, bool is_late);
  bool has_running_states() const { return !state_groups_.empty() && rules_.splitter_block != 0; }
  void prepare(const WorkerRow& row);
  void run(const WorkerRow& row);
  void load(const WorkerRow& row);
  void change_column(const WorkerRow& row);
  void add_running_states(const WorkerRow& row);
  void add_all_states(const WorkerRow& row);
  bool is_verification(const WorkerRow& row, bool is_new) const;
  void clear();
  void add_kv(const WorkerRow& row, std::uint32_t group);
  BlockStates& add_states(const WorkerRow& row, std::uint32_t group, std::int64_t column,
                          std::int64_t offset);
  BlockRow told(const WorkerRow& row, bool verifies) const;
  void store_chunk(const WorkerRow& row, std::int64_t column, BlockStates& states) const;
  void settle(Seat& seat, const BlockRequest& request, std::int64_t kept);
  void note_columns(Seat& seat, const BlockRequest& request) const;
  void move_state(const Seat& seat, const BlockRequest& request, std::int64_t from, std::int64_t to,
                  std::int64_t bias);
  void check_tables(const BlockRequest& request);

  const BlockRules& rules_;
  BlockMemory& memory_;
  std::vector<std::uint32_t> state_groups_, kv_groups_;
  std::vector<Seat> seats_;          // by place
  std::vector<BlockKv> kv_;          // of the row that is told
  std::vector<BlockStates> states_;  // of that row, the first states_count_ of them
  std::size_t states_count_ = 0;
};

}  // namespace lockstep::cache_sim
