#include "cache_sim/policies/edge_llm/runtime_config.hpp"
#include "cache_sim/base/input.hpp"
#include "reference/base/counted.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace lockstep::cache_sim {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMostExtent = 1 << 20;
constexpr std::array<std::string_view, 14> kFields = {"conv_dim",
                                                      "conv_kernel",
                                                      "conv_state_dtype",
                                                      "kv_dtype",
                                                      "kv_layer_configs",
                                                      "layer_types",
                                                      "model_type",
                                                      "num_attention_layers",
                                                      "num_hidden_layers",
                                                      "num_linear_attn_layers",
                                                      "recurrent_state_dtype",
                                                      "recurrent_state_head_dim",
                                                      "recurrent_state_num_heads",
                                                      "recurrent_state_size"};

struct Type {
  std::string_view name;
  std::int64_t size;
};
constexpr std::array kTypes{Type{"float32", 4}, Type{"float16", 2}, Type{"bfloat16", 2},
                            Type{"fp8_e4m3", 1}, Type{"int8", 1}};

/// Reads fields and keeps the first mistake.
class Reader {
 public:
  explicit Reader(const Json& document) : document_(document) {}

  bool has(const char* field) const { return document_.contains(field); }
  void complain(std::string_view field, std::string_view what) {
    if (!error_) error_ = fmt::format("field {}: {}", field, what);
  }
  std::int64_t number(const char* field, std::int64_t low) {
    const auto found = document_.find(field);
    if (found == document_.end()) return complain(field, "it is missing"), low;
    if (!found->is_number_integer() || *found < low || *found > kMostExtent) {
      complain(field, fmt::format("{} is not a whole number from {} to {}",
                                  found->dump().substr(0, 60), low, kMostExtent));
      return low;
    }
    return found->get<std::int64_t>();
  }
  std::int64_t number_or(const char* field, std::int64_t low, std::int64_t otherwise) {
    return has(field) ? number(field, low) : otherwise;
  }
  /// Bytes of a type's values.
  std::int64_t type_size(const char* field) {
    const auto found = document_.find(field);
    if (found == document_.end()) return complain(field, "it is missing"), 0;
    for (const auto& [name, size] : kTypes)
      if (*found == std::string(name)) return size;
    complain(field, fmt::format("{} is no type of a cache", found->dump().substr(0, 60)));
    return 0;
  }
  const Json& list(const char* field) {
    static const Json empty = Json::array();
    const auto found = document_.find(field);
    if (found == document_.end()) return complain(field, "it is missing"), empty;
    if (!found->is_array()) return complain(field, "it is not a list"), empty;
    return *found;
  }
  const std::optional<std::string>& error() const { return error_; }

 private:
  const Json& document_;
  std::optional<std::string> error_;
};

/// Bytes of the KV of a token; an entry per layer of `layer_types`, null where it keeps none.
std::int64_t token_bytes_of(Reader& reader, const HybridLayers& layers) {
  if (!reader.has("kv_layer_configs")) return 0;
  const Json& entries = reader.list("kv_layer_configs");
  const std::int64_t size = reader.has("kv_dtype") ? reader.type_size("kv_dtype") : 2;
  if (entries.size() != layers.size()) {
    reader.complain("kv_layer_configs",
                    fmt::format("{} beside {}", counted(entries.size(), "entry", "entries"),
                                counted(layers.size(), "layer")));
    return 0;
  }
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const bool keeps_kv = layers.at(i).kind == LayerKind::attention;
    if (keeps_kv != entries[i].is_object() || keeps_kv == entries[i].is_null()) {
      reader.complain("kv_layer_configs", fmt::format("entry {} is {} where the layer is {}", i,
                                                      entries[i].is_null() ? "null" : "not null",
                                                      keeps_kv ? "attention" : "mamba"));
      return 0;
    }
    if (!keeps_kv) continue;
    Reader entry(entries[i]);
    bytes += 2 * entry.number("num_kv_heads", 1) * entry.number("head_dim", 1) * size;
    if (entry.error())
      reader.complain("kv_layer_configs", fmt::format("entry {}, {}", i, *entry.error()));
  }
  return bytes;
}

std::int64_t state_bytes_of(Reader& reader, std::int64_t layers) {
  if (layers == 0) return 0;
  const std::int64_t recurrent =
      reader.number("recurrent_state_num_heads", 1) * reader.number("recurrent_state_head_dim", 1) *
      reader.number("recurrent_state_size", 1) * reader.type_size("recurrent_state_dtype");
  const std::int64_t conv = reader.number("conv_dim", 1) * reader.number_or("conv_kernel", 0, 0) *
                            reader.type_size("conv_state_dtype");
  return layers * (recurrent + conv);
}

Result<HybridLayers> layers_of(Reader& reader) {
  std::vector<std::string> kinds;
  for (const Json& kind : reader.list("layer_types"))
    kinds.push_back(kind.is_string() ? kind.get<std::string>() : kind.dump());
  if (reader.error()) return fail(*reader.error());
  Result<HybridLayers> layers = HybridLayers::of(kinds);
  return layers.map_error(
      [](const Error& error) { return Error{.text = "field layer_types: " + error.text}; });
}

}  // namespace

Result<RuntimeConfig> parse_runtime_config(const Json& document) {
  if (!document.is_object()) return fail("it is not an object");
  for (const auto& [field, value] : document.items())
    if (std::ranges::find(kFields, field) == kFields.end())
      return fail(fmt::format("field {}: nobody knows it", field.substr(0, 60)));
  if (!document.contains("model_type")) return fail("field model_type: it is missing");
  if (document["model_type"] != "hybrid_mamba")
    return fail(fmt::format("field model_type: {} is not hybrid_mamba",
                            document["model_type"].dump().substr(0, 60)));
  Reader reader(document);
  const std::int64_t linear = reader.number("num_linear_attn_layers", 0);
  const bool counts_attention = reader.has("num_attention_layers");
  const std::int64_t attention =
      reader.number(counts_attention ? "num_attention_layers" : "num_hidden_layers", 0);
  const Result<HybridLayers> layers = layers_of(reader);
  if (!layers) return tl::unexpected(layers.error());
  const std::pair<LayerKind, std::pair<const char*, std::int64_t>> counts[] = {
      {LayerKind::mamba, {"num_linear_attn_layers", linear}},
      {LayerKind::attention, {"num_attention_layers", attention}}};
  for (const auto& [kind, said] : counts)
    if (layers->count(kind) != said.second)
      reader.complain(said.first, fmt::format("{}, and layer_types has {}",
                                              counted(said.second, "layer"), layers->count(kind)));
  RuntimeConfig config{.layers = *layers,
                       .token_bytes = token_bytes_of(reader, *layers),
                       .state_bytes = state_bytes_of(reader, linear)};
  if (reader.error()) return fail(*reader.error());
  return config;
}

Result<RuntimeConfig> read_runtime_config(const std::string& path) {
  Result<std::ifstream> file = open_input(path);
  if (!file) return tl::unexpected(file.error());
  const Json document = Json::parse(*file, nullptr, false);
  if (document.is_discarded()) return fail(path + ": it is not JSON");
  return parse_runtime_config(document).map_error(
      [&](const Error& error) { return Error{.text = path + ": " + error.text}; });
}

}  // namespace lockstep::cache_sim
