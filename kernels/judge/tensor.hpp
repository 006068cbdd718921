// An argument of a case: its values as the references take them, and its bytes as a candidate gets
// them, between guard bands.
//
//   values       doubles, last dimension fastest, exact in the tensor's type; NaN is poison
//   allocation   guard | elements by strides, with holes between them | guard
//
// A tensor that is `far` has this allocation in the judge and on its way to the candidate's process
// alone. There its rows of dimension 0 lie `far` elements apart, in memory that is all poison but
// for them.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "reference/tensors/array.hpp"
#include "reference/tensors/storage.hpp"

namespace lockstep::judging {

/// Element types, with the numbers of kernels/judge/judge_abi.h.
enum class ElementType : std::uint8_t {
  float32 = 0,
  bf16 = 1,
  fp16 = 2,
  int32 = 3,
  boolean = 4,
  e4m3 = 5,
  bytes = 6
};

std::string_view name_of(ElementType type);  // PyTorch's name
Format format_of(ElementType type);
std::int64_t size_of(ElementType type);

/// Inputs are only read, states are read and written, outputs are only written.
enum class Role : std::uint8_t { input, state, output };

using Extents = std::vector<std::int64_t>;

struct Tensor {
  std::string name;
  ElementType type = ElementType::float32;
  Role role = Role::input;
  Extents extents;
  Extents strides;                ///< in elements; set by contiguous() unless a case sets them
  std::int64_t far = 0;           ///< the candidate's stride of dimension 0, if not strides[0]
  std::vector<double> values;     ///< empty for an output
  std::vector<std::string> axes;  ///< names of the dimensions, for findings

  std::int64_t count() const;
  std::int64_t span() const;  ///< elements of memory from the first to the end of the last
  std::int64_t bytes() const { return count() * size_of(type); }
  std::int64_t allocation_bytes() const;
};

Extents contiguous(const Extents& extents);

constexpr std::int64_t kGuardBytes = 4096;
constexpr char kPoisonByte = '\xff';  ///< NaN in every floating-point type, -1 as an index

/// The contents of places that must not be read or written: NaN, or finite numbers. A result that
/// depends on them differs between the two. Each NaN among the values gets bits of its own (or a
/// finite number of its own), so that a padding row that is stored into an unused slot shows,
/// although NaN replaces NaN.
enum class Fill : std::uint8_t { poison, finite };

using Bytes = std::vector<char>;

Bytes allocation_of(const Tensor& tensor, Fill fill);
std::vector<double> values_in(const Tensor& tensor, const char* allocation);

/// The byte offset in the allocation of every element, in the order of `values`.
std::vector<std::int64_t> byte_offsets(const Tensor& tensor);

/// A scalar argument of the schema.
struct Scalar {
  std::string name;
  std::variant<bool, std::int64_t, double, std::string> value;
};

/// The values as an array; the rank is the tensor's.
template <class S, std::size_t Rank>
Array<S, Rank> array_of(const Tensor& tensor, const std::vector<double>& values) {
  require(tensor.extents.size() == Rank, "an argument has the rank of its schema");
  Shape<Rank> shape{};
  for (std::size_t i = 0; i < Rank; ++i) shape[i] = tensor.extents[i];
  Array<S, Rank> array(shape);
  for (std::size_t i = 0; i < values.size(); ++i) array.data()[i] = static_cast<S>(values[i]);
  return array;
}

}  // namespace lockstep::judging
