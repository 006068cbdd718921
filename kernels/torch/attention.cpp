// torch.ops.lockstep.mla_decode: schema in reference/contract.md.
#include "kernels/torch/operator.hpp"
#include "reference/attention/mla_attention.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include <map>
#include <mutex>

#include "kernels/attention/mla_decode.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

constexpr std::int64_t kMlaWidth = 576;

struct MlaDecode : Arguments {
  static constexpr const char* kSchema = R"(
mla_decode(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, float softmax_scale, *,
    bool causal=True, int value_dim=512, Tensor? kv_scale=None) -> (Tensor out, Tensor lse))";

  using Arguments::Arguments;
  const Tensor q = tensor(), kv_cache = tensor(), block_table = tensor(), seq_lens = tensor();
  const double softmax_scale = number();
  const bool causal = flag();
  const std::int64_t value_dim = integer();
  const MaybeTensor kv_scale = maybe_tensor();

  using Result = std::tuple<Tensor, Tensor>;

  Result meta() const {
    return {at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), value_dim}, q.options()),
            at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)},
                             q.options().dtype(at::kFloat))};
  }

  void check() const {
    expect_rank(q, "q", 4);
    expect_rank(kv_cache, "kv_cache", 3);
    expect_rank(block_table, "block_table", 2);
    const std::int64_t B = q.size(0), width = q.size(3), page = kv_cache.size(1);
    expect_shape(kv_cache, "kv_cache", "[pages, page, width of q]",
                 {kv_cache.size(0), page, width});
    expect(page >= 1, "kv_cache", "[pages, page, width] with a token in each page",
           kv_cache.sizes());
    expect_shape(block_table, "block_table", "[B, blocks]", {B, block_table.size(1)});
    expect_shape(seq_lens, "seq_lens", "[B]", {B});
    expect(1 <= value_dim && value_dim <= width, "value_dim", "between 1 and the width of q",
           value_dim);
    const bool scaled = kv_cache.scalar_type() == at::kFloat8_e4m3fn;
    expect(!kv_scale || scaled, "kv_scale", "absent without a cache of float8_e4m3fn", "given");
    if (!kv_scale) return;
    expect_type(kv_scale, at::kFloat, "kv_scale");
    expect(kv_scale->numel() == 1, "kv_scale", "one number", kv_scale->sizes());
  }

  Result cpu() const {
    check();
    const std::int64_t B = q.size(0), page = kv_cache.size(1);
    const IndexView lengths = indices_of<1>(seq_lens, "seq_lens");
    const IndexTable table = indices_of<2>(block_table, "block_table");
    for (std::int64_t b = 0; b < B; ++b) {
      expect(0 <= lengths(b) && lengths(b) <= table.extent(1) * page, "seq_lens",
             "between 0 and what block_table has room for", lengths(b));
      for (std::int64_t i = 0; i * page < lengths(b); ++i)
        expect(0 <= table(b, i) && table(b, i) < kv_cache.size(0), "block_table",
               "numbers of pages before a request's end", table(b, i));
    }
    const HostTensor<4> hq{MaybeTensor(q)};
    const HostTensor<3> cache{MaybeTensor(kv_cache)};
    const auto [out, lse] = meta();
    const HostTensor<4> hout{MaybeTensor(at::zeros(out.sizes(), lse.options()))};
    const HostTensor<3> hlse{MaybeTensor(at::zeros(lse.sizes(), lse.options()))};
    const float scale = kv_scale ? kv_scale->item<float>() : 1.0f;
    reference::mla_decode<float>({.q = hq.in(),
                                  .cache = cache.in(),
                                  .block_table = table,
                                  .seq_lens = lengths,
                                  .softmax_scale = softmax_scale,
                                  .causal = causal,
                                  .value_dim = value_dim,
                                  .kv_scale = scale,
                                  .q_scale = q.scalar_type() == at::kFloat8_e4m3fn ? scale : 1.0f},
                                 hout.out(), hlse.out());
    return {hout.as(out.scalar_type()), hlse.as(at::kFloat)};
  }

#ifdef LOCKSTEP_HAS_CUDA
  Result cuda() const {
    check();
    expect(q.size(3) == kMlaWidth, "q", "[B, q_len, H, 576] on a GPU", q.sizes());
    expect(value_dim == 512, "value_dim", "512 on a GPU", value_dim);
    expect_type(kv_cache, q.scalar_type(), "kv_cache");
    const auto results = meta();
    if (q.scalar_type() == at::kBFloat16) return run<kernels::Bf16>(results);
#ifdef LOCKSTEP_ALL_SHAPES
    if (q.scalar_type() == at::kHalf) return run<kernels::Fp16>(results);
#endif
    expect(false, "q", "bfloat16 on a GPU, or float16 in a build with LOCKSTEP_ALL_SHAPES",
           q.scalar_type());
    return results;
  }

  template <class T>
  Result run(const Result& results) const {
    const std::int64_t H = q.size(2), bytes = q.element_size();
    // The kernel wants a request's rows evenly apart, and whole 16 bytes.
    bool rows = q.stride(3) == 1 && reinterpret_cast<std::uintptr_t>(q.data_ptr()) % 16 == 0;
    for (std::int64_t i = 0; i < 3; ++i) rows = rows && q.stride(i) * bytes % 16 == 0;
    rows = rows && (q.size(1) == 1 || H == 1 || q.stride(1) == H * q.stride(2));
    const Tensor queries = rows ? q : q.clone(at::MemoryFormat::Contiguous);
    const auto& [out, lse] = results;
    kernels::MlaDecode<T> in{.q = view_of<const T, 4>(queries, "q"),
                             .cache = view_of<const T, 3>(kv_cache, "kv_cache"),
                             .block_table = indices_of<2>(block_table, "block_table"),
                             .seq_lens = indices_of<1>(seq_lens, "seq_lens"),
                             .out = view_of<T, 4>(out, "out"),
                             .lse = view_of<float, 3>(lse, "lse"),
                             .softmax_scale = static_cast<float>(softmax_scale),
                             .causal = causal,
                             .lane = lane_of(stream())};
    const Tensor workspace =
        at::empty({kernels::mla_decode_workspace(in)}, q.options().dtype(at::kByte));
    in.workspace = view_of<unsigned char, 1>(workspace, "workspace");
    kernels::mla_decode<T>(in, stream());
    return results;
  }

  /// Calls on different streams may run at the same time. A captured call has its stream's lane.
  static int lane_of(cudaStream_t stream) {
    static std::mutex mutex;
    static std::map<cudaStream_t, int> lanes;
    const std::lock_guard lock(mutex);
    const auto [place, is_new] = lanes.emplace(stream, static_cast<int>(lanes.size()));
    return place->second;
  }
#endif
};

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<MlaDecode>(m);
}

}  // namespace
}  // namespace lockstep::torch_ops
