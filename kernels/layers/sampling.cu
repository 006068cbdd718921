// Selects the next token. The steps: reference/layers/sampling.hpp.
//
//   grid   N
//   block  kThreads threads, which go over the vocabulary many times
// Nothing is sorted. Each token has a rank, a 64-bit number that is larger for likelier tokens; the
// rank of the last token that top-k or top-p keeps is found bit by bit from the top, by counts or
// sums over the whole row. Sums are of integers, so the order of additions does not change the
// result.
#include "kernels/layers/sampling.hpp"

#include "kernels/base/plain.cuh"
#include "reference/base/philox.hpp"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 512;
constexpr std::int64_t kVocabularyMost = (1 << 22) - 1;  ///< sums of weights stay below 2^62

/// The logit with NaN as -infinity and -0 as 0.
__device__ inline float number(float logit) {
  return logit == logit ? logit + 0.0f : -INFINITY;
}

/// The rank of a token: larger for larger logits, and for lower token numbers among equal logits.
/// The upper half orders floats by their bits. The rank is never 0, since the lower half is not.
__device__ inline std::uint64_t rank_of(float logit, int token) {
  const unsigned bits = __float_as_uint(logit);
  const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{ordered} << 32 | static_cast<unsigned>(~token);
}

/// 2^40 exp(x) for x <= 0, by the reference's operations in the same order, none of them
/// contracted: the result has the same bits.
__device__ inline std::uint64_t weight_of(float x) {
  if (!(x > -29.0f)) return 0;                         // 2^40 exp(-29) is below 1
  const double y = __dmul_rn(x, 0x1.71547652b82fep0);  // log2(e)
  const double whole = floor(y), z = __dmul_rn(__dadd_rn(y, -whole), 0x1.62e42fefa39efp-1);
  double power = 0;
  for (int n = 14; n > 0; --n) power = __dmul_rn(__dadd_rn(power, 1.0), __ddiv_rn(z, n));
  return static_cast<std::uint64_t>(__dmul_rn(__dadd_rn(power, 1.0), 0x1p40)) >>
         -static_cast<int>(whole);
}

/// A row of logits; every thread of the block calls its reductions.
struct Row {
  const float* logits;
  int V;
  float largest = 0, temperature = 1;

  __device__ float logit(int v) const { return number(logits[v]); }
  __device__ std::uint64_t rank(int v) const { return rank_of(logit(v), v); }
  __device__ std::uint64_t weight(int v) const {
    const float x = logit(v);
    return weight_of(x == largest ? 0.0f : __fdiv_rn(__fsub_rn(x, largest), temperature));
  }
  /// The sum of value(token) over all tokens; every thread gets it.
  template <class Value>
  __device__ std::uint64_t sum(Value value) const {
    std::uint64_t mine = 0;
    for (int v = static_cast<int>(threadIdx.x); v < V; v += kThreads) mine += value(v);
    return over_block<kThreads>(mine, Plus{});
  }
  /// The largest rank, that of the likeliest token.
  __device__ std::uint64_t best() const {
    std::uint64_t mine = 0;
    for (int v = static_cast<int>(threadIdx.x); v < V; v += kThreads) {
      const std::uint64_t other = rank(v);
      mine = other > mine ? other : mine;
    }
    return over_block<kThreads>(mine,
                                [](std::uint64_t a, std::uint64_t b) { return a > b ? a : b; });
  }
  /// The largest rank for which the values of all tokens of that rank and above sum to at least
  /// `wanted`; 0 if there is none.
  template <class Value>
  __device__ std::uint64_t last_rank(std::uint64_t wanted, Value value) const {
    std::uint64_t found = 0;
    for (int bit = 63; bit >= 0; --bit) {
      const std::uint64_t tried = found | std::uint64_t{1} << bit;
      const std::uint64_t got =
          sum([&](int v) { return rank(v) >= tried ? value(v) : std::uint64_t{0}; });
      if (got >= wanted) found = tried;
    }
    return found;
  }
};

__device__ inline int token_of(std::uint64_t rank) {
  return static_cast<int>(~static_cast<unsigned>(rank));
}

__global__ void __launch_bounds__(kThreads) greedy_kernel(const __grid_constant__ GreedyTokens in) {
  const std::int64_t n = blockIdx.x;
  const Row row{in.logits.data_handle() + n * in.logits.stride(0),
                static_cast<int>(in.logits.extent(1))};
  const int token = token_of(row.best());
  if (threadIdx.x == 0) in.tokens(n) = token;
}

struct Sampling {
  TensorView<const float, 2> logits;
  TensorView<const float, 1> temperature, top_p;
  IndexView top_k, positions;
  TensorView<const std::int64_t, 1> seeds;
  TensorView<std::int32_t, 1> tokens;
  bool has_top_k, has_top_p;
};

__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ Sampling in) {
  const std::int64_t n = blockIdx.x;
  Row row{in.logits.data_handle() + n * in.logits.stride(0), static_cast<int>(in.logits.extent(1))};
  const int likeliest = token_of(row.best());
  row.temperature = in.temperature(n);
  if (!(row.temperature > 0)) {
    if (threadIdx.x == 0) in.tokens(n) = likeliest;
    return;
  }
  row.largest = row.logit(likeliest);

  std::uint64_t last = 0;  // the rank of the last token that is kept
  const std::int32_t top_k = in.has_top_k ? in.top_k(n) : 0;
  if (top_k > 0 && top_k < row.V)
    last = row.last_rank(static_cast<std::uint64_t>(top_k), [](int) { return std::uint64_t{1}; });
  const auto kept_weight = [&](int v) {
    return row.rank(v) >= last ? row.weight(v) : std::uint64_t{0};
  };
  std::uint64_t total = row.sum(kept_weight);
  const float top_p = in.has_top_p ? in.top_p(n) : 1.0f;
  if (top_p < 1) {
    const double wanted = ceil(__dmul_rn(__ull2double_rn(total), fmaxf(top_p, 0.0f)));
    const std::uint64_t least = static_cast<std::uint64_t>(wanted);
    last = row.last_rank(least > 0 ? least : 1, kept_weight);
    total = row.sum(kept_weight);
  }
  // The token on which the draw falls: the first for which the weights up to and with it exceed the
  // draw. Its number is found bit by bit from the top.
  const std::uint64_t bits = random_bits(static_cast<std::uint64_t>(in.seeds(n)), 0,
                                         static_cast<std::uint64_t>(in.positions(n)));
  const std::uint64_t draw = __umul64hi(bits, total);
  int before = 0;  // number of tokens before it
  for (int bit = 21; bit >= 0; --bit) {
    const int tried = before | 1 << bit;
    if (tried >= row.V) continue;  // uniform over the block
    const std::uint64_t sum =
        row.sum([&](int v) { return v < tried ? kept_weight(v) : std::uint64_t{0}; });
    if (sum <= draw) before = tried;
  }
  if (threadIdx.x == 0) in.tokens(n) = before;
}

void check_logits(const Checks& checks, const TensorView<const float, 2>& logits,
                  const TensorView<std::int32_t, 1>& tokens) {
  const std::int64_t V = logits.extent(1);
  checks.expect(1 <= V && V <= kVocabularyMost, "logits", "[N, V] with V from 1 to 2^22 - 1",
                text_of(shape_of(logits)));
  checks.contiguous_rows(logits, "logits");
  checks.shape(tokens, "tokens", "[N]", {logits.extent(0)});
}

}  // namespace

void greedy_tokens(const GreedyTokens& in, cudaStream_t stream) {
  check_logits(Checks("greedy_tokens"), in.logits, in.tokens);
  const std::int64_t N = in.logits.extent(0);
  if (N == 0) return;
  launch("greedy_tokens", greedy_kernel, dim3(static_cast<unsigned>(N)), dim3(kThreads), 0, stream,
         false, in);
}

void sampled_tokens(const SampledTokens& in, cudaStream_t stream) {
  const Checks checks("sampled_tokens");
  check_logits(checks, in.logits, in.tokens);
  const std::int64_t N = in.logits.extent(0);
  checks.shape(in.temperature, "temperature", "[N]", {N});
  checks.shape(in.seeds, "seeds", "[N]", {N});
  checks.shape(in.positions, "positions", "[N]", {N});
  Sampling s{.logits = in.logits,
             .temperature = in.temperature,
             .top_p = {},
             .top_k = {},
             .positions = in.positions,
             .seeds = in.seeds,
             .tokens = in.tokens,
             .has_top_k = in.top_k.has_value(),
             .has_top_p = in.top_p.has_value()};
  if (in.top_k) {
    checks.shape(*in.top_k, "top_k", "[N]", {N});
    s.top_k = *in.top_k;
  }
  if (in.top_p) {
    checks.shape(*in.top_p, "top_p", "[N]", {N});
    s.top_p = *in.top_p;
  }
  if (N == 0) return;
  launch("sampled_tokens", sample_kernel, dim3(static_cast<unsigned>(N)), dim3(kThreads), 0, stream,
         false, s);
}

}  // namespace lockstep::kernels
