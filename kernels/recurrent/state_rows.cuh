// RowLayout: the distribution of rows of a recurrent state [R, C] over a warp's registers. kLanes
// neighbouring lanes share a row; each holds kChunks pieces of kVec elements, in float32.
//
//   column of element i of piece (chunk) c, in lane `part` of the row:  (c kLanes + part) kVec + i
//
// FastRows, for contiguous rows of an expected C: a piece is 16 bytes in memory, so the 8 lanes of
// a row read 128 contiguous bytes per instruction. AnyRows, for any C up to 256 and any strides: a
// piece is one element, a warp holds one row, and lanes beyond C are masked off.
#pragma once

#include "kernels/base/device.cuh"

namespace lockstep::kernels {

template <int kLanes_, int kVec_, int kChunks_, bool kMasked_>
struct RowLayout {
  static constexpr int kLanes = kLanes_;
  static constexpr int kVec = kVec_;
  static constexpr int kChunks = kChunks_;
  static constexpr bool kMasked = kMasked_;
  static constexpr int kCount = kVec * kChunks;     ///< elements of a row in one lane
  static constexpr int kExtent = kCount * kLanes;   ///< elements of a row, at most
  static constexpr int kRowsPerWarp = 32 / kLanes;  ///< rows that a warp's lanes hold side by side

  __device__ static int part() { return static_cast<int>(threadIdx.x % kLanes); }
  __device__ static int row_in_warp() { return static_cast<int>(threadIdx.x % 32 / kLanes); }
  __device__ static int column(int chunk) { return (chunk * kLanes + part()) * kVec; }

  /// The lane's elements in their type in memory. fetch() issues the loads; values() converts, and
  /// is the first to wait for them.
  template <class T>
  struct Raw {
    static constexpr int kPack = kMasked ? 1 : (kVec * sizeof(T) > 16 ? 16 / sizeof(T) : kVec);
    Pack<T, kPack> packs[kCount / kPack];

    __device__ void fetch(const T* row, int extent) {
      const T* const mine = row + part() * kVec;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int i = 0; i < kVec; i += kPack) {
          Pack<T, kPack>& pack = packs[(c * kVec + i) / kPack];
          if constexpr (kMasked)
            pack.value[0] = column(c) < extent ? row[column(c)] : from_float<T>(0.0f);
          else
            pack = *reinterpret_cast<const Pack<T, kPack>*>(mine + c * kLanes * kVec + i);
        }
    }
    __device__ void values(float (&x)[kCount]) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = to_float(packs[i / kPack].value[i % kPack]);
    }
  };

  /// Prefetches a row of inputs into L2; each lane names the addresses that it will read.
  template <class T>
  __device__ static void prefetch_row(const T* row) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) prefetch_to_l2(row + column(c));
  }

  /// Loads the elements of lane `part` from a full, contiguous row.
  template <Cached kCached, class T>
  __device__ static void load_part(float (&x)[kCount], const T* row, int part) {
    constexpr int kPack = kVec * sizeof(T) > 16 ? 16 / sizeof(T) : kVec;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kVec; i += kPack) {
        const auto pack = load_raw<kCached, kPack>(row + (c * kLanes + part) * kVec + i);
#pragma unroll
        for (int j = 0; j < kPack; ++j) x[c * kVec + i + j] = to_float(pack.value[j]);
      }
  }
  template <Cached kCached, class T>
  __device__ static void store_part(T* row, const float (&x)[kCount], int part) {
    constexpr int kPack = kVec * sizeof(T) > 16 ? 16 / sizeof(T) : kVec;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kVec; i += kPack) {
        Pack<T, kPack> pack;
#pragma unroll
        for (int j = 0; j < kPack; ++j) pack.value[j] = from_float<T>(x[c * kVec + i + j]);
        store_raw<kCached>(row + (c * kLanes + part) * kVec + i, pack);
      }
  }

  /// Loads the calling lane's elements of a row of `extent` elements; elements beyond are 0.
  template <Cached kCached, class T>
  __device__ static void load(float (&x)[kCount], const T* row, int extent,
                              std::int64_t stride = 1) {
    if constexpr (kMasked) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        x[c] = column(c) < extent ? to_float(row[column(c) * stride]) : 0.0f;
    } else {
      load_part<kCached>(x, row, part());
    }
  }

  template <Cached kCached, class T>
  __device__ static void store(T* row, const float (&x)[kCount], int extent,
                               std::int64_t stride = 1) {
    if constexpr (kMasked) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        if (column(c) < extent) row[column(c) * stride] = from_float<T>(x[c]);
    } else {
      store_part<kCached>(row, x, part());
    }
  }

  /// Adds x over the row's lanes; every lane gets the sum. The order of additions is fixed.
  __device__ static float sum(float x) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }

  /// own_sum() reduces kRows values x[0 ... kRows - 1] over the row's lanes at once: each step of
  /// the butterfly halves the values that a lane still carries, which takes fewer shuffles than
  /// kRows calls of sum() and adds in the same order. A lane ends with the sum number own<kRows>();
  /// kLanes / kRows neighbouring lanes own the same sum.
  template <int kRows>
  __device__ static int own() {
    return part() / (kLanes / kRows);
  }
  template <int kRows>
  __device__ static float own_sum(const float (&x)[kRows]) {
    static_assert(kLanes % kRows == 0);
    float left[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = x[i];
    int distance = kLanes / 2;
#pragma unroll
    for (int count = kRows / 2; count > 0; count /= 2, distance /= 2) {
      const bool upper = part() & distance;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float kept = upper ? left[i + count] : left[i];
        const float given = upper ? left[i] : left[i + count];
        left[i] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
      }
    }
#pragma unroll
    for (; distance > 0; distance /= 2) left[0] += __shfl_xor_sync(0xffffffffu, left[0], distance);
    return left[0];
  }
  /// x of the lanes that own number `i`, in every lane of the row.
  template <int kRows>
  __device__ static float of_owner(float x, int i) {
    return __shfl_sync(0xffffffffu, x, i * (kLanes / kRows), kLanes);
  }
  /// True in the first of the lanes that own the same number: the one that stores it.
  template <int kRows>
  __device__ static bool speaks_for_owners() {
    return part() % (kLanes / kRows) == 0;
  }

  __device__ static float dot(const float (&a)[kCount], const float (&b)[kCount]) {
    float even = 0, odd = 0;  // two chains, so that one does not wait for the other
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i % 2 == 0)
        even = fmaf(a[i], b[i], even);
      else
        odd = fmaf(a[i], b[i], odd);
    }
    return even + odd;
  }
};

/// Eight lanes share a row; together they read 128 contiguous bytes per instruction.
template <class S, int C>
constexpr int kFastVec = std::min(16 / static_cast<int>(sizeof(S)), C / 8);
template <class S, int C>
using FastRows = RowLayout<8, kFastVec<S, C>, C / (8 * kFastVec<S, C>), false>;
/// A whole warp holds a row, of up to 256 elements.
constexpr int kAnyRowsExtent = 256;
using AnyRows = RowLayout<32, 1, kAnyRowsExtent / 32, true>;

/// Whether every row of the view begins at a multiple of `bytes` and is contiguous.
template <AnyView V>
bool rows_aligned(const V& view, std::size_t bytes) {
  using T = std::remove_const_t<ElementOf<V>>;
  constexpr std::size_t last = V::rank() - 1;
  if (view.stride(last) != 1 && view.extent(last) > 1) return false;
  if (reinterpret_cast<std::uintptr_t>(view.data_handle()) % bytes != 0) return false;
  for (std::size_t i = 0; i < last; ++i)
    if (view.extent(i) > 1 && view.stride(i) * sizeof(T) % bytes != 0) return false;
  return true;
}

}  // namespace lockstep::kernels
