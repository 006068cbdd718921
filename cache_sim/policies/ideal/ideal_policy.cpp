#include "cache_sim/policies/ideal/ideal_policy.hpp"

#include <fmt/format.h>

namespace lockstep::cache_sim {

IdealRequest IdealRequest::of(const RequestSpec& spec, const RequestStream& workload) {
  const std::uint32_t block = workload.block_size();
  const auto whole = [&](std::uint32_t size) { return size - size % block; };
  const std::uint32_t left = workload.knows_outputs() ? spec.tokens.size() - 1 : spec.prompt_size;
  return {.prompt = spec.tokens.prefix(whole(spec.prompt_size)),
          .stored = spec.tokens.prefix(whole(left)),
          .input_tokens = spec.prompt_size};
}

Result<std::optional<FoundIdeal>> find_ideal(std::string_view name) {
  for (const IdealEntry& entry : Registry<IdealEntry>::all()) {
    if (entry.name == name && !entry.name.ends_with("-N"))
      return FoundIdeal{Registry<IdealEntry>::find(entry.name), 0};
    const std::string_view stem = entry.name.substr(0, entry.name.size() - 1);
    if (!entry.name.ends_with("-N") || !name.starts_with(stem)) continue;
    return parse_integer(name.substr(stem.size()), 1, Tokens::kMaxSize)
        .map([&](std::int64_t number) {
          return std::optional(FoundIdeal{Registry<IdealEntry>::find(entry.name), number});
        })
        .map_error([&](const Error& error) {
          return Error{.text = fmt::format("policy {}: {}", name.substr(0, 60), error.text)};
        });
  }
  return std::nullopt;
}

}  // namespace lockstep::cache_sim
