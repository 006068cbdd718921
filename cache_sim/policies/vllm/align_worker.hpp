// vLLM's worker, which fills the blocks that the block manager gives out ("align" mode, with and
// without speculative decoding), at label fidelity: a block holds no numbers but a record of the
// tokens that its numbers would stand for. Everything that a forward reads, and the content of
// every block that has a key, is compared with the tokens that it should stand for. (The rules were
// worked out from vLLM 0.33: its GDN attention metadata, causal_conv1d_update, and the Mamba state
// copies of its model runner.)
//
//   KV             of each token a fingerprint of the prefix that ends with it
//   recurrent      the digest of all tokens that went into the state, and their number
//   conv           W - 1 + drafts rows, each the fingerprint of the prefix that ends with its token
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
// In "all" mode a forward stores the state of every block end that it passes in that block's column
// and begins with the one in the column of the token before; nothing is moved.
//
// Vocabulary: a batch row is a place; it is used by one request after another.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/policies/vllm/block_manager.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/zeroed_array.hpp"

namespace lockstep::cache_sim {

/// One request's part of a step.
struct WorkerRow {
  std::uint32_t place;
  const BlockRequest* request;
  Tokens tokens;       ///< all that are known, then the drafts
  std::int64_t start;  ///< the step computes tokens start … end - 1
  std::int64_t end;
  std::int64_t drafts;        ///< the last ones of these
  std::int64_t external = 0;  ///< tokens before `start` that another server has sent
};

class AlignWorker {
 public:
  static constexpr std::int64_t kConvWidth = 4;

  struct Checks {
    std::int64_t hashed = 0;  ///< keys of blocks, compared with what the block holds
    std::int64_t states = 0;  ///< states that a forward began with
    std::int64_t kv = 0;      ///< tokens whose KV a forward read
  };

  /// Rules and pool must outlive the worker.
  AlignWorker(const BlockRules& rules, const BlockPool& pool);

  /// A request comes into the batch at this place.
  void admit(std::uint32_t place);
  /// Notes that these keys stand for the prefixes of `tokens`, one per hash block.
  void learn(const std::vector<KeyId>& keys, const Tokens& tokens);
  /// Runs the step's copies and rows. Compares everything that they read, then the content of the
  /// rows' blocks.
  void forward(const std::vector<BlockCopy>& copies, std::span<const WorkerRow> rows);
  /// The KV of a row's `external` tokens, and the state after the last one, have come.
  void receive(const WorkerRow& row);
  /// Of the verification in the place's last row, `kept` tokens stay: accepted drafts and one more.
  void accept(std::uint32_t place, const BlockRequest& request, std::int64_t kept);
  /// Compares every block that has a key. Every scheduled row must have run.
  void check_all();

  const Checks& checks() const { return checks_; }
  Findings& findings() { return findings_; }

 private:
  /// A block and the number of its writings, so that unchanged content is compared once.
  struct Seen {
    BlockId block = kNullBlock;
    std::uint32_t written = 0;
    bool operator==(const Seen&) const = default;
  };
  /// The same of a block's keys.
  struct SeenKeys {
    std::uint32_t written = 0;
    std::uint32_t group = 0, tokens = 0, alias = 0;
    KeyId key = 0;
    bool is_keyed = false;
    bool operator==(const SeenKeys&) const = default;
  };
  struct Seat {
    std::int64_t running = kNone;  // column of the running state in the last step
    std::int64_t accepted = 1;
    std::int64_t decided = 0;  // of the last row: the tokens that are no drafts, with those before
    std::vector<std::vector<Seen>> read;  // by group, by column: KV that was compared when read
    std::vector<std::vector<BlockId>> columns;  // by state group: each column's first block
  };
  static constexpr std::int64_t kNone = -1;

  void report(const std::string& text, const std::string& expected, const std::string& actual);

  void copy_blocks(const std::vector<BlockCopy>& copies, bool is_late);
  void copy_block(const BlockCopy& copy);
  void run(const WorkerRow& row);
  void load(const WorkerRow& row);
  void run_kv(const WorkerRow& row);
  void read_column(const WorkerRow& row, std::uint32_t group, std::int64_t column,
                   std::int64_t first);
  void run_states(const WorkerRow& row);
  void run_all_states(const WorkerRow& row);
  bool is_verification(const WorkerRow& row, bool is_new) const;
  void begin(const WorkerRow& row, const BlockTable& table, std::int64_t column,
             std::int64_t offset);
  void verify(const WorkerRow& row, const BlockTable& table, std::int64_t column,
              std::int64_t offset);
  void compute(const WorkerRow& row, const BlockTable& table, std::int64_t column);
  void store_prefix(const WorkerRow& row, BlockId block, std::int64_t tokens, const Label& state);
  void settle(Seat& seat, const BlockRequest& request, std::int64_t kept);
  void note_columns(Seat& seat, const BlockRequest& request) const;
  void move_state(const Seat& seat, const BlockRequest& request, std::int64_t from, std::int64_t to,
                  std::int64_t bias);
  void check_tables(const BlockRequest& request);
  void check_block(BlockId block);
  void check_block_once(BlockId block);
  void check_entry(const BlockPool::Entry& entry);

  static BlockId block_at(const std::vector<BlockId>& columns, std::int64_t column);
  static BlockId column_of(const BlockTable& table, std::int64_t column);
  std::uint64_t* kv_of(BlockId block) { return &kv_[block * kv_size_]; }
  std::uint64_t* conv_of(BlockId block) { return &conv_[block * conv_size_]; }
  /// The fingerprint of the prefix that ends with token `index`; 0 for a negative one. Known for
  /// the row's tokens and those that its conv window needs.
  std::uint64_t fingerprint_at(std::int64_t index) const {
    return index < 0 ? 0 : fingerprints_[static_cast<std::size_t>(index - fingerprints_begin_)];
  }
  void take_fingerprints(const WorkerRow& row);

  const BlockRules& rules_;
  const BlockPool& pool_;
  std::vector<std::uint32_t> state_groups_, kv_groups_;
  std::size_t kv_size_ = 0, conv_size_ = 0;  // of a block
  ZeroedArray<std::uint64_t> kv_, conv_;
  std::vector<Label> recurrent_;         // by block
  std::vector<std::uint32_t> written_;   // by block: how often
  std::vector<SeenKeys> compared_keys_;  // by block
  std::vector<Seat> seats_;              // by place
  std::vector<Tokens> of_key_;
  Checks checks_;
  Findings findings_;
  std::vector<std::uint64_t> fingerprints_, prefixes_, rows_;  // scratch
  std::int64_t fingerprints_begin_ = 0;
  Label loaded_;
};

}  // namespace lockstep::cache_sim
