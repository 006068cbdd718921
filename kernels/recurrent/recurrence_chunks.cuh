// StagedBlock: a block that stages tokens in shared memory. Each warp prepares other tokens, so a
// token's column vectors are prepared once for all warps of the block. run_staged() then runs the
// tokens one by one; run_verification() runs a verification's tokens in chunks, where no states
// after them are stored.
#pragma once

#include "kernels/recurrent/quad_rows.cuh"
#include "kernels/recurrent/recurrence.cuh"

namespace lockstep::kernels {

/// Prepared tokens in shared memory.
template <class Op, class Layout, int kRowsOfBlock, int kTokens>
struct StagedTokens {
  alignas(16) float columns[kTokens][Op::kColumnVectors][Layout::kExtent];  ///< k, q; B d, C
  float rows[kTokens][Op::kRowVectors][kRowsOfBlock];  ///< v; x, D x, silu(z), of the block's rows
  typename Op::Scalars scalars[kTokens];
};

/// Products between the tokens of a chunk, in shared memory.
template <int kTokens>
struct ChunkProducts {
  /// [column vector of the later token][later][earlier]: inner product times the decay in between.
  float pairs[2][kTokens][kTokens];
  float2
      state_scales[kTokens];  ///< factors of the token's products with the state before the chunk
};

/// A block that stages its tokens.
template <class Op, class S, class Layout, int kRows, int kWarps, Cached kCached>
struct StagedBlock : RecurrenceBlock<Op, S, Layout, kRows, kWarps, kCached> {
  using Base = RecurrenceBlock<Op, S, Layout, kRows, kWarps, kCached>;
  using Base::head;
  using Base::inputs;
  using Base::kRowsOfBlock;
  using Base::kStage;
  using Base::lane_rows;
  using Base::p;
  using typename Base::Raw;
  using typename Base::Token;
  using Staged = StagedTokens<Op, Layout, kRowsOfBlock, kStage>;

  /// Prepares token t as the i-th one of `staged`. One warp calls it.
  template <bool kFolded>
  __device__ void stage(Staged& staged, int i, int t) const {
    static_assert(kRowsOfBlock % 32 == 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first = static_cast<int>(blockIdx.x) * kRowsOfBlock;
    constexpr int kVectors = kFolded ? 1 : Op::kRowVectors;
    const Raw raw = this->template fetch<kFolded>(t);
    float values[kVectors][kRowsOfBlock / 32];  // loads in flight together with those of `raw`
#pragma unroll
    for (int which = 0; which < kVectors; ++which)
#pragma unroll
      for (int r = 0; r < kRowsOfBlock / 32; ++r)
        values[which][r] =
            Op::template row_value<kFolded>(inputs, which, t, head, first + 32 * r + lane);
    const Token token =
        Op::template prepare<kFolded, Layout, kRows>(inputs, t, head, lane_rows, raw);
    if (Layout::row_in_warp() == 0)
      Op::visit_columns(token, kFolded, [&](int which, const auto& x) {
        Layout::template store<Cached::yes>(staged.columns[i][which], x, Layout::kExtent);
      });
    if (lane == 0) {
      staged.scalars[i] = token.scalars;
      if (!kFolded && blockIdx.x == 0) Op::keep(inputs, t, head, token.scalars);
    }
#pragma unroll
    for (int which = 0; which < kVectors; ++which)
#pragma unroll
      for (int r = 0; r < kRowsOfBlock / 32; ++r)
        staged.rows[i][which][32 * r + lane] = values[which][r];
  }

  __device__ Token staged_token(const Staged& staged, int i, bool folded) const {
    Token token;
    Op::visit_columns(token, folded, [&](int which, auto& x) {
      Layout::template load<Cached::yes>(x, staged.columns[i][which], Layout::kExtent);
    });
    token.scalars = staged.scalars[i];
    const int first = lane_rows.first - static_cast<int>(blockIdx.x) * kRowsOfBlock;
    Op::take_rows(token, folded, [&](int which, int r) {
      return staged.rows[i][which][first + r * Layout::kRowsPerWarp];
    });
    return token;
  }

  /// Stages tokens [first, end) of the sequence "`folds` folded tokens, then the row's own tokens".
  /// `folded` and `own` are the numbers of the first folded and own token in their batches. Every
  /// thread of the block calls it; warps take tokens in turns.
  __device__ void stage_piece(Staged& staged, int folded, int folds, int own, int first,
                              int end) const {
    for (int i = first + static_cast<int>(threadIdx.x / 32); i < end; i += kWarps) {
      if (i < folds)
        stage<true>(staged, i - first, folded + i);
      else
        stage<false>(staged, i - first, own + i - folds);
    }
  }

  /// Runs the folded tokens, then the row's own tokens, one by one, in pieces of kStage tokens: the
  /// block stages a piece together, then every warp advances its rows of the state through it. The
  /// state after the last folded token is stored.
  __device__ void run_staged(Staged& staged, StateRows<Layout, kRows>& state, const RowPlan& plan,
                             const TokenRange& folded) const {
    const int folds = folded.size, total = folds + plan.range.size;
    for (int first = 0; first < total; first += kStage) {
      const int end = min(total, first + kStage);
      if (first > 0) __syncthreads();  // all warps have read the previous piece
      stage_piece(staged, folded.begin, folds, plan.range.begin, first, end);
      __syncthreads();
      for (int i = first; i < end; ++i) {
        if (i < folds) {
          Op::advance(staged_token(staged, i - first, true), state.s);
          state.template round<S>();
          if (i == folds - 1 && plan.last != kNowhere)
            state.template store<kCached>(lane_rows, p.state, plan.last, head);
        } else {
          const float out = Op::step(staged_token(staged, i - first, false), state.s);
          this->store(state, plan, i - folds);
          this->write(out, plan.range.begin + i - folds);
        }
      }
    }
  }

  /// Runs the folded tokens one by one, then the row's own tokens in chunks. Pieces are as in
  /// run_staged(), but a piece that cannot hold all remaining tokens ends after the last folded
  /// one: the own tokens are then cut into the same chunks however many were folded.
  __device__ void run_verification(Staged& staged, ChunkProducts<kStage>& products,
                                   const RowPlan& plan, const TokenRange& folded) const {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int first_row = static_cast<int>(blockIdx.x) * kRowsOfBlock + warp * 16;
    const auto at = [&](int slot) {
      return p.state.data + slot * p.state.slot_stride + head * p.state.head_stride +
             first_row * p.state.row_stride;
    };
    QuadRows<Layout> state;
    state.template load<kCached>(at(plan.source), p.state.row_stride);
    const int folds = folded.size, total = folds + plan.range.size;
    for (int first = 0, end; first < total; first = end) {
      end = min(total, first + kStage);
      if (first < folds && end < total) end = min(end, folds);
      if (first > 0) __syncthreads();  // all warps have read the previous piece
      stage_piece(staged, folded.begin, folds, plan.range.begin, first, end);
      __syncthreads();
      const int own = max(first, folds) - first, count = end - first;
      if (own < count) take_products(staged, products, own, count);
      for (int i = 0; i < min(own, count); ++i) {
        state.advance(
            staged.columns[i][0],
            [&](int r, float product) {
              const int row = warp * 16 + QuadRows<Layout>::row(r);
              return Op::new_value(staged.scalars[i], staged.rows[i][0][row], product);
            },
            [&](float u, float k, float s) { return Op::advanced(staged.scalars[i], u, k, s); });
        state.template round<S>();
        if (first + i == folds - 1 && plan.last != kNowhere)
          state.template store<kCached>(at(plan.last), p.state.row_stride);
      }
      if (own >= count) continue;
      __syncthreads();
      read_chunk(staged, products, state, own, count, plan.range.begin, first + own - folds);
      if (end == total) return;
      for (int i = own; i < count; ++i) {
        state.advance(
            staged.columns[i][0],
            [&](int r, float) { return staged.rows[i][0][warp * 16 + QuadRows<Layout>::row(r)]; },
            [&](float u, float k, float s) { return Op::advanced(staged.scalars[i], u, k, s); });
      }
    }
  }

  /// Computes `products` of the chunk [begin, end) of staged tokens. Each group of Layout::kLanes
  /// lanes takes one pair (later, earlier) at a time.
  __device__ void take_products(const Staged& staged, ChunkProducts<kStage>& products, int begin,
                                int end) const {
    constexpr int kGroups = 32 * kWarps / Layout::kLanes;
    const int count = end - begin, group = static_cast<int>(threadIdx.x / Layout::kLanes);
    for (int first = 0; first < count * count; first += kGroups) {
      const int pair = min(first + group, count * count - 1);
      const int later = pair / count, earlier = pair - later * count;
      float pair_products[2];
      Op::template pair_products<Layout>(staged, begin + earlier, begin + later, pair_products);
      if (earlier > later || Layout::part() != 0) continue;
      float decay = 1.0f;
      for (int i = earlier + 1; i <= later; ++i) decay *= staged.scalars[begin + i].alpha;
      for (int i = 0; i < 2; ++i) products.pairs[i][later][earlier] = decay * pair_products[i];
      if (earlier == 0)
        products.state_scales[later] =
            Op::state_scales(staged.scalars[begin + later], decay * staged.scalars[begin].alpha);
    }
  }

  /// Writes the outputs of the chunk [begin, end) of staged tokens; its first token is the row's
  /// token number `before`. Each token's first row value (v) is replaced by u, the value that the
  /// token adds. Tokens go in groups of four: a lane computes token lane % 4 of the group, for rows
  /// lane / 4 and lane / 4 + 8 of its warp.
  ///
  /// `wide`: the state must be split for tf32. A state stored in 16 bits is exact in tf32 before
  /// the row's first chunk; in rows of more than kStage tokens it has more bits before later
  /// chunks.
  __device__ void read_chunk(Staged& staged, const ChunkProducts<kStage>& products,
                             const QuadRows<Layout>& state, int begin, int end, int row_begin,
                             int before) const {
    const int t = row_begin + before;
    const bool wide = sizeof(S) == 4 || before > 0;
    const int mine = static_cast<int>(threadIdx.x % 4);
    const int warp_row = static_cast<int>(threadIdx.x / 32) * 16;
    for (int first = begin; first < end; first += 4) {
      const int column = static_cast<int>(threadIdx.x % 32 / 4);
      float by_state[2][2];  // [row][column vector]: products with the state before the chunk
      const float* const x = staged.columns[min(first + column / 2, end - 1)][column % 2];
      if (wide)
        state.template multiply<true>(x, by_state);
      else
        state.template multiply<false>(x, by_state);
      const int i = min(first + mine, end - 1), later = i - begin;
      const float2 scales = products.state_scales[later];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_row + QuadRows<Layout>::row(r);
        const float value = first + mine < end ? staged.rows[i][0][row] : 0.0f;
        float seen[2] = {scales.x * by_state[r][0], scales.y * by_state[r][1]};
        const auto meet = [&](int earlier, float u_earlier) {
          if (earlier <= later)
            seen[1] = fmaf(u_earlier, products.pairs[1][later][earlier], seen[1]);
          if (earlier < later)
            seen[0] = fmaf(u_earlier, products.pairs[0][later][earlier], seen[0]);
        };
        for (int j = begin; j < first; ++j) meet(j - begin, staged.rows[j][0][row]);
        float u = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (mine == j) u = Op::chunk_value(staged.scalars[i], value, seen[0]);
          meet(first - begin + j, __shfl_sync(0xffffffffu, u, j, 4));
        }
        if (first + mine < end) {
          staged.rows[i][0][row] = u;
          const int block_row = static_cast<int>(blockIdx.x) * kRowsOfBlock;
          Op::write(inputs, t + later, head, block_row + row, seen[1]);
        }
      }
      __syncwarp();
    }
  }
};

}  // namespace lockstep::kernels
