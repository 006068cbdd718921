#include "cache_sim/policies/sglang/sglang_options.hpp"

#include <algorithm>

#include "reference/base/registry.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {
namespace {

/// The one of `names` that the config gives the field, by its number.
template <class Choice, std::size_t count>
std::optional<Choice> choice(const Config& config, const char* field,
                             const std::string_view (&names)[count]) {
  const auto* const name = std::ranges::find(names, config.text(field));
  if (name == std::end(names)) return std::nullopt;
  return static_cast<Choice>(name - std::begin(names));
}

}  // namespace

std::optional<WritePolicy> write_policy_of(const Config& config) {
  return choice<WritePolicy>(config, "write_policy", kWritePolicies);
}

std::optional<PrefetchPolicy> prefetch_policy_of(const Config& config) {
  return choice<PrefetchPolicy>(config, "prefetch_policy", kPrefetchPolicies);
}

SglangOptions SglangOptions::of(const Config& config) {
  const std::int64_t host_window_kv = config.number("host_window_kv");
  return {
      .track_interval = config.number("track_interval"),
      .lazy = config.number("lazy") != 0,
      .strip_thinking = config.number("strip_thinking") != 0,
      .skip_decode_lock = config.number("skip_decode_lock") != 0,
      .path_cap = config.number("path_cap"),
      .ring = config.number("replay_ring"),
      .host_kv = config.number("host_kv"),
      .host_states = config.number("host_states"),
      .write_policy = write_policy_of(config).value_or(WritePolicy::through),
      .disk = has_disk(config),
      .prefetch_policy = prefetch_policy_of(config).value_or(PrefetchPolicy::timeout),
      .prefetch_least = config.number("prefetch_least"),
      .window = config.number("window"),
      .window_kv = config.number("window_kv") == 0 ? config.kv_tokens : config.number("window_kv"),
      .window_interval = config.number("window_interval"),
      .window_release = config.number("window_release") != 0,
      .host_window_kv = config.number("window") == 0 ? 0
                        : host_window_kv == 0        ? config.number("host_kv")
                                                     : host_window_kv,
      .storage_ranks = config.number("storage_ranks"),
      .index_keys = config.number("index_keys") != 0};
}

namespace {

constexpr ConfigOption::Range kFlag{0, 1};
constexpr ConfigOption::Range kCount{0, std::int64_t{1} << 30};
constexpr ConfigOption::Range kOneOrMore{1, kCount.high};
const Registration<ConfigOption> kOptions{
    {.name = "track_interval", .otherwise = "256", .number = kOneOrMore},
    {.name = "lazy", .otherwise = "0", .number = kFlag},
    {.name = "strip_thinking", .otherwise = "0", .number = kFlag},
    {.name = "skip_decode_lock", .otherwise = "0", .number = kFlag},
    {.name = "path_cap", .otherwise = "-1", .number = {{-1, kCount.high}}},
    {.name = "write_policy", .otherwise = kWritePolicies[0], .needs = {"host_kv"}},
    {.name = "prefetch_policy", .otherwise = kPrefetchPolicies[0], .needs = {"disk"}},
    {.name = "prefetch_least", .otherwise = "256", .number = kOneOrMore, .needs = {"disk"}},
    {.name = "window", .otherwise = "0", .number = {{0, 1 << 20}}},
    {.name = "window_kv", .otherwise = "0", .number = kCount, .needs = {"window"}},
    {.name = "window_interval", .otherwise = "128", .number = {{1, 1 << 20}}, .needs = {"window"}},
    {.name = "window_release", .otherwise = "0", .number = kFlag, .needs = {"window"}},
    {.name = "host_window_kv", .otherwise = "0", .number = kCount, .needs = {"host_kv", "window"}},
    {.name = "storage_ranks", .otherwise = "1", .number = {{1, 8}}, .needs = {"disk"}},
    {.name = "index_keys", .otherwise = "0", .number = kFlag, .needs = {"host_kv"}},
    {.name = "replay_ring", .otherwise = "0", .number = {{0, 1024}}}};

}  // namespace
}  // namespace lockstep::cache_sim
