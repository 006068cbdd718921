// The hosts of mla_decode and mla_decode_e4m3 share these parts: the check of
// arguments, the grid, and what of the arguments a kernel reads.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "kernels/attention/mla_decode.hpp"
#include "kernels/attention/mla_schedule.cuh"
#include "kernels/base/hopper.cuh"

namespace lockstep::kernels::mla {

constexpr int kWidth = 576, kValues = 512;
constexpr int kRows = 64;                         ///< rows of a block
constexpr int kPieceBytes = kRows * kValues * 2;  ///< outputs of a piece in float16
constexpr int kMostBlocks = 512;
constexpr int kMostPieces = 144;  ///< at least the number of processors of such a chip

struct Decode {
  Lengths lengths;
  const std::int32_t* table;
  std::int64_t table_strides[2];
  int page, log2_page;  ///< tokens of a page; log2_page is used if pages are smaller than tiles
  int q_len, heads, rows, row_blocks, parts;
  bool causal;
  float scale_log2;
  float fewest;  ///< Scheduler::share()
  void* out;
  std::int64_t out_strides[3];
  float* lse;
  std::int64_t lse_strides[3];
  unsigned char* pieces;
  float* piece_numbers;
  int lane;
  const void* q;
  std::int64_t q_strides[2];  ///< in bytes, of requests and rows
  const float* kv_scale;      ///< null: 1
  const unsigned char* cache;
  std::int64_t cache_strides[2];  ///< in bytes, of pages and tokens
  int pages;
};
struct Maps {
  CUtensorMap q, cache, pe;
};

/// A run of tiles of one request.
struct Item {
  int request, length;
  int first, count;  ///< tiles
  Split split;
  int piece;  ///< number of this part's piece in the split
};

inline int processors(const char* name) {
  static const int count = [&] {
    int device = 0, found = 0;
    check_cuda(cudaGetDevice(&device), name);
    check_cuda(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), name);
    return std::min(found, kMostPieces);
  }();
  return count;
}

/// Blocks of rows, and parts; `places` of pieces in the workspace.
struct Grid {
  std::int64_t row_blocks, parts;
  template <class T, class C>
  Grid(const char* name, const MlaDecode<T, C>& in)
      : row_blocks((in.q.extent(1) * in.q.extent(2) + kRows - 1) / kRows),
        parts(std::max<std::int64_t>(1, processors(name) / std::max<std::int64_t>(1, row_blocks))) {
    if (in.parts > 0) parts = std::min<std::int64_t>(parts, in.parts);
  }
  std::int64_t places() const { return parts > 1 ? 2 * parts * row_blocks : 0; }
  /// Bytes of the workspace if pieces have so many numbers in float32 beside their outputs.
  std::int64_t workspace(int numbers) const {
    return places() * (kPieceBytes + numbers * std::int64_t{sizeof(float)});
  }
};

/// q with the rows of a request as one dimension: [q_len H, B, 576].
template <class T, class C>
TensorView<const T, 3> rows_of(const MlaDecode<T, C>& in) {
  const std::int64_t q_len = in.q.extent(1), H = in.q.extent(2);
  return make_view(
      in.q.data_handle(), Shape<3>{q_len * H, in.q.extent(0), in.q.extent(3)},
      Shape<3>{H > 1 ? in.q.stride(2) : in.q.stride(1), in.q.stride(0), in.q.stride(3)});
}

/// All but the strides of the cache and the sizes of its pages.
template <class T, class C>
void check_arguments(const Checks& checks, const MlaDecode<T, C>& in, const char* tokens,
                     std::int64_t width) {
  const std::int64_t B = in.q.extent(0), q_len = in.q.extent(1), H = in.q.extent(2);
  const std::int64_t page = in.cache.extent(1);
  checks.shape(in.q, "q", "[B, q_len, H, 576]", {B, q_len, H, kWidth});
  checks.expect(H >= 1 && q_len >= 1 && q_len * H < (1 << 20), "q",
                "[B, q_len, H, 576] with at least one row and fewer than 1048576",
                text_of(shape_of(in.q)));
  checks.shape(in.cache, "cache", tokens, {in.cache.extent(0), page, width});
  checks.shape(in.block_table, "block_table", "[B, blocks]", {B, in.block_table.extent(1)});
  checks.shape(in.seq_lens, "seq_lens", "[B]", {B});
  checks.shape(in.out, "out", "[B, q_len, H, 512]", {B, q_len, H, kValues});
  checks.shape(in.lse, "lse", "[B, H, q_len]", {B, H, q_len});
  checks.expect(in.block_table.extent(1) * page < (std::int64_t{1} << 30) &&
                    in.cache.extent(0) < (std::int64_t{1} << 31) && B < (1 << 20),
                "block_table", "of fewer than 2^30 tokens, for fewer than 2^20 requests",
                text_of(shape_of(in.block_table)));
  checks.expect(0 <= in.lane && in.lane < kMlaDecodeLanes, "lane",
                "below " + std::to_string(kMlaDecodeLanes), std::to_string(in.lane));
  const bool one_step = q_len == 1 || H == 1 || in.q.stride(1) == H * in.q.stride(2);
  checks.expect(one_step && hopper::can_be_mapped(rows_of(in)), "q",
                "with the rows of a request evenly apart, of whole 16 bytes and contiguous",
                "strides " + text_of(Shape<4>{in.q.stride(0), in.q.stride(1), in.q.stride(2),
                                              in.q.stride(3)}));
  checks.expect(in.out.stride(3) == 1 && in.out.stride(0) % 8 == 0 && in.out.stride(1) % 8 == 0 &&
                    in.out.stride(2) % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(in.out.data_handle()) % 16 == 0,
                "out", "contiguous in its last dimension, with strides of whole 16 bytes",
                "other strides");
}
template <class T, class C>
void check_workspace(const Checks& checks, const MlaDecode<T, C>& in, std::int64_t bytes) {
  const std::int64_t given = in.workspace ? in.workspace->extent(0) : 0;
  checks.expect(
      bytes == 0 || (given >= bytes &&
                     reinterpret_cast<std::uintptr_t>(in.workspace->data_handle()) % 16 == 0),
      "workspace", "of " + std::to_string(bytes) + " bytes at a multiple of 16",
      std::to_string(given) + " bytes");
}

/// The root of the time for which a piece of so many rows is read and written, in 0.1 us.
inline float root_of_piece(int rows) {
  // NOLINTNEXTLINE(bugprone-integer-division): pieces are whole
  return std::sqrt(static_cast<float>((rows + 15) / 16) / 8);
}

/// The arguments of a kernel, but for `fewest`.
template <class T, class C>
Decode parameters(const MlaDecode<T, C>& in, const Grid& grid) {
  const std::int64_t pages = in.cache.extent(0), page = in.cache.extent(1);
  Decode p{};
  p.lengths = {in.seq_lens.data_handle(), in.seq_lens.stride(0), static_cast<int>(in.q.extent(0)),
               pages > 0 ? static_cast<int>(in.block_table.extent(1) * page) : 0};
  p.table = in.block_table.data_handle();
  p.table_strides[0] = in.block_table.stride(0);
  p.table_strides[1] = in.block_table.stride(1);
  p.page = static_cast<int>(page);
  p.log2_page = std::countr_zero(static_cast<unsigned>(page));
  p.q_len = static_cast<int>(in.q.extent(1));
  p.heads = static_cast<int>(in.q.extent(2));
  p.rows = p.q_len * p.heads;
  p.row_blocks = static_cast<int>(grid.row_blocks);
  p.parts = static_cast<int>(grid.parts);
  p.causal = in.causal;
  p.scale_log2 = static_cast<float>(in.softmax_scale * 1.4426950408889634);
  p.out = in.out.data_handle();
  p.lse = in.lse.data_handle();
  for (std::size_t i = 0; i < 3; ++i) {
    p.out_strides[i] = in.out.stride(i);
    p.lse_strides[i] = in.lse.stride(i);
  }
  if (in.workspace) {
    p.pieces = in.workspace->data_handle();
    p.piece_numbers = reinterpret_cast<float*>(p.pieces + grid.places() * kPieceBytes);
  }
  p.lane = in.lane;
  p.q = in.q.data_handle();
  const auto rows = rows_of(in);
  p.q_strides[0] = rows.stride(1) * std::int64_t{sizeof(T)};
  p.q_strides[1] = rows.stride(0) * std::int64_t{sizeof(T)};
  if (in.kv_scale) p.kv_scale = in.kv_scale->data_handle();
  p.cache = reinterpret_cast<const unsigned char*>(in.cache.data_handle());
  for (std::size_t i = 0; i < 2; ++i)
    p.cache_strides[i] = in.cache.stride(i) * std::int64_t{sizeof(C)};
  p.pages = static_cast<int>(pages);
  return p;
}

}  // namespace lockstep::kernels::mla
