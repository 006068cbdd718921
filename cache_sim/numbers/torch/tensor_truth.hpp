// The numbers of rows that run alone, for comparison with those of a batch over a policy's slots.
//
// Bits of a state depend on how its text was cut into calls: chunks of a prefill begin at its first
// token, and a decode is another kernel. So each state and each token's KV has a *history*: the row
// that computed it, of which kind and length, from which histories. A policy's slots carry
// histories as they carry labels: copies copy them, rows extend them. A row's truth is computed
// from the histories that its slots should have, once: alone, without padding, in other slots. A
// slot of another text, or without a history, is replaced by any history of the right text, so that
// a wrong slot changes the numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/numbers/torch/tensor_model.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {

/// Names numbers that this truth has computed: a state, or the KV of one token.
using History = std::uint32_t;
inline constexpr History kNoHistory = 0;
inline constexpr History kEmptyText = 1;  ///< of a state: that of the empty text, zero

/// Histories from which a row starts.
struct RowStart {
  std::vector<History> states{};           ///< by part of the model; of no use for KV
  std::vector<std::vector<History>> kv{};  ///< by layer with KV; by place, [begin]
};

struct RowTruth {
  std::vector<float> logits{};  ///< [sampled, vocabulary]
  History end = kNoHistory;     ///< of a row that is no verification
  std::vector<History> takes{};
  std::vector<History> states_after{};  ///< of a verification, by token
  std::vector<History> kv{};            ///< by token, without padding
};

class TensorTruth {
 public:
  explicit TensorTruth(std::shared_ptr<const TensorModel> model);

  const TensorModel& model() const { return *model_; }

  /// The row over tokens of `text`; its slots are of no use. Histories of other texts in `start`
  /// are replaced.
  const RowTruth& row(const Tokens& text, const TensorRow& row, RowStart& start);

  /// A history of the text's first tokens; a prefill computes one where none is known.
  History state_of(const Tokens& text, std::uint32_t size);
  /// The same for the KV of token `place`.
  History kv_of(const Tokens& text, std::uint32_t place);

  const Label& state_label(History state) const { return state_labels_[state]; }
  const Label& kv_label(History kv) const { return kv_labels_[kv]; }

  /// Memory of that many slots or more, all NaN; who has it has it alone. A small one is kept for
  /// the next owner, with what was captured over it.
  std::shared_ptr<TensorMemory> memory(std::int64_t states, std::int64_t kv);
  /// The same for memory of another kind: a small one is that of an earlier owner with this key,
  /// as it was left.
  std::shared_ptr<TensorMemory> memory(const std::vector<std::int64_t>& key, std::int64_t bytes,
                                       const std::function<std::shared_ptr<TensorMemory>()>& make);

  /// The numbers of a part, [...].
  at::Tensor numbers(std::size_t part, History history) const {
    return stored_[part].select(0, history);
  }

  std::int64_t computed() const { return static_cast<std::int64_t>(rows_.size()); }

 private:
  struct Key {
    std::uint64_t first, second;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const { return key.first; }
  };
  struct LabelHash {
    std::size_t operator()(const Label& label) const {
      return mix64(label.digest ^ mix64(label.size));
    }
  };
  Key key_of(const Tokens& text, const TensorRow& row, const RowStart& start) const;
  RowTruth computed(const Tokens& text, const TensorRow& row, const RowStart& start);
  void replace_wrong(const Tokens& text, const TensorRow& row, RowStart& start);
  /// A prefill of the text's first tokens from nothing.
  void prefill(const Tokens& text, std::uint32_t size);
  History add_states(const std::vector<Label>& labels);
  History add_kv(const std::vector<Label>& labels);

  std::shared_ptr<const TensorModel> model_;
  TensorPools work_;    // state slot 1 is the row's; KV slot 1 is that of token 0
  TensorPools stored_;  // by history
  std::vector<std::pair<std::vector<std::int64_t>, std::shared_ptr<TensorMemory>>>
      memories_;  // by key, a few
  std::vector<Label> state_labels_, kv_labels_;
  std::unordered_map<Label, History, LabelHash> states_, kv_;  // any history of a text
  std::unordered_map<Key, RowTruth, KeyHash> rows_;
};

}  // namespace lockstep::cache_sim
