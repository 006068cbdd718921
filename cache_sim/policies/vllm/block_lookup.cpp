// Finds the longest prefix that every group can offer, and the place where a prefill chunk has to
// end.
#include <algorithm>

#include "cache_sim/policies/vllm/block_manager.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

/// The blocks whose key stands for the first `end` tokens: one in each of the groups, or none.
bool BlockManager::find_all(const SpecGroup& spec, std::int64_t end) {
  const auto at = static_cast<std::size_t>(end / rules_.hash_block - 1);
  if (at >= sought_->size()) return false;
  found_.clear();
  for (const std::uint32_t group : spec.groups) {
    const BlockId block = pool_.find(group, (*sought_)[at]);
    if (block == kNullBlock) return false;
    found_.push_back(block);
  }
  return true;
}

/// Puts the blocks that find_all() found into that column, and null blocks before it.
void BlockManager::put_found(const SpecGroup& spec, std::size_t column) {
  for (std::size_t i = 0; i < spec.groups.size(); ++i) {
    std::vector<BlockId>& columns = hit_.columns[spec.groups[i]];
    if (columns.size() <= column) columns.resize(column + 1, kNullBlock);
    columns[column] = found_[i];
  }
}

/// Full blocks from the left up to the first miss; where hits may end inside a block, the longest
/// beginning of the next one (rule 11).
std::int64_t BlockManager::find_attention(const SpecGroup& spec, std::int64_t most, bool drops) {
  const std::int64_t block = spec.spec.block;
  const std::int64_t unit = rules_.hit_alignment;
  for (const std::uint32_t group : spec.groups) hit_.columns[group].clear();
  std::int64_t full = 0;
  while (full < most / block && find_all(spec, (full + 1) * block))
    put_found(spec, static_cast<std::size_t>(full++));
  std::int64_t tokens = full * block;
  if (unit < block) {
    const std::int64_t last = std::min(floor_to(most, unit), tokens + block - unit);
    for (std::int64_t end = last; end > full * block; end -= unit)
      if (find_all(spec, end)) {
        put_found(spec, static_cast<std::size_t>(full));
        tokens = end;
        break;
      }
  }
  if (drops && tokens > 0) tokens -= std::min(unit, block);
  tokens = floor_to(tokens, unit);
  for (const std::uint32_t group : spec.groups)
    hit_.columns[group].resize(static_cast<std::size_t>(ceil_div(tokens, block)));
  return tokens;
}

/// From the right, the first run of blocks that covers the window; at the left end a shorter run
/// will do, because there is nothing before it (rule 11).
std::int64_t BlockManager::find_window(const SpecGroup& spec, std::int64_t most, bool drops) {
  const std::int64_t block = spec.spec.block;
  const std::int64_t unit = rules_.hit_alignment;
  const std::int64_t needed = ceil_div(spec.spec.window - 1, block) + (drops ? 1 : 0);
  for (const std::uint32_t group : spec.groups)
    hit_.columns[group].assign(static_cast<std::size_t>(most / block), kNullBlock);
  std::int64_t run = 0;
  std::int64_t size = -1;
  for (std::int64_t i = most / block - 1; i >= 0 && size < 0; --i) {
    require(!rules_.looks_for_missing_hashes ||
                (i + 1) * block <= std::ssize(*sought_) * rules_.hash_block,
            "a block that is looked for has a hash");
    if (!find_all(spec, (i + 1) * block)) {
      run = 0;
      continue;
    }
    const std::int64_t kept = drops ? i : i + 1;
    if (run == 0 && kept * block % unit != 0) continue;
    put_found(spec, static_cast<std::size_t>(i));
    if (++run >= needed) size = i + run;
  }
  if (size < 0)
    for (size = run; size * block % unit != 0;) --size;
  if (drops && size > 0)
    for (--size; size * block % unit != 0;) --size;
  for (const std::uint32_t group : spec.groups)
    hit_.columns[group].resize(static_cast<std::size_t>(size));
  return size * block;
}

/// From the right, the first state (rule 11).
std::int64_t BlockManager::find_mamba(const SpecGroup& spec, std::int64_t most) {
  for (const std::uint32_t group : spec.groups) hit_.columns[group].clear();
  const std::int64_t block = spec.spec.block;
  const std::int64_t unit = std::min(block, rules_.hit_alignment);
  const auto keys = static_cast<std::int64_t>(sought_->size());
  const std::int64_t last = floor_to(std::min(most, keys * rules_.hash_block), unit);
  for (std::int64_t end = last; end > 0; end -= unit) {
    if (unit == block && end % rules_.hit_alignment != 0) continue;
    if (!find_all(spec, end)) continue;
    put_found(spec, static_cast<std::size_t>(ceil_div(end, block) - 1));
    return end;
  }
  return 0;
}

/// Each kind of group takes the candidate length or shortens it, until all take it. EAGLE's groups
/// match one unit more than the candidate and drop it, once per candidate (rules 11, 12).
const BlockHit& BlockManager::look_up(const std::vector<KeyId>& keys, std::int64_t known) {
  sought_ = &keys;
  const std::vector<SpecGroup>& specs = rules_.spec_groups;
  const auto find = [&](const SpecGroup& spec, std::int64_t most, bool drops) {
    switch (spec.spec.kind) {
      case GroupKind::attention: return find_attention(spec, most, drops);
      case GroupKind::window: return find_window(spec, most, drops);
      case GroupKind::mamba:
      case GroupKind::mamba_all: break;
    }
    return find_mamba(spec, most);
  };
  if (rules_.groups.size() == 1) {
    hit_.tokens = find(specs.front(), known - 1, rules_.drops);
    hit_.junction = 0;
    return hit_;
  }
  const bool has_attention = specs.front().spec.kind == GroupKind::attention;
  const bool is_simple = specs.size() == 2 && has_attention;
  const std::int64_t hashed = static_cast<std::int64_t>(keys.size()) * rules_.hash_block;
  std::int64_t longest = 0;
  std::int64_t tokens = known - 1;
  std::vector<std::int64_t>& found = attention_found_;
  found.assign(specs.size(), -1);
  std::uint64_t dropped = 0;  // kinds of group that have dropped a unit at this candidate
  for (;;) {
    std::int64_t candidate = tokens;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const SpecGroup& spec = specs[i];
      if (spec.spec.kind == GroupKind::attention && found[i] >= 0) {
        candidate = std::min(candidate, found[i]);
        continue;
      }
      const bool has_dropped = (dropped >> i & 1) != 0;
      const bool drops = rules_.drops && (!has_dropped || rules_.drops_in_every_pass);
      std::int64_t most = candidate;
      if (drops && !has_dropped && !is_state(spec.spec.kind)) {
        const bool is_fine = rules_.partial && spec.spec.kind == GroupKind::attention &&
                             spec.spec.block > rules_.hash_block;
        most = std::min(candidate + (is_fine ? rules_.hash_block : spec.spec.block), hashed);
      }
      const std::int64_t size = find(spec, most, drops);
      if (drops)
        dropped |= std::uint64_t{1} << i;
      else if (size < candidate)
        dropped = 0;
      candidate = found[i] = size;
      longest = std::max(longest, size);
    }
    if (candidate >= tokens) break;
    tokens = candidate;
    if (is_simple) break;
  }
  for (const SpecGroup& spec : specs)
    for (const std::uint32_t group : spec.groups)
      if (spec.spec.kind == GroupKind::attention) {
        std::vector<BlockId>& columns = hit_.columns[group];
        columns.resize(
            std::min(columns.size(), static_cast<std::size_t>(ceil_div(tokens, spec.spec.block))));
      }
  hit_.tokens = tokens;
  hit_.junction = longest > tokens && rules_.keeps_junctions ? longest : 0;
  return hit_;
}

/// A chunk ends at the earliest place after its start where a state has to be kept. Without one it
/// takes all that it may, cut down to a block's end: a state is written where a chunk ends, so a
/// chunk that ends inside a block leaves none that anybody could use (rule 15).
std::int64_t BlockManager::split(const BlockRequest& request, std::int64_t start,
                                 std::int64_t tokens, std::int64_t most_tokens) const {
  const bool is_attentions = rules_.splitter_block != 0 && rules_.splits_by_attention_block;
  const std::int64_t block = is_attentions ? rules_.groups.front().block : rules_.splitter_block;
  const std::int64_t prefill_end = std::max(request.prompt, request.known - 1);
  if (block == 0 || start >= prefill_end || !rules_.cuts_chunks) return tokens;
  std::int64_t end = start + tokens;
  const std::int64_t unit = rules_.partial ? rules_.hash_block : rules_.scheduler_block;
  const bool stores_inside =
      rules_.checkpoint_blocks > 0 && end >= prefill_end &&
      is_checkpoint_valid(rules_, start, end, last_checkpoint(rules_, prefill_end, unit), block);
  const std::int64_t last = stores_inside ? 0 : last_checkpoint(rules_, request.known, block);
  if (end < prefill_end) {
    const std::int64_t whole = floor_to(end, block);
    if (whole > start || block <= most_tokens) end = whole;
  }
  const std::int64_t limit = end;
  const auto stop = [&](std::int64_t at) {
    if (start < at && at < limit) end = std::min(end, at);
  };
  if (start % block != 0 && !stores_inside) stop(floor_to(start, block) + block);
  stop(last);
  if (rules_.partial && !stores_inside) {
    const std::int64_t tail = last_checkpoint(rules_, request.prompt, rules_.hash_block);
    if (last < tail && tail < request.prompt) stop(tail);
  }
  const std::int64_t junction = request.junction;
  if (start < junction && junction < limit) {
    LOCKSTEP_MARK("vllm.stops_at_junction");
    const bool is_fine = rules_.shared_prefix_checkpoint && junction <= request.prompt;
    stop(is_fine ? junction : start + floor_to(junction - start, block));
  }
  return std::max<std::int64_t>(end - start, 0);
}

std::int64_t BlockManager::leave_rest(const BlockRequest& request, std::int64_t start,
                                      std::int64_t cut) const {
  const std::int64_t rest = request.known - start - cut;
  if (rest <= 0 || rest >= rules_.prefill_lookahead) return cut;
  LOCKSTEP_MARK("vllm.leaves_a_rest_for_modules");
  const std::int64_t shorter = std::max<std::int64_t>(cut - (rules_.prefill_lookahead - rest), 0);
  return shorter > 0 || rules_.shortens_chunks_to_nothing ? shorter : cut;
}

}  // namespace lockstep::cache_sim
