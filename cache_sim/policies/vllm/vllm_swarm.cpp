// Random configurations of vLLM's caches and its scheduler.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "cache_sim/draw/swarm.hpp"
#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/policies/vllm/block_rules.hpp"
#include "cache_sim/policies/vllm/vllm_options.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {
namespace {

/// Cache groups, hash blocks and what a block cache keeps: from one group to several of different
/// kinds, blocks of a few tokens, pools from "one request fits" to "hardly anything is evicted".
void draw_blocks(Draw& draw, VllmOptions& options, std::int64_t& drafts) {
  const std::int64_t block = std::int64_t{2} << draw.below(3);
  const std::int64_t window = draw.between(2, 2 * block + 1);
  const std::string attention = "attention:" + std::to_string(block);
  const std::string mamba = ",mamba:" + std::to_string(block);
  options.hash_block = std::max<std::int64_t>(block >> draw.below(3), 1);
  const auto windows = [&](std::int64_t size) {
    return ",window:" + std::to_string(size) + ":" + std::to_string(window);
  };
  switch (draw.below(8)) {
    case 0: options.groups = draw.chance(1, 2) ? windows(block).substr(1) : attention; break;
    case 1: options.groups = attention + windows(options.hash_block); break;
    case 2: options.groups = attention + mamba + windows(options.hash_block); break;
    case 3: options.groups = attention + windows(block) + mamba; break;
    case 4: options.groups = attention + mamba + mamba + mamba; break;
    case 5: options.groups = mamba.substr(1) + "," + attention; break;
    default: options.groups = attention + mamba; break;
  }
  const bool is_single = options.groups.find(',') == std::string::npos;
  options.block = block;
  options.blocks = draw.between(4, draw.chance(1, 2) ? 16 : 60);
  options.retention = "none";
  if (draw.chance(1, 2))
    options.retention = std::to_string(draw.chance(1, 2) ? 0 : block * draw.between(1, 3));
  if (is_single) {
    options.hash_block = block;
    options.retention = "none";
  }
  options.eagle = draw.chance(1, 2) ? 0 : draw.between(1, 2);
  drafts = std::min<std::int64_t>(draw.chance(1, 3) ? 0 : draw.between(1, 3), block - 1);
}

/// Sometimes one of the two kinds of group has blocks twice as large as the other's.
void draw_sizes_apart(Draw& draw, VllmOptions& options) {
  if (options.groups != fmt::format("attention:{0},mamba:{0}", options.block)) return;
  if (!draw.chance(1, 3)) return;
  const bool is_attention = draw.chance(1, 2);
  options.groups = fmt::format("attention:{},mamba:{}", options.block * (is_attention ? 2 : 1),
                               options.block * (is_attention ? 1 : 2));
  if (options.retention != "none")  // a multiple of all blocks
    options.retention = std::to_string(2 * std::stoll(options.retention));
}

/// Sometimes no group of full attention, or two with blocks of two sizes.
void draw_odd_groups(Draw& draw, VllmOptions& options) {
  if (!draw.chance(1, 8) || options.groups.find("mamba") == std::string::npos) return;
  const auto group = [](const char* kind, std::int64_t block) {
    return fmt::format("{}:{}", kind, block);
  };
  const std::int64_t block = options.block;
  const std::string mamba = group("mamba", block);
  switch (draw.below(4)) {
    case 0: options.groups = mamba + "," + mamba; return;
    case 1:
      options.groups = fmt::format("window:{}:{},{}", options.hash_block, block + 1, mamba);
      return;
    case 2:
      options.groups =
          group("attention", 2 * block) + "," + group("attention", block) + "," + mamba;
      break;
    default:
      options.groups =
          mamba + "," + group("attention", block) + "," + group("attention", 2 * block);
      break;
  }
  if (options.retention != "none")  // a multiple of all blocks
    options.retention = std::to_string(2 * std::stoll(options.retention));
}

bool has_numbers(const Config& config) {
  return config.text(kFidelityField) != "label";
}

/// With numbers in the blocks, the groups have to fit the model. Where the drawn ones do not, there
/// is one of attention, and one of Mamba if the model has states.
void fit_groups_to_model(const ConfigDraw& fields, Swarm& swarm) {
  for (const char* const field : {"groups", "hash_block", "retention"})
    if (!fields.free(field)) return;
  Config config = swarm.config;
  config.overlap = 0;
  const auto fits = [&config] {
    return check_fidelity(*Registry<PolicyEntry>::find("vllm-align"), config).has_value();
  };
  if (fits()) return;
  VllmOptions options = VllmOptions::of(config);
  options.groups = fmt::format("attention:{0},mamba:{0}", options.block);
  options.write(config);
  if (!fits()) {
    options.groups = fmt::format("attention:{}", options.block);
    options.hash_block = options.block;
    options.retention = "none";
  }
  options.write(swarm.config);
}

void configure(SwarmDraw& part) {
  Draw draw = part.draw.stream("vllm options");
  auto& [all, accepted, fields, swarm, scale] = part;
  swarm.blocks = true;
  // A child need know neither the names of blocks nor groups with blocks of different sizes.
  if (fields.has("groups") && fields.free("groups")) {
    const VllmOptions usual = VllmOptions::of(swarm.config);
    VllmOptions drawn = usual;
    std::int64_t drafts = swarm.config.drafts;
    draw_blocks(draw, drawn, drafts);
    if (!accepted.has_child && fields.free("retention")) {
      draw_odd_groups(draw, drawn);
      draw_sizes_apart(draw, drawn);
    }
    for (const char* const field : {"block", "blocks", "drafts", "eagle", "groups", "hash_block"})
      if (!fields.free(field)) {  // they belong together
        drawn = usual;
        drafts = swarm.config.drafts;
      }
    if (!fields.has("retention") || !fields.free("retention")) drawn.retention = usual.retention;
    drawn.write(swarm.config);
    if (fields.has("drafts")) swarm.config.drafts = drafts;
    if (has_numbers(swarm.config)) fit_groups_to_model(fields, swarm);
  }
  constexpr const char* kAlgorithms[] = {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"};
  if (!accepted.has_child && fields.free("hash_algorithm") && draw.chance(1, 12))
    swarm.config.put("hash_algorithm", kAlgorithms[draw.below(4)]);
  fields.optional("checkpoint", draw.chance(1, 2) ? std::int64_t{1} << draw.below(3) : 0);
  const VllmOptions drawn = VllmOptions::of(swarm.config);
  if (drawn.eagle == 2 && drawn.hash_block < drawn.block &&
      drawn.groups.find("window") == std::string::npos &&
      drawn.groups.find("mamba") != std::string::npos)
    fields.optional("shared_prefix_checkpoint", static_cast<std::int64_t>(draw.below(2)));
  if (drawn.eagle != 0)
    fields.optional("modules",
                    draw.chance(1, 3) ? std::min<std::int64_t>(drawn.block, 2 + draw.below(2)) : 1);
}

/// Without drafts, hashes that cover later tokens do not work with overlap.
void draw_steps_ahead(Draw& draw, const ConfigDraw& fields, Swarm& swarm) {
  Config& config = swarm.config;
  if (!swarm.scheduled && fields.free("overlap") && !draw.chance(1, 3)) config.overlap = 0;
  if (config.overlap == 0) return;
  if (fields.free("drafts") && draw.chance(1, 2)) config.drafts = 0;
  if (config.drafts != 0 && has_numbers(config)) {  // which such steps do not have
    if (fields.free("drafts"))
      config.drafts = 0;
    else if (fields.free("overlap"))
      config.overlap = 0;
  }
  if (config.drafts != 0 || config.number("eagle") == 0 || !fields.free("eagle")) return;
  for (const char* const option : {"eagle", "shared_prefix_checkpoint"}) config.put(option, 0);
  config.put("modules", 1);
}

std::string drawn_scheduler(Draw& draw, const Config& config, std::int64_t scale) {
  const VllmOptions options = VllmOptions::of(config);
  std::string text = "vllm";
  const bool has_states =
      options.groups.empty() || options.groups.find("mamba") != std::string::npos;
  if (draw.chance(1, 4)) text += ":priority";
  // Sometimes a chunk is less than a verification.
  const auto drafts = static_cast<std::uint64_t>(config.drafts);
  if (drafts > 0 && draw.below(has_states ? 6 : 4) < (has_states ? 1 : 3)) {
    text += ":long_prefill=" + std::to_string(1 + draw.below(drafts));
  } else if (draw.chance(1, 3)) {
    text +=
        ":long_prefill=" + std::to_string((1 + draw.below(12)) * static_cast<std::uint64_t>(scale));
    if (draw.chance(1, 2)) text += ":adaptive";
  }
  if (draw.chance(1, 5)) text += ":watermark=" + std::to_string(1 + draw.below(6));
  const bool has_drafter = drafts > 0 && options.eagle == 0 && config.chunked_prefill > 1;
  if (has_drafter && draw.chance(1, 2)) text += ":draft_model";
  if (has_states || options.modules > 1 || draw.chance(1, 2)) return text;
  text += ":encoder=" + std::to_string(2 + draw.below(12));
  if (draw.chance(1, 2)) text += ":encoder_cache=" + std::to_string(2 + draw.below(20));
  if (draw.chance(1, 2)) text += ":whole_images";
  return text;
}

/// Options of vLLM's scheduler that the cache itself reads, for traces of single operations.
void draw_block_budget(Draw& draw, Swarm& swarm) {
  if (!draw.chance(1, 4)) return;
  const Config& config = swarm.config;
  // The scheduler refuses these.
  if (has_disk(config) || (config.drafts > 0 && has_host_tier(config))) return;
  const VllmOptions options = VllmOptions::of(config);
  std::string text = "vllm";
  if (!draw.chance(1, 3)) text += ":watermark=" + std::to_string(1 + draw.below(6));
  if (draw.chance(1, 3)) text += ":long_prefill=" + std::to_string(1 + draw.below(12));
  if (config.drafts > 0 && options.eagle == 0 && config.chunked_prefill > 1 && draw.chance(1, 2))
    text += ":draft_model";
  swarm.config.scheduler = text;
}

/// Images with preemptions: urgent requests keep their place, and memory is short.
void draw_preempted_images(Draw& draw, ConfigDraw& fields, Swarm& swarm) {
  std::string& scheduler = swarm.config.scheduler;
  if (scheduler.find(":encoder=") == std::string::npos || !draw.chance(1, 6)) return;
  if (scheduler.find(":priority") == std::string::npos) scheduler.insert(4, ":priority");
  fields.optional("blocks", static_cast<std::int64_t>(6 + draw.below(10)));
}

/// A CPU tier has chunks, or blocks of a manager of its own, or both.
void draw_host_blocks(Draw draw, ConfigDraw& fields, const Config& config) {
  const std::uint64_t kind = draw.below(8);
  const bool is_free = fields.free("cpu_blocks") && fields.free("cpu_chunks");
  if (is_free && kind < 2) fields.optional("cpu_chunks", 0);
  if (is_free && kind < 5)
    fields.optional("cpu_blocks", draw.between(3, draw.chance(1, 2) ? 10 : 40));
  if (!fields.free("cpu_blocks") && config.number("cpu_blocks") != 0)
    fields.optional("cpu_chunks", 0);
  if (config.number("cpu_blocks") != 0) fields.optional("lazy_offload", draw.chance(1, 3) ? 1 : 0);
}

/// Sometimes single operations, and more rarely requests, have a CPU tier, of few chunks: beside
/// groups of attention and states, without what its look-up does not know.
void draw_cpu_tier(Draw draw, ConfigDraw& fields, Swarm& swarm) {
  Config& config = swarm.config;
  VllmOptions options = VllmOptions::of(config);
  const auto has = [&](const char* kind) { return options.groups.find(kind) != std::string::npos; };
  const bool fits = options.groups.empty() || (has("mamba") && !has("window") &&
                                               (has("attention") || options.cpu_blocks == 0));
  const bool wants_disk = has_disk(config);
  const bool names_vllm = config.scheduler.starts_with("vllm");
  const bool is_free = (fields.free("scheduler") || names_vllm) && fields.free("drafts");
  const bool is_scheduled =
      swarm.scheduled && is_free && !wants_disk && draw.stream("scheduled").chance(1, 4);
  const bool may_draw = is_scheduled || !swarm.scheduled;
  const bool draws = ((draw.chance(1, 2) && fits && may_draw) || wants_disk) &&
                     fields.has("cpu_chunks") && fields.free("cpu_chunks") && !has_numbers(config);
  if (!draws && !has_host_tier(config)) return;
  swarm.scheduled = is_scheduled;
  const bool has_scheduler = is_scheduled || names_vllm;
  if (has_scheduler && fields.free("drafts")) config.drafts = 0;
  config.ranks = 1;
  config.routing.clear();
  if (!fits && fields.free("groups"))
    config.put("groups", fmt::format("attention:{0},mamba:{0}", options.block));
  for (const char* const field : {"eagle", "checkpoint", "shared_prefix_checkpoint", "overlap"})
    fields.optional(field, 0);
  fields.optional("modules", 1);
  if (options.retention == "none")
    fields.optional("blocks_per_chunk", draw.chance(2, 3) ? 1 : 2);
  else if (config.number("blocks_per_chunk") > 1 && fields.free("retention"))
    config.put("retention", "none");  // which would have to be a multiple of its chunks
  if (draws) fields.optional("cpu_chunks", draw.between(2, draw.chance(1, 2) ? 8 : 40));
  if (config.number("cpu_chunks") > 0 && config.number("cpu_blocks") == 0)
    fields.optional("disk", draw.chance(1, 2) && !has_scheduler ? 1 : 0);
  // Prompts need more chunks than there are.
  if (draws && has_disk(config) && draw.chance(2, 3))
    fields.optional("cpu_chunks", draw.between(2, 5));
  if (!has_disk(config)) draw_host_blocks(draw.stream("host blocks"), fields, config);
  if (!draws || BlockRules::of(config)) return;
  fields.optional("cpu_chunks", 0);
  fields.optional("cpu_blocks", 0);
  fields.optional("disk", 0);
}

/// Sometimes a decode step leaves its token in a ring: beside states, without drafts and transfers.
void draw_ring(Draw draw, ConfigDraw& fields, Swarm& swarm) {
  Config& config = swarm.config;
  const bool draws = fields.has("replay_ring") && draw.chance(1, 5) && config.drafts == 0 &&
                     config.number("eagle") == 0 && !has_host_tier(config) && !has_numbers(config);
  if (draws) fields.optional("replay_ring", draw.between(1, 8));
  if (config.number("replay_ring") == 0) return;
  if (fields.free("drafts")) config.drafts = 0;
  for (const char* const field :
       {"eagle", "shared_prefix_checkpoint", "cpu_chunks", "cpu_blocks", "lazy_offload", "disk"})
    fields.optional(field, 0);
  fields.optional("modules", 1);
  const VllmOptions options = VllmOptions::of(config);
  if (!options.groups.empty() && options.groups.find("mamba") == std::string::npos &&
      fields.free("groups"))
    config.put("groups", fmt::format("attention:{0},mamba:{0}", options.block));
  if (draws && !BlockRules::of(config)) fields.optional("replay_ring", 0);
}

void schedule(SwarmDraw& part) {
  Draw draw = part.draw.stream("vllm scheduler");
  auto& [all, accepted, fields, swarm, scale] = part;
  draw_cpu_tier(part.draw.stream("vllm cpu tier"), fields, swarm);
  draw_ring(part.draw.stream("vllm ring"), fields, swarm);
  draw_steps_ahead(draw, fields, swarm);
  if (!fields.free("scheduler")) return;
  if (!swarm.scheduled) return draw_block_budget(draw, swarm);
  swarm.config.scheduler = drawn_scheduler(draw, swarm.config, scale);
  draw_preempted_images(draw, fields, swarm);
  // A block as large as a step's budget, of which a draft model takes a part.
  if (swarm.config.scheduler.find(":draft_model") != std::string::npos && draw.chance(1, 2))
    fields.common("chunked_prefill", swarm.config.number("block"));
}

/// If hits can end inside a block: requests share a prompt of several blocks and branch off near
/// the end of one of them.
void draw_meetings(Draw& draw, ConfigDraw& fields, Swarm& swarm) {
  const VllmOptions options = VllmOptions::of(swarm.config);
  const auto block = static_cast<int>(options.block);
  if (swarm.scheduled || options.hash_block >= block || !draw.chance(1, 2)) return;
  swarm.meetings = static_cast<int>(draw.between(3, 8));
  swarm.running = std::max(swarm.running, 3);
  swarm.piece = std::max(swarm.piece, 4 * block);
  swarm.longest = std::max(swarm.longest, 6 * block);
  fields.optional("blocks", options.blocks + 24);
}

/// Sessions live long, and their drafts are often rejected. Between two turns they hold their
/// blocks: sometimes there are many of them and little memory, and the cache is reset meanwhile.
void draw_sessions(SwarmDraw& part) {
  Draw draw = part.draw.stream("vllm sessions");
  auto& [all, accepted, fields, swarm, scale] = part;
  if (draw.chance(1, 2)) {
    swarm.extend = std::max(swarm.extend, 16);
    swarm.finish = swarm.abort = swarm.preempt = 1;
    if (swarm.config.drafts > 0) swarm.drafts = std::max(swarm.drafts, 6);
  }
  if (!draw.chance(1, 3)) return;
  swarm.running = static_cast<int>(draw.between(4, 8));
  fields.common("max_running", swarm.running);
  fields.common("request_rows", swarm.running);
  fields.optional("blocks", swarm.running * draw.between(2, 4));
  swarm.flush = static_cast<int>(draw.between(1, 3));
}

/// A load of a connector needs blocks of its own: often there are just as many as it needs.
void draw_connector(SwarmDraw& part) {
  Draw draw = part.draw.stream("vllm connector");
  Swarm& swarm = part.swarm;
  if (swarm.scheduled || swarm.sent == 0 || !draw.chance(1, 2)) return;
  swarm.sent = std::max(swarm.sent, 6);
  part.fields.optional("blocks", draw.between(4, 12));
}

/// An admission that lacks one token after its hit is padded where others decode: prompts come
/// again, one token behind a block, while somebody runs.
void draw_padding(SwarmDraw& part) {
  Draw draw = part.draw.stream("vllm padding");
  auto& [all, accepted, fields, swarm, scale] = part;
  Config& config = swarm.config;
  swarm.shared = std::max(swarm.shared, 9);
  swarm.operations = std::max(swarm.operations, 8);
  swarm.piece = std::max(swarm.piece, 6);
  swarm.apart = 7;
  swarm.overhangs = static_cast<int>(draw.between(3, 8));
  swarm.overhang_block = config.number(draw.chance(1, 2) ? "hash_block" : "block");
  if (draw.chance(1, 4)) return;
  if (fields.free("groups") && draw.chance(1, 2))
    fields.optional("drafts", std::min<std::int64_t>(3, swarm.config.number("block") - 1));
  fields.common("max_running", std::max<std::int64_t>(config.max_running, 3));
  fields.common("request_rows", std::max<std::int64_t>(config.request_rows, 3));
  fields.common("chunked_prefill", std::max(config.chunked_prefill, 2 + 2 * config.drafts));
  fields.optional("blocks", config.number("blocks") + 16);
}

/// A load needs a prompt that was stored, settled and evicted from the device: few documents come
/// again and again, and the device loses much.
void draw_reloads(SwarmDraw& part) {
  Draw draw = part.draw.stream("vllm reloads");
  Swarm& swarm = part.swarm;
  swarm.shared = 9;
  swarm.documents = 1;
  swarm.evict = static_cast<int>(draw.between(1, 4));
  swarm.operations = std::max(swarm.operations, 8);
}

/// Draws everything about vLLM's caches.
void rate(SwarmDraw& part) {
  Draw draw = part.draw.stream("vllm rates");
  auto& [all, accepted, fields, swarm, scale] = part;
  if (has_host_tier(swarm.config)) {
    swarm.sent = 0;  // nobody else sends tokens
    swarm.copies = static_cast<int>(part.draw.stream("vllm copies").between(1, 12));
    swarm.has_disk = has_disk(swarm.config);
    if (swarm.has_disk) {
      swarm.copies += 6;
      swarm.evict = std::max(swarm.evict, 2);
      swarm.flush = std::max(swarm.flush, 2);  // what is on the disk alone comes again
      swarm.shared = 9;
      swarm.piece = std::max(swarm.piece, 2 * static_cast<int>(swarm.config.number("block")));
      swarm.longest = std::max(swarm.longest, 3 * swarm.piece);
      part.fields.optional("blocks", std::max<std::int64_t>(swarm.config.number("blocks"), 24));
    }
    // Prompts come again when the device has lost them.
    swarm.evict = std::max(swarm.evict, 1);
    swarm.shared = std::max(swarm.shared, 7);
  }
  if (swarm.config.number("cpu_blocks") != 0) draw_reloads(part);
  if (swarm.config.number("replay_ring") != 0) {
    swarm.sent = 0;
    swarm.extend = std::max(swarm.extend, 12);
    if (!swarm.scheduled) swarm.turns = static_cast<int>(part.draw.stream("turns").below(4));
  }
  draw_connector(part);
  draw_meetings(draw, fields, swarm);
  swarm.block = swarm.config.number("block");
  swarm.check = std::max(1, swarm.check) * 3;
  if (swarm.config.drafts > 0) swarm.drafts = static_cast<int>(draw.between(0, 10));
  if (swarm.scheduled && swarm.config.drafts == 0) swarm.drafts = 0;
  if (!swarm.scheduled && draw.below(4) < (swarm.config.drafts > 0 ? 3 : 1)) {
    swarm.turns = static_cast<int>(2 + draw.below(5));
    if (swarm.keyed == 0) draw_sessions(part);
  }
  if (swarm.scheduled) swarm.cuts = static_cast<int>(draw.below(4));
  const std::string& scheduler = swarm.config.scheduler;
  if (swarm.scheduled && swarm.config.drafts > 0 && draw.chance(3, 4)) draw_padding(part);
  if (scheduler.find(":encoder=") == std::string::npos) return;
  swarm.images = static_cast<int>(2 + draw.below(8));
  if (scheduler.find(":priority") != std::string::npos) swarm.urgent = std::max(swarm.urgent, 3);
}

const Registration<SwarmEntry> kRegistered{
    {.name = "vllm",
     .applies = [](const Accepted& accepted) { return accepted.fields.contains("blocks"); },
     .configure = configure,
     .schedule = schedule,
     .rate = rate}};

}  // namespace
}  // namespace lockstep::cache_sim
