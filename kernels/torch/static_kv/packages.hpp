// A folder of AOTInductor packages, as cache_sim/python/lockstep/static_kv/export.py writes it.
// static_kv.json describes the packages, and each package repeats its description in its metadata.
#pragma once

#include <string>

#include "kernels/torch/static_kv/runtime.hpp"

namespace lockstep::static_kv {

/// Reads config.json, model.safetensors and static_kv.json, and loads every package; a bucket
/// "dynamic" serves each length from 2 on that has none of its own. Refuses, with one sentence:
/// another format, another PyTorch, other weights than those of the packages, a bucket without its
/// file or longer than the cache, a package whose metadata differs from the folder's, a dtype that
/// is neither float32 nor bfloat16, and packages for a GPU on a machine without one.
Result<Programs> load_packages(const std::string& folder);

/// The tokens that end a text, from generation_config.json.
Result<Tokens> stop_tokens(const std::string& folder);

}  // namespace lockstep::static_kv
