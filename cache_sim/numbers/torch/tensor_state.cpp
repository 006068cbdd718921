#include "cache_sim/numbers/torch/tensor_state.hpp"

#include <algorithm>
#include <utility>

#include "cache_sim/numbers/compared.hpp"
#include "cache_sim/numbers/torch/tensor_call.hpp"
#include "cache_sim/numbers/wrong_numbers.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

using at::Tensor;

namespace {

StatePart part_of(PoolKind kind) {
  return kind == PoolKind::conv ? StatePart::conv : StatePart::recurrent;
}

}  // namespace

TensorState::TensorState(std::shared_ptr<TensorTruth> truth, std::int64_t states,
                         std::int64_t kv_end, std::int64_t page, const LabelState* labels,
                         std::shared_ptr<Truth> reference)
    : truth_(std::move(truth)),
      labels_(labels),
      reference_(std::move(reference)),
      model_(truth_->model()),
      batches_(model_),
      state_slots_(static_cast<std::uint32_t>(states) + 2),
      kv_slots_(static_cast<std::uint32_t>(kv_end) + 1),
      page_(static_cast<std::uint32_t>(std::min(page, kv_end))),
      memory_(truth_->memory(state_slots_, kv_slots_)),
      pools_(memory_->pools),
      state_histories_(state_slots_),
      kv_histories_(kv_slots_),
      kv_open_(kv_slots_) {
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const PoolPart& part = model_.parts()[i];
    (part.kind == PoolKind::kv ? kv_layers_ : state_layers_) = part.layer + 1;
    poison_each(pools_[i]);
  }
}

// --- Slots

std::uint32_t TensorState::state_index(StateSlot slot) const {
  return std::min(slot.value, state_slots_ - 1);
}
std::uint32_t TensorState::kv_index(std::uint32_t slot) const {
  return std::min(slot, kv_slots_ - 1);
}
bool TensorState::is_open(std::uint32_t state) const {
  return std::ranges::find(open_states_, state) != open_states_.end();
}

/// The index of a slot that a call names: a batch in which it is open runs first.
std::uint32_t TensorState::close_state(StateSlot slot) {
  const std::uint32_t index = state_index(slot);
  if (is_open(index)) run();
  return index;
}
std::uint32_t TensorState::close_kv(std::uint32_t slot) {
  const std::uint32_t index = kv_index(slot);
  if (kv_open_[index] == batch_) run();
  return index;
}

template <class Act>
void TensorState::for_parts(StatePart part, const Act& act) const {
  for (std::size_t i = 0; i < pools_.size(); ++i)
    if (model_.parts()[i].kind != PoolKind::kv && part_of(model_.parts()[i].kind) == part)
      act(i, model_.parts()[i]);
}

/// Writes the numbers of a history to that part of a slot.
void TensorState::set_state(std::uint32_t slot, StatePart part, History history) {
  for_parts(part, [&](std::size_t i, const PoolPart& one) {
    pools_[i].select(0, slot).copy_(truth_->numbers(i, history));
    this->history(slot, one.kind) = history;
  });
}

// --- Batches

void TensorState::forward(const ForwardRow& row) {
  if (row.end <= row.begin) return;
  require_layers(row, state_layers_, kv_layers_);
  told_.list(row);
  if (!told_.are_in_pools(row, state_slots_ - 1, kv_slots_ - 1)) {
    findings_.push_back(outside_of_pools(row));
    return;
  }
  std::vector<std::uint32_t> states, kv;
  told_.for_written(
      row, [&](std::uint32_t slot) { states.push_back(slot); },
      [&](std::uint32_t slot) { kv.push_back(slot); });
  if (std::ranges::any_of(states, [&](std::uint32_t slot) { return is_open(slot); }) ||
      std::ranges::any_of(kv, [&](std::uint32_t slot) { return kv_open_[slot] == batch_; }))
    run();
  open_states_.insert(open_states_.end(), states.begin(), states.end());
  for (const std::uint32_t slot : told_.kv)
    for_layers(slot, row.kv_layers, [&](std::uint32_t one) { kv_open_[one] = batch_; });
  for (const std::uint32_t slot : kv) kv_open_[slot] = batch_;

  OpenRow& open = rows_.emplace_back();
  open.request = row.request;
  open.text = row.tokens;
  open.also = told_.also;
  if (labels_ != nullptr) open.wrong_label = wrong_state_label(*labels_, row);
  open.row = {.begin = row.begin,
              .kv = told_.kv,
              .writes_kv = row.writes_kv,
              .drafts = row.drafts,
              .padding = row.places() - row.end,
              .verifies = row.drafts > 0,
              .parents = {row.parents.begin(), row.parents.end()},
              .has_state = row.state.exists() && model_.has_states(),
              .state = row.state.exists() ? row.state.value : 0,
              .keeps_recurrent = row.keeps.recurrent,
              .keeps_conv = row.keeps.conv,
              .state_layers = {row.state_layers.begin(), row.state_layers.end()},
              .kv_layers = {row.kv_layers.begin(), row.kv_layers.end()}};
  open.row.tokens.assign(row.places() - row.begin, 0);
  for (std::uint32_t i = row.begin; i < row.end; ++i)
    open.row.tokens[i - row.begin] = row.tokens[i];
  for (const StateTake& take : row.takes)
    open.row.takes.push_back(
        {take.after, take.target.value, take.parts.recurrent, take.parts.conv});
}

void TensorState::launch(std::span<const StateSlot> padding) {
  for (std::size_t i = 0; i < pools_.size(); ++i)
    for (std::uint32_t slot = 0;
         slot < (model_.parts()[i].kind == PoolKind::kv ? page_ : std::uint32_t{1}); ++slot)
      poison(pools_[i].select(0, slot), slot);
  run();
  for (const StateSlot slot : padding) run_padding_row(slot);
}

void TensorState::run() {
  std::vector<OpenRow> rows = std::exchange(rows_, {});
  open_states_.clear();
  ++batch_;
  if (rows.empty()) return;
  std::vector<const TensorRow*> told;
  for (OpenRow& open : rows) {
    begin(open);
    told.push_back(&open.row);
  }
  const TensorResults results = batches_.run(told, *memory_, findings_);
  const Tensor all = results.logits.contiguous();
  std::span<const float> logits(all.data_ptr<float>(), static_cast<std::size_t>(all.numel()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto own = static_cast<std::size_t>(rows[i].row.sampled() * model_.config().vocabulary);
    compare(rows[i], logits.first(own));
    compare_likeliest(rows[i], logits);
    logits = logits.subspan(own);
    end(rows[i], results.states_after[i]);
  }
}

/// Finds the row's truth, and compares the state from which the row starts.
void TensorState::begin(OpenRow& open) {
  const TensorRow& row = open.row;
  const std::vector<PoolPart>& parts = model_.parts();
  open.start.states.assign(parts.size(), kNoHistory);
  open.start.kv.resize(row.kv_layers.empty() ? 1 : kv_layers_);
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (parts[i].kind != PoolKind::kv && row.has_state)
      open.start.states[i] = history(row.state_slot(row.state, parts[i].layer), parts[i].kind);
  for (std::size_t layer = 0; layer < open.start.kv.size(); ++layer)
    for (std::int64_t place = 0; place < row.begin; ++place)
      open.start.kv[layer].push_back(
          kv_histories_[row.kv_slot(row.kv[static_cast<std::size_t>(place)], layer)]);
  open.truth = &truth_->row(open.text, row, open.start);
  if (!row.has_state) return;
  for (std::size_t i = 0; i < parts.size() && open.wrong_state.empty(); ++i) {
    if (parts[i].kind == PoolKind::kv) continue;
    const Tensor own = pools_[i].select(0, row.state_slot(row.state, parts[i].layer));
    if (!same_bits(own, truth_->numbers(i, open.start.states[i])))
      open.wrong_state = "unit " + std::to_string(parts[i].unit) + ": the " + parts[i].name() +
                         " part of state slot " + std::to_string(row.state) + " differs" +
                         origin(own, "state slot");
  }
}

/// Leaves histories, copies, and the states of a verification.
void TensorState::end(const OpenRow& open, const std::vector<Tensor>& states_after) {
  const TensorRow& row = open.row;
  const std::vector<PoolPart>& parts = model_.parts();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const PoolPart& part = parts[i];
    if (part.kind != PoolKind::kv) {
      if (!row.has_state || row.verifies) continue;
      const bool recurrent = part.kind == PoolKind::recurrent;
      if (recurrent ? row.keeps_recurrent : row.keeps_conv)
        history(row.state_slot(row.state, part.layer), part.kind) = open.truth->end;
      for (std::size_t take = 0; take < row.takes.size(); ++take)
        if (recurrent ? row.takes[take].recurrent : row.takes[take].conv)
          history(row.state_slot(row.takes[take].slot, part.layer), part.kind) =
              open.truth->takes[take];
      continue;
    }
    for (std::size_t place = 0; place < row.kv.size(); ++place) {
      const std::uint32_t slot = row.kv_slot(row.kv[place], part.layer);
      const std::size_t token = place - static_cast<std::size_t>(row.begin);
      if (place >= static_cast<std::size_t>(row.begin) && row.writes_kv)
        kv_histories_[slot] = token < open.truth->kv.size() ? open.truth->kv[token] : kNoHistory;
    }
    for (std::size_t place = static_cast<std::size_t>(row.begin);
         place < std::min(row.kv.size(), open.also.size()); ++place) {
      const std::uint32_t from = row.kv_slot(row.kv[place], part.layer);
      const std::uint32_t to = row.kv_slot(open.also[place], part.layer);
      pools_[i].select(0, to).copy_(pools_[i].select(0, from));
      kv_histories_[to] = kv_histories_[from];
    }
  }
  if (row.verifies && row.has_state) leave(open, states_after);
}

/// A verification leaves its states beside the slot, and in slots where it takes states; then it
/// keeps parts of its own, too.
void TensorState::leave(const OpenRow& open, const std::vector<Tensor>& states_after) {
  const TensorRow& row = open.row;
  const std::vector<PoolPart>& parts = model_.parts();
  const auto store = [&](std::size_t i, std::uint32_t slot, std::int64_t token, History of) {
    pools_[i].select(0, row.state_slot(slot, parts[i].layer)).copy_(states_after[i][token]);
    history(row.state_slot(slot, parts[i].layer), parts[i].kind) = of;
  };
  const std::int64_t last = row.size() - row.padding - 1;
  std::vector<Tensor> before(parts.size());
  std::vector<History> histories_before(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (parts[i].kind != PoolKind::kv) {
      const std::uint32_t slot = row.state_slot(row.state, parts[i].layer);
      before[i] = pools_[i].select(0, slot).clone();
      histories_before[i] = history(slot, parts[i].kind);
    }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].kind == PoolKind::kv) continue;
    const bool recurrent = parts[i].kind == PoolKind::recurrent;
    for (const reference::HybridTake& take : row.takes) {
      if (!(recurrent ? take.recurrent : take.conv)) continue;
      const std::int64_t seen = take.after - row.begin;
      if (seen > 0) {
        store(i, take.slot, seen - 1, open.truth->states_after[static_cast<std::size_t>(seen - 1)]);
        continue;
      }
      const std::uint32_t slot = row.state_slot(take.slot, parts[i].layer);
      pools_[i].select(0, slot).copy_(before[i]);
      history(slot, parts[i].kind) = histories_before[i];
    }
    if (!row.takes.empty() && (recurrent ? row.keeps_recurrent : row.keeps_conv))
      store(i, row.state, last, open.truth->states_after[static_cast<std::size_t>(last)]);
  }
  for_layers(row.state, row.state_layers, [&](std::uint32_t slot) {
    left_[slot] = {states_after, open.truth->states_after};
  });
}

// --- Comparison

void TensorState::compare(const OpenRow& open, std::span<const float> logits) {
  const TensorRow& row = open.row;
  const std::int64_t V = model_.config().vocabulary;
  const std::optional<std::string> moved = moved_logits(row, logits, *open.truth, V);
  const auto end = static_cast<std::uint32_t>(row.begin + row.size() - row.padding);
  if (tells_rows_)
    told_rows_.push_back(told_row(open.request.text(), end, logits_of(logits, row.sampled() - 1, V),
                                  logits_of(open.truth->logits, row.sampled() - 1, V),
                                  "the row alone"));
  const std::string read = row_text(static_cast<std::uint32_t>(row.begin), end, open.text);
  if (!moved && open.wrong_state.empty()) {
    if (row.has_state && open.wrong_label)
      findings_.push_back(number_agrees(read, *open.wrong_label, "the row alone"));
    return;
  }
  const std::string off = moved.value_or(std::string(kOnlyReadsWrong));
  std::string where = open.wrong_state;
  if (where.empty()) where = wrong_kv(open);
  if (where.empty()) where = kReadsRight;
  std::optional<Finding> wrong = open.wrong_label;
  if (!wrong && labels_ != nullptr)
    wrong = wrong_kv_label(*labels_, open.text,
                           KvSlots(row.kv).first(end - static_cast<std::uint32_t>(row.drafts)),
                           row.kv_layers);
  if (wrong) {
    wrong->text = read + " " + wrong->text + std::string(kNumbersSay) + off + "; " + where;
    findings_.push_back(*wrong);
    return;
  }
  findings_.push_back({FindingKind::number_differs, read + ": " + off + "; " + where,
                       "the bits of the same operators over this row alone", where});
}

/// The first KV slot that the row read and that is not right.
std::string TensorState::wrong_kv(const OpenRow& open) const {
  const TensorRow& row = open.row;
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const PoolPart& part = model_.parts()[i];
    if (part.kind != PoolKind::kv) continue;
    const std::vector<History>& right = open.start.kv[open.start.kv.size() > 1 ? part.layer : 0];
    for (std::size_t place = 0; place < right.size(); ++place) {
      const Tensor own = pools_[i].select(0, row.kv_slot(row.kv[place], part.layer));
      if (!same_bits(own, truth_->numbers(i, right[place])))
        return "unit " + std::to_string(part.unit) + ": KV slot " + std::to_string(row.kv[place]) +
               " of token " + std::to_string(place) + " differs" + origin(own, "KV slot");
    }
  }
  return "";
}

void TensorState::compare_likeliest(const OpenRow& open, std::span<const float> logits) {
  const TensorRow& row = open.row;
  if (reference_ == nullptr || row.verifies) return;
  const std::int64_t V = model_.config().vocabulary;
  const auto end = static_cast<std::uint32_t>(row.begin + row.size() - row.padding);
  const std::vector<double> own = logits_of(logits, 0, V);
  ++greedy_.compared;
  greedy_.different +=
      likeliest_of(own) != likeliest_of(reference_->logits(reference_->at(open.text, end))) ? 1 : 0;
}

/// Compares that part of a slot of no row with that of tokens[0, size).
void TensorState::compare_start(std::uint32_t slot, StatePart part, const Tokens& tokens,
                                std::uint32_t size) {
  const Label right = label_of(tokens, size);
  for_parts(part, [&](std::size_t i, const PoolPart& one) {
    History from = history(slot, one.kind);
    if (truth_->state_label(from) != right) from = truth_->state_of(tokens, size);
    const Tensor own = pools_[i].select(0, slot);
    if (same_bits(own, truth_->numbers(i, from))) return;
    findings_.push_back({FindingKind::number_differs,
                         "state slot " + std::to_string(slot) + " goes on after " +
                             std::to_string(size) + " tokens of " + tokens.text(60) + "; unit " +
                             std::to_string(one.unit) + ": its " + one.name() + " part differs" +
                             origin(own, "state slot"),
                         "the bits of the same operators over this text alone", "others"});
  });
}

Findings TensorState::drain(bool completes) {
  if (completes && !rows_.empty()) launch({});
  return std::exchange(findings_, {});
}

// --- States

void TensorState::zero_state(StateSlot slot, StatePart part) {
  const std::uint32_t index = close_state(slot);
  for_parts(part, [&](std::size_t i, const PoolPart& one) {
    call("state_zero",
         {{"state", pools_[i].unsqueeze(0)},
          {"slots", at::tensor({static_cast<std::int32_t>(index)}, at::kInt).to(model_.device())}});
    history(index, one.kind) = kEmptyText;
  });
}

void TensorState::copy_state(StateSlot source, StateSlot target, StatePart part) {
  close_state(source);
  const std::uint32_t to = close_state(target), from = state_index(source);
  if (from == to) return;
  const auto slot = [&](std::uint32_t index) {
    return at::tensor({static_cast<std::int32_t>(index)}, at::kInt).to(model_.device());
  };
  for_parts(part, [&](std::size_t i, const PoolPart& one) {
    call("state_copy",
         {{"state", pools_[i].unsqueeze(0)}, {"source", slot(from)}, {"target", slot(to)}});
    history(to, one.kind) = history(from, one.kind);
  });
}

void TensorState::advance_state(StateSlot slot, StatePart part, const Tokens& tokens,
                                std::uint32_t begin, std::uint32_t end) {
  const std::uint32_t index = close_state(slot);
  compare_start(index, part, tokens, begin);
  if (end > begin) set_state(index, part, truth_->state_of(tokens, end));
}

void TensorState::free_state(StateSlot slot) {
  const std::uint32_t index = close_state(slot);
  for (const StatePart part : kStateParts)
    for_parts(part,
              [&](std::size_t i, const PoolPart&) { poison(pools_[i].select(0, index), index); });
  state_histories_[index] = {};
  left_.erase(index);
}

void TensorState::verify_state(StateSlot slot, StatePart, const VerifiedRow& row) {
  const std::uint32_t index = close_state(slot);
  Left& left = left_[index];
  left = {std::vector<Tensor>(pools_.size()), {}};
  std::vector<std::uint32_t> depth;
  for (std::uint32_t i = 0; i < row.size(); ++i) {
    // The text of this token's path.
    std::vector<Token> path;
    for (std::uint32_t draft = i < row.inputs() ? 0 : i - row.inputs() + 1; draft > 0;
         draft = row.parent_of(draft))
      path.insert(path.begin(), row.drafts[draft - 1]);
    const std::uint32_t known = i < row.inputs() ? row.begin + i + 1 : row.known.size();
    const Tokens text = row.known.prefix(known).followed_by(Tokens::of_values(path));
    left.histories.push_back(truth_->state_of(text, text.size()));
  }
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    if (model_.parts()[i].kind == PoolKind::kv) continue;
    std::vector<Tensor> states;
    for (const History one : left.histories) states.push_back(truth_->numbers(i, one));
    if (!states.empty()) left.states[i] = at::stack(states);
  }
}

void TensorState::commit_state(StateSlot verified, std::uint32_t at, StateSlot target,
                               StatePart part) {
  close_state(verified);
  const std::uint32_t to = close_state(target);
  const auto left = left_.find(state_index(verified));
  if (left == left_.end() || at >= left->second.histories.size()) return;
  const auto number = [&](std::uint32_t x) {
    return at::tensor({static_cast<std::int32_t>(x)}, at::kInt).to(model_.device());
  };
  for_parts(part, [&](std::size_t i, const PoolPart& one) {
    call("state_scatter_accepted", {{"state", pools_[i]},
                                    {"intermediate", left->second.states[i].unsqueeze(0)},
                                    {"slots", number(to)},
                                    {"num_accepted_tokens", number(at + 1)}});
    history(to, one.kind) = left->second.histories[at];
  });
}

void TensorState::receive_state(StateSlot slot, StatePart part, const Tokens& tokens,
                                std::uint32_t size) {
  set_state(close_state(slot), part, truth_->state_of(tokens, size));
}

// --- KV

void TensorState::poison_kv(std::uint32_t slot) {
  for (std::size_t i = 0; i < pools_.size(); ++i)
    if (model_.parts()[i].kind == PoolKind::kv) poison(pools_[i].select(0, slot), slot);
  kv_histories_[slot] = kNoHistory;
}

void TensorState::allocate_kv(KvSlots slots) {
  for (const std::uint32_t slot : slots) close_kv(slot);
}

void TensorState::write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) {
  for (auto i = static_cast<std::uint32_t>(slots.size()); i-- > 0;) {
    const std::uint32_t slot = close_kv(slots[i]);
    const History from = truth_->kv_of(tokens, begin + i);
    for (std::size_t one = 0; one < pools_.size(); ++one)
      if (model_.parts()[one].kind == PoolKind::kv)
        pools_[one].select(0, slot).copy_(truth_->numbers(one, from));
    kv_histories_[slot] = from;
  }
}

void TensorState::free_kv(KvSlots slots) {
  for (const std::uint32_t slot : slots) poison_kv(close_kv(slot));
}

void TensorState::copy_kv(KvSlots sources, KvSlots targets) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    close_kv(sources[i]);
    const std::uint32_t to = close_kv(targets[i]), from = kv_index(sources[i]);
    if (from == to) continue;
    for (std::size_t one = 0; one < pools_.size(); ++one)
      if (model_.parts()[one].kind == PoolKind::kv)
        pools_[one].select(0, to).copy_(pools_[one].select(0, from));
    kv_histories_[to] = kv_histories_[from];
  }
}

}  // namespace lockstep::cache_sim
