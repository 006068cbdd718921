// Prompts of multi-head latent attention on tensor cores. Equations:
// reference/attention/softmax_attention.hpp. Scores and products overlap inside a warpgroup as in
// FlashAttention 3: Shah et al. 2024, "FlashAttention-3", section 3.2.
//
//   grid   one block per processor; a block takes an item of work whenever it has finished one
//   item   128 queries of a head and row, over all keys they see, in tiles of 128 keys, last tile
//          first
//   block  3 warpgroups: warpgroup 0 feeds, 1 and 2 have 64 queries each
//
//   feeding  four warps: one issues tensor copies, of each warpgroup's queries and of two stages of
//            keys and of values; one takes the next item while the last tiles of the one before are
//            loaded; one zeroes values behind a row's last key
//   queries  tiles of all items form one sequence: S = Q K^T of a tile is computed while P of the
//            tile before, of the same item or of the last, is multiplied, O += P V; then S becomes
//            P in registers. Where an item ends, its outputs are stored beside the next one's first
//            scores, so that the tensor cores see no item's end
//
// The two warpgroups of queries take no turns: a queue of products blocks the warpgroup that issues
// them, so the other one's scores become P meanwhile. O is weighed anew between the issue of Q K^T
// and that of P V, where it costs nothing. A third of Q stays in registers: shared memory's port is
// the next limit after the tensor cores.
//
// Items are ordered by groups of heads whose keys and values fit into L2 together, of equal size;
// within a group, items that see the most keys come first. A tile may reach into the next row of
// the batch: those scores are hidden, and those values are zeroed in shared memory.
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
constexpr int kFeedRegisters = 24, kQueryRegisters = 240;
constexpr int kQuerySteps = 4;  ///< of the 12 steps of Q K^T, those with Q in registers
constexpr int kAhead = 3;       ///< tiles still to load when the next item is taken
constexpr std::int64_t kGroupBytes = 44 << 20;  ///< bytes of keys and values of a group of heads

constexpr int kSlabBytes = 128 * kTileRowBytes;  ///< 128 rows of 64 columns: 16 KiB
constexpr int kKeyBytes =
    kWidth / kTileColumns * kSlabBytes;  ///< 48 KiB: a tile of keys, or queries
constexpr int kValueBytes = kValues / kTileColumns * kSlabBytes;  ///< 32 KiB

constexpr int kQueryBytes = kKeyBytes / kGroups;   ///< a warpgroup's queries
constexpr int kStagingBytes = 16 * kTileRowBytes;  ///< half of a warp's outputs

// Shared memory, by offsets in bytes: queries (48 KiB) at 0, kStages tiles of keys (96 KiB),
// kStages tiles of values (64 KiB), outputs on their way (16 KiB), the last two items, barriers.
constexpr int kKeysAt = kKeyBytes;
constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
constexpr int kStaging = kValuesAt + kStages * kValueBytes;
constexpr int kItems = kStaging + kQueryThreads / 32 * kStagingBytes;
constexpr int kBarriers = kItems + 2 * 32;
constexpr int kSharedBytes = kBarriers + 8 * (5 + 2 * kGroups + 5 * kStages);
static_assert(kQueries == kKeys && kSharedBytes <= 232448, "shared memory of a block");

/// Per lane (MlaPrefill::lane): items taken beyond each block's first, and blocks that are done. 0
/// between launches.
__device__ int counters[kMlaPrefillLanes][2];

struct Prefill {
  const std::int32_t *query_starts, *key_starts;
  std::int64_t query_stride, key_stride;
  int rows, heads, tokens, keys;  ///< sizes of the batch
  bool causal;
  float scale_log2;  ///< without its sign, and not 0: 0 times -infinity is NaN
  bool negative;     ///< the scale's sign
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
  int tiles;         ///< -1 behind the last item
  int first_key;     ///< the row's first key
  int keys;          ///< the row's number of keys
  int seen;          ///< keys that the first query sees; each later one sees one more if causal
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
    const int most_heads =
        static_cast<int>(min(max(kGroupBytes / bytes, std::int64_t{1}), std::int64_t{p_.heads}));
    const int groups = (p_.heads + most_heads - 1) / most_heads;
    const int together = (p_.heads + groups - 1) / groups;
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
        count = max(min(starts[(row + 1) * stride], all), first) - first;
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

/// A thread of a warpgroup of queries.
struct Place {
  int group;  ///< the warpgroup, 0 or 1
  int warp, lane;
  /// The first of the thread's two rows of the item's 128; the second is 8 below.
  __device__ int row() const { return group * 64 + warp * 16 + lane / 4; }
};

/// The thread's part of 64 queries: scores of a tile, outputs, p of the tile before, queries.
struct Rows {
  float S[64], O[64];
  std::uint32_t P[32], Q[4 * kQuerySteps];
  float largest[2], sum[2];
  float alpha[2];  ///< factors that O still lacks
};

template <class T>
class Block {
 public:
  __device__ Block(const Prefill& p, const Maps& maps, unsigned char* shared)
      : p_(p), maps_(maps), shared_(shared), base_(shared_address(shared)) {}

  /// The barriers come in pairs: `full` ends a phase when the tensor copies have landed, `empty`
  /// when each warp of queries has used the memory (for items: every thread has read the item). At
  /// values_loaded() land values that are to be zeroed in part before values_full().
  __device__ void init_barriers() const {
    for (int g = 0; g < kGroups; ++g) {
      barrier_init(queries_full(g), 1);
      barrier_init(queries_empty(g), kWarpgroup / 32);
    }
    for (int s = 0; s < kStages; ++s) {
      barrier_init(keys_full(s), 1);
      barrier_init(keys_empty(s), kQueryThreads / 32);
      barrier_init(values_full(s), 1);
      barrier_init(values_empty(s), kQueryThreads / 32);
      barrier_init(values_loaded(s), 1);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(item_full(i), 1);
      barrier_init(item_empty(i), kQueryThreads + 32 + 1);
    }
    barrier_init(wanted(), 1);
    publish_barriers();
  }

  // --- Feeding ---

  /// One warp: takes items and leaves them for the others.
  __device__ void take_items() const {
    const bool leads = elected();
    int* const counter = counters[p_.lane];
    Items items(p_);
    Step place(2);
    std::uint32_t wanted_parity = 0;
    int number = static_cast<int>(blockIdx.x);
    for (;; place.next()) {
      Item item;
      const bool is = items.find(number, item);
      if (leads) {
        barrier_wait(item_empty(place.place), place.parity ^ 1);
        item_at(place.place)[0] =
            make_int4(item.head, item.first, item.count, is ? item.tiles : -1);
        item_at(place.place)[1] = make_int4(item.first_key, item.keys, item.seen, 0);
        barrier_arrive(item_full(place.place));
      }
      if (!is) break;
      // The next item is taken only then, so that a block with a long item reserves no second one.
      barrier_wait(wanted(), wanted_parity);
      wanted_parity ^= 1;
      const int next = leads ? static_cast<int>(gridDim.x) + atomicAdd(counter, 1) : 0;
      number = __reduce_max_sync(0xffffffffu, next);
    }
    if (leads && atomicAdd(counter + 1, 1) == static_cast<int>(gridDim.x) - 1)
      counter[0] = counter[1] = 0;  // this is the last block: no other takes items any more
  }

  /// One thread: loads the items' tiles.
  __device__ void feed() const {
    Step place(2), keys(kStages), values(kStages);
    std::uint32_t queries_parity = 1;
    for (;; place.next()) {
      const Item item = read_item(place);
      if (item.tiles < 0) break;
      if (item.tiles <= kAhead) barrier_arrive(wanted());
      if (item.tiles == 0) continue;
      load_keys(keys, item, item.tiles - 1);
      for (int g = 0; g < kGroups; ++g) {
        barrier_wait(queries_empty(g), queries_parity);
        barrier_expect(queries_full(g), kQueryBytes);
        for (int slab = 0; slab < kWidth / kTileColumns; ++slab)
          load_tile(queries_at(g) + slab * kSlabBytes / kGroups, maps_.q, slab * kTileColumns,
                    item.head, item.first + g * 64, queries_full(g));
      }
      queries_parity ^= 1;
      for (int t = item.tiles - 2; t >= 0; --t) {
        if (t == kAhead - 1) barrier_arrive(wanted());
        load_keys(keys, item, t);
        load_values(values, item, t + 1);
      }
      load_values(values, item, 0);
    }
  }

  /// One warp: zeroes the values after a row's last key: p is 0 there, and 0 times what lies there
  /// (perhaps NaN) must be 0.
  __device__ void clear_values() const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    Step place(2);
    std::uint32_t tiles = 0, parities = 0;  // parities: a bit for each stage
    for (;; place.next()) {
      const Item item = read_item(place);
      if (item.tiles < 0) break;
      const int there = item.keys - (item.tiles - 1) * kKeys;
      if (item.tiles > 0 && there < kKeys) {
        const int s = static_cast<int>(tiles % kStages);
        barrier_wait(values_loaded(s), parities >> s & 1);
        parities ^= 1u << s;
        for (int i = lane; i < kValueBytes / 16; i += 32)
          if (i * 16 % kSlabBytes / kTileRowBytes >= there)
            reinterpret_cast<uint4*>(shared_ + kValuesAt + s * kValueBytes)[i] =
                make_uint4(0, 0, 0, 0);
        publish_to_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(values_full(s));
      }
      tiles += static_cast<std::uint32_t>(item.tiles);
    }
  }

  // --- Queries ---

  /// A warpgroup of queries: computes outputs of 64 queries of each item.
  __device__ void run_queries(const Place& at) const {
    Step place(2), keys(kStages), values(kStages);
    std::uint32_t queries_parity = 0;
    Item item;
    if (!next_item(place, item, at)) return;
    Rows x;
    wait_for_queries(x, queries_parity, at);
    begin(x);
    barrier_wait(keys_full(keys.place), keys.parity);
    start_products();
    multiply_keys(x, keys.place, at);
    commit_products();
    wait_for_products<0>();
    release_keys(x, keys, item.tiles == 1, at);
    weigh(x, item, item.tiles - 1, at, [] {});
    for (;;) {
#pragma unroll 1
      for (int t = item.tiles - 2; t >= 0; --t) {
        multiply_both(x, keys, values, at);
        release_keys(x, keys, t == 0, at);
        weigh(x, item, t, at, [&] { release_values(x, values, at); });
      }
      Item next;
      if (!next_item(place, next, at)) break;
      wait_for_queries(x, queries_parity, at);
      multiply_both(x, keys, values, at);
      release_keys(x, keys, next.tiles == 1, at);
      const float sum[2] = {x.sum[0], x.sum[1]}, largest[2] = {x.largest[0], x.largest[1]};
      begin_sums(x);
      weigh(x, next, next.tiles - 1, at, [&] {
        release_values(x, values, at);
        store(x.O, sum, largest, item, at);
        begin_outputs(x);
      });
      item = next;
    }
    // The last tile's P V, beside which no scores run.
    rescale(x);
    barrier_wait(values_full(values.place), values.parity);
    pin(x.P), pin(x.O);
    start_products();
    multiply_values(x, values.place);
    commit_products();
    release_values(x, values, at);
    store(x.O, x.sum, x.largest, item, at);
  }

 private:
  __device__ Item read_item(const Step& at) const {
    barrier_wait(item_full(at.place), at.parity);
    const int4 a = item_at(at.place)[0], b = item_at(at.place)[1];
    barrier_arrive(item_empty(at.place));
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z};
  }
  /// Reads the next item that has tiles, and stores the outputs of those before it that have none.
  /// False behind the last item.
  __device__ bool next_item(Step& place, Item& item, const Place& at) const {
#pragma unroll 1
    for (;;) {
      item = read_item(place);
      item.tiles = uniform(item.tiles);
      place.next();
      if (item.tiles != 0) return item.tiles > 0;
      float O[64];
#pragma unroll
      for (float& o : O) o = 0.0f;
      const float none[2] = {0, 0};
      store(O, none, none, item, at);
    }
  }

  __device__ void load_keys(Step& at, const Item& item, int tile) const {
    barrier_wait(keys_empty(at.place), at.parity ^ 1);
    barrier_expect(keys_full(at.place), kKeyBytes);
    for (int slab = 0; slab < kWidth / kTileColumns; ++slab)
      load_tile(keys_at(at.place) + slab * kSlabBytes, maps_.k, slab * kTileColumns, item.head,
                item.first_key + tile * kKeys, keys_full(at.place));
    at.next();
  }
  __device__ void load_values(Step& at, const Item& item, int tile) const {
    barrier_wait(values_empty(at.place), at.parity ^ 1);
    const bool whole = (tile + 1) * kKeys <= item.keys;
    const std::uint32_t landed = whole ? values_full(at.place) : values_loaded(at.place);
    barrier_expect(landed, kValueBytes);
    for (int slab = 0; slab < kValues / kTileColumns; ++slab)
      load_tile(values_at(at.place) + slab * kSlabBytes, maps_.v, slab * kTileColumns, item.head,
                item.first_key + tile * kKeys, landed);
    at.next();
  }

  __device__ static void begin_sums(Rows& x) {
    x.largest[0] = x.largest[1] = kNoScore;
    x.sum[0] = x.sum[1] = 0;
  }
  __device__ static void begin_outputs(Rows& x) {
#pragma unroll
    for (float& o : x.O) o = 0.0f;
  }
  __device__ static void begin(Rows& x) {
    begin_sums(x);
    begin_outputs(x);
  }

  /// Waits for the item's queries, and reads those that stay in registers.
  __device__ void wait_for_queries(Rows& x, std::uint32_t& parity, const Place& at) const {
    barrier_wait(queries_full(at.group), parity);
    parity ^= 1;
#pragma unroll
    for (int k = 0; k < kQuerySteps; ++k) {
      std::uint32_t q[4];
      load_matrices(q, queries_at(at.group) + k / 4 * kSlabBytes / kGroups +
                           tile_offset(at.warp * 16 + at.lane % 16, 2 * (k % 4) + at.lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) x.Q[4 * k + i] = q[i];
    }
  }

  /// S = Q K^T
  __device__ void multiply_keys(Rows& x, int stage, const Place& at) const {
    const std::uint64_t Q = matrix(queries_at(at.group)), K = matrix(keys_at(stage));
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) {
      const std::uint64_t keys = further(K, k / 4 * kSlabBytes + k % 4 * 32);
      if (k < kQuerySteps)
        Product<T, kKeys, false>::of(x.S, x.Q + 4 * k, keys, k > 0);
      else
        Product<T, kKeys, false>::of(x.S, further(Q, k / 4 * kSlabBytes / kGroups + k % 4 * 32),
                                     keys, k > 0);
    }
  }
  /// O += P V
  __device__ void multiply_values(Rows& x, int stage) const {
    const std::uint64_t V = matrix(values_at(stage), kSlabBytes);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Product<T, kValues, true>::of(x.O, x.P + 4 * k, further(V, 16 * k * kTileRowBytes), true);
  }
  /// Issues S = Q K^T of a tile and O += P V of the tile before; returns when S is complete.
  __device__ void multiply_both(Rows& x, const Step& keys, const Step& values,
                                const Place& at) const {
    barrier_wait(keys_full(keys.place), keys.parity);
    pin(x.P);
    start_products();
    multiply_keys(x, keys.place, at);
    commit_products();
    rescale(x);
    barrier_wait(values_full(values.place), values.parity);
    pin(x.O);
    start_products();  // a second time: ptxas would insert it, and serialise products where it may
                       // not
    multiply_values(x, values.place);
    commit_products();
    wait_for_products<1>();
  }
  __device__ void release_keys(Rows& x, Step& keys, bool last, const Place& at) const {
    pin(x.S);
    arrive_if(at.lane == 0, keys_empty(keys.place));
    arrive_if(at.lane == 0 && last, queries_empty(at.group));
    keys.next();
  }
  __device__ void release_values(Rows& x, Step& values, const Place& at) const {
    wait_for_products<0>();
    pin(x.O), pin(x.P);
    arrive_if(at.lane == 0, values_empty(values.place));
    values.next();
  }
  __device__ static void rescale(Rows& x) {
#pragma unroll
    for (int i = 0; i < 64; ++i) x.O[i] *= x.alpha[i / 2 % 2];
  }

  /// Makes p of a tile's scores, as they are weighed by the largest score so far; what was weighed
  /// before lacks the factor alpha then. between() comes before P is overwritten. The second row's
  /// maximum is sought beside the first one's exponentials.
  template <class Between>
  __device__ void weigh(Rows& x, const Item& item, int tile, const Place& at,
                        Between between) const {
    const float scale = p_.scale_log2;
    hide(x.S, item, tile, at);
    raise<0>(x, scale);
    exponentiate<0>(x, scale);
    raise<1>(x, scale);
    between();
    exponentiate<1>(x, scale);
    take_up<0>(x);
    take_up<1>(x);
  }
  /// Hides scores of keys that a row does not see, and turns their signs if the scale is negative.
  __device__ void hide(float (&S)[64], const Item& item, int tile, const Place& at) const {
    // keys that the warpgroup's first query sees
    const int seen = min(item.seen + (p_.causal ? at.group * 64 : 0), item.keys);
    if ((tile + 1) * kKeys <= seen && !p_.negative) return;
    const float sign = p_.negative ? -1.0f : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // keys of the tile that the row sees, from the thread's first column on
      const int there = min(item.seen + (p_.causal ? at.row() + 8 * r : 0), item.keys) -
                        tile * kKeys - 2 * (at.lane % 4);
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        float& s = S[of_row(r, n)];
        s = n / 2 * 8 + n % 2 >= there ? -INFINITY : s * sign;
      }
    }
  }
  /// The place of element n (0 ... 31) of the thread's row r in a product's result.
  __device__ static constexpr int of_row(int r, int n) {
    return n / 2 * 4 + n % 2 + 2 * r;
  }

  template <int r>
  __device__ static void raise(Rows& x, float scale) {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = x.S[of_row(r, i)];
#pragma unroll
    for (int n = 4; n < 32; ++n) most[n % 4] = fmaxf(most[n % 4], x.S[of_row(r, n)]);
    const float all = quad_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
    const float next = fmaxf(x.largest[r], all * scale);
    x.alpha[r] = exp2_fast(x.largest[r] - next);
    x.largest[r] = next;
    x.sum[r] *= x.alpha[r];
  }
  template <int r>
  __device__ static void exponentiate(Rows& x, float scale) {
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      float& s = x.S[of_row(r, n)];
      s = exp2_fast(fmaf(s, scale, -x.largest[r]));
    }
  }
  /// Adds p of row r to its sum, and packs it for the next product.
  template <int r>
  __device__ static void take_up(Rows& x) {
    float part[2];
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float low = x.S[of_row(r, 2 * n)], high = x.S[of_row(r, 2 * n + 1)];
      part[0] = n > 0 ? part[0] + low : low;
      part[1] = n > 0 ? part[1] + high : high;
      x.P[2 * n + r] = pack<T>(low, high);
    }
    x.sum[r] += part[0] + part[1];
  }

  /// Stores outputs and lse. A query that has seen no key gets output 0 and lse -infinity. Each
  /// warp puts 64 columns of its 16 rows into shared memory, and stores whole pieces of rows from
  /// there.
  __device__ void store(const float (&O)[64], const float (&sum)[2], const float (&largest)[2],
                        const Item& item, const Place& at) const {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float whole = quad_sum(sum[r]);
      const bool any = whole > 0 || whole != whole;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(factor[r]) : "f"(any ? whole : INFINITY));
      const float lse = any ? (largest[r] + log2f(whole)) * kLn2 : -INFINITY;
      const std::int64_t token = item.first + at.row() + 8 * r;
      if (at.row() + 8 * r < item.count && at.lane % 4 == 0)
        p_.lse[item.head * p_.lse_strides[0] + token * p_.lse_strides[1]] = lse;
    }
    const int first = at.group * 64 + at.warp * 16;  // the warp's first row
    const std::uint32_t staging = base_ + kStaging + first / 16 * kStagingBytes;
    T* const out = static_cast<T*>(p_.out) + item.head * p_.out_strides[1] + at.lane % 8 * 8;
#pragma unroll
    for (int half = 0; half < kValues / kTileColumns; ++half) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const o = O + 32 * half + 8 * j;
        store_matrices(staging + tile_offset(at.lane % 16, 2 * j + at.lane / 16),
                       pack<T>(o[0] * factor[0], o[1] * factor[0]),
                       pack<T>(o[2] * factor[1], o[3] * factor[1]),
                       pack<T>(o[4] * factor[0], o[5] * factor[0]),
                       pack<T>(o[6] * factor[1], o[7] * factor[1]));
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 4 * j + at.lane / 8;
        const uint4 words = *reinterpret_cast<const uint4*>(shared_ + (staging - base_) +
                                                            tile_offset(row, at.lane % 8));
        if (first + row < item.count)
          *reinterpret_cast<uint4*>(out + (item.first + first + row) * p_.out_strides[0] +
                                    half * kTileColumns) = words;
      }
    }
  }

  __device__ int4* item_at(int place) const {
    return reinterpret_cast<int4*>(shared_ + kItems) + 2 * place;
  }
  __device__ std::uint32_t queries_at(int group) const {
    return base_ + group * kQueryBytes;
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
  __device__ std::uint32_t wanted() const {
    return barrier(0);
  }
  __device__ std::uint32_t item_full(int i) const {
    return barrier(1 + i);
  }
  __device__ std::uint32_t item_empty(int i) const {
    return barrier(3 + i);
  }
  __device__ std::uint32_t queries_full(int group) const {
    return barrier(5 + group);
  }
  __device__ std::uint32_t queries_empty(int group) const {
    return barrier(5 + kGroups + group);
  }
  __device__ std::uint32_t stage_barrier(int kind, int stage) const {
    return barrier(5 + 2 * kGroups + kind * kStages + stage);
  }
  __device__ std::uint32_t keys_full(int stage) const {
    return stage_barrier(0, stage);
  }
  __device__ std::uint32_t keys_empty(int stage) const {
    return stage_barrier(1, stage);
  }
  __device__ std::uint32_t values_full(int stage) const {
    return stage_barrier(2, stage);
  }
  __device__ std::uint32_t values_empty(int stage) const {
    return stage_barrier(3, stage);
  }
  __device__ std::uint32_t values_loaded(int stage) const {
    return stage_barrier(4, stage);
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
    if (warp == 0 && elected()) block.feed();
    if (warp == 1) block.take_items();
    if (warp == 2) block.clear_values();
  } else {
    take_registers<kQueryRegisters>();
    // By a shuffle, so that ptxas keeps it: it would read threadIdx anew in each tile, between the
    // products of P V, and these would wait.
    const int lane = static_cast<int>(__shfl_xor_sync(0xffffffffu, threadIdx.x % 32 ^ 1, 1));
    block.run_queries({warp / 4 - 1, warp % 4, lane});
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
  p.scale_log2 =
      std::max(std::abs(static_cast<float>(in.softmax_scale * 1.4426950408889634)), 1e-30f);
  p.negative = in.softmax_scale < 0;
  p.out = in.out.data_handle();
  p.lse = in.lse.data_handle();
  for (std::size_t i = 0; i < 2; ++i) {
    p.out_strides[i] = in.out.stride(i);
    p.lse_strides[i] = in.lse.stride(i);
  }
  p.lane = in.lane;
  Maps maps{};
  maps.q = tile_map(kName, in.q, kQueries / kGroups);
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
