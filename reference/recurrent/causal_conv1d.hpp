// Depthwise causal convolution of short width, the first step of Mamba2 and gated-delta-net layers.
// Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3.4.
//
//   y_t[d] = act(bias[d] + sum_{k < W} w[d, k] x_{t - (W - 1) + k}[d])
//
// where x_p for p < 0 comes from the state, or is 0.
//
//   here         paper, causal-conv1d   vLLM                  shape
//   x            x                      x                     [T, D], packed
//   weight       weight                 weight                [D, W], W >= 1
//   conv_state   conv_state             conv_state            [slots, D, C], oldest to newest
//   history      the state's last W - 1 columns               [D, W - 1]
//   out          out                    out                   [T, D]
//
// The state has C = W - 1 or C = W columns. With accepted counts (a speculative pool) it has at
// least W - 1 + longest row - 1 columns, filled from the left. Before a step of q tokens the
// history is in columns acc - 1 ... acc + W - 3; after it, columns 0 ... W - 3 + q hold the history
// without its first column, then the q tokens. Snapshots of such a pool are the W - 1 columns that
// the next token would see.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "reference/recurrent/tree.hpp"
#include "reference/tensors/functions.hpp"
#include "reference/tensors/slots.hpp"
#include "reference/tensors/storage.hpp"

namespace lockstep::reference {

enum class Activation { none, silu };

template <class S>
struct CausalConv1dInputs {
  TensorView<const S, 2> x;                      // [T, D]
  TensorView<const S, 2> weight;                 // [D, W]
  std::optional<TensorView<const S, 1>> bias{};  // [D]
  std::optional<IndexView> query_start_loc{};    // [N + 1]
  StateSlots slots{};
  /// [N]; false: the row's state begins as zero, whatever the slot holds. Prefill only.
  std::optional<TensorView<const bool, 1>> has_initial_state{};
  Activation activation = Activation::none;
  StoragePoints storage{};
};

namespace conv_detail {

template <class S>
using Columns = Matrix<S>;  // [D, columns], oldest to newest

/// Writes the output of one token; `window` are its last W inputs.
template <class S>
void write_output(const CausalConv1dInputs<S>& in, const Columns<S>& window,
                  const TensorView<S, 1>& out) {
  const auto weight = mapped(in.weight);
  for (std::int64_t d = 0; d < out.extent(0); ++d) {
    S sum = in.bias ? (*in.bias)(d) : S{0};
    for (std::int64_t k = 0; k < weight.cols(); ++k) sum += weight(d, k) * window(d, k);
    out(d) = rounded(in.activation == Activation::silu ? silu(sum) : sum, in.storage.output);
  }
}

/// The columns of `history`, followed by those of the tokens.
template <class S>
Columns<S> with_tokens(const Columns<S>& history, const TensorView<const S, 2>& tokens) {
  Columns<S> joined(history.rows(), history.cols() + tokens.extent(0));
  joined << history, mapped(tokens).transpose();
  return joined;
}

/// `state[:, begin:end]`
template <class S>
Columns<S> columns(const TensorView<S, 2>& state, std::int64_t begin, std::int64_t end) {
  return mapped(state).middleCols(begin, end - begin);
}

template <class S>
void check(const CausalConv1dInputs<S>& in, const TensorView<S, 2>& out) {
  require(in.weight.extent(1) >= 1, "a convolution has at least one column of weights");
  require(in.weight.extent(0) == in.x.extent(1), "weight is [D, W] for x [T, D]");
  require(!in.bias || in.bias->extent(0) == in.x.extent(1), "bias is [D]");
  require(shape_of(out) == shape_of(in.x), "out has the shape of x");
}

/// Writes the outputs of a row's tokens; `joined` is with_tokens() of the row.
template <class S>
void write_row(const CausalConv1dInputs<S>& in, const Columns<S>& joined, const RowRange& row,
               const TensorView<S, 2>& out) {
  const std::int64_t W = in.weight.extent(1);
  for (std::int64_t t = 0; t < row.size(); ++t)
    write_output<S>(in, joined.middleCols(t, W), at(out, row.begin + t));
}

}  // namespace conv_detail

/// Prefill of packed rows. The state of a row's slot becomes the last C columns of the old state
/// (or zeros) followed by the row's tokens. Outputs of tokens after the last row are 0.
template <class S>
void causal_conv1d(const CausalConv1dInputs<S>& in,
                   const std::optional<TensorView<S, 3>>& conv_state, TensorView<S, 2> out) {
  using namespace conv_detail;
  check(in, out);
  require(!in.slots.table && !in.slots.num_accepted, "a prefill has no table of state indices");
  const std::int64_t T = in.x.extent(0), D = in.x.extent(1), W = in.weight.extent(1);
  const std::int32_t whole[2] = {0, static_cast<std::int32_t>(T)};
  const std::optional<IndexView> starts =
      in.query_start_loc ? *in.query_start_loc : make_view(whole, Shape<1>{2});
  const std::int64_t C = conv_state ? conv_state->extent(2) : W - 1;
  require(C == W - 1 || C == W, "a conv state has W - 1 or W columns");
  if (conv_state) check_slots(in.slots, starts, T, conv_state->extent(0));
  fill(out, S{0});
  for (std::int64_t row = 0; row < row_count(starts, T); ++row) {
    const RowRange range = row_range(starts, row, T);
    const std::int64_t slot = conv_state ? source_slot(in.slots, row, conv_state->extent(0)) : 0;
    if (slot == kNoSlot) continue;
    const bool resumes = conv_state && (!in.has_initial_state || (*in.has_initial_state)(row));
    Columns<S> old = Columns<S>::Zero(D, C);
    if (resumes) old = mapped(at(*conv_state, slot));
    const Columns<S> joined =
        with_tokens<S>(old.rightCols(W - 1), cut(in.x, range.begin, range.end));
    write_row(in, joined, range, out);
    if (!conv_state) continue;
    const Columns<S> all = with_tokens<S>(old, cut(in.x, range.begin, range.end));
    mapped(at(*conv_state, slot)) = rounded_each(all.rightCols(C), in.storage.state);
  }
}

/// The padded form: x and out are [B, S, D], and row b has context_lengths[b] tokens. Tokens after
/// them are ignored, and their outputs are 0.
template <class S>
void causal_conv1d_padded(CausalConv1dInputs<S> in, const TensorView<const S, 3>& x,
                          const std::optional<IndexView>& context_lengths,
                          const std::optional<TensorView<S, 3>>& conv_state, TensorView<S, 3> out) {
  require(!in.query_start_loc, "a padded batch has lengths, not starts");
  require(!in.slots.num_accepted, "a prefill has no accepted counts");
  const std::int64_t B = x.extent(0);
  if (conv_state) check_slots(in.slots, {}, B, conv_state->extent(0));
  const StateSlots slots = in.slots;
  fill(out, S{0});
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t length = context_lengths ? (*context_lengths)(b) : x.extent(1);
    require(0 <= length && length <= x.extent(1), "a context length is between 0 and S");
    in.x = cut(at(x, b), 0, length);
    const auto slot =
        static_cast<std::int32_t>(conv_state ? source_slot(slots, b, conv_state->extent(0)) : 0);
    in.slots = {.indices = make_view(&slot, Shape<1>{1})};
    const bool resumes = !in.has_initial_state || (*in.has_initial_state)(b);
    CausalConv1dInputs<S> one = in;
    one.has_initial_state = make_view(&resumes, Shape<1>{1});
    causal_conv1d(one, conv_state, cut(at(out, b), 0, length));
  }
}

namespace conv_detail {

/// The slots of conv states: where a table gives a row one slot per token, its conv state lies in
/// the first.
inline StateSlots first_slots(const StateSlots& slots) {
  StateSlots first{.indices = slots.indices, .pad_slot_id = slots.pad_slot_id};
  if (slots.table)
    first.indices = make_view(slots.table->data_handle(), Shape<1>{slots.table->extent(0)},
                              Shape<1>{slots.table->stride(0)});
  return first;
}

/// Computes outputs and the new state of a row whose history begins at column `first`. The new
/// state is the last `kept` columns of the old state followed by the tokens, written from column 0
/// on.
template <class S>
void update_row(const CausalConv1dInputs<S>& in, const RowRange& row, std::int64_t first,
                std::int64_t kept, const TensorView<S, 2>& state, const TensorView<S, 2>& out) {
  const std::int64_t W = in.weight.extent(1);
  const TensorView<const S, 2> tokens = cut(in.x, row.begin, row.end);
  write_row(in, with_tokens<S>(columns(state, first, first + W - 1), tokens), row, out);
  const Columns<S> all = with_tokens<S>(columns(state, 0, first + W - 1), tokens);
  mapped(state).leftCols(kept) = rounded_each(all.rightCols(kept), in.storage.state);
}

/// A view of `state[:, first:first + count]`.
template <class S>
TensorView<S, 2> history_at(const TensorView<S, 2>& state, std::int64_t first, std::int64_t count) {
  return transposed(cut(transposed(state), first, first + count));
}

/// Computes outputs and snapshots of a row's verification; the committed state is only read.
template <class S>
void verify_row(const CausalConv1dInputs<S>& in, const RowRange& row, const TensorView<S, 2>& state,
                const std::optional<IndexView>& parents,
                const std::optional<TensorView<S, 3>>& snapshots, const TensorView<S, 2>& out) {
  const std::int64_t W = in.weight.extent(1), C = state.extent(1);
  for (std::int64_t t = 0; t < row.size(); ++t) {
    const std::vector<std::int64_t> path = path_to(parents, row, t);
    Columns<S> window(state.extent(0), C + static_cast<std::int64_t>(path.size()));
    window.leftCols(C) = mapped(state);
    for (std::size_t i = 0; i < path.size(); ++i)
      window.col(C + static_cast<std::int64_t>(i)) = mapped(at(in.x, row.begin + path[i]));
    if (!path.empty()) write_output<S>(in, window.rightCols(W), at(out, row.begin + t));
    if (snapshots)
      mapped(at(*snapshots, row.begin + t)) = rounded_each(window.rightCols(C), in.storage.state);
  }
}

}  // namespace conv_detail

/// Decode and verification, packed like the prefill; without query_start_loc every token is a row.
/// With `parents` (reference/recurrent/tree.hpp) a token follows its parent instead of its
/// predecessor. `snapshots` [T, D, C] ([T, D, W - 1] with accepted counts) receive the state after
/// each token. With either, the state itself is only read.
template <class S>
void causal_conv1d_update(const CausalConv1dInputs<S>& in, const TensorView<S, 3>& conv_state,
                          TensorView<S, 2> out, const std::optional<IndexView>& parents = {},
                          const std::optional<TensorView<S, 3>>& snapshots = {}) {
  using namespace conv_detail;
  check(in, out);
  require(!in.has_initial_state, "an update always has a state");
  const std::int64_t T = in.x.extent(0), W = in.weight.extent(1), C = conv_state.extent(2);
  const bool speculative = in.slots.num_accepted.has_value();
  require(C >= W - 1, "a conv state has at least W - 1 columns");
  require(!speculative || W >= 2, "a speculative conv state has a history");
  require(!snapshots ||
              (snapshots->extent(0) == T && snapshots->extent(2) == (speculative ? W - 1 : C)),
          "there is a snapshot for every token, as wide as a state");
  const StateSlots slots = first_slots(in.slots);
  const std::int64_t slot_count = conv_state.extent(0);
  if (!parents && !snapshots) check_slots(slots, in.query_start_loc, T, slot_count);
  fill(out, S{0});
  for (std::int64_t row = 0; row < row_count(in.query_start_loc, T); ++row) {
    const RowRange range = row_range(in.query_start_loc, row, T);
    const std::int64_t slot = source_slot(slots, row, slot_count);
    if (slot == kNoSlot || range.size() == 0) continue;
    const TensorView<S, 2> state = at(conv_state, slot);  // [D, C]
    const std::int64_t first = accepted_before(in.slots, row) - 1;
    require(!speculative || first + W - 1 <= C,
            "accepted tokens have their columns in the conv state");
    if (parents || snapshots) {
      verify_row(in, range, speculative ? history_at(state, first, W - 1) : state, parents,
                 snapshots, out);
    } else if (speculative) {
      require(W - 2 + range.size() <= C, "a speculative conv state has a column for every draft");
      update_row(in, range, first, W - 2 + range.size(), state, out);
    } else {
      update_row(in, range, C - (W - 1), C, state, out);
    }
  }
}

}  // namespace lockstep::reference
