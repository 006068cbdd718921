// The memory of vLLM's blocks at label fidelity: a block holds no numbers but a record of the
// tokens that its numbers would stand for. Everything that a forward reads, and the content of
// every block that has a key, is compared with the tokens that it should stand for.
//
//   KV             of each token a fingerprint of the prefix that ends with it
//   recurrent      the digest of all tokens that went into the state, and their number
//   conv           W - 1 + drafts rows, each the fingerprint of the prefix that ends with its token
//   ring           of each entry the label of the prefix that ends with its token
//
// A block belongs to one group: another one that writes to it destroys what it held.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/model/label_state.hpp"
#include "cache_sim/policies/vllm/block_pool.hpp"
#include "cache_sim/policies/vllm/tiers/disk_tier.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/zeroed_array.hpp"

namespace lockstep::cache_sim {

class LabelBlocks final : public BlockMemory {
 public:
  /// Rules and pool must outlive the memory, and so must `numbers`, which are asked about a block
  /// whose label is wrong; null: there are none.
  LabelBlocks(const BlockRules& rules, const BlockPool& pool, NumberedBlocks* numbers = nullptr);

  void admit(std::uint32_t place) override;
  void learn(const std::vector<KeyId>& keys, const Tokens& tokens) override;
  void lose(BlockId block) override;
  void copy(const BlockCopy& copy) override;
  void receive(const BlockRow& row) override;
  void forward(const BlockRow& row) override;
  void move(const BlockMove& move) override;
  /// Skips a block if neither its content nor its keys have changed since the last comparison.
  void check(BlockId block) override;
  /// Compares every block that has a key. Every scheduled row must have run.
  void check_all();

  /// A copy between tiers is in flight: until it lands, its target holds nothing and may not be
  /// written, nor may a state's source or the first `places` places of a source with KV.
  void queue_copy(const BlockCopy& copy, std::int64_t places);
  /// It reads its source and writes its target.
  void land_copy(const BlockCopy& copy);
  /// The same of a copy from the disk, which lands with these labels; null: it has failed.
  void await(BlockId block, std::uint32_t group);
  void arrive(BlockId block, const BlockContent* content);
  /// And of a copy to the disk: it reads the block when it is released.
  void guard(BlockId block, std::int64_t places);
  BlockContent release(BlockId block);
  /// Compares what a block of the CPU tier holds with the first `tokens` tokens of its key.
  void check_chunk(BlockId block, std::uint32_t group, KeyId key, std::int64_t tokens);
  /// The same of a block on the disk.
  void check_content(const BlockContent& content, std::uint32_t group, KeyId key,
                     std::int64_t tokens);

  /// The number of tokens that a block's state has seen; 0 where it holds none of that group.
  std::int64_t size_of_state(BlockId block, std::uint32_t group) const {
    return recurrent_of(block, group).size;
  }
  Findings& findings() { return findings_; }

 private:
  static constexpr std::int64_t kConvWidth = 4;

  /// A block and the number of its writings, so that unchanged content is compared once.
  struct Seen {
    BlockId block = kNullBlock;
    std::uint32_t written = 0;
    bool operator==(const Seen&) const = default;
  };
  struct Places {
    std::uint32_t first = 0, end = 0;
  };
  /// The same of a block's keys.
  struct SeenKeys {
    std::uint32_t written = 0;
    std::uint32_t group = 0, tokens = 0, alias = 0;
    KeyId key = 0;
    bool is_keyed = false;
    bool operator==(const SeenKeys&) const = default;
  };

  void report(const std::string& text, const std::string& expected, const std::string& actual,
              FindingKind kind = FindingKind::wrong_state_prefix);
  void read(BlockId block);
  void run_kv(const BlockRow& row, const BlockKv& kv);
  void write_kv(const BlockKv& kv, std::int64_t begin, std::int64_t end);
  void read_column(const BlockRow& row, const BlockKv& kv, std::int64_t column);
  std::int64_t right_kv(BlockId block, std::uint32_t group, std::int64_t place);
  Label begin(const BlockRow& row, const BlockStates& states);
  Label read_ring(const BlockRow& row, const BlockStates& states, const Label& begun);
  void append(const BlockRow& row, const BlockStates& states);
  void verify(const BlockRow& row, const BlockStates& states, Label state);
  void store(const BlockRow& row, std::uint32_t group, const BlockStates::Store& store,
             const Label& begun);
  /// The block is written for that group, from `place` on.
  void write(BlockId block, std::uint32_t group, std::int64_t place = 0) {
    ++written_[block];
    if (awaited_[block] > 0 || place < guarded_[block]) [[unlikely]]
      report_write(block);
    if (group_[block] != group) [[unlikely]]
      destroy(block, group);
  }
  void report_write(BlockId block);
  void destroy(BlockId block, std::uint32_t group);
  void cover(BlockId block, std::uint32_t first, std::uint32_t end);
  /// Whether the block has the KV of that group at these places.
  bool covers(BlockId block, std::uint32_t group, std::int64_t first, std::int64_t end) const {
    const Places& places = written_places_[block];
    return group_[block] == group && places.first <= first && end <= places.end;
  }
  Label recurrent_of(BlockId block, std::uint32_t group) const {
    return group_[block] == group ? recurrent_[block] : Label{.poisoned = true};
  }
  void store_conv(BlockId block, std::int64_t size);
  void check_block(BlockId block);
  void check_entry(const BlockPool::Entry& entry);
  void check_held(const BlockPool::Entry& entry, const Tokens& prefix);

  std::uint64_t* kv_of(BlockId block) { return &kv_[block * kv_size_]; }
  std::uint64_t* conv_of(BlockId block) { return &conv_[block * conv_size_]; }
  /// The fingerprint of the prefix that ends with token `index`; 0 for a negative one. Known for
  /// the tokens of the last take_fingerprints().
  std::uint64_t fingerprint_at(std::int64_t index) const {
    return index < 0 ? 0 : fingerprints_[static_cast<std::size_t>(index - fingerprints_begin_)];
  }
  void take_fingerprints(const Tokens& tokens, std::int64_t begin, std::int64_t end);

  const BlockRules& rules_;
  const BlockPool& pool_;
  NumberedBlocks* numbers_;
  std::size_t kv_size_ = 0, conv_size_ = 0;  // of a block
  ZeroedArray<std::uint64_t> kv_, conv_;
  std::vector<Label> recurrent_;           // by block
  std::vector<std::vector<Label>> rings_;  // by block
  std::vector<std::uint32_t> written_;     // by block: how often
  std::vector<std::uint32_t> group_;       // by block: for which group, last
  std::vector<std::uint32_t> awaited_;     // by block: copies in flight that write it
  std::vector<std::uint32_t> readers_;     // by block: copies in flight that read it
  std::vector<std::int64_t> guarded_;      // by block: places that these read
  std::vector<Places> written_places_;     // by block: of KV, for that group
  std::vector<SeenKeys> compared_keys_;    // by block
  // By place, by group, by column: KV that was compared when it was read.
  std::vector<std::vector<std::vector<Seen>>> read_;
  std::vector<Tokens> of_key_;
  Findings findings_;
  std::vector<std::uint64_t> fingerprints_, prefixes_, rows_;  // scratch
  std::int64_t fingerprints_begin_ = 0;
};

/// The blocks as labels and as numbers: each call goes to both, so that a finding can say both that
/// a block stands for another prefix and by how much that moves an output.
class LabelledBlocks final : public BlockMemory {
 public:
  /// Both outlive it.
  LabelledBlocks(LabelBlocks& labels, NumberedBlocks& numbers)
      : labels_(labels), numbers_(numbers) {}

  void admit(std::uint32_t place) override { numbers_.admit(place), labels_.admit(place); }
  void learn(const std::vector<KeyId>& keys, const Tokens& tokens) override {
    numbers_.learn(keys, tokens), labels_.learn(keys, tokens);
  }
  void lose(BlockId block) override { numbers_.lose(block), labels_.lose(block); }
  void copy(const BlockCopy& copy) override { numbers_.copy(copy), labels_.copy(copy); }
  void receive(const BlockRow& row) override { numbers_.receive(row), labels_.receive(row); }
  void forward(const BlockRow& row) override { numbers_.forward(row), labels_.forward(row); }
  void launch() override { numbers_.launch(), labels_.launch(); }
  void move(const BlockMove& move) override { numbers_.move(move), labels_.move(move); }
  void check(BlockId block) override { numbers_.check(block), labels_.check(block); }

 private:
  LabelBlocks& labels_;
  NumberedBlocks& numbers_;
};

}  // namespace lockstep::cache_sim
