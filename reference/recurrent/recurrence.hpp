// Runs a recurrence over a packed batch: finds each row's state, updates it by the row's tokens one
// by one (or chunk by chunk), and stores states to slots, snapshots or boundaries. The arithmetic
// of a token belongs to the operation.
//
//   here       shape                                  (a matrix per head)
//   state      [slots, H, R, C]                       [P, N] in Mamba2, [V, K] in the delta rule
//   snapshots  [T, H, R, C]                           after each token of a verification
//   boundary   [sum of floor(len / every), H, R, C]   after each `every` tokens of a prefill's row
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "reference/base/parallel.hpp"
#include "reference/recurrent/tree.hpp"
#include "reference/tensors/slots.hpp"
#include "reference/tensors/storage.hpp"

namespace lockstep {

/// The part of an operation's inputs that describes the rows and the slots of their states.
struct Rows {
  std::int64_t tokens = 0;                     ///< T
  std::optional<IndexView> query_start_loc{};  // [N + 1]
  StateSlots slots{};
  std::optional<TensorView<const bool, 1>> has_initial_state{};  // [N]; prefill only
  StoragePoints storage{};
};

/// States that a prefill stores after each `every` tokens, counted from a row's start.
template <class S>
struct BoundaryStates {
  TensorView<S, 4> states;
  std::int64_t every;
};

namespace recurrence_detail {

template <class S>
void store(const Matrix<S>& value, const TensorView<S, 4>& pool, std::int64_t slot, std::int64_t h,
           Format format) {
  mapped(at(pool, slot, h)) = rounded_each(value, format);
}

template <class S>
void round_if_each_token(Matrix<S>& value, const StoragePoints& storage) {
  if (storage.state_each_token) value = rounded_each(value, storage.state);
}

/// Runs a row's tokens as a chain. With a table, the state after each token goes to its slot;
/// without, the last state goes to the row's slot.
template <class S, class Step>
void update_chain(const Rows& rows, std::int64_t row, const RowRange& range, std::int64_t h,
                  const TensorView<S, 4>& state, Step& step) {
  const std::int64_t slots = state.extent(0);
  Matrix<S> running = as_matrix(at(state, source_slot(rows.slots, row, slots), h));
  for (std::int64_t t = 0; t < range.size(); ++t) {
    step(range.begin + t, h, running);
    round_if_each_token(running, rows.storage);
    const std::int64_t target = target_slot(rows.slots, row, t, range.size(), slots);
    if (target != kNoSlot) store(running, state, target, h, rows.storage.state);
  }
}

/// Runs a row's tokens as a tree: each starts from its parent's state. The committed state is only
/// read.
template <class S, class Step>
void verify_tree(const Rows& rows, const RowRange& range, std::int64_t h,
                 const TensorView<S, 2>& committed, const std::optional<IndexView>& parents,
                 const std::optional<TensorView<S, 4>>& snapshots, Step& step) {
  std::vector<Matrix<S>> after(static_cast<std::size_t>(range.size()));  // [tokens of the row]
  for (std::int64_t t = 0; t < range.size(); ++t) {
    const std::vector<std::int64_t> path = path_to(parents, range, t);
    Matrix<S>& running = after[static_cast<std::size_t>(t)];
    running = path.size() < 2 ? as_matrix(committed)
                              : after[static_cast<std::size_t>(path[path.size() - 2])];
    if (!path.empty()) {
      step(range.begin + t, h, running);
      round_if_each_token(running, rows.storage);
    }
    if (snapshots) store(running, *snapshots, range.begin + t, h, rows.storage.state);
  }
}

}  // namespace recurrence_detail

/// The approximate number of multiplications of a row.
inline std::int64_t work_of(const RowRange& range, std::int64_t heads, std::int64_t state_size) {
  return 4 * range.size() * heads * state_size;
}

/// Decode and verification. step(token, head, state) advances the state and writes the output. The
/// caller has zeroed all outputs; those of padding rows and invalid tokens stay 0. With `parents`
/// or `snapshots` the state is only read.
template <class S, class Step>
void run_update(const Rows& rows, const TensorView<S, 4>& state,
                const std::optional<IndexView>& parents,
                const std::optional<TensorView<S, 4>>& snapshots, Step step) {
  require(!rows.has_initial_state, "an update always has a state");
  const bool read_only = parents || snapshots;
  if (!read_only) check_slots(rows.slots, rows.query_start_loc, rows.tokens, state.extent(0));
  require(!snapshots || snapshots->extent(0) == rows.tokens, "there is a snapshot for every token");
  require(!parents || parents->extent(0) == rows.tokens, "every token has an entry in parents");
  for (std::int64_t row = 0; row < row_count(rows.query_start_loc, rows.tokens); ++row) {
    const RowRange range = row_range(rows.query_start_loc, row, rows.tokens);
    const std::int64_t slot = source_slot(rows.slots, row, state.extent(0));
    if (slot == kNoSlot) continue;
    parallel_for(state.extent(1),
                 work_of(range, state.extent(1), state.extent(2) * state.extent(3)),
                 [&](std::int64_t h) {
                   if (read_only)
                     recurrence_detail::verify_tree<S>(rows, range, h, at(state, slot, h), parents,
                                                       snapshots, step);
                   else
                     recurrence_detail::update_chain<S>(rows, row, range, h, state, step);
                 });
  }
}

/// The end of the piece that begins at token `begin` of a row: pieces end at multiples of `size`,
/// at boundaries and at the row's end.
inline std::int64_t piece_end(std::int64_t begin, std::int64_t size, std::int64_t every,
                              std::int64_t row_size) {
  std::int64_t end = std::min(row_size, begin + size - begin % size);
  if (every > 0) end = std::min(end, begin + every - begin % every);
  return end;
}

/// Prefill. piece(tokens, head, state) advances the state over a range of packed tokens and writes
/// their outputs; heads of a row run side by side. `shape` is [H, R, C] of a state, for runs
/// without a pool.
template <class S, class Piece>
void run_prefill(const Rows& rows, const Shape<3>& shape, std::int64_t piece_size,
                 const std::optional<TensorView<S, 4>>& state,
                 const std::optional<BoundaryStates<S>>& boundary, Piece piece) {
  require(piece_size >= 1, "a chunk has at least one token");
  require(!boundary || boundary->every >= 1, "boundaries are at least one token apart");
  require(!rows.slots.table && !rows.slots.num_accepted, "a prefill has one slot per row");
  const std::int32_t whole[2] = {0, static_cast<std::int32_t>(rows.tokens)};
  const std::optional<IndexView> starts =
      rows.query_start_loc ? *rows.query_start_loc : make_view(whole, Shape<1>{2});
  if (state) check_slots(rows.slots, starts, rows.tokens, state->extent(0));
  const std::int64_t every = boundary ? boundary->every : 0;
  std::int64_t first_boundary = 0;
  for (std::int64_t row = 0; row < row_count(starts, rows.tokens); ++row) {
    const RowRange range = row_range(starts, row, rows.tokens);
    const std::int64_t boundaries = every ? range.size() / every : 0;
    const std::int64_t slot = state ? source_slot(rows.slots, row, state->extent(0)) : 0;
    const bool resumes = state && (!rows.has_initial_state || (*rows.has_initial_state)(row));
    const auto run_head = [&](std::int64_t h) {
      Matrix<S> running = Matrix<S>::Zero(shape[1], shape[2]);
      if (resumes) running = as_matrix(at(*state, slot, h));
      for (std::int64_t t = 0; t < range.size();) {
        const std::int64_t end = piece_end(t, piece_size, every, range.size());
        piece(RowRange{range.begin + t, range.begin + end}, h, running);
        recurrence_detail::round_if_each_token(running, rows.storage);
        if (every && end % every == 0)
          recurrence_detail::store(running, boundary->states, first_boundary + end / every - 1, h,
                                   rows.storage.state);
        t = end;
      }
      const std::int64_t target = range.size() == 0
                                      ? slot
                                      : (state ? target_slot(rows.slots, row, range.size() - 1,
                                                             range.size(), state->extent(0))
                                               : kNoSlot);
      const bool changed = range.size() > 0 || !resumes;
      if (state && changed && target != kNoSlot)
        recurrence_detail::store(running, *state, target, h, rows.storage.state);
    };
    if (slot != kNoSlot)
      parallel_for(shape[0], work_of(range, shape[0], shape[1] * shape[2]), run_head);
    first_boundary += boundaries;
  }
}

/// Commits a verification that only read its state: advances the state by the tokens nodes[row, 0
/// ... accepted[row] - 1] in that order, numbered within the row; entries that are no token of the
/// row are skipped. Without nodes, by the row's first accepted[row] tokens. The state is rounded
/// after every token, so that the result is that of single-token launches. advance(token, head,
/// state) advances the state without an output.
template <class S, class Advance>
void run_replay(const Rows& rows, const IndexView& accepted, const std::optional<IndexTable>& nodes,
                const TensorView<S, 4>& state, Advance advance) {
  check_slots(rows.slots, rows.query_start_loc, rows.tokens, state.extent(0));
  for (std::int64_t row = 0; row < row_count(rows.query_start_loc, rows.tokens); ++row) {
    const RowRange range = row_range(rows.query_start_loc, row, rows.tokens);
    const std::int64_t slot = source_slot(rows.slots, row, state.extent(0));
    const std::int64_t most = nodes ? nodes->extent(1) : range.size();
    const std::int64_t count = std::min<std::int64_t>(accepted(row), most);
    for (std::int64_t h = 0; slot != kNoSlot && count > 0 && h < state.extent(1); ++h) {
      Matrix<S> running = as_matrix(at(state, slot, h));
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t node = nodes ? (*nodes)(row, i) : i;
        if (node < 0 || node >= range.size()) continue;
        advance(range.begin + node, h, running);
        running = rounded_each(running, rows.storage.state);
      }
      mapped(at(state, slot, h)) = running;
    }
  }
}

}  // namespace lockstep
