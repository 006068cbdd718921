// Gated delta rule over whole prompts. Equations: reference/recurrent/gated_delta_rule.hpp. The
// chunked kernels are in gated_delta_rule_chunks.cuh; this file has the sequential kernel (token by
// token, any shape), the choice between all forms, and the launch wrapper.
//
// sequential_kernel:
//   grid    (ceil(V / (kWarps x kRows)), HV, N, and one more if rows are packed: it zeroes padding)
//   block   kWarps warps; a warp holds kRows rows of one state [V, K] in float32, lane i the
//           columns i, 32 + i, ... of each
#include "kernels/recurrent/gated_delta_rule_prefill.hpp"

#include <limits>

#include "kernels/base/plain.cuh"
#include "kernels/recurrent/gated_delta_rule_chunks.cuh"
#include "kernels/recurrent/shapes.hpp"

namespace lockstep::kernels {
namespace {

using delta_chunks::Parameters;
using delta_chunks::States;

constexpr int kWarps = 4;
constexpr int kRows = 4;           ///< rows of a state in a warp's registers
constexpr int kMostColumns = 256;  ///< K at most
constexpr int kColumnsPerLane = kMostColumns / 32;

template <class T>
struct Vectors {
  HeadVectors<const T> q, k, v;
  HeadVectors<T> out;
  int K = 0;
};

/// The warp's rows first ... first + kRows - 1 of a state.
struct WarpRows {
  float s[kRows][kColumnsPerLane];
  int first, V, K;

  /// Calls f(row, column, element) for the lane's elements.
  template <class F>
  __device__ void for_each(F f) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kColumnsPerLane; ++i)
        if (first + r < V && 32 * i + lane < K) f(first + r, 32 * i + lane, s[r][i]);
  }
  __device__ void load(const States& states, int slot, int head) {
    for_each([&](int row, int column, float& x) {
      x = states.one(states.offset(slot, head, row, column));
    });
  }
  __device__ void store(const States& states, int slot, int head) {
    for_each([&](int row, int column, float& x) {
      states.put(states.offset(slot, head, row, column), x);
    });
  }
  /// The products of the rows with x; every lane gets them.
  __device__ void products(float (&sums)[kRows], const float (&x)[kColumnsPerLane]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kColumnsPerLane; ++i) sum = fmaf(s[r][i], x[i], sum);
      sums[r] = over_warp(sum, Plus());
    }
  }
};

/// Loads a token's q or k, L2-normalised if `l2norm`, times `scale`.
template <class T>
__device__ void load_direction(float (&x)[kColumnsPerLane], const T* from, int K, bool l2norm,
                               float scale) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float square = 0;
#pragma unroll
  for (int i = 0; i < kColumnsPerLane; ++i) {
    x[i] = 32 * i + lane < K ? to_float(from[32 * i + lane]) : 0.0f;
    square = fmaf(x[i], x[i], square);
  }
  if (l2norm) scale *= rsqrtf(over_warp(square, Plus()) + 1e-6f);
#pragma unroll
  for (float& value : x) value *= scale;
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    sequential_kernel(const __grid_constant__ Parameters p, const __grid_constant__ Vectors<T> x) {
  const int row = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  wait_for_earlier_launch();
  WarpRows rows{{}, (static_cast<int>(blockIdx.x) * kWarps + warp) * kRows, p.V, x.K};
  const auto write = [&](int token, const float(&o)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (lane == r && rows.first + r < p.V)
        x.out.at(token, head)[rows.first + r] = from_float<T>(o[r]);
  };
  if (row == p.rows.rows) {  // this block zeroes the outputs after the last row
    for (int t = p.rows.padding_begin(); t < p.rows.tokens; ++t) write(t, {});
    return;
  }
  const TokenRange tokens = p.range(row);
  const int slot = p.slot(row);
  if (slot == kNowhere) {
    for (int t = 0; t < tokens.size; ++t) write(tokens.begin + t, {});
    return;
  }
  if (p.resumes(row)) rows.load(p.state, slot, head);
  int boundary = -1;
  if (p.boundary.data)
    for (int other = 0; other < row; ++other) boundary += p.range(other).size / p.boundary_every;
  const int h = p.value_heads_per_key_head.of(head);
  float k[kColumnsPerLane], q[kColumnsPerLane], sums[kRows];
  for (int t = 0; t < tokens.size; ++t) {
    const int token = tokens.begin + t;
    load_direction(k, x.k.at(token, h), x.K, p.use_qk_l2norm, 1.0f);
    load_direction(q, x.q.at(token, h), x.K, p.use_qk_l2norm, p.scale);
    float g = at(p.g, token, head), beta = at(p.beta, token, head);
    if (p.A_log) {
      g = -expf(at(p.A_log, head)) * softplus(g + at(p.dt_bias, head));
      beta = sigmoid(beta);
    }
    const float alpha = expf(g);
#pragma unroll
    for (auto& row_of_state : rows.s)
#pragma unroll
      for (float& element : row_of_state) element *= alpha;
    rows.products(sums, k);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float v = rows.first + r < p.V ? to_float(x.v.at(token, head)[rows.first + r]) : 0.0f;
      const float u = beta * (v - sums[r]);
#pragma unroll
      for (int i = 0; i < kColumnsPerLane; ++i) rows.s[r][i] = fmaf(u, k[i], rows.s[r][i]);
    }
    rows.products(sums, q);
    write(token, sums);
    if (p.boundary.data && (t + 1) % p.boundary_every == 0) {
      const int number = boundary + (t + 1) / p.boundary_every;
      if (p.has_boundary(number)) rows.store(p.boundary, number, head);
    }
  }
  if (p.state.data && (tokens.size > 0 || !p.resumes(row))) rows.store(p.state, slot, head);
}

template <class T>
void launch_sequential(const Parameters& p, const Vectors<T>& x, cudaStream_t stream) {
  constexpr int kRowsOfBlock = kWarps * kRows;
  const dim3 grid(static_cast<unsigned>((p.V + kRowsOfBlock - 1) / kRowsOfBlock),
                  static_cast<unsigned>(p.heads),
                  static_cast<unsigned>(p.rows.rows + (p.rows.starts ? 1 : 0)));
  launch("gated_delta_rule_prefill", sequential_kernel<T>, grid, dim3(kWarps * 32), 0, stream, true,
         p, x);
}

int processor_count() {
  static const int count = [] {
    int device = 0, processors = 0;
    check_cuda(cudaGetDevice(&device), "gated_delta_rule_prefill");
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
               "gated_delta_rule_prefill");
    return processors;
  }();
  return count;
}

constexpr const char* kName = "gated_delta_rule_prefill";

std::int64_t clusters_for(std::int64_t blocks) {
  return (blocks + delta_chunks::kNeighbours - 1) / delta_chunks::kNeighbours;
}

template <auto kKernel>
void allow_shared_memory(int bytes) {
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  check_cuda(allowed, kName);
}

/// Launches prepare_kernel on at most `clusters` clusters.
void launch_prepare(const delta_chunks::Maps& maps, const Parameters& p, std::int64_t clusters,
                    cudaStream_t stream) {
  using namespace delta_chunks;
  allow_shared_memory<prepare_kernel>(kPrepareBytes);
  const std::int64_t tasks = (std::int64_t{p.entry_count} * p.heads + kGroups - 1) / kGroups;
  clusters = std::min(clusters, clusters_for(tasks));
  launch(kName, prepare_kernel, dim3(static_cast<unsigned>(kNeighbours * clusters)), dim3(kThreads),
         kPrepareBytes, stream, true, maps, p);
}

/// Launches chain_kernel on `clusters` clusters.
template <int kParts, bool kShared, delta_chunks::Run kRun>
void launch_chains(const delta_chunks::Maps& maps, const Parameters& p, std::int64_t clusters,
                   cudaStream_t stream) {
  using namespace delta_chunks;
  constexpr auto kChain = chain_kernel<kParts, kShared, kRun>;
  allow_shared_memory<kChain>(kChainBytes<kParts>);
  launch(kName, kChain, dim3(static_cast<unsigned>(kNeighbours * clusters)),
         dim3((1 + kParts) * kWarpgroup), kChainBytes<kParts>, stream, true, maps, p);
}

/// Launches prepare_kernel, then the chains over whole rows. With counters both run at the same
/// time, prepare_kernel on the processors that the chains leave.
template <int kParts, bool kShared, bool kFollowed>
void launch_chunks(const delta_chunks::Maps& maps, const Parameters& p, cudaStream_t stream) {
  using namespace delta_chunks;
  const std::int64_t pieces = std::int64_t{p.rows.rows} * p.heads * (p.V / (kParts * kPart));
  const std::int64_t processors = processor_count() / kNeighbours;
  const std::int64_t chains = std::min(processors, clusters_for(pieces));
  launch_prepare(maps, p, processors - (p.counters ? chains : 0), stream);
  launch_chains<kParts, kShared, kFollowed ? Run::followed : Run::rows>(
      maps, p, kFollowed ? clusters_for(2 * pieces) : chains, stream);
}

/// Launches the form in_segments, four kernels one after another: prepare_kernel; chains over
/// stretches, which find the map of each stretch from the state before it to the one after it;
/// join_kernel, which finds the states before all segments; and chains over the segments.
void launch_segments(const delta_chunks::Maps& maps, const Parameters& p, cudaStream_t stream) {
  using namespace delta_chunks;
  const std::int64_t processors = processor_count() / kNeighbours, halves = p.V / kPart;
  const auto clusters = [&](std::int64_t pieces) {
    return std::min(processors, clusters_for(pieces));
  };
  launch_prepare(maps, p, processors, stream);
  const std::int64_t stretches = p.stretches, units = (stretches - 1) * (kK / kPart);
  launch_chains<1, true, Run::stretches>(maps, p, clusters(p.heads * (stretches * halves + units)),
                                         stream);
  launch(kName, join_kernel,
         dim3(static_cast<unsigned>(std::int64_t{p.rows.rows} * p.heads * (p.V / kJoinedRows))),
         dim3(kJoinThreads), 0, stream, true, p);
  launch_chains<1, true, Run::segments>(maps, p, clusters(p.segments * p.heads * halves), stream);
}

constexpr std::int64_t kMostFollowed = 64;  ///< chains of a batch that may have followers

/// Whether the workspace has room for the states from which followers of these chains begin.
bool can_be_followed(std::int64_t rows, std::int64_t heads, std::int64_t V) {
  return V % (2 * delta_chunks::kPart) == 0 &&
         rows * heads * (V / delta_chunks::kPart) <= kMostFollowed;
}

/// The share of a row's chunks, in 256ths, whose outputs the row's followers compute, such that
/// followers (which begin when all chunks are prepared) and chains end at the same time. Measured
/// on an H200, in us: a chunk of a chain takes 1.32, or 0.95 without outputs; storing a state at a
/// boundary 0.6; a processor prepares a chunk in 1.5.
int lead_of(const Parameters& p, std::int64_t chains, std::int64_t processors) {
  constexpr double kChunk = 1.32, kWithoutOutputs = 0.95, kBoundary = 0.6, kPrepare = 1.5;
  const double prepared =
      kPrepare * p.rows.rows * p.heads / static_cast<double>(processors - chains);
  const double stored = p.boundary.data ? kBoundary * delta_chunks::kChunk / p.boundary_every : 0.0;
  const double whole = kChunk + stored;
  return static_cast<int>(
      std::clamp(256 * (whole - prepared) / (2 * whole - kWithoutOutputs), 0.0, 200.0));
}

/// The cut of rows into segments.
struct Segments {
  std::int64_t chunks = 0;                ///< chunks of a segment; 0: rows stay whole
  std::int64_t count = 0, stretches = 0;  ///< places for the segments and stretches of all rows
};

/// The segments with the shortest expected time for a batch whose rows are all of average length;
/// none if whole rows are faster, unless `always`. Times are those of an H200 in us: see lead_of();
/// besides, joining a stretch takes 2, and two more launches with their waits take 16.
Segments segments_of(std::int64_t rows, std::int64_t tokens, std::int64_t heads, std::int64_t V,
                     bool always) {
  using namespace delta_chunks;
  constexpr double kTime = 1.32, kWithoutOutputs = 0.95, kPrepare = 1.5, kLeastPrepare = 10;
  constexpr double kJoin = 2, kLaunches = 16, kFollowed = 1.08, kWhole = 8;
  const std::int64_t processors = processor_count(), streams = rows * heads, halves = V / kPart;
  if (streams == 0 || V % (2 * kPart) != 0) return {};
  const auto rounds = [&](std::int64_t pieces) {
    // NOLINTNEXTLINE(bugprone-integer-division): rounds are whole
    return static_cast<double>((pieces + processors - 1) / processors);
  };
  const std::int64_t chunks = (tokens + rows * kChunk - 1) / (rows * kChunk);
  const double count_of_chunks = static_cast<double>(chunks);
  const double prepare = std::max(
      kLeastPrepare, kPrepare * static_cast<double>(streams) * count_of_chunks / processors);
  const bool followed = 2 * streams * halves <= processors;
  double shortest =
      count_of_chunks * rounds(streams * halves) * (followed ? kFollowed : kTime) + kWhole;
  if (always) shortest = std::numeric_limits<double>::infinity();
  Segments best;
  for (std::int64_t count = 2; count <= std::min(processors, chunks); ++count) {
    const std::int64_t size = (chunks + count - 1) / count, segments = (chunks + size - 1) / size;
    const std::int64_t stretches = segments / kStretch;
    const std::int64_t alone = streams * (stretches * halves + (stretches - 1) * (kK / kPart));
    const std::int64_t longest = std::min<std::int64_t>(segments - 1, kStretch) * size;
    const double time = prepare + rounds(alone) * static_cast<double>(longest) * kWithoutOutputs +
                        // NOLINTNEXTLINE(bugprone-integer-division): joins are whole
                        static_cast<double>((segments - 1) / kStretch - 1) * kJoin +
                        rounds(streams * halves * segments) * static_cast<double>(size) * kTime +
                        kLaunches;
    if (time >= shortest) continue;
    shortest = time;
    best.chunks = size;
  }
  if (best.chunks == 0) return {};
  const std::int64_t size = best.chunks * kChunk;
  best.count = (tokens - 1) / size + rows;
  best.stretches = (tokens - 1 + size) / (size * kStretch) + rows - 1;
  return best;
}

/// The division of the workspace, in bytes; `entries` and `counters` are counts. In order:
///   counters of entries and of copied states (int32), which are 0 between calls
///   initial states of followers              [rows, HV, V, K] float32
///   entries                                  [entries, HV] Entry
///   before                                   [segments, HV, V, K] float32
///   transfers                                [segments, HV, K, K] float32
struct Workspace {
  std::int64_t entries, counters, counter_bytes, initial_bytes, before, transfers, bytes;

  Workspace(std::int64_t rows, std::int64_t tokens, std::int64_t heads, std::int64_t V,
            const Segments& segments)
      : entries(tokens / delta_chunks::kChunk + rows + 1),
        counters((entries + (can_be_followed(rows, heads, V) ? rows : 0)) * heads *
                 (V / delta_chunks::kPart)),
        counter_bytes((counters * 4 + 127) / 128 * 128),
        initial_bytes(can_be_followed(rows, heads, V) ? rows * heads * V * delta_chunks::kK * 4
                                                      : 0),
        before(counter_bytes + initial_bytes +
               entries * heads * std::int64_t{sizeof(delta_chunks::Entry)}),
        transfers(before + segments.count * heads * V * delta_chunks::kK * 4),
        bytes(transfers + segments.count * heads * delta_chunks::kK * delta_chunks::kK * 4) {}
};

template <class S>
States states_of(const TensorView<S, 4>& view) {
  States states{view.data_handle(), format_of<S>(), false,          false,
                view.stride(0),     view.stride(1), view.stride(2), view.stride(3)};
  const auto moves_by = [&](std::int64_t count) {
    bool whole = view.stride(3) == 1 &&
                 reinterpret_cast<std::uintptr_t>(view.data_handle()) % (count * sizeof(S)) == 0;
    for (std::size_t d = 0; d < 3; ++d)
      whole = whole && (view.extent(d) <= 1 || view.stride(d) % count == 0);
    return whole;
  };
  states.pairs = moves_by(2);
  states.fours = states.format == Format::float32 && moves_by(4);
  return states;
}

template <class T, class S>
std::int64_t rows_of(const GatedDeltaRulePrefill<T, S>& in) {
  return in.tokens.query_start_loc ? in.tokens.query_start_loc->extent(0) - 1 : 1;
}

}  // namespace

template <class T, class S>
bool can_run(const GatedDeltaRulePrefill<T, S>& in, PrefillForm form) {
  const GatedDeltaTokens<T>& x = in.tokens;
  if (form == PrefillForm::sequential) return x.k.extent(2) <= kMostColumns;
  if (form == PrefillForm::automatic || form == PrefillForm::whole_rows)
    return can_run(in, PrefillForm::in_turns) || can_run(in, PrefillForm::sequential);
  if constexpr (!std::is_same_v<T, Bf16>) return false;
  const std::int64_t V = x.v.extent(2);
  const bool in_pairs = form == PrefillForm::by_heads || form == PrefillForm::in_segments;
  if (in_pairs && V % (2 * delta_chunks::kPart) != 0) return false;
  const std::int64_t chains = rows_of(in) * x.v.extent(1) * (V / delta_chunks::kPart);
  if (form == PrefillForm::overlapped && chains > processor_count() - 2) return false;
  if (form == PrefillForm::followed &&
      (!can_be_followed(rows_of(in), x.v.extent(1), V) || 2 * chains > processor_count()))
    return false;
  return x.k.extent(2) == delta_chunks::kK && V % delta_chunks::kPart == 0 && V > 0 &&
         rows_of(in) > 0 &&
         (!in.boundary_states || in.boundary_every % delta_chunks::kChunk == 0) &&
         hopper::can_be_mapped(x.q) && hopper::can_be_mapped(x.k) && hopper::can_be_mapped(x.v) &&
         hopper::can_be_mapped(in.out);
}

namespace {

/// The form of a call, and its segments if it has some.
struct Choice {
  PrefillForm form;
  Segments segments{};
};
template <class T, class S>
Choice choice_for(const GatedDeltaRulePrefill<T, S>& in) {
  const auto& v = in.tokens.v;
  const std::int64_t rows = rows_of(in), T_ = v.extent(0), HV = v.extent(1), V = v.extent(2);
  if (in.form == PrefillForm::in_segments || in.form == PrefillForm::automatic) {
    const bool asked = in.form == PrefillForm::in_segments;
    Segments segments;
    if (can_run(in, PrefillForm::in_segments)) segments = segments_of(rows, T_, HV, V, asked);
    if (segments.stretches > 0) return {PrefillForm::in_segments, segments};
    if (asked) return {PrefillForm::in_turns};  // rows are too short to be cut
  }
  if (in.form != PrefillForm::automatic && in.form != PrefillForm::whole_rows) return {in.form};
  // The chains (64 rows of a head's state each) are counted in `parts`. Up to half of the
  // processors: chains and preparation overlap, with followers where a row has at least `parts`
  // chunks. Beyond: in turns; and with whole heads (128 rows of a state) per block where the chains
  // would not all fit on the processors at once.
  if (!can_run(in, PrefillForm::in_turns)) return {PrefillForm::sequential};
  const std::int64_t parts = rows * HV * (V / delta_chunks::kPart);
  if (parts > processor_count() / 2)
    return {parts > processor_count() && can_run(in, PrefillForm::by_heads)
                ? PrefillForm::by_heads
                : PrefillForm::in_turns};
  const bool long_rows = T_ >= rows * parts * delta_chunks::kChunk;
  return {long_rows && can_run(in, PrefillForm::followed) ? PrefillForm::followed
                                                          : PrefillForm::overlapped};
}

}  // namespace

template <class T, class S>
PrefillWorkspace prefill_workspace(const GatedDeltaRulePrefill<T, S>& in) {
  if (in.form == PrefillForm::sequential || !can_run(in, PrefillForm::in_turns)) return {};
  const auto& v = in.tokens.v;
  const Workspace parts(rows_of(in), v.extent(0), v.extent(1), v.extent(2),
                        choice_for(in).segments);
  return {parts.bytes, parts.counter_bytes};
}

template <class T, class S>
// NOLINTNEXTLINE(readability-function-size): 112 lines, checks and a choice of five launches
void gated_delta_rule_prefill(const GatedDeltaRulePrefill<T, S>& in, cudaStream_t stream) {
  const Checks checks("gated_delta_rule_prefill");
  const GatedDeltaTokens<T>& x = in.tokens;
  const std::int64_t T_ = x.k.extent(0), H = x.k.extent(1), K = x.k.extent(2);
  const std::int64_t HV = x.v.extent(1), V = x.v.extent(2);
  checks.expect(H > 0 && HV % H == 0, "v", "[T, HV, V] with HV a multiple of H",
                "HV = " + std::to_string(HV) + " for H = " + std::to_string(H));
  checks.shape(x.q, "q", "[T, H, K]", {T_, H, K});
  checks.shape(x.v, "v", "[T, HV, V]", {T_, HV, V});
  checks.shape(in.out, "out", "[T, HV, V]", {T_, HV, V});
  checks.shape(x.g, "g", "[T, HV]", {T_, HV});
  checks.shape(x.beta, "beta", "[T, HV]", {T_, HV});
  checks.contiguous_rows(x.q, "q");
  checks.contiguous_rows(x.k, "k");
  checks.contiguous_rows(x.v, "v");
  checks.contiguous_rows(in.out, "out");
  checks.expect(bool(in.A_log) == bool(in.dt_bias), "A_log and dt_bias", "both given, or neither",
                "one of them");
  checks.expect(!in.slots.table && !in.slots.num_accepted, "state_indices",
                "a list: a prefill has one slot per row", "a table");

  Parameters p;
  p.rows = row_slots(checks, in.slots, x.query_start_loc, x.query_start_loc ? T_ : 1,
                     in.state ? in.state->extent(0) : 0);
  p.rows.tokens = static_cast<int>(T_);
  check_row_count(checks, p.rows);
  if (in.state) {
    checks.shape(*in.state, "state", "[slots, HV, V, K]", {in.state->extent(0), HV, V, K});
    p.state = states_of(*in.state);
  }
  if (in.has_initial_state) {
    checks.shape(*in.has_initial_state, "has_initial_state", "[N]", {p.rows.rows});
    p.has_initial_state = in.has_initial_state->data_handle();
    p.has_initial_state_stride = in.has_initial_state->stride(0);
  }
  if (in.boundary_states) {
    checks.expect(in.boundary_every > 0, "boundary_every", "a count of tokens",
                  std::to_string(in.boundary_every));
    const std::int64_t count = in.boundary_states->extent(0);
    checks.shape(*in.boundary_states, "boundary_states", "[boundaries, HV, V, K]",
                 {count, HV, V, K});
    p.boundary = states_of(*in.boundary_states);
    p.boundary_every = static_cast<int>(std::min<std::int64_t>(in.boundary_every, INT_MAX));
    p.boundary_count = static_cast<int>(std::min<std::int64_t>(count, INT_MAX));
  }
  p.g = x.g;
  p.beta = x.beta;
  if (in.A_log) {
    checks.shape(in.A_log, "A_log", "[HV]", {HV});
    checks.shape(in.dt_bias, "dt_bias", "[HV]", {HV});
  }
  p.A_log = in.A_log;
  p.dt_bias = in.dt_bias;
  p.scale = in.scale.value_or(1.0f / sqrtf(static_cast<float>(K)));
  p.use_qk_l2norm = in.use_qk_l2norm;
  p.value_heads_per_key_head = Divisor(HV / H);
  p.heads = static_cast<int>(HV);
  p.V = static_cast<int>(V);
  checks.expect(can_run(in, in.form), "the form", "one that takes these arguments",
                "K = " + std::to_string(K) + ", V = " + std::to_string(V));
  if (HV == 0 || V == 0 || p.rows.rows == 0) return;

  const auto [form, segments] = choice_for(in);
  if constexpr (std::is_same_v<T, Bf16>) {
    if (form != PrefillForm::sequential) {
      const Workspace parts(p.rows.rows, T_, HV, V, segments);
      const std::int64_t given = in.workspace ? in.workspace->extent(0) : 0;
      checks.expect(given >= parts.bytes &&
                        reinterpret_cast<std::uintptr_t>(in.workspace->data_handle()) % 128 == 0,
                    "workspace",
                    "of " + std::to_string(parts.bytes) + " bytes at a multiple of 128",
                    std::to_string(given) + " bytes");
      auto* const memory = reinterpret_cast<char*>(in.workspace->data_handle());
      const bool followed = form == PrefillForm::followed;
      p.counters =
          form == PrefillForm::overlapped || followed ? reinterpret_cast<int*>(memory) : nullptr;
      p.entries = memory + parts.counter_bytes + parts.initial_bytes;
      p.entry_count = static_cast<int>(parts.entries);
      p.out = in.out.data_handle();
      p.out_token_stride = in.out.stride(0);
      p.out_head_stride = in.out.stride(1);
      const delta_chunks::Maps maps{hopper::tile_map(kName, x.q, delta_chunks::kChunk),
                                    hopper::tile_map(kName, x.k, delta_chunks::kChunk),
                                    hopper::tile_map(kName, x.v, delta_chunks::kChunk),
                                    hopper::tile_map(kName, in.out, delta_chunks::kChunk)};
      p.readers = p.V / delta_chunks::kPart;
      const bool even = p.readers % 2 == 0;
      if (followed) {
        p.lead = lead_of(p, p.rows.rows * HV * p.readers, processor_count());
        p.copied = p.counters + parts.entries * HV * p.readers;
        p.initial = {
            memory + parts.counter_bytes, Format::float32, true, true, HV * V * K, V * K, K, 1};
        return launch_chunks<1, true, true>(maps, p, stream);
      }
      if (form == PrefillForm::in_segments) {
        p.segment = static_cast<int>(segments.chunks);
        p.segments = static_cast<int>(segments.count);
        p.stretches = static_cast<int>(segments.stretches);
        p.before = {memory + parts.before, Format::float32, true, true, HV * V * K, V * K, K, 1};
        p.transfers = {
            memory + parts.transfers, Format::float32, true, true, HV * K * K, K * K, K, 1};
        return launch_segments(maps, p, stream);
      }
      if (even && form == PrefillForm::by_heads)
        return launch_chunks<2, false, false>(maps, p, stream);
      return even ? launch_chunks<1, true, false>(maps, p, stream)
                  : launch_chunks<1, false, false>(maps, p, stream);
    }
  }
  launch_sequential<T>(p,
                       {HeadVectors<const T>(x.q), HeadVectors<const T>(x.k),
                        HeadVectors<const T>(x.v), HeadVectors<T>(in.out), static_cast<int>(K)},
                       stream);
}

#define LOCKSTEP_INSTANTIATE(T, S)                                                 \
  template bool can_run(const GatedDeltaRulePrefill<T, S>&, PrefillForm);          \
  template PrefillWorkspace prefill_workspace(const GatedDeltaRulePrefill<T, S>&); \
  template void gated_delta_rule_prefill(const GatedDeltaRulePrefill<T, S>&, cudaStream_t);
LOCKSTEP_SERVING_TYPES(LOCKSTEP_INSTANTIATE)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_OTHER_TYPES(LOCKSTEP_INSTANTIATE)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
