// A folder of AOTInductor packages, as cache_sim/python/lockstep/static_kv/export.py writes it:
// static_kv.json says what the packages are, each package says the same of itself.
#pragma once

#include <string>

#include "kernels/torch/static_kv/runtime.hpp"

namespace lockstep::static_kv {

/// Reads config.json, model.safetensors and static_kv.json, and loads every package; a bucket
/// "dynamic" serves each length from 2 that has none of its own. Refused with one sentence: another
/// format, another PyTorch, other weights than the packages were made from, a bucket without its
/// file or beyond the cache, a package whose own words differ from the folder's, a dtype that is
/// neither float32 nor bfloat16, a GPU's packages where there is none.
Result<Programs> load_packages(const std::string& folder);

/// The tokens that end a text, of generation_config.json.
Result<Tokens> stop_tokens(const std::string& folder);

}  // namespace lockstep::static_kv
