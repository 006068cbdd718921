// Tensors of a safetensors file (https://github.com/huggingface/safetensors, "Format"): 8 bytes,
// little-endian, the size of a JSON header; the header, an object {name: {dtype, shape,
// data_offsets}} with a text map __metadata__; then the bytes that the offsets count.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::reference {

struct StoredTensor {
  std::string dtype;  ///< as the file says: F32, BF16
  std::vector<std::int64_t> shape;
  std::vector<float> values;  ///< contiguous, the last dimension fastest
};

/// Every tensor by name. Elements are F32 or BF16. Errors name the file and the tensor.
Result<std::map<std::string, StoredTensor>> read_safetensors(const std::string& path);

}  // namespace lockstep::reference
