#include "cache_sim/numbers/number_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cache_sim/numbers/compared.hpp"
#include "cache_sim/numbers/wrong_numbers.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

using reference::HybridModel;
using reference::HybridPart;
using reference::HybridRow;

NumberState::NumberState(std::shared_ptr<Truth> truth, std::int64_t states, std::int64_t kv_end,
                         std::int64_t page, const LabelState* labels)
    : truth_(std::move(truth)),
      labels_(labels),
      model_(truth_->model()),
      state_slots_(static_cast<std::size_t>(states) + 2),
      kv_slots_(static_cast<std::size_t>(kv_end) + 1),
      page_(static_cast<std::uint32_t>(std::min(page, kv_end))),
      states_(state_slots_ * model_.state_size()),
      kv_(kv_slots_ * model_.kv_size()),
      state_used_(state_slots_),
      kv_used_(kv_slots_),
      kv_open_(kv_slots_) {
  for (const HybridPart& part : model_.parts())
    (std::string_view(part.name) == "KV" ? kv_layers_ : state_layers_) = part.layer + 1;
}

// --- Slots

std::uint32_t NumberState::state_index(StateSlot slot) const {
  return static_cast<std::uint32_t>(std::min<std::size_t>(slot.value, state_slots_ - 1));
}

std::uint32_t NumberState::kv_index(std::uint32_t slot) const {
  return static_cast<std::uint32_t>(std::min<std::size_t>(slot, kv_slots_ - 1));
}

std::span<double> NumberState::state_at(std::uint32_t index) {
  const std::span<double> state{states_.data() + index * model_.state_size(), model_.state_size()};
  if (state_used_[index] == 0) poison(state, index);
  state_used_[index] = 1;
  return state;
}

std::span<double> NumberState::kv_at(std::uint32_t index) {
  const std::span<double> kv{kv_.data() + index * model_.kv_size(), model_.kv_size()};
  if (kv_used_[index] == 0) poison(kv, index);
  kv_used_[index] = 1;
  return kv;
}

std::span<double> NumberState::part_of(std::span<double> state, StatePart part) const {
  const std::size_t recurrent = model_.recurrent_size();
  return part == StatePart::recurrent ? state.first(recurrent) : state.subspan(recurrent);
}

bool NumberState::is_open(std::uint32_t state) const {
  return std::ranges::find(open_states_, state) != open_states_.end();
}

std::span<double> NumberState::named(StateSlot slot) {
  const std::uint32_t index = state_index(slot);
  if (is_open(index)) run();
  return state_at(index);
}

std::span<double> NumberState::named_kv(std::uint32_t slot) {
  const std::uint32_t index = kv_index(slot);
  if (kv_open_[index] == batch_) run();
  return kv_at(index);
}

// --- Batches

void NumberState::forward(const ForwardRow& row) {
  if (row.end <= row.begin) return;
  require_layers(row, state_layers_, kv_layers_);
  require(!row.ring || row.state_layers.empty(), "a ring stands beside one slot");
  told_.list(row);
  if (!told_.are_in_pools(row, state_slots_ - 1, kv_slots_ - 1)) {
    findings_.push_back(outside_of_pools(row));
    return;
  }
  if (!row.parents.empty() && row.known() <= row.begin) return verify_without_root(row);
  bool shares = false;
  told_.for_written(
      row, [&](std::uint32_t slot) { shares = shares || is_open(slot); },
      [&](std::uint32_t slot) { shares = shares || kv_open_[slot] == batch_; });
  if (shares) run();
  if (rows_.size() == open_) rows_.emplace_back();
  open(row, rows_[open_++]);
}

/// A tree whose drafts follow a token of an earlier row. Kernels run none
/// (reference/recurrent/tree.hpp), so its numbers are those of a run without a cache; the state
/// from which it starts is compared.
void NumberState::verify_without_root(const ForwardRow& row) {
  if (open_ > 0) run();
  const bool has_state = row.state.exists() && model_.state_size() > 0;
  if (has_state) compare_parts(row.state, StateParts{}, row.tokens, row.begin, "goes on after");
  std::vector<double> states;
  const std::vector<Truth::Node> after =
      nodes_after(*truth_, truth_->at(row.tokens, row.begin),
                  {row.tokens, row.begin, row.end, row.drafts, row.parents});
  for (std::uint32_t i = 0; i < row.drafts; ++i) {
    const std::span<const double> state = truth_->state(after[i]);
    states.insert(states.end(), state.begin(), state.end());
    std::ranges::copy(truth_->kv(after[i]), named_kv(told_.kv[row.begin + i]).begin());
  }
  if (has_state) left_[state_index(row.state)] = std::move(states);
}

/// Keeps what the row says, and marks its slots.
void NumberState::open(const ForwardRow& row, OpenRow& kept) {
  kept.request = row.request;
  kept.text = row.tokens;
  kept.begin = row.begin, kept.end = row.end, kept.drafts = row.drafts;
  kept.padding = row.places() - row.end;
  kept.tokens.assign(row.places() - row.begin, 0);
  for (std::uint32_t i = row.begin; i < row.end; ++i) kept.tokens[i - row.begin] = row.tokens[i];
  kept.parents.assign(row.parents.begin(), row.parents.end());
  kept.has_state = row.state.exists() && model_.state_size() > 0;
  kept.state = kept.has_state ? row.state.value : 0;
  kept.state_layers.assign(row.state_layers.begin(), row.state_layers.end());
  kept.kv_layers.assign(row.kv_layers.begin(), row.kv_layers.end());
  kept.writes_kv = row.writes_kv;
  kept.verifies = row.drafts > 0;
  kept.keeps = row.keeps;
  kept.ring = kept.has_state ? row.ring : std::nullopt;
  kept.wrong_label = labels_ == nullptr ? std::nullopt : wrong_state_label(*labels_, row);
  kept.takes.clear();
  const auto open_state = [&](std::uint32_t slot) {
    state_at(slot);
    open_states_.push_back(slot);
  };
  if (kept.has_state) for_layers(kept.state, kept.state_layers, open_state);
  if (row.ring && row.ring->slot != row.state) open_state(row.ring->slot.value);
  for (const StateTake& take : row.takes) {
    for_layers(take.target.value, kept.state_layers, open_state);
    kept.takes.push_back({take.after, take.target.value, take.parts.recurrent, take.parts.conv});
  }
  const auto open_kv = [&](std::uint32_t slot) {
    kv_at(slot);
    kv_open_[slot] = batch_;
  };
  std::swap(kept.kv, told_.kv);
  std::swap(kept.also, told_.also);
  for (const std::vector<std::uint32_t>* const slots : {&kept.kv, &kept.also})
    for (const std::uint32_t slot : *slots) for_layers(slot, kept.kv_layers, open_kv);
}

void NumberState::launch(std::span<const StateSlot> padding) {
  poison(state_at(0), 0);
  for (std::uint32_t slot = 0; slot < page_; ++slot) poison(kv_at(slot), slot);
  run();
  for (const StateSlot slot : padding) run_padding_row(slot);
}

void NumberState::run() {
  const std::size_t count = std::exchange(open_, 0);
  open_states_.clear();
  ++batch_;
  half_.reset();
  if (count == 0) return;
  std::vector<HybridRow> rows;
  std::size_t sampled = 0;
  for (std::size_t i = 0; i < count; ++i) {
    rows.push_back(told(rows_[i]));
    sampled += rows.back().sampled();
    computed_ += static_cast<std::int64_t>(rows_[i].tokens.size());
  }
  logits_.resize(sampled * model_.vocabulary());
  model_.forward(rows, {kv_.data(), model_.kv_size()}, {states_.data(), model_.state_size()},
                 logits_);
  std::span<const double> logits = logits_;
  for (std::size_t i = 0; i < count; ++i) {
    const OpenRow& row = rows_[i];
    for (std::size_t place = row.begin; place < std::min(row.kv.size(), row.also.size()); ++place)
      for (const HybridPart& part : model_.parts())
        if (std::string_view(part.name) == "KV")
          std::ranges::copy(held_kv(row, part, row.kv[place]),
                            held_kv(row, part, row.also[place]).begin());
    const std::size_t own = rows[i].sampled() * model_.vocabulary();
    compare(row, logits.first(own));
    logits = logits.subspan(own);
    if (row.ring) leave_ring(row);
    if (!row.verifies || !row.has_state) continue;
    leave_takes(row);
    for_layers(row.state, row.state_layers, [&](std::uint32_t slot) { left_[slot] = row.after; });
  }
}

/// A place of a ring; a new one holds poison.
std::span<double> NumberState::ring_entry(StateSlot slot, std::uint32_t at) {
  const std::size_t conv = model_.state_size() - model_.recurrent_size();
  const std::size_t size = model_.state_input_size() + conv;
  std::vector<double>& ring = rings_[state_index(slot)];
  if (ring.size() < (at + std::size_t{1}) * size)
    ring.resize((at + std::size_t{1}) * size, poison_of(slot.value));
  return std::span(ring).subspan(at * size, size);
}

/// Moves the recurrent part of a state over the first `live` entries.
void NumberState::scan_ring(StateSlot ring, std::uint32_t live, std::span<double> state) {
  std::vector<double> moved(state.begin(), state.end());
  const std::size_t inputs = model_.state_input_size();
  for (std::uint32_t at = 0; at < live; ++at) {
    const std::span<const double> entry = ring_entry(ring, at);
    std::ranges::copy(entry.subspan(inputs), part_of(moved, StatePart::conv).begin());
    model_.replay(entry.first(inputs), moved);
  }
  std::ranges::copy(part_of(moved, StatePart::recurrent),
                    part_of(state, StatePart::recurrent).begin());
}

/// After a step with a ring: the slot has what was written there, and the ring the step's entry.
void NumberState::leave_ring(const OpenRow& row) {
  if (!row.ring->writes_state)
    std::ranges::copy(row.written, part_of(state_at(row.state), StatePart::recurrent).begin());
  if (row.ring->entry)
    std::ranges::copy(row.entry, ring_entry(row.ring->slot, *row.ring->entry).begin());
}

/// The row as the model is told it; keeps the state from which it starts.
HybridRow NumberState::told(OpenRow& row) {
  if (row.ring) {
    const std::span<double> state = state_at(row.state);
    row.written.assign(state.begin(), state.begin() + model_.recurrent_size());
    scan_ring(row.ring->slot, row.ring->live, state);
    row.keeps.recurrent = true;
    row.entry.resize(ring_entry(row.ring->slot, 0).size());
    std::ranges::copy(part_of(state, StatePart::conv),
                      row.entry.begin() + model_.state_input_size());
  }
  HybridRow told{.tokens = row.tokens,
                 .begin = row.begin,
                 .kv = row.kv,
                 .writes_kv = row.writes_kv,
                 .padding = row.padding,
                 .state = row.state,
                 .state_layers = row.state_layers,
                 .kv_layers = row.kv_layers,
                 .keeps_recurrent = row.keeps.recurrent && row.has_state,
                 .keeps_conv = row.keeps.conv && row.has_state,
                 .takes = row.takes};
  row.before.resize(model_.state_size());
  for (const HybridPart& part : model_.parts())
    if (std::string_view(part.name) != "KV")
      std::ranges::copy(held_state(row, part, row.state), row.before.begin() + part.first);
  if (row.ring) told.state_inputs = row.entry.data();
  if (!row.verifies) return told;
  row.after.resize(std::max<std::size_t>(1, row.tokens.size() * model_.state_size()));
  told.takes = {};
  told.states_after = row.after.data();
  told.drafts = row.drafts;
  told.parents = row.parents;
  return told;
}

/// A part of a slot that the row names.
std::span<double> NumberState::held_state(const OpenRow& row, const HybridPart& part,
                                          std::uint32_t slot) {
  const std::uint32_t distance = row.state_layers.empty() ? 0 : row.state_layers[part.layer];
  return state_at(slot + distance).subspan(part.first, part.size);
}

std::span<double> NumberState::held_kv(const OpenRow& row, const HybridPart& part,
                                       std::uint32_t slot) {
  const std::uint32_t distance = row.kv_layers.empty() ? 0 : row.kv_layers[part.layer];
  return kv_at(slot + distance).subspan(part.first, part.size);
}

/// The states that a verification leaves in slots; it keeps parts of its own where it takes states.
void NumberState::leave_takes(const OpenRow& row) {
  const std::size_t size = model_.state_size();
  for (const reference::HybridTake& take : row.takes) {
    const auto seen = static_cast<std::size_t>(take.after - row.begin);
    const double* const source =
        seen == 0 ? row.before.data() : row.after.data() + (seen - 1) * size;
    for (const HybridPart& part : model_.parts()) {
      const std::string_view name = part.name;
      if (name == "KV" || !(name == "conv" ? take.conv : take.recurrent)) continue;
      std::copy_n(source + part.first, part.size, held_state(row, part, take.slot).begin());
    }
  }
  if (row.takes.empty()) return;
  const double* const last = row.after.data() + (row.tokens.size() - row.padding - 1) * size;
  for (const HybridPart& part : model_.parts()) {
    const std::string_view name = part.name;
    if (name != "KV" && (name == "conv" ? row.keeps.conv : row.keeps.recurrent))
      std::copy_n(last + part.first, part.size, held_state(row, part, row.state).begin());
  }
}

// --- Comparison with the truth

void NumberState::compare(const OpenRow& row, std::span<const double> logits) {
  const Truth::Node base = truth_->at(row.text, row.begin);
  const bool starts_wrong = row.has_state && !same_bits(row.before, truth_->state(base));
  const std::vector<Truth::Node> after =
      nodes_after(*truth_, base, {row.text, row.begin, row.end, row.drafts, row.parents});
  const std::optional<std::string> moved = moved_logits(*truth_, after, row.verifies, logits);
  if (tells_rows_)
    told_rows_.push_back(told_row(row.request.text(), truth_->size(after.back()),
                                  logits.last(model_.vocabulary()), truth_->logits(after.back()),
                                  "without a cache"));
  if (moved || starts_wrong) return report(row, moved.value_or(std::string(kOnlyReadsWrong)), base);
  if (row.has_state && row.wrong_label)
    findings_.push_back(number_agrees(row_text(row.begin, row.end, row.text), *row.wrong_label,
                                      "a run without a cache"));
}

void NumberState::report(const OpenRow& row, const std::string& moved, Truth::Node base) {
  const std::string where = first_difference(row, base);
  const std::string read = row_text(row.begin, row.end, row.text);
  std::optional<Finding> wrong = row.wrong_label;
  if (!wrong && labels_ != nullptr)
    wrong = wrong_kv_label(*labels_, row.text, KvSlots(row.kv).first(row.end - row.drafts),
                           row.kv_layers);
  if (wrong) {
    wrong->text = fmt::format("{} {}{}{}; {}", read, wrong->text, kNumbersSay, moved, where);
    findings_.push_back(*wrong);
    return;
  }
  findings_.push_back({FindingKind::number_differs, fmt::format("{}: {}; {}", read, moved, where),
                       "the bits of a run without a cache", where});
}

/// The first part, in the order of the model's units, that the row read and that is not right.
std::string NumberState::first_difference(const OpenRow& row, Truth::Node base) {
  const std::vector<Truth::Node> path = truth_->path(base);
  for (const HybridPart& part : model_.parts()) {
    const auto cut = [&](std::span<const double> slot) {
      return slot.subspan(part.first, part.size);
    };
    if (std::string_view(part.name) != "KV") {
      if (row.has_state && !same_bits(cut(row.before), cut(truth_->state(base))))
        return fmt::format("unit {}: the {} part of state slot {} differs{}", part.unit, part.name,
                           row.state, origin(cut(row.before), "state slot"));
      continue;
    }
    for (std::uint32_t place = 0; place < row.begin; ++place) {
      const std::span<const double> held = held_kv(row, part, row.kv[place]);
      if (!same_bits(held, cut(truth_->kv(path[place]))))
        return fmt::format("unit {}: KV slot {} of token {} differs{}", part.unit, row.kv[place],
                           place, origin(held, "KV slot"));
    }
  }
  return "all that it read is right";
}

void NumberState::compare_state(StateSlot slot, const Tokens& tokens, std::uint32_t size) {
  compare_parts(slot, StateParts{}, tokens, size, "is handed out for");
}

/// Compares these parts of a slot with those of tokens[0, size); `use` says what the state is for.
void NumberState::compare_parts(StateSlot slot, StateParts parts, const Tokens& tokens,
                                std::uint32_t size, std::string_view use) {
  const std::span<const double> held = named(slot);
  const std::span<const double> right = truth_->state(truth_->at(tokens, size));
  for (const HybridPart& part : model_.parts()) {
    const std::string_view name = part.name;
    if (name == "KV" || !(name == "conv" ? parts.conv : parts.recurrent)) continue;
    const std::span<const double> own = held.subspan(part.first, part.size);
    const std::span<const double> wanted = right.subspan(part.first, part.size);
    if (same_bits(own, wanted)) continue;
    findings_.push_back({FindingKind::number_differs,
                         fmt::format("state slot {} {} {} of {}; unit {}: its {} part differs{}",
                                     slot.value, use, counted(size, "token"), tokens.text(60),
                                     part.unit, name, origin(own, "state slot")),
                         "the bits of a run without a cache",
                         magnitude(distance(own, wanted)) + " off"});
    return;
  }
}

Findings NumberState::drain(bool completes) {
  if (completes && open_ > 0) launch({});
  return std::exchange(findings_, {});
}

// --- States

void NumberState::allocate_state(StateSlot slot) {
  named(slot);
}

void NumberState::zero_state(StateSlot slot, StatePart part) {
  std::ranges::fill(part_of(named(slot), part), 0.0);
}

void NumberState::zero_state(StateSlot slot) {
  std::ranges::fill(named(slot), 0.0);
}

void NumberState::copy_state(StateSlot source, StateSlot target, StatePart part) {
  const std::span<double> from = part_of(named(source), part), to = part_of(named(target), part);
  if (from.data() != to.data()) std::ranges::copy(from, to.begin());
}

void NumberState::copy_state(StateSlot source, StateSlot target) {
  const std::span<double> from = named(source), to = named(target);
  if (from.data() != to.data()) std::ranges::copy(from, to.begin());
}

void NumberState::advance_state(StateSlot slot, const Tokens& tokens, std::uint32_t begin,
                                std::uint32_t end) {
  compare_parts(slot, StateParts{}, tokens, begin, "goes on after");
  truth_->run(named(slot), tokens, begin, end);
}

/// The halves of a state depend on each other: the second half of a run is kept from the first.
void NumberState::advance_state(StateSlot slot, StatePart part, const Tokens& tokens,
                                std::uint32_t begin, std::uint32_t end) {
  const bool recurrent = part == StatePart::recurrent;
  compare_parts(slot, {recurrent, !recurrent}, tokens, begin, "goes on after");
  const std::span<double> state = named(slot);
  if (!half_ || half_->slot != slot.value || half_->begin != begin || half_->end != end) {
    half_ = Half{slot.value, begin, end, {state.begin(), state.end()}};
    truth_->run(half_->after, tokens, begin, end);
    std::ranges::copy(part_of(half_->after, part), part_of(state, part).begin());
    return;
  }
  std::ranges::copy(part_of(half_->after, part), part_of(state, part).begin());
  half_.reset();
}

void NumberState::free_state(StateSlot slot) {
  poison(named(slot), slot.value);
  left_.erase(state_index(slot));
  rings_.erase(state_index(slot));
}

void NumberState::verify_state(StateSlot slot, StatePart, const VerifiedRow& row) {
  const std::span<double> state = named(slot);
  std::vector<double>& after = left_[state_index(slot)];
  after.resize(std::max<std::size_t>(1, row.size() * model_.state_size()));
  truth_->run(state, row.known.followed_by(row.drafts), row.begin, row.begin + row.size(),
              after.data(), row.drafts.size(), row.parents);
}

void NumberState::commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                               StatePart part) {
  named(verified);
  const std::span<double> to = named(target);
  const auto left = left_.find(state_index(verified));
  const std::size_t size = model_.state_size();
  if (left == left_.end() || (at + std::size_t{1}) * size > left->second.size()) return;
  const std::span<double> from = std::span(left->second).subspan(at * size, size);
  std::ranges::copy(part_of(from, part), part_of(to, part).begin());
}

void NumberState::fold_ring(StateSlot slot, std::uint32_t live, const Tokens& tokens,
                            std::uint32_t size) {
  scan_ring(slot, live, named(slot));
  compare_parts(slot, {.conv = false}, tokens, size, "is folded with its ring after");
}

void NumberState::rewind_conv(StateSlot slot) {
  const std::span<double> state = named(slot);
  std::ranges::copy(ring_entry(slot, 0).subspan(model_.state_input_size()),
                    part_of(state, StatePart::conv).begin());
}

void NumberState::receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                                std::uint32_t size) {
  const std::span<double> state = named(slot);
  const std::span<const double> right = truth_->state(truth_->at(tokens, size));
  const std::size_t recurrent = model_.recurrent_size();
  std::ranges::copy(
      part == StatePart::recurrent ? right.first(recurrent) : right.subspan(recurrent),
      part_of(state, part).begin());
}

void NumberState::run_padding_row(StateSlot slot) {
  poison(named(slot), slot.value);
}

// --- KV

void NumberState::allocate_kv(KvSlots slots) {
  for (const std::uint32_t slot : slots) named_kv(slot);
}

void NumberState::write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) {
  const auto count = static_cast<std::uint32_t>(slots.size());
  if (count == 0) return;
  Truth::Node node = truth_->at(tokens, begin + count);
  for (std::uint32_t i = count; i > 0; node = truth_->before(node))
    std::ranges::copy(truth_->kv(node), named_kv(slots[--i]).begin());
}

void NumberState::free_kv(KvSlots slots) {
  for (const std::uint32_t slot : slots) poison(named_kv(slot), slot);
}

void NumberState::copy_kv(KvSlots sources, KvSlots targets) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    named_kv(sources[i]);
    const std::span<double> to = named_kv(targets[i]);
    const std::span<double> from = kv_at(kv_index(sources[i]));
    if (from.data() != to.data()) std::ranges::copy(from, to.begin());
  }
}

}  // namespace lockstep::cache_sim
