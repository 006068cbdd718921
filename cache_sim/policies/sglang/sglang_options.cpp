#include "cache_sim/policies/sglang/sglang_options.hpp"

#include <algorithm>

#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {

std::optional<WritePolicy> write_policy_of(const Config& config) {
  const auto* const name =
      std::find(std::begin(kWritePolicies), std::end(kWritePolicies), config.text("write_policy"));
  if (name == std::end(kWritePolicies)) return std::nullopt;
  return static_cast<WritePolicy>(name - std::begin(kWritePolicies));
}

SglangOptions SglangOptions::of(const Config& config) {
  return {.track_interval = config.number("track_interval"),
          .lazy = config.number("lazy") != 0,
          .strip_thinking = config.number("strip_thinking") != 0,
          .skip_decode_lock = config.number("skip_decode_lock") != 0,
          .path_cap = config.number("path_cap"),
          .ring = config.number("replay_ring"),
          .host_kv = config.number("host_kv"),
          .host_states = config.number("host_states"),
          .write_policy = write_policy_of(config).value_or(WritePolicy::through)};
}

namespace {

const Registration<ConfigOption> kTrackInterval{
    {.name = "track_interval", .otherwise = "256", .number = {{1, std::int64_t{1} << 30}}}};
const Registration<ConfigOption> kLazy{{.name = "lazy", .otherwise = "0", .number = {{0, 1}}}};
const Registration<ConfigOption> kStripThinking{
    {.name = "strip_thinking", .otherwise = "0", .number = {{0, 1}}}};
const Registration<ConfigOption> kSkipDecodeLock{
    {.name = "skip_decode_lock", .otherwise = "0", .number = {{0, 1}}}};
const Registration<ConfigOption> kPathCap{
    {.name = "path_cap", .otherwise = "-1", .number = {{-1, std::int64_t{1} << 30}}}};
const Registration<ConfigOption> kWritePolicy{
    {.name = "write_policy", .otherwise = kWritePolicies[0]}};
const Registration<ConfigOption> kReplayRing{
    {.name = "replay_ring", .otherwise = "0", .number = {{0, 1024}}}};

}  // namespace
}  // namespace lockstep::cache_sim
