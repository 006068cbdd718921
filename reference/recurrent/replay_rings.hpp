// Replay-state decode of a batch: states and rings lie in slots, and a row flushes when its own
// position is the last of a window. The arithmetic of one head: replay_state.hpp.
//
//   here       Mamba2                    gated delta rule
//   state      [slots, H, P, N]          [slots, HV, V, K]
//   ring       x [slots, H, L, P]        u [slots, HV, L, V]: beta (v - S k), rounded like states
//              B [slots, G, L, N]        k [slots, H, L, K], not normalised
//              dt [slots, H, L]: d_t     k_scale [slots, H, L]: factor that normalises k
//                                        g [slots, HV, L]
//   cursors    [N]: live entries of the row's ring
//   positions  [N]: tokens of the row's request before this one
#pragma once

#include "reference/recurrent/gated_delta_rule.hpp"
#include "reference/recurrent/mamba2.hpp"
#include "reference/recurrent/replay_state.hpp"

namespace lockstep::reference {

template <class S>
struct Mamba2Ring {
  TensorView<S, 4> state, x, B;
  TensorView<S, 3> dt;
};

template <class S>
struct GatedDeltaRing {
  TensorView<S, 4> state, k;
  TensorView<S, 3> k_scale;
  TensorView<S, 4> u;
  TensorView<S, 3> g;
};

/// The cursor after a step, which the caller keeps for the next one.
inline std::int32_t next_cursor(std::int32_t cursor, std::int32_t position, std::int64_t L) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(cursor + 1, (position + 1) % L));
}

namespace replay_detail {

/// The first `live` entries of a Mamba2 ring, in the form of replay_state.hpp.
template <class S>
ReplayState<S> read_ring(const Mamba2Ring<S>& ring, const TensorView<const S, 1>& A,
                         std::int64_t slot, std::int64_t h, std::int64_t live, Format format) {
  const std::int64_t g = h / (ring.x.extent(1) / ring.B.extent(1));
  auto r = replay_state<S>(as_matrix(at(ring.state, slot, h)), ring.x.extent(2), format);
  for (std::int64_t j = 0; j < live; ++j)
    write<S>(r, j, as_vector(at(ring.B, slot, g, j)),
             ring.dt(slot, h, j) * as_vector(at(ring.x, slot, h, j)), A(h) * ring.dt(slot, h, j));
  r.cursor = live;
  return r;
}

template <class S>
ReplayState<S> read_ring(const GatedDeltaRing<S>& ring, std::int64_t slot, std::int64_t hv,
                         std::int64_t live, Format format) {
  const std::int64_t h = hv / (ring.u.extent(1) / ring.k.extent(1));
  auto r = replay_state<S>(as_matrix(at(ring.state, slot, hv)), ring.u.extent(2), format);
  for (std::int64_t j = 0; j < live; ++j)
    write<S>(r, j, ring.k_scale(slot, h, j) * as_vector(at(ring.k, slot, h, j)),
             as_vector(at(ring.u, slot, hv, j)), ring.g(slot, hv, j));
  r.cursor = live;
  return r;
}

/// Calls body(row, slot, live, position) for each row that has a slot.
template <class Body>
void for_each_ring(const Rows& rows, std::int64_t slots, std::int64_t L, const IndexView& cursors,
                   const IndexView& positions, Body body) {
  require(!rows.query_start_loc && !rows.slots.table, "a step of a ring is one token of each row");
  check_slots(rows.slots, {}, rows.tokens, slots);
  for (std::int64_t row = 0; row < rows.tokens; ++row) {
    const std::int64_t slot = source_slot(rows.slots, row, slots);
    if (slot == kNoSlot) continue;
    require(positions(row) >= 0 && cursors(row) >= 0 && cursors(row) <= positions(row) % L,
            "a cursor is no more than the tokens since the last multiple of L");
    body(row, slot, cursors(row), positions(row));
  }
}

}  // namespace replay_detail

/// Decodes one token per row. in.A, in.dt and in.dt_bias have one number per head.
template <class S>
void mamba2_ring_update(const Mamba2Inputs<S>& in, const Mamba2Ring<S>& ring,
                        const IndexView& cursors, const IndexView& positions,
                        TensorView<S, 3> out) {
  mamba2_detail::check(in);
  mamba2_detail::require_scalar_heads(in);
  fill(out, S{0});
  const std::int64_t L = ring.x.extent(2), H = in.x.extent(1);
  Array<S, 1> A(Shape<1>{H});
  for (std::int64_t h = 0; h < H; ++h) A(h) = in.A(h, 0, 0);
  replay_detail::for_each_ring(
      mamba2_detail::rows_of(in), ring.state.extent(0), L, cursors, positions,
      [&](std::int64_t t, std::int64_t slot, std::int64_t live, std::int64_t position) {
        for (std::int64_t h = 0; h < H; ++h) {
          const std::int64_t g = mamba2_detail::group_of(in, h);
          auto r = replay_detail::read_ring<S>(ring, std::as_const(A).view(), slot, h, live,
                                               in.rows.storage.state);
          const Mamba2Token<S> token{as_vector(at(in.x, t, h)), as_vector(at(in.B, t, g)),
                                     as_vector(at(in.C, t, g)), A(h),
                                     mamba2_detail::time_step(in, t, h, 0)};
          const Vector<S> y = replay_step(r, position, L, token);
          for (std::int64_t p = 0; p < y.size(); ++p)
            mamba2_detail::write_output(in, t, h, p, y(p), out);
          if (r.cursor == 0) {
            mapped(at(ring.state, slot, h)) = r.state;
            continue;
          }
          mapped(at(ring.x, slot, h, live)) = token.x;
          mapped(at(ring.B, slot, g, live)) = token.B;
          ring.dt(slot, h, live) = token.d;
        }
      });
}

/// Decodes one token per row.
template <class S>
void gated_delta_ring_update(const GatedDeltaRuleInputs<S>& in, const GatedDeltaRing<S>& ring,
                             const IndexView& cursors, const IndexView& positions,
                             TensorView<S, 3> out) {
  gated_delta_detail::check(in, out);
  fill(out, S{0});
  const std::int64_t L = ring.u.extent(2), H = in.k.extent(1), HV = in.v.extent(1);
  const Format format = in.rows.storage.state;
  replay_detail::for_each_ring(
      gated_delta_detail::rows_of(in), ring.state.extent(0), L, cursors, positions,
      [&](std::int64_t t, std::int64_t slot, std::int64_t live, std::int64_t position) {
        for (std::int64_t hv = 0; hv < HV; ++hv) {
          const std::int64_t h = hv / (HV / H);
          auto r = replay_detail::read_ring<S>(ring, slot, hv, live, format);
          const Vector<S> raw = as_vector(at(in.k, t, h));
          const S k_scale = in.use_qk_l2norm ? S{1} / std::sqrt(raw.squaredNorm() + S{1e-6}) : S{1};
          const Vector<S> q = gated_delta_detail::direction(in, in.q, t, hv);
          const GatedDeltaToken<S> token{q * gated_delta_detail::scale_of(in), raw * k_scale,
                                         as_vector(at(in.v, t, hv)), in.g(t, hv), in.beta(t, hv)};
          const Vector<S> o = replay_draft(r, 0, token);
          r.u.row(live) = rounded_each(r.u.row(live).eval(), format);
          replay_accept(r, position, 1, L);
          mapped(at(out, t, hv)) = rounded_each(o, in.rows.storage.output);
          if (r.cursor == 0) {
            mapped(at(ring.state, slot, hv)) = r.state;
            continue;
          }
          mapped(at(ring.k, slot, h, live)) = raw;
          ring.k_scale(slot, h, live) = k_scale;
          mapped(at(ring.u, slot, hv, live)) = r.u.row(live).transpose();
          ring.g(slot, hv, live) = token.g;
        }
      });
}

/// Stores the states after the first counts[row] ring entries to slots targets[row]. read(slot, h,
/// count) returns a head's state and ring.
template <class S, class Read>
void flush_rings(const TensorView<S, 4>& state, std::int64_t L, const StateSlots& slots,
                 const IndexView& counts, const IndexView& targets, Read read) {
  for (std::int64_t row = 0; row < counts.extent(0); ++row) {
    const std::int64_t slot = source_slot(slots, row, state.extent(0));
    const std::int64_t target = slots_detail::named(slots, targets(row), state.extent(0));
    if (slot == kNoSlot || target == kNoSlot) continue;
    require(0 <= counts(row) && counts(row) <= L, "a ring has that many entries");
    for (std::int64_t h = 0; h < state.extent(1); ++h)
      mapped(at(state, target, h)) = materialised(read(slot, h, counts(row)), counts(row));
  }
}

template <class S>
void mamba2_ring_flush(const Mamba2Ring<S>& ring, const TensorView<const S, 1>& A,
                       const IndexView& counts, const IndexView& targets, const StateSlots& slots,
                       Format format) {
  flush_rings<S>(ring.state, ring.x.extent(2), slots, counts, targets,
                 [&](std::int64_t slot, std::int64_t h, std::int64_t count) {
                   return replay_detail::read_ring<S>(ring, A, slot, h, count, format);
                 });
}

template <class S>
void gated_delta_ring_flush(const GatedDeltaRing<S>& ring, const IndexView& counts,
                            const IndexView& targets, const StateSlots& slots, Format format) {
  flush_rings<S>(ring.state, ring.u.extent(2), slots, counts, targets,
                 [&](std::int64_t slot, std::int64_t h, std::int64_t count) {
                   return replay_detail::read_ring<S>(ring, slot, h, count, format);
                 });
}

}  // namespace lockstep::reference
