#include "cache_sim/policies/edge_llm/edge_llm_policy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cache_sim/policies/edge_llm/edge_llm_defects.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

EdgeLlmLayout EdgeLlmLayout::of(const Config& config, const HybridLayers& layers) {
  return {.rows = static_cast<std::uint32_t>(config.rows()),
          .row_size = static_cast<std::uint32_t>(config.kv_tokens / config.rows()),
          .captures = static_cast<std::uint32_t>(config.state_slots),
          .recurrent_layers = layers.count(LayerKind::mamba),
          .attention_layers = layers.count(LayerKind::attention)};
}

EdgeLlmPolicy::EdgeLlmPolicy(const SubjectOptions& options, HybridLayers layers, bool moves_rows)
    : config_(options.config),
      defect_(options.defect),
      layers_(*options.layers),
      hybrid_(std::move(layers)),
      layout_(EdgeLlmLayout::of(config_, hybrid_)),
      moves_rows_(moves_rows),
      slot_taken_(layout_.rows) {
  for (std::uint32_t slot = 1; slot <= layout_.states(); ++slot) {
    layers_.allocate_state({slot});
    layers_.zero_state({slot});
  }
  std::vector<std::uint32_t> all(static_cast<std::size_t>(layers_.keeps_kv() ? layout_.kv() : 0));
  std::iota(all.begin(), all.end(), 1);
  layers_.allocate_kv(all);
}

Result<Reply> EdgeLlmPolicy::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::compact: return compact(operation);
    case Verb::step: longest_chunk_ = 0; return Reply{};
    case Verb::evict:
      if (operation.room != Operation::kAbsent) return fail("evict: a slot cache keeps no room");
      [[fallthrough]];
    case Verb::flush: return Reply{}.set(ReplyField::kv, 0).set(ReplyField::state, 0);
    case Verb::check: return check();
    case Verb::extend:
    case Verb::accept:
    case Verb::checkpoint:
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt:
    case Verb::capture:
    case Verb::restore: break;
    default:
      return fail(fmt::format("{} is not an operation of a slot cache", to_string(operation.verb)));
  }
  EdgeLlmRequest* const request = find(operation.id);
  if (request == nullptr) return no_such_request(operation);
  if (discards(operation)) {
    end(*request);
    return Reply{};
  }
  if (operation.verb == Verb::accept) return accept(*request, operation);
  const bool is_verifying = !request->drafts.empty();
  if (const Result<void> settled = check_is_settled(operation, is_verifying); !settled)
    return tl::unexpected(settled.error());
  switch (operation.verb) {
    case Verb::extend: return extend(*request, operation);
    case Verb::capture: return capture(*request, operation);
    case Verb::restore: return restore(*request, operation);
    case Verb::finish: end(*request); break;
    default:
      if (operation.up_to > request->computed)
        return fail(fmt::format("checkpoint: up_to={} is beyond the {}", operation.up_to,
                                counted(request->computed, "computed token")));
  }
  return Reply{}.set(ReplyField::exist, 0).set(ReplyField::length, 0);  // nothing stays
}

// --- Rows, slots and layers ----------------------------------------------------------------------

EdgeLlmRequest* EdgeLlmPolicy::find(Name id) {
  const auto found = std::find_if(requests_.begin(), requests_.end(),
                                  [&](const EdgeLlmRequest& request) { return request.id == id; });
  return found == requests_.end() ? nullptr : &*found;
}

std::uint32_t EdgeLlmPolicy::row_of(const EdgeLlmRequest& request) const {
  const auto found = std::find_if(rows_.begin(), rows_.end(),
                                  [&](const EdgeLlmRow& row) { return row.request == request.id; });
  return static_cast<std::uint32_t>(found - rows_.begin());
}

/// Where the KV and the states of a row lie.
std::uint32_t EdgeLlmPolicy::slot_of(std::uint32_t row) const {
  return moves_rows_ || planted(kEdgeRowForSlot) ? row : rows_[row].slot;
}

/// Where the layer is among its kind.
std::uint32_t EdgeLlmPolicy::local_of(std::size_t absolute) const {
  const HybridLayers::Place& place = hybrid_.at(absolute);
  const bool wrong = planted(kEdgeAbsoluteIndex) && place.kind == LayerKind::mamba;
  return wrong ? static_cast<std::uint32_t>(absolute) : place.local;
}

/// Calls `act(local index)` for each layer of the kind, in the order of the model.
template <class Do>
void EdgeLlmPolicy::each(LayerKind kind, Do act) const {
  for (std::size_t absolute = 0; absolute < hybrid_.size(); ++absolute)
    if (hybrid_.at(absolute).kind == kind) act(local_of(absolute));
}

KvSlots EdgeLlmPolicy::kv_slots(std::uint32_t layer, std::uint32_t row, std::uint32_t begin,
                                std::uint32_t end, std::vector<std::uint32_t>& scratch) const {
  scratch.resize(end - begin);
  std::iota(scratch.begin(), scratch.end(), layout_.kv_row(layer, row) + begin);
  return scratch;
}

void EdgeLlmPolicy::write_kv(std::uint32_t slot, const Tokens& tokens, std::uint32_t begin,
                             std::uint32_t end) {
  if (!layers_.keeps_kv()) return;
  each(LayerKind::attention, [&](std::uint32_t layer) {
    layers_.write_kv(kv_slots(layer, slot, begin, end, scratch_), tokens, begin);
  });
}

void EdgeLlmPolicy::copy_kv(std::uint32_t from, std::uint32_t to, std::uint32_t size) {
  if (!layers_.keeps_kv()) return;
  each(LayerKind::attention, [&](std::uint32_t layer) {
    layers_.copy_kv(kv_slots(layer, from, 0, size, scratch_),
                    kv_slots(layer, to, 0, size, more_scratch_));
  });
}

void EdgeLlmPolicy::clear_slot(std::uint32_t slot) {
  if (planted(kEdgeNeverClears)) return;
  each(LayerKind::mamba,
       [&](std::uint32_t layer) { layers_.zero_state(layout_.state(layer, slot)); });
  if (planted(kEdgeClearsLength) && slot < lengths_.size()) lengths_[slot] = 0;
}

// --- Requests ------------------------------------------------------------------------------------

Result<Reply> EdgeLlmPolicy::admit(const Operation& operation) {
  const bool is_admitted = find(operation.id) != nullptr;
  if (const Result<void> sound = check_admission(operation, is_admitted); !sound)
    return tl::unexpected(sound.error());
  const std::uint32_t size = operation.tokens.size();
  if (operation.external > 0 || operation.room != Operation::kAbsent)
    return fail("admit: a slot cache takes no external tokens and keeps no room");
  if (size > layout_.row_size) return Reply::refusal(Refusal::too_long);
  const auto hole = std::find_if(rows_.begin(), rows_.end(),
                                 [](const EdgeLlmRow& row) { return !row.request.exists(); });
  const auto row = static_cast<std::uint32_t>(hole - rows_.begin());
  if (row == layout_.rows) return Reply::refusal(Refusal::no_row);
  if (row == rows_.size()) {
    rows_.emplace_back();
    lengths_.push_back(0);
  } else {
    LOCKSTEP_MARK("edge_llm.fills_hole");
  }
  const auto slot = static_cast<std::uint32_t>(
      moves_rows_ ? row
                  : std::find(slot_taken_.begin(), slot_taken_.end(), false) - slot_taken_.begin());
  if (!moves_rows_) slot_taken_[slot] = true;
  rows_[row] = {operation.id, slot};
  lengths_[row] = 0;
  if (planted(kEdgeResetsBeyond) && row + 1 < lengths_.size()) lengths_[row + 1] = 0;
  clear_slot(slot);
  requests_.push_back({operation.id, operation.salt, operation.tokens, 0, {}, 0});
  return resumed_at(row, 0);
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

Result<Reply> EdgeLlmPolicy::extend(EdgeLlmRequest& request, const Operation& operation) {
  if (operation.async) return fail("extend: a slot cache does not run ahead of results");
  const std::int64_t drafts = operation.drafts.size();
  const std::int64_t left =
      std::int64_t{request.known.size()} + operation.tokens.size() - request.computed + drafts;
  if (const Result<void> fits = check_extend(operation, left); !fits)
    return tl::unexpected(fits.error());
  if (drafts != 0 && operation.n > std::int64_t{EdgeLlmLayout::kMostVerified})
    return Reply::refusal(Refusal::too_long);
  if (request.computed + operation.n > layout_.row_size) return Reply::refusal(Refusal::no_kv);
  request.known.append(operation.tokens);
  const std::uint32_t row = row_of(request);
  const auto n = static_cast<std::uint32_t>(operation.n);
  if (drafts != 0) {
    verify(row, request.known.followed_by(operation.drafts), n);
    request.drafts = operation.drafts;
    request.verified = n;
  } else {
    chunk(request, row, n);
    lengths_[row] += n;
    request.computed += n;
  }
  return Reply{}.set(ReplyField::n, operation.n);
}

/// A chunk or a decode of n tokens from the length that the tensor says.
void EdgeLlmPolicy::chunk(const EdgeLlmRequest& request, std::uint32_t row, std::uint32_t n) {
  const auto begin = static_cast<std::uint32_t>(lengths_[row]);
  const std::uint32_t end = std::min(begin + n, request.known.size());
  const std::uint32_t slot = slot_of(row);
  write_kv(slot, request.known, begin, end);
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    const StateSlot state = layout_.state(layer, slot);
    if (planted(kEdgeForgetsInitial) && begin != 0) layers_.zero_state(state, StatePart::conv);
    layers_.advance_state(state, request.known, begin, end);
    if (planted(kEdgeTakesPadding) && n < longest_chunk_) {
      const Tokens padding = Tokens::of_ids({0});
      layers_.advance_state(state, StatePart::conv, request.known.prefix(end).followed_by(padding),
                            end, end + 1);
    }
  });
  longest_chunk_ = std::max(longest_chunk_, n);
}

/// The row's states stay; snapshot t becomes what they would be behind t + 1 of the tokens. The
/// recurrent part of `edge-llm` is replayed from the committed state, so it needs none.
void EdgeLlmPolicy::verify(std::uint32_t row, const Tokens& tokens, std::uint32_t n) {
  const auto begin = static_cast<std::uint32_t>(lengths_[row]);
  const std::uint32_t slot = slot_of(row);
  write_kv(slot, tokens, begin, std::min(begin + n, tokens.size()));
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    StateSlot before = layout_.state(layer, slot);
    for (std::uint32_t t = 0; t < n && begin + t < tokens.size(); ++t) {
      const StateSlot snapshot = layout_.snapshot(layer, row, t);
      for (const StatePart part : kStateParts) {
        if (part == StatePart::recurrent && !moves_rows_ && !planted(kEdgeVerifyWrites)) continue;
        layers_.copy_state(before, snapshot, part);
        layers_.advance_state(snapshot, part, tokens, begin + t, begin + t + 1);
      }
      before = snapshot;
    }
    if (planted(kEdgeVerifyWrites)) layers_.copy_state(before, layout_.state(layer, slot));
  });
}

/// The first `accepted` tokens of the verification are the row's.
void EdgeLlmPolicy::commit(const EdgeLlmRequest& request, std::uint32_t row,
                           std::uint32_t accepted) {
  const auto begin = static_cast<std::uint32_t>(lengths_[row]);
  const std::uint32_t slot = slot_of(row);
  if (planted(kEdgeSkipsFull) && accepted == request.verified) return;
  const bool late = planted(kEdgeScattersNext) && accepted < request.verified;
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    const StateSlot state = layout_.state(layer, slot);
    const StateSlot snapshot = layout_.snapshot(layer, row, accepted - (late ? 0 : 1));
    if (moves_rows_) return layers_.copy_state(snapshot, state);
    layers_.advance_state(state, StatePart::recurrent, request.known, begin, begin + accepted);
    if (!planted(kEdgeRecurrentAlone)) layers_.copy_state(snapshot, state, StatePart::conv);
  });
}

Result<Reply> EdgeLlmPolicy::accept(EdgeLlmRequest& request, const Operation& operation) {
  if (const Result<void> sound = check_accept(operation); !sound)
    return tl::unexpected(sound.error());
  if (request.drafts.empty()) {
    request.known.append(operation.tokens);
    return Reply{}.set(ReplyField::n, operation.n);
  }
  if (const Result<void> kept = check_kept(operation, request.drafts); !kept)
    return tl::unexpected(kept.error());
  request.known.append(operation.tokens);
  const std::uint32_t accepted = request.known.size() - 1 - request.computed;
  const std::uint32_t row = row_of(request);
  commit(request, row, accepted);
  lengths_[row] += accepted;
  request.computed += accepted;
  request.drafts = Tokens();
  return Reply{}.set(ReplyField::n, operation.n);
}

void EdgeLlmPolicy::end(EdgeLlmRequest& request) {
  const std::uint32_t row = row_of(request);
  if (!moves_rows_) slot_taken_[rows_[row].slot] = false;
  rows_[row] = {};
  requests_.erase(requests_.begin() + (&request - requests_.data()));
}

// --- Captured prefixes ---------------------------------------------------------------------------

Result<Reply> EdgeLlmPolicy::capture(const EdgeLlmRequest& request, const Operation& operation) {
  if (request.computed == 0) return fail("capture: nothing is computed");
  auto found = std::find_if(captured_.begin(), captured_.end(),
                            [&](const EdgeLlmCaptured& one) { return one.name == operation.as; });
  if (found == captured_.end()) {
    if (captured_.size() == layout_.captures) return Reply::refusal(Refusal::no_state_slot);
    found = captured_.insert(captured_.end(), EdgeLlmCaptured{});
  }
  *found = {operation.as, request.salt, request.known.prefix(request.computed)};
  const auto place = static_cast<std::uint32_t>(found - captured_.begin());
  const std::uint32_t slot = slot_of(row_of(request));
  copy_kv(slot, layout_.captured_row(place), request.computed);
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    layers_.copy_state(layout_.state(layer, slot), layout_.captured_state(layer, place));
  });
  return Reply{}.set(ReplyField::length, request.computed);
}

Result<Reply> EdgeLlmPolicy::restore(EdgeLlmRequest& request, const Operation& operation) {
  const auto found =
      std::find_if(captured_.begin(), captured_.end(),
                   [&](const EdgeLlmCaptured& one) { return one.name == operation.from; });
  if (found == captured_.end())
    return fail(fmt::format("restore: nothing was captured as `{}`", operation.from.text()));
  const std::uint32_t size = found->tokens.size();
  if (request.computed > 0 || request.salt != found->salt || request.known.size() <= size ||
      request.known.prefix(size) != found->tokens)
    return fail("restore: not the beginning of a request that has computed nothing");
  const auto place = static_cast<std::uint32_t>(found - captured_.begin());
  const std::uint32_t row = row_of(request);
  const std::uint32_t slot = slot_of(row);
  copy_kv(layout_.captured_row(place), slot, size - (planted(kEdgeRestoresShort) ? 1 : 0));
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    const StateSlot from = layout_.captured_state(layer, place);
    const StateSlot to = layout_.state(layer, slot);
    if (planted(kEdgeRestoresHalf))
      layers_.copy_state(from, to, StatePart::recurrent);
    else
      layers_.copy_state(from, to);
  });
  lengths_[row] = size;
  request.computed = size;
  return resumed_at(row, size);
}

// --- Compaction ----------------------------------------------------------------------------------

std::vector<RowUse> EdgeLlmPolicy::row_uses() {
  std::vector<RowUse> uses;
  for (const EdgeLlmRow& row : rows_)
    uses.push_back(!row.request.exists()               ? RowUse::hole
                   : find(row.request)->drafts.empty() ? RowUse::settled
                                                       : RowUse::verifying);
  return uses;
}

Result<Reply> EdgeLlmPolicy::compact(const Operation& operation) {
  const std::vector<std::int64_t>& mapping = operation.mapping;
  const Result<std::uint32_t> kept = check_mapping(mapping, row_uses());
  if (!kept) return tl::unexpected(kept.error());
  std::vector<EdgeLlmRow> rows(*kept);
  std::vector<std::int64_t> lengths = lengths_;
  const bool ignored = planted(kEdgeIgnoresOrder) && *kept == rows_.size();
  for (std::size_t i = 0; i < mapping.size(); ++i) {
    if (mapping[i] < 0) continue;
    const auto to = static_cast<std::size_t>(mapping[i]);
    rows[to] = rows_[i];
    if (moves_rows_) rows[to].slot = static_cast<std::uint32_t>(to);
    const bool skipped = ignored || (planted(kEdgeEmptyRow) && lengths_[i] == 0);
    if (!skipped) lengths[to] = lengths_[i];
  }
  lengths.resize(*kept);
  if (moves_rows_ && !ignored) move_rows(mapping, lengths_);
  rows_.swap(rows);
  lengths_.swap(lengths);
  return Reply{};
}

/// Moves KV and states, a cycle of rows through the spare one.
void EdgeLlmPolicy::move_rows(const std::vector<std::int64_t>& mapping,
                              std::vector<std::int64_t> lengths) {
  if (planted(kEdgeLengthsFirst))
    for (std::size_t i = 0; i < mapping.size(); ++i)
      if (mapping[i] >= 0) lengths[static_cast<std::size_t>(mapping[i])] = lengths[i];
  std::vector<std::int64_t> source(mapping.size(), -1);  // by new row
  for (std::size_t i = 0; i < mapping.size(); ++i)
    if (mapping[i] >= 0)
      source[static_cast<std::size_t>(mapping[i])] = static_cast<std::int64_t>(i);
  const auto size = [&](std::uint32_t row) { return lengths[row]; };
  std::vector<bool> done(mapping.size());
  for (std::uint32_t first = 0; first < mapping.size(); ++first) {
    // A row whose content is needed nowhere else begins a chain; what is left are cycles.
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

void EdgeLlmPolicy::move_row(std::uint32_t from, std::uint32_t to, std::int64_t size) {
  copy_kv(from, to, static_cast<std::uint32_t>(size));
  each(LayerKind::mamba, [&](std::uint32_t layer) {
    const StateSlot source = layout_.state(layer, from);
    const StateSlot target = layout_.state(layer, to);
    layers_.copy_state(source, target, StatePart::recurrent);
    if (!planted(kEdgeLeavesConv)) layers_.copy_state(source, target, StatePart::conv);
  });
}

Reply EdgeLlmPolicy::check() const {
  std::int64_t used = 0;
  for (const EdgeLlmRequest& request : requests_) used += request.computed;
  const auto running = static_cast<std::int64_t>(requests_.size());
  return Reply{}
      .set(ReplyField::kv_free, std::int64_t{layout_.row_size} * layout_.rows - used)
      .set(ReplyField::kv_locked, used)
      .set(ReplyField::states_free, layout_.rows - running)
      .set(ReplyField::states_locked, running);
}

std::optional<Snapshot> EdgeLlmPolicy::snapshot() const {
  Snapshot content;
  content.kv_total = std::int64_t{layout_.row_size} * layout_.rows;
  content.kv_free = content.kv_total;
  content.states_total = content.states_free = layout_.rows + layout_.captures;
  const auto show = [&](const Tokens& tokens, bool runs) {
    content.nodes.push_back({-1, tokens.text(40), tokens.size(), true, runs});
    --content.states_free;
  };
  for (const EdgeLlmRequest& request : requests_) {
    show(request.known.prefix(request.computed), true);
    content.kv_free -= request.computed;
  }
  for (const EdgeLlmCaptured& captured : captured_) show(captured.tokens, false);
  return content;
}

namespace {

Result<void> check_config(const Config& config) {
  const Result<HybridLayers> layers = HybridLayers::of(config);
  if (!layers) return tl::unexpected(layers.error());
  if (config.kv_tokens < config.rows())
    return fail(fmt::format("field kv_tokens: {} is less than one token for each of {}",
                            config.kv_tokens, counted(config.rows(), "row")));
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
  return std::make_unique<EdgeLlmPolicy>(options, *HybridLayers::of(options.config), moves_rows);
}

PolicyEntry entry(std::string_view name, std::string_view summary,
                  std::unique_ptr<Subject> (*make)(const SubjectOptions&)) {
  return {.name = name,
          .summary = summary,
          .has_states = true,
          .config_fields = {ConfigField::layers, ConfigField::model_config},
          .make = make,
          .check = check_config,
          .slots = slots_of,
          .has_tree_verbs = false,
          .has_slot_verbs = true};
}

const Registration<PolicyEntry> kEdgeLlm{
    entry("edge-llm", "TensorRT-Edge-LLM's batch of rows, state indices and replay", make<false>)};
const Registration<PolicyEntry> kEdgeLlmV0{entry(
    "edge-llm-v0", "its version 0.5: compaction moves rows, snapshots are scattered", make<true>)};

}  // namespace
}  // namespace lockstep::cache_sim
