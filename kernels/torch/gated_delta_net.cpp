// torch.ops.lockstep.gated_delta_net_decode: schema in kernels/torch/operators.md.
#include "kernels/torch/layer_step.hpp"
#include "reference/recurrent/gated_delta_net_verify.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/models/gated_delta_net_verify.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

struct GatedDeltaNetDecode : Arguments {
  static constexpr const char* kSchema = R"(
gated_delta_net_decode(Tensor x, Tensor z, Tensor a, Tensor b, Tensor(a!) conv_state,
    Tensor(b!) state, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor dt_bias,
    Tensor norm_weight, *, float? eps=None, Tensor? state_indices=None,
    int pad_slot_id=-1, int parts=0, Tensor? query_start_loc=None,
    Tensor? num_accepted_tokens=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor x = tensor(), z = tensor(), a = tensor(), b = tensor();
  const Tensor conv_state = tensor(), state = tensor(), conv_weight = tensor();
  const MaybeTensor conv_bias = maybe_tensor();
  const Tensor A_log = tensor(), dt_bias = tensor(), norm_weight = tensor();
  const float eps = as_float(maybe_number()).value_or(1e-6f);
  const MaybeTensor state_indices = maybe_tensor();
  const std::int64_t pad_slot_id = integer(), parts = integer();
  const MaybeTensor query_start_loc = maybe_tensor(), num_accepted_tokens = maybe_tensor();

  const LayerRows rows{
      x, z, conv_state, state, state_indices, query_start_loc, num_accepted_tokens, pad_slot_id};

  std::int64_t batch_rows() const { return rows_in(query_start_loc, x); }

  Tensor meta() const { return like(z); }

  void check() const {
    expect_states(state, "[slots, HV, V, K]");
    expect_float(state, "state");
    expect_rank(x, "x", 2);
    const std::int64_t T = x.size(0), D = x.size(1);
    const std::int64_t HV = state.size(1), V = state.size(2), K = state.size(3);
    const std::int64_t keys = D - HV * V, H = keys / (2 * K);
    expect(H > 0 && HV > 0 && keys == 2 * H * K && HV % H == 0, "x",
           "[T, 2 H K + HV V] with HV a multiple of H, for state [slots, HV, V, K]", x.sizes());
    expect_shape(z, "z", "[T, HV, V]", {T, HV, V});
    expect_shape(a, "a", "[T, HV]", {T, HV});
    expect_shape(b, "b", "[T, HV]", {T, HV});
    rows.check(conv_weight, conv_bias, "D");
    expect_shape(A_log, "A_log", "[HV]", {HV});
    expect_shape(dt_bias, "dt_bias", "[HV]", {HV});
    expect_shape(norm_weight, "norm_weight", "[V]", {V});
    for (const auto& [tensor, argument] : {std::pair{a, "a"},
                                           {b, "b"},
                                           {conv_weight, "conv_weight"},
                                           {A_log, "A_log"},
                                           {dt_bias, "dt_bias"},
                                           {norm_weight, "norm_weight"}})
      expect_float(tensor, argument);
    expect(parts == 0 || parts == 1 || parts == 2 || parts == 4 || parts == 8, "parts",
           "0, 1, 2, 4 or 8", parts);
  }

  Tensor cpu() const {
    check();
    const HostTensor<2> hx(x, "x"), ha(a, "a"), hb(b, "b"), weight(conv_weight, "conv_weight");
    const HostTensor<3> hz(z, "z");
    const HostTensor<1> bias(conv_bias, "conv_bias"), decay(A_log, "A_log");
    const HostTensor<1> shift(dt_bias, "dt_bias"), norm(norm_weight, "norm_weight");
    const reference::GatedDeltaNetDecode<float> net{.x = hx.in(),
                                                    .z = hz.in(),
                                                    .a = ha.in(),
                                                    .b = hb.in(),
                                                    .conv_weight = weight.in(),
                                                    .A_log = decay.in(),
                                                    .dt_bias = shift.in(),
                                                    .norm_weight = norm.in(),
                                                    .conv_bias = bias.maybe(),
                                                    .slots = rows.slots(),
                                                    .eps = eps,
                                                    .storage = storage_of(x, state),
                                                    .window = format_of(conv_state)};
    return rows.on_host([&](const auto&... states_and_out) {
      if (rows.verifies())
        reference::gated_delta_net_verify<float>(net, *rows.starts(), states_and_out...);
      else
        reference::gated_delta_net_decode<float>(net, states_and_out...);
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
    const kernels::GatedDeltaNetDecode<S> net{
        .x = view_of<const Bf16, 2>(x, "x"),
        .z = view_of<const Bf16, 3>(z, "z"),
        .a = mixed<2>(a, "a"),
        .b = mixed<2>(b, "b"),
        .conv_state = view_of<Bf16, 3>(conv_state, "conv_state"),
        .state = view_of<S, 4>(state, "state"),
        .conv_weight = mixed<2>(conv_weight, "conv_weight"),
        .A_log = mixed<1>(A_log, "A_log"),
        .dt_bias = mixed<1>(dt_bias, "dt_bias"),
        .norm_weight = mixed<1>(norm_weight, "norm_weight"),
        .out = view_of<Bf16, 3>(out, "out"),
        .conv_bias = mixed<1>(conv_bias, "conv_bias"),
        .slots = rows.slots(),
        .eps = eps,
        .parts = static_cast<int>(parts)};
    if (rows.verifies())
      kernels::gated_delta_net_verify<S>(net, *rows.starts(), stream());
    else
      kernels::gated_delta_net_decode<S>(net, stream());
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<GatedDeltaNetDecode>(m);
}

}  // namespace lockstep::torch_ops
