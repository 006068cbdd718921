// Random configurations of two servers.
#include "cache_sim/draw/swarm.hpp"
#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {
namespace {

void configure(SwarmDraw& part) {
  Draw draw = part.draw.stream("two servers");
  part.fields.optional("slices", draw.chance(1, 2) ? draw.between(2, 4) : 1);
  part.fields.optional("decode_kv", draw.chance(1, 2) ? draw.between(8, 100) * part.scale : 0);
  part.fields.optional("decode_states", draw.chance(1, 2) ? draw.between(1, 8) : 0);
  constexpr const char* kDrafts[] = {"none", "both", "decode"};
  if (part.fields.has("draft_model") && part.fields.free("draft_model"))
    part.swarm.config.put("draft_model", kDrafts[draw.below(3)]);
}

/// Its requests come as single operations alone: no scheduler sends them.
void schedule(SwarmDraw& part) {
  part.swarm.scheduled = false;
  part.swarm.config.ranks = 1;
  part.swarm.config.routing.clear();
}

void rate(SwarmDraw& part) {
  Draw draw = part.draw.stream("transfers of two servers");
  part.swarm.moves = static_cast<int>(draw.between(2, 9));
  part.swarm.copies = static_cast<int>(draw.between(2, 12));
  part.swarm.bad = 0;
  part.swarm.rooms = false;
}

const Registration<SwarmEntry> kRegistered{
    {.name = "sglang-pd",
     .applies = [](const Accepted& accepted) { return accepted.can(Capability::disaggregation); },
     .configure = configure,
     .schedule = schedule,
     .rate = rate}};

}  // namespace
}  // namespace lockstep::cache_sim
