// The operators torch.ops.lockstep.*, with the schemas of reference/contract.md: CUDA tensors go to
// the kernels on the current stream, CPU tensors to the references in float with the rounding of
// the tensors' types, and torch.compile sees shapes (Meta). The only file of kernels/ that knows
// PyTorch.
//
// An operator is a struct: its schema, its arguments, which are read from the dispatcher's stack in
// the order of the schema, and what it does: cpu(), cuda(), meta(). A new one is added to the list
// at the file's foot.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <set>

#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"
#include "reference/recurrent/mamba2.hpp"
#include "reference/recurrent/scaled_state.hpp"
#include "reference/tensors/array.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/recurrent/causal_conv1d_update.hpp"
#include "kernels/recurrent/conv_state_shift.hpp"
#include "kernels/recurrent/gated_delta_rule_update.hpp"
#include "kernels/recurrent/selective_state_update.hpp"
#include "kernels/recurrent/shapes.hpp"
#include "kernels/recurrent/state_copy.hpp"
#endif

namespace lockstep {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeNumber = std::optional<double>;

// --- Arguments ----------------------------------------------------------------------------------

/// The arguments of a call, one after the other, in the order of the schema. An operator derives
/// from it, and its members take theirs.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack)
      : next_(stack.end() - static_cast<std::ptrdiff_t>(schema.arguments().size())) {
    for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
      if (!next_[static_cast<std::ptrdiff_t>(i)].isTensor()) continue;
      const auto place = next_[static_cast<std::ptrdiff_t>(i)].toTensor().device();
      if (!device_) device_ = place;
      TORCH_CHECK(place == *device_, schema.arguments()[i].name(), " is expected to be on ",
                  *device_, "; got ", place);
    }
  }
  at::Device device() const { return *device_; }

 protected:
  Tensor tensor() { return (next_++)->toTensor(); }
  MaybeTensor maybe_tensor() { return (next_++)->toOptional<Tensor>(); }
  MaybeNumber maybe_number() { return (next_++)->toOptional<double>(); }
  std::optional<std::int64_t> maybe_integer() { return (next_++)->toOptional<std::int64_t>(); }
  std::int64_t integer() { return (next_++)->toInt(); }
  bool flag() { return (next_++)->toBool(); }
  std::string text() { return (next_++)->toStringRef(); }

 private:
  torch::jit::Stack::const_iterator next_;
  std::optional<at::Device> device_;
};

/// "x is expected to be …; got …"
template <class Expected, class Got>
void expect(bool holds, const char* argument, const Expected& expected, const Got& got) {
  TORCH_CHECK(holds, argument, " is expected to be ", expected, "; got ", got);
}

void expect_shape(const Tensor& tensor, const char* argument, const char* letters,
                  at::IntArrayRef shape) {
  TORCH_CHECK(tensor.sizes() == shape, argument, " is expected to be ", letters, " = ", shape,
              "; got ", tensor.sizes());
}
void expect_shape(const MaybeTensor& tensor, const char* argument, const char* letters,
                  at::IntArrayRef shape) {
  if (tensor) expect_shape(*tensor, argument, letters, shape);
}

void expect_rank(const Tensor& tensor, const char* argument, std::int64_t rank) {
  TORCH_CHECK(tensor.dim() == rank, argument, " is expected to have ", rank, " dimensions; got ",
              tensor.sizes());
}

void expect_float(const Tensor& tensor, const char* argument) {
  const auto type = tensor.scalar_type();
  expect(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, argument,
         "float32, bfloat16 or float16", type);
}

void expect_type(const MaybeTensor& tensor, at::ScalarType type, const char* argument) {
  if (tensor) expect(tensor->scalar_type() == type, argument, type, tensor->scalar_type());
}

/// Where the first is given, so are the others, or none of them.
void expect_together(const MaybeTensor& a, const MaybeTensor& b, const char* arguments) {
  expect(a.has_value() == b.has_value(), arguments, "both given, or neither", "one of them");
}

// --- Tensors as views ---------------------------------------------------------------------------

template <class T, std::size_t Rank>
TensorView<T, Rank> view_of(const Tensor& tensor, const char* argument) {
  expect_rank(tensor, argument, Rank);
  Shape<Rank> extents{}, strides{};
  for (std::size_t i = 0; i < Rank; ++i) {
    extents[i] = tensor.size(static_cast<std::int64_t>(i));
    strides[i] = tensor.stride(static_cast<std::int64_t>(i));
  }
  return make_view(static_cast<T*>(tensor.data_ptr()), extents, strides);
}

template <std::size_t Rank>
TensorView<const std::int32_t, Rank> indices_of(const Tensor& tensor, const char* argument) {
  expect_type(tensor, at::kInt, argument);
  return view_of<const std::int32_t, Rank>(tensor, argument);
}
template <std::size_t Rank = 1>
std::optional<TensorView<const std::int32_t, Rank>> indices_of(const MaybeTensor& tensor,
                                                               const char* argument) {
  if (!tensor) return {};
  return indices_of<Rank>(*tensor, argument);
}

StateSlots slots_of(const MaybeTensor& state_indices, const MaybeTensor& state_out_indices,
                    const MaybeTensor& num_accepted_tokens, std::int64_t pad_slot_id) {
  StateSlots slots{.pad_slot_id = static_cast<std::int32_t>(pad_slot_id)};
  expect(slots.pad_slot_id == pad_slot_id, "pad_slot_id", "a number of 32 bits", pad_slot_id);
  if (state_indices && state_indices->dim() == 2)
    slots.table = indices_of<2>(state_indices, "state_indices");
  else
    slots.indices = indices_of(state_indices, "state_indices");
  slots.out_indices = indices_of(state_out_indices, "state_out_indices");
  slots.num_accepted = indices_of(num_accepted_tokens, "num_accepted_tokens");
  return slots;
}

Format format_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16: return Format::bf16;
    case at::kHalf: return Format::fp16;
    case at::kChar: return Format::int8;
    case at::kFloat8_e4m3fn: return Format::e4m3;
    default: return Format::float32;
  }
}

std::optional<float> as_float(const MaybeNumber& number) {
  return number ? std::optional(static_cast<float>(*number)) : std::nullopt;
}

/// [H] as [H, P]; [T, H] as [T, H, P]; [H] as [H, P, N].
Tensor repeated(const Tensor& tensor, const char* argument, at::IntArrayRef shape) {
  Tensor wide = tensor;
  while (wide.dim() < static_cast<std::int64_t>(shape.size())) wide = wide.unsqueeze(-1);
  bool fits = wide.dim() == static_cast<std::int64_t>(shape.size());
  for (std::int64_t i = 0; fits && i < wide.dim(); ++i)
    fits = wide.size(i) == shape[static_cast<std::size_t>(i)] || i >= tensor.dim();
  TORCH_CHECK(fits, argument, " is expected to be ", shape, " or one number for the last of them; ",
              "got ", tensor.sizes());
  return wide.expand(shape);
}
MaybeTensor repeated(const MaybeTensor& tensor, const char* argument, at::IntArrayRef shape) {
  return tensor ? MaybeTensor(repeated(*tensor, argument, shape)) : MaybeTensor();
}

/// What a kernel returns: contiguous, in the shape and type of an input. Shapes may be symbols.
Tensor like(const Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

// --- The CPU: references in float ---------------------------------------------------------------

/// The elements of a tensor in float. Repeated elements (stride 0) stay repeated: references look
/// for one number per head.
template <std::size_t Rank>
class HostTensor {
 public:
  HostTensor(const MaybeTensor& tensor, const char* argument) {
    if (!tensor) return;
    expect_float(*tensor, argument);
    expect_rank(*tensor, argument, Rank);
    copy(*tensor);
  }
  /// A state, which may have narrow numbers.
  explicit HostTensor(const MaybeTensor& state) {
    if (state) copy(*state);
  }

  TensorView<const float, Rank> in() const { return view_of<const float, Rank>(values_, "it"); }
  TensorView<float, Rank> out() const { return view_of<float, Rank>(values_, "it"); }
  std::optional<TensorView<const float, Rank>> maybe() const {
    return values_.defined() ? std::optional(in()) : std::nullopt;
  }
  std::optional<TensorView<float, Rank>> maybe_out() const {
    return values_.defined() ? std::optional(out()) : std::nullopt;
  }

  /// Elements that changed go to the tensor; the others keep their bits, NaN among them.
  void write_back() const {
    if (!values_.defined()) return;
    constexpr at::ScalarType kBits[] = {at::kByte, at::kByte, at::kShort, at::kInt, at::kInt};
    const at::ScalarType bits = kBits[tensor_.element_size()];
    const Tensor changed = values_.view(at::kInt).ne(before_.view(at::kInt));
    const Tensor target = tensor_.view(bits);
    target.copy_(at::where(changed, values_.to(tensor_.scalar_type()).view(bits), target));
  }
  /// The elements in another type.
  Tensor as(at::ScalarType type) const { return values_.to(type); }

 private:
  void copy(const Tensor& tensor) {
    tensor_ = tensor;
    Tensor once = tensor;
    for (std::int64_t i = 0; i < tensor.dim(); ++i)
      if (tensor.stride(i) == 0 && tensor.size(i) > 1) once = once.narrow(i, 0, 1);
    before_ = once.to(at::kFloat).contiguous().expand(tensor.sizes());
    values_ = once.to(at::kFloat, false, true).contiguous().expand(tensor.sizes());
  }
  Tensor tensor_, before_, values_;
};

/// An output of a reference, in the shape of x.
template <std::size_t Rank>
HostTensor<Rank> host_output(const Tensor& x) {
  return HostTensor<Rank>(MaybeTensor(at::zeros(x.sizes(), x.options().dtype(at::kFloat))));
}

StoragePoints storage_of(const Tensor& out, const Tensor& state) {
  return {.state = format_of(state), .output = format_of(out)};
}

/// The rules of slots, by the names of the arguments. Where states are only read, rows may share.
void check_host_slots(const Rows& rows, std::int64_t slot_count, bool read_only) {
  const std::int64_t N = row_count(rows.query_start_loc, rows.tokens);
  const StateSlots& s = rows.slots;
  const auto per_row = [&](const auto& view, const char* argument) {
    if (view) expect(view->extent(0) == N, argument, std::to_string(N) + " rows", view->extent(0));
  };
  per_row(s.indices, "state_indices");
  per_row(s.table, "state_indices");
  per_row(s.out_indices, "state_out_indices");
  per_row(s.num_accepted, "num_accepted_tokens");
  for (std::int64_t row = 0; row < N; ++row) row_range(rows.query_start_loc, row, rows.tokens);
  try {
    for (std::int64_t row = 0; row < N; ++row) source_slot(s, row, slot_count);
    if (!read_only) check_slots(s, rows.query_start_loc, rows.tokens, slot_count);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "the slots of state_indices, state_out_indices and num_accepted_tokens: ",
                error.what());
  }
}

/// For a verification that leaves nothing behind: where the references put its states.
MaybeTensor scratch_snapshots(const Tensor& state, std::int64_t tokens) {
  std::vector<std::int64_t> shape = state.sizes().vec();
  shape[0] = tokens;
  return at::empty(shape, state.options().dtype(at::kFloat));
}

// --- The GPU ------------------------------------------------------------------------------------

#ifdef LOCKSTEP_HAS_CUDA
template <std::size_t Rank>
kernels::MixedView<Rank> mixed(const MaybeTensor& tensor, const char* argument) {
  if (!tensor) return {};
  expect_float(*tensor, argument);
  kernels::MixedView<Rank> view(view_of<const float, Rank>(*tensor, argument));
  view.format = format_of(*tensor);
  return view;
}

template <class T, std::size_t Rank>
std::optional<TensorView<T, Rank>> maybe_view(const MaybeTensor& tensor, at::ScalarType type,
                                              const char* argument) {
  expect_type(tensor, type, argument);
  return tensor ? std::optional(view_of<T, Rank>(*tensor, argument)) : std::nullopt;
}

template <class T>
struct TypeOf {
  using type = T;
};

/// body(TypeOf<T>, TypeOf<S>) for the types of activations and states.
template <class Body>
void with_types(const Tensor& x, const Tensor& state, Body body) {
  using kernels::Bf16;
  using kernels::Fp16;
  expect_float(x, "x, q, k and v");
  expect_float(state, "state");
  const Format a = format_of(x), s = format_of(state);
#define LOCKSTEP_CASE(T, S)                                         \
  if (a == kernels::format_of<T>() && s == kernels::format_of<S>()) \
    return body(TypeOf<T>(), TypeOf<S>());
  LOCKSTEP_SERVING_TYPES(LOCKSTEP_CASE)
#ifdef LOCKSTEP_ALL_SHAPES
  LOCKSTEP_OTHER_TYPES(LOCKSTEP_CASE)
#endif
#undef LOCKSTEP_CASE
  TORCH_CHECK(false,
              "the types of activations and state are expected to be bfloat16 beside float32 or "
              "bfloat16 in a build without LOCKSTEP_ALL_SHAPES; got ",
              x.scalar_type(), " and ", state.scalar_type());
}

/// Likewise, of states in narrow numbers with scales.
template <class Body>
void with_scaled_types(const Tensor& x, const Tensor& state, Body body) {
#ifdef LOCKSTEP_ALL_SHAPES
  using kernels::Bf16;
  using kernels::E4m3;
  using kernels::Int8;
  const Format a = format_of(x), s = format_of(state);
#define LOCKSTEP_CASE(T, S)                                         \
  if (a == kernels::format_of<T>() && s == kernels::format_of<S>()) \
    return body(TypeOf<T>(), TypeOf<S>());
  LOCKSTEP_SCALED_TYPES(LOCKSTEP_CASE)
#undef LOCKSTEP_CASE
#endif
  static_cast<void>(body);
  TORCH_CHECK(
      false,
      "the types of activations and of a state with state_scale are expected to be bfloat16 "
      "beside int8 or float8_e4m3fn, in a build with LOCKSTEP_ALL_SHAPES; got ",
      x.scalar_type(), " and ", state.scalar_type());
}

/// A tensor [layers, slots, ...] as rows of bytes.
kernels::StatePoolBytes pool_of(const Tensor& tensor, const char* argument) {
  std::int64_t bytes = tensor.element_size();
  const std::int64_t size = bytes;
  for (std::int64_t i = tensor.dim() - 1; i >= 2; --i) {
    TORCH_CHECK(tensor.size(i) <= 1 || tensor.stride(i) * size == bytes, argument,
                " is expected to have contiguous states; got strides ", tensor.strides());
    bytes *= tensor.size(i);
  }
  return {tensor.data_ptr(),       tensor.size(0),         tensor.size(1), bytes,
          tensor.stride(0) * size, tensor.stride(1) * size};
}

cudaStream_t stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}
#endif

// --- causal_conv1d_update -----------------------------------------------------------------------

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
    expect(C >= W - 1 && (num_accepted_tokens || C <= W), "conv_state",
           "W - 1 or W columns wide, or wider with num_accepted_tokens", conv_state.sizes());
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

  /// The history and the drafts of a row with a slot have their columns in a speculative state.
  void check_columns(const Rows& rows) const {
    expect_shape(num_accepted_tokens, "num_accepted_tokens", "[N]",
                 {row_count(rows.query_start_loc, rows.tokens)});
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
    const Tensor out = like(x);
    with_types(x, conv_state, [&](auto t, auto s) {
      using T = typename decltype(t)::type;
      using S = typename decltype(s)::type;
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

// --- selective_state_update ---------------------------------------------------------------------

struct SelectiveStateUpdate : Arguments {
  static constexpr const char* kSchema = R"(
selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *,
    Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False,
    float? dt_min=None, float? dt_max=None, Tensor(c!)? state_scale=None,
    Tensor? state_indices=None, Tensor? state_out_indices=None, Tensor? query_start_loc=None,
    Tensor? num_accepted_tokens=None, Tensor(b!)? snapshots=None, int pad_slot_id=-1,
    Tensor? parents=None, bool read_only=False, Tensor(d!)? stash_decay=None,
    Tensor(e!)? stash_dt=None, int? rand_seed=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor state = tensor(), x = tensor(), dt = tensor();
  const Tensor A = tensor(), B = tensor(), C = tensor();
  const MaybeTensor D = maybe_tensor(), z = maybe_tensor(), dt_bias = maybe_tensor();
  const bool dt_softplus = flag();
  const MaybeNumber dt_min = maybe_number(), dt_max = maybe_number();
  const MaybeTensor state_scale = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor(), state_out_indices = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor(), num_accepted_tokens = maybe_tensor();
  const MaybeTensor snapshots = maybe_tensor();
  const std::int64_t pad_slot_id = integer();
  const MaybeTensor parents = maybe_tensor();
  const bool read_only = flag();
  const MaybeTensor stash_decay = maybe_tensor(), stash_dt = maybe_tensor();
  const std::optional<std::int64_t> rand_seed = maybe_integer();

  StateSlots slots() const {
    return slots_of(state_indices, state_out_indices, num_accepted_tokens, pad_slot_id);
  }
  bool reads_only() const { return read_only || parents || snapshots; }

  Tensor meta() const { return like(x); }

  /// What both sides need before they repeat the heads' numbers.
  void check_ranks() const {
    expect_rank(x, "x", 3);
    expect_rank(B, "B", 3);
    expect_type(A, at::kFloat, "A");
    expect_together(stash_decay, stash_dt, "stash_decay and stash_dt");
    expect_type(stash_decay, at::kFloat, "stash_decay");
    expect_type(stash_dt, at::kFloat, "stash_dt");
    expect(!rand_seed || state_scale, "rand_seed", "absent without state_scale", "given");
  }
  Tensor wide_dt() const { return repeated(dt, "dt", x.sizes()); }
  Tensor wide_A() const { return repeated(A, "A", {x.size(1), x.size(2), B.size(2)}); }
  MaybeTensor wide_D() const { return repeated(D, "D", {x.size(1), x.size(2)}); }
  MaybeTensor wide_bias() const { return repeated(dt_bias, "dt_bias", {x.size(1), x.size(2)}); }

  void check() const {
    check_ranks();
    const std::int64_t T = x.size(0), H = x.size(1), P = x.size(2), N = B.size(2), G = B.size(1);
    expect(G > 0 && H % G == 0, "B", "[T, G, N] with H a multiple of G", B.sizes());
    expect_shape(B, "B", "[T, G, N]", {T, G, N});
    expect_shape(C, "C", "[T, G, N]", {T, G, N});
    expect_shape(z, "z", "[T, H, P]", {T, H, P});
    expect_rank(state, "state", 4);
    expect_shape(state, "state", "[slots, H, P, N]", {state.size(0), H, P, N});
    expect_type(snapshots, state.scalar_type(), "snapshots");
    expect_shape(snapshots, "snapshots", "[T, H, P, N]", {T, H, P, N});
    expect_shape(parents, "parents", "[T]", {T});
    expect_shape(stash_decay, "stash_decay", "[T, H]", {T, H});
    expect_shape(stash_dt, "stash_dt", "[T, H]", {T, H});
    if (!state_scale) return expect_float(state, "state");
    const Format format = format_of(state);
    expect(format == Format::int8 || format == Format::e4m3, "state",
           "int8 or float8_e4m3fn with state_scale", state.scalar_type());
    expect_type(state_scale, at::kFloat, "state_scale");
    expect(!snapshots, "snapshots", "absent beside state_scale", "given");
    expect_rank(*state_scale, "state_scale", 4);
    const std::int64_t blocks = state_scale->size(3);
    expect_shape(*state_scale, "state_scale", "[slots, H, P, blocks]",
                 {state.size(0), H, P, blocks});
    expect(blocks >= 1 && (N + block() - 1) / block() == blocks, "state_scale",
           "[slots, H, P, ceil(N / block)]", state_scale->sizes());
  }
  /// Numbers that share a scale.
  std::int64_t block() const {
    const std::int64_t N = B.size(2), blocks = state_scale->size(3);
    return blocks < 1 ? 1 : (N + blocks - 1) / blocks;
  }

  Tensor cpu() const {
    check();
    const HostTensor<3> hx(x, "x"), hdt(wide_dt(), "dt"), hA(wide_A(), "A"), hB(B, "B"), hC(C, "C"),
        hz(z, "z"), out = host_output<3>(x);
    const HostTensor<2> hD(wide_D(), "D"), hbias(wide_bias(), "dt_bias");
    const HostTensor<4> hstate{MaybeTensor(state)}, scales(state_scale),
        shots(read_only && !parents && !snapshots ? scratch_snapshots(state, x.size(0))
                                                  : snapshots);
    reference::Mamba2Inputs<float> in{
        .x = hx.in(),
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
        .rows = {.tokens = x.size(0),
                 .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
                 .slots = slots(),
                 .storage = storage_of(x, state)}};
    check_host_slots(in.rows, state.size(0), reads_only());
    const auto update = [&](const TensorView<float, 4>& states) {
      reference::selective_state_update<float>(in, states, out.out(),
                                               indices_of(parents, "parents"), shots.maybe_out());
    };
    if (state_scale) {
      const Rows written = reads_only() ? Rows{} : in.rows;
      reference::ScaledStates<float> scaled{hstate.out(), scales.out(), block(), format_of(state)};
      if (rand_seed) scaled.stochastic = {.seed = static_cast<std::uint64_t>(*rand_seed)};
      in.rows.storage.state = Format::exact;
      reference::with_scaled_states(written, scaled, update);
    } else {
      update(hstate.out());
    }
    if (stash_dt) stash(in);
    if (!reads_only()) hstate.write_back();
    if (!reads_only()) scales.write_back();
    if (snapshots) shots.write_back();
    return out.as(x.scalar_type());
  }

  /// exp(A d_t) and d_t of the rows that have a slot.
  void stash(const reference::Mamba2Inputs<float>& in) const {
    const reference::Mamba2Stash<float> all = reference::mamba2_stash(in);
    const auto decay = view_of<float, 2>(*stash_decay, "stash_decay");
    const auto step = view_of<float, 2>(*stash_dt, "stash_dt");
    for (std::int64_t row = 0; row < row_count(in.rows.query_start_loc, in.rows.tokens); ++row) {
      if (source_slot(in.rows.slots, row, state.size(0)) == kNoSlot) continue;
      const RowRange range = row_range(in.rows.query_start_loc, row, in.rows.tokens);
      for (std::int64_t t = range.begin; t < range.end; ++t) {
        mapped(at(decay, t)) = mapped(at(all.decay.view(), t));
        mapped(at(step, t)) = mapped(at(all.dt.view(), t));
      }
    }
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check_ranks();
    expect_type(B, x.scalar_type(), "B");
    expect_type(C, x.scalar_type(), "C");
    const Tensor dt = wide_dt(), A = wide_A(), out = like(x);
    const MaybeTensor D = wide_D(), dt_bias = wide_bias();
    const auto update = [&](auto t, auto s) {
      using T = typename decltype(t)::type;
      using S = typename decltype(s)::type;
      kernels::selective_state_update<T, S>(
          {.x = view_of<const T, 3>(x, "x"),
           .dt = mixed<3>(dt, "dt"),
           .A = mixed<3>(A, "A"),
           .B = view_of<const T, 3>(B, "B"),
           .C = view_of<const T, 3>(C, "C"),
           .state = view_of<S, 4>(state, "state"),
           .out = view_of<T, 3>(out, "out"),
           .D = mixed<2>(D, "D"),
           .z = mixed<3>(z, "z"),
           .dt_bias = mixed<2>(dt_bias, "dt_bias"),
           .dt_softplus = dt_softplus,
           .dt_min = as_float(dt_min),
           .dt_max = as_float(dt_max),
           .slots = slots(),
           .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
           .state_scale = maybe_view<float, 4>(state_scale, at::kFloat, "state_scale"),
           .rand_seed = rand_seed,
           .snapshots = maybe_view<S, 4>(snapshots, state.scalar_type(), "snapshots"),
           .parents = indices_of(parents, "parents"),
           .read_only = read_only,
           .stash_decay = maybe_view<float, 2>(stash_decay, at::kFloat, "stash_decay"),
           .stash_dt = maybe_view<float, 2>(stash_dt, at::kFloat, "stash_dt")},
          stream());
    };
    if (state_scale)
      with_scaled_types(x, state, update);
    else
      with_types(x, state, update);
    return out;
  }
#endif
};

// --- selective_state_replay ---------------------------------------------------------------------

struct SelectiveStateReplay : Arguments {
  static constexpr const char* kSchema = R"(
selective_state_replay(Tensor(a!) state, Tensor stash_decay, Tensor stash_dt, Tensor x, Tensor B,
    Tensor num_accepted_tokens, *, Tensor? state_indices=None, Tensor? query_start_loc=None,
    Tensor? nodes=None, int pad_slot_id=-1) -> ())";

  using Arguments::Arguments;
  const Tensor state = tensor(), stash_decay = tensor(), stash_dt = tensor();
  const Tensor x = tensor(), B = tensor(), num_accepted_tokens = tensor();
  const MaybeTensor state_indices = maybe_tensor(), query_start_loc = maybe_tensor();
  const MaybeTensor nodes = maybe_tensor();
  const std::int64_t pad_slot_id = integer();

  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }

  void meta() const {}

  void check() const {
    expect_rank(x, "x", 3);
    expect_rank(B, "B", 3);
    expect_rank(state, "state", 4);
    expect_float(state, "state");
    const std::int64_t T = x.size(0), H = x.size(1), P = x.size(2), G = B.size(1), N = B.size(2);
    expect(G > 0 && H % G == 0, "B", "[T, G, N] with H a multiple of G", B.sizes());
    expect_shape(B, "B", "[T, G, N]", {T, G, N});
    expect_shape(state, "state", "[slots, H, P, N]", {state.size(0), H, P, N});
    expect_type(stash_decay, at::kFloat, "stash_decay");
    expect_type(stash_dt, at::kFloat, "stash_dt");
    expect_shape(stash_decay, "stash_decay", "[T, H]", {T, H});
    expect_shape(stash_dt, "stash_dt", "[T, H]", {T, H});
  }

  void cpu() const {
    check();
    const HostTensor<4> hstate(state, "state");
    const Rows rows{.tokens = x.size(0),
                    .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
                    .slots = slots(),
                    .storage = storage_of(x, state)};
    check_host_slots(rows, state.size(0), false);
    check_accepted(rows, num_accepted_tokens, nodes);
    const auto array = [](auto array, const Tensor& from, const char* argument) {
      const HostTensor<decltype(array.view())::rank()> host(from, argument);
      for_each_element(host.in(),
                       [next = array.begin()](const auto&, float x) mutable { *next++ = x; });
      return array;
    };
    const std::int64_t T = x.size(0), H = x.size(1);
    reference::mamba2_replay<float>({array(Array<float, 2>({T, H}), stash_decay, "stash_decay"),
                                     array(Array<float, 2>({T, H}), stash_dt, "stash_dt"),
                                     array(Array<float, 3>({T, H, x.size(2)}), x, "x"),
                                     array(Array<float, 3>({T, B.size(1), B.size(2)}), B, "B")},
                                    rows, indices_of<1>(num_accepted_tokens, "num_accepted_tokens"),
                                    hstate.out(), indices_of<2>(nodes, "nodes"));
    hstate.write_back();
  }

  /// What a replay is told of each row.
  static void check_accepted(const Rows& rows, const Tensor& accepted, const MaybeTensor& nodes) {
    const std::int64_t N = row_count(rows.query_start_loc, rows.tokens);
    expect_shape(accepted, "num_accepted_tokens", "[N]", {N});
    if (nodes) expect_rank(*nodes, "nodes", 2);
    if (nodes) expect_shape(nodes, "nodes", "[N, most]", {N, nodes->size(1)});
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    expect_type(B, x.scalar_type(), "B");
    with_types(x, state, [&](auto t, auto s) {
      using T = typename decltype(t)::type;
      using S = typename decltype(s)::type;
      expect_type(stash_decay, at::kFloat, "stash_decay");
      expect_type(stash_dt, at::kFloat, "stash_dt");
      kernels::selective_state_replay<T, S>(
          {.decay = view_of<const float, 2>(stash_decay, "stash_decay"),
           .dt = view_of<const float, 2>(stash_dt, "stash_dt"),
           .x = view_of<const T, 3>(x, "x"),
           .B = view_of<const T, 3>(B, "B"),
           .query_start_loc = indices_of(query_start_loc, "query_start_loc")},
          view_of<S, 4>(state, "state"), slots(),
          indices_of<1>(num_accepted_tokens, "num_accepted_tokens"), indices_of<2>(nodes, "nodes"),
          stream());
    });
  }
#endif
};

// --- gated_delta_rule_update --------------------------------------------------------------------

/// Tokens of a gated delta rule, and what makes gates of a and b.
struct GatedDeltaArguments {
  MaybeTensor q;  ///< absent: k stands there, and nobody looks
  Tensor k, v, g, beta;
  MaybeTensor query_start_loc;
  MaybeTensor A_log, dt_bias;
  bool fold = false;  ///< their names begin with fold_

  const char* name(const char* plain, const char* folded) const { return fold ? folded : plain; }
  const char* k_name() const { return name("k", "fold_k"); }
  const char* v_name() const { return name("v", "fold_v"); }
  const char* g_name() const { return name("g", "fold_g"); }
  const char* beta_name() const { return name("beta", "fold_beta"); }
  const char* starts_name() const { return name("query_start_loc", "fold_query_start_loc"); }

  void check(const Tensor& state) const {
    expect_rank(state, "state", 4);
    expect_float(state, "state");
    expect_rank(k, k_name(), 3);
    const std::int64_t T = k.size(0), H = k.size(1);
    const std::int64_t HV = state.size(1), V = state.size(2), K = state.size(3);
    expect(H > 0 && HV % H == 0, "state", "[slots, HV, V, K] with HV a multiple of H",
           state.sizes());
    expect_shape(k, k_name(), "[T, H, K]", {T, H, K});
    expect_shape(q, "q", "[T, H, K]", {T, H, K});
    expect_shape(v, v_name(), "[T, HV, V]", {T, HV, V});
    expect_shape(g, g_name(), "[T, HV]", {T, HV});
    expect_shape(beta, beta_name(), "[T, HV]", {T, HV});
    expect_together(A_log, dt_bias, "A_log and dt_bias");
    expect_shape(A_log, "A_log", "[HV]", {HV});
    expect_shape(dt_bias, "dt_bias", "[HV]", {HV});
  }

#ifdef LOCKSTEP_HAS_CUDA
  template <class T>
  kernels::GatedDeltaTokens<T> on_device() const {
    expect_type(v, k.scalar_type(), v_name());
    expect_type(q, k.scalar_type(), "q");
    return {.q = view_of<const T, 3>(q ? *q : k, "q"),
            .k = view_of<const T, 3>(k, k_name()),
            .v = view_of<const T, 3>(v, v_name()),
            .g = mixed<2>(g, g_name()),
            .beta = mixed<2>(beta, beta_name()),
            .query_start_loc = indices_of(query_start_loc, starts_name())};
  }
#endif
};

/// The same as the reference takes them.
class HostGatedDelta {
 public:
  HostGatedDelta(const GatedDeltaArguments& x, const Tensor& state)
      : q_(x.q ? *x.q : x.k, "q"),
        k_(x.k, x.k_name()),
        v_(x.v, x.v_name()),
        g_(x.g, x.g_name()),
        beta_(x.beta, x.beta_name()) {
    in = {.q = q_.in(), .k = k_.in(), .v = v_.in(), .g = g_.in(), .beta = beta_.in()};
    in.rows.tokens = x.k.size(0);
    in.rows.query_start_loc = indices_of(x.query_start_loc, x.starts_name());
    in.rows.storage = storage_of(x.v, state);
    if (!x.A_log) return;
    const HostTensor<1> A_log(x.A_log, "A_log"), dt_bias(x.dt_bias, "dt_bias");
    gates_ = reference::gated_delta_gates<float>(g_.in(), beta_.in(), A_log.in(), dt_bias.in());
    in.g = gates_.g;
    in.beta = gates_.beta;
  }
  HostGatedDelta(const HostGatedDelta&) = delete;  // `in` looks at the members
  HostGatedDelta& operator=(const HostGatedDelta&) = delete;
  ~HostGatedDelta() = default;

  reference::GatedDeltaRuleInputs<float> in{};

 private:
  HostTensor<3> q_, k_, v_;
  HostTensor<2> g_, beta_;
  reference::GatedDeltaGates<float> gates_;
};

struct GatedDeltaRuleUpdate : Arguments {
  static constexpr const char* kSchema = R"(
gated_delta_rule_update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, *,
    float? scale=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? query_start_loc=None,
    Tensor? state_indices=None, Tensor? state_out_indices=None, Tensor? num_accepted_tokens=None,
    bool use_qk_l2norm=False, int pad_slot_id=-1, Tensor? parents=None,
    Tensor(b!)? snapshots=None, bool read_only=False, Tensor? fold_k=None, Tensor? fold_v=None,
    Tensor? fold_g=None, Tensor? fold_beta=None, Tensor? fold_query_start_loc=None,
    Tensor? fold_num_accepted_tokens=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor q = tensor(), k = tensor(), v = tensor(), g = tensor(), beta = tensor();
  const Tensor state = tensor();
  const MaybeNumber scale = maybe_number();
  const MaybeTensor A_log = maybe_tensor(), dt_bias = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor(), state_out_indices = maybe_tensor();
  const MaybeTensor num_accepted_tokens = maybe_tensor();
  const bool use_qk_l2norm = flag();
  const std::int64_t pad_slot_id = integer();
  const MaybeTensor parents = maybe_tensor(), snapshots = maybe_tensor();
  const bool read_only = flag();
  const MaybeTensor fold_k = maybe_tensor(), fold_v = maybe_tensor(), fold_g = maybe_tensor();
  const MaybeTensor fold_beta = maybe_tensor(), fold_query_start_loc = maybe_tensor();
  const MaybeTensor fold_num_accepted_tokens = maybe_tensor();

  StateSlots slots() const {
    return slots_of(state_indices, state_out_indices, num_accepted_tokens, pad_slot_id);
  }
  GatedDeltaArguments tokens() const { return {q, k, v, g, beta, query_start_loc, A_log, dt_bias}; }
  /// The tokens of an earlier verification that are to be committed first.
  std::optional<GatedDeltaArguments> fold() const {
    const bool any = fold_k || fold_v || fold_g || fold_beta || fold_num_accepted_tokens;
    expect(any == (fold_k && fold_v && fold_g && fold_beta && fold_num_accepted_tokens),
           "fold_k, fold_v, fold_g, fold_beta and fold_num_accepted_tokens",
           "all given, or none of them", "some of them");
    expect(any || !fold_query_start_loc, "fold_query_start_loc", "absent without a fold", "given");
    if (!any) return {};
    return GatedDeltaArguments{{},    *fold_k, *fold_v, *fold_g, *fold_beta, fold_query_start_loc,
                               A_log, dt_bias, true};
  }

  Tensor meta() const { return like(v); }

  void check() const {
    tokens().check(state);
    const std::int64_t T = k.size(0);
    expect_type(snapshots, state.scalar_type(), "snapshots");
    expect_shape(snapshots, "snapshots", "[T, HV, V, K]",
                 {T, state.size(1), state.size(2), state.size(3)});
    expect_shape(parents, "parents", "[T]", {T});
  }

  Tensor cpu() const {
    check();
    const bool reads_only = read_only || parents || snapshots || fold_k;
    const HostTensor<4> hstate(state, "state"),
        shots(reads_only && !parents && !snapshots ? scratch_snapshots(state, k.size(0))
                                                   : snapshots);
    const HostTensor<3> out = host_output<3>(v);
    HostGatedDelta host(tokens(), state);
    host.in.use_qk_l2norm = use_qk_l2norm;
    host.in.scale = as_float(scale);
    host.in.rows.slots = slots();
    check_host_slots(host.in.rows, state.size(0), reads_only);
    if (const auto earlier = fold()) commit(*earlier, host.in, hstate);
    reference::gated_delta_rule_update<float>(host.in, hstate.out(), out.out(),
                                              indices_of(parents, "parents"), shots.maybe_out());
    if (!reads_only || fold_k) hstate.write_back();
    if (snapshots) shots.write_back();
    return out.as(v.scalar_type());
  }

  void commit(const GatedDeltaArguments& earlier,
              const reference::GatedDeltaRuleInputs<float>& step,
              const HostTensor<4>& hstate) const {
    earlier.check(state);
    HostGatedDelta host(earlier, state);
    host.in.use_qk_l2norm = use_qk_l2norm;
    host.in.rows.slots = step.rows.slots;
    const std::int64_t N = row_count(step.rows.query_start_loc, step.rows.tokens);
    expect(row_count(host.in.rows.query_start_loc, host.in.rows.tokens) == N,
           "fold_query_start_loc", "of as many rows as the step, " + std::to_string(N),
           row_count(host.in.rows.query_start_loc, host.in.rows.tokens));
    expect_shape(fold_num_accepted_tokens, "fold_num_accepted_tokens", "[N]", {N});
    check_host_slots(host.in.rows, state.size(0), false);
    reference::gated_delta_rule_replay<float>(
        host.in, indices_of<1>(*fold_num_accepted_tokens, "fold_num_accepted_tokens"),
        hstate.out());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    const Tensor out = like(v);
    const auto earlier = fold();
    with_types(k, state, [&](auto t, auto s) {
      using T = typename decltype(t)::type;
      using S = typename decltype(s)::type;
      kernels::GatedDeltaRuleUpdate<T, S> in{
          .tokens = tokens().template on_device<T>(),
          .state = view_of<S, 4>(state, "state"),
          .out = view_of<T, 3>(out, "out"),
          .slots = slots(),
          .A_log = mixed<1>(A_log, "A_log"),
          .dt_bias = mixed<1>(dt_bias, "dt_bias"),
          .scale = as_float(scale),
          .use_qk_l2norm = use_qk_l2norm,
          .snapshots = maybe_view<S, 4>(snapshots, state.scalar_type(), "snapshots"),
          .parents = indices_of(parents, "parents"),
          .read_only = read_only,
          .fold_accepted = indices_of(fold_num_accepted_tokens, "fold_num_accepted_tokens")};
      if (earlier) expect_type(earlier->k, k.scalar_type(), "fold_k");
      if (earlier) in.fold = earlier->template on_device<T>();
      kernels::gated_delta_rule_update<T, S>(in, stream());
    });
    return out;
  }
#endif
};

// --- gated_delta_rule_replay --------------------------------------------------------------------

struct GatedDeltaRuleReplay : Arguments {
  static constexpr const char* kSchema = R"(
gated_delta_rule_replay(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state,
    Tensor num_accepted_tokens, *, Tensor? A_log=None, Tensor? dt_bias=None,
    Tensor? query_start_loc=None, Tensor? state_indices=None, Tensor? nodes=None,
    bool use_qk_l2norm=False, int pad_slot_id=-1) -> ())";

  using Arguments::Arguments;
  const Tensor k = tensor(), v = tensor(), g = tensor(), beta = tensor(), state = tensor();
  const Tensor num_accepted_tokens = tensor();
  const MaybeTensor A_log = maybe_tensor(), dt_bias = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor(), state_indices = maybe_tensor();
  const MaybeTensor nodes = maybe_tensor();
  const bool use_qk_l2norm = flag();
  const std::int64_t pad_slot_id = integer();

  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }
  GatedDeltaArguments tokens() const {
    return {{}, k, v, g, beta, query_start_loc, A_log, dt_bias};
  }

  void meta() const {}

  void cpu() const {
    tokens().check(state);
    const HostTensor<4> hstate(state, "state");
    HostGatedDelta host(tokens(), state);
    host.in.use_qk_l2norm = use_qk_l2norm;
    host.in.rows.slots = slots();
    check_host_slots(host.in.rows, state.size(0), false);
    SelectiveStateReplay::check_accepted(host.in.rows, num_accepted_tokens, nodes);
    reference::gated_delta_rule_replay<float>(
        host.in, indices_of<1>(num_accepted_tokens, "num_accepted_tokens"), hstate.out(),
        indices_of<2>(nodes, "nodes"));
    hstate.write_back();
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    with_types(k, state, [&](auto t, auto s) {
      using T = typename decltype(t)::type;
      using S = typename decltype(s)::type;
      kernels::gated_delta_rule_replay<T, S>(
          {.tokens = tokens().template on_device<T>(),
           .state = view_of<S, 4>(state, "state"),
           .slots = slots(),
           .A_log = mixed<1>(A_log, "A_log"),
           .dt_bias = mixed<1>(dt_bias, "dt_bias"),
           .use_qk_l2norm = use_qk_l2norm},
          indices_of<1>(num_accepted_tokens, "num_accepted_tokens"), indices_of<2>(nodes, "nodes"),
          stream());
    });
  }
#endif
};

// --- state_copy, state_zero, state_scatter_accepted ---------------------------------------------

/// The slots that a list names, in its order; a number below 0 is left out.
std::vector<std::int64_t> host_slots(const Tensor& list, const char* argument, std::int64_t slots) {
  const IndexView view = indices_of<1>(list, argument);
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < view.extent(0); ++i) {
    expect(view(i) < slots, argument, "below the number of slots, " + std::to_string(slots),
           view(i));
    result.push_back(view(i));
  }
  return result;
}

void expect_pool(const Tensor& state) {
  TORCH_CHECK(state.dim() >= 3, "state is expected to be [layers, slots, ...]; got ",
              state.sizes());
}

struct StateCopy : Arguments {
  static constexpr const char* kSchema =
      "state_copy(Tensor(a!) state, Tensor source, Tensor target) -> ()";

  using Arguments::Arguments;
  const Tensor state = tensor(), source = tensor(), target = tensor();

  void meta() const {}

  void cpu() const {
    expect_pool(state);
    expect_shape(target, "target", "[moves], as source", source.sizes());
    const auto from = host_slots(source, "source", state.size(1));
    const auto to = host_slots(target, "target", state.size(1));
    std::set<std::int64_t> named;
    std::vector<Tensor> before;
    for (std::size_t i = 0; i < from.size(); ++i) {
      expect(to[i] < 0 || named.insert(to[i]).second, "target", "of different slots", to[i]);
      before.push_back(from[i] < 0 ? Tensor() : state.select(1, from[i]).clone());
    }
    for (std::size_t i = 0; i < from.size(); ++i)
      if (from[i] >= 0 && to[i] >= 0) state.select(1, to[i]).copy_(before[i]);
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    expect_pool(state);
    kernels::state_copy(pool_of(state, "state"), indices_of<1>(source, "source"),
                        indices_of<1>(target, "target"), stream());
  }
#endif
};

struct StateZero : Arguments {
  static constexpr const char* kSchema = "state_zero(Tensor(a!) state, Tensor slots) -> ()";

  using Arguments::Arguments;
  const Tensor state = tensor(), slots = tensor();

  void meta() const {}

  void cpu() const {
    expect_pool(state);
    for (const std::int64_t slot : host_slots(slots, "slots", state.size(1)))
      if (slot >= 0) state.select(1, slot).zero_();
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    expect_pool(state);
    kernels::state_zero(pool_of(state, "state"), indices_of<1>(slots, "slots"), stream());
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
    const auto slots = host_slots(state_indices, "state_indices", state.size(1));
    const auto accepted = indices_of<1>(num_accepted_tokens, "num_accepted_tokens");
    for (std::size_t n = 0; n < slots.size(); ++n) {
      const std::int64_t first = accepted(static_cast<std::int64_t>(n)) - 1;
      if (slots[n] < 0 || first < 1 || first + width - 1 > state.size(3)) continue;
      const Tensor rows = state.select(1, slots[n]);
      rows.narrow(-1, 0, width - 1).copy_(rows.narrow(-1, first, width - 1).clone());
    }
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

struct StateScatterAccepted : Arguments {
  static constexpr const char* kSchema = R"(
state_scatter_accepted(Tensor(a!) state, Tensor intermediate, Tensor slots,
    Tensor num_accepted_tokens) -> ())";

  using Arguments::Arguments;
  const Tensor state = tensor(), intermediate = tensor(), slots = tensor();
  const Tensor num_accepted_tokens = tensor();

  void meta() const {}

  void check() const {
    TORCH_CHECK(state.dim() >= 2, "state is expected to be [slots, ...]; got ", state.sizes());
    expect_type(intermediate, state.scalar_type(), "intermediate");
    TORCH_CHECK(intermediate.dim() == state.dim() + 1 &&
                    intermediate.sizes().slice(2) == state.sizes().slice(1),
                "intermediate is expected to be [B, T, ...] of states ", state.sizes().slice(1),
                "; got ", intermediate.sizes());
  }

  void cpu() const {
    check();
    const std::int64_t B = intermediate.size(0), T = intermediate.size(1);
    expect_shape(slots, "slots", "[B]", {B});
    expect_shape(num_accepted_tokens, "num_accepted_tokens", "[B]", {B});
    const auto to = host_slots(slots, "slots", state.size(0));
    const IndexView accepted = indices_of<1>(num_accepted_tokens, "num_accepted_tokens");
    for (std::int64_t b = 0; b < B; ++b)
      expect(accepted(b) <= T, "num_accepted_tokens", "at most T = " + std::to_string(T),
             accepted(b));
    for (std::int64_t b = 0; b < B; ++b) {
      const std::int64_t slot = to[static_cast<std::size_t>(b)];
      if (slot >= 0 && accepted(b) > 0)
        state.select(0, slot).copy_(intermediate.select(0, b).select(0, accepted(b) - 1));
    }
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    check();
    kernels::state_scatter_accepted(
        pool_of(state.unsqueeze(0), "state"), pool_of(intermediate, "intermediate"),
        indices_of<1>(slots, "slots"), indices_of<1>(num_accepted_tokens, "num_accepted_tokens"),
        stream());
  }
#endif
};

// --- Registration -------------------------------------------------------------------------------

/// The operator's arguments from the stack, its result in their place.
template <class Op, auto Run>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = [&] {
    const Op in(op.schema(), *stack);
#ifdef LOCKSTEP_HAS_CUDA
    const c10::cuda::OptionalCUDAGuard guard(in.device().is_cuda() ? std::optional(in.device())
                                                                   : std::nullopt);
#endif
    if constexpr (std::is_void_v<decltype((in.*Run)())>) {
      (in.*Run)();
      return std::nullopt;
    } else {
      return std::optional((in.*Run)());
    }
  }();
  torch::jit::drop(*stack, op.schema().arguments().size());
  if constexpr (!std::is_same_v<decltype(result), const std::nullopt_t>)
    torch::jit::push(*stack, *result);
}

template <auto Run, class Op>
void implement(torch::Library& m) {
  const std::string schema = Op::kSchema;
  const std::size_t begin = schema.find_first_not_of('\n');
  m.impl(schema.substr(begin, schema.find('(') - begin).c_str(),
         torch::CppFunction::makeFromBoxedFunction<&boxed<Op, Run>>());
}

template <class... Ops>
struct Operators {
  static void define(torch::Library& m) {
    (m.def(Ops::kSchema, {at::Tag::pt2_compliant_tag}), ...);
  }
  static void implement_cpu(torch::Library& m) { (implement<&Ops::cpu, Ops>(m), ...); }
  static void implement_meta(torch::Library& m) { (implement<&Ops::meta, Ops>(m), ...); }
#ifdef LOCKSTEP_HAS_CUDA
  static void implement_cuda(torch::Library& m) {
    (implement<&Ops::cuda, Ops>(m), ...);
  }
#endif
};

using All =
    Operators<CausalConv1dUpdate, SelectiveStateUpdate, SelectiveStateReplay, GatedDeltaRuleUpdate,
              GatedDeltaRuleReplay, StateCopy, StateZero, StateScatterAccepted, ConvStateShift>;

}  // namespace

TORCH_LIBRARY(lockstep, m) {
  All::define(m);
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  All::implement_cpu(m);
}

TORCH_LIBRARY_IMPL(lockstep, Meta, m) {
  All::implement_meta(m);
}

#ifdef LOCKSTEP_HAS_CUDA
TORCH_LIBRARY_IMPL(lockstep, CUDA, m) {
  All::implement_cuda(m);
}
#endif

}  // namespace lockstep
