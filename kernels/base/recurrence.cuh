// How a recurrence runs over a batch on the device: what reference/base/recurrence.hpp is for the
// references. Rows of the batch find their states, tokens update them one by one, and states go to
// slots or snapshots; what a token does to a state is the operation's own business.
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
//   - Op::Token<Layout, kRows>: one token as a lane sees it
//   - Op::Raw<Layout, kRows>: a token's inputs, asked for and not yet waited for
//   - Op::fetch(p, t, head, place): asks; `place` says which rows the lane has
//   - Op::prepare(p, t, head, place, raw): the token
//   - Op::load_folded(p, t, head, place): a token that only advances the state
//   - Op::advance(token, s, r): moves the lane's r-th row
//   - Op::step(token, s, r): likewise; returns what the row gives, in each of its lanes
//   - Op::write(p, t, head, row, value): stores it
#pragma once

#include "kernels/base/shapes.hpp"
#include "kernels/base/slots.cuh"
#include "kernels/base/state_rows.cuh"

namespace lockstep::kernels {

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

/// States [slots or tokens, heads, R, C] by strides.
template <class S>
struct StatePool {
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
  }

  template <Cached kCached, class S>
  __device__ void store(const Place<Layout, kRows>& place, const StatePool<S>& pool, int slot,
                        int head) const {
    S* row = first_row(place, pool, slot, head);
#pragma unroll
    for (int r = 0; r < kRows; ++r, row += Layout::kRowsPerWarp * pool.row_stride)
      if (place.has(r)) Layout::template store<kCached>(row, s[r], place.C, pool.column_stride);
  }

  template <class S>
  __device__ void round() {
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

/// One block's share of the work: some rows of one head's state, for one row of the batch.
template <class Op, class S, class Layout, int kRows, Cached kCached>
struct RecurrenceBlock {
  using Token = typename Op::template Token<Layout, kRows>;
  using Raw = typename Op::template Raw<Layout, kRows>;
  const RecurrenceParameters<S>& p;
  const typename Op::Parameters& inputs;
  Place<Layout, kRows> place;
  int n;  ///< row of the batch
  int head;

  __device__ static void advance(const Token& token, StateRows<Layout, kRows>& state) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) Op::template advance<Layout>(token, state.s[r], r);
  }

  /// Advances the state by a token of which the outputs are wanted, too.
  __device__ void step(const Token& token, StateRows<Layout, kRows>& state,
                       float (&out)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r] = Op::template step<Layout>(token, state.s[r], r);
  }

  __device__ void write(const float (&out)[kRows], int t) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (Layout::part() == 0 && place.has(r)) Op::write(inputs, t, head, place.row(r), out[r]);
  }

  __device__ void write_zeros(int t) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (Layout::part() == 0 && place.has(r)) Op::write(inputs, t, head, place.row(r), 0.0f);
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
      advance(Op::template load_folded<Layout, kRows>(inputs, range.begin + node, head, place),
              state);
      state.template round<S>();
    }
    return count > 0;
  }

  __device__ Raw fetch(int t) const {
    return Op::template fetch<Layout, kRows>(inputs, t, head, place);
  }
  __device__ Token prepare(int t, const Raw& raw) const {
    return Op::template prepare<Layout, kRows>(inputs, t, head, place, raw);
  }

  __device__ void run_step() const {
    const Raw raw = fetch(n);  // before the slot is known
    const int source = p.rows.source(n);
    if (source == kNowhere) return write_zeros(n);
    StateRows<Layout, kRows> state;
    state.template load<kCached>(place, p.state, source, head);
    const int target = p.rows.target(n, 0, 1, source);
    const Token token = prepare(n, raw);
    let_the_next_launch_start();
    float out[kRows];
    step(token, state, out);
    if (target != kNowhere) state.template store<kCached>(place, p.state, target, head);
    write(out, n);
  }

  __device__ void run_chain(StateRows<Layout, kRows>& state, const TokenRange& range,
                            int source) const {
    // Lane i asks for the slot of token i now, so that no store waits for its own.
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int targets =
        lane < range.size && !p.read_only ? p.rows.target(n, lane, range.size, source) : kNowhere;
    for (int i = 0; i < range.size; ++i) {
      const int t = range.begin + i;
      const Token token = prepare(t, fetch(t));
      if (i == range.size - 1) let_the_next_launch_start();
      float out[kRows];
      step(token, state, out);
      if (p.store_snapshots) {
        state.template store<kCached>(place, p.snapshots, t, head);
      } else if (!p.read_only) {
        const int target =
            i < 32 ? __shfl_sync(0xffffffffu, targets, i) : p.rows.target(n, i, range.size, source);
        if (target != kNowhere) state.template store<kCached>(place, p.state, target, head);
      }
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
      if (length == 0) write_zeros(t);
      for (int next = follows ? length - 1 : 0; next < length; ++next) {
        const int node = range.begin + path[next];
        const Token token = prepare(node, fetch(node));
        float out[kRows];
        step(token, state, out);
        if (next == length - 1) write(out, node);
      }
      at_hand = length > 0 ? i : -1;
      if (p.store_snapshots) state.template store<kCached>(place, p.snapshots, t, head);
    }
  }
};

/// What a launch asks for, a kernel each, because the general one needs twice the registers: one
/// token per row with one slot; chains of tokens; and everything else (trees, folds, replays).
enum class Work { step, chain, any };

template <class Op, class S, class Layout, int kRows, int kWarps, int kWarpsPerProcessor,
          Cached kCached, Work kWork>
__global__ void __launch_bounds__(32 * kWarps, kWarpsPerProcessor / kWarps)
    recurrence_kernel(const __grid_constant__ RecurrenceParameters<S> p,
                      const __grid_constant__ typename Op::Parameters inputs) {
  __shared__ std::int16_t path[kWork == Work::any ? kTreeTokensMax + 1 : 1];
  const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const RecurrenceBlock<Op, S, Layout, kRows, kCached> block{
      p,
      inputs,
      {warp * kRows * Layout::kRowsPerWarp + Layout::row_in_warp(), p.R, p.C},
      static_cast<int>(blockIdx.z),
      static_cast<int>(blockIdx.y)};
  wait_for_earlier_launch();

  if constexpr (kWork == Work::step) return block.run_step();
  const int source = p.rows.source(block.n);
  const bool runs_tokens = kWork != Work::any || p.runs_tokens;
  const bool folds = kWork == Work::any && p.fold.accepted;
  const TokenRange range = runs_tokens ? p.rows.range(block.n) : TokenRange{0, 0};
  if (runs_tokens && source == kNowhere)
    for (int i = 0; i < range.size; ++i) block.write_zeros(range.begin + i);
  if (runs_tokens && block.n == p.rows.rows - 1)
    for (int t = p.rows.padding_begin(); t < p.rows.tokens; ++t) block.write_zeros(t);
  if (source == kNowhere || (range.size == 0 && !folds)) return;

  StateRows<Layout, kRows> state;
  state.template load<kCached>(block.place, p.state, source, block.head);
  if constexpr (kWork == Work::any) {
    if (folds && block.fold(state)) {
      const int target = p.rows.target(block.n, 0, 1, source);
      if (target != kNowhere)
        state.template store<kCached>(block.place, p.state, target, block.head);
    }
    if (p.parents) return block.run_tree(state, range, path);
  }
  block.run_chain(state, range, source);
}

// --- The host's side ---------------------------------------------------------------------------

/// How a state's rows are dealt out. kWarpsPerProcessor: so many fit, which bounds the registers.
template <int kRows_, int kWarps_, int kWarpsPerProcessor_, Cached kCached_ = Cached::streaming>
struct Deal {
  static constexpr int kRows = kRows_, kWarps = kWarps_, kWarpsPerProcessor = kWarpsPerProcessor_;
  static constexpr Cached kCached = kCached_;
};

template <class Op, class S, class Layout, class Deal>
bool fits(const RecurrenceParameters<S>& p) {
  return p.aligned && p.C == Layout::kLanes * Layout::kCount &&
         p.R % (Deal::kWarps * Deal::kRows * Layout::kRowsPerWarp) == 0;
}

template <class Op, class S, class Layout, class Deal>
void launch_recurrence(const char* operation, const RecurrenceParameters<S>& p,
                       const typename Op::Parameters& inputs, cudaStream_t stream) {
  constexpr int kRows = Deal::kRows, kWarps = Deal::kWarps;
  constexpr int kRowsOfBlock = kWarps * kRows * Layout::kRowsPerWarp;
  const dim3 grid(static_cast<unsigned>((p.R + kRowsOfBlock - 1) / kRowsOfBlock),
                  static_cast<unsigned>(p.heads), static_cast<unsigned>(p.rows.rows));
  const bool any = p.parents || p.fold.accepted;
  const bool step = !any && !p.rows.starts && p.rows.columns == 0 && !p.read_only;
  constexpr int kFit = Deal::kWarpsPerProcessor;
  constexpr Cached kCached = Deal::kCached;
  const auto kernel =
      any    ? recurrence_kernel<Op, S, Layout, kRows, kWarps, 8, kCached, Work::any>
      : step ? recurrence_kernel<Op, S, Layout, kRows, kWarps, kFit, kCached, Work::step>
             : recurrence_kernel<Op, S, Layout, kRows, kWarps, kFit, kCached, Work::chain>;
  launch(operation, kernel, grid, dim3(32 * kWarps), 0, stream, !any, p, inputs);
}

/// Launches the fast layout if the states have its shape. The deals are measured (H200, states of
/// [128, 128] and [64, 128]): rows of 16 bits want twice as many in flight, but not where a small
/// batch leaves processors without work; states that pass through a full L2 are better left to it.
template <class Op, class S, class Layout>
bool launch_fast(const char* operation, const RecurrenceParameters<S>& p,
                 const typename Op::Parameters& inputs, cudaStream_t stream) {
  const auto launched = [&](auto deal) {
    using Chosen = decltype(deal);
    if (!fits<Op, S, Layout, Chosen>(p)) return false;
    launch_recurrence<Op, S, Layout, Chosen>(operation, p, inputs, stream);
    return true;
  };
  const bool fills_l2 = p.rows.rows >= 128;
  if constexpr (sizeof(S) == 2) {
    if (fills_l2 && launched(Deal<4, 1, 16, Cached::yes>())) return true;
    if (p.rows.rows >= 8 && launched(Deal<4, 1, 16>())) return true;
  }
  if (fills_l2 && launched(Deal<2, 1, 16, Cached::yes>())) return true;
  return launched(Deal<2, 1, 16>());
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
