// Arguments of an operator torch.ops.lockstep.*: taken from the dispatcher's stack, checked by
// name, and passed on as views for kernels and references.
//
// An operator is a struct that derives from Arguments. It has its schema, its arguments as members
// in the order of the schema, and the functions cpu(), cuda() and meta(). It is registered at its
// file's foot (operator.hpp).
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include "reference/recurrent/recurrence.hpp"
#include "reference/tensors/array.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDAStream.h>

#include "kernels/recurrent/shapes.hpp"
#include "kernels/recurrent/state_copy.hpp"
#endif

namespace lockstep::torch_ops {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeNumber = std::optional<double>;

// --- Arguments ----------------------------------------------------------------------------------

/// The arguments of a call, in the order of the schema. Each member of an operator takes the next
/// one when it is initialised.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack)
      : next_(stack.end() - static_cast<std::ptrdiff_t>(schema.arguments().size())) {
    for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
      if (!next_[static_cast<std::ptrdiff_t>(i)].isTensor()) continue;
      const c10::Argument& argument = schema.arguments()[i];
      const Tensor& given = next_[static_cast<std::ptrdiff_t>(i)].toTensor();
      TORCH_CHECK(given.defined(), argument.name(), " is expected to be a tensor; got None");
      const auto place = given.device();
      if (!device_) device_ = place;
      TORCH_CHECK(place == *device_, argument.name(), " is expected to be on ", *device_, "; got ",
                  place);
      const bool written = argument.alias_info() && argument.alias_info()->isWrite();
      TORCH_CHECK(!written || at::has_internal_overlap(given) != at::MemOverlap::Yes,
                  argument.name(),
                  " is expected to have a place for each element, as it is written;",
                  " got strides ", given.strides());
    }
  }
  at::Device device() const { return *device_; }

  Tensor place;  ///< for the result, where the call is a part of a batch; else undefined

 protected:
  /// The place for a result in the shape and type of x: a new tensor, or `place`.
  Tensor result_like(const Tensor& x) const;
  Tensor tensor() { return (next_++)->toTensor(); }
  MaybeTensor maybe_tensor() { return (next_++)->toOptional<Tensor>(); }
  MaybeNumber maybe_number() { return (next_++)->toOptional<double>(); }
  double number() { return (next_++)->toDouble(); }
  std::optional<std::int64_t> maybe_integer() { return (next_++)->toOptional<std::int64_t>(); }
  std::int64_t integer() { return (next_++)->toInt(); }
  bool flag() { return (next_++)->toBool(); }
  std::string text() { return (next_++)->toStringRef(); }

 private:
  torch::jit::Stack::const_iterator next_;
  std::optional<at::Device> device_;
};

/// Throws "x is expected to be ...; got ..." unless `holds`.
template <class Expected, class Got>
void expect(bool holds, const char* argument, const Expected& expected, const Got& got) {
  TORCH_CHECK(holds, argument, " is expected to be ", expected, "; got ", got);
}

inline void expect_shape(const Tensor& tensor, const char* argument, const char* letters,
                         at::IntArrayRef shape) {
  TORCH_CHECK(tensor.sizes() == shape, argument, " is expected to be ", letters, " = ", shape,
              "; got ", tensor.sizes());
}
inline void expect_shape(const MaybeTensor& tensor, const char* argument, const char* letters,
                         at::IntArrayRef shape) {
  if (tensor) expect_shape(*tensor, argument, letters, shape);
}

inline void expect_rank(const Tensor& tensor, const char* argument, std::int64_t rank) {
  TORCH_CHECK(tensor.dim() == rank, argument, " is expected to have ", rank, " dimensions; got ",
              tensor.sizes());
}

inline void expect_float(const Tensor& tensor, const char* argument) {
  const auto type = tensor.scalar_type();
  expect(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, argument,
         "float32, bfloat16 or float16", type);
}

/// Expects a floating-point type, or float8_e4m3fn (numbers with a scale).
inline void expect_float_or_e4m3(const Tensor& tensor, const char* argument) {
  if (tensor.scalar_type() != at::kFloat8_e4m3fn) expect_float(tensor, argument);
}

inline void expect_type(const MaybeTensor& tensor, at::ScalarType type, const char* argument) {
  if (tensor) expect(tensor->scalar_type() == type, argument, type, tensor->scalar_type());
}

/// Expects a contiguous last dimension.
inline void expect_contiguous_rows(const MaybeTensor& tensor, const char* argument) {
  if (tensor)
    TORCH_CHECK(tensor->size(-1) <= 1 || tensor->stride(-1) == 1, argument,
                " is expected to be contiguous in its last dimension; got strides ",
                tensor->strides());
}

/// Expects both arguments, or neither.
inline void expect_together(const MaybeTensor& a, const MaybeTensor& b, const char* arguments) {
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

inline StateSlots slots_of(const MaybeTensor& state_indices, const MaybeTensor& state_out_indices,
                           const MaybeTensor& num_accepted_tokens, std::int64_t pad_slot_id) {
  StateSlots slots{.pad_slot_id = static_cast<std::int32_t>(pad_slot_id)};
  expect(slots.pad_slot_id == pad_slot_id, "pad_slot_id", "a number of 32 bits", pad_slot_id);
  if (state_indices && state_indices->dim() == 2)
    slots.table = indices_of<2>(state_indices, "state_indices");
  else
    slots.indices = indices_of(state_indices, "state_indices");
  if (state_out_indices && state_out_indices->dim() == 2)
    slots.out_table = indices_of<2>(state_out_indices, "state_out_indices");
  else
    slots.out_indices = indices_of(state_out_indices, "state_out_indices");
  slots.num_accepted = indices_of(num_accepted_tokens, "num_accepted_tokens");
  return slots;
}

inline Format format_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16: return Format::bf16;
    case at::kHalf: return Format::fp16;
    case at::kChar: return Format::int8;
    case at::kFloat8_e4m3fn: return Format::e4m3;
    default: return Format::float32;
  }
}

inline std::optional<float> as_float(const MaybeNumber& number) {
  return number ? std::optional(static_cast<float>(*number)) : std::nullopt;
}

/// Rows of a launch at most: each is an index of the grid's y or z, which has 65535, and a prefill
/// of the gated delta rule takes one more for padding.
constexpr std::int64_t kRowsOfLaunch = 65534;

/// Rows of a batch, before its arguments are checked: those of query_start_loc, or else one for
/// each element of the first dimension of `each`.
inline std::int64_t rows_in(const MaybeTensor& query_start_loc, const MaybeTensor& each) {
  const MaybeTensor& counted = query_start_loc ? query_start_loc : each;
  const std::int64_t size = counted && counted->dim() > 0 ? counted->size(0) : 0;
  return query_start_loc ? size - 1 : size;
}

/// Checks the rows and slots of a call for both devices, without reading their values: lists and
/// tables have as many rows as the batch.
inline void check_rows(const MaybeTensor& query_start_loc, const StateSlots& slots,
                       std::int64_t tokens) {
  const auto starts = indices_of(query_start_loc, "query_start_loc");
  expect(!starts || starts->extent(0) >= 1, "query_start_loc", "[N + 1]", "no elements");
  const std::int64_t N = row_count(starts, tokens);
  const auto per_row = [&](const auto& view, const char* argument) {
    if (view)
      expect(view->extent(0) == N, argument, std::to_string(N) + (N == 1 ? " row" : " rows"),
             view->extent(0));
  };
  per_row(slots.indices, "state_indices");
  per_row(slots.table, "state_indices");
  per_row(slots.out_indices, "state_out_indices");
  per_row(slots.out_table, "state_out_indices");
  per_row(slots.num_accepted, "num_accepted_tokens");
  expect(!slots.table || slots.table->extent(1) >= 1, "state_indices", "[N, 1 + drafts], or a list",
         "a table without columns");
  expect(!(slots.table && slots.out_indices) && (slots.table || !slots.out_table),
         "state_out_indices", "a list beside a list of state_indices, a table beside a table",
         slots.out_table ? "a table" : "a list");
}

/// The same for a recurrence, where counts of accepted tokens need a table: they select its column.
inline void check_recurrence_rows(const MaybeTensor& query_start_loc, const StateSlots& slots,
                                  std::int64_t tokens) {
  check_rows(query_start_loc, slots, tokens);
  expect(!slots.num_accepted || slots.table, "num_accepted_tokens",
         "absent without a table of state_indices", "given");
}

/// Expects the states [slots, heads, rows, columns] of a recurrence in sizes that its kernels take.
inline void expect_states(const Tensor& state, const char* letters) {
  expect_rank(state, "state", 4);
  const bool fits = state.size(1) <= 65535 && 1 <= state.size(2) && state.size(2) <= 65536 &&
                    1 <= state.size(3) && state.size(3) <= 256;
  expect(fits, "state",
         std::string(letters) + " with at most 65535 heads, 65536 rows and 256 columns",
         state.sizes());
}

/// The tensor expanded to `shape`: it has that shape already, or its first `rank` dimensions, whose
/// numbers are repeated along the others (dt [T, H] for [T, H, P], A [H] for [H, P, N]).
inline Tensor repeated(const Tensor& tensor, const char* argument, at::IntArrayRef shape,
                       std::size_t rank) {
  const at::IntArrayRef first = shape.slice(0, rank);
  TORCH_CHECK(tensor.sizes() == shape || tensor.sizes() == first, argument, " is expected to be ",
              shape, " or ", first, "; got ", tensor.sizes());
  Tensor wide = tensor;
  while (wide.dim() < static_cast<std::int64_t>(shape.size())) wide = wide.unsqueeze(-1);
  return wide.expand(shape);
}
inline MaybeTensor repeated(const MaybeTensor& tensor, const char* argument, at::IntArrayRef shape,
                            std::size_t rank) {
  return tensor ? MaybeTensor(repeated(*tensor, argument, shape, rank)) : MaybeTensor();
}

/// A new contiguous tensor in the shape and type of x, for a result. Sizes may be symbolic.
inline Tensor like(const Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options());
}
inline Tensor Arguments::result_like(const Tensor& x) const {
  return place.defined() ? place : like(x);
}

// --- The CPU: references in float ---------------------------------------------------------------

/// The elements of a tensor in float. Repeated elements (stride 0) stay repeated, because
/// references recognise one number per head by its strides.
template <std::size_t Rank>
class HostTensor {
 public:
  HostTensor(const MaybeTensor& tensor, const char* argument) {
    if (!tensor) return;
    expect_float(*tensor, argument);
    expect_rank(*tensor, argument, Rank);
    copy(*tensor);
  }
  /// Copies a state, which may be in int8 or e4m3.
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

  /// Writes the elements that changed back to the tensor; the others keep their bits, also if they
  /// are NaN.
  void write_back() const {
    if (!values_.defined()) return;
    constexpr at::ScalarType kBits[] = {at::kByte, at::kByte, at::kShort, at::kInt, at::kInt};
    const at::ScalarType bits = kBits[tensor_.element_size()];
    const Tensor changed = values_.view(at::kInt).ne(before_.view(at::kInt));
    const Tensor target = tensor_.view(bits);
    target.copy_(at::where(changed, values_.to(tensor_.scalar_type()).view(bits), target));
  }
  /// The elements converted to `type`.
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

inline StoragePoints storage_of(const Tensor& out, const Tensor& state) {
  return {.state = format_of(state), .output = format_of(out)};
}

/// Checks the values of slots, which only the CPU can read: the GPU skips bad ones. With read_only,
/// rows may share a slot.
inline void check_host_slots(const Rows& rows, std::int64_t slot_count, bool read_only) {
  const std::int64_t N = row_count(rows.query_start_loc, rows.tokens);
  const StateSlots& s = rows.slots;
  for (std::int64_t row = 0; row < N; ++row) row_range(rows.query_start_loc, row, rows.tokens);
  try {
    for (std::int64_t row = 0; row < N; ++row) source_slot(s, row, slot_count);
    if (!read_only) check_slots(s, rows.query_start_loc, rows.tokens, slot_count);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "the slots of state_indices, state_out_indices and num_accepted_tokens: ",
                error.what());
  }
}

/// Snapshots for the reference of a verification that returns none.
inline MaybeTensor scratch_snapshots(const Tensor& state, std::int64_t tokens) {
  std::vector<std::int64_t> shape = state.sizes().vec();
  shape[0] = tokens;
  return at::empty(shape, state.options().dtype(at::kFloat));
}

/// Checks the arguments of a replay: rows, slots, accepted counts and nodes.
inline void check_replay(const MaybeTensor& query_start_loc, const StateSlots& slots,
                         std::int64_t tokens, const Tensor& accepted, const MaybeTensor& nodes) {
  check_recurrence_rows(query_start_loc, slots, tokens);
  expect(!slots.table, "state_indices", "[N] for a commit", "a table");
  const std::int64_t N = row_count(indices_of(query_start_loc, "query_start_loc"), tokens);
  expect_type(accepted, at::kInt, "num_accepted_tokens");
  expect_shape(accepted, "num_accepted_tokens", "[N]", {N});
  expect_type(nodes, at::kInt, "nodes");
  if (nodes) expect_rank(*nodes, "nodes", 2);
  if (nodes) expect_shape(nodes, "nodes", "[N, most]", {N, nodes->size(1)});
}

/// A list of slots of a pool, on the CPU. Numbers below 0 are allowed: their moves are skipped.
inline IndexView host_slots(const Tensor& list, const char* argument, std::int64_t slots) {
  const IndexView view = indices_of<1>(list, argument);
  for (std::int64_t i = 0; i < view.extent(0); ++i)
    expect(view(i) < slots, argument, "below the number of slots, " + std::to_string(slots),
           view(i));
  return view;
}

/// Calls body with a view of the elements as unsigned integers of their size, for moves that never
/// compute with them.
template <std::size_t Rank, class Body>
void with_bits(const Tensor& tensor, const char* argument, Body body) {
  switch (tensor.element_size()) {
    case 1: return body(view_of<std::uint8_t, Rank>(tensor, argument));
    case 2: return body(view_of<std::uint16_t, Rank>(tensor, argument));
    case 4: return body(view_of<std::uint32_t, Rank>(tensor, argument));
    case 8: return body(view_of<std::uint64_t, Rank>(tensor, argument));
    default: TORCH_CHECK(false, argument, " is expected to have elements of 1, 2, 4 or 8 bytes");
  }
}

/// Calls body with a view [a, b, elements of a state] of a tensor [a, b, ...] of any strides; what
/// body writes reaches the tensor.
template <class Body>
void with_states_as_rows(const Tensor& tensor, const char* argument, Body body) {
  const Tensor flat = tensor.dim() == 2 ? tensor.unsqueeze(2) : tensor.flatten(2);
  with_bits<3>(flat, argument, body);
  if (flat.data_ptr() != tensor.data_ptr()) tensor.copy_(flat.view(tensor.sizes()));
}

inline void expect_pool(const Tensor& state) {
  TORCH_CHECK(state.dim() >= 3, "state is expected to be [layers, slots, ...]; got ",
              state.sizes());
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
struct TypeOf {};

/// Calls body(TypeOf<T>, TypeOf<S>) with the types of activations and states.
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

/// The same for states in int8 or e4m3 with scales.
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
inline kernels::StatePoolBytes pool_of(const Tensor& tensor, const char* argument) {
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

inline cudaStream_t stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}
#endif

}  // namespace lockstep::torch_ops
