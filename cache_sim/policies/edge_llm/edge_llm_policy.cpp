#include "cache_sim/policies/edge_llm/edge_llm_policy.hpp"

#include <algorithm>
#include <numeric>

#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

EdgeLlmLayout EdgeLlmLayout::of(const Config& config, const HybridLayers& layers) {
  const RowPolicy::Sizes sizes = RowPolicy::sizes_of(config);
  return {.rows = sizes.rows,
          .row_size = sizes.positions,
          .captures = sizes.captures,
          .recurrent_layers = layers.count(LayerKind::mamba),
          .attention_layers = layers.count(LayerKind::attention)};
}

EdgeLlmPolicy::EdgeLlmPolicy(const SubjectOptions& options, HybridLayers layers,
                             const EdgeLlmRules& variant)
    : RowPolicy(options, true, EdgeLlmLayout::kMostVerified),
      hybrid_(std::move(layers)),
      layout_(EdgeLlmLayout::of(options.config, hybrid_)),
      rules_(with_defect(variant, options.defect)),
      slot_taken_(layout_.rows) {
  for (std::uint32_t slot = 1; slot <= layout_.states(); ++slot) {
    layers_.allocate_state({slot});
    layers_.zero_state({slot});
  }
  each(LayerKind::mamba,
       [&](std::uint32_t layer) { state_layers_.push_back(layer * layout_.states_per_layer()); });
  each(LayerKind::attention, [&](std::uint32_t layer) {
    kv_layers_.push_back(layer * layout_.rows_per_layer() * layout_.row_size);
  });
  const auto count = static_cast<std::size_t>(layers_.keeps_kv() ? layout_.kv() : 0);
  auto slots = std::make_shared_for_overwrite<std::uint32_t[]>(count);
  std::iota(slots.get(), slots.get() + count, 1);
  layers_.allocate_kv({slots.get(), count});
  kv_slots_ = std::move(slots);
}

// --- Rows, slots and layers ----------------------------------------------------------------------

/// The index at which the KV and the states of a row lie.
std::uint32_t EdgeLlmPolicy::slot_of(std::uint32_t row) const {
  return rules_.moves_rows || rules_.takes_row_for_slot ? row : slots_[row];
}

/// The layer's index among the layers of its kind.
std::uint32_t EdgeLlmPolicy::local_of(std::size_t absolute) const {
  const HybridLayers::Place& place = hybrid_.at(absolute);
  const bool wrong = rules_.routes_by_absolute_index && place.kind == LayerKind::mamba;
  return wrong ? static_cast<std::uint32_t>(absolute) : place.local;
}

/// Calls `act(local index)` for each layer of the kind, in the order of the model.
template <class Do>
void EdgeLlmPolicy::each(LayerKind kind, Do act) const {
  for (std::size_t absolute = 0; absolute < hybrid_.size(); ++absolute)
    if (hybrid_.at(absolute).kind == kind) act(local_of(absolute));
}

KvSlots EdgeLlmPolicy::kv_slots(std::uint32_t layer, std::uint32_t row, std::uint32_t size) const {
  return {kv_slots_.get() + layout_.kv_row(layer, row) - 1, size};
}

void EdgeLlmPolicy::copy_kv(std::uint32_t from, std::uint32_t to, std::uint32_t size) {
  if (!layers_.keeps_kv()) return;
  each(LayerKind::attention, [&](std::uint32_t layer) {
    layers_.copy_kv(kv_slots(layer, from, size), kv_slots(layer, to, size));
  });
}

void EdgeLlmPolicy::clear_slot(std::uint32_t slot) {
  if (!rules_.clears_slots) return;
  each(LayerKind::mamba,
       [&](std::uint32_t layer) { layers_.zero_state(layout_.state(layer, slot)); });
  if (rules_.clears_length_of_slot && slot < lengths_.size()) lengths_[slot] = 0;
}

// --- Requests ------------------------------------------------------------------------------------

Reply EdgeLlmPolicy::begin_row(std::uint32_t row) {
  slots_.resize(rows_.size());
  const auto slot = static_cast<std::uint32_t>(
      rules_.moves_rows ? row : std::ranges::find(slot_taken_, false) - slot_taken_.begin());
  if (!rules_.moves_rows) slot_taken_[slot] = true;
  slots_[row] = slot;
  lengths_[row] = 0;
  if (rules_.resets_next_length && row + 1 < lengths_.size()) lengths_[row + 1] = 0;
  clear_slot(slot);
  return resumed_at(row, 0);
}

void EdgeLlmPolicy::end_row(std::uint32_t row) {
  if (!rules_.moves_rows) slot_taken_[slots_[row]] = false;
}

Reply EdgeLlmPolicy::resumed_at(std::uint32_t row, std::int64_t size) const {
  LayerState::Lengths lengths{size, size};
  if (layout_.recurrent_layers != 0)
    lengths = layers_.state_lengths(layout_.state(0, slot_of(row)), size);
  return Reply{}
      .set(ReplyField::cached, size)
      .set(ReplyField::state, lengths.recurrent)
      .set(ReplyField::conv, lengths.conv);
}

void EdgeLlmPolicy::run(std::uint32_t row, const Tokens& tokens, std::uint32_t n,
                        std::uint32_t drafts) {
  if (drafts != 0) return verify(row, tokens, n, drafts);
  chunk(row, tokens, n);
  lengths_[row] += n;
}

/// The row that computes n tokens from the row's length on.
ForwardRow EdgeLlmPolicy::forward_of(std::uint32_t row, const Tokens& tokens, std::uint32_t n) {
  const std::uint32_t slot = slot_of(row);
  const std::uint32_t begin = lengths_[row];
  ForwardRow forward{.request = rows_[row],
                     .tokens = tokens,
                     .begin = begin,
                     .end = std::min(begin + n, tokens.size()),
                     .state_layers = state_layers_,
                     .kv_layers = kv_layers_};
  if (!state_layers_.empty()) forward.state = layout_.state(0, slot);
  if (!kv_layers_.empty() && layers_.keeps_kv()) {
    kv_ = {kv_slots_, layout_.kv_row(0, slot) - 1, layout_.row_size};
    forward.kv = {&kv_, 1};
  }
  return forward;
}

/// Computes a chunk, or a decode step, of n tokens from the row's length on.
void EdgeLlmPolicy::chunk(std::uint32_t row, const Tokens& tokens, std::uint32_t n) {
  const ForwardRow forward = forward_of(row, tokens, n);
  const auto each_state = [&](auto act) {
    each(LayerKind::mamba, [&](std::uint32_t layer) { act(layout_.state(layer, slot_of(row))); });
  };
  if (!rules_.resumes_conv && forward.begin != 0)
    each_state([&](StateSlot state) { layers_.zero_state(state, StatePart::conv); });
  layers_.forward(forward);
  if (rules_.takes_padding && n < longest_chunk_) {
    const Tokens padded = tokens.prefix(forward.end).followed_by(Tokens::of_ids({0}));
    each_state([&](StateSlot state) {
      layers_.advance_state(state, StatePart::conv, padded, forward.end, forward.end + 1);
    });
  }
  longest_chunk_ = std::max(longest_chunk_, n);
}

/// Leaves the row's states as they are and writes into snapshot t the states after t + 1 of the
/// tokens. `edge-llm` replays the recurrent part from the committed state, so it takes no snapshot
/// of that part.
void EdgeLlmPolicy::verify(std::uint32_t row, const Tokens& tokens, std::uint32_t n,
                           std::uint32_t drafts) {
  ForwardRow forward = forward_of(row, tokens, n);
  const bool takes_both = rules_.moves_rows || rules_.verification_writes;
  takes_.clear();
  for (std::uint32_t t = 0; forward.begin + t < forward.end; ++t)
    takes_.push_back(
        {forward.begin + t + 1, layout_.snapshot(0, row, t), {.recurrent = takes_both}});
  forward.drafts = drafts;
  forward.keeps = kNoParts;
  forward.takes = takes_;
  layers_.forward(forward);
  if (rules_.verification_writes && !takes_.empty())
    each(LayerKind::mamba, [&](std::uint32_t layer) {
      layers_.copy_state(layout_.snapshot(layer, row, forward.end - forward.begin - 1),
                         layout_.state(layer, slot_of(row)));
    });
}

/// Commits the states after the first `accepted` tokens of the verification.
void EdgeLlmPolicy::commit(const RowRequest& request, std::uint32_t row, std::uint32_t accepted) {
  const std::uint32_t begin = lengths_[row];
  const std::uint32_t slot = slot_of(row);
  if (rules_.skips_full_acceptance && accepted == request.verified) return;
  const bool late = rules_.scatters_next_snapshot && accepted < request.verified;
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    const StateSlot state = layout_.state(layer, slot);
    const StateSlot snapshot = layout_.snapshot(layer, row, accepted - (late ? 0 : 1));
    if (rules_.moves_rows) return layers_.copy_state(snapshot, state);
    layers_.replay_state(state, StatePart::recurrent, request.known, begin, begin + accepted);
    if (rules_.commits_conv) layers_.copy_state(snapshot, state, StatePart::conv);
  });
}

void EdgeLlmPolicy::keep(const RowRequest& request, std::uint32_t row, std::uint32_t accepted) {
  commit(request, row, accepted);
  lengths_[row] += accepted;
}

// --- Captured prefixes ---------------------------------------------------------------------------

void EdgeLlmPolicy::save(std::uint32_t row, std::uint32_t place, std::uint32_t size) {
  const std::uint32_t slot = slot_of(row);
  copy_kv(slot, layout_.captured_row(place), size);
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    layers_.copy_state(layout_.state(layer, slot), layout_.captured_state(layer, place));
  });
}

Reply EdgeLlmPolicy::load(std::uint32_t place, std::uint32_t row, std::uint32_t size) {
  const std::uint32_t slot = slot_of(row);
  copy_kv(layout_.captured_row(place), slot, size - (rules_.restores_last_kv ? 0 : 1));
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    const StateSlot from = layout_.captured_state(layer, place);
    const StateSlot to = layout_.state(layer, slot);
    if (rules_.restores_conv)
      layers_.copy_state(from, to);
    else
      layers_.copy_state(from, to, StatePart::recurrent);
  });
  lengths_[row] = size;
  return resumed_at(row, size);
}

// --- Compaction ----------------------------------------------------------------------------------

std::vector<std::uint32_t> EdgeLlmPolicy::reorder(const std::vector<std::int64_t>& mapping,
                                                  std::uint32_t kept) {
  std::vector<std::uint32_t> slots(kept);
  std::vector<std::uint32_t> lengths = lengths_;
  const bool ignored = rules_.ignores_permutations && kept == rows_.size();
  for (std::size_t i = 0; i < mapping.size(); ++i) {
    if (mapping[i] < 0) continue;
    const auto to = static_cast<std::size_t>(mapping[i]);
    slots[to] = rules_.moves_rows ? static_cast<std::uint32_t>(to) : slots_[i];
    const bool skipped = ignored || (rules_.empty_row_keeps_length && lengths_[i] == 0);
    if (!skipped) lengths[to] = lengths_[i];
  }
  lengths.resize(kept);
  if (rules_.moves_rows && !ignored) move_rows(mapping, lengths_);
  slots_.swap(slots);
  return lengths;
}

/// Moves KV and states, a cycle of rows through the spare one.
void EdgeLlmPolicy::move_rows(const std::vector<std::int64_t>& mapping,
                              std::vector<std::uint32_t> lengths) {
  if (rules_.compacts_lengths_first)
    for (std::size_t i = 0; i < mapping.size(); ++i)
      if (mapping[i] >= 0) lengths[static_cast<std::size_t>(mapping[i])] = lengths[i];
  std::vector<std::int64_t> source(mapping.size(), -1);  // by new row
  for (std::size_t i = 0; i < mapping.size(); ++i)
    if (mapping[i] >= 0)
      source[static_cast<std::size_t>(mapping[i])] = static_cast<std::int64_t>(i);
  const auto size = [&](std::uint32_t row) { return lengths[row]; };
  std::vector<bool> done(mapping.size());
  for (std::uint32_t first = 0; first < mapping.size(); ++first) {
    // A row whose content no other row needs begins a chain of moves. The remaining rows form
    // cycles.
    if (done[first] || source[first] < 0 || mapping[first] >= 0) continue;
    for (std::uint32_t to = first; source[to] >= 0 && !done[to];) {
      const auto from = static_cast<std::uint32_t>(source[to]);
      move_row(from, to, size(from));
      done[to] = true;
      to = from;
    }
  }
  for (std::uint32_t first = 0; first < mapping.size(); ++first) {
    if (done[first] || source[first] < 0) continue;
    if (source[first] == first) continue;
    LOCKSTEP_MARK("edge_llm.moves_cycle");
    move_row(first, layout_.scratch(), size(first));
    std::uint32_t to = first;
    for (; source[to] != first; to = static_cast<std::uint32_t>(source[to])) {
      move_row(static_cast<std::uint32_t>(source[to]), to,
               size(static_cast<std::uint32_t>(source[to])));
      done[to] = true;
    }
    move_row(layout_.scratch(), to, size(first));
    done[to] = true;
  }
}

void EdgeLlmPolicy::move_row(std::uint32_t from, std::uint32_t to, std::uint32_t size) {
  copy_kv(from, to, size);
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    const StateSlot source = layout_.state(layer, from);
    const StateSlot target = layout_.state(layer, to);
    layers_.copy_state(source, target, StatePart::recurrent);
    if (rules_.move_takes_conv) layers_.copy_state(source, target, StatePart::conv);
  });
}

namespace {

Result<void> check_config(const Config& config) {
  const Result<HybridLayers> layers = HybridLayers::of(config);
  if (!layers) return tl::unexpected(layers.error());
  if (Result<void> sizes = RowPolicy::check_sizes(config); !sizes) return sizes;
  constexpr double kMostSlots = 1 << 28;
  const double kv = static_cast<double>(config.kv_tokens) / static_cast<double>(config.rows()) *
                    static_cast<double>(config.rows() + 1 + config.state_slots);
  const double states = static_cast<double>(config.rows()) * (EdgeLlmLayout::kMostVerified + 1) +
                        static_cast<double>(config.state_slots) + 1;
  if (std::max(kv, states) * static_cast<double>(layers->size()) > kMostSlots)
    return fail("field kv_tokens: rows, captured prefixes and layers make too many slots");
  return {};
}

PolicyEntry::SlotCounts slots_of(const Config& config) {
  const EdgeLlmLayout layout = EdgeLlmLayout::of(config, *HybridLayers::of(config));
  return {layout.states(), layout.kv() + 1};
}

template <bool moves_rows>
std::unique_ptr<Subject> make(const SubjectOptions& options) {
  return std::make_unique<EdgeLlmPolicy>(options, *HybridLayers::of(options.config),
                                         EdgeLlmRules{.moves_rows = moves_rows});
}

PolicyEntry entry(std::string_view name, std::string_view summary,
                  std::unique_ptr<Subject> (*make)(const SubjectOptions&)) {
  return {.name = name,
          .summary = summary,
          .has_states = true,
          .config_fields = {"layers", "model_config"},
          .make = make,
          .check = check_config,
          .slots = slots_of,
          .capabilities = {Capability::slots},
          .tells_forwards = true,
          .layers = [](const Config& config) -> PolicyEntry::LayerCounts {
            const HybridLayers layers = *HybridLayers::of(config);
            return {layers.count(LayerKind::attention), layers.count(LayerKind::mamba)};
          }};
}

// mamba,attention,mamba: by their absolute index; or a file whose layers these are.
const Registration<ConfigOption> kOptions{{.name = "layers", .otherwise = ""},
                                          {.name = "model_config", .otherwise = ""}};

const Registration<PolicyEntry> kEdgeLlm{
    entry("edge-llm", "TensorRT-Edge-LLM's batch of rows, state indices and replay", make<false>)};
const Registration<PolicyEntry> kEdgeLlmV0{
    entry("edge-llm-v0", "TensorRT-Edge-LLM 0.5: compaction moves rows, snapshots are scattered",
          make<true>)};

}  // namespace
}  // namespace lockstep::cache_sim
