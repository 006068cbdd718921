// Prompts of multi-head latent attention on tensor cores. Equations:
// reference/attention/softmax_attention.hpp. The schedule is FlashAttention 3's: Shah et al. 2024,
// "FlashAttention-3", sections 3.1 and 3.2.
//
//   grid   one block per processor; a block takes an item of work whenever it has finished one
//   item   128 queries of a head and row, over all keys they see, in tiles of 128 keys, last tile
//          first
//   block  3 warpgroups: warpgroup 0 feeds, 1 and 2 have 64 queries each
//
//   feeding  one thread issues tensor copies: the item's queries, and two stages of keys and of
//            values
//   queries  S = Q K^T of a tile is computed while P of the previous tile is multiplied,
//            O += P V; then S becomes P in registers. The two warpgroups take turns (hardware
//            barriers kFirstTurn and the next): while one issues products, the other computes P
//
// Items are ordered by groups of heads whose keys and values fit into L2 together; within a group,
// items that see the most keys come first. A tile may reach into the next row of the batch: those
// scores are hidden, and those values are zeroed in shared memory.
#include "kernels/attention/mla_prefill.hpp"

#include "kernels/attention/softmax_rows.cuh"

namespace lockstep::kernels {
namespace {

using namespace hopper;

constexpr const char* kName = "mla_prefill";
constexpr int kWidth = 192, kValues = 128;
constexpr int kQueries = 128;  ///< queries of an item
constexpr int kKeys = 128;     ///< keys of a tile
constexpr int kStages = 2;
constexpr int kGroups = 2;  ///< warpgroups of queries
constexpr int kThreads = (1 + kGroups) * kWarpgroup;
constexpr int kQueryThreads = kGroups * kWarpgroup;
constexpr int kFeedRegisters = 40, kQueryRegisters = 232;
constexpr std::int64_t kGroupBytes = 32 << 20;  ///< bytes of keys and values of a group of heads

constexpr int kSlabBytes = 128 * kTileRowBytes;  ///< 128 rows of 64 columns: 16 KiB
constexpr int kKeyBytes =
    kWidth / kTileColumns * kSlabBytes;  ///< 48 KiB: a tile of keys, or queries
constexpr int kValueBytes = kValues / kTileColumns * kSlabBytes;  ///< 32 KiB

// Shared memory, by offsets in bytes: queries (48 KiB) at 0, kStages tiles of keys (96 KiB),
// kStages tiles of values (64 KiB), kTurns int [2] with the numbers of items, barriers.
constexpr int kKeysAt = kKeyBytes;
constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
constexpr int kTurns = kValuesAt + kStages * kValueBytes;
constexpr int kBarriers = kTurns + 16;
constexpr int kSharedBytes = kBarriers + 8 * (2 + 4 * kStages + 2 * 2);
static_assert(kQueries == kKeys && kSharedBytes <= 232448, "shared memory of a block");

// Hardware barriers.
constexpr int kFirstTurn = 1;  ///< turn of the first warpgroup of queries; the second has the next
constexpr int kCleared = 3;

/// Per lane (MlaPrefill::lane): items taken beyond each block's first, and blocks that are done. 0
/// between launches.
__device__ int counters[kMlaPrefillLanes][2];

struct Prefill {
  const std::int32_t *query_starts, *key_starts;
  std::int64_t query_stride, key_stride;
  int rows, heads, tokens, keys;  ///< sizes of the batch
  bool causal;
  float scale_log2;
  void* out;
  std::int64_t out_strides[2];
  float* lse;
  std::int64_t lse_strides[2];
  int lane;
};
struct Maps {
  CUtensorMap q, k, v;
};

/// Up to 128 queries of a row and head.
struct Item {
  int head;
  int first, count;  ///< the queries, as tokens of the batch
  int first_key;     ///< the row's first key
  int keys;          ///< the row's number of keys
  int seen;          ///< keys that the first query sees; each later one sees one more if causal
  int tiles;
};

/// The items of a launch, in order. A warp calls find() with rising numbers; its lanes hold 32 rows
/// of the batch at a time.
class Items {
 public:
  __device__ explicit Items(const Prefill& p) : p_(p) { read(); }

  /// Finds item `number`; false if there is none.
  __device__ bool find(int number, Item& item) {
    while (number >= before_ + all_) {
      if (window_ + 32 >= p_.rows) return false;
      before_ += all_;
      window_ += 32;
      read();
    }
    const int at = number - before_;
    const unsigned here = __ballot_sync(0xffffffffu, begin_ <= at && at < begin_ + items_);
    const int lane = __ffs(static_cast<int>(here)) - 1;
    const auto of = [&](int x) { return __shfl_sync(0xffffffffu, x, lane); };
    const int rest = at - of(begin_), queries = of(queries_);
    const int blocks = (queries + kQueries - 1) / kQueries;
    item.keys = of(keys_);
    item.first_key = of(first_key_);
    const std::int64_t bytes = std::int64_t{max(item.keys, 1)} * (kWidth + kValues) * 2;
    const int together =
        static_cast<int>(min(max(kGroupBytes / bytes, std::int64_t{1}), std::int64_t{p_.heads}));
    const int group = rest / (blocks * together), within = rest - group * blocks * together;
    const int heads = min(together, p_.heads - group * together);
    const int block = within / heads;
    item.head = group * together + within - block * heads;
    const int first = (blocks - 1 - block) * kQueries;
    item.first = of(first_query_) + first;
    item.count = min(kQueries, queries - first);
    item.seen = p_.causal ? item.keys - queries + first + 1 : item.keys;
    const int most = p_.causal ? min(item.keys, item.seen + item.count - 1) : item.keys;
    item.tiles = (max(most, 0) + kKeys - 1) / kKeys;
    return true;
  }

 private:
  /// Reads the rows of the window, one per lane. Starts that are no valid range give an empty row.
  __device__ void read() {
    const int lane = static_cast<int>(threadIdx.x % 32), row = window_ + lane;
    queries_ = keys_ = first_query_ = first_key_ = 0;
    if (row < p_.rows) {
      const auto range = [row](const std::int32_t* starts, std::int64_t stride, int all, int& first,
                               int& count) {
        first = min(max(starts[row * stride], 0), all);
        count = max(min(starts[(row + 1) * stride], all) - first, 0);
      };
      range(p_.query_starts, p_.query_stride, p_.tokens, first_query_, queries_);
      range(p_.key_starts, p_.key_stride, p_.keys, first_key_, keys_);
    }
    items_ = (queries_ + kQueries - 1) / kQueries * p_.heads;
    int sum = items_;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    begin_ = sum - items_;
    all_ = __shfl_sync(0xffffffffu, sum, 31);
  }

  const Prefill& p_;
  int window_ = 0;  ///< first row of the window of 32
  int before_ = 0;  ///< items of the rows before the window
  int all_, begin_, items_;
  int first_query_, queries_, first_key_, keys_;
};

template <class T>
class Block {
 public:
  __device__ Block(const Prefill& p, const Maps& maps, unsigned char* shared)
      : p_(p), maps_(maps), shared_(shared), base_(shared_address(shared)) {}

  /// The barriers come in pairs: `full` ends a phase when the tensor copies have landed, `empty`
  /// when each warp of queries has used the memory (for turns: every thread has read the item's
  /// number).
  __device__ void init_barriers() const {
    barrier_init(queries_full(), 1);
    barrier_init(queries_empty(), kQueryThreads / 32);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(keys_full(s), 1);
      barrier_init(keys_empty(s), kQueryThreads / 32);
      barrier_init(values_full(s), 1);
      barrier_init(values_empty(s), kQueryThreads / 32);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(turn_full(i), 1);
      barrier_init(turn_empty(i), kQueryThreads);
    }
    publish_barriers();
  }

  // --- Feeding ---

  /// One warp: takes items, tells the query warpgroups their numbers, and loads their tiles.
  __device__ void feed() const {
    const bool leads = elected();
    int* const counter = counters[p_.lane];
    Items items(p_);
    Step turn(2), keys(kStages), values(kStages);
    std::uint32_t queries_parity = 1;
    int number = static_cast<int>(blockIdx.x);
    for (;; turn.next()) {
      Item item;
      const bool is = items.find(number, item);
      if (leads) {
        barrier_wait(turn_empty(turn.place), turn.parity ^ 1);
        turns()[turn.place] = is ? number : -1;
        barrier_arrive(turn_full(turn.place));
      }
      if (!is) break;
      if (leads && item.tiles > 0) {
        load_keys(keys, item, item.tiles - 1);
        barrier_wait(queries_empty(), queries_parity);
        barrier_expect(queries_full(), kKeyBytes);
        load(base_, maps_.q, kWidth, item.head, item.first, queries_full());
        for (int t = item.tiles - 2; t >= 0; --t) {
          load_keys(keys, item, t);
          load_values(values, item, t + 1);
        }
        load_values(values, item, 0);
      }
      if (item.tiles > 0) queries_parity ^= 1;
      // The next item is taken only now, so that a block with a long item reserves no second one.
      const int next = leads ? static_cast<int>(gridDim.x) + atomicAdd(counter, 1) : 0;
      number = __reduce_max_sync(0xffffffffu, next);
    }
    if (leads && atomicAdd(counter + 1, 1) == static_cast<int>(gridDim.x) - 1)
      counter[0] = counter[1] = 0;  // this is the last block: no other takes items any more
  }

  // --- Queries ---

  /// A warpgroup of queries, `group` 0 or 1: computes outputs of 64 queries of each item.
  __device__ void run_queries(int group, int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = group * 64 + warp * 16 + lane / 4;
    const float scale = fmaxf(fabsf(p_.scale_log2), 1e-30f);  // not 0: 0 times -infinity is NaN
    const std::uint64_t Q = matrix(base_ + group * 64 * kTileRowBytes);
    Items items(p_);
    Step turn(2), keys(kStages), values(kStages);
    std::uint32_t queries_parity = 0;
    if (group == 1) arrive_at(kFirstTurn, kQueryThreads);
    for (;; turn.next()) {
      // The feeding warp leaves the number of the next item here, -1 behind the last.
      barrier_wait(turn_full(turn.place), turn.parity);
      const int number = uniform(turns()[turn.place]);
      barrier_arrive(turn_empty(turn.place));
      Item item;
      if (number < 0 || !items.find(number, item)) break;
      float S[64], O[64], largest[2] = {kNoScore, kNoScore}, sum[2] = {0, 0};
      std::uint32_t P[32];
#pragma unroll
      for (float& o : O) o = 0.0f;
      if (item.tiles > 0) {
        barrier_wait(queries_full(), queries_parity);
        queries_parity ^= 1;
        barrier_wait(keys_full(keys.place), keys.parity);
        // The item begins with its last tile: S alone, since there is no P yet.
        start_products();
        multiply_keys(S, Q, keys.place);
        commit_products();
        const int there = item.keys - (item.tiles - 1) * kKeys;
        if (there < kKeys) clear_values(values, there);
        wait_for_products<0>();
        pin(S);
        arrive_if(lane == 0, keys_empty(keys.place));
        keys.next();
        float alpha[2];
        weigh(S, sum, largest, alpha, scale, item, item.tiles - 1, group, row, lane);
        pack_all(P, S);
#pragma unroll 1
        for (int t = item.tiles - 2; t >= 0; --t) {
          barrier_wait(keys_full(keys.place), keys.parity);
          // In its turn the group issues S = Q K^T of tile t and O += P V of tile t + 1; then the
          // other group has the turn, and this one computes the tile's P.
          sync_threads_of(kFirstTurn + group, kQueryThreads);
          pin(P), pin(O);
          start_products();
          multiply_keys(S, Q, keys.place);
          commit_products();
          barrier_wait(values_full(values.place), values.parity);
          multiply_values(O, P, values.place);
          commit_products();
          arrive_at(kFirstTurn + (group ^ 1), kQueryThreads);
          wait_for_products<1>();
          pin(S);
          arrive_if(lane == 0, keys_empty(keys.place));
          keys.next();
          // S is complete, and P V may still run: the new P is computed meanwhile.
          weigh(S, sum, largest, alpha, scale, item, t, group, row, lane);
          finish_before_waiting(sum[0] + sum[1]);
          wait_for_products<0>();
          pin(O), pin(P);
          arrive_if(lane == 0, values_empty(values.place));
          values.next();
          // O holds the tiles up to t + 1, weighed by the maximum before tile t.
#pragma unroll
          for (int i = 0; i < 64; ++i) O[i] *= alpha[i / 2 % 2];
          pack_all(P, S);
        }
        // Tile 0's P V, beside which no scores run. The queries are no longer needed.
        arrive_if(lane == 0, queries_empty());
        barrier_wait(values_full(values.place), values.parity);
        pin(P), pin(O);
        start_products();
        multiply_values(O, P, values.place);
        commit_products();
        wait_for_products<0>();
        pin(O), pin(P);
        arrive_if(lane == 0, values_empty(values.place));
        values.next();
      }
      store(O, sum, largest, item, row, lane);
    }
    // Takes up group 1's last arrival, so that the barrier is left complete.
    if (group == 0) sync_threads_of(kFirstTurn, kQueryThreads);
  }

 private:
  /// Loads 128 rows (queries or keys) of a head, slab by slab.
  __device__ static void load(std::uint32_t to, const CUtensorMap& map, int width, int head,
                              int token, std::uint32_t barrier) {
    for (int slab = 0; slab < width / kTileColumns; ++slab)
      load_tile(to + slab * kSlabBytes, map, slab * kTileColumns, head, token, barrier);
  }
  __device__ void load_keys(Step& at, const Item& item, int tile) const {
    barrier_wait(keys_empty(at.place), at.parity ^ 1);
    barrier_expect(keys_full(at.place), kKeyBytes);
    load(keys_at(at.place), maps_.k, kWidth, item.head, item.first_key + tile * kKeys,
         keys_full(at.place));
    at.next();
  }
  __device__ void load_values(Step& at, const Item& item, int tile) const {
    barrier_wait(values_empty(at.place), at.parity ^ 1);
    barrier_expect(values_full(at.place), kValueBytes);
    load(values_at(at.place), maps_.v, kValues, item.head, item.first_key + tile * kKeys,
         values_full(at.place));
    at.next();
  }

  /// S = Q K^T
  __device__ void multiply_keys(float (&S)[64], std::uint64_t Q, int stage) const {
    const std::uint64_t K = matrix(keys_at(stage));
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) {
      const std::uint32_t at = k / 4 * kSlabBytes + k % 4 * 32;
      Product<T, kKeys, false>::of(S, further(Q, at), further(K, at), k > 0);
    }
  }
  /// O += P V
  __device__ void multiply_values(float (&O)[64], const std::uint32_t (&P)[32], int stage) const {
    const std::uint64_t V = matrix(values_at(stage), kSlabBytes);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Product<T, kValues, true>::of(O, P + 4 * k, further(V, 16 * k * kTileRowBytes), true);
  }
  __device__ static void pack_all(std::uint32_t (&P)[32], const float (&S)[64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
  }

  /// Makes ptxas compute `sum` before the wait that follows. ptxas keeps waits in order with
  /// stores, but moves arithmetic behind them, where no product hides it. The store is predicated
  /// on sum < 0, which never holds.
  __device__ void finish_before_waiting(float sum) const {
    asm volatile(
        "{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000;\n"
        "@p st.shared.f32 [%1], %0; }" ::"f"(sum),
        "r"(base_ + kTurns + 8)
        : "memory");
  }

  /// Replaces scores S by p = exp2(scale S - largest), after raising `largest` to the tile's
  /// maximum; alpha becomes the factor for the outputs so far. Adds p to `sum`. Hides scores of
  /// keys that a row does not see.
  __device__ void weigh(float (&S)[64], float (&sum)[2], float (&largest)[2], float (&alpha)[2],
                        float scale, const Item& item, int tile, int group, int row,
                        int lane) const {
    if (p_.scale_log2 < 0) {
#pragma unroll
      for (float& s : S) s = -s;
    }
    // Keys that the warpgroup's first query sees.
    const int seen = min(item.seen + (p_.causal ? group * 64 : 0), item.keys);
    if ((tile + 1) * kKeys > seen) {
      int there[2];  // keys of the tile that each of the thread's rows sees, from its first column
                     // on
#pragma unroll
      for (int r = 0; r < 2; ++r)
        there[r] = min(item.seen + (p_.causal ? row + 8 * r : 0), item.keys) - tile * kKeys -
                   2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 64; ++i)
        if (i / 4 * 8 + i % 2 >= there[i / 2 % 2]) S[i] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(S[2 * r], S[2 * r + 1]);
#pragma unroll
      for (int n = 1; n < 16; ++n)
        most = fmaxf(most, fmaxf(S[4 * n + 2 * r], S[4 * n + 2 * r + 1]));
      most = fmaxf(largest[r], quad_max(most) * scale);
      alpha[r] = exp2_fast(largest[r] - most);
      largest[r] = most;
      sum[r] *= alpha[r];
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      S[i] = exp2_fast(fmaf(S[i], scale, -largest[i / 2 % 2]));
      sum[i / 2 % 2] += S[i];
    }
  }

  /// Zeroes the values after the row's last key: p is 0 there, and 0 times what lies there (perhaps
  /// NaN) must be 0. A thread always clears the same places, so its stores of two items are in
  /// order.
  __device__ void clear_values(const Step& at, int there) const {
    barrier_wait(values_full(at.place), at.parity);
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    for (int i = thread; i < kValueBytes / 16; i += kQueryThreads)
      if (i * 16 % kSlabBytes / kTileRowBytes >= there)
        reinterpret_cast<uint4*>(shared_ + kValuesAt + at.place * kValueBytes)[i] =
            make_uint4(0, 0, 0, 0);
    publish_to_async();
    sync_threads_of(kCleared, kQueryThreads);
  }

  /// Stores outputs and lse. A query that has seen no key gets output 0 and lse -infinity.
  __device__ void store(const float (&O)[64], const float (&sum)[2], const float (&largest)[2],
                        const Item& item, int row, int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float whole = quad_sum(sum[r]);
      const bool any = whole > 0 || whole != whole;
      const std::int64_t token = item.first + row + 8 * r;
      const bool is = row + 8 * r < item.count;
      T* const out =
          static_cast<T*>(p_.out) + token * p_.out_strides[0] + item.head * p_.out_strides[1];
      store_row<T, kValues>(out, O + 2 * r, any ? 1.0f / whole : 0.0f, is, lane);
      if (is && lane % 4 == 0)
        p_.lse[item.head * p_.lse_strides[0] + token * p_.lse_strides[1]] =
            any ? (largest[r] + log2f(whole)) * kLn2 : -INFINITY;
    }
  }

  __device__ int* turns() const {
    return reinterpret_cast<int*>(shared_ + kTurns);
  }
  __device__ std::uint32_t keys_at(int stage) const {
    return base_ + kKeysAt + stage * kKeyBytes;
  }
  __device__ std::uint32_t values_at(int stage) const {
    return base_ + kValuesAt + stage * kValueBytes;
  }
  __device__ std::uint32_t barrier(int number) const {
    return base_ + kBarriers + 8 * number;
  }
  __device__ std::uint32_t queries_full() const {
    return barrier(0);
  }
  __device__ std::uint32_t queries_empty() const {
    return barrier(1);
  }
  __device__ std::uint32_t keys_full(int stage) const {
    return barrier(2 + stage);
  }
  __device__ std::uint32_t keys_empty(int stage) const {
    return barrier(2 + kStages + stage);
  }
  __device__ std::uint32_t values_full(int stage) const {
    return barrier(2 + 2 * kStages + stage);
  }
  __device__ std::uint32_t values_empty(int stage) const {
    return barrier(2 + 3 * kStages + stage);
  }
  __device__ std::uint32_t turn_full(int i) const {
    return barrier(2 + 4 * kStages + i);
  }
  __device__ std::uint32_t turn_empty(int i) const {
    return barrier(4 + 4 * kStages + i);
  }

  const Prefill& p_;
  const Maps& maps_;
  unsigned char* shared_;
  std::uint32_t base_;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    mla_prefill_kernel(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Block<T> block(p, maps, shared);
  const int warp = uniform(static_cast<int>(threadIdx.x / 32));
  if (threadIdx.x == 0) {
    prefetch_map(maps.q);
    prefetch_map(maps.k);
    prefetch_map(maps.v);
    block.init_barriers();
  }
  wait_for_earlier_launch();
  let_the_next_launch_start();
  __syncthreads();
  if (warp < 4) {
    give_registers<kFeedRegisters>();
    if (warp == 0) block.feed();
  } else {
    take_registers<kQueryRegisters>();
    block.run_queries(warp / 4 - 1, warp % 4);
  }
}

// --- The wrapper ---------------------------------------------------------------------------------

int processors() {
  static const int count = [] {
    int device = 0, found = 0;
    check_cuda(cudaGetDevice(&device), kName);
    check_cuda(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), kName);
    return found;
  }();
  return count;
}

template <class T>
void check(const Checks& checks, const MlaPrefill<T>& in) {
  const std::int64_t tokens = in.q.extent(0), H = in.q.extent(1), L = in.k.extent(0);
  const std::int64_t starts = in.query_start_loc.extent(0);
  checks.shape(in.q, "q", "[T, H, 192]", {tokens, H, kWidth});
  checks.shape(in.k, "k", "[L, H, 192]", {L, H, kWidth});
  checks.shape(in.v, "v", "[L, H, 128]", {L, H, kValues});
  checks.shape(in.out, "out", "[T, H, 128]", {tokens, H, kValues});
  checks.shape(in.lse, "lse", "[H, T]", {H, tokens});
  checks.expect(starts >= 1, "query_start_loc", "[N + 1]", text_of(shape_of(in.query_start_loc)));
  checks.shape(in.key_start_loc, "key_start_loc", "[N + 1]", {starts});
  checks.expect(tokens < (1 << 28) && L < (1 << 28) && H < (1 << 16) &&
                    ((tokens + kQueries - 1) / kQueries + starts) * H < (std::int64_t{1} << 31),
                "q", "[T, H, 192] of fewer than 2^28 tokens and 2^31 blocks of 128",
                text_of(shape_of(in.q)));
  checks.expect(0 <= in.lane && in.lane < kMlaPrefillLanes, "lane",
                "below " + std::to_string(kMlaPrefillLanes), std::to_string(in.lane));
  const auto mapped = [&](const TensorView<const T, 3>& x, const char* name) {
    checks.expect(x.extent(0) == 0 || can_be_mapped(x), name,
                  "contiguous in its last dimension, with strides of whole 16 bytes",
                  "strides " + text_of(Shape<3>{x.stride(0), x.stride(1), x.stride(2)}));
  };
  mapped(in.q, "q");
  mapped(in.k, "k");
  mapped(in.v, "v");
  checks.expect(in.out.stride(2) == 1 && in.out.stride(0) % 8 == 0 && in.out.stride(1) % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(in.out.data_handle()) % 16 == 0,
                "out", "contiguous in its last dimension, with strides of whole 16 bytes",
                "other strides");
}

}  // namespace

template <class T>
void mla_prefill(const MlaPrefill<T>& in, cudaStream_t stream) {
  const Checks checks(kName);
  check(checks, in);
  const std::int64_t tokens = in.q.extent(0), H = in.q.extent(1), L = in.k.extent(0);
  const std::int64_t rows = in.query_start_loc.extent(0) - 1;
  if (tokens == 0 || H == 0 || rows == 0) return;
  Prefill p{};
  p.query_starts = in.query_start_loc.data_handle();
  p.key_starts = in.key_start_loc.data_handle();
  p.query_stride = in.query_start_loc.stride(0);
  p.key_stride = in.key_start_loc.stride(0);
  p.rows = static_cast<int>(rows);
  p.heads = static_cast<int>(H);
  p.tokens = static_cast<int>(tokens);
  p.keys = static_cast<int>(L);
  p.causal = in.causal;
  p.scale_log2 = static_cast<float>(in.softmax_scale * 1.4426950408889634);
  p.out = in.out.data_handle();
  p.lse = in.lse.data_handle();
  for (std::size_t i = 0; i < 2; ++i) {
    p.out_strides[i] = in.out.stride(i);
    p.lse_strides[i] = in.lse.stride(i);
  }
  p.lane = in.lane;
  Maps maps{};
  maps.q = tile_map(kName, in.q, kQueries);
  if (L > 0) {
    maps.k = tile_map(kName, in.k, kKeys);
    maps.v = tile_map(kName, in.v, kKeys);
  } else {
    maps.k = maps.v = maps.q;  // without keys nothing is loaded by them
  }
  static const auto kernel = [] {
    check_cuda(cudaFuncSetAttribute(mla_prefill_kernel<T>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
               kName);
    return mla_prefill_kernel<T>;
  }();
  const std::int64_t items = ((tokens + kQueries - 1) / kQueries + rows) * H;  // an upper bound
  launch(kName, kernel, dim3(static_cast<unsigned>(std::min<std::int64_t>(processors(), items))),
         dim3(kThreads), kSharedBytes, stream, true, p, maps);
}

#define LOCKSTEP_INSTANTIATE(T) template void mla_prefill(const MlaPrefill<T>&, cudaStream_t);
LOCKSTEP_INSTANTIATE(Bf16)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_INSTANTIATE(Fp16)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
