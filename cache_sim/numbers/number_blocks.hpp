// The memory of a block cache with the numbers of a hybrid model in its blocks: each row of a step
// is run over the blocks that the policy names, and its logits and the states from which it starts
// are compared, bit by bit, with those of a run without a cache (truth.hpp).
//
// A block is an area of doubles. Each group has its own view of it, so what a block held for one
// group shows where another one reads before it writes:
//
//   KV of a group      layer by layer, [tokens of a block, KV of the layer]
//   states of a group  layer by layer, the recurrent part, then W - 1 + drafts conv rows,
//                      [rows, channels]; a layer begins at the same place in every view
//
// Blocks that nobody has written, the null block, and blocks whose content is lost hold a quiet NaN
// whose payload is the block's number.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/numbers/open_blocks.hpp"
#include "cache_sim/numbers/placed_model.hpp"
#include "cache_sim/numbers/truth.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/zeroed_array.hpp"

namespace lockstep::cache_sim {

class NumberBlocks final : public NumberedBlocks {
 public:
  /// `truth` is that of the placed model. `beside_labels`: see NumberedBlocks.
  NumberBlocks(std::shared_ptr<Truth> truth, const PlacedModel& placed, const BlockGroups& pool,
               bool beside_labels = true);

  bool is_beside_labels() const override { return beside_labels_; }
  void lose(BlockId block) override;
  void copy(const BlockCopy& copy) override;
  void receive(const BlockRow& row) override;
  /// Rows run together at launch(). A row that writes what an earlier row of its batch reads or
  /// writes, or begins with a state that such a row stores, runs after it.
  void forward(const BlockRow& row) override;
  void launch() override { run(); }
  void move(const BlockMove& move) override;
  std::string said_of(BlockId block, std::uint32_t group, const Tokens& prefix) override;
  Findings drain() override;

 private:
  /// A unit that keeps something, and its parts in the model's slots.
  struct Layer {
    std::int64_t unit;
    std::uint32_t group;
    std::size_t width;   ///< tokens that its convolution sees
    std::size_t at = 0;  ///< doubles from a block's begin
    reference::HybridPart kv{}, recurrent{}, conv{};

    bool has_state() const { return width > 0; }
    std::size_t channels() const { return conv.size / (width - 1); }
  };
  /// A row that has been told and not run. Its vectors are kept from batch to batch.
  struct OpenRow {
    Name request;
    Tokens text;
    std::uint32_t begin, end, drafts;
    bool verifies;
    std::vector<Token> tokens;
    std::vector<BlockStates> states;      // by group of states
    std::vector<std::int64_t> sizes;      // after which it stores a state; not of a verification
    std::vector<double*> kv_places;       // [layers with KV, end]
    std::vector<std::uint32_t> kv_first;  // by layer with KV: the first token that it reads
    std::vector<double> nowhere;          // KV of the row's tokens that have no block
    std::vector<double> before;           // the state from which it started
    std::vector<double> after;            // of a verification: the states after each token
  };

  std::vector<Layer> layers_of(const PlacedModel& placed) const;
  std::size_t laid_out(const BlockGroups& pool);
  std::size_t conv_rows(const Layer& layer) const { return layer.width - 1 + drafts_; }
  std::span<double> block(BlockId number);
  double* kv_in(BlockId number, const Layer& layer, std::int64_t place);
  double* conv_row(BlockId number, const Layer& layer, std::size_t row);
  void open(const BlockRow& row, OpenRow& kept);
  void place_kv(const BlockRow& row, OpenRow& kept);
  void run();
  void read_states(OpenRow& row);
  void read_state(const Layer& layer, BlockId recurrent, BlockId conv, std::size_t conv_begin,
                  std::span<double> state);
  void store_states(const OpenRow& row, std::span<const double> taken);
  void store_verified(const OpenRow& row, const BlockStates& states);
  void store(std::uint32_t group, BlockId target, std::span<const double> state);
  void store_recurrent(const Layer& layer, BlockId target, std::span<const double> state);
  void store_conv_row(const Layer& layer, BlockId target, std::size_t row,
                      std::span<const double> state, std::size_t column);
  void compare(const OpenRow& row, std::span<const double> logits);
  std::string first_difference(const OpenRow& row, Truth::Node base);

  std::shared_ptr<Truth> truth_;
  const reference::HybridModel& model_;
  bool beside_labels_;
  std::size_t drafts_;
  std::vector<GroupSpec> groups_;
  std::vector<Layer> layers_;  // in the order of units
  std::size_t block_size_;     // doubles
  std::size_t block_count_;
  ZeroedArray<double> blocks_;
  ZeroedArray<char> used_;  // by block; 0: not yet poisoned
  OpenBlocks open_blocks_;
  std::vector<OpenRow> rows_;
  std::size_t open_ = 0;               // of rows_
  std::vector<std::uint32_t> places_;  // 0, 1, 2, …
  std::vector<double> logits_;
  Findings findings_;
};

}  // namespace lockstep::cache_sim
