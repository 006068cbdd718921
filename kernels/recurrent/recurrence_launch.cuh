// The kernel of a recurrence, and its launches: the choice of a LaunchKind for a batch, and of a
// tiling of the state's rows. Mapping to the machine: recurrence.cuh.
#pragma once

#include "kernels/base/launch_note.hpp"
#include "kernels/recurrent/recurrence_chunks.cuh"

namespace lockstep::kernels {

template <class Op, class S, class Layout, int kRows, int kWarps, int kWarpsPerProcessor,
          Cached kCached, LaunchKind kKind>
__global__ void __launch_bounds__(32 * kWarps, kWarpsPerProcessor / kWarps)
    recurrence_kernel(const __grid_constant__ RecurrenceParameters<S> p,
                      const __grid_constant__ typename Op::Parameters inputs) {
  using Block = StagedBlock<Op, S, Layout, kRows, kWarps, kCached>;
  const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const Block block{{p,
                     inputs,
                     {warp * kRows * Layout::kRowsPerWarp + Layout::row_in_warp(), p.R, p.C},
                     static_cast<int>(blockIdx.z),
                     static_cast<int>(blockIdx.y)}};
  if constexpr (kKind != LaunchKind::chain && kKind != LaunchKind::any)
    block.template prefetch<kKind>();
  wait_for_earlier_launch();
  if constexpr (kKind != LaunchKind::chain) let_the_next_launch_start();
  if constexpr (kKind == LaunchKind::step) {
    block.run_step();
  } else {
    constexpr bool kFolds = kKind != LaunchKind::chain;
    AcceptedTokens accepted;  // its loads are in flight together with the plan's
    if constexpr (kKind == LaunchKind::staged || kKind == LaunchKind::verify)
      accepted.ask(p.fold, block.n);
    RowPlan plan = p.rows.plan(block.n);
    if (kFolds && !p.runs_tokens) plan.range = {0, 0};
    if (plan.source == kNowhere)
      for (int i = 0; i < plan.range.size; ++i) block.write(0.0f, plan.range.begin + i);
    if ((!kFolds || p.runs_tokens) && block.n == p.rows.rows - 1)
      for (int t = p.rows.padding_begin(); t < p.rows.tokens; ++t) block.write(0.0f, t);
    const bool folds = kFolds && p.fold.accepted;
    if (plan.source == kNowhere || (plan.range.size == 0 && !folds)) return;

    if constexpr (kKind == LaunchKind::verify) {
      __shared__ typename Block::Staged staged;
      __shared__ ChunkProducts<Block::kStage> products;
      return block.run_verification(staged, products, plan, accepted.range(p.fold));
    } else {
      StateRows<Layout, kRows> state;
      state.template load<kCached>(block.lane_rows, p.state, plan.source, block.head);
      if constexpr (kKind == LaunchKind::any) {
        __shared__ std::int16_t path[kTreeTokensMax + 1];
        if constexpr (!kIsScaled<S>)
          if (folds && block.fold(state) && plan.last != kNowhere)
            state.template store<kCached>(block.lane_rows, p.state, plan.last, block.head);
        if (p.parents)
          block.run_tree(state, plan.range, path);
        else
          block.run_chain(state, plan);
      } else if constexpr (kKind == LaunchKind::staged) {
        __shared__ typename Block::Staged staged;
        block.run_staged(staged, state, plan, accepted.range(p.fold));
      } else {
        block.run_chain(state, plan);
      }
    }
  }
}

// --- The host's side ---------------------------------------------------------------------------

/// A tiling of a state's rows: kRows x Layout::kRowsPerWarp rows per warp, kWarps warps per block.
/// kWarpsPerProcessor warps must fit on a multiprocessor at once, which bounds the registers.
template <int kRows_, int kWarps_, int kWarpsPerProcessor_, Cached kCached_ = Cached::streaming>
struct WarpTiling {
  static constexpr int kRows = kRows_, kWarps = kWarps_, kWarpsPerProcessor = kWarpsPerProcessor_;
  static constexpr Cached kCached = kCached_;
};

constexpr const char* name_of(LaunchKind kind) {
  switch (kind) {
    case LaunchKind::step: return "step";
    case LaunchKind::chain: return "chain";
    case LaunchKind::staged: return "staged";
    case LaunchKind::verify: return "verify";
    case LaunchKind::any: return "any";
  }
  return "";
}

template <LaunchKind kKind>
using Launch = std::integral_constant<LaunchKind, kKind>;

/// Whether the states have Layout's row length and R is a multiple of the tiling's rows per block.
template <class Op, class S, class Layout, class Tiling>
bool fits(const RecurrenceParameters<S>& p) {
  return p.aligned && p.C == Layout::kLanes * Layout::kCount &&
         p.R % (Tiling::kWarps * Tiling::kRows * Layout::kRowsPerWarp) == 0;
}

template <class Op, LaunchKind kKind, class S, class Layout, class Tiling>
void launch_recurrence(const char* operation, const RecurrenceParameters<S>& p,
                       const typename Op::Parameters& inputs, cudaStream_t stream) {
  constexpr int kRows = Tiling::kRows, kWarps = Tiling::kWarps;
  constexpr int kRowsOfBlock = kWarps * kRows * Layout::kRowsPerWarp;
  const dim3 grid(static_cast<unsigned>((p.R + kRowsOfBlock - 1) / kRowsOfBlock),
                  static_cast<unsigned>(p.heads), static_cast<unsigned>(p.rows.rows));
  last_launch = {name_of(kKind), kRows, kWarps, Tiling::kCached == Cached::yes};
  launch(operation,
         recurrence_kernel<Op, S, Layout, kRows, kWarps, Tiling::kWarpsPerProcessor,
                           Tiling::kCached, kKind>,
         grid, dim3(32 * kWarps), 0, stream, true, p, inputs);
}

/// Launches the kernel for any shape and any strides.
template <class Op, class S>
void launch_any(const char* operation, const RecurrenceParameters<S>& p,
                const typename Op::Parameters& inputs, cudaStream_t stream) {
  launch_recurrence<Op, LaunchKind::any, S, AnyRows, WarpTiling<2, 4, 8>>(operation, p, inputs,
                                                                          stream);
}

/// Launches the fast layout if the states have its shape; returns whether it did. The tilings are
/// measured (H200, states of [128, 128] and [64, 128]):
///   - States of 16 bits need twice as many rows in flight per warp (4) as float32 ones (2).
///   - A small batch is bound by latency: it wants few instructions, and Cached::yes, since its own
///     prefetch() has brought the states into L2.
///   - A batch whose states fill L2 (kLargeBatch) is faster without the streaming hint.
///   - Where a launch stores few states for its tokens (folds, read-only), preparing tokens
///     dominates and four warps stage them together.
template <class Op, class S, class Layout>
bool launch_fast(const char* operation, const RecurrenceParameters<S>& p,
                 const typename Op::Parameters& inputs, cudaStream_t stream) {
  const auto launched = [&]<LaunchKind kKind, class Chosen>(Launch<kKind>, Chosen) {
    if (!fits<Op, S, Layout, Chosen>(p)) return false;
    launch_recurrence<Op, kKind, S, Layout, Chosen>(operation, p, inputs, stream);
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
    return launched(Launch<LaunchKind::step>(), WarpTiling<2, 1, 16, Cached::yes>());
  } else {
    if (tree) {
      // Trees take LaunchKind::any, at the end.
    } else if (p.fold.accepted || !kept) {
      if constexpr (Op::kHasChunks) {
        if (p.runs_tokens && !p.store_snapshots &&
            launched(Launch<LaunchKind::verify>(), WarpTiling<4, 4, 16, Cached::yes>()))
          return true;
      }
      if (launched(Launch<LaunchKind::staged>(), WarpTiling<4, 4, 16, Cached::yes>())) return true;
    } else if (several || p.read_only) {
      if (small && launched(Launch<LaunchKind::staged>(), WarpTiling<2, 4, 16>())) return true;
      if (fills_l2 &&
          launched(Launch<LaunchKind::chain>(), WarpTiling<kRows, 1, 16, Cached::yes>()))
        return true;
      if (launched(Launch<LaunchKind::chain>(), WarpTiling<kRows, 1, 16>())) return true;
    } else {
      if (small && launched(Launch<LaunchKind::step>(), WarpTiling<4, 1, 16, Cached::yes>()))
        return true;
      if (fills_l2 && launched(Launch<LaunchKind::step>(), WarpTiling<kRows, 1, 16, Cached::yes>()))
        return true;
      if (launched(Launch<LaunchKind::step>(), WarpTiling<kRows, 1, 16>())) return true;
    }
    return launched(Launch<LaunchKind::any>(), WarpTiling<2, 1, 8>());
  }
}

/// Checks and collects the rows, slots and extents of an update over T tokens. `letters` names the
/// state's dimensions in messages.
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

/// Adds a fold: of the tokens of `rows`, the first accepted[n] of row n (or its nodes[n, 0 ...
/// accepted[n] - 1]) advance that row's state.
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
