// torch.ops.lockstep.causal_conv1d and ssd_prefill: schemas in operators.md.
#include <climits>

#include "kernels/torch/operator.hpp"
#include "kernels/torch/prefill_arguments.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/mamba2.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/recurrent/causal_conv1d.hpp"
#include "kernels/recurrent/ssd_prefill.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

/// The state; without one an empty float32 tensor, which gives its type.
Tensor state_or_float(const MaybeTensor& state, const Tensor& x) {
  return state ? *state : at::empty({0}, x.options().dtype(at::kFloat));
}

struct CausalConv1d : Arguments {
  static constexpr const char* kSchema = R"(
causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? conv_state, *,
    Tensor? query_start_loc=None, Tensor? context_lengths=None, Tensor? state_indices=None,
    Tensor? has_initial_state=None, str activation="none", int pad_slot_id=-1) -> Tensor)";

  using Arguments::Arguments;
  const Tensor x = tensor(), weight = tensor();
  const MaybeTensor bias = maybe_tensor(), conv_state = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor(), context_lengths = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor(), has_initial_state = maybe_tensor();
  const std::string activation = text();
  const std::int64_t pad_slot_id = integer();

  PrefillArguments rows() const {
    return {x.dim() == 3,  query_start_loc,   context_lengths,
            state_indices, has_initial_state, pad_slot_id};
  }
  std::int64_t batch_rows() const { return rows().count(x); }
  bool silu() const {
    expect(activation == "none" || activation == "silu", "activation", "\"none\" or \"silu\"",
           activation);
    return activation == "silu";
  }

  Tensor meta() const { return like(x); }

  void check() const {
    rows().check(x, "x", 2, conv_state.has_value());
    expect_rank(weight, "weight", 2);
    const std::int64_t D = x.size(-1), W = weight.size(1);
    expect(2 <= W && W <= 4, "weight", "[D, W] with W from 2 to 4", weight.sizes());
    expect_shape(weight, "weight", "[D, W]", {D, W});
    expect_shape(bias, "bias", "[D]", {D});
    if (!conv_state) return;
    expect_float(*conv_state, "conv_state");
    expect_rank(*conv_state, "conv_state", 3);
    const std::int64_t C = conv_state->size(2);
    expect_shape(*conv_state, "conv_state", "[slots, D, C]", {conv_state->size(0), D, C});
    expect(C == W - 1 || C == W, "conv_state", "W - 1 or W columns wide", conv_state->sizes());
  }

  Tensor cpu() const {
    check();
    rows().check_host(x, conv_state);
    const Tensor tokens = rows().packed(x);
    const HostTensor<2> hx(tokens, "x"), hweight(weight, "weight"), out = host_output<2>(tokens);
    const HostTensor<1> hbias(bias, "bias");
    const HostTensor<3> state(conv_state, "conv_state");
    reference::CausalConv1dInputs<float> in{
        .x = hx.in(),
        .weight = hweight.in(),
        .bias = hbias.maybe(),
        .slots = rows().slots(),
        .has_initial_state = rows().resumes(),
        .activation = silu() ? reference::Activation::silu : reference::Activation::none,
        .storage = storage_of(x, state_or_float(conv_state, x))};
    if (rows().padded) {
      const Shape<3> shape{x.size(0), x.size(1), x.size(2)};
      reference::causal_conv1d_padded<float>(
          in, make_view(in.x.data_handle(), shape), indices_of(context_lengths, "context_lengths"),
          state.maybe_out(), make_view(out.out().data_handle(), shape));
    } else {
      in.query_start_loc = indices_of(query_start_loc, "query_start_loc");
      reference::causal_conv1d<float>(in, state.maybe_out(), out.out());
    }
    state.write_back();
    return out.as(x.scalar_type()).view(x.sizes());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(x), tokens = rows().packed(x);
    const Tensor state = state_or_float(conv_state, x);
    with_types(x, state, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      kernels::causal_conv1d<T, S>(
          {.x = view_of<const T, 2>(tokens, "x"),
           .weight = mixed<2>(weight, "weight"),
           .out = view_of<T, 2>(rows().packed(out), "out"),
           .conv_state = maybe_view<S, 3>(conv_state, state.scalar_type(), "conv_state"),
           .bias = mixed<1>(bias, "bias"),
           .silu = silu(),
           .batch = rows().batch(x)},
          stream());
    });
    return out;
  }
#endif
};

struct SsdPrefill : Arguments {
  static constexpr const char* kSchema = R"(
ssd_prefill(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!)? state, *,
    Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False,
    float? dt_min=None, float? dt_max=None, Tensor? query_start_loc=None,
    Tensor? context_lengths=None, Tensor? state_indices=None, Tensor? has_initial_state=None,
    Tensor(b!)? boundary_states=None, int boundary_every=0, int chunk_size=128,
    int pad_slot_id=-1) -> Tensor)";

  using Arguments::Arguments;
  const Tensor x = tensor(), dt = tensor(), A = tensor(), B = tensor(), C = tensor();
  const MaybeTensor state = maybe_tensor();
  const MaybeTensor D = maybe_tensor(), z = maybe_tensor(), dt_bias = maybe_tensor();
  const bool dt_softplus = flag();
  const MaybeNumber dt_min = maybe_number(), dt_max = maybe_number();
  const MaybeTensor query_start_loc = maybe_tensor(), context_lengths = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor(), has_initial_state = maybe_tensor();
  const MaybeTensor boundary_states = maybe_tensor();
  const std::int64_t boundary_every = integer(), chunk_size = integer(), pad_slot_id = integer();

  PrefillArguments rows() const {
    return {x.dim() == 4,  query_start_loc,   context_lengths,
            state_indices, has_initial_state, pad_slot_id};
  }
  std::int64_t batch_rows() const { return rows().count(x); }
  std::int64_t H() const { return x.size(-2); }
  std::int64_t P() const { return x.size(-1); }
  MaybeTensor wide_D() const { return repeated(D, "D", {H(), P()}, 1); }

  Tensor meta() const { return like(x); }

  void check() const {
    rows().check(x, "x", 3, state.has_value());
    const std::int64_t last = x.dim();  // B and C [..., G, N] have as many dimensions as x
    expect_rank(B, "B", last);
    const std::int64_t G = B.size(-2), N = B.size(-1);
    std::vector<std::int64_t> steps = x.sizes().vec(), groups = x.sizes().vec();
    steps.pop_back();
    groups[static_cast<std::size_t>(last) - 2] = G;
    groups[static_cast<std::size_t>(last) - 1] = N;
    expect(G > 0 && H() % G == 0, "B", "[.., G, N] with H a multiple of G", B.sizes());
    expect_shape(B, "B", "[.., G, N]", groups);
    expect_shape(C, "C", "[.., G, N]", groups);
    expect_shape(dt, "dt", "[.., H]", steps);
    expect_shape(A, "A", "[H]", {H()});
    expect_type(A, at::kFloat, "A");
    expect_shape(z, "z", "that of x", x.sizes());
    expect_shape(dt_bias, "dt_bias", "[H]", {H()});
    if (state) {
      expect_rank(*state, "state", 4);
      expect_shape(*state, "state", "[slots, H, P, N]", {state->size(0), H(), P(), N});
    }
    expect(chunk_size >= 1, "chunk_size", "at least 1", chunk_size);
    expect(boundary_states.has_value() == (boundary_every > 0), "boundary_every",
           "at least 1 with boundary_states, and 0 without", boundary_every);
    expect(boundary_every <= INT_MAX, "boundary_every", "a number of 32 bits", boundary_every);
    expect(!boundary_states || !rows().padded, "boundary_states", "absent in a padded batch",
           "given");
    check_boundary_rows(boundary_states, batch_rows());
    if (!boundary_states) return;
    expect(state.has_value(), "boundary_states", "given with a state", "without");
    expect_type(boundary_states, state->scalar_type(), "boundary_states");
    expect_rank(*boundary_states, "boundary_states", 4);
    expect_shape(*boundary_states, "boundary_states", "[boundaries, H, P, N]",
                 {boundary_states->size(0), H(), P(), N});
  }

  Tensor cpu() const {
    check();
    rows().check_host(x, state);
    rows().check_boundaries(boundary_states, boundary_every, x.size(0));
    const Tensor tokens = rows().packed(x);
    const std::int64_t N = B.size(-1);
    const HostTensor<3> hx(tokens, "x"), hB(rows().packed(B), "B"), hC(rows().packed(C), "C"),
        hdt(repeated(rows().packed(dt), "dt", tokens.sizes(), 2), "dt"),
        hA(repeated(A, "A", {H(), P(), N}, 1), "A"), hz(rows().packed(z), "z"),
        out = host_output<3>(tokens);
    const HostTensor<2> hD(wide_D(), "D"),
        hbias(repeated(dt_bias, "dt_bias", {H(), P()}, 1), "dt_bias");
    const HostTensor<4> hstate(state, "state"), hboundary(boundary_states, "boundary_states");
    reference::Mamba2Inputs<float> in{.x = hx.in(),
                                      .dt = hdt.in(),
                                      .A = hA.in(),
                                      .B = hB.in(),
                                      .C = hC.in(),
                                      .D = hD.maybe(),
                                      .z = hz.maybe(),
                                      .dt_bias = hbias.maybe(),
                                      .dt_softplus = dt_softplus,
                                      .dt_min = as_float(dt_min),
                                      .dt_max = as_float(dt_max),
                                      .rows = {.slots = rows().slots(),
                                               .has_initial_state = rows().resumes(),
                                               .storage = storage_of(x, state_or_float(state, x))}};
    const auto prefill = [&](const auto& one, const auto& pool, const auto& result) {
      reference::ssd_prefill<float>(one, chunk_size, pool, result);
    };
    if (rows().padded) {
      run_padded(in, hstate.maybe_out(), out.out(), prefill);
    } else {
      in.rows.query_start_loc = indices_of(query_start_loc, "query_start_loc");
      std::optional<BoundaryStates<float>> boundary;
      if (boundary_states) boundary = {hboundary.out(), boundary_every};
      reference::ssd_prefill<float>(in, chunk_size, hstate.maybe_out(), out.out(), boundary);
    }
    hstate.write_back();
    hboundary.write_back();
    return out.as(x.scalar_type()).view(x.sizes());
  }

  template <class Prefill>
  void run_padded(const reference::Mamba2Inputs<float>& in,
                  const std::optional<TensorView<float, 4>>& pool, const TensorView<float, 3>& out,
                  const Prefill& prefill) const {
    const auto in_rows = [&](const auto& view) {
      return make_view(
          view.data_handle(), Shape<4>{x.size(0), x.size(1), view.extent(1), view.extent(2)},
          Shape<4>{view.stride(0) * x.size(1), view.stride(0), view.stride(1), view.stride(2)});
    };
    reference::PaddedMamba2Inputs<float> padded{
        .common = in,
        .x = in_rows(in.x),
        .dt = in_rows(in.dt),
        .B = in_rows(in.B),
        .C = in_rows(in.C),
        .context_lengths = indices_of(context_lengths, "context_lengths")};
    if (in.z) padded.z = in_rows(*in.z);
    padded.common.z.reset();
    reference::mamba2_padded(padded, pool, in_rows(out), prefill);
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(x), types = state_or_float(state, x);
    // A padded batch whose rows lie unevenly is copied: the copies live until the launch.
    const Tensor px = rows().packed(x), pdt = rows().packed(dt), pB = rows().packed(B),
                 pC = rows().packed(C);
    const MaybeTensor pz = rows().packed(z);
    with_types(x, types, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      const auto tokens = [&](const Tensor& tensor, const char* argument) {
        expect_type(tensor, x.scalar_type(), argument);
        return view_of<const T, 3>(tensor, argument);
      };
      kernels::SsdPrefill<T, S> in{.x = tokens(px, "x"),
                                   .dt = mixed<2>(pdt, "dt"),
                                   .A = mixed<1>(A, "A"),
                                   .B = tokens(pB, "B"),
                                   .C = tokens(pC, "C"),
                                   .out = view_of<T, 3>(rows().packed(out), "out"),
                                   .state = maybe_view<S, 4>(state, types.scalar_type(), "state"),
                                   .D = mixed<2>(wide_D(), "D"),
                                   .dt_bias = mixed<1>(dt_bias, "dt_bias"),
                                   .dt_softplus = dt_softplus,
                                   .dt_min = as_float(dt_min),
                                   .dt_max = as_float(dt_max),
                                   .batch = rows().batch(x),
                                   .boundary_states = maybe_view<S, 4>(
                                       boundary_states, types.scalar_type(), "boundary_states"),
                                   .boundary_every = boundary_every};
      if (pz) in.z = tokens(*pz, "z");
      Tensor workspace;
      if (const std::int64_t bytes = kernels::prefill_workspace(in); bytes > 0) {
        workspace = at::empty({bytes}, x.options().dtype(at::kByte));
        in.workspace = view_of<unsigned char, 1>(workspace, "workspace");
      }
      kernels::ssd_prefill<T, S>(in, stream());
    });
    return out;
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<CausalConv1d>(m);
  add_operator<SsdPrefill>(m);
}

}  // namespace lockstep::torch_ops
