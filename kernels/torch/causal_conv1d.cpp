// torch.ops.lockstep.causal_conv1d_update and conv_state_shift: schemas in operators.md.
#include "reference/recurrent/causal_conv1d.hpp"
#include "kernels/torch/operator.hpp"
#include "reference/recurrent/speculative_commit.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/recurrent/causal_conv1d_update.hpp"
#include "kernels/recurrent/conv_state_shift.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

struct CausalConv1dUpdate : Arguments {
  static constexpr const char* kSchema = R"(
causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, *,
    Tensor? state_indices=None, Tensor? num_accepted_tokens=None, Tensor? query_start_loc=None,
    Tensor? parents=None, Tensor(b!)? snapshots=None, str activation="none",
    int pad_slot_id=-1) -> Tensor)";

  using Arguments::Arguments;
  const Tensor x = tensor(), conv_state = tensor(), weight = tensor();
  const MaybeTensor bias = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor(), num_accepted_tokens = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor(), parents = maybe_tensor();
  const MaybeTensor snapshots = maybe_tensor();
  const std::string activation = text();
  const std::int64_t pad_slot_id = integer();

  StateSlots slots() const { return slots_of(state_indices, {}, num_accepted_tokens, pad_slot_id); }
  std::int64_t batch_rows() const { return rows_in(query_start_loc, x); }
  bool silu() const {
    expect(activation == "none" || activation == "silu", "activation", "\"none\" or \"silu\"",
           activation);
    return activation == "silu";
  }

  Tensor meta() const { return like(x); }

  void check() const {
    expect_rank(x, "x", 2);
    expect_rank(weight, "weight", 2);
    expect_rank(conv_state, "conv_state", 3);
    const std::int64_t T = x.size(0), D = x.size(1), W = weight.size(1), C = conv_state.size(2);
    expect(2 <= W && W <= 4, "weight", "[D, W] with W from 2 to 4", weight.sizes());
    expect_shape(weight, "weight", "[D, W]", {D, W});
    expect_shape(bias, "bias", "[D]", {D});
    expect_shape(conv_state, "conv_state", "[slots, D, C]", {conv_state.size(0), D, C});
    expect(C >= W - 1, "conv_state", "at least W - 1 columns wide", conv_state.sizes());
    expect_float(x, "x");
    expect_float(conv_state, "conv_state");
    expect_float(weight, "weight");
    if (bias) expect_float(*bias, "bias");
    check_rows(query_start_loc, slots(), T);
    expect(!num_accepted_tokens || !(parents || snapshots), "num_accepted_tokens",
           "absent beside snapshots and parents", "given");
    expect_type(snapshots, conv_state.scalar_type(), "snapshots");
    expect_shape(snapshots, "snapshots", "[T, D, C]", {T, D, C});
    expect_shape(parents, "parents", "[T]", {T});
  }

  Tensor cpu() const {
    check();
    const HostTensor<2> hx(x, "x"), hweight(weight, "weight"), out = host_output<2>(x);
    const HostTensor<1> hbias(bias, "bias");
    const HostTensor<3> state(conv_state, "conv_state"), shots(snapshots, "snapshots");
    const reference::CausalConv1dInputs<float> in{
        .x = hx.in(),
        .weight = hweight.in(),
        .bias = hbias.maybe(),
        .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
        .slots = slots(),
        .activation = silu() ? reference::Activation::silu : reference::Activation::none,
        .storage = storage_of(x, conv_state)};
    const Rows rows{.tokens = x.size(0),
                    .query_start_loc = in.query_start_loc,
                    .slots = reference::conv_detail::first_slots(in.slots)};
    check_host_slots(rows, conv_state.size(0), parents || snapshots);
    check_columns(rows);
    reference::causal_conv1d_update<float>(in, state.out(), out.out(),
                                           indices_of(parents, "parents"), shots.maybe_out());
    state.write_back();
    shots.write_back();
    return out.as(x.scalar_type());
  }

  /// Checks that a speculative state has columns for the history and the drafts of each row with a
  /// slot.
  void check_columns(const Rows& rows) const {
    const auto accepted = indices_of(num_accepted_tokens, "num_accepted_tokens");
    const std::int64_t most = conv_state.size(2) - (weight.size(1) - 1) + 1;
    for (std::int64_t row = 0; accepted && row < accepted->extent(0); ++row) {
      if (source_slot(rows.slots, row, conv_state.size(0)) == kNoSlot) continue;
      expect(row_range(rows.query_start_loc, row, rows.tokens).size() <= most, "conv_state",
             "W - 1 + longest row - 1 columns wide", conv_state.sizes());
      expect((*accepted)(row) <= most, "num_accepted_tokens",
             "at most " + std::to_string(most) + ", for which conv_state has columns",
             (*accepted)(row));
    }
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(x);
    with_types(x, conv_state, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      kernels::causal_conv1d_update<T, S>(
          {.x = view_of<const T, 2>(x, "x"),
           .conv_state = view_of<S, 3>(conv_state, "conv_state"),
           .weight = mixed<2>(weight, "weight"),
           .out = view_of<T, 2>(out, "out"),
           .bias = mixed<1>(bias, "bias"),
           .silu = silu(),
           .slots = slots(),
           .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
           .snapshots = maybe_view<S, 3>(snapshots, conv_state.scalar_type(), "snapshots"),
           .parents = indices_of(parents, "parents")},
          stream());
    });
    return out;
  }
#endif
};

struct ConvStateShift : Arguments {
  static constexpr const char* kSchema = R"(
conv_state_shift(Tensor(a!) state, Tensor state_indices, Tensor num_accepted_tokens,
    int width) -> ())";

  using Arguments::Arguments;
  const Tensor state = tensor(), state_indices = tensor(), num_accepted_tokens = tensor();
  const std::int64_t width = integer();

  std::int64_t batch_rows() const { return rows_in({}, state_indices); }

  void meta() const {}

  void check() const {
    expect_rank(state, "state", 4);
    expect(2 <= width && width <= 8, "width", "from 2 to 8", width);
    expect(state.size(3) >= width - 1, "state", "[layers, slots, D, C] with C at least width - 1",
           state.sizes());
    expect(state.element_size() == 2 || state.element_size() == 4, "state",
           "of elements of 2 or 4 bytes", state.scalar_type());
    expect_rank(state_indices, "state_indices", 1);
    expect_shape(num_accepted_tokens, "num_accepted_tokens", "[N]", {state_indices.size(0)});
  }

  void cpu() const {
    check();
    const IndexView slots = host_slots(state_indices, "state_indices", state.size(1));
    const IndexView accepted = indices_of<1>(num_accepted_tokens, "num_accepted_tokens");
    with_bits<4>(state, "state", [&](const auto& pool) {
      reference::shift_conv_states(pool, slots, accepted, width);
    });
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    check();
    kernels::conv_state_shift({.data = state.data_ptr(),
                               .element_bytes = static_cast<int>(state.element_size()),
                               .layers = state.size(0),
                               .slots = state.size(1),
                               .channels = state.size(2),
                               .columns = state.size(3),
                               .layer_stride = state.stride(0),
                               .slot_stride = state.stride(1),
                               .channel_stride = state.stride(2),
                               .column_stride = state.stride(3)},
                              indices_of<1>(state_indices, "state_indices"),
                              indices_of<1>(num_accepted_tokens, "num_accepted_tokens"),
                              static_cast<int>(width), stream());
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<CausalConv1dUpdate>(m);
  add_operator<ConvStateShift>(m);
}

}  // namespace lockstep::torch_ops
