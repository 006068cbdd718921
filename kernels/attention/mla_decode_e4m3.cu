// mla_decode with products in e4m3: mla_narrow.cuh.
#include "kernels/attention/mla_decode_e4m3.hpp"

#include "kernels/attention/mla_narrow.cuh"

namespace lockstep::kernels {
namespace {

using namespace mla::narrow;

constexpr const char* kName = "mla_decode_e4m3";

void check(const Checks& checks, const MlaDecode<Bf16, E4m3>& in) {
  const std::int64_t B = in.q.extent(0), q_len = in.q.extent(1), H = in.q.extent(2);
  const std::int64_t page = in.cache.extent(1);
  checks.shape(in.q, "q", "[B, q_len, H, 576]", {B, q_len, H, kWidth});
  checks.expect(H >= 1 && q_len >= 1 && q_len * H < (1 << 20), "q",
                "[B, q_len, H, 576] with at least one row and fewer than 1048576",
                text_of(shape_of(in.q)));
  checks.shape(in.cache, "cache", "[pages, page, 576]", {in.cache.extent(0), page, kWidth});
  checks.expect(page >= 1 && page % mla::kTokens == 0, "cache",
                "[pages, page, 576] with pages of a multiple of 64 tokens",
                text_of(shape_of(in.cache)));
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
  const auto whole = [&](std::size_t i) {
    return in.cache.extent(i) <= 1 || (in.cache.stride(i) > 0 && in.cache.stride(i) % 16 == 0 &&
                                       in.cache.stride(i) < (std::int64_t{1} << 40));
  };
  checks.expect(
      in.cache.extent(0) == 0 ||
          (reinterpret_cast<std::uintptr_t>(in.cache.data_handle()) % 16 == 0 && whole(0) &&
           whole(1) && in.cache.stride(2) == 1),
      "cache", "contiguous in its last dimension, with strides of whole 16 bytes",
      "strides " + text_of(Shape<3>{in.cache.stride(0), in.cache.stride(1), in.cache.stride(2)}));
  checks.expect(in.out.stride(3) == 1 && in.out.stride(0) % 8 == 0 && in.out.stride(1) % 8 == 0 &&
                    in.out.stride(2) % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(in.out.data_handle()) % 16 == 0,
                "out", "contiguous in its last dimension, with strides of whole 16 bytes",
                "other strides");
}

}  // namespace

std::int64_t mla_decode_e4m3_workspace(const MlaDecode<Bf16, E4m3>& in) {
  return workspace(kName, in);
}

void mla_decode_e4m3(const MlaDecode<Bf16, E4m3>& in, cudaStream_t stream) {
  const Checks checks(kName);
  if (in.q.extent(0) == 0) return;
  check(checks, in);
  const std::int64_t bytes = workspace(kName, in);
  const std::int64_t given = in.workspace ? in.workspace->extent(0) : 0;
  checks.expect(
      bytes == 0 || (given >= bytes &&
                     reinterpret_cast<std::uintptr_t>(in.workspace->data_handle()) % 16 == 0),
      "workspace", "of " + std::to_string(bytes) + " bytes at a multiple of 16",
      std::to_string(given) + " bytes");
  decode<E4m3>(kName, in, stream);
}

}  // namespace lockstep::kernels
