#include "cache_sim/search/swarm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "cache_sim/policies/vllm/vllm_options.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

/// Sets one field where the subjects have it and nobody has fixed it.
class ConfigDraw {
 public:
  ConfigDraw(ConfigFields accepted, ConfigFields fixed, Config& config)
      : accepted_(accepted), config_(config), fixed_(fixed) {
    for (const std::string& field : config.changed()) fixed_.add(field);
  }

  bool free(std::string_view field) const { return !fixed_.contains(field); }
  bool has(std::string_view field) const { return accepted_.contains(field); }
  /// A common field, which every policy honours.
  void common(std::string_view field, std::int64_t value) {
    if (free(field))
      require(config_.set(field, std::to_string(value)).has_value(), "a drawn value is in range");
  }
  /// A field that the subjects may have.
  void optional(std::string_view field, std::int64_t value) {
    if (has(field)) common(field, value);
  }

 private:
  ConfigFields accepted_;
  Config& config_;
  ConfigFields fixed_;
};

/// States on a grid of pages and chunks exist where one of the two divides the other.
bool page_fits_chunk(const Config& config) {
  return config.page % config.model_chunk == 0 || config.model_chunk % config.page == 0;
}

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
    case 0: options.groups = draw.aside(2, 27) == 0 ? windows(block).substr(1) : attention; break;
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
  drafts = std::min<std::int64_t>(draw.chance(1, 2) ? 0 : draw.between(1, 3), block - 1);
}

/// Mostly the usual weight, sometimes none and sometimes much.
int weight(Draw& draw, int usual) {
  const std::uint64_t kind = draw.below(8);
  if (kind == 0) return 0;
  return kind == 1 ? usual * 4 : usual;
}

/// What servers do around the cache, beside the draws that were there before it.
void draw_server(const Draw& draw, Swarm& swarm) {
  const auto of_ten = [&](std::uint64_t which) {
    return draw.aside(2, which) == 0 ? 0 : static_cast<int>(1 + draw.aside(6, which + 1));
  };
  swarm.trees = of_ten(3);
  swarm.cuts = of_ten(5);
  swarm.sent = of_ten(7);
  swarm.padded = of_ten(9);
}

/// One pool of bytes: a state is worth a few tokens or a whole pool of them, and what costs no
/// memory in proportion to its FLOPs meets what costs much.
void draw_bytes(Draw& draw, ConfigDraw& fields, Swarm& swarm) {
  fields.common("token_bytes", draw.between(1, 4));
  fields.common("state_bytes",
                swarm.config.number("token_bytes") * draw.between(1, 12) + draw.between(0, 3));
  fields.common("bootstrap", draw.between(0, 3));
  const bool own_flops = draw.chance(3, 4);
  fields.optional("flops_token", own_flops ? draw.between(1, 100) : 0);
  fields.optional("flops_pair", own_flops ? draw.between(0, 20) : 0);
  if (!fields.free("alpha") || draw.chance(1, 3)) return;
  swarm.config.put("alpha", 100 * draw.between(0, 20));
}

/// Sizes as they are in servers, now and then: what is done differently for them is done, too.
/// Returns the scale of all sizes.
std::int64_t draw_pools(Draw& draw, const Accepted& accepted, ConfigDraw& fields, Swarm& swarm) {
  const bool large = draw.chance(1, 24);
  const std::int64_t scale = large ? 32 : 1;
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
  // Pools from "nothing fits" to "hardly anything is evicted".
  fields.common("kv_tokens",
                std::max<std::int64_t>(page, draw.between(8, 100) * scale / page * page));
  if (accepted.has_states) fields.common("state_slots", draw.between(1, 12));
  fields.common("request_rows", draw.between(1, 5));
  fields.common("max_running", draw.between(1, 5));
  fields.common("chunked_prefill", draw.between(1, 16) * scale);
  return scale;
}

void draw_options(Draw& draw, std::int64_t scale, ConfigDraw& fields) {
  fields.optional("track_interval", scale << draw.below(4));
  fields.optional("lazy", draw.chance(1, 4) ? 1 : 0);
  fields.optional("overlap", draw.chance(1, 4) ? 1 : 0);
  fields.optional("strip_thinking", draw.chance(1, 6) ? 1 : 0);
  fields.optional("skip_decode_lock", draw.chance(1, 6) ? 1 : 0);
  fields.optional("path_cap", draw.chance(1, 6) ? draw.between(0, 3) : -1);
}

/// Sometimes one of the two kinds of group has blocks twice as large as the other's.
void draw_sizes_apart(const Draw& draw, VllmOptions& options) {
  if (options.groups != fmt::format("attention:{0},mamba:{0}", options.block)) return;
  if (draw.aside(3, 41) != 0) return;
  const bool is_attention = draw.aside(2, 42) == 0;
  options.groups = fmt::format("attention:{},mamba:{}", options.block * (is_attention ? 2 : 1),
                               options.block * (is_attention ? 1 : 2));
  if (options.retention != "none")  // a multiple of all blocks
    options.retention = std::to_string(2 * std::stoll(options.retention));
}

/// Sometimes no group of full attention, or two with blocks of two sizes.
void draw_odd_groups(const Draw& draw, VllmOptions& options) {
  if (draw.aside(8, 57) != 0 || options.groups.find("mamba") == std::string::npos) return;
  const auto group = [](const char* kind, std::int64_t block) {
    return fmt::format("{}:{}", kind, block);
  };
  const std::int64_t block = options.block;
  const std::string mamba = group("mamba", block);
  switch (draw.aside(4, 58)) {
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

void draw_block_fields(Draw& draw, ConfigDraw& fields, Swarm& swarm) {
  // A child need know neither the names of blocks nor groups with blocks of different sizes.
  const bool has_child = !fields.has("hash_algorithm");
  if (fields.has("groups") && fields.free("groups")) {
    const VllmOptions usual = VllmOptions::of(swarm.config);
    VllmOptions drawn = usual;
    std::int64_t drafts = swarm.config.drafts;
    draw_blocks(draw, drawn, drafts);
    if (!has_child && fields.free("retention")) {
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
  }
  constexpr const char* kAlgorithms[] = {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"};
  if (!has_child && fields.free("hash_algorithm") && draw.aside(12, 43) == 0)
    swarm.config.put("hash_algorithm", kAlgorithms[draw.aside(4, 44)]);
  fields.optional("checkpoint", draw.aside(2, 20) == 0 ? std::int64_t{1} << draw.aside(3, 21) : 0);
  const VllmOptions drawn = VllmOptions::of(swarm.config);
  if (drawn.eagle == 2 && drawn.hash_block < drawn.block &&
      drawn.groups.find("window") == std::string::npos &&
      drawn.groups.find("mamba") != std::string::npos)
    fields.optional("shared_prefix_checkpoint", static_cast<std::int64_t>(draw.aside(2, 22)));
  if (drawn.eagle != 0)
    fields.optional("modules", draw.aside(3, 25) == 0
                                   ? std::min<std::int64_t>(drawn.block, 2 + draw.aside(2, 26))
                                   : 1);
}

/// Without drafts the hashes of tokens that come later do not go with steps ahead.
void draw_steps_ahead(const Draw& draw, const ConfigDraw& fields, Swarm& swarm) {
  Config& config = swarm.config;
  if (!swarm.scheduled && fields.free("overlap") && draw.aside(3, 53) != 0) config.overlap = 0;
  if (config.overlap == 0) return;
  if (fields.free("drafts") && draw.aside(2, 28) == 0) config.drafts = 0;
  if (config.drafts != 0 || config.number("eagle") == 0 || !fields.free("eagle")) return;
  for (const char* const option : {"eagle", "shared_prefix_checkpoint"}) config.put(option, 0);
  config.put("modules", 1);
}

std::string drawn_vllm_scheduler(const Draw& draw, const Config& config, std::int64_t scale) {
  const VllmOptions options = VllmOptions::of(config);
  std::string text = "vllm";
  const bool has_states =
      options.groups.empty() || options.groups.find("mamba") != std::string::npos;
  if (draw.aside(4, 29) == 0) text += ":priority";
  // Sometimes a chunk is less than a verification.
  const auto drafts = static_cast<std::uint64_t>(config.drafts);
  if (drafts > 0 && draw.aside(has_states ? 6 : 4, 48) < (has_states ? 1 : 3)) {
    text += ":long_prefill=" + std::to_string(1 + draw.aside(drafts, 49));
  } else if (draw.aside(3, 4) == 0) {
    text += ":long_prefill=" +
            std::to_string((1 + draw.aside(12, 5)) * static_cast<std::uint64_t>(scale));
    if (draw.aside(2, 30) == 0) text += ":adaptive";
  }
  if (draw.aside(5, 32) == 0) text += ":watermark=" + std::to_string(1 + draw.aside(6, 33));
  const bool has_drafter = drafts > 0 && options.eagle == 0 && config.chunked_prefill > 1;
  if (has_drafter && draw.aside(2, 34) == 0) text += ":draft_model";
  if (has_states || options.modules > 1 || draw.aside(2, 35) == 0) return text;
  text += ":encoder=" + std::to_string(2 + draw.aside(12, 36));
  if (draw.aside(2, 37) == 0) text += ":encoder_cache=" + std::to_string(2 + draw.aside(20, 38));
  if (draw.aside(2, 39) == 0) text += ":whole_images";
  return text;
}

/// What the cache reads of vLLM's scheduler: single operations ask it as that would.
void draw_block_budget(const Draw& draw, Swarm& swarm) {
  if (draw.aside(4, 59) != 0) return;
  const Config& config = swarm.config;
  const VllmOptions options = VllmOptions::of(config);
  std::string text = "vllm";
  if (draw.aside(3, 60) != 0) text += ":watermark=" + std::to_string(1 + draw.aside(6, 61));
  if (draw.aside(3, 62) == 0) text += ":long_prefill=" + std::to_string(1 + draw.aside(12, 63));
  if (config.drafts > 0 && options.eagle == 0 && config.chunked_prefill > 1 &&
      draw.aside(2, 64) == 0)
    text += ":draft_model";
  swarm.config.scheduler = text;
}

/// Images of requests that are preempted, whichever of them they are: the urgent ones stay, and
/// memory is short.
void draw_preempted_images(const Draw& draw, ConfigDraw& fields, Swarm& swarm) {
  std::string& scheduler = swarm.config.scheduler;
  if (scheduler.find(":encoder=") == std::string::npos || draw.aside(6, 65) != 0) return;
  if (scheduler.find(":priority") == std::string::npos) scheduler.insert(4, ":priority");
  fields.optional("blocks", static_cast<std::int64_t>(6 + draw.aside(10, 66)));
}

/// Single operations of one rank, or requests to a scheduler.
void draw_level(Draw& draw, SwarmLevel level, bool asks_for_ranks, std::int64_t scale,
                ConfigDraw& fields, Swarm& swarm) {
  const bool is_asked_for = swarm.blocks && !fields.free("scheduler");
  const bool usually = draw.chance(1, 4);
  // What cuts chunks and holds nothing after a look-up goes with vLLM's scheduler alone.
  swarm.scheduled =
      asks_for_ranks || is_asked_for || (swarm.blocks ? draw.aside(4, 3) == 0 : usually);
  if (level != SwarmLevel::either) swarm.scheduled = level == SwarmLevel::requests;
  if (swarm.blocks) draw_steps_ahead(draw, fields, swarm);
  if (swarm.blocks && swarm.scheduled && !is_asked_for) {
    swarm.config.scheduler = drawn_vllm_scheduler(draw, swarm.config, scale);
    draw_preempted_images(draw, fields, swarm);
    // A block as large as a step, of which a draft model takes a part.
    if (swarm.config.scheduler.find(":draft_model") != std::string::npos && draw.aside(2, 50) == 0)
      fields.common("chunked_prefill", swarm.config.number("block"));
  }
  if (swarm.blocks && !swarm.scheduled && !is_asked_for) draw_block_budget(draw, swarm);
  if (!swarm.scheduled) {
    swarm.config.ranks = 1;
  } else {
    fields.common("ranks", draw.chance(1, 4) ? draw.between(2, 3) : 1);
    if (fields.free("routing") && draw.chance(1, 2)) swarm.config.routing = "prefix";
  }
}

/// What happens, how often.
void draw_rates(Draw& draw, const Accepted& accepted, Swarm& swarm) {
  swarm.operations =
      static_cast<int>(swarm.scheduled ? draw.between(3, 16) : draw.between(20, 120));
  swarm.request = weight(draw, 9);
  swarm.tree = weight(draw, 8);
  if (!accepted.can(Capability::tree)) swarm.tree = 0;
  if (swarm.request + swarm.tree == 0) swarm.request = 9;
  swarm.evict = weight(draw, 1);
  swarm.check = weight(draw, 1);
  swarm.flush = draw.chance(1, 4) ? 1 : 0;
  swarm.extend = std::max(1, weight(draw, 8));
  swarm.checkpoint = weight(draw, 3);
  swarm.finish = weight(draw, 3);
  swarm.abort = weight(draw, 1);
  swarm.preempt = weight(draw, 1);
  swarm.shared = static_cast<int>(draw.below(11));
  swarm.drafts = draw.chance(1, 2) ? 0 : static_cast<int>(draw.between(1, 6));
  swarm.salted = draw.chance(2, 3) ? 0 : static_cast<int>(draw.between(1, 20));
  swarm.discarded = draw.chance(1, 2) ? 0 : static_cast<int>(draw.between(1, 5));
  swarm.urgent = draw.chance(2, 3) ? 0 : static_cast<int>(draw.between(1, 5));
  swarm.bad = draw.chance(1, 2) ? 0 : static_cast<int>(draw.between(1, 12));
  swarm.sessions = draw.chance(2, 3) ? 0 : static_cast<int>(draw.between(1, 3));
}

/// What vLLM's caches are asked for.
void draw_block_rates(Draw& draw, Swarm& swarm) {
  swarm.check = std::max(1, swarm.check) * 3;
  if (swarm.config.drafts > 0) swarm.drafts = static_cast<int>(draw.between(0, 10));
  if (swarm.scheduled && swarm.config.drafts == 0) swarm.drafts = 0;
  if (!swarm.scheduled && draw.aside(4, 54) < (swarm.config.drafts > 0 ? 3 : 1))
    swarm.turns = static_cast<int>(2 + draw.aside(5, 55));
  if (swarm.scheduled) swarm.cuts = static_cast<int>(draw.aside(4, 31));
  const std::string& scheduler = swarm.config.scheduler;
  // Who lacks one token after a hit is padded, so prompts come again.
  if (swarm.scheduled && swarm.config.drafts > 0 && draw.aside(2, 67) == 0)
    swarm.shared = std::max(swarm.shared, 9);
  if (scheduler.find(":encoder=") == std::string::npos) return;
  swarm.images = static_cast<int>(2 + draw.aside(8, 45));
  if (scheduler.find(":priority") != std::string::npos) swarm.urgent = std::max(swarm.urgent, 3);
}

/// Where a hit can end inside a block, requests of one prompt, which has several blocks, meet
/// around one of these.
void draw_meetings(const Draw& draw, ConfigDraw& fields, Swarm& swarm) {
  const VllmOptions options = VllmOptions::of(swarm.config);
  const auto block = static_cast<int>(options.block);
  if (swarm.scheduled || options.hash_block >= block || draw.aside(2, 46) != 0) return;
  swarm.meetings = static_cast<int>(1 + draw.aside(5, 47));
  swarm.running = std::max(swarm.running, 3);
  swarm.piece = std::max(swarm.piece, 4 * block);
  swarm.longest = std::max(swarm.longest, 6 * block);
  fields.optional("blocks", options.blocks + 24);
}

void draw_sequences(Draw& draw, Swarm& swarm) {
  swarm.sequences = static_cast<int>(draw.between(2, 7));
  swarm.clone = weight(draw, 3);
  swarm.truncate = weight(draw, 3);
  swarm.capture = weight(draw, 2);
  swarm.restore = weight(draw, 2);
  swarm.together = std::max(1, weight(draw, 3));
}

}  // namespace

Tokens drawn_tokens(const Swarm& swarm, Draw& draw, std::int64_t size) {
  if (swarm.letters != 0) {
    std::vector<std::uint32_t> ids(static_cast<std::size_t>(size));
    for (std::uint32_t& id : ids)
      id = static_cast<std::uint32_t>(1 + draw.below(static_cast<std::uint64_t>(swarm.letters)));
    return Tokens::of_ids(std::move(ids));
  }
  // One document in two is the first: hot and cold prefixes.
  const std::uint64_t document =
      draw.chance(1, 2) ? 0 : draw.below(static_cast<std::uint64_t>(swarm.documents));
  return Tokens::of_document(static_cast<Document>(1 + document),
                             static_cast<std::uint32_t>(draw.below(3)),
                             static_cast<std::uint32_t>(size));
}

Tokens drawn_prompt(const Swarm& swarm, Draw& draw, const std::vector<Tokens>& seen) {
  Tokens tokens;
  if (!seen.empty() && draw.chance(static_cast<std::uint64_t>(swarm.shared), 10)) {
    const Tokens& old = seen[draw.below(seen.size())];
    const bool whole = draw.chance(1, 2);
    tokens = whole ? old : old.prefix(static_cast<std::uint32_t>(draw.below(old.size() + 1)));
  }
  if (tokens.empty() || !draw.chance(1, 3))
    tokens = tokens.followed_by(drawn_tokens(swarm, draw, draw.between(1, swarm.piece)));
  const auto longest = static_cast<std::uint32_t>(swarm.longest);
  return tokens.size() > longest ? tokens.prefix(longest) : tokens;
}

Accepted accepted_by(const PolicyEntry& policy) {
  return {.fields = policy.config_fields,
          .has_states = policy.has_states,
          .capabilities = policy.capabilities,
          .rooms = policy.capabilities.contains(Capability::tree)};
}

Accepted accepted_by_both(const Accepted& one, const Accepted& other) {
  Accepted both{.fields = one.fields & other.fields,
                .has_states = one.has_states || other.has_states,
                .capabilities = one.capabilities & other.capabilities,
                .rooms = one.rooms && other.rooms};
  if (one.has_states != other.has_states) both.capabilities.remove({Capability::tree});
  return both;
}

Swarm draw_swarm(Draw& draw, const Accepted& accepted, const Config& base, ConfigFields fixed,
                 SwarmLevel level) {
  Swarm swarm;
  swarm.config = base;
  swarm.blocks = accepted.fields.contains("blocks");
  ConfigDraw fields(accepted.fields, fixed, swarm.config);
  const std::int64_t scale = draw_pools(draw, accepted, fields, swarm);
  draw_options(draw, scale, fields);
  draw_block_fields(draw, fields, swarm);
  if (accepted.can(Capability::transfers) && draw.aside(3, 23) == 0)
    swarm.sent = static_cast<int>(1 + draw.aside(6, 24));
  const bool asks_for_ranks = fixed.contains("ranks") && base.ranks > 1;
  draw_level(draw, level, asks_for_ranks, scale, fields, swarm);
  draw_rates(draw, accepted, swarm);
  if (swarm.blocks) draw_block_rates(draw, swarm);
  swarm.running = static_cast<int>(draw.between(1, 5));
  swarm.piece = static_cast<int>(draw.between(1, 12) * scale);
  swarm.documents = static_cast<int>(draw.chance(3, 4) ? draw.between(1, 3) : draw.between(4, 20));
  swarm.letters = draw.chance(1, 4) ? static_cast<int>(draw.between(1, 3)) : 0;
  if (swarm.blocks) draw_meetings(draw, fields, swarm);
  if (accepted.can(Capability::content_keys) && draw.aside(4, 51) == 0) {  // beside equal tokens
    swarm.keyed = static_cast<int>(1 + draw.aside(8, 52));
    swarm.shared = std::max(swarm.shared, 8);
  }
  if (accepted.fields.contains("alpha")) {
    draw_bytes(draw, fields, swarm);
    // What is tuned on a window of requests is seen in those after it.
    if (swarm.config.text("alpha") == "tuned" && draw.aside(4, 40) == 0) swarm.operations *= 4;
  }
  if (accepted.can(Capability::slots)) swarm.slots = weight(draw, 4);
  constexpr const char* kLayers[] = {"", "mamba", "attention", "mamba,attention,mamba",
                                     "attention,mamba,mamba,attention"};
  if (accepted.fields.contains("layers") && fields.free("layers"))
    swarm.config.put("layers", kLayers[draw.below(std::size(kLayers))]);
  swarm.rooms = accepted.rooms && draw.aside(4, 0) == 0;
  if (swarm.blocks) swarm.block = swarm.config.number("block");
  if (accepted.rooms && swarm.scheduled && fields.free("scheduler") && draw.aside(3, 1) == 0)
    swarm.config.scheduler = "sglang";
  swarm.by_length = draw.aside(3, 2) == 0;
  if (accepted.can(Capability::draft_trees)) {
    draw_server(draw, swarm);
    if (swarm.scheduled && swarm.padded != 0 && fields.free("graph_batches"))
      swarm.config.graph_batches = swarm.padded % 2 == 0 ? "1,2,4,8" : "4,8";
  }
  if (accepted.can(Capability::sequences)) draw_sequences(draw, swarm);
  return swarm;
}

}  // namespace lockstep::cache_sim
