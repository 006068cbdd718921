// Reads safetensors files (https://github.com/huggingface/safetensors, "Format"). Such a file has 8
// bytes, little-endian, with the size of a JSON header; the header, an object {name: {dtype, shape,
// data_offsets}} with a text map __metadata__; and then the bytes to which the offsets refer.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::reference {

struct StoredTensor {
  std::string dtype;  ///< the file's name of the type: F32, BF16
  std::vector<std::int64_t> shape;
  std::vector<float> values;  ///< contiguous, the last dimension fastest
};

/// Reads all tensors, by name. Elements must be F32 or BF16, and no two tensors may share a byte.
/// Errors name the file and the tensor.
Result<std::map<std::string, StoredTensor>> read_safetensors(const std::string& path);

/// Writes tensors of doubles (F64). `values` are contiguous, the last dimension fastest.
struct WrittenTensor {
  std::vector<std::int64_t> shape;
  std::span<const double> values;
};
Result<void> write_safetensors(const std::string& path,
                               const std::map<std::string, WrittenTensor>& tensors);

}  // namespace lockstep::reference
