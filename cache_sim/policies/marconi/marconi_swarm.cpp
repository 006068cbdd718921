// Random configurations of Marconi's cache: one pool of bytes, in which a state takes the room of a
// few tokens or of very many, and FLOPs that do or do not grow with the bytes that they save.
#include "cache_sim/draw/swarm.hpp"
#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {
namespace {

void configure(SwarmDraw& part) {
  Draw draw = part.draw.stream("marconi bytes");
  auto& [all, accepted, fields, swarm, scale] = part;
  fields.optional("token_bytes", draw.between(1, 4));
  const std::int64_t tokens = draw.between(1, 12);  // that a state is worth
  fields.optional("state_bytes", swarm.config.number("token_bytes") * tokens + draw.between(0, 3));
  fields.optional("bootstrap", draw.between(0, 3));
  const bool own_flops = draw.chance(3, 4);
  fields.optional("flops_token", own_flops ? draw.between(1, 100) : 0);
  fields.optional("flops_pair", own_flops ? draw.between(0, 20) : 0);
  if (fields.free("alpha") && !draw.chance(1, 3))
    swarm.config.put("alpha", 100 * draw.between(0, 20));
}

/// Alpha is tuned on a window of requests, and only the requests after it show the effect.
void rate(SwarmDraw& part) {
  Draw draw = part.draw.stream("marconi rates");
  if (part.swarm.config.text("alpha") == "tuned" && draw.chance(1, 4)) part.swarm.operations *= 4;
}

const Registration<SwarmEntry> kRegistered{
    {.name = "marconi",
     .applies = [](const Accepted& accepted) { return accepted.fields.contains("alpha"); },
     .configure = configure,
     .rate = rate}};

}  // namespace
}  // namespace lockstep::cache_sim
