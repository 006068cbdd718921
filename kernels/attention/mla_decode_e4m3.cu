// mla_decode with products in e4m3: mla_narrow.cuh.
#include "kernels/attention/mla_decode_e4m3.hpp"

#include "kernels/attention/mla_narrow.cuh"

namespace lockstep::kernels {
namespace {

using namespace mla;
using namespace mla::narrow;

constexpr const char* kName = "mla_decode_e4m3";

void check(const Checks& checks, const MlaDecode<Bf16, E4m3>& in) {
  check_arguments(checks, in, "[pages, page, 576]", kWidth);
  const std::int64_t page = in.cache.extent(1);
  checks.expect(page >= 1 && page % kTokens == 0, "cache",
                "[pages, page, 576] with pages of a multiple of 64 tokens",
                text_of(shape_of(in.cache)));
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
}

}  // namespace

std::int64_t mla_decode_e4m3_workspace(const MlaDecode<Bf16, E4m3>& in) {
  return workspace(kName, in);
}

void mla_decode_e4m3(const MlaDecode<Bf16, E4m3>& in, cudaStream_t stream) {
  const Checks checks(kName);
  if (in.q.extent(0) == 0) return;
  check(checks, in);
  check_workspace(checks, in, workspace(kName, in));
  decode<E4m3>(kName, in, stream);
}

}  // namespace lockstep::kernels
