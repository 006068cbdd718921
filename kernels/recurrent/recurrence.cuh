// How a recurrence runs over a batch on the device: what reference/recurrent/recurrence.hpp is for
// the references. Rows of the batch find their states, tokens update them one by one, and states go
// to slots or snapshots; what a token does to a state is the operation's own business.
//
//   grid   (ceil(R / rows of a block), heads, N)
//   block  kWarps warps; a warp holds kRows x Layout::kRowsPerWarp rows of one state [R, C] in
//          registers, float32, from the first token of its row of the batch to the last
//
// A state is read once, and written once per token that stores it, in accesses of 16 bytes that
// neighbouring lanes make side by side; what else a token needs is small and comes through L2. The
// rows of a state do not depend on each other.
//
// A token of a tree starts from its parent's state. Where that is not the state at hand, the path
// from the committed state is run again: arithmetic instead of memory.
//
// An operation Op brings
//   - Op::Parameters: what its tokens consist of, passed to the kernel
//   - Op::Token<Layout, kRows>: one token as a lane sees it: pieces of vectors along the columns,
//     Op::Scalars, and values of the lane's rows
//   - Op::Raw<Layout, kRows>: a token's inputs, asked for and not yet waited for
//   - Op::prefetch<kFolded>(p, t, head, place): asks L2 for them; `place` says which rows the lane
//     has
//   - Op::fetch<kFolded>(p, t, head, place): asks for them. A folded token is one of an earlier
//     verification, which only advances the state
//   - Op::prepare<kFolded>(p, t, head, place, raw): the token
//   - Op::keep(p, t, head, scalars): stores what a later replay wants; once per token and head
//   - Op::advance(token, s): moves the lane's part of the rows s
//   - Op::step(token, s): likewise; returns what the row that the lane owns gives
//   - Op::write(p, t, head, row, value): stores it
// and, so that a token can lie in shared memory: visit_columns, take_rows and row_value.
//
// A verification whose states nobody asks for can treat a few tokens as a chunk, as prefill does
// (Op::kHasChunks): all of them read the state before the chunk, by one small matrix product on the
// tensor cores, and meet each other by inner products that a block takes once for all its rows.
// Such an Op brings
//   - Op::Scalars::alpha: what a token multiplies the state with
//   - Op::pair_products<Layout>(staged, earlier, later, products): the two products of the later
//     token's columns with the earlier one's
//   - Op::state_scales(scalars, decay): what the products of its columns with the state count
//   - Op::chunk_value(scalars, value, seen): the row value of what the token adds, by its own row
//     value and what its first column has seen
//   - Op::new_value(scalars, value, product): likewise of a folded token, rounded as a decode does
//     it; the product is of its first column, as it lies in shared memory
//   - Op::advanced(scalars, new value, k, s): an element of the state, bit by bit as a decode
#pragma once

#include "kernels/base/slots.cuh"
#include "kernels/recurrent/quad_rows.cuh"
#include "kernels/recurrent/scaled_rows.cuh"
#include "kernels/recurrent/shapes.hpp"

namespace lockstep::kernels {

constexpr int kSmallBatch = 8;        ///< rows of a batch that waits more than it moves
constexpr int kLargeBatch = 128;      ///< rows of a batch whose states fill L2
constexpr int kTreeTokensMax = 1024;  ///< of a row of a tree: a path lies in shared memory

/// Tokens that advance the stored state, which is rounded after each: those of an earlier
/// verification that were accepted.
struct Fold {
  RowSlots rows;  ///< of which only the token ranges are used
  const std::int32_t* accepted = nullptr;
  std::int64_t accepted_stride = 0;
  const std::int32_t* nodes = nullptr;  ///< [N, node_columns]; null: the first tokens of the row
  std::int64_t nodes_stride = 0, nodes_column_stride = 0;
  int node_columns = 0;
};

/// The accepted ones of a row's tokens to fold: asked for, and not yet waited for.
struct AcceptedTokens {
  int begin = 0, end = 0, count = 0;

  __device__ void ask(const Fold& fold, int row) {
    if (!fold.accepted) return;
    begin = fold.rows.begin(row);
    end = fold.rows.begin(row + 1);
    count = fold.accepted[row * fold.accepted_stride];
  }
  __device__ TokenRange range(const Fold& fold) const {
    const TokenRange all = fold.rows.checked_range(begin, end);
    return {all.begin, max(0, min(count, all.size))};
  }
};

/// States [slots or tokens, heads, R, C] by strides.
template <class S>
struct StatePool : ScalesOf<S> {
  S* data = nullptr;
  std::int64_t slot_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;

  StatePool() = default;
  explicit StatePool(const TensorView<S, 4>& view)
      : data(view.data_handle()),
        slot_stride(view.stride(0)),
        head_stride(view.stride(1)),
        row_stride(view.stride(2)),
        column_stride(view.stride(3)) {}
};

template <class S>
struct RecurrenceParameters {
  RowSlots rows;
  StatePool<S> state;
  StatePool<S> snapshots;  ///< of which slots are tokens
  const std::int32_t* parents = nullptr;
  std::int64_t parents_stride = 0;
  Fold fold;
  bool read_only = false;
  bool store_snapshots = false;
  bool runs_tokens = true;  ///< false: a replay, which has no outputs
  bool aligned = false;     ///< rows of 16-byte pieces
  bool dense = false;       ///< a state's rows lie one behind another
  int heads = 0, R = 0, C = 0;
};

/// Which rows of a state a lane has a part of. The fast layout has no block with fewer.
template <class Layout, int kRows>
struct Place {
  int first;  ///< the next ones are kRowsPerWarp apart
  int R, C;   ///< the state's extents
  __device__ int row(int r) const { return first + r * Layout::kRowsPerWarp; }
  __device__ bool has(int r) const { return !Layout::kMasked || row(r) < R; }
};

template <class Layout, int kRows>
struct StateRows {
  float s[kRows][Layout::kCount];

  template <Cached kCached, class S>
  __device__ void load(const Place<Layout, kRows>& place, const StatePool<S>& pool, int slot,
                       int head) {
    const S* row = first_row(place, pool, slot, head);
#pragma unroll
    for (int r = 0; r < kRows; ++r, row += Layout::kRowsPerWarp * pool.row_stride)
      if (place.has(r)) Layout::template load<kCached>(s[r], row, place.C, pool.column_stride);
    if constexpr (kIsScaled<S>) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (place.has(r))
          scale_up<Layout>(s[r], pool.scales_of(slot, head, place.row(r)), pool, place.C);
    }
  }

  template <Cached kCached, class S>
  __device__ void store(const Place<Layout, kRows>& place, const StatePool<S>& pool, int slot,
                        int head) const {
    S* row = first_row(place, pool, slot, head);
#pragma unroll
    for (int r = 0; r < kRows; ++r, row += Layout::kRowsPerWarp * pool.row_stride) {
      if (!place.has(r)) continue;
      if constexpr (kIsScaled<S>) {
        const std::int64_t element =
            ((std::int64_t{slot} * pool.heads + head) * place.R + place.row(r)) * place.C;
        store_scaled<Layout>(row, s[r], pool.scales_of(slot, head, place.row(r)), pool,
                             pool.column_stride, place.C, element);
      } else {
        Layout::template store<kCached>(row, s[r], place.C, pool.column_stride);
      }
    }
  }

  template <class S>
  __device__ void round() {
    static_assert(!kIsScaled<S>, "a commit of scaled states is not there");
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < Layout::kCount; ++i) s[r][i] = rounded_to<S>(s[r][i]);
  }

 private:
  template <class S>
  __device__ static S* first_row(const Place<Layout, kRows>& place, const StatePool<S>& pool,
                                 int slot, int head) {
    return pool.data + slot * pool.slot_stride + head * pool.head_stride +
           place.first * pool.row_stride;
  }
};

/// Tokens that a block prepared together, in shared memory.
template <class Op, class Layout, int kRowsOfBlock, int kTokens>
struct StagedTokens {
  alignas(16) float columns[kTokens][Op::kColumnVectors][Layout::kExtent];
  float rows[kTokens][Op::kRowVectors][kRowsOfBlock];
  typename Op::Scalars scalars[kTokens];
};

/// What the tokens of a chunk are to each other and to the state before it.
template <int kTokens>
struct ChunkProducts {
  float pairs[2][kTokens][kTokens];  ///< [column][later][earlier], decayed
  float2 state_scales[kTokens];
};

/// What a launch asks for, a kernel each, because the general one needs twice the registers.
enum class Work {
  step,    ///< one token per row with one slot
  chain,   ///< several tokens per row
  staged,  ///< the first tokens of an earlier verification, several per row, or both
  verify,  ///< the same in chunks, where nobody asks for the states of the row's own
  any      ///< all of these, trees, and what was accepted of them
};

/// One block's share of the work: some rows of one head's state, for one row of the batch.
template <class Op, class S, class Layout, int kRows, int kWarps, Cached kCached>
struct RecurrenceBlock {
  static constexpr int kRowsOfBlock = kWarps * kRows * Layout::kRowsPerWarp;
  static constexpr int kStage = 2 * kWarps;
  using Token = typename Op::template Token<Layout, kRows>;
  using Raw = typename Op::template Raw<Layout, kRows>;
  using Staged = StagedTokens<Op, Layout, kRowsOfBlock, kStage>;
  const RecurrenceParameters<S>& p;
  const typename Op::Parameters& inputs;
  Place<Layout, kRows> place;
  int n;  ///< row of the batch
  int head;

  template <bool kFolded>
  __device__ Token load(int t) const {
    return prepare<kFolded>(t, fetch<kFolded>(t));
  }
  template <bool kFolded>
  __device__ Raw fetch(int t) const {
    return Op::template fetch<kFolded, Layout, kRows>(inputs, t, head, place);
  }
  template <bool kFolded>
  __device__ Token prepare(int t, const Raw& raw) const {
    const Token token = Op::template prepare<kFolded, Layout, kRows>(inputs, t, head, place, raw);
    if (!kFolded && place.first == 0 && Layout::part() == 0)
      Op::keep(inputs, t, head, token.scalars);
    return token;
  }

  /// `out` is of the row that the lane owns.
  __device__ void write(float out, int t) const {
    const int own = Layout::template own<kRows>();
    if (Layout::template speaks_for_owners<kRows>() && place.has(own))
      Op::write(inputs, t, head, place.row(own), out);
  }

  /// What the state is after token `i` of the row goes where it belongs.
  __device__ void store(const StateRows<Layout, kRows>& state, const RowPlan& plan, int i) const {
    if (p.store_snapshots) {
      state.template store<kCached>(place, p.snapshots, plan.range.begin + i, head);
    } else if (!p.read_only) {
      const int target = p.rows.target(plan, n, i);
      if (target != kNowhere) state.template store<kCached>(place, p.state, target, head);
    }
  }

  /// Asks L2 for what the block will read first. Slots and counts that an earlier launch still
  /// writes may be other ones than those that count later: then a hint was wrong.
  template <Work kWork>
  __device__ void prefetch() const {
    if constexpr (Layout::kMasked) return;
    const bool small = p.rows.rows <= kSmallBatch;
    if (small && kWork == Work::step) {
      Op::template prefetch<false, Layout, kRows>(inputs, n, head, place);
    } else if (small) {
      if (p.runs_tokens) prefetch_tokens<false>(p.rows.likely_range(n));
      if (p.fold.accepted) prefetch_tokens<true>(p.fold.rows.likely_range(n));
    }
    const bool pays = sizeof(S) <= 2 || small || p.rows.rows >= kLargeBatch;
    if (threadIdx.x != 0 || !p.dense || !pays) return;
    const int slot = p.rows.likely_source(n);
    if (slot == kNowhere) return;
    prefetch_to_l2(p.state.data + slot * p.state.slot_stride + head * p.state.head_stride +
                       place.first * p.state.row_stride,
                   kRowsOfBlock * p.C * sizeof(S));
  }
  template <bool kFolded>
  __device__ void prefetch_tokens(const TokenRange& range) const {
    for (int i = static_cast<int>(threadIdx.x / 32); i < min(range.size, kStage); i += kWarps)
      Op::template prefetch<kFolded, Layout, kRows>(inputs, range.begin + i, head, place);
  }

  __device__ void run_step() const {
    const Raw raw = fetch<false>(n);  // before the slot is known
    const int source = p.rows.source(n);
    if (source == kNowhere) return write(0.0f, n);
    StateRows<Layout, kRows> state;
    state.template load<kCached>(place, p.state, source, head);
    const int target = p.rows.target(n, 0, 1, source);
    const Token token = prepare<false>(n, raw);
    const float out = Op::step(token, state.s);
    if (target != kNowhere) state.template store<kCached>(place, p.state, target, head);
    write(out, n);
  }

  /// Prepares token t as the i-th one of `staged`. A warp's work.
  template <bool kFolded>
  __device__ void stage(Staged& staged, int i, int t) const {
    static_assert(kRowsOfBlock % 32 == 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first = static_cast<int>(blockIdx.x) * kRowsOfBlock;
    constexpr int kVectors = kFolded ? 1 : Op::kRowVectors;
    const Raw raw = fetch<kFolded>(t);
    float values[kVectors][kRowsOfBlock / 32];  // asked for with the rest
#pragma unroll
    for (int which = 0; which < kVectors; ++which)
#pragma unroll
      for (int r = 0; r < kRowsOfBlock / 32; ++r)
        values[which][r] =
            Op::template row_value<kFolded>(inputs, which, t, head, first + 32 * r + lane);
    const Token token = Op::template prepare<kFolded, Layout, kRows>(inputs, t, head, place, raw);
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
    const int first = place.first - static_cast<int>(blockIdx.x) * kRowsOfBlock;
    Op::take_rows(token, folded, [&](int which, int r) {
      return staged.rows[i][which][first + r * Layout::kRowsPerWarp];
    });
    return token;
  }

  /// Stages [first, end) of the folded tokens and the own ones behind them. A block's work.
  __device__ void stage_piece(Staged& staged, int folded, int folds, int own, int first,
                              int end) const {
    for (int i = first + static_cast<int>(threadIdx.x / 32); i < end; i += kWarps) {
      if (i < folds)
        stage<true>(staged, i - first, folded + i);
      else
        stage<false>(staged, i - first, own + i - folds);
    }
  }

  /// The accepted tokens of an earlier verification, then the row's own. In pieces: the block
  /// prepares one together, and every warp takes its rows of the state through it.
  __device__ void run_staged(Staged& staged, StateRows<Layout, kRows>& state, const RowPlan& plan,
                             const TokenRange& folded) const {
    const int folds = folded.size, total = folds + plan.range.size;
    for (int first = 0; first < total; first += kStage) {
      const int end = min(total, first + kStage);
      if (first > 0) __syncthreads();  // the piece before has been read
      stage_piece(staged, folded.begin, folds, plan.range.begin, first, end);
      __syncthreads();
      for (int i = first; i < end; ++i) {
        if (i < folds) {
          Op::advance(staged_token(staged, i - first, true), state.s);
          state.template round<S>();
          if (i == folds - 1 && plan.last != kNowhere)
            state.template store<kCached>(place, p.state, plan.last, head);
        } else {
          const float out = Op::step(staged_token(staged, i - first, false), state.s);
          store(state, plan, i - folds);
          write(out, plan.range.begin + i - folds);
        }
      }
    }
  }

  /// The accepted tokens of an earlier verification, then chunks of the row's own. In pieces as
  /// above; where the own ones are cut does not depend on how many were accepted.
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
      if (first > 0) __syncthreads();  // the piece before has been read
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
      read_chunk(staged, products, state, own, count, plan.range.begin + first + own - folds);
      if (end == total) return;
      for (int i = own; i < count; ++i) {
        state.advance(
            staged.columns[i][0],
            [&](int r, float) { return staged.rows[i][0][warp * 16 + QuadRows<Layout>::row(r)]; },
            [&](float u, float k, float s) { return Op::advanced(staged.scalars[i], u, k, s); });
      }
    }
  }

  /// Of the chunk [begin, end) of staged tokens.
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

  /// Outputs of the chunk [begin, end), whose first token is t. First row values become what each
  /// token adds. The lane has token lane % 4 of every four, in the rows lane / 4 and lane / 4 + 8.
  /// A state stored in 16 bits is exact in tf32 before the first chunk; before a later one, of rows
  /// of more than kStage tokens, its upper 11 bits are read.
  __device__ void read_chunk(Staged& staged, const ChunkProducts<kStage>& products,
                             const QuadRows<Layout>& state, int begin, int end, int t) const {
    const int mine = static_cast<int>(threadIdx.x % 4);
    const int warp_row = static_cast<int>(threadIdx.x / 32) * 16;
    for (int first = begin; first < end; first += 4) {
      const int column = static_cast<int>(threadIdx.x % 32 / 4);
      float by_state[2][2];  // [row][column]
      state.template multiply<sizeof(S) == 4>(
          staged.columns[min(first + column / 2, end - 1)][column % 2], by_state);
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

  /// Folds accepted tokens into the state; whether there were any.
  __device__ bool fold(StateRows<Layout, kRows>& state) const {
    const Fold& f = p.fold;
    const TokenRange range = f.rows.range(n);
    const int most = f.nodes ? f.node_columns : range.size;
    const int count = min(f.accepted[n * f.accepted_stride], most);
    for (int i = 0; i < count; ++i) {
      const int node = f.nodes ? f.nodes[n * f.nodes_stride + i * f.nodes_column_stride] : i;
      if (node < 0 || node >= range.size) continue;
      Op::advance(load<true>(range.begin + node), state.s);
      state.template round<S>();
    }
    return count > 0;
  }

  __device__ void run_chain(StateRows<Layout, kRows>& state, const RowPlan& plan) const {
    for (int i = 0; i < plan.range.size; ++i) {
      const int t = plan.range.begin + i;
      const Token token = load<false>(t);
      if (i == plan.range.size - 1) let_the_next_launch_start();
      const float out = Op::step(token, state.s);
      store(state, plan, i);
      write(out, t);
    }
  }

  /// The path of token i, first token first, in `path`; its length, 0 where the token is invalid.
  __device__ int find_path(const std::int32_t* parents, int i, std::int16_t* path) const {
    int length = 0;
    for (int node = i; node >= 0; ++length) {
      const int parent = parents[node * p.parents_stride];
      if (node == 0 ? parent != -1 : parent < 0 || parent >= node) return 0;
      path[length] = static_cast<std::int16_t>(node);
      node = parent;
    }
    for (int a = 0, b = length - 1; a < b; ++a, --b) {
      const std::int16_t other = path[a];
      path[a] = path[b];
      path[b] = other;
    }
    return length;
  }

  /// `path` holds kTreeTokensMax numbers and a length, shared by the block.
  __device__ void run_tree(const StateRows<Layout, kRows>& committed, const TokenRange& range,
                           std::int16_t* path) const {
    const std::int32_t* parents = p.parents + range.begin * p.parents_stride;
    StateRows<Layout, kRows> state = committed;
    int at_hand = -1;  // the token whose state `state` is; -1: the committed one
    for (int i = 0; i < min(range.size, kTreeTokensMax); ++i) {
      const int t = range.begin + i;
      __syncthreads();  // the path of the token before has been read
      if (threadIdx.x == 0)
        path[kTreeTokensMax] = static_cast<std::int16_t>(find_path(parents, i, path));
      __syncthreads();
      const int length = path[kTreeTokensMax];
      const bool follows = length > 0 && (length > 1 ? path[length - 2] : -1) == at_hand;
      if (!follows) state = committed;
      if (length == 0) write(0.0f, t);
      for (int next = follows ? length - 1 : 0; next < length; ++next) {
        const int node = range.begin + path[next];
        const float out = Op::step(load<false>(node), state.s);
        if (next == length - 1) write(out, node);
      }
      at_hand = length > 0 ? i : -1;
      if (p.store_snapshots) state.template store<kCached>(place, p.snapshots, t, head);
    }
  }
};

template <class Op, class S, class Layout, int kRows, int kWarps, int kWarpsPerProcessor,
          Cached kCached, Work kWork>
__global__ void __launch_bounds__(32 * kWarps, kWarpsPerProcessor / kWarps)
    recurrence_kernel(const __grid_constant__ RecurrenceParameters<S> p,
                      const __grid_constant__ typename Op::Parameters inputs) {
  using Block = RecurrenceBlock<Op, S, Layout, kRows, kWarps, kCached>;
  const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const Block block{p,
                    inputs,
                    {warp * kRows * Layout::kRowsPerWarp + Layout::row_in_warp(), p.R, p.C},
                    static_cast<int>(blockIdx.z),
                    static_cast<int>(blockIdx.y)};
  if constexpr (kWork != Work::chain && kWork != Work::any) block.template prefetch<kWork>();
  wait_for_earlier_launch();
  if constexpr (kWork != Work::chain) let_the_next_launch_start();
  if constexpr (kWork == Work::step) {
    block.run_step();
  } else {
    constexpr bool kFolds = kWork != Work::chain;
    AcceptedTokens accepted;  // asked for with the plan
    if constexpr (kWork == Work::staged || kWork == Work::verify) accepted.ask(p.fold, block.n);
    RowPlan plan = p.rows.plan(block.n);
    if (kFolds && !p.runs_tokens) plan.range = {0, 0};
    if (plan.source == kNowhere)
      for (int i = 0; i < plan.range.size; ++i) block.write(0.0f, plan.range.begin + i);
    if ((!kFolds || p.runs_tokens) && block.n == p.rows.rows - 1)
      for (int t = p.rows.padding_begin(); t < p.rows.tokens; ++t) block.write(0.0f, t);
    const bool folds = kFolds && p.fold.accepted;
    if (plan.source == kNowhere || (plan.range.size == 0 && !folds)) return;

    if constexpr (kWork == Work::verify) {
      __shared__ typename Block::Staged staged;
      __shared__ ChunkProducts<Block::kStage> products;
      return block.run_verification(staged, products, plan, accepted.range(p.fold));
    } else {
      StateRows<Layout, kRows> state;
      state.template load<kCached>(block.place, p.state, plan.source, block.head);
      if constexpr (kWork == Work::any) {
        __shared__ std::int16_t path[kTreeTokensMax + 1];
        if constexpr (!kIsScaled<S>)
          if (folds && block.fold(state) && plan.last != kNowhere)
            state.template store<kCached>(block.place, p.state, plan.last, block.head);
        if (p.parents)
          block.run_tree(state, plan.range, path);
        else
          block.run_chain(state, plan);
      } else if constexpr (kWork == Work::staged) {
        __shared__ typename Block::Staged staged;
        block.run_staged(staged, state, plan, accepted.range(p.fold));
      } else {
        block.run_chain(state, plan);
      }
    }
  }
}

// --- The host's side ---------------------------------------------------------------------------

/// How a state's rows are dealt out. kWarpsPerProcessor: so many fit, which bounds the registers.
template <int kRows_, int kWarps_, int kWarpsPerProcessor_, Cached kCached_ = Cached::streaming>
struct Deal {
  static constexpr int kRows = kRows_, kWarps = kWarps_, kWarpsPerProcessor = kWarpsPerProcessor_;
  static constexpr Cached kCached = kCached_;
};

template <Work kWork>
using Launch = std::integral_constant<Work, kWork>;

template <class Op, class S, class Layout, class Deal>
bool fits(const RecurrenceParameters<S>& p) {
  return p.aligned && p.C == Layout::kLanes * Layout::kCount &&
         p.R % (Deal::kWarps * Deal::kRows * Layout::kRowsPerWarp) == 0;
}

template <class Op, Work kWork, class S, class Layout, class Deal>
void launch_recurrence(const char* operation, const RecurrenceParameters<S>& p,
                       const typename Op::Parameters& inputs, cudaStream_t stream) {
  constexpr int kRows = Deal::kRows, kWarps = Deal::kWarps;
  constexpr int kRowsOfBlock = kWarps * kRows * Layout::kRowsPerWarp;
  const dim3 grid(static_cast<unsigned>((p.R + kRowsOfBlock - 1) / kRowsOfBlock),
                  static_cast<unsigned>(p.heads), static_cast<unsigned>(p.rows.rows));
  launch(operation,
         recurrence_kernel<Op, S, Layout, kRows, kWarps, Deal::kWarpsPerProcessor, Deal::kCached,
                           kWork>,
         grid, dim3(32 * kWarps), 0, stream, true, p, inputs);
}

/// Any shape and any strides.
template <class Op, class S>
void launch_any(const char* operation, const RecurrenceParameters<S>& p,
                const typename Op::Parameters& inputs, cudaStream_t stream) {
  launch_recurrence<Op, Work::any, S, AnyRows, Deal<2, 4, 8>>(operation, p, inputs, stream);
}

/// Launches the fast layout if the states have its shape. The deals are measured (H200, states of
/// [128, 128] and [64, 128]): rows of 16 bits want twice as many in flight; a small batch wants few
/// instructions and finds its states in L2, where the launch before asked for them; states that
/// pass through a full L2 are better left to it. Where tokens outweigh the states that are moved,
/// four warps prepare them together.
template <class Op, class S, class Layout>
bool launch_fast(const char* operation, const RecurrenceParameters<S>& p,
                 const typename Op::Parameters& inputs, cudaStream_t stream) {
  const auto launched = [&]<Work kWork, class Chosen>(Launch<kWork>, Chosen) {
    if (!fits<Op, S, Layout, Chosen>(p)) return false;
    launch_recurrence<Op, kWork, S, Layout, Chosen>(operation, p, inputs, stream);
    return true;
  };
  constexpr bool kNarrow = sizeof(S) <= 2;
  const bool small = p.rows.rows <= kSmallBatch, fills_l2 = p.rows.rows >= kLargeBatch;
  const bool tree = p.parents || p.fold.nodes;
  const bool several = p.rows.starts || p.rows.columns > 0;
  const bool kept = !p.read_only || p.store_snapshots;
  constexpr int kRows = kNarrow ? 4 : 2;
  if constexpr (kIsScaled<S>) {
    if (several || tree || !kept || !blocks_are_pieces<Layout>(p.state, p.C)) return false;
    return launched(Launch<Work::step>(), Deal<2, 1, 16, Cached::yes>());
  } else {
    if (tree) {
      // below
    } else if (p.fold.accepted || !kept) {
      if constexpr (Op::kHasChunks) {
        if (p.runs_tokens && !p.store_snapshots &&
            launched(Launch<Work::verify>(), Deal<4, 4, 16, Cached::yes>()))
          return true;
      }
      if (launched(Launch<Work::staged>(), Deal<4, 4, 16, Cached::yes>())) return true;
    } else if (several || p.read_only) {
      if (small && launched(Launch<Work::staged>(), Deal<2, 4, 16>())) return true;
      if (fills_l2 && launched(Launch<Work::chain>(), Deal<kRows, 1, 16, Cached::yes>()))
        return true;
      if (launched(Launch<Work::chain>(), Deal<kRows, 1, 16>())) return true;
    } else {
      if (small && launched(Launch<Work::step>(), Deal<4, 1, 16, Cached::yes>())) return true;
      if (fills_l2 && launched(Launch<Work::step>(), Deal<kRows, 1, 16, Cached::yes>()))
        return true;
      if (launched(Launch<Work::step>(), Deal<kRows, 1, 16>())) return true;
    }
    return launched(Launch<Work::any>(), Deal<2, 1, 8>());
  }
}

/// Rows, slots and extents of an update over T tokens. `letters` name the state's dimensions.
template <class S>
RecurrenceParameters<S> recurrence_parameters(const Checks& checks, const char* letters,
                                              const TensorView<S, 4>& state,
                                              const StateSlots& slots,
                                              const std::optional<IndexView>& starts,
                                              std::int64_t T) {
  const Shape<4> shape = shape_of(state);
  checks.expect(1 <= shape[3] && shape[3] <= kAnyRowsExtent, "state",
                std::string(letters) + " with at most 256 columns", text_of(shape));
  checks.expect(1 <= shape[2] && shape[2] <= 65536, "state",
                std::string(letters) + " with at most 65536 rows", text_of(shape));
  checks.expect(shape[1] <= 65535, "state", std::string(letters) + " with at most 65535 heads",
                text_of(shape));
  checks.expect(!slots.num_accepted || slots.table, "num_accepted_tokens",
                "absent without a table of state_indices", "given");
  RecurrenceParameters<S> p;
  p.rows = row_slots(checks, slots, starts, T, shape[0]);
  check_row_count(checks, p.rows);
  p.state = StatePool<S>(state);
  p.aligned = rows_aligned(state, 16);
  p.dense = state.stride(2) == shape[3];
  p.heads = static_cast<int>(shape[1]);
  p.R = static_cast<int>(shape[2]);
  p.C = static_cast<int>(shape[3]);
  return p;
}

template <class S>
void add_snapshots(const Checks& checks, const std::optional<TensorView<S, 4>>& snapshots,
                   RecurrenceParameters<S>& p) {
  if (!snapshots) return;
  checks.shape(*snapshots, "snapshots", "[T, heads, rows, columns]",
               {p.rows.tokens, p.heads, p.R, p.C});
  p.snapshots = StatePool<S>(*snapshots);
  p.aligned = p.aligned && rows_aligned(*snapshots, 16);
  p.store_snapshots = p.read_only = true;
}

template <class S>
void add_parents(const Checks& checks, const std::optional<IndexView>& parents,
                 RecurrenceParameters<S>& p) {
  if (!parents) return;
  checks.shape(*parents, "parents", "[T]", {p.rows.tokens});
  p.parents = parents->data_handle();
  p.parents_stride = parents->stride(0);
  p.read_only = true;
}

/// The tokens of `rows`, of which accepted[n] advance the state of row n.
template <class S>
void add_fold(const Checks& checks, const RowSlots& rows, const IndexView& accepted,
              const std::optional<IndexTable>& nodes, RecurrenceParameters<S>& p) {
  checks.expect(p.rows.columns == 0, "state_indices", "[N] for a commit", "a table");
  checks.expect(rows.rows == p.rows.rows, "the tokens to commit", "of as many rows as the batch",
                std::to_string(rows.rows) + " rows");
  checks.shape(accepted, "accepted", "[N]", {p.rows.rows});
  p.fold.rows = rows;
  p.fold.accepted = accepted.data_handle();
  p.fold.accepted_stride = accepted.stride(0);
  if (!nodes) return;
  checks.expect(nodes->extent(0) == p.rows.rows, "nodes", "[N, longest path]",
                text_of(shape_of(*nodes)));
  p.fold.nodes = nodes->data_handle();
  p.fold.nodes_stride = nodes->stride(0);
  p.fold.nodes_column_stride = nodes->stride(1);
  p.fold.node_columns = static_cast<int>(nodes->extent(1));
}

}  // namespace lockstep::kernels
