// Slot caches in the manner of TensorRT-Edge-LLM: policies `edge-llm` and `edge-llm-v0`. Each
// request has a row of a batch to itself, with static room for KV and a state per recurrent layer.
// Rules: reference/caches/edge_llm.md.
//
// Each recurrent layer has these state slots: one per resident slot, a spare one for moving rows,
// 16 snapshots per row, and one per captured prefix. Each attention layer has KV for the rows, for
// a spare row, and for the captured prefixes. All slots are allocated at the start.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/policies/edge_llm/hybrid_layers.hpp"
#include "cache_sim/policies/row_policy.hpp"

namespace lockstep::cache_sim {

/// Maps rows, snapshots and captured prefixes to slot numbers. The slots of a layer are
/// consecutive.
struct EdgeLlmLayout {
  static constexpr std::uint32_t kMostVerified = 16;  ///< tokens of a verification

  std::uint32_t rows, row_size, captures;
  std::uint32_t recurrent_layers, attention_layers;

  static EdgeLlmLayout of(const Config& config, const HybridLayers& layers);

  std::uint32_t scratch() const { return rows; }  ///< after the resident slots
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
  /// The first KV slot of a row; captured prefixes are the rows after scratch().
  std::uint32_t kv_row(std::uint32_t layer, std::uint32_t row) const {
    return 1 + (layer * rows_per_layer() + row) * row_size;
  }
  std::uint32_t captured_row(std::uint32_t place) const { return rows + 1 + place; }
};

/// The rules: where version 0.5 differs, and where a planted defect breaks one
/// (edge_llm_defects.cpp).
struct EdgeLlmRules {
  bool moves_rows = false;  ///< version 0.5: compaction moves a row's KV and states
  // Compaction.
  bool compacts_lengths_first = false;
  bool empty_row_keeps_length = false;
  bool ignores_permutations = false;
  bool move_takes_conv = true;
  bool takes_row_for_slot = false;
  // New requests.
  bool resets_next_length = false;
  bool clears_length_of_slot = false;
  bool clears_slots = true;
  // Forwards.
  bool takes_padding = false;
  bool resumes_conv = true;
  bool routes_by_absolute_index = false;
  // Speculation.
  bool skips_full_acceptance = false;
  bool commits_conv = true;
  bool verification_writes = false;
  bool scatters_next_snapshot = false;
  // Captured prefixes.
  bool restores_conv = true;
  bool restores_last_kv = true;
};

class EdgeLlmPolicy final : public RowPolicy {
 public:
  EdgeLlmPolicy(const SubjectOptions& options, HybridLayers layers, const EdgeLlmRules& variant);

  // For auditors.
  const EdgeLlmLayout& layout() const { return layout_; }
  /// By row, the index at which its KV and states lie.
  const std::vector<std::uint32_t>& slots() const { return slots_; }

 private:
  void begin_step() override { longest_chunk_ = 0; }
  Reply begin_row(std::uint32_t row) override;
  void end_row(std::uint32_t row) override;
  void run(std::uint32_t row, const Tokens& tokens, std::uint32_t n, std::uint32_t drafts) override;
  void keep(const RowRequest& request, std::uint32_t row, std::uint32_t accepted) override;
  void save(std::uint32_t row, std::uint32_t place, std::uint32_t size) override;
  Reply load(std::uint32_t place, std::uint32_t row, std::uint32_t size) override;
  std::vector<std::uint32_t> reorder(const std::vector<std::int64_t>& mapping,
                                     std::uint32_t kept) override;

  std::uint32_t slot_of(std::uint32_t row) const;
  std::uint32_t local_of(std::size_t absolute) const;
  Reply resumed_at(std::uint32_t row, std::int64_t size) const;
  void clear_slot(std::uint32_t slot);
  void chunk(std::uint32_t row, const Tokens& tokens, std::uint32_t n);
  void verify(std::uint32_t row, const Tokens& tokens, std::uint32_t n, std::uint32_t drafts);
  ForwardRow forward_of(std::uint32_t row, const Tokens& tokens, std::uint32_t n);
  void commit(const RowRequest& request, std::uint32_t row, std::uint32_t accepted);
  void copy_kv(std::uint32_t from, std::uint32_t to, std::uint32_t size);
  void move_row(std::uint32_t from, std::uint32_t to, std::uint32_t size);
  void move_rows(const std::vector<std::int64_t>& mapping, std::vector<std::uint32_t> lengths);
  KvSlots kv_slots(std::uint32_t layer, std::uint32_t row, std::uint32_t size) const;
  template <class Do>
  void each(LayerKind kind, Do act) const;

  const HybridLayers hybrid_;
  const EdgeLlmLayout layout_;
  const EdgeLlmRules rules_;
  std::vector<std::uint32_t> slots_;  ///< by row
  std::vector<bool> slot_taken_;
  std::uint32_t longest_chunk_ = 0;                      ///< of the batch that the next step runs
  std::shared_ptr<const std::uint32_t[]> kv_slots_;      ///< all; none where no KV is kept
  std::vector<std::uint32_t> state_layers_, kv_layers_;  ///< distances, as a ForwardRow has them
  KvRun kv_;                                             ///< of the row that is told
  std::vector<StateTake> takes_;                         ///< of that row
};

}  // namespace lockstep::cache_sim
