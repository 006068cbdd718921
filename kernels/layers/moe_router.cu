// Selects the experts of each token. Equations: reference/layers/moe_router.hpp.
//
//   grid   ceil(T / kTokens)
//   block  kTokens warps; a warp takes one token, with its scores in shared memory (9 KiB per
//          token)
#include "kernels/layers/moe_router.hpp"

#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kTokens = 4;
constexpr int kExpertsMost = 1024, kGroupsMost = 64, kChoicesMost = 32;

struct Candidate {
  float value;
  int index;  ///< -1: no candidate
};

/// Selects the larger value; among equal values, the lower index.
struct Better {
  __device__ Candidate operator()(Candidate a, Candidate b) const {
    if (a.index < 0 || b.index < 0) return a.index < 0 ? b : a;
    if (a.value == b.value) return a.index < b.index ? a : b;
    return a.value > b.value ? a : b;
  }
};

/// Index of the best of `count` values that is not taken, in every lane; -1 if all are taken.
__device__ inline int best(const float* values, const bool* taken, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Candidate mine{0, -1};
  for (int i = lane; i < count; i += 32)
    if (!taken[i]) mine = Better{}(mine, {values[i], i});
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Candidate other{__shfl_xor_sync(kWholeWarp, mine.value, distance),
                          __shfl_xor_sync(kWholeWarp, mine.index, distance)};
    mine = Better{}(mine, other);
  }
  __syncwarp();                                   // all lanes have read `taken`, which changes next
  return __shfl_sync(kWholeWarp, mine.index, 0);  // with NaN, lanes may have found different ones
}

/// The sum of the two largest of `count` values.
__device__ inline float sum_of_two_best(const float* values, int count) {
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < count; ++i) {
    const float value = values[i];
    if (value > first) {
      second = first;
      first = value;
    } else if (value > second) {
      second = value;
    }
  }
  return count > 1 ? first + second : first;
}

/// Per token: computes the scores of all experts; with groups, marks the experts outside the best
/// groups as taken; then selects, k times, the best expert that is not taken.
__global__ void __launch_bounds__(kTokens * 32)
    router_kernel(const __grid_constant__ MoeRouter in) {
  __shared__ float all_scores[kTokens][kExpertsMost], all_choices[kTokens][kExpertsMost];
  __shared__ bool all_taken[kTokens][kExpertsMost];
  __shared__ float all_group_scores[kTokens][kGroupsMost];
  __shared__ bool all_groups_kept[kTokens][kGroupsMost];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t t = std::int64_t{blockIdx.x} * kTokens + warp;
  if (t >= in.logits.extents[0]) return;  // the whole warp leaves; warps never synchronise
  float* const scores = all_scores[warp];
  float* const choices = all_choices[warp];  // score + bias, by which experts are selected
  bool* const taken = all_taken[warp];
  const auto E = static_cast<int>(in.logits.extents[1]);
  const auto k = static_cast<int>(in.experts.extent(1));
  const auto logit = [&](int e) {
    return value_of(bits_at(in.logits.data, in.logits.format,
                            t * in.logits.strides[0] + e * in.logits.strides[1]),
                    in.logits.format);
  };

  float largest = -INFINITY, sum = 0;
  for (int e = lane; e < E; e += 32) largest = fmaxf(largest, logit(e));
  largest = over_warp(largest, Larger{});
  for (int e = lane; e < E; e += 32) {
    scores[e] = in.sigmoid ? sigmoid(logit(e)) : expf(logit(e) - largest);
    sum += scores[e];
  }
  sum = over_warp(sum, Plus{});
  for (int e = lane; e < E; e += 32) {
    if (!in.sigmoid) scores[e] /= sum;
    choices[e] = in.bias ? scores[e] + at(in.bias, e) : scores[e];
    taken[e] = false;
  }
  __syncwarp();

  if (in.groups > 1) {
    const auto groups = static_cast<int>(in.groups);
    const int size = E / groups;
    float* const group_scores = all_group_scores[warp];
    bool* const kept = all_groups_kept[warp];
    for (int g = lane; g < groups; g += 32) {
      group_scores[g] = sum_of_two_best(choices + g * size, size);
      kept[g] = false;
    }
    __syncwarp();
    for (int i = 0; i < in.groups_kept; ++i) {
      const int g = best(group_scores, kept, groups);
      if (lane == 0 && g >= 0) kept[g] = true;
      __syncwarp();
    }
    for (int e = lane; e < E; e += 32) taken[e] = !kept[e / size];
    __syncwarp();
  }

  int chosen = -1;  // lane i holds choice i
  float chosen_sum = 0;
  for (int i = 0; i < k; ++i) {
    const int e = best(choices, taken, E);
    if (lane == 0 && e >= 0) taken[e] = true;
    __syncwarp();
    if (lane == i) chosen = e;
    chosen_sum += scores[e];
  }
  if (lane >= k) return;
  in.experts(t, lane) = chosen;
  in.weights(t, lane) = scores[chosen] / (in.normalise ? chosen_sum : 1.0f) * in.scale;
}

}  // namespace

void moe_router(const MoeRouter& in, cudaStream_t stream) {
  const Checks checks("moe_router");
  const std::int64_t T_ = in.logits.extents[0], E = in.logits.extents[1];
  const std::int64_t k = in.experts.extent(1);
  checks.expect(1 <= E && E <= kExpertsMost, "logits", "[T, E] with E from 1 to 1024",
                "E = " + std::to_string(E));
  if (in.bias) checks.shape(in.bias, "bias", "[E]", {E});
  checks.expect(1 <= in.groups && in.groups <= kGroupsMost && E % in.groups == 0, "groups",
                "from 1 to 64 and a divisor of E = " + std::to_string(E),
                std::to_string(in.groups));
  checks.expect(1 <= in.groups_kept && in.groups_kept <= in.groups, "groups_kept",
                "from 1 to groups", std::to_string(in.groups_kept));
  checks.shape(in.experts, "experts", "[T, k]", {T_, k});
  checks.expect(k <= kChoicesMost && k <= E / in.groups * in.groups_kept, "experts",
                "[T, k] with k of at most 32 and of the experts of the kept groups",
                "k = " + std::to_string(k));
  checks.shape(in.weights, "weights", "[T, k]", {T_, k});
  if (T_ == 0 || k == 0) return;
  launch("moe_router", router_kernel, dim3(static_cast<unsigned>((T_ + kTokens - 1) / kTokens)),
         dim3(kTokens * 32), 0, stream, false, in);
}

}  // namespace lockstep::kernels
