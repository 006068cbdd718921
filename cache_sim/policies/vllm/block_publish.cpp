// Publication: decides which blocks get a key, and when. vLLM publishes the blocks that a step will
// fill before the step's forward has run.
#include <algorithm>

#include "cache_sim/policies/vllm/block_manager.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

void BlockManager::note_published(std::uint32_t group, KeyId key) {
  std::vector<std::uint32_t>& steps = published_[group];
  if (key >= steps.size()) steps.resize(std::max<std::size_t>(key + 1, steps.size() * 2));
  steps[key] = step_;
}

/// Whether the key under which the block is found was published in this step, by whomever (rule
/// 17).
bool BlockManager::was_published_now(std::uint32_t group, BlockId block) const {
  if (block == kNullBlock || !pool_.has_key(block)) return false;
  const KeyId key = pool_.primary(block).key;
  return key < published_[group].size() && published_[group][key] == step_;
}

std::int64_t BlockManager::cacheable(const GroupSpec& spec, std::int64_t tokens) const {
  const std::int64_t again = std::max<std::int64_t>(0, rules_.prefill_lookahead - 1);
  const std::int64_t final = std::max<std::int64_t>(0, tokens - again);
  if (rules_.groups.size() == 1) return final;
  const auto aligned = [&](std::int64_t size) {
    return rules_.partial ? size : floor_to(size, rules_.scheduler_block);
  };
  if (!rules_.drops || aligned(tokens) == 0) return aligned(tokens);
  return std::min(final, aligned(final) + spec.block);
}

/// Places where a later request can resume: the end of this prompt, as a repetition and as an
/// extension of it reach it, and where another request left this prefix.
void BlockManager::list_boundaries(const BlockRequest& request, const GroupSpec& spec) {
  boundaries_.clear();
  if (rules_.drops) {
    const std::int64_t unit = rules_.scheduler_block;
    boundaries_.push_back(std::max<std::int64_t>(floor_to(request.prompt - 1, unit) - unit, 0));
    boundaries_.push_back(std::max<std::int64_t>(floor_to(request.prompt, unit) - unit, 0));
  } else {
    boundaries_.push_back(request.prompt - 1);
  }
  if (request.junction == 0) return;
  boundaries_.push_back(request.junction);
  if (rules_.drops && request.junction >= spec.block)
    boundaries_.push_back(request.junction - spec.block);
}

/// Whether a full block of this column is worth a key, by the retention and the boundaries (rule
/// 9).
bool BlockManager::is_kept(const GroupSpec& spec, std::int64_t column) const {
  const std::int64_t unit = rules_.hit_alignment;
  const std::int64_t block = spec.block;
  if (spec.kind == GroupKind::attention) return true;
  if (is_state(spec.kind)) {
    if (!rules_.retention) return true;
    if (*rules_.retention > 0) {
      const std::int64_t every = *rules_.retention / block;
      if (every <= 1 || (column + 1) % every == 0) return true;
    }
    return std::ranges::any_of(boundaries_, [&](std::int64_t tokens) {
      return floor_to(tokens, unit) / block - 1 == column;
    });
  }
  if (unit % block != 0) return true;
  const std::int64_t shift = rules_.drops ? 1 : 0;
  const std::int64_t needed = ceil_div(spec.window - 1, block) + shift;
  const std::int64_t segment = rules_.retention.value_or(unit);
  if (segment > 0) {
    const std::int64_t every = segment / block;
    if (needed >= every) return true;
    if (column >= shift && (column - shift) % every >= every - needed) return true;
  }
  if (!rules_.retention) return false;
  return std::ranges::any_of(boundaries_, [&](std::int64_t tokens) {
    const std::int64_t end = floor_to(tokens, unit) / block + shift;
    return end - needed <= column && column < end;
  });
}

void BlockManager::publish_full(std::uint32_t group, BlockRequest& request, std::int64_t tokens) {
  const GroupSpec& spec = rules_.groups[group];
  BlockTable& table = request.tables[group];
  const auto hashed = static_cast<std::int64_t>(request.keys.size()) * rules_.hash_block;
  const std::int64_t full = std::min(tokens, hashed) / spec.block;
  if (table.cached >= full) return;
  if (spec.kind != GroupKind::attention && rules_.retention) list_boundaries(request, spec);
  for (std::int64_t i = table.cached; i < full; ++i) {
    const BlockId block = table.columns[static_cast<std::size_t>(i)];
    if (block == kNullBlock || !is_kept(spec, i)) continue;
    if (i == table.passed && !rules_.keys_passed_states) {
      LOCKSTEP_MARK("vllm.passes_the_last_state");
      continue;
    }
    const std::int64_t end = (i + 1) * spec.block;
    // With modules a chunk's last state is keyed before the blocks that it fills are.
    if (rules_.prefill_lookahead > 1 && pool_.has_key(block) && pool_.primary(block).tokens == end)
      continue;
    if (pool_.has_key(block)) {
      require(pool_.primary(block).tokens < end, "a block that becomes full had keys for less");
      pool_.remove_keys(block);
    }
    pool_.add_key(block, group, key_at(request, end), static_cast<std::uint32_t>(end));
  }
  table.cached = full;
}

bool BlockManager::add_partial_key(std::uint32_t group, BlockId block, KeyId key,
                                   std::int64_t tokens, bool replaces) {
  if (block == kNullBlock) return false;
  if (replaces || (pool_.has_key(block) && !pool_.has_key(block, group, key) &&
                   pool_.primary(block).tokens < tokens))
    pool_.remove_keys(block);
  pool_.add_key(block, group, key, static_cast<std::uint32_t>(tokens));
  return true;
}

/// The prompt's last hash boundary, where it lies inside an attention block (rule 10).
void BlockManager::publish_attention_tail(std::uint32_t group, const BlockRequest& request,
                                          std::int64_t tokens) {
  const std::int64_t block = rules_.groups[group].block;
  const std::int64_t unit = rules_.hash_block;
  if (block == unit) return;
  const std::int64_t limit = rules_.drops ? request.prompt : request.prompt - 1;
  const std::int64_t tail =
      std::min(limit / unit, static_cast<std::int64_t>(request.keys.size())) * unit;
  if (tail == 0 || tail > tokens || tail % block == 0) return;
  const std::vector<BlockId>& columns = request.tables[group].columns;
  const auto column = static_cast<std::size_t>(tail / block);
  if (column >= columns.size()) return;
  const KeyId key = key_at(request, tail);
  const BlockId tail_block = columns[column];
  if (tail_block == kNullBlock || pool_.has_key(tail_block, group, key)) return;
  add_partial_key(group, tail_block, key, tail, false);
  // A block whose key covers more tokens holds these already, or their key was noted.
  if (pool_.primary(tail_block).key == key) note_published(group, key);
}

/// A state inside a block, where a chunk ends with the prompt's last hash boundary. The next chunk
/// will write over it, so the keys then move to a copy (rules 10, 21).
void BlockManager::publish_state_tail(std::uint32_t group, BlockRequest& request,
                                      std::int64_t tokens) {
  const std::int64_t block = rules_.groups[group].block;
  const std::int64_t unit = rules_.hash_block;
  BlockTable& table = request.tables[group];
  if (table.checkpoint > 0) return publish_checkpoint(group, request);
  if (tokens <= 0 || tokens % unit != 0) return;
  const bool is_junction = rules_.shared_prefix_checkpoint && tokens == request.junction &&
                           request.computed < tokens && tokens <= request.prompt;
  if (tokens != last_checkpoint(rules_, request.prompt, unit) && !is_junction) return;
  const std::int64_t column = ceil_div(tokens, block) - 1;
  if (column >= static_cast<std::int64_t>(table.columns.size())) return;
  const BlockId source = table.columns[static_cast<std::size_t>(column)];
  if (source == kNullBlock) return;
  if (pool_.has_key(source) && pool_.primary(source).tokens == tokens) return;
  const KeyId key = key_at(request, tokens);
  add_partial_key(group, source, key, tokens, false);
  note_published(group, key);
  if (tokens % block == 0) return;
  LOCKSTEP_MARK("vllm.state_inside_block");
  table.partial_column = column;
  table.partial_block = source;
  table.produced = tokens;
  table.cached = column;
}

/// The state that the forward stores inside its chunk lies in a column that is not its own (rule
/// 16).
void BlockManager::publish_checkpoint(std::uint32_t group, BlockRequest& request) {
  const GroupSpec& spec = rules_.groups[group];
  const BlockTable& table = request.tables[group];
  const BlockId block = table.columns[static_cast<std::size_t>(table.checkpoint_column)];
  const std::int64_t tokens = table.checkpoint;
  boundaries_.clear();
  const bool is_kept_one =
      tokens == last_checkpoint(rules_, request.prompt, rules_.hit_alignment) ||
      tokens == request.junction ||
      (tokens % spec.block == 0 && is_kept(spec, tokens / spec.block - 1));
  if (!is_kept_one) {
    pool_.remove_keys(block);
    return;
  }
  if (pool_.has_key(block) && pool_.primary(block).tokens == tokens) return;
  const KeyId key = key_at(request, tokens);
  if (add_partial_key(group, block, key, tokens, true)) note_published(group, key);
}

void BlockManager::publish(BlockRequest& request, std::int64_t computed) {
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const GroupSpec& spec = rules_.groups[group];
    const std::int64_t tokens = cacheable(spec, computed);
    BlockTable& table = request.tables[group];
    const std::int64_t before = table.cached;
    publish_full(group, request, tokens);
    const std::int64_t after = table.cached;
    if (spec.kind == GroupKind::attention) publish_attention_tail(group, request, tokens);
    // The last chunk's state stands for the chunk's end, whatever tokens the modules write again.
    const bool is_late = rules_.keys_states_late;
    if (spec.kind == GroupKind::mamba)
      publish_state_tail(group, request,
                         is_late || rules_.prefill_lookahead <= 1 ? tokens : computed);
    for (std::int64_t i = before; i < after; ++i) {
      const BlockId block = table.columns[static_cast<std::size_t>(i)];
      if (block == kNullBlock || !pool_.has_key(block)) continue;
      note_published(group, pool_.primary(block).key);
      if (spec.kind == GroupKind::mamba && request.offload > 0)
        handoffs_.push_back({request.offload, group, block, pool_.primary(block).tokens});
    }
  }
}

}  // namespace lockstep::cache_sim
