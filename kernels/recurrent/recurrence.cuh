// A recurrence over a batch, on the device; reference/recurrent/recurrence.hpp is its counterpart
// among the references. This file finds each row's state, runs the row's tokens over it one by one,
// and stores states to slots or snapshots. The arithmetic of a token belongs to the operation Op.
//
//   grid   (ceil(R / rows of a block), heads, N)      N: rows of the batch
//   block  kWarps warps; a warp holds kRows x Layout::kRowsPerWarp rows of one state [R, C] in
//          registers, float32, from the first token of its row of the batch to the last
//
// Each state is read once, and written once per token that stores it, in accesses of 16 bytes side
// by side in neighbouring lanes. A token's other inputs are small and come through L2. The rows of
// a state do not depend on each other, so warps and blocks never exchange states.
//
// A token of a tree starts from its parent's state. Where the registers hold another state, the
// kernel starts from the committed state and runs the whole path again: that costs arithmetic but
// no memory for intermediate states.
//
// Terms: a verification runs the drafts of a speculative step; a folded token is an accepted token
// of an earlier verification, which advances the state and has no output; a replay is a launch of
// folded tokens only.
//
// An operation Op provides
//   - Op::Parameters: the inputs of its tokens, passed to the kernel
//   - Op::Token<Layout, kRows>: one lane's share of a token: pieces of its vectors along the
//     columns (k, q; B, C), Op::Scalars, and values for the lane's rows (v; x)
//   - Op::Raw<Layout, kRows>: the same inputs unconverted, with their loads still under way
//   - Op::prefetch<kFolded>(p, t, head, lane_rows): prefetches the inputs of token t into L2;
//     `lane_rows` names the lane's rows
//   - Op::fetch<kFolded>(p, t, head, lane_rows): issues the loads of a Raw
//   - Op::prepare<kFolded>(p, t, head, lane_rows, raw): makes the Token from a Raw
//   - Op::keep(p, t, head, scalars): stores the scalars that a later replay needs; called by one
//     lane per token and head
//   - Op::advance(token, s): advances the lane's part s of its rows by the token
//   - Op::step(token, s): advances s; returns the output of the row that the lane owns
//     (RowLayout::own())
//   - Op::write(p, t, head, row, value): stores an output
// For tokens staged in shared memory, it also provides visit_columns, take_rows and row_value.
//
// A verification that stores no states of its own tokens can treat a few tokens as a chunk, as
// prefill does (Op::kHasChunks). All tokens of the chunk multiply the state before the chunk, in
// one small matrix product on the tensor cores; the tokens' influence on each other goes through
// inner products of their vectors, which a block computes once for all its rows. Such an Op has
//   - Op::Scalars::alpha: the decay by which a token multiplies the state
//   - Op::pair_products<Layout>(staged, earlier, later, products): the inner products of the later
//     token's two column vectors with the earlier token's first one
//   - Op::state_scales(scalars, decay): the factors of the products of the token's two column
//     vectors with the state before the chunk; `decay` is the product of the alphas up to the token
//   - Op::chunk_value(scalars, value, seen): the value u that the token adds to a row, from its own
//     row value and `seen`, the decayed state's product with its first column vector
//   - Op::new_value(scalars, value, product): u of a folded token, in the rounding of a decode;
//     `product` is the unscaled product of the state with the staged first column vector
//   - Op::advanced(scalars, u, k, s): the new element of the state, with the bits of a decode
#pragma once

#include "kernels/base/slots.cuh"
#include "kernels/recurrent/scaled_rows.cuh"
#include "kernels/recurrent/shapes.hpp"

namespace lockstep::kernels {

constexpr int kSmallBatch = 8;        ///< rows up to which latency, not bandwidth, decides the time
constexpr int kLargeBatch = 128;      ///< rows from which on the batch's states fill L2
constexpr int kTreeTokensMax = 1024;  ///< tokens of a tree per row: a path lies in shared memory

/// Folded tokens: accepted tokens of an earlier verification. They advance the stored state, which
/// is rounded to its type after each, as single-token decodes would.
struct Fold {
  RowSlots rows;  ///< only its token ranges are used
  const std::int32_t* accepted = nullptr;
  std::int64_t accepted_stride = 0;
  const std::int32_t* nodes = nullptr;  ///< [N, node_columns]; null: the first tokens of the row
  std::int64_t nodes_stride = 0, nodes_column_stride = 0;
  int node_columns = 0;
};

/// The accepted tokens of a row. ask() issues the loads; range() is the first to wait for them.
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

/// States [slots or tokens, heads, R, C] with any strides.
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
  StatePool<S> snapshots;  ///< [tokens, heads, R, C]: slot t is for the state after token t
  const std::int32_t* parents = nullptr;
  std::int64_t parents_stride = 0;
  Fold fold;
  bool read_only = false;
  bool store_snapshots = false;
  bool runs_tokens = true;  ///< false: a replay, which has no outputs
  bool aligned = false;     ///< state rows are contiguous and begin at multiples of 16 bytes
  bool dense = false;       ///< a state's rows lie one after another, without gaps
  int heads = 0, R = 0, C = 0;
};

/// The rows of a state of which a lane holds a part. Blocks of the fast layout always hold
/// all their rows (R is a multiple); masked layouts may reach beyond R.
template <class Layout, int kRows>
struct LaneRows {
  int first;  ///< the next ones are kRowsPerWarp apart
  int R, C;   ///< the state's extents
  __device__ int row(int r) const { return first + r * Layout::kRowsPerWarp; }
  __device__ bool has(int r) const { return !Layout::kMasked || row(r) < R; }
};

template <class Layout, int kRows>
struct StateRows {
  float s[kRows][Layout::kCount];

  template <Cached kCached, class S>
  __device__ void load(const LaneRows<Layout, kRows>& lane_rows, const StatePool<S>& pool, int slot,
                       int head) {
    const S* row = first_row(lane_rows, pool, slot, head);
#pragma unroll
    for (int r = 0; r < kRows; ++r, row += Layout::kRowsPerWarp * pool.row_stride)
      if (lane_rows.has(r))
        Layout::template load<kCached>(s[r], row, lane_rows.C, pool.column_stride);
    if constexpr (kIsScaled<S>) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (lane_rows.has(r))
          scale_up<Layout>(s[r], pool.scales_of(slot, head, lane_rows.row(r)), pool, lane_rows.C);
    }
  }

  template <Cached kCached, class S>
  __device__ void store(const LaneRows<Layout, kRows>& lane_rows, const StatePool<S>& pool,
                        int slot, int head) const {
    S* row = first_row(lane_rows, pool, slot, head);
#pragma unroll
    for (int r = 0; r < kRows; ++r, row += Layout::kRowsPerWarp * pool.row_stride) {
      if (!lane_rows.has(r)) continue;
      if constexpr (kIsScaled<S>) {
        const std::int64_t element =
            ((std::int64_t{slot} * pool.heads + head) * lane_rows.R + lane_rows.row(r)) *
            lane_rows.C;
        store_scaled<Layout>(row, s[r], pool.scales_of(slot, head, lane_rows.row(r)), pool,
                             pool.column_stride, lane_rows.C, element);
      } else {
        Layout::template store<kCached>(row, s[r], lane_rows.C, pool.column_stride);
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
  __device__ static S* first_row(const LaneRows<Layout, kRows>& lane_rows, const StatePool<S>& pool,
                                 int slot, int head) {
    return pool.data + slot * pool.slot_stride + head * pool.head_stride +
           lane_rows.first * pool.row_stride;
  }
};

/// The kinds of launches. Each is a kernel of its own, because the general one (`any`) needs twice
/// the registers.
enum class LaunchKind {
  step,    ///< one token per row, one slot per row
  chain,   ///< several tokens per row, one after another
  staged,  ///< folded tokens, several own tokens per row, or both; tokens staged in shared memory
  verify,  ///< staged, with the row's own tokens in chunks; stores no states of own tokens
  any      ///< all of these, trees, and folds of accepted tree nodes; any shape and strides
};

/// One block's work: kRowsOfBlock rows of one head's state, for one row of the batch.
template <class Op, class S, class Layout, int kRows, int kWarps, Cached kCached>
struct RecurrenceBlock {
  static constexpr int kRowsOfBlock = kWarps * kRows * Layout::kRowsPerWarp;
  static constexpr int kStage = 2 * kWarps;  ///< tokens that a block stages together
  using Token = typename Op::template Token<Layout, kRows>;
  using Raw = typename Op::template Raw<Layout, kRows>;
  const RecurrenceParameters<S>& p;
  const typename Op::Parameters& inputs;
  LaneRows<Layout, kRows> lane_rows;
  int n;  ///< row of the batch
  int head;

  template <bool kFolded>
  __device__ Token load(int t) const {
    return prepare<kFolded>(t, fetch<kFolded>(t));
  }
  template <bool kFolded>
  __device__ Raw fetch(int t) const {
    return Op::template fetch<kFolded, Layout, kRows>(inputs, t, head, lane_rows);
  }
  template <bool kFolded>
  __device__ Token prepare(int t, const Raw& raw) const {
    const Token token =
        Op::template prepare<kFolded, Layout, kRows>(inputs, t, head, lane_rows, raw);
    if (!kFolded && lane_rows.first == 0 && Layout::part() == 0)
      Op::keep(inputs, t, head, token.scalars);
    return token;
  }

  /// Writes `out`, the output of the row that the lane owns, at token t.
  __device__ void write(float out, int t) const {
    const int own = Layout::template own<kRows>();
    if (Layout::template speaks_for_owners<kRows>() && lane_rows.has(own))
      Op::write(inputs, t, head, lane_rows.row(own), out);
  }

  /// Stores the state after token `i` of the row: to its snapshot, or to its slot if it has one.
  __device__ void store(const StateRows<Layout, kRows>& state, const RowPlan& plan, int i) const {
    if (p.store_snapshots) {
      state.template store<kCached>(lane_rows, p.snapshots, plan.range.begin + i, head);
    } else if (!p.read_only) {
      const int target = p.rows.target(plan, n, i);
      if (target != kNowhere) state.template store<kCached>(lane_rows, p.state, target, head);
    }
  }

  /// Prefetches into L2 the inputs and states that the block reads first. It runs before
  /// wait_for_earlier_launch(), so the slots and counts it reads may still change; a wrong guess
  /// costs a useless prefetch, nothing else.
  template <LaunchKind kKind>
  __device__ void prefetch() const {
    if constexpr (Layout::kMasked) return;
    const bool small = p.rows.rows <= kSmallBatch;
    if (small && kKind == LaunchKind::step) {
      Op::template prefetch<false, Layout, kRows>(inputs, n, head, lane_rows);
    } else if (small) {
      if (p.runs_tokens) prefetch_tokens<false>(p.rows.likely_range(n));
      if (p.fold.accepted) prefetch_tokens<true>(p.fold.rows.likely_range(n));
    }
    const bool pays = sizeof(S) <= 2 || small || p.rows.rows >= kLargeBatch;
    if (threadIdx.x != 0 || !p.dense || !pays) return;
    const int slot = p.rows.likely_source(n);
    if (slot == kNowhere) return;
    prefetch_to_l2(p.state.data + slot * p.state.slot_stride + head * p.state.head_stride +
                       lane_rows.first * p.state.row_stride,
                   kRowsOfBlock * p.C * sizeof(S));
  }
  template <bool kFolded>
  __device__ void prefetch_tokens(const TokenRange& range) const {
    for (int i = static_cast<int>(threadIdx.x / 32); i < min(range.size, kStage); i += kWarps)
      Op::template prefetch<kFolded, Layout, kRows>(inputs, range.begin + i, head, lane_rows);
  }

  __device__ void run_step() const {
    const Raw raw = fetch<false>(n);  // loads that do not wait for the slot number
    const int source = p.rows.source(n);
    if (source == kNowhere) return write(0.0f, n);
    StateRows<Layout, kRows> state;
    state.template load<kCached>(lane_rows, p.state, source, head);
    const int target = p.rows.target(n, source);
    const Token token = prepare<false>(n, raw);
    const float out = Op::step(token, state.s);
    if (target != kNowhere) state.template store<kCached>(lane_rows, p.state, target, head);
    write(out, n);
  }

  /// Folds accepted tokens into the state. Returns whether there were any.
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

  /// Writes the path of token i to `path`, root first. Returns its length, or 0 where a parent on
  /// the way is invalid.
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

  /// Runs a tree of tokens from the committed state. `path` is shared memory of the block:
  /// kTreeTokensMax token numbers, then the length. Thread 0 finds each token's path.
  __device__ void run_tree(const StateRows<Layout, kRows>& committed, const TokenRange& range,
                           std::int16_t* path) const {
    const std::int32_t* parents = p.parents + range.begin * p.parents_stride;
    StateRows<Layout, kRows> state = committed;
    int at_hand = -1;  // `state` is the state after this token; -1: it is the committed state
    for (int i = 0; i < min(range.size, kTreeTokensMax); ++i) {
      const int t = range.begin + i;
      __syncthreads();  // all threads have read the previous token's path
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
      if (p.store_snapshots) state.template store<kCached>(lane_rows, p.snapshots, t, head);
    }
  }
};

}  // namespace lockstep::kernels
