#include "cache_sim/policies/vllm/block_manager.hpp"

#include <algorithm>
#include <limits>

#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

BlockManager::BlockManager(BlockRules rules)
    : rules_(std::move(rules)),
      pool_(rules_),
      published_(rules_.groups.size()),
      added_(rules_.groups.size()) {
  hit_.columns.resize(rules_.groups.size());
}

// --- What an allocation needs --------------------------------------------------------------------

/// The number of tokens whose blocks the group no longer needs once `tokens` are computed (rule
/// 19).
std::int64_t BlockManager::skipped(const GroupSpec& spec, std::int64_t tokens) const {
  if (is_state(spec.kind)) return tokens - 1;
  if (spec.kind == GroupKind::attention) return 0;
  const std::int64_t again = std::max<std::int64_t>(0, rules_.prefill_lookahead - 1);
  return std::max<std::int64_t>(0, tokens - spec.window + 1 - again);
}

std::int64_t BlockManager::free_among(std::span<const BlockId> blocks) const {
  return std::ranges::count_if(
      blocks, [&](BlockId block) { return block != kNullBlock && pool_.references(block) == 0; });
}

std::int64_t BlockManager::need_of_attention(std::uint32_t group, const BlockRequest& request,
                                             std::span<const BlockId> hit,
                                             const Demand& demand) const {
  const GroupSpec& spec = rules_.groups[group];
  const auto held = static_cast<std::int64_t>(request.tables[group].columns.size());
  std::int64_t required = ceil_div(demand.slots, spec.block);
  if (demand.is_cap && spec.kind == GroupKind::window) {
    const std::int64_t again = std::max<std::int64_t>(0, rules_.prefill_lookahead - 1);
    const std::int64_t most =
        std::min(spec.window - 1 + again + rules_.max_in_flight, rules_.max_length);
    required = std::min(required, ceil_div(most, spec.block) + 1);
  }
  const auto hits = static_cast<std::int64_t>(hit.size());
  const std::int64_t below = skipped(spec, demand.total) / spec.block;
  const std::int64_t fresh = std::max<std::int64_t>(required - std::max(below, held + hits), 0);
  const std::int64_t unused = std::clamp<std::int64_t>(below - held, 0, hits);
  const bool ends_inside = hits > 0 && demand.local % spec.block != 0;
  return fresh + free_among(hit.subspan(static_cast<std::size_t>(unused))) + (ends_inside ? 1 : 0);
}

/// Tokens of the state that the forward stores inside its chunk, in the column before its last one;
/// 0 where it stores none there.
std::int64_t BlockManager::checkpoint_of(std::uint32_t group, const BlockTable& table,
                                         const Demand& demand) const {
  if (rules_.checkpoint_blocks == 0 || demand.main < demand.prefill_end) return 0;
  const std::int64_t block = rules_.groups[group].block;
  const std::int64_t position = last_checkpoint(rules_, demand.main, rules_.hit_alignment);
  if (!is_checkpoint_valid(rules_, demand.total, demand.main, position, block)) return 0;
  const std::int64_t column = ceil_div(demand.main, block) - 2;
  const auto held = static_cast<std::int64_t>(table.columns.size());
  const bool is_free = column >= held ||
                       table.columns[static_cast<std::size_t>(column)] == kNullBlock ||
                       (table.has_running && column >= held - rules_.drafts);
  return is_free ? position : 0;
}

/// One block for the running state and one for each scratch state, where they have none yet.
/// Columns between the hit and these need no block.
std::int64_t BlockManager::need_of_mamba(std::uint32_t group, const BlockRequest& request,
                                         std::span<const BlockId> hit, const Demand& demand) const {
  const std::int64_t block = rules_.groups[group].block;
  const BlockTable& table = request.tables[group];
  std::int64_t fresh = ceil_div(demand.main, block) + rules_.drafts -
                       static_cast<std::int64_t>(hit.size() + table.columns.size());
  const bool copies = (!hit.empty() && demand.local % block != 0) || table.partial_column >= 0;
  if (copies) fresh = std::max<std::int64_t>(fresh, 0) + 1;
  const bool stores_inside = checkpoint_of(group, table, demand) > 0;
  // The state that another server sends needs a column of its own if the chunk passes that column's
  // end.
  const auto hits = static_cast<std::int64_t>(hit.size());
  const std::int64_t sent = ceil_div(demand.total, block);
  const bool keeps_sent = demand.total > demand.local && sent > hits &&
                          ceil_div(demand.main, block) > sent && rules_.counts_sent_state;
  if (fresh > 0)
    fresh = std::min(fresh, 1 + (copies ? 1 : 0) + (keeps_sent ? 1 : 0) + (stores_inside ? 1 : 0) +
                                (table.has_running ? 0 : rules_.drafts));
  return fresh + free_among(hit);
}

std::int64_t BlockManager::need(const BlockRequest& request, const BlockHit* hit,
                                const Demand& demand, bool& same_step) const {
  std::int64_t sum = 0;
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const GroupSpec& spec = rules_.groups[group];
    std::span<const BlockId> columns;
    if (hit != nullptr) columns = hit->columns[group];
    // A state is there only after this step's forward. The test is by key: an older block that
    // is served for a key which somebody published again in this step waits as well.
    if (is_state(spec.kind) && !columns.empty() && was_published_now(group, columns.back()) &&
        !rules_.uses_states_of_this_step)
      same_step = true;
    if (spec.kind == GroupKind::mamba) {
      sum += need_of_mamba(group, request, columns, demand);
      continue;
    }
    // A block that a hit shares in part is copied before the forward that fills it has run.
    const bool ends_inside = !columns.empty() && demand.local % spec.block != 0;
    if (ends_inside && was_published_now(group, columns.back()) && !rules_.copies_unwritten_kv) {
      LOCKSTEP_MARK("vllm.waits_for_kv_of_this_step");
      same_step = true;
    }
    sum += need_of_attention(group, request, columns, demand);
  }
  return sum;
}

std::int64_t BlockManager::remaining(const BlockRequest& request) const {
  bool same_step = false;
  return need(request, nullptr,
              {.slots = request.known,
               .main = request.known,
               .local = request.computed,
               .total = request.computed,
               .is_cap = true},
              same_step);
}

// --- Giving back ---------------------------------------------------------------------------------

/// Columns below the running state; null gaps lie between them.
void BlockManager::retire_states(BlockTable& table, std::int64_t columns) {
  for (std::int64_t i = columns - 1; i >= table.retired; --i) {
    BlockId& column = table.columns[static_cast<std::size_t>(i)];
    if (column != kNullBlock) batch_.push_back(column);
    column = kNullBlock;
  }
  if (rules_.gives_back_retired_states) pool_.give_back(batch_);
  table.retired = std::max(table.retired, columns);
}

void BlockManager::give_back_skipped(BlockRequest& request, std::int64_t tokens) {
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const GroupSpec& spec = rules_.groups[group];
    if (spec.kind == GroupKind::attention) continue;
    BlockTable& table = request.tables[group];
    const auto held = static_cast<std::int64_t>(table.columns.size());
    const std::int64_t below =
        std::min(std::max<std::int64_t>(skipped(spec, tokens), 0) / spec.block, held);
    batch_.clear();
    if (spec.kind == GroupKind::mamba) {
      retire_states(table, below);
      continue;
    }
    for (std::int64_t i = below - 1; i >= 0; --i) {
      BlockId& column = table.columns[static_cast<std::size_t>(i)];
      if (column == kNullBlock) break;
      batch_.push_back(column);
      column = kNullBlock;
    }
    pool_.give_back(batch_);
  }
}

void BlockManager::free(BlockRequest& request) {
  for (BlockTable& table : request.tables) {
    std::ranges::reverse(table.columns);
    pool_.give_back(table.columns);
    table.columns.clear();
    std::vector<BlockId> kept = std::move(table.columns);
    table = BlockTable{};
    table.columns = std::move(kept);  // its memory
  }
  request.runs = false;
  request.quiet_until = 0;
  std::erase_if(handoffs_, [&](const Handoff& one) { return one.request == request.offload; });
}

std::vector<BlockManager::Handoff> BlockManager::take_handoffs() {
  std::ranges::stable_sort(handoffs_, {}, &Handoff::group);
  return std::exchange(handoffs_, {});
}

/// Source and target of every copy were held until here (rule 20): before a connector decides what
/// to store.
void BlockManager::release_copies() {
  if (copies_.empty()) return;
  std::ranges::stable_sort(copies_, {}, &BlockCopy::group);
  batch_.clear();
  for (const BlockCopy& copy : copies_) {
    batch_.push_back(copy.source);
    if (rules_.releases_copy_targets) batch_.push_back(copy.target);
  }
  pool_.give_back(batch_);
}

bool BlockManager::forget_keys() {
  if (pool_.free_count() != pool_.block_count()) return false;
  for (BlockId block = 1; block <= pool_.block_count(); ++block) pool_.remove_keys(block);
  return true;
}

// --- Taking --------------------------------------------------------------------------------------

/// References the hit's blocks in all groups before any block is popped (rule 5).
void BlockManager::take_hits(BlockRequest& request, const Allocation& wanted, std::int64_t local) {
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const GroupSpec& spec = rules_.groups[group];
    const std::vector<BlockId>& hit = wanted.hit->columns[group];
    BlockTable& table = request.tables[group];
    const std::int64_t below =
        std::max<std::int64_t>(skipped(spec, local + wanted.external), 0) / spec.block;
    table.columns.assign(static_cast<std::size_t>(below), kNullBlock);
    for (std::size_t i = static_cast<std::size_t>(below); i < hit.size(); ++i) {
      if (hit[i] != kNullBlock && rules_.hits_take_references) pool_.touch(hit[i]);
      table.columns.push_back(hit[i]);
    }
    table.cached = static_cast<std::int64_t>(table.columns.size());
    if (static_cast<std::size_t>(below) >= hit.size() || local % spec.block == 0) continue;
    table.cached = table.partial_column = local / spec.block;
    table.partial_block = hit.back();
  }
}

/// Blocks for tokens that another server computed, as far as the group looks at them (rule 24).
void BlockManager::take_external(BlockRequest& request, std::int64_t total, std::int64_t external) {
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const GroupSpec& spec = rules_.groups[group];
    const std::int64_t seen = total - std::max<std::int64_t>(skipped(spec, total), 0);
    if (std::min(seen, external) <= 0) continue;
    std::vector<BlockId>& columns = request.tables[group].columns;
    const auto required = static_cast<std::size_t>(ceil_div(total, spec.block));
    while (columns.size() < required) columns.push_back(pool_.pop());
  }
}

/// A hit inside a block: the request gets a copy. A request that has published a state inside its
/// own running block keeps the block, and the keys move to the copy (rules 20, 21).
void BlockManager::copy_on_write(std::uint32_t group, BlockTable& table, BlockId copy) {
  const BlockId source = table.partial_block;
  BlockId& column = table.columns[static_cast<std::size_t>(table.partial_column)];
  require(column == source, "a block that is copied stands in its column");
  copies_.push_back({source, copy, group});
  if (table.has_running) {
    pool_.move_keys(source, copy);
    pool_.touch(source);
    if (pool_.has_key(copy)) note_published(group, pool_.primary(copy).key);
  } else {
    column = copy;
    pool_.touch(copy);
  }
  table.partial_column = -1;
  table.partial_block = kNullBlock;
}

void BlockManager::take_new_attention(std::uint32_t group, BlockTable& table, std::int64_t slots) {
  std::vector<BlockId>& added = added_[group];
  added.clear();
  if (table.partial_column >= 0) {
    added.push_back(pool_.pop());
    copy_on_write(group, table, added.front());
  }
  const auto required = static_cast<std::size_t>(ceil_div(slots, rules_.groups[group].block));
  while (table.columns.size() < required) {
    table.columns.push_back(pool_.pop());
    added.push_back(table.columns.back());
  }
}

/// Null columns up to the running state, the scratch blocks that this step leaves behind, then new
/// blocks.
void BlockManager::take_new_states(std::uint32_t group, BlockRequest& request,
                                   const Demand& demand) {
  BlockTable& table = request.tables[group];
  const std::int64_t block = rules_.groups[group].block;
  std::vector<BlockId>& columns = table.columns;
  std::vector<BlockId>& added = added_[group];
  added.clear();
  const auto held = static_cast<std::int64_t>(columns.size());
  const std::int64_t required = ceil_div(demand.main, block) + rules_.drafts;
  table.checkpoint = checkpoint_of(group, table, demand);
  table.checkpoint_column = ceil_div(demand.main, block) - 2;
  const std::int64_t inside = table.checkpoint > 0 ? 1 : 0;
  const bool copies = table.partial_column >= 0;
  const bool had_running = table.has_running;
  if (required <= held && !copies && inside == 0) {
    table.has_running = true;
    return;
  }
  const std::int64_t running = required - rules_.drafts - 1;
  // After rejected drafts the last state may lie in a column of theirs, beyond its tokens. The
  // chunk copies it from there and ends further on.
  const std::int64_t last = held - 1 - rules_.drafts;
  if (had_running && last >= ceil_div(demand.total, block) && last < running - inside)
    table.passed = last;
  while (static_cast<std::int64_t>(columns.size()) < running - inside)
    columns.push_back(kNullBlock);
  if (had_running)
    for (std::int64_t i = held - rules_.drafts; i < std::min(held, running - inside); ++i) {
      const BlockId scratch = columns[static_cast<std::size_t>(i)];
      require(pool_.references(scratch) == 1 && !pool_.has_key(scratch),
              "a scratch block is nobody else's");
      columns.push_back(scratch);
      columns[static_cast<std::size_t>(i)] = kNullBlock;
    }
  std::int64_t fresh =
      std::max<std::int64_t>(required - static_cast<std::int64_t>(columns.size()), 0);
  const BlockId copy = copies ? pool_.pop() : kNullBlock;
  if (copies && !had_running) added.push_back(copy);
  added.insert(added.end(), columns.begin() + held, columns.end());
  for (; fresh > 0; --fresh) {
    columns.push_back(pool_.pop());
    added.push_back(columns.back());
  }
  if (copies) copy_on_write(group, table, copy);
  if (copies && had_running && table.produced > 0 && request.offload > 0)
    handoffs_.push_back({request.offload, group, copy, table.produced});
  if (copies) table.produced = 0;
  table.has_running = true;
}

void BlockManager::take_new(BlockRequest& request, const Demand& demand) {
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    BlockTable& table = request.tables[group];
    if (rules_.groups[group].kind == GroupKind::mamba)
      take_new_states(group, request, demand);
    else
      take_new_attention(group, table, demand.slots);
  }
}

/// The number of tokens up to which allocations change nothing: no column begins or ends, no key is
/// published, nothing is given back.
std::int64_t BlockManager::quiet_until(const BlockRequest& request, std::int64_t total) const {
  if (rules_.drafts > 0 || rules_.hash_lookahead > 0 || total <= request.prompt) return 0;
  if (rules_.prefill_lookahead > 1) return 0;  // keys are published some tokens late
  std::int64_t until = std::numeric_limits<std::int64_t>::max();
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const GroupSpec& spec = rules_.groups[group];
    const BlockTable& table = request.tables[group];
    if (spec.kind == GroupKind::window || table.partial_column >= 0 || table.checkpoint > 0)
      return 0;
    if (spec.kind == GroupKind::mamba_all) {
      const std::int64_t behind = (total - 1) / spec.block - 1;
      if (behind >= 0 && table.columns[static_cast<std::size_t>(behind)] != kNullBlock) return 0;
    }
    if (spec.kind == GroupKind::mamba && table.retired < (total - 1) / spec.block) return 0;
    until = std::min(until, ceil_div(total, spec.block) * spec.block - 1);
  }
  return until;
}

Allocated BlockManager::allocate_slowly(BlockRequest& request, const Allocation& wanted) {
  const bool is_first = !request.runs;
  const std::int64_t hit = is_first && wanted.hit != nullptr ? wanted.hit->tokens : 0;
  const std::int64_t local = request.computed + hit;
  const std::int64_t total = local + wanted.external;
  const bool has_watermark =
      (is_first || wanted.must_fit) && wanted.others_run && rules_.keeps_watermark;
  const std::int64_t watermark = has_watermark ? rules_.watermark : 0;
  request.tables.resize(rules_.groups.size());
  Demand demand{.local = local, .total = total};
  if (rules_.retention == 0) demand.prefill_end = std::max(request.prompt, request.known - 1);
  const BlockHit* const offered = is_first ? wanted.hit : nullptr;
  bool same_step = false;
  if (wanted.must_fit) {
    demand.slots = demand.main = std::min(request.known, rules_.max_length);
    demand.is_cap = true;
    const std::int64_t all = need(request, offered, demand, same_step);
    if (same_step) return Allocated::same_step;
    if (all + watermark > pool_.free_count()) return Allocated::no_blocks;
    demand.is_cap = false;
  }
  demand.main = total + wanted.tokens;
  demand.slots = std::min(demand.main + wanted.lookahead, rules_.max_length);
  const std::int64_t in_flight = rules_.frees_windows_under_way ? 0 : request.in_flight;
  give_back_skipped(request, std::max<std::int64_t>(0, total - in_flight));
  const std::int64_t needed = need(request, offered, demand, same_step);
  if (same_step) return Allocated::same_step;
  if (needed + watermark > pool_.free_count() - wanted.reserved) return Allocated::no_blocks;
  if (offered != nullptr) take_hits(request, wanted, local);
  if (wanted.external > 0) take_external(request, total, wanted.external);
  request.runs = true;
  take_new(request, demand);
  const bool delays = wanted.delays_keys && !rules_.keys_loads_under_way;
  if (!delays) publish(request, std::min(demand.main, request.known));
  request.quiet_until = wanted.delays_keys ? 0 : quiet_until(request, demand.main);
  return Allocated::yes;
}

}  // namespace lockstep::cache_sim
