// Random configurations of SGLang's caches.
#include <algorithm>

#include "cache_sim/draw/swarm.hpp"
#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/policies/sglang/sglang_options.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {
namespace {

void configure(SwarmDraw& part) {
  Draw draw = part.draw.stream("sglang options");
  ConfigDraw& fields = part.fields;
  fields.optional("track_interval", part.scale << draw.below(4));
  fields.optional("lazy", draw.chance(1, 4) ? 1 : 0);
  fields.optional("strip_thinking", draw.chance(1, 6) ? 1 : 0);
  fields.optional("skip_decode_lock", draw.chance(1, 6) ? 1 : 0);
  fields.optional("path_cap", draw.chance(1, 6) ? draw.between(0, 3) : -1);
  Draw ring = part.draw.stream("sglang ring");
  if (const std::int64_t size = ring.chance(1, 3) ? ring.between(1, 8) : 0;
      keeps_rings(part.swarm.config) && part.swarm.config.number("window") == 0)
    fields.optional("replay_ring", size);
  // One state slot a request: the interval is that of the ring.
  if (fields.has("replay_ring") && !fields.has("lazy") &&
      part.swarm.config.number("replay_ring") == 0)
    part.swarm.config.options.erase("track_interval");
}

/// Draws windows, for single operations: speculation, transfers, storages and rings do without.
void draw_windows(SwarmDraw& part) {
  Config& config = part.swarm.config;
  Draw draw = part.draw.stream("sglang windows");
  const bool tracks = part.fields.has("lazy");
  const bool draws = draw.chance(1, 4) && config.number("replay_ring") == 0 && !has_disk(config) &&
                     config.number("index_keys") == 0 && config.text(kFidelityField) == "label" &&
                     (!tracks || part.fields.free("overlap"));
  // A window shorter than a page, shorter than most edges, or longer than most prompts.
  const std::int64_t most = draw.chance(1, 3) ? 24 : 6;
  const std::int64_t window = draw.between(2, most * part.scale);
  part.fields.optional("window", draws ? window : 0);
  if (config.number("window") == 0) return;
  if (tracks) part.fields.optional("overlap", 0);
  // In half of the draws windows are what is scarce.
  const std::int64_t kv = config.kv_tokens * draw.between(2, draw.chance(1, 2) ? 4 : 8) / 8;
  part.fields.optional("window_kv", std::max(config.page, kv / config.page * config.page));
  part.fields.optional("window_interval", draw.between(1, 8));
  part.fields.optional("window_release", draw.chance(1, 2) ? 1 : 0);
  part.swarm.scheduled = false;
  part.swarm.config.ranks = 1;
  part.swarm.config.routing.clear();
}

/// Sometimes single operations have a storage behind the host.
void draw_storage(SwarmDraw& part) {
  const Config& config = part.swarm.config;
  if (config.number("host_kv") == 0 || config.number("index_keys") != 0 ||
      config.number("window") != 0)
    return;
  Draw draw = part.draw.stream("sglang storage");
  const bool draws = draw.chance(1, 2) && !part.swarm.scheduled;
  part.fields.optional("disk", draws ? 1 : 0);
  if (!has_disk(config)) return;
  part.swarm.scheduled = false;
  part.swarm.config.ranks = 1;
  part.swarm.config.routing.clear();
  // Half of the hosts have no room for what the storage has of a long prompt.
  if (draw.chance(1, 2)) part.fields.optional("host_kv", draw.between(2, 12) * part.scale);
  const std::int64_t least = draw.between(1, draw.chance(2, 3) ? 2 : 8) * part.scale;
  part.fields.optional("prefetch_least", least);
  Draw ranks = part.draw.stream("sglang storage ranks");
  part.fields.optional("storage_ranks", ranks.chance(1, 2) ? ranks.between(2, 3) : 1);
  if (part.fields.has("prefetch_policy") && part.fields.free("prefetch_policy"))
    part.swarm.config.put("prefetch_policy", kPrefetchPolicies[draw.below(3)]);
}

/// Draws a host tier.
void draw_host(SwarmDraw& part) {
  if (!part.accepted.can(Capability::tiers)) return;
  Draw draw = part.draw.stream("sglang host");
  const bool tiered = draw.chance(1, 2) || has_disk(part.swarm.config);
  const std::int64_t kv = draw.between(4, 100) * part.scale;
  // One state or two: what is on the host without a state, and what it refuses, are rare otherwise.
  const std::int64_t states = draw.between(1, draw.chance(1, 2) ? 2 : 8);
  if (tiered && part.fields.free("host_kv") && part.fields.free("host_states")) {
    part.fields.optional("host_kv", kv);
    part.fields.optional("host_states", states);
    if (part.fields.has("write_policy") && part.fields.free("write_policy"))
      // Half of the draws write back: loads of other requests meet there most.
      part.swarm.config.put("write_policy",
                            kWritePolicies[std::min<std::uint64_t>(
                                2, part.draw.stream("sglang write policy").below(4))]);
  }
  draw_storage(part);
  // Decisions do not depend on index keys, so half of the hosts without a storage copy them.
  const bool has_windows = part.swarm.config.number("window") != 0;
  if (has_host_tier(part.swarm.config) && has_windows) {
    Draw windows = part.draw.stream("sglang host windows");
    part.fields.optional("host_window_kv",
                         windows.between(1, windows.chance(1, 2) ? 12 : 60) * part.scale);
  }
  if (has_host_tier(part.swarm.config) && !has_disk(part.swarm.config) && !has_windows)
    part.fields.optional("index_keys", part.draw.stream("sglang index keys").chance(1, 2) ? 1 : 0);
}

void rate(SwarmDraw& part) {
  if (part.swarm.config.number("window") != 0)
    part.swarm.drafts = part.swarm.trees = part.swarm.sent = 0;
  if (part.accepted.can(Capability::tiers) && part.swarm.config.number("host_kv") != 0)
    part.swarm.copies = static_cast<int>(part.draw.stream("sglang copies").between(1, 12));
  part.swarm.backs_windows_up = part.swarm.copies != 0 && !part.fields.free("window") &&
                                part.swarm.config.number("window") != 0 &&
                                part.swarm.config.text("write_policy") == kWritePolicies[0];
  part.swarm.has_disk = part.swarm.prefetches =
      part.swarm.copies != 0 && has_disk(part.swarm.config);
  if (!part.swarm.has_disk) return;
  part.swarm.disk_ranks = static_cast<int>(part.swarm.config.number("storage_ranks"));
  part.swarm.copies += 6;
  part.swarm.flush = std::max(part.swarm.flush, 2);  // what the disk alone has is asked for
}

/// Draws SGLang's scheduler and the field room= that it asks with; neither for a child, which need
/// not know them.
void schedule(SwarmDraw& part) {
  Draw draw = part.draw.stream("sglang scheduler");
  draw_windows(part);
  draw_host(part);
  if (part.accepted.has_child) return;
  part.swarm.rooms = draw.chance(1, 4);
  if (part.swarm.scheduled && part.fields.free("scheduler") && draw.chance(1, 3))
    part.swarm.config.scheduler = "sglang";
}

const Registration<SwarmEntry> kRegistered{
    {.name = "sglang",
     .applies = [](const Accepted& accepted) { return accepted.can(Capability::tree); },
     .configure = configure,
     .schedule = schedule,
     .rate = rate}};

}  // namespace
}  // namespace lockstep::cache_sim
