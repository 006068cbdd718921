// torch.ops.lockstep.mamba2_mixer_decode: schema in kernels/torch/operators.md.
#include "kernels/torch/layer_step.hpp"
#include "reference/recurrent/mamba2_mixer_verify.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/models/mamba2_mixer_verify.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

struct Mamba2MixerDecode : Arguments {
  static constexpr const char* kSchema = R"(
mamba2_mixer_decode(Tensor x, Tensor z, Tensor dt, Tensor(a!) conv_state, Tensor(b!) state,
    Tensor conv_weight, Tensor A, Tensor D, Tensor dt_bias, Tensor norm_weight, *,
    Tensor? conv_bias=None, float? eps=None, Tensor? state_indices=None, int pad_slot_id=-1,
    int parts=0, Tensor? query_start_loc=None, Tensor? num_accepted_tokens=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor x = tensor(), z = tensor(), dt = tensor();
  const Tensor conv_state = tensor(), state = tensor(), conv_weight = tensor();
  const Tensor A = tensor(), D = tensor(), dt_bias = tensor(), norm_weight = tensor();
  const MaybeTensor conv_bias = maybe_tensor();
  const float eps = as_float(maybe_number()).value_or(1e-5f);
  const MaybeTensor state_indices = maybe_tensor();
  const std::int64_t pad_slot_id = integer(), parts = integer();

  const MaybeTensor query_start_loc = maybe_tensor(), num_accepted_tokens = maybe_tensor();
  const LayerRows rows{
      x, z, conv_state, state, state_indices, query_start_loc, num_accepted_tokens, pad_slot_id};

  std::int64_t batch_rows() const { return rows_in(query_start_loc, x); }

  Tensor meta() const { return like(z); }

  void check() const {
    expect_states(state, "[slots, H, P, N]");
    expect_float(state, "state");
    expect_rank(x, "x", 2);
    const std::int64_t T = x.size(0), channels = x.size(1);
    const std::int64_t H = state.size(1), P = state.size(2), N = state.size(3);
    const std::int64_t vectors = channels - H * P, G = vectors / (2 * N);
    expect(G > 0 && H > 0 && vectors == 2 * G * N && H % G == 0, "x",
           "[T, H P + 2 G N] with H a multiple of G, for state [slots, H, P, N]", x.sizes());
    rows.check(conv_weight, conv_bias, "H P + 2 G N");
    expect_shape(z, "z", "[T, H, P]", {T, H, P});
    expect_shape(dt, "dt", "[T, H]", {T, H});
    for (const auto& [tensor, argument] : {std::pair{A, "A"}, {D, "D"}, {dt_bias, "dt_bias"}})
      expect_shape(tensor, argument, "[H]", {H});
    expect_shape(norm_weight, "norm_weight", "[H P]", {H * P});
    expect_type(A, at::kFloat, "A");
    for (const auto& [tensor, argument] : {std::pair{dt, "dt"},
                                           {conv_weight, "conv_weight"},
                                           {D, "D"},
                                           {dt_bias, "dt_bias"},
                                           {norm_weight, "norm_weight"}})
      expect_float(tensor, argument);
    const bool known = parts == 1 || parts == 2 || parts == 4 || parts == 8 || parts == 16;
    expect(parts == 0 || known, "parts", "0, 1, 2, 4, 8 or 16", parts);
  }

  Tensor cpu() const {
    check();
    const HostTensor<2> hx(x, "x"), hdt(dt, "dt"), weight(conv_weight, "conv_weight");
    const HostTensor<3> hz(z, "z");
    const HostTensor<1> bias(conv_bias, "conv_bias"), rates(A, "A"), skip(D, "D");
    const HostTensor<1> shift(dt_bias, "dt_bias"), norm(norm_weight, "norm_weight");
    const reference::Mamba2MixerDecode<float> mixer{.x = hx.in(),
                                                    .z = hz.in(),
                                                    .dt = hdt.in(),
                                                    .conv_weight = weight.in(),
                                                    .A = rates.in(),
                                                    .D = skip.in(),
                                                    .dt_bias = shift.in(),
                                                    .norm_weight = norm.in(),
                                                    .conv_bias = bias.maybe(),
                                                    .slots = rows.slots(),
                                                    .eps = eps,
                                                    .storage = storage_of(x, state),
                                                    .window = format_of(conv_state)};
    return rows.on_host([&](const auto&... states_and_out) {
      if (rows.verifies())
        reference::mamba2_mixer_verify<float>(mixer, *rows.starts(), states_and_out...);
      else
        reference::mamba2_mixer_decode<float>(mixer, states_and_out...);
    });
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(z);
    rows.by_state([&](auto state_type) { launch<decltype(state_type)>(out); });
    return out;
  }

  template <class S>
  void launch(const Tensor& out) const {
    using kernels::Bf16;
    const kernels::Mamba2MixerDecode<S> mixer{
        .x = view_of<const Bf16, 2>(x, "x"),
        .z = view_of<const Bf16, 3>(z, "z"),
        .dt = mixed<2>(dt, "dt"),
        .conv_state = view_of<Bf16, 3>(conv_state, "conv_state"),
        .state = view_of<S, 4>(state, "state"),
        .conv_weight = mixed<2>(conv_weight, "conv_weight"),
        .A = mixed<1>(A, "A"),
        .D = mixed<1>(D, "D"),
        .dt_bias = mixed<1>(dt_bias, "dt_bias"),
        .norm_weight = mixed<1>(norm_weight, "norm_weight"),
        .out = view_of<Bf16, 3>(out, "out"),
        .conv_bias = mixed<1>(conv_bias, "conv_bias"),
        .slots = rows.slots(),
        .eps = eps,
        .parts = static_cast<int>(parts)};
    if (rows.verifies())
      kernels::mamba2_mixer_verify<S>(mixer, *rows.starts(), stream());
    else
      kernels::mamba2_mixer_decode<S>(mixer, stream());
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<Mamba2MixerDecode>(m);
}

}  // namespace lockstep::torch_ops
