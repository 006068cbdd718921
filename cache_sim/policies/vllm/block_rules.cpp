#include "cache_sim/policies/vllm/block_rules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "cache_sim/policies/vllm/vllm_options.hpp"
#include "cache_sim/policies/vllm/vllm_scheduler_options.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kMostBlock = 1 << 20;

/// One piece of `groups=`: attention:816, mamba:1648 or window:16:33 (a window of 33 tokens).
Result<GroupSpec> parse_group(std::string_view text) {
  const auto refuse = [&](const std::string& why) {
    return fail(fmt::format("field groups: `{}` {}", text.substr(0, 60), why));
  };
  const std::string_view kind = text.substr(0, text.find(':'));
  std::string_view rest = text.substr(std::min(kind.size() + 1, text.size()));
  GroupSpec group;
  if (kind == "attention")
    group.kind = GroupKind::attention;
  else if (kind == "window")
    group.kind = GroupKind::window;
  else if (kind == "mamba")
    group.kind = GroupKind::mamba;
  else
    return refuse("is none of attention:TOKENS, window:TOKENS:WINDOW and mamba:TOKENS");
  const std::string_view block = rest.substr(0, rest.find(':'));
  rest.remove_prefix(std::min(block.size() + 1, rest.size()));
  const Result<std::int64_t> size = parse_integer(block, 1, kMostBlock);
  if (!size) return refuse("needs the tokens of a block: " + size.error().text);
  group.block = *size;
  if (group.kind != GroupKind::window) {
    if (rest.empty()) return group;
    return refuse("has one number too many");
  }
  const Result<std::int64_t> window = parse_integer(rest, 2, kMostBlock);
  if (!window) return refuse("needs its window: " + window.error().text);
  group.window = *window;
  return group;
}

/// The groups of `config`, one of attention and three of Mamba where it names none.
Result<std::vector<GroupSpec>> groups_of(const VllmOptions& options, GroupKind mamba) {
  std::vector<GroupSpec> groups;
  std::string_view list = options.groups;
  while (!list.empty()) {
    const std::string_view piece = list.substr(0, list.find(','));
    list.remove_prefix(std::min(piece.size() + 1, list.size()));
    const Result<GroupSpec> group = parse_group(piece);
    if (!group) return tl::unexpected(group.error());
    groups.push_back(*group);
  }
  if (groups.empty())
    groups = {{GroupKind::attention, options.block},
              {GroupKind::mamba, options.block},
              {GroupKind::mamba, options.block},
              {GroupKind::mamba, options.block}};
  for (GroupSpec& group : groups)
    if (group.kind == GroupKind::mamba) group.kind = mamba;
  return groups;
}

/// The block of the groups that hold states, 0 where there is none.
Result<std::int64_t> block_of_states(const std::vector<GroupSpec>& groups,
                                     std::int64_t hash_block) {
  std::int64_t block = 0;
  for (const GroupSpec& group : groups) {
    if (group.block % hash_block != 0)
      return fail(fmt::format("field hash_block: {} does not divide the block of {} tokens",
                              hash_block, group.block));
    if (!is_state(group.kind)) continue;
    if (block != 0 && block != group.block)
      return fail("field groups: all Mamba groups have blocks of one size, that of the states");
    block = group.block;
  }
  if (groups.size() == 1 && hash_block != groups.front().block)
    return fail("field hash_block: a single group is hashed by its own blocks");
  return block;
}

Result<void> add_cpu_tiers(const Config& config, const VllmOptions& options, BlockRules& rules) {
  rules.cpu_chunks = options.cpu_chunks;
  rules.blocks_per_chunk = options.blocks_per_chunk;
  rules.cpu_blocks = options.cpu_blocks;
  rules.lazy_offload = options.lazy_offload != 0;
  rules.step_tokens = config.chunked_prefill;
  rules.has_disk = options.has_disk;
  if (rules.cpu_blocks == 1) return fail("field cpu_blocks: the null block alone holds nothing");
  if (rules.has_disk && rules.cpu_chunks == 0)
    return fail("field disk: the disk is behind a CPU tier, so it needs cpu_chunks=");
  if (rules.has_disk && rules.cpu_blocks > 0)
    return fail("field disk: it is for chunks alone, without cpu_blocks=");
  if (rules.cpu_chunks == 0 && rules.cpu_blocks == 0) return {};
  const bool has_others = std::ranges::any_of(rules.groups, [](const GroupSpec& group) {
    return group.kind != GroupKind::attention && group.kind != GroupKind::mamba;
  });
  if (has_others || rules.state_block == 0)
    return fail("field cpu_chunks: the CPU tier is for groups of attention and mamba");
  if (rules.cpu_blocks > 0 && rules.spec_groups.front().spec.kind != GroupKind::attention)
    return fail("field cpu_blocks: the host's blocks are for caches with a group of attention");
  if (options.eagle != 0 || options.checkpoint != 0 || config.overlap != 0)
    return fail("field cpu_chunks: not with eagle, checkpoint or overlap");
  const std::int64_t chunk = rules.state_block * rules.blocks_per_chunk;
  if (rules.retention && *rules.retention % chunk != 0)
    return fail(fmt::format("field retention: {} is no multiple of the {} of a chunk",
                            *rules.retention, counted(chunk, "token")));
  return {};
}

Result<void> add_ring(const Config& config, const VllmOptions& options, BlockRules& rules) {
  rules.ring = options.ring;
  if (rules.ring == 0) return {};
  if (rules.splitter_block == 0)
    return fail("field replay_ring: rings are for caches with a group of mamba");
  if (config.drafts != 0 || options.eagle != 0 || rules.cpu_chunks + rules.cpu_blocks > 0)
    return fail("field replay_ring: not with drafts, eagle or a CPU tier");
  return {};
}

}  // namespace

bool is_checkpoint_valid(const BlockRules& rules, std::int64_t start, std::int64_t end,
                         std::int64_t position, std::int64_t block) {
  if (rules.checkpoint_alignment == 0) return false;
  if (start % block != 0 && !rules.checkpoints_from_inside) return false;
  const std::int64_t column = ceil_div(end, block) - 2;
  const std::int64_t first = start == 0 ? -1 : (start - 1) / block;
  return start % rules.hash_block == 0 && column > first && start + rules.hash_block <= position &&
         position < end && (position - start) % rules.checkpoint_alignment == 0;
}

void BlockRules::complete() {
  scheduler_block = 1;
  state_block = splitter_block = 0;
  bool has_fine_mamba = false;
  bool has_coarse_window = false;
  spec_groups.clear();
  for (std::uint32_t i = 0; i < groups.size(); ++i) {
    const GroupSpec& group = groups[i];
    scheduler_block = std::lcm(scheduler_block, group.block);
    if (is_state(group.kind)) state_block = group.block;
    if (group.kind == GroupKind::mamba) splitter_block = group.block;
    has_fine_mamba |= group.kind == GroupKind::mamba && group.block > hash_block;
    has_coarse_window |= group.kind == GroupKind::window && group.block != hash_block;
    const auto same = std::ranges::find(spec_groups, group, &SpecGroup::spec);
    if (same == spec_groups.end())
      spec_groups.push_back({group, {i}});
    else
      same->groups.push_back(i);
  }
  std::ranges::stable_sort(spec_groups, [](const SpecGroup& a, const SpecGroup& b) {
    return a.spec.kind == GroupKind::attention && b.spec.kind != GroupKind::attention;
  });
  partial = groups.size() > 1 && has_fine_mamba && !has_coarse_window;
  hit_alignment = partial ? hash_block : scheduler_block;
  if (groups.size() == 1) hit_alignment = groups.front().block;
}

Result<BlockRules> BlockRules::of(const Config& config, GroupKind mamba) {
  BlockRules rules;
  const VllmOptions options = VllmOptions::of(config);
  const Result<std::vector<GroupSpec>> groups = groups_of(options, mamba);
  if (!groups) return tl::unexpected(groups.error());
  rules.groups = *groups;
  rules.blocks = options.blocks;
  if (rules.blocks < 2) return fail("field blocks: the null block alone holds nothing");
  rules.hash_block = options.hash_block;
  const Result<std::int64_t> mamba_block = block_of_states(rules.groups, rules.hash_block);
  if (!mamba_block) return tl::unexpected(mamba_block.error());
  if (options.retention != "none") {
    const Result<std::int64_t> tokens = parse_integer(options.retention, 0, 1 << 30);
    if (!tokens) return fail("field retention: " + tokens.error().text);
    rules.retention = *tokens;
  }
  const bool has_sparse = std::ranges::any_of(
      rules.groups, [](const GroupSpec& group) { return group.kind != GroupKind::attention; });
  if (rules.retention.value_or(0) > 0 && !has_sparse)
    return fail("field retention: attention alone keeps every block");
  const Result<VllmSchedulerOptions> scheduler = VllmSchedulerOptions::of(config);
  if (!scheduler) return tl::unexpected(scheduler.error());
  rules.watermark = scheduler->watermark;
  if (scheduler->is_vllm)
    rules.max_in_flight = config.chunked_prefill * (config.overlap == 0 ? 1 : 2);
  rules.drafts = config.drafts;
  rules.drops = options.eagle == 2;
  if (*mamba_block > 0 && config.drafts >= *mamba_block)
    return fail(fmt::format("field drafts: {} and a token do not fit into a state's block of {}",
                            counted(config.drafts, "draft"), counted(*mamba_block, "token")));
  if (options.modules > 1 && options.eagle == 0)
    return fail("field modules: MTP modules are an EAGLE of their own: eagle=1 or 2");
  rules.hash_lookahead = options.eagle == 1 ? options.modules : 0;
  rules.prefill_lookahead = options.eagle == 0 ? 0 : options.modules;
  rules.complete();
  if (rules.prefill_lookahead > rules.scheduler_block)
    return fail(fmt::format("field modules: {} is more than the {} of a block", options.modules,
                            counted(rules.scheduler_block, "token")));
  if (options.hash_algorithm != "none") {
    rules.hash_algorithm = block_hash_algorithm_from(options.hash_algorithm);
    if (!rules.hash_algorithm)
      return fail(fmt::format(
          "field hash_algorithm: `{}` is none of none, sha256, sha256_cbor, xxhash, xxhash_cbor",
          options.hash_algorithm));
  }
  rules.checkpoint_blocks = options.checkpoint > 0 ? 1 : 0;
  rules.checkpoint_alignment = options.checkpoint;
  // With several modules publication ends before a chunk does, so vLLM keeps none.
  rules.shared_prefix_checkpoint = options.shared_prefix_checkpoint != 0 && options.modules <= 1;
  if (options.shared_prefix_checkpoint != 0 && (!rules.drops || !rules.partial))
    return fail(
        "field shared_prefix_checkpoint: it needs eagle=2 and states that may lie inside a "
        "block");
  if (Result<void> sound = add_cpu_tiers(config, options, rules); !sound)
    return tl::unexpected(sound.error());
  if (Result<void> sound = add_ring(config, options, rules); !sound)
    return tl::unexpected(sound.error());
  if (rules.retention && *rules.retention % rules.scheduler_block != 0)
    return fail(
        fmt::format("field retention: {} is no multiple of {}, which all groups' blocks divide",
                    *rules.retention, rules.scheduler_block));
  return rules;
}

}  // namespace lockstep::cache_sim
