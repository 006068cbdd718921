#include "cache_sim/numbers/torch/tensor_truth.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

using at::Tensor;

namespace {

constexpr std::int64_t kBytesOfASlot = 1 << 15;  // some, of all layers
constexpr std::uint32_t kRowSlot = 1;            // in the pools in which rows run

/// The pool with room for `size` slots; what it holds stays.
void grow(Tensor& pool, std::int64_t size) {
  if (pool.size(0) >= size) return;
  std::vector<std::int64_t> shape = pool.sizes().vec();
  shape[0] = std::max(size, 2 * pool.size(0));
  const Tensor larger = at::empty(shape, pool.options());
  larger.narrow(0, 0, pool.size(0)).copy_(pool);
  pool = larger;
}

Tensor list_of(const std::vector<History>& histories, const at::Device& device) {
  const std::vector<std::int64_t> numbers(histories.begin(), histories.end());
  return at::tensor(numbers, at::kLong).to(device);
}

}  // namespace

TensorTruth::TensorTruth(std::shared_ptr<const TensorModel> model)
    : model_(std::move(model)),
      work_(model_->pools(8, 64)),
      stored_(model_->pools(256, 1024)),
      state_labels_{Label{.poisoned = true}, Label{}},
      kv_labels_{Label{.poisoned = true}} {
  for (std::size_t i = 0; i < stored_.size(); ++i)
    if (model_->parts()[i].kind != PoolKind::kv) numbers(i, kEmptyText).zero_();
  states_[Label{}] = kEmptyText;
}

std::shared_ptr<TensorMemory> TensorTruth::memory(std::int64_t states, std::int64_t kv) {
  const std::vector<std::int64_t> key{room_for(states), room_for(kv)};
  bool is_new = false;
  std::shared_ptr<TensorMemory> found = memory(key, std::max(states, kv) * kBytesOfASlot, [&] {
    is_new = true;
    return std::make_shared<TensorMemory>(model_->pools(key[0], key[1]));
  });
  for (const Tensor& pool : found->pools)
    if (!is_new) pool.fill_(std::numeric_limits<double>::quiet_NaN());
  return found;
}

std::shared_ptr<TensorMemory> TensorTruth::memory(
    const std::vector<std::int64_t>& key, std::int64_t bytes,
    const std::function<std::shared_ptr<TensorMemory>()>& make) {
  constexpr std::int64_t kMostKeptBytes = 1 << 28;
  constexpr std::size_t kMostKept = 4;
  if (bytes > kMostKeptBytes) return make();
  const auto is_free = [](const auto& one) { return one.second.use_count() == 1; };
  const auto found = std::ranges::find_if(
      memories_, [&](const auto& one) { return one.first == key && is_free(one); });
  if (found != memories_.end()) return found->second;
  if (memories_.size() >= kMostKept)
    if (const auto oldest = std::ranges::find_if(memories_, is_free); oldest != memories_.end())
      memories_.erase(oldest);
  return memories_.emplace_back(key, make()).second;
}

History TensorTruth::add_states(const std::vector<Label>& labels) {
  const auto first = static_cast<History>(state_labels_.size());
  for (const Label& label : labels) {
    states_.emplace(label, static_cast<History>(state_labels_.size()));
    state_labels_.push_back(label);
  }
  for (std::size_t i = 0; i < stored_.size(); ++i)
    if (model_->parts()[i].kind != PoolKind::kv)
      grow(stored_[i], static_cast<std::int64_t>(state_labels_.size()));
  return first;
}

History TensorTruth::add_kv(const std::vector<Label>& labels) {
  const auto first = static_cast<History>(kv_labels_.size());
  for (const Label& label : labels) {
    kv_.emplace(label, static_cast<History>(kv_labels_.size()));
    kv_labels_.push_back(label);
  }
  for (std::size_t i = 0; i < stored_.size(); ++i)
    if (model_->parts()[i].kind == PoolKind::kv)
      grow(stored_[i], static_cast<std::int64_t>(kv_labels_.size()));
  return first;
}

void TensorTruth::prefill(const Tokens& text, std::uint32_t size) {
  TensorRow row;
  for (std::uint32_t i = 0; i < size; ++i) row.tokens.push_back(text[i]);
  row.kv.resize(size);
  RowStart start{.states = std::vector<History>(model_->parts().size(), kEmptyText),
                 .kv = std::vector<std::vector<History>>(1)};
  this->row(text, row, start);
}

History TensorTruth::state_of(const Tokens& text, std::uint32_t size) {
  if (!model_->has_states()) return kNoHistory;
  const Label label = label_of(text, size);
  if (!states_.contains(label)) prefill(text, size);
  return states_.at(label);
}

History TensorTruth::kv_of(const Tokens& text, std::uint32_t place) {
  const Label label = label_of(text, place + 1);
  if (!kv_.contains(label)) prefill(text, place + 1);
  return kv_.at(label);
}

void TensorTruth::replace_wrong(const Tokens& text, const TensorRow& row, RowStart& start) {
  const auto begin = static_cast<std::uint32_t>(row.begin);
  const Label before = label_of(text, begin);
  if (model_->has_states())
    for (History& state : start.states)
      if (state_labels_[state] != before) state = state_of(text, begin);
  // From the end, so that one prefill serves all places.
  for (std::uint32_t place = begin; place-- > 0;) {
    const Label label = label_of(text, place + 1);
    for (std::vector<History>& layer : start.kv)
      if (kv_labels_[layer[place]] != label) layer[place] = kv_of(text, place);
  }
}

TensorTruth::Key TensorTruth::key_of(const Tokens& text, const TensorRow& row,
                                     const RowStart& start) const {
  Digest one{.value = 1}, two{.value = 2};
  const auto add = [&](std::uint64_t x) {
    one.add(x);
    two.add(x);
  };
  add(static_cast<std::uint64_t>(row.begin));
  add(text.digest(static_cast<std::uint32_t>(row.begin + row.size() - row.padding)));
  add(static_cast<std::uint64_t>(row.size() - row.padding));
  add(static_cast<std::uint64_t>(row.drafts) * 2 + (row.verifies ? 1 : 0));
  for (const std::int64_t parent : row.parents) add(static_cast<std::uint64_t>(parent));
  add(row.verifies ? 0 : row.takes.size());
  for (const reference::HybridTake& take : row.takes)
    if (!row.verifies) add(static_cast<std::uint64_t>(take.after));
  if (model_->has_states())
    for (const History state : start.states) add(state);
  for (const std::vector<History>& layer : start.kv)
    for (const History kv : layer) add(kv);
  return {one.value, two.value};
}

const RowTruth& TensorTruth::row(const Tokens& text, const TensorRow& row, RowStart& start) {
  replace_wrong(text, row, start);
  const Key key = key_of(text, row, start);
  if (const auto found = rows_.find(key); found != rows_.end()) return found->second;
  return rows_.emplace(key, computed(text, row, start)).first->second;
}

RowTruth TensorTruth::computed(const Tokens& text, const TensorRow& row, const RowStart& start) {
  TensorRow own{.tokens = {row.tokens.begin(), row.tokens.end() - row.padding},
                .begin = row.begin,
                .drafts = row.drafts,
                .verifies = row.verifies,
                .parents = row.parents,
                .has_state = model_->has_states(),
                .state = kRowSlot,
                .starts_from_nothing = row.begin == 0 && !row.verifies};
  if (!row.verifies)
    for (const reference::HybridTake& take : row.takes)
      own.takes.push_back(
          {take.after, kRowSlot + 1 + static_cast<std::uint32_t>(own.takes.size())});
  own.kv.resize(static_cast<std::size_t>(own.begin + own.size()));
  std::iota(own.kv.begin(), own.kv.end(), kRowSlot);
  const auto n = static_cast<std::uint32_t>(own.size());
  const std::vector<PoolPart>& parts = model_->parts();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].kind != PoolKind::kv) {
      grow(work_[i], static_cast<std::int64_t>(own.takes.size()) + kRowSlot + 1);
      work_[i].fill_(std::numeric_limits<double>::quiet_NaN());
      // A prefill is told that it starts from nothing; a verification reads its slot.
      if (!own.starts_from_nothing) work_[i].select(0, kRowSlot).copy_(numbers(i, start.states[i]));
      continue;
    }
    grow(work_[i], static_cast<std::int64_t>(own.kv.size()) + kRowSlot);
    work_[i].fill_(std::numeric_limits<double>::quiet_NaN());
    if (row.begin > 0)
      work_[i]
          .narrow(0, kRowSlot, row.begin)
          .copy_(stored_[i].index_select(
              0, list_of(start.kv[start.kv.size() > 1 ? parts[i].layer : 0], model_->device())));
  }
  const TensorRow* const only = &own;
  const TensorResults results = model_->forward({&only, 1}, work_, false);

  RowTruth truth;
  const Tensor logits = results.logits.contiguous();
  truth.logits.assign(logits.data_ptr<float>(), logits.data_ptr<float>() + logits.numel());
  std::vector<Label> labels;  // after each token of the row
  const std::vector<std::int32_t> tree = own.tree();
  const Label before = label_of(text, static_cast<std::uint32_t>(row.begin));
  for (std::uint32_t i = 0; i < n; ++i) {
    const Label& parent = tree[i] < 0 ? before : labels[static_cast<std::size_t>(tree[i])];
    labels.push_back({extend_digest(parent.digest, own.tokens[i]), parent.size + 1});
  }
  if (model_->has_states()) {
    std::vector<Label> states = labels;
    if (!row.verifies) {
      states.clear();
      for (const reference::HybridTake& take : own.takes)
        states.push_back(label_of(text, static_cast<std::uint32_t>(take.after)));
      states.push_back(labels.back());
    }
    const History first = add_states(states);
    std::vector<History> all(states.size());
    std::iota(all.begin(), all.end(), first);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].kind == PoolKind::kv) continue;
      if (row.verifies) {
        stored_[i].narrow(0, first, n).copy_(results.states_after[0][i]);
        continue;
      }
      const auto takes = static_cast<std::int64_t>(own.takes.size());
      stored_[i].narrow(0, first, takes).copy_(work_[i].narrow(0, kRowSlot + 1, takes));
      stored_[i].select(0, first + takes).copy_(work_[i].select(0, kRowSlot));
    }
    if (row.verifies) {
      truth.states_after = std::move(all);
    } else {
      truth.end = all.back();
      all.pop_back();
      truth.takes = std::move(all);
    }
  }
  const History first = add_kv(labels);
  truth.kv.resize(n);
  std::iota(truth.kv.begin(), truth.kv.end(), first);
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (parts[i].kind == PoolKind::kv)
      stored_[i].narrow(0, first, n).copy_(work_[i].narrow(0, kRowSlot + row.begin, n));
  return truth;
}

}  // namespace lockstep::cache_sim
