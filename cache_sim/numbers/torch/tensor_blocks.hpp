// The memory of a block cache with the tensors of a hybrid model in its blocks: the rows of a step
// run together through the operators, over the blocks that the policy names. Each row's logits, and
// the states from which it starts, are compared bit by bit with those of the same operators over
// the row alone (tensor_truth.hpp).
//
// A block is laid out as in NumberBlocks, and each group has its own view of it. KV is written and
// read in place: the block's places are slots of the layer's pool. States are copied into a pool of
// their own before the batch, and into the blocks that the policy names behind it.
//
// Blocks that nobody has written, the null block, and blocks whose content is lost hold NaN; in
// float32 its payload is the block's number plus one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/numbers/open_blocks.hpp"
#include "cache_sim/numbers/placed_model.hpp"
#include "cache_sim/numbers/torch/tensor_batch.hpp"
#include "cache_sim/numbers/torch/tensor_truth.hpp"

namespace lockstep::cache_sim {

class TensorBlocks final : public NumberedBlocks {
 public:
  /// `truth` is that of the placed model.
  TensorBlocks(std::shared_ptr<TensorTruth> truth, const PlacedModel& placed,
               const BlockGroups& pool, bool beside_labels = true);

  bool is_beside_labels() const override { return beside_labels_; }
  void lose(BlockId block) override;
  void copy(const BlockCopy& copy) override;
  void receive(const BlockRow& row) override;
  /// As NumberBlocks'.
  void forward(const BlockRow& row) override;
  void launch() override { run(); }
  void move(const BlockMove& move) override;
  std::string said_of(BlockId block, std::uint32_t group, const Tokens& prefix) override;
  Findings drain() override;

 private:
  /// A unit that keeps something: where it lies in a block, and its parts of the model.
  struct Layer {
    std::int64_t unit;
    std::uint32_t group;
    std::int64_t width;   ///< tokens that its convolution sees
    std::int64_t at = 0;  ///< bytes from a block's begin
    std::size_t kv = 0, recurrent = 0, conv = 0;

    bool has_state() const { return width > 0; }
    std::string text() const { return "unit " + std::to_string(unit); }
  };
  struct Layout {
    std::vector<Layer> layers{};   // in the order of units
    std::int64_t block_bytes = 0;  // a multiple of the bytes of each layer's KV slot
  };
  /// Histories of what a group has left in a block.
  struct Held {
    std::uint32_t group = PlacedModel::kNowhere;
    History recurrent = kNoHistory;
    std::vector<History> windows{};  ///< of the convolution, by the row at which each begins
    std::vector<History> kv{};       ///< by place
  };
  /// A row's KV in one group. Tokens of the row that have no block lie in spare ones, behind the
  /// pool's.
  struct OwnKv {
    std::uint32_t group;
    std::int64_t size, first;
    std::vector<BlockId> blocks;  // by place of the text
  };
  struct OpenRow {
    Name request;
    Tokens text;
    TensorRow row;
    std::vector<OwnKv> kv;
    std::vector<BlockStates> states;
    std::vector<std::int64_t> sizes;  // after which it stores a state
    RowStart start;
    const RowTruth* truth = nullptr;
    std::string wrong_state;  ///< the part from which it started and that differs
  };

  static Layout laid_out(const TensorModel& model, const PlacedModel& placed,
                         const BlockGroups& pool);
  void make_room(std::int64_t blocks, std::int64_t states);
  const PoolPart& part(std::size_t index) const { return model_.parts()[index]; }
  std::uint32_t kv_slot(BlockId number, const Layer& layer, std::int64_t place) const;
  at::Tensor kv_in(BlockId number, const Layer& layer, std::int64_t place) const;
  at::Tensor recurrent_in(BlockId number, const Layer& layer) const;
  at::Tensor conv_rows_in(BlockId number, const Layer& layer) const;
  Held& hold(BlockId number, std::uint32_t group);
  History held_kv(BlockId number, std::uint32_t group, std::int64_t place) const;
  /// Of the recurrent part of one block, and of the window that begins at a row of the other.
  std::pair<History, History> held_states(BlockId recurrent, BlockId conv, std::uint32_t group,
                                          std::int64_t conv_begin) const;
  void leave_kv(BlockId number, std::uint32_t group, std::int64_t place, History history);
  /// Stores a state in a block, its window from the first row on: numbers(part) are its numbers.
  template <class Numbers>
  void store(std::uint32_t group, BlockId target, History history, const Numbers& numbers);
  void store_verified(const OpenRow& open, const BlockStates& states,
                      const std::vector<at::Tensor>& states_after);
  void place_kv(const BlockRow& row, OpenRow& open);
  void run();
  void begin(OpenRow& open);
  void end(const OpenRow& open, const std::vector<at::Tensor>& states_after);
  void compare(const OpenRow& open, std::span<const float> logits);
  std::string wrong_kv(const OpenRow& open) const;

  std::shared_ptr<TensorTruth> truth_;
  const TensorModel& model_;
  bool beside_labels_;
  std::vector<GroupSpec> groups_;
  std::int64_t drafts_;
  Layout layout_;
  TensorBatches batches_;
  std::shared_ptr<TensorMemory> memory_;
  std::vector<Held> held_;  // by block
  OpenBlocks open_blocks_;
  std::vector<OpenRow> rows_;
  std::int64_t spare_ = 0;  // blocks behind the pool's, for KV of a batch that has none
  Findings findings_;
};

}  // namespace lockstep::cache_sim
