// Slot caches in the manner of TensorRT-Edge-LLM: policies `edge-llm` and `edge-llm-v0`. A batch of
// rows, each with static room for KV and a state per recurrent layer, which requests are given and
// nobody shares. Rules: reference/caches/edge_llm.md.
//
// State slots, of each recurrent layer in turn: one per resident slot, one to move rows through, 16
// snapshots per row, and one per captured prefix. KV slots, of each attention layer in turn: rows,
// the row to move through, captured prefixes. They are in use from the beginning, as memory that is
// allocated once.
#pragma once

#include <string>
#include <vector>

#include "cache_sim/policies/edge_llm/hybrid_layers.hpp"
#include "cache_sim/policies/request_checks.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// Numbers of slots; slots of layers follow each other.
struct EdgeLlmLayout {
  static constexpr std::uint32_t kMostVerified = 16;  ///< tokens of a verification

  std::uint32_t rows, row_size, captures;
  std::uint32_t recurrent_layers, attention_layers;

  static EdgeLlmLayout of(const Config& config, const HybridLayers& layers);

  std::uint32_t scratch() const { return rows; }  ///< behind the resident slots
  std::uint32_t states_per_layer() const { return rows + 1 + rows * kMostVerified + captures; }
  std::uint32_t rows_per_layer() const { return rows + 1 + captures; }
  std::int64_t states() const { return std::int64_t{recurrent_layers} * states_per_layer(); }
  std::int64_t kv() const { return std::int64_t{attention_layers} * rows_per_layer() * row_size; }
  StateSlot state(std::uint32_t layer, std::uint32_t resident) const {
    return {1 + layer * states_per_layer() + resident};
  }
  StateSlot snapshot(std::uint32_t layer, std::uint32_t row, std::uint32_t token) const {
    return state(layer, rows + 1 + row * kMostVerified + token);
  }
  StateSlot captured_state(std::uint32_t layer, std::uint32_t place) const {
    return state(layer, rows + 1 + rows * kMostVerified + place);
  }
  /// The first KV slot of a row; captured prefixes are the rows behind scratch().
  std::uint32_t kv_row(std::uint32_t layer, std::uint32_t row) const {
    return 1 + (layer * rows_per_layer() + row) * row_size;
  }
  std::uint32_t captured_row(std::uint32_t place) const { return rows + 1 + place; }
};

/// A running request.
struct EdgeLlmRequest {
  Name id;
  Name salt;
  Tokens known;
  std::uint32_t computed = 0;
  Tokens drafts;               ///< of a verification that was not accepted yet
  std::uint32_t verified = 0;  ///< its tokens
};

/// An execution row.
struct EdgeLlmRow {
  Name request;            ///< none: a hole
  std::uint32_t slot = 0;  ///< its state index: where its KV and states are
};

struct EdgeLlmCaptured {
  Name name;
  Name salt;
  Tokens tokens;
};

class EdgeLlmPolicy final : public Subject {
 public:
  /// `moves_rows`: as version 0.5.
  EdgeLlmPolicy(const SubjectOptions& options, HybridLayers layers, bool moves_rows);

  Result<Reply> apply(const Operation& operation) override;
  bool has_tree_verbs() const override { return false; }
  std::optional<Snapshot> snapshot() const override;

  // What an auditor sees.
  const EdgeLlmLayout& layout() const { return layout_; }
  const std::vector<EdgeLlmRow>& rows() const { return rows_; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  const std::vector<EdgeLlmCaptured>& captured() const { return captured_; }
  const std::vector<EdgeLlmRequest>& requests() const { return requests_; }

 private:
  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(EdgeLlmRequest& request, const Operation& operation);
  Result<Reply> accept(EdgeLlmRequest& request, const Operation& operation);
  Result<Reply> capture(const EdgeLlmRequest& request, const Operation& operation);
  Result<Reply> restore(EdgeLlmRequest& request, const Operation& operation);
  Result<Reply> compact(const Operation& operation);
  Reply check() const;

  EdgeLlmRequest* find(Name id);
  std::uint32_t row_of(const EdgeLlmRequest& request) const;
  std::uint32_t slot_of(std::uint32_t row) const;
  std::uint32_t local_of(std::size_t absolute) const;
  Reply resumed_at(std::uint32_t row, std::int64_t size) const;
  void clear_slot(std::uint32_t slot);
  void chunk(const EdgeLlmRequest& request, std::uint32_t row, std::uint32_t n);
  void verify(std::uint32_t row, const Tokens& tokens, std::uint32_t n);
  void commit(const EdgeLlmRequest& request, std::uint32_t row, std::uint32_t accepted);
  void write_kv(std::uint32_t slot, const Tokens& tokens, std::uint32_t begin, std::uint32_t end);
  void copy_kv(std::uint32_t from, std::uint32_t to, std::uint32_t size);
  void move_row(std::uint32_t from, std::uint32_t to, std::int64_t size);
  void move_rows(const std::vector<std::int64_t>& mapping, std::vector<std::int64_t> lengths);
  std::vector<RowUse> row_uses();
  void end(EdgeLlmRequest& request);
  bool planted(const Defect& defect) const { return defect_ == &defect; }
  KvSlots kv_slots(std::uint32_t layer, std::uint32_t row, std::uint32_t begin, std::uint32_t end,
                   std::vector<std::uint32_t>& scratch) const;
  template <class Do>
  void each(LayerKind kind, Do act) const;

  const Config config_;
  const Defect* const defect_;
  LayerState& layers_;
  const HybridLayers hybrid_;
  const EdgeLlmLayout layout_;
  const bool moves_rows_;
  std::vector<EdgeLlmRow> rows_;       ///< the batch
  std::vector<std::int64_t> lengths_;  ///< by row: the tensor that forwards read
  std::vector<bool> slot_taken_;
  std::vector<EdgeLlmRequest> requests_;
  std::vector<EdgeLlmCaptured> captured_;
  std::uint32_t longest_chunk_ = 0;  ///< of the batch that the next step runs
  std::vector<std::uint32_t> scratch_, more_scratch_;
};

}  // namespace lockstep::cache_sim
