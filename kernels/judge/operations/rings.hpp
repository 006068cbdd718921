// Shared by the judged operations whose states are written once in L tokens
// (reference/recurrent/replay_rings.hpp): where rows stand in their windows, and a head's step with
// the mistakes that people make with rings.
#pragma once

#include <algorithm>

#include "kernels/judge/operation.hpp"
#include "reference/recurrent/replay_rings.hpp"

namespace lockstep::judging::rings {

/// The position of a row: its tokens before this one, and those of them that are in its ring.
struct Stand {
  std::int32_t cursor, position;
};

/// Rows everywhere in their windows of L tokens: the first, in the middle, at the last one; with a
/// ring that began in the middle of a window, as that of a copied state does; at a window's end
/// with a few entries or none.
inline std::vector<Stand> stands(std::int64_t rows, std::int64_t L) {
  const auto l = static_cast<std::int32_t>(L);
  const std::vector<Stand> kinds{{0, 0},
                                 {l / 3, l / 3},
                                 {l - 1, l - 1},
                                 {l / 2, 3 * l + l / 2},
                                 {l / 4, l + l / 2},
                                 {l / 4, 2 * l - 1},
                                 {0, 5 * l + l / 2},
                                 {0, 4 * l - 1},
                                 {l - 1, 7 * l - 1},
                                 {std::max(l - 2, 0), std::max(l - 2, 0)}};
  std::vector<Stand> all;
  for (std::int64_t row = 0; row < rows; ++row)
    all.push_back(kinds[static_cast<std::size_t>(row) % kinds.size()]);
  return all;
}

/// cursors and positions; after Batch::describe(). Rows that are padding stand nowhere.
inline void add_stands(Case& c, const Batch& batch, const std::vector<Stand>& all) {
  std::vector<std::int32_t> cursors, positions;
  for (std::int64_t row = 0; row < batch.rows(); ++row) {
    const Stand& one = all[static_cast<std::size_t>(row)];
    cursors.push_back(batch.is_padding(row) ? -1 : one.cursor);
    positions.push_back(batch.is_padding(row) ? -1 : one.position);
  }
  c.tensors.push_back(indices("cursors", {batch.rows()}, cursors, {"row"}));
  c.tensors.push_back(indices("positions", {batch.rows()}, positions, {"row"}));
}

/// A tensor of a ring [slots, heads, L, ...]: NaN behind each row's cursor, and in slots of nobody.
inline void poison_ring(Tensor& ring, const Case& of, const std::vector<Stand>& all) {
  ring.role = Role::state;
  const std::int64_t heads = ring.extents[1], L = ring.extents[2];
  const std::int64_t inner = ring.count() / std::max<std::int64_t>(1, ring.extents[0] * heads * L);
  for (std::int64_t entry = 0; entry < ring.extents[0] * heads * L; ++entry) {
    const CaseSlot& slot = of.slots[static_cast<std::size_t>(entry / (heads * L))];
    const std::int64_t live = slot.read ? all[static_cast<std::size_t>(slot.token.row)].cursor : 0;
    if (entry % L >= live)
      std::fill_n(ring.values.begin() + entry * inner, inner,
                  std::numeric_limits<double>::quiet_NaN());
  }
}

/// Bytes that a step has to move, but for the inputs and the output of its tokens: the states, the
/// live entries, and an entry or a state back.
inline std::int64_t bytes_of_rings(const Case& c, const std::vector<std::string>& ring,
                                   const std::vector<Stand>& all, const Batch& batch) {
  const Tensor& state = c.tensor("state");
  const std::int64_t of_state = state.bytes() / state.extents[0];
  std::int64_t of_entry = 0, L = 1;
  for (const std::string& name : ring) {
    const Tensor& one = c.tensor(name);
    L = one.extents[2];
    of_entry += one.bytes() / (one.extents[0] * L);
  }
  std::int64_t bytes = 0;
  for (std::int64_t row = 0; row < batch.rows(); ++row) {
    const Stand& one = all[static_cast<std::size_t>(row)];
    bytes += of_state + one.cursor * of_entry + ((one.position + 1) % L == 0 ? of_state : of_entry);
  }
  return bytes;
}

/// The mistakes of rings that both recurrences know.
inline const std::vector<Mistake> kMistakes{
    {"cursor-one-more", "with one entry behind the cursor counted as live"},
    {"cursor-one-less", "with the newest entry of the ring left out"},
    {"position-for-cursor", "with position % L entries read, whatever the cursor says"},
    {"whole-ring", "with all L entries read, whatever lies behind the cursor"},
    {"state-alone", "with the state read without the ring"},
    {"flush-together", "with every row's state written when one row's window ends"},
    {"flush-of-first-row", "with states written where the first row's window ends"},
    {"flush-when-full",
     "with a state written when the ring is full instead of at every L-th token"},
    {"flush-early", "with a state written one token before its window ends"},
    {"flush-late", "with a state written one token after its window's end"},
    {"never-flushed", "with no state written, and an entry in its place"},
    {"written-always", "with the state written at every token, and the entry too"},
    {"flush-without-token", "with a state written without the newest token"},
    {"flush-and-entry", "with an entry left in the ring where the state was written"},
    {"entries-undecayed", "with entries read and written without the decay after them"},
    {"state-undecayed", "with the old state read and written without the decay of the ring"},
    {"decay-of-itself", "with an entry decayed by its own step too"},
    {"decay-one-short", "with an entry decayed from the step after the next one on"},
    {"token-undecayed", "without the newest token's decay of what came before"},
    {"entry-first", "with the entry written to the front of the ring"},
    {"entry-late", "with the entry written one place behind the cursor"},
};

inline bool is_mistake(std::string_view id) {
  return std::any_of(kMistakes.begin(), kMistakes.end(),
                     [&](const Mistake& one) { return one.id == id; });
}

/// The effect of a step on a row, with a mistake or without.
struct Step {
  std::int64_t live;   ///< entries that are read
  std::int64_t entry;  ///< where the token goes; beyond the ring: nowhere
  bool writes_state, writes_entry;
};

inline Step step_of(const std::vector<Stand>& all, std::size_t row, std::int64_t L,
                    std::string_view mistake) {
  const Stand& own = all[row];
  const auto ends = [&](std::int64_t position) { return position >= 0 && (position + 1) % L == 0; };
  Step step{.live = own.cursor, .entry = own.cursor, .writes_state = ends(own.position)};
  if (mistake == "cursor-one-more") step.live = std::min<std::int64_t>(own.cursor + 1, L);
  if (mistake == "cursor-one-less") step.live = std::max(own.cursor - 1, 0);
  if (mistake == "position-for-cursor") step.live = own.position % L;
  if (mistake == "whole-ring") step.live = L;
  if (mistake == "state-alone") step.live = 0;
  if (mistake == "flush-together")
    step.writes_state =
        std::any_of(all.begin(), all.end(), [&](const Stand& one) { return ends(one.position); });
  if (mistake == "flush-of-first-row") step.writes_state = ends(all[0].position);
  if (mistake == "flush-when-full") step.writes_state = own.cursor + 1 == L;
  if (mistake == "flush-early") step.writes_state = ends(own.position + 1);
  if (mistake == "flush-late") step.writes_state = ends(own.position - 1);
  if (mistake == "never-flushed") step.writes_state = false;
  step.writes_entry = !step.writes_state;
  if (mistake == "written-always") step.writes_state = step.writes_entry = true;
  if (mistake == "flush-and-entry") step.writes_entry = true;
  if (mistake == "entry-first") step.entry = 0;
  if (mistake == "entry-late") ++step.entry;
  step.writes_entry = step.writes_entry && step.entry < L;
  return step;
}

/// A head's ring that is read and written with a mistake.
template <class S>
class WrongRing {
 public:
  WrongRing(reference::ReplayState<S> ring, std::string_view mistake)
      : ring_(std::move(ring)), mistake_(mistake) {}

  /// The product of x with the state after the live entries and the decay g of a token.
  Vector<S> read(S g, const Vector<S>& x) const {
    if (mistake_ == "token-undecayed") g = 0;
    Vector<S> y = whole(g) * (ring_.state * x);
    for (std::int64_t j = 0; j < ring_.cursor; ++j)
      y += after(j, g) * ring_.k.row(j).dot(x) * ring_.u.row(j).transpose();
    return y;
  }

  /// The state after the token (k, u, g) too.
  Matrix<S> written(const Vector<S>& k, const Vector<S>& u, S g) const {
    if (mistake_ == "token-undecayed") g = 0;
    Matrix<S> state = whole(g) * ring_.state;
    for (std::int64_t j = 0; j < ring_.cursor; ++j)
      state += after(j, g) * ring_.u.row(j).transpose() * ring_.k.row(j);
    if (mistake_ != "flush-without-token") state += u * k.transpose();
    return rounded_each(state, ring_.format);
  }

 private:
  /// The decay of the old state.
  S whole(S g) const {
    return mistake_ == "state-undecayed" ? S{1} : std::exp(ring_.g.head(ring_.cursor).sum() + g);
  }
  /// The decay of entry j.
  S after(std::int64_t j, S g) const {
    if (mistake_ == "entries-undecayed") return S{1};
    std::int64_t first = j + 1;
    if (mistake_ == "decay-of-itself") first = j;
    if (mistake_ == "decay-one-short") first = std::min(j + 2, ring_.cursor);
    return std::exp(ring_.g.segment(first, ring_.cursor - first).sum() + g);
  }

  reference::ReplayState<S> ring_;  // with as many live entries as are read
  std::string_view mistake_;
};

/// cursors and positions of a case.
inline std::vector<Stand> stands_of(const Case& c) {
  const auto cursors = array_of<std::int32_t, 1>(c, "cursors");
  const auto positions = array_of<std::int32_t, 1>(c, "positions");
  std::vector<Stand> all;
  for (std::int64_t row = 0; row < cursors.extent(0); ++row)
    all.push_back({cursors(row), positions(row)});
  return all;
}

}  // namespace lockstep::judging::rings
