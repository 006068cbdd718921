#include "cache_sim/search/swarm.hpp"

#include <algorithm>
#include <vector>

namespace lockstep::cache_sim {
namespace {

/// States are stored at multiples of the page and of the chunk, so one of the two must divide the
/// other.
bool page_fits_chunk(const Config& config) {
  return config.page % config.model_chunk == 0 || config.model_chunk % config.page == 0;
}

/// Draws the sizes of pools, pages and chunks. One swarm in 24 has sizes as large as those of
/// servers.
void draw_pools(SwarmDraw& part) {
  auto& [draw, accepted, fields, swarm, scale] = part;
  const bool large = draw.chance(1, 24);
  scale = large ? 32 : 1;
  constexpr std::int64_t kPages[] = {1, 1, 2, 3, 4};
  const std::int64_t drawn_page = kPages[draw.below(5)];
  fields.optional("page", large && drawn_page > 1 ? drawn_page * 8 : drawn_page);
  fields.common("model_chunk", scale << draw.below(4));
  if (!page_fits_chunk(swarm.config)) {
    fields.common("model_chunk", swarm.config.page * draw.between(1, 2));
    if (!page_fits_chunk(swarm.config)) fields.common("page", 1);
  }
  const std::int64_t page = swarm.config.page;
  swarm.longest = static_cast<int>(draw.between(6, 40) * scale);
  // Pools range from "nothing fits" to "hardly anything is evicted".
  fields.common("kv_tokens",
                std::max<std::int64_t>(page, draw.between(8, 100) * scale / page * page));
  if (accepted.has_states) fields.common("state_slots", draw.between(1, 12));
  fields.common("request_rows", draw.between(1, 5));
  fields.common("max_running", draw.between(1, 5));
  fields.common("chunked_prefill", draw.between(1, 16) * scale);
}

/// Draws whether the trace has single operations or requests to a scheduler. A fixed scheduler, or
/// more than one rank, means requests.
void draw_level(SwarmDraw& part, SwarmLevel level, bool asks_for_ranks) {
  auto& [draw, accepted, fields, swarm, scale] = part;
  const bool usually = draw.chance(1, 3);
  swarm.scheduled = asks_for_ranks || !fields.free("scheduler") || usually;
  if (level != SwarmLevel::either) swarm.scheduled = level == SwarmLevel::requests;
  if (!swarm.scheduled) {
    swarm.config.ranks = 1;
    return;
  }
  fields.common("ranks", draw.chance(1, 4) ? draw.between(2, 3) : 1);
  if (fields.free("routing") && draw.chance(1, 2)) swarm.config.routing = "prefix";
}

/// Draws how often each kind of operation happens.
void draw_rates(SwarmDraw& part) {
  auto& [draw, accepted, fields, swarm, scale] = part;
  swarm.operations =
      static_cast<int>(swarm.scheduled ? draw.between(3, 16) : draw.between(20, 120));
  swarm.request = drawn_weight(draw, 9);
  swarm.tree = drawn_weight(draw, 8);
  if (!accepted.can(Capability::tree)) swarm.tree = 0;
  if (swarm.request + swarm.tree == 0) swarm.request = 9;
  swarm.evict = drawn_weight(draw, 1);
  swarm.check = drawn_weight(draw, 1);
  swarm.flush = draw.chance(1, 4) ? 1 : 0;
  swarm.extend = std::max(1, drawn_weight(draw, 8));
  swarm.checkpoint = drawn_weight(draw, 3);
  swarm.finish = drawn_weight(draw, 3);
  swarm.abort = drawn_weight(draw, 1);
  swarm.preempt = drawn_weight(draw, 1);
  swarm.shared = static_cast<int>(draw.below(11));
  swarm.drafts = draw.chance(1, 2) ? 0 : static_cast<int>(draw.between(1, 6));
  swarm.salted = draw.chance(2, 3) ? 0 : static_cast<int>(draw.between(1, 20));
  swarm.discarded = draw.chance(1, 2) ? 0 : static_cast<int>(draw.between(1, 5));
  swarm.urgent = draw.chance(2, 3) ? 0 : static_cast<int>(draw.between(1, 5));
  swarm.bad = draw.chance(1, 2) ? 0 : static_cast<int>(draw.between(1, 12));
  swarm.sessions = draw.chance(2, 3) ? 0 : static_cast<int>(draw.between(1, 3));
  swarm.running = static_cast<int>(draw.between(1, 5));
  swarm.piece = static_cast<int>(draw.between(1, 12) * scale);
  swarm.documents = static_cast<int>(draw.chance(3, 4) ? draw.between(1, 3) : draw.between(4, 20));
  swarm.letters = draw.chance(1, 4) ? static_cast<int>(draw.between(1, 3)) : 0;
  swarm.by_length = draw.chance(1, 3);
}

/// Draws the rates of operations that only some subjects take; each rate is 0 in half of the
/// swarms.
void draw_capabilities(SwarmDraw& part) {
  const auto of_ten = [&](const char* name) {
    Draw draw = part.draw.stream(name);
    return draw.chance(1, 2) ? 0 : static_cast<int>(draw.between(1, 6));
  };
  const Accepted& accepted = part.accepted;
  Swarm& swarm = part.swarm;
  if (accepted.can(Capability::transfers)) swarm.sent = of_ten("transfers");
  if (accepted.can(Capability::draft_trees)) {
    swarm.trees = of_ten("draft trees");
    swarm.padded = of_ten("padded");
    if (swarm.scheduled && swarm.padded != 0 && part.fields.free("graph_batches"))
      swarm.config.graph_batches = swarm.padded % 2 == 0 ? "1,2,4,8" : "4,8";
  }
  if (accepted.can(Capability::partial_finish)) swarm.cuts = of_ten("partial finish");
  Draw keys = part.draw.stream("content keys");
  // requests with different keys and equal tokens
  if (accepted.can(Capability::content_keys) && keys.chance(1, 4)) {
    swarm.keyed = static_cast<int>(keys.between(1, 8));
    swarm.shared = std::max(swarm.shared, 8);
  }
  Draw slots = part.draw.stream("slots");
  if (accepted.can(Capability::slots)) swarm.slots = drawn_weight(slots, 4);
  if (accepted.can(Capability::sequences)) {
    Draw draw = part.draw.stream("sequences");
    swarm.sequences = static_cast<int>(draw.between(2, 7));
    swarm.clone = drawn_weight(draw, 3);
    swarm.truncate = drawn_weight(draw, 3);
    swarm.capture = drawn_weight(draw, 2);
    swarm.restore = drawn_weight(draw, 2);
    swarm.together = std::max(1, drawn_weight(draw, 3));
  }
}

}  // namespace

Tokens drawn_tokens(const Swarm& swarm, Draw& draw, std::int64_t size) {
  if (swarm.letters != 0) {
    std::vector<std::uint32_t> ids(static_cast<std::size_t>(size));
    for (std::uint32_t& id : ids)
      id = static_cast<std::uint32_t>(1 + draw.below(static_cast<std::uint64_t>(swarm.letters)));
    return Tokens::of_ids(std::move(ids));
  }
  // Half of the prompts are of the first document, so there are hot and cold prefixes.
  const std::uint64_t document =
      draw.chance(1, 2) ? 0 : draw.below(static_cast<std::uint64_t>(swarm.documents));
  return Tokens::of_document(static_cast<Document>(1 + document),
                             static_cast<std::uint32_t>(draw.below(3)),
                             static_cast<std::uint32_t>(size));
}

Tokens drawn_prompt(const Swarm& swarm, Draw& draw, const std::vector<Tokens>& seen) {
  Tokens tokens;
  const auto longest = static_cast<std::uint32_t>(swarm.longest);
  const auto overhang = static_cast<std::uint32_t>(swarm.overhang_block);
  const bool hangs_over =
      swarm.overhangs != 0 && draw.chance(static_cast<std::uint64_t>(swarm.overhangs), 10);
  if (!seen.empty() && (hangs_over || draw.chance(static_cast<std::uint64_t>(swarm.shared), 10))) {
    const Tokens& old = seen[draw.below(seen.size())];
    const bool whole = draw.chance(1, 2);
    tokens = whole ? old : old.prefix(static_cast<std::uint32_t>(draw.below(old.size() + 1)));
  }
  if (tokens.empty() || (!hangs_over && !draw.chance(1, 3)))
    tokens = tokens.followed_by(drawn_tokens(swarm, draw, draw.between(1, swarm.piece)));
  if (tokens.size() > longest) tokens = tokens.prefix(longest);
  return hangs_over ? tokens.prefix((tokens.size() - 1) / overhang * overhang + 1) : tokens;
}

Accepted accepted_by(const PolicyEntry& policy) {
  return {.fields = policy.config_fields,
          .has_states = policy.has_states,
          .capabilities = policy.capabilities};
}

Accepted accepted_by_both(const Accepted& one, const Accepted& other) {
  Accepted both{.fields = one.fields & other.fields,
                .has_states = one.has_states || other.has_states,
                .capabilities = one.capabilities & other.capabilities,
                .has_child = one.has_child || other.has_child};
  if (one.has_states != other.has_states) both.capabilities.remove({Capability::tree});
  return both;
}

Swarm draw_swarm(Draw& draw, const Accepted& accepted, const Config& base, ConfigFields fixed,
                 SwarmLevel level) {
  Swarm swarm;
  swarm.config = base;
  const bool asks_for_ranks = fixed.contains("ranks") && base.ranks > 1;
  ConfigDraw fields(accepted.fields, std::move(fixed), swarm.config);
  SwarmDraw part{draw, accepted, fields, swarm};
  std::vector<SwarmEntry> families = Registry<SwarmEntry>::all();
  std::erase_if(families, [&](const SwarmEntry& family) { return !family.applies(accepted); });
  draw_pools(part);
  fields.optional("overlap", draw.chance(1, 4) ? 1 : 0);
  for (const SwarmEntry& family : families)
    if (family.configure != nullptr) family.configure(part);
  draw_level(part, level, asks_for_ranks);
  for (const SwarmEntry& family : families)
    if (family.schedule != nullptr) family.schedule(part);
  draw_rates(part);
  draw_capabilities(part);
  for (const SwarmEntry& family : families)
    if (family.rate != nullptr) family.rate(part);
  swarm.config.drop_idle();
  return swarm;
}

}  // namespace lockstep::cache_sim
