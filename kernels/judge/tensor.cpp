#include "kernels/judge/tensor.hpp"

#include <cstring>

#include "reference/base/mix.hpp"
#include "reference/tensors/fp8.hpp"

namespace lockstep::judging {
namespace {

constexpr char kFiniteByte = '\x3e';  // about 0.2

template <class T>
void put(char* at, T element) {
  std::memcpy(at, &element, sizeof element);
}
template <class T>
T got(const char* at) {
  T element;
  std::memcpy(&element, at, sizeof element);
  return element;
}

void encode(double value, ElementType type, char* at) {
  switch (type) {
    case ElementType::float32: return put(at, static_cast<float>(value));
    case ElementType::bf16: return put(at, Eigen::bfloat16(static_cast<float>(value)));
    case ElementType::fp16: return put(at, Eigen::half(static_cast<float>(value)));
    case ElementType::int32: return put(at, static_cast<std::int32_t>(value));
    case ElementType::boolean: return put(at, static_cast<std::uint8_t>(value != 0));
    case ElementType::e4m3: return put(at, encode_e4m3(value));
    case ElementType::bytes: return put(at, static_cast<std::uint8_t>(value));
  }
}

/// Writes one element of Fill: a quiet NaN whose payload is `bits`, or a multiple of 1/128 below 1.
/// For ElementType::bytes, a byte that is part of a NaN, or of a small number, in all
/// floating-point types.
void put_unread(std::uint64_t bits, ElementType type, Fill fill, char* at) {
  if (type == ElementType::bytes)
    return put(at, static_cast<std::uint8_t>(fill == Fill::finite ? 0x38U | (bits & 7U) : 0xffU));
  if (fill == Fill::finite) return encode(static_cast<double>(1 + bits % 96) / 128, type, at);
  switch (type) {
    case ElementType::float32:
      return put(at, static_cast<std::uint32_t>(0x7fc00000U | (bits & 0x3fffffU)));
    case ElementType::bf16: return put(at, static_cast<std::uint16_t>(0x7fc0U | (bits & 0x3fU)));
    case ElementType::fp16: return put(at, static_cast<std::uint16_t>(0x7e00U | (bits & 0x1ffU)));
    case ElementType::e4m3: return put(at, static_cast<std::uint8_t>(0x7fU | (bits & 1U) << 7));
    case ElementType::int32:
    case ElementType::boolean:
    case ElementType::bytes: break;  // indices have no NaN
  }
}

double decode(ElementType type, const char* at) {
  switch (type) {
    case ElementType::float32: return got<float>(at);
    case ElementType::bf16: return static_cast<float>(got<Eigen::bfloat16>(at));
    case ElementType::fp16: return static_cast<float>(got<Eigen::half>(at));
    case ElementType::int32: return got<std::int32_t>(at);
    case ElementType::boolean:
    case ElementType::bytes: return got<std::uint8_t>(at);
    case ElementType::e4m3: return decode_e4m3(got<std::uint8_t>(at));
  }
  return 0;
}

}  // namespace

std::string_view name_of(ElementType type) {
  switch (type) {
    case ElementType::float32: return "float32";
    case ElementType::bf16: return "bfloat16";
    case ElementType::fp16: return "float16";
    case ElementType::int32: return "int32";
    case ElementType::boolean: return "bool";
    case ElementType::e4m3: return "float8_e4m3fn";
    case ElementType::bytes: return "uint8";
  }
  return "";
}

Format format_of(ElementType type) {
  switch (type) {
    case ElementType::float32: return Format::float32;
    case ElementType::bf16: return Format::bf16;
    case ElementType::fp16: return Format::fp16;
    case ElementType::e4m3: return Format::e4m3;
    case ElementType::int32:
    case ElementType::boolean:
    case ElementType::bytes: return Format::exact;
  }
  return Format::exact;
}

std::int64_t size_of(ElementType type) {
  switch (type) {
    case ElementType::boolean:
    case ElementType::e4m3:
    case ElementType::bytes: return 1;
    case ElementType::bf16:
    case ElementType::fp16: return 2;
    default: return 4;
  }
}

Extents contiguous(const Extents& extents) {
  Extents strides(extents.size());
  std::int64_t step = 1;
  for (std::size_t i = extents.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<std::int64_t>(extents[i], 1);
  }
  return strides;
}

std::int64_t Tensor::count() const {
  std::int64_t product = 1;
  for (const std::int64_t extent : extents) product *= extent;
  return product;
}

std::int64_t Tensor::span() const {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    if (extents[i] == 0) return 0;
    last += (extents[i] - 1) * strides[i];
  }
  return last + 1;
}

std::int64_t Tensor::allocation_bytes() const {
  constexpr std::int64_t kAlignment =
      512;  // the size is a multiple: the next allocation is aligned
  const std::int64_t bytes = span() * size_of(type) + 2 * kGuardBytes;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

namespace {

/// Calls body(i, offset) for every element, with its number and its byte offset in the allocation.
template <class Body>
void for_each_offset(const Tensor& tensor, Body body) {
  const std::int64_t size = size_of(tensor.type), count = tensor.count();
  const std::size_t rank = tensor.extents.size();
  const std::int64_t row = rank == 0 ? 1 : tensor.extents[rank - 1];
  const std::int64_t step = rank == 0 ? 0 : tensor.strides[rank - 1] * size;
  Extents index(rank, 0);
  std::int64_t begin = kGuardBytes;
  for (std::int64_t i = 0; i < count;) {
    for (std::int64_t offset = begin, end = i + row; i < end; ++i, offset += step)
      body(static_cast<std::size_t>(i), offset);
    for (std::size_t d = rank > 0 ? rank - 1 : 0; d-- > 0;) {
      begin += tensor.strides[d] * size;
      if (++index[d] < tensor.extents[d]) break;
      begin -= index[d] * tensor.strides[d] * size;
      index[d] = 0;
    }
  }
}

}  // namespace

std::vector<std::int64_t> byte_offsets(const Tensor& tensor) {
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(tensor.count()));
  for_each_offset(tensor, [&](std::size_t i, std::int64_t offset) { offsets[i] = offset; });
  return offsets;
}

Bytes allocation_of(const Tensor& tensor, Fill fill) {
  Bytes bytes(static_cast<std::size_t>(tensor.allocation_bytes()),
              fill == Fill::poison ? kPoisonByte : kFiniteByte);
  if (tensor.values.empty()) return bytes;
  Digest name;
  for (const char letter : tensor.name) name.add(static_cast<unsigned char>(letter));
  for_each_offset(tensor, [&](std::size_t i, std::int64_t offset) {
    char* const at = bytes.data() + offset;
    if (std::isnan(tensor.values[i]))
      put_unread(mix64(name.value ^ i), tensor.type, fill, at);
    else
      encode(tensor.values[i], tensor.type, at);
  });
  return bytes;
}

std::vector<double> values_in(const Tensor& tensor, const char* allocation) {
  std::vector<double> values(static_cast<std::size_t>(tensor.count()));
  for_each_offset(tensor, [&](std::size_t i, std::int64_t offset) {
    values[i] = decode(tensor.type, allocation + offset);
  });
  return values;
}

}  // namespace lockstep::judging
