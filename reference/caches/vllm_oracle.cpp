#include "reference/caches/vllm_oracle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <sstream>
#include <tuple>

#include "reference/base/require.hpp"
#include "reference/caches/vllm_scheduler_config.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::reference {
namespace {

std::int64_t floor(std::int64_t a, std::int64_t unit) {
  return a / unit * unit;
}

tl::unexpected<Error> refuse(const Operation& operation, const std::string& why) {
  return fail(fmt::format("{} of `{}`: {}", to_string(operation.verb), operation.id.text(), why));
}

}  // namespace

// --- The configuration ---------------------------------------------------------------------------

VllmOracle::VllmOracle(const Config& config, Mode mode)
    : VllmPool(config.number("blocks")),
      hash_block_(config.number("hash_block")),
      scheduler_block_(1),
      drafts_(config.drafts),
      lookahead_(config.number("eagle") == 1 ? config.number("modules") : 0),
      modules_(config.number("eagle") == 0 ? 0 : config.number("modules")),
      most_tokens_(config.chunked_prefill),
      inner_unit_(config.number("checkpoint")),
      drops_(config.number("eagle") == 2),
      keeps_junctions_inside_(config.number("shared_prefix_checkpoint") != 0 && modules_ <= 1),
      overlaps_(config.overlap != 0),
      buffer_len_(config.number("replay_ring")) {
  const VllmSchedulerConfig scheduler = VllmSchedulerConfig::of(config);
  most_tokens_ -= scheduler.drafting_slots;
  if (scheduler.long_prefill > 0) most_tokens_ = std::min(most_tokens_, scheduler.long_prefill);
  watermark_ = scheduler.watermark_blocks;
  reserves_ = scheduler.in_flight_tokens.has_value();  // behind vLLM's scheduler
  lookahead_slots_ = scheduler.lookahead_tokens;
  in_flight_ = scheduler.in_flight_tokens;
  std::string text = config.text("groups");
  if (text.empty()) {
    text = fmt::format("attention:{}", config.number("block"));
    for (int i = 0; i < 3; ++i) text += fmt::format(",mamba:{}", config.number("block"));
  }
  std::stringstream list(text);
  for (std::string piece; std::getline(list, piece, ',');) {
    std::stringstream words(piece);
    std::string block, window;
    Group group;
    std::getline(words, group.kind, ':');
    std::getline(words, block, ':');
    std::getline(words, window, ':');
    group.block = std::stoll(block);
    if (!window.empty()) group.window = std::stoll(window);
    if (mode == Mode::all && group.kind == "mamba") group.kind = "state";
    groups_.push_back(group);
  }
  bool fine_states = false;
  bool coarse_windows = false;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const Group& group = groups_[i];
    scheduler_block_ = std::lcm(scheduler_block_, group.block);
    fine_states |= group.kind == "mamba" && group.block > hash_block_;
    coarse_windows |= group.kind == "window" && group.block != hash_block_;
    if (group.kind == "mamba") state_block_ = group.block;
    bool is_new = true;
    for (std::vector<int>& same : alike_)
      if (groups_[static_cast<std::size_t>(same.front())] == group) {
        same.push_back(static_cast<int>(i));
        is_new = false;
      }
    if (is_new) alike_.push_back({static_cast<int>(i)});
  }
  std::stable_partition(alike_.begin(), alike_.end(), [&](const std::vector<int>& same) {
    return groups_[static_cast<std::size_t>(same.front())].kind == "attention";
  });
  inside_ = groups_.size() > 1 && fine_states && !coarse_windows;
  alignment_ = inside_ ? hash_block_ : scheduler_block_;
  if (mode == Mode::sparse)
    retention_ = 0;
  else if (config.text("retention") != "none")
    retention_ = std::stoll(config.text("retention"));
  std::vector<VllmOffload::Group> stored;
  for (const Group& group : groups_) stored.push_back({is_state(group), group.block});
  is_lazy_ = config.number("lazy_offload") != 0;
  VllmPool& device = *this;
  if (config.number("cpu_blocks") > 0)
    simple_ = std::make_unique<VllmSimple>(device,
                                           VllmSimple::Config{.groups = stored,
                                                              .hash_block = hash_block_,
                                                              .scheduler_block = scheduler_block_,
                                                              .blocks = config.number("cpu_blocks"),
                                                              .step_tokens = config.chunked_prefill,
                                                              .is_lazy = is_lazy_,
                                                              .inside = inside_});
  if (config.number("cpu_chunks") == 0) return;
  tier_ =
      std::make_unique<VllmOffload>(stored, hash_block_, config.number("cpu_chunks"),
                                    config.number("blocks_per_chunk"), lockstep::has_disk(config));
}

// --- Hashes --------------------------------------------------------------------------------------

/// A hash for every H tokens that have `lookahead_` tokens after them (rule 6).
void VllmOracle::hash(Request& request) {
  for (;;) {
    const Count end = (static_cast<Count>(request.hashes.size()) + 1) * hash_block_;
    if (end + lookahead_ > std::min<Count>(request.tokens, request.known.size())) return;
    const std::uint64_t digest = request.known.digest(static_cast<std::uint32_t>(end + lookahead_));
    std::string name =
        fmt::format("{}/{}/{}/{}", request.salt.text(), request.lora.text(), end, digest);
    for (Count block = 0; block < end; block += hash_block_) {
      name += '|';
      for (const ImageSpan& image : request.images)
        if (image.begin < block + hash_block_ + lookahead_ && image.end() > block)
          name += fmt::format("{}@{} ", image.name.text(), image.begin - block);
    }
    const auto number = static_cast<Number>(hash_numbers_.size()) + 1;
    request.hashes.push_back(hash_numbers_.emplace(name, number).first->second);
  }
}

VllmOracle::Number VllmOracle::hash_at(const Request& request, Count tokens) const {
  return request.hashes.at(static_cast<std::size_t>(tokens / hash_block_ - 1));
}

bool VllmOracle::all_have(const std::vector<int>& same, const Request& request,
                          Count tokens) const {
  if (tokens / hash_block_ > static_cast<Count>(request.hashes.size())) return false;
  return std::ranges::all_of(same, [&](int group) {
    return holder({group, hash_at(request, tokens)}) != 0;
  });
}

// --- The look-up ---------------------------------------------------------------------------------

/// Full blocks from the left to the first miss, then the longest part of the next one (rule 11).
VllmOracle::Count VllmOracle::find_attention(const std::vector<int>& same, Count most, bool drops,
                                             Request& request) {
  const Count block = groups_[static_cast<std::size_t>(same.front())].block;
  const Count unit = groups_.size() == 1 ? block : alignment_;
  std::vector<Count> ends;
  while ((static_cast<Count>(ends.size()) + 1) * block <= most &&
         all_have(same, request, (static_cast<Count>(ends.size()) + 1) * block))
    ends.push_back((static_cast<Count>(ends.size()) + 1) * block);
  Count tokens = static_cast<Count>(ends.size()) * block;
  if (unit < block)
    for (Count end = tokens + block - unit; end > static_cast<Count>(ends.size()) * block;
         end -= unit)
      if (end <= most && all_have(same, request, end)) {
        ends.push_back(end);
        tokens = end;
        break;
      }
  if (drops && tokens > 0) tokens -= std::min(unit, block);
  tokens = floor(tokens, unit);
  ends.resize(static_cast<std::size_t>(ceiling(tokens, block)));
  for (const int group : same) {
    request.offered[static_cast<std::size_t>(group)].clear();
    for (const Count end : ends)
      request.offered[static_cast<std::size_t>(group)].push_back(
          holder({group, hash_at(request, end)}));
  }
  return tokens;
}

/// The rightmost run of blocks that covers the window; at the left end any run does (rule 11).
VllmOracle::Count VllmOracle::find_window(const std::vector<int>& same, Count most, bool drops,
                                          Request& request) {
  const Group& spec = groups_[static_cast<std::size_t>(same.front())];
  const Count unit = groups_.size() == 1 ? spec.block : alignment_;
  const Count needed = ceiling(spec.window - 1, spec.block) + (drops ? 1 : 0);
  std::vector<bool> taken(static_cast<std::size_t>(most / spec.block));
  Count size = -1;
  Count run = 0;
  for (Count i = most / spec.block - 1; i >= 0; --i) {
    if (!all_have(same, request, (i + 1) * spec.block)) {
      run = 0;
      continue;
    }
    if (run == 0 && (drops ? i : i + 1) * spec.block % unit != 0) continue;
    taken[static_cast<std::size_t>(i)] = true;
    if (++run == needed) {
      size = i + run;
      break;
    }
  }
  if (size < 0) {
    size = run;
    while (size * spec.block % unit != 0) --size;
  }
  if (drops && size > 0) {
    --size;
    while (size * spec.block % unit != 0) --size;
  }
  for (const int group : same) {
    std::vector<Number>& columns = request.offered[static_cast<std::size_t>(group)];
    columns.clear();
    for (Count i = 0; i < size; ++i)
      columns.push_back(taken[static_cast<std::size_t>(i)]
                            ? holder({group, hash_at(request, (i + 1) * spec.block)})
                            : 0);
  }
  return size * spec.block;
}

/// The longest prefix with a state (rule 11).
VllmOracle::Count VllmOracle::find_state(const std::vector<int>& same, Count most,
                                         Request& request) {
  const Count block = groups_[static_cast<std::size_t>(same.front())].block;
  Count best = 0;
  const Count unit = groups_.size() == 1 ? block : alignment_;
  for (Count tokens = hash_block_; tokens <= most; tokens += hash_block_) {
    if (tokens % std::min(unit, block) != 0 || tokens % unit != 0) continue;
    if (all_have(same, request, tokens)) best = tokens;
  }
  for (const int group : same) {
    std::vector<Number>& columns = request.offered[static_cast<std::size_t>(group)];
    columns.assign(static_cast<std::size_t>(ceiling(best, block)), 0);
    if (best > 0) columns.back() = holder({group, hash_at(request, best)});
  }
  return best;
}

VllmOracle::Count VllmOracle::find(std::size_t i, Count most, bool drops, Request& request) {
  const std::string& kind = groups_[static_cast<std::size_t>(alike_[i].front())].kind;
  if (kind == "attention") return find_attention(alike_[i], most, drops, request);
  if (kind == "window") return find_window(alike_[i], most, drops, request);
  return find_state(alike_[i], most, request);
}

/// A length that all kinds of group can offer: each in turn shortens it, attention once and for
/// all, until none does. With EAGLE a kind looks one unit further and drops it, once per length
/// (rules 11, 12).
void VllmOracle::look_up(Request& request) {
  request.offered.assign(groups_.size(), {});
  request.junction = 0;
  Count length = request.tokens - 1;
  if (groups_.size() == 1) {
    request.hit = find(0, length, drops_, request);
    return;
  }
  const auto kind_of = [&](std::size_t i) {
    return groups_[static_cast<std::size_t>(alike_[i].front())].kind;
  };
  const Count hashed = static_cast<Count>(request.hashes.size()) * hash_block_;
  std::map<std::size_t, Count> attention;
  std::set<std::size_t> has_dropped;
  Count longest = 0;
  for (;;) {
    Count candidate = length;
    for (std::size_t i = 0; i < alike_.size(); ++i) {
      if (attention.contains(i)) {
        candidate = std::min(candidate, attention[i]);
        continue;
      }
      const Count block = groups_[static_cast<std::size_t>(alike_[i].front())].block;
      const bool drops = drops_ && !has_dropped.contains(i);
      Count most = candidate;
      if (drops && kind_of(i) != "mamba" && kind_of(i) != "state") {
        const bool by_hash = inside_ && kind_of(i) == "attention" && block > hash_block_;
        most = std::min(candidate + (by_hash ? hash_block_ : block), hashed);
      }
      const Count found = find(i, most, drops, request);
      if (drops)
        has_dropped.insert(i);
      else if (found < candidate)
        has_dropped.clear();
      candidate = found;
      if (kind_of(i) == "attention") attention[i] = found;
      longest = std::max(longest, found);
    }
    const bool is_settled = candidate >= length;
    length = std::min(length, candidate);
    if (is_settled || (alike_.size() == 2 && kind_of(0) == "attention")) break;
  }
  for (std::size_t group = 0; group < groups_.size(); ++group)
    if (groups_[group].kind == "attention") {
      const auto size = static_cast<std::size_t>(ceiling(length, groups_[group].block));
      if (request.offered[group].size() > size) request.offered[group].resize(size);
    }
  request.hit = length;
  if (longest > length) request.junction = longest;
}

// --- Where a chunk ends --------------------------------------------------------------------------

/// The last boundary before the end of so many tokens that a repetition of them could resume from.
VllmOracle::Count VllmOracle::last_boundary(Count tokens, Count unit) const {
  if (drops_) return std::max<Count>(floor(tokens, unit) - unit, 0);
  return floor(std::max<Count>(tokens - std::max<Count>(1, lookahead_), 0), unit);
}

/// Kernels that store a state inside a chunk do it a whole number of units after the chunk's
/// start, in the column before its last one. The chunk begins where a block does: otherwise it
/// would pass that block's end without leaving its state (rule 16).
bool VllmOracle::can_store_inside(Count start, Count end, Count place, Count block) const {
  if (inner_unit_ == 0 || start % block != 0) return false;
  const Count column = ceiling(end, block) - 2;
  const bool is_behind_start = start == 0 ? column >= 0 : column > (start - 1) / block;
  return is_behind_start && place >= start + hash_block_ && place < end &&
         (place - start) % inner_unit_ == 0;
}

VllmOracle::Count VllmOracle::cut(const Request& request, Count start, Count wanted) const {
  const Count block = state_block_;
  const Count known = request.tokens;
  const Count prefill_end = std::max(request.prompt, known - 1);
  if (block == 0 || start >= prefill_end) return wanted;
  Count end = start + wanted;
  const Count unit = inside_ ? hash_block_ : scheduler_block_;
  const bool stores_inside =
      end >= prefill_end && can_store_inside(start, end, last_boundary(prefill_end, unit), block);
  if (end < prefill_end && (floor(end, block) > start || block <= most_tokens_))
    end = floor(end, block);
  std::vector<Count> stops;
  if (!stores_inside) {
    if (start % block != 0) stops.push_back(floor(start, block) + block);
    const Count last = last_boundary(known, block);
    stops.push_back(last);
    const Count tail = inside_ ? last_boundary(request.prompt, hash_block_) : 0;
    if (last < tail && tail < request.prompt) stops.push_back(tail);
  }
  if (start < request.junction && request.junction < end) {
    const bool is_exact = keeps_junctions_inside_ && request.junction <= request.prompt;
    stops.push_back(is_exact ? request.junction : start + floor(request.junction - start, block));
  }
  Count earliest = end;
  for (const Count stop : stops)
    if (start < stop && stop < end) earliest = std::min(earliest, stop);
  return std::max<Count>(earliest - start, 0);
}

/// At a chunk's end the modules read the next tokens of the prompt, so the chunk leaves as many of
/// them, or none; where that would be no chunk at all, it stays as it is (rule 23).
VllmOracle::Count VllmOracle::leave_rest(const Request& request, Count start, Count chunk) const {
  const Count rest = request.tokens - start - chunk;
  const Count shortened = chunk - (modules_ - rest);
  return rest > 0 && rest < modules_ && shortened > 0 ? shortened : chunk;
}

// --- Allocation ----------------------------------------------------------------------------------

/// The number of tokens whose blocks a group no longer needs (rule 19).
VllmOracle::Count VllmOracle::behind(const Group& group, Count tokens) const {
  if (is_state(group)) return std::max<Count>(tokens - 1, 0);
  if (group.kind == "window")
    return std::max<Count>(tokens - group.window + 1 - std::max<Count>(modules_ - 1, 0), 0);
  return 0;
}

/// A state that this step publishes, or attention KV that a copy would need before this step writes
/// it, is not there yet (rule 17).
bool VllmOracle::waits_for_step(const Request& request) const {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const std::vector<Number>& offered = request.offered[group];
    if (offered.empty() || offered.back() == 0) continue;
    const bool ends_inside = request.hit % groups_[group].block != 0;
    if (!is_state(groups_[group]) && !ends_inside) continue;
    const std::vector<Entry>& entries = blocks_[static_cast<std::size_t>(offered.back())].entries;
    if (!entries.empty() && stamped_.contains(entries.front().key)) return true;
  }
  return false;
}

/// The state that the forward of a chunk stores inside it; 0 where it stores none. With retention 0
/// only the last chunk of a prefill does (rule 16).
VllmOracle::Count VllmOracle::inner_state(const Table& table, Count block, const Request& request,
                                          Span span) const {
  const bool is_sparse = retention_ && *retention_ == 0;
  if (is_sparse && span.end < std::max(request.prompt, request.tokens - 1)) return 0;
  const Count unit = groups_.size() == 1 ? block : alignment_;
  const Count place = last_boundary(span.end, unit);
  if (!can_store_inside(span.total, span.end, place, block)) return 0;
  const Count column = ceiling(span.end, block) - 2;
  const auto held = static_cast<Count>(table.columns.size());
  const bool is_scratch = table.running && column >= held - drafts_;
  const bool is_usable =
      column >= held || table.columns[static_cast<std::size_t>(column)] == 0 || is_scratch;
  return is_usable ? place : 0;
}

/// Columns up to `end`. A whole sequence never has more of a window's at once than the window, the
/// tokens that modules read again and all tokens in flight reach into (rule 20).
VllmOracle::Count VllmOracle::places(const Group& group, Count end, bool is_whole) const {
  const Count columns = ceiling(end, group.block);
  if (!is_whole || group.kind != "window" || !in_flight_) return columns;
  const Count kept = group.window - 1 + std::max<Count>(modules_ - 1, 0);
  return std::min(columns, ceiling(kept + *in_flight_, group.block) + 1);
}

/// Blocks that leave the queue when the group gets places up to the span's end.
VllmOracle::Count VllmOracle::need(int group, const Request& request, Span span,
                                   bool is_whole) const {
  const Group& spec = groups_[static_cast<std::size_t>(group)];
  const Table& table = request.tables[static_cast<std::size_t>(group)];
  std::vector<Number> offered;
  if (request.waits) offered = request.offered[static_cast<std::size_t>(group)];
  const auto held = static_cast<Count>(table.columns.size());
  const auto hits = static_cast<Count>(offered.size());
  const bool ends_inside = hits > 0 && span.local % spec.block != 0;
  const bool copies = ends_inside || table.partial >= 0;
  Count revived = 0;
  for (Count i = 0; i < hits; ++i) {
    const Number block = offered[static_cast<std::size_t>(i)];
    const bool unused = spec.kind != "mamba" && i < behind(spec, span.total) / spec.block - held;
    if (block != 0 && !unused && blocks_[static_cast<std::size_t>(block)].references == 0)
      ++revived;
  }
  if (spec.kind != "mamba") {
    const Count skipped = behind(spec, span.total) / spec.block;
    const Count fresh =
        std::max<Count>(places(spec, span.end, is_whole) - std::max(skipped, held + hits), 0);
    return fresh + revived + (ends_inside ? 1 : 0);
  }
  const Count inner = inner_state(table, spec.block, request, span);
  // The state that is sent gets a block of its own if the chunk goes on into another block.
  const Count sent_end = ceiling(span.total, spec.block);
  const bool is_sent =
      span.total > span.local && sent_end > hits && sent_end < ceiling(span.end, spec.block);
  Count fresh = ceiling(span.end, spec.block) + drafts_ - hits - held;
  if (copies) fresh = std::max<Count>(fresh, 0) + 1;
  if (fresh > 0)
    fresh = std::min(fresh, 1 + (copies ? 1 : 0) + (inner > 0 ? 1 : 0) + (is_sent ? 1 : 0) +
                                (table.running ? 0 : drafts_));
  return fresh + revived;
}

/// Gives back the columns that the request has passed, the last one first. In a Mamba group, null
/// columns lie between (rule 19).
void VllmOracle::release_behind(Request& request, Count tokens) {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const Group& spec = groups_[group];
    Table& table = request.tables[group];
    const Count end =
        std::min(behind(spec, tokens) / spec.block, static_cast<Count>(table.columns.size()));
    std::vector<Number> batch;
    const auto drop = [&](Count i) {
      batch.push_back(table.columns[static_cast<std::size_t>(i)]);
      table.columns[static_cast<std::size_t>(i)] = 0;
    };
    if (spec.kind == "mamba") {
      for (Count i = end - 1; i >= table.retired; --i) drop(i);
      table.retired = std::max(table.retired, end);
    } else {
      for (Count i = end - 1; i >= 0 && table.columns[static_cast<std::size_t>(i)] != 0; --i)
        drop(i);
    }
    give_back(batch);
  }
}

/// The blocks of the hit become the request's, of all groups before any block is popped (rule 5).
void VllmOracle::use_offer(Request& request) {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const Group& spec = groups_[group];
    Table& table = request.tables[group];
    const Count skipped = behind(spec, request.hit + request.external) / spec.block;
    table.columns.assign(static_cast<std::size_t>(skipped), 0);
    const std::vector<Number>& offered = request.offered[group];
    for (auto i = static_cast<std::size_t>(skipped); i < offered.size(); ++i) {
      if (offered[i] != 0) take(offered[i]);
      table.columns.push_back(offered[i]);
    }
    table.cached = static_cast<Count>(table.columns.size());
    if (static_cast<Count>(offered.size()) > skipped && request.hit % spec.block != 0) {
      table.partial = table.cached = request.hit / spec.block;
      table.partial_block = offered.back();
    }
  }
}

/// Blocks for the tokens that another server sends, as far as the group needs them (rule 24).
void VllmOracle::receive(Request& request) {
  const Count total = request.hit + request.external;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const Group& spec = groups_[group];
    if (request.external == 0 || total <= behind(spec, total)) continue;
    std::vector<Number>& columns = request.tables[group].columns;
    while (static_cast<Count>(columns.size()) < ceiling(total, spec.block))
      columns.push_back(pop());
  }
}

/// The two ends keep a reference until the step is decided. A request that wrote the block itself
/// goes on in it, and the copy takes over what others know it by (rules 20, 21).
void VllmOracle::copy(int group, Table& table, Number target) {
  const Number source = table.partial_block;
  copies_.push_back({group, source, target});
  if (table.running) {
    const std::vector<Entry> entries = blocks_[static_cast<std::size_t>(source)].entries;
    drop_keys(source);
    for (const Entry& entry : entries) put_key(target, entry.key, entry.tokens);
    if (!entries.empty()) stamped_.insert(entries.front().key);
    take(source);
  } else {
    table.columns[static_cast<std::size_t>(table.partial)] = target;
    take(target);
  }
  table.partial = -1;
  table.partial_block = 0;
}

void VllmOracle::grow(int group, Request& request, Span span) {
  const Count end = span.end;
  const Group& spec = groups_[static_cast<std::size_t>(group)];
  Table& table = request.tables[static_cast<std::size_t>(group)];
  const bool copies = table.partial >= 0;
  const auto held = static_cast<Count>(table.columns.size());
  const auto size = [&] { return static_cast<Count>(table.columns.size()); };
  if (spec.kind != "mamba") {
    if (copies) copy(group, table, pop());
    while (size() < ceiling(end, spec.block)) table.columns.push_back(pop());
    return;
  }
  table.inner = inner_state(table, spec.block, request, span);
  table.inner_column = ceiling(end, spec.block) - 2;
  // The running state is in column ceil(end / B) - 1, its scratch after it.
  const Count running = ceiling(end, spec.block) - 1;
  const Count first = table.inner > 0 ? running - 1 : running;  // of the columns that get blocks
  if (running + 1 + drafts_ <= held && !copies && table.inner == 0) {
    table.running = true;
    return;
  }
  while (size() < first) table.columns.push_back(0);
  if (table.running)
    for (Count i = held - drafts_; i < held && i < first; ++i) {
      table.columns.push_back(table.columns[static_cast<std::size_t>(i)]);
      table.columns[static_cast<std::size_t>(i)] = 0;
    }
  // Columns that rejected drafts had: this forward ends after them.
  for (Count i = ceiling(span.total, spec.block); i < std::min(held, first); ++i)
    if (table.columns[static_cast<std::size_t>(i)] != 0) table.unwritten.insert(i);
  const Number target = copies ? pop() : 0;
  while (size() < running + 1 + drafts_) table.columns.push_back(pop());
  if (copies && table.running && table.own_tail > 0)
    offers_.push_back({request.tier_id, group, target, table.own_tail});
  if (copies) table.own_tail = 0;
  if (copies) copy(group, table, target);
  table.running = true;
}

std::optional<Refusal> VllmOracle::allocate(Request& request, Count n, bool publishes) {
  const Count local = request.waits ? request.hit : request.computed;
  const Count total = request.waits ? request.hit + request.external : request.computed;
  const Count end = total + n;
  // A draft model's tokens have places in every group but those of states.
  const auto end_in = [&](std::size_t group, Count tokens) {
    const bool has_none = groups_[group].kind == "mamba" || !publishes;  // nor has a load
    return has_none ? tokens : tokens + lookahead_slots_;
  };
  const bool others_run = std::ranges::any_of(requests_, [&](const auto& entry) {
    const Request& other = entry.second;
    return &other != &request && !other.waits && !other.loading && !other.loaded;
  });
  const Count spared = (request.waits || request.loaded) && others_run ? watermark_ : 0;
  const Count reserved = publishes ? 0 : inflight_prefill_reserved_blocks();
  const auto fits = [&](Count tokens, bool is_whole) {
    Count sum = is_whole ? spared : spared + reserved;
    for (std::size_t group = 0; group < groups_.size(); ++group)
      sum += need(static_cast<int>(group), request,
                  {local, total, is_whole ? tokens : end_in(group, tokens)}, is_whole);
    return sum <= static_cast<Count>(queue_.size());
  };
  if (request.waits && waits_for_step(request)) return Refusal::same_step;
  // A request from the waiting queue must fit as a whole.
  if ((request.waits || request.loaded) && !fits(request.tokens, true)) return Refusal::no_kv;
  release_behind(request, total - request.in_flight);
  if (!fits(end, false)) return Refusal::no_kv;
  if (request.waits) {
    use_offer(request);
    receive(request);
  }
  for (std::size_t group = 0; group < groups_.size(); ++group)
    grow(static_cast<int>(group), request, {local, total, end_in(group, end)});
  if (request.waits || request.loaded)
    for (const Table& table : request.tables)
      allocated_.insert(table.columns.begin(), table.columns.end());
  request.waits = request.loaded = false;
  if (publishes) publish(request, std::min(end, request.tokens));
  return std::nullopt;
}

// --- Publication ---------------------------------------------------------------------------------

/// Whether a full block is kept for others (rule 9).
bool VllmOracle::is_worth(const Request& request, const Group& group, Count column) const {
  if (group.kind == "attention") return true;
  if (is_state(group) && !retention_) return true;
  // Places to resume from: the end of this prompt, and the places where others left this prefix.
  std::vector<Count> places;
  const Count S = scheduler_block_;
  if (drops_) {
    places = {std::max<Count>(floor(request.prompt - 1, S) - S, 0),
              std::max<Count>(floor(request.prompt, S) - S, 0)};
  } else {
    places = {request.prompt - 1};
  }
  if (request.junction != 0) {
    places.push_back(request.junction);
    if (drops_ && request.junction >= group.block) places.push_back(request.junction - group.block);
  }
  const Count unit = groups_.size() == 1 ? group.block : alignment_;
  if (group.kind == "mamba") {
    const Count every = *retention_ / group.block;
    if (*retention_ > 0 && (every <= 1 || (column + 1) % every == 0)) return true;
    for (const Count place : places)
      if (floor(place, unit) / group.block - 1 == column) return true;
    return false;
  }
  if (unit % group.block != 0) return true;
  const Count shift = drops_ ? 1 : 0;
  const Count needed = ceiling(group.window - 1, group.block) + shift;
  const Count segment = retention_.value_or(unit) / group.block;
  if (segment > 0) {
    if (needed >= segment) return true;
    if (column >= shift && (column - shift) % segment >= segment - needed) return true;
  }
  if (retention_)
    for (const Count place : places) {
      const Count end = floor(place, unit) / group.block + shift;
      if (column >= end - needed && column < end) return true;
    }
  return false;
}

/// The prompt's last hash boundary where it lies inside a block. Of attention always; of a state
/// where the chunk ends there, and then the next allocation has to copy it (rule 10).
void VllmOracle::publish_tail(int group, Request& request, Count tokens) {
  const Group& spec = groups_[static_cast<std::size_t>(group)];
  Table& table = request.tables[static_cast<std::size_t>(group)];
  const bool is_state = spec.kind == "mamba";
  if (is_state && table.inner > 0) return publish_inner(group, request);
  if (spec.kind == "window" || spec.kind == "state") return;
  if (!is_state && spec.block == hash_block_) return;
  const auto hashed = static_cast<Count>(request.hashes.size()) * hash_block_;
  Count tail = last_boundary(request.prompt, hash_block_);
  if (!is_state)
    tail = std::min(floor(drops_ ? request.prompt : request.prompt - 1, hash_block_), hashed);
  if (is_state && keeps_junctions_inside_ && tokens == request.junction &&
      request.computed < tokens && tokens <= request.prompt)
    tail = tokens;
  if (tail == 0 || tail > tokens || (is_state ? tail != tokens : tail % spec.block == 0)) return;
  const Count column = ceiling(tail, spec.block) - 1;
  if (column >= static_cast<Count>(table.columns.size())) return;
  const Number block = table.columns[static_cast<std::size_t>(column)];
  if (block == 0) return;
  const std::vector<Entry>& entries = blocks_[static_cast<std::size_t>(block)].entries;
  if (is_state && !entries.empty() && entries.front().tokens == tail) return;
  const Key key{group, hash_at(request, tail)};
  const bool known =
      std::ranges::any_of(entries, [&](const Entry& entry) { return entry.key == key; });
  if (!known && !entries.empty() && entries.front().tokens < tail) drop_keys(block);
  put_key(block, key, tail);
  // Attention that is known by more tokens than these was written with them.
  if (is_state || (!known && entries.front().key == key)) stamped_.insert(key);
  if (is_state && tail % spec.block != 0) {
    table.partial = table.cached = column;
    table.partial_block = block;
    table.own_tail = tail;
  }
}

/// The state that the forward stores inside its chunk: kept where the prompt's last boundary, the
/// junction or the retention wants it. Its block then stands for it alone, else for nothing (rule
/// 16).
void VllmOracle::publish_inner(int group, const Request& request) {
  const Group& spec = groups_[static_cast<std::size_t>(group)];
  const Table& table = request.tables[static_cast<std::size_t>(group)];
  const Count tokens = table.inner;
  const Number block = table.columns.at(static_cast<std::size_t>(table.inner_column));
  const Count unit = groups_.size() == 1 ? spec.block : alignment_;
  bool is_kept = tokens == last_boundary(request.prompt, unit) || tokens == request.junction;
  if (tokens % spec.block == 0) {
    if (!retention_) is_kept = true;
    if (retention_ && *retention_ > 0)
      is_kept |= tokens / spec.block % std::max<Count>(*retention_ / spec.block, 1) == 0;
  }
  const std::vector<Entry>& entries = blocks_[static_cast<std::size_t>(block)].entries;
  if (is_kept && !entries.empty() && entries.front().tokens == tokens) return;
  drop_keys(block);
  if (!is_kept || block == 0) return;
  const Key key{group, hash_at(request, tokens)};
  put_key(block, key, tokens);
  stamped_.insert(key);
}

void VllmOracle::publish(Request& request, Count computed) {
  for (std::size_t at = 0; at < groups_.size(); ++at) {
    const auto group = static_cast<int>(at);
    const Group& spec = groups_[at];
    Table& table = request.tables[at];
    // Modules may still write to the last tokens, where a hit drops a unit for that.
    const Count settled = std::max<Count>(computed - std::max<Count>(modules_ - 1, 0), 0);
    const auto whole = [&](Count size) { return inside_ ? size : floor(size, scheduler_block_); };
    Count tokens = settled;
    if (groups_.size() > 1) {
      tokens = whole(computed);
      if (drops_ && tokens > 0) tokens = std::min(settled, whole(settled) + spec.block);
    }
    const Count before = table.cached;
    const Count hashed = static_cast<Count>(request.hashes.size()) * hash_block_;
    const Count full = std::min(tokens, hashed) / spec.block;
    for (Count i = before; i < full; ++i) {
      const Number block = table.columns.at(static_cast<std::size_t>(i));
      if (block == 0 || table.unwritten.contains(i) || !is_worth(request, spec, i)) continue;
      const std::vector<Entry>& entries = blocks_[static_cast<std::size_t>(block)].entries;
      if (!entries.empty() && entries.front().tokens == (i + 1) * spec.block) continue;
      drop_keys(block);
      put_key(block, {group, hash_at(request, (i + 1) * spec.block)}, (i + 1) * spec.block);
    }
    table.cached = std::max(before, full);
    publish_tail(group, request, modules_ > 1 && spec.kind == "mamba" ? computed : tokens);
    for (Count i = before; i < full; ++i) {
      const Number block = table.columns[static_cast<std::size_t>(i)];
      if (block == 0) continue;
      const std::vector<Entry>& entries = blocks_[static_cast<std::size_t>(block)].entries;
      if (entries.empty()) continue;
      stamped_.insert(entries.front().key);
      if (spec.kind == "mamba")
        offers_.push_back({request.tier_id, group, block, entries.front().tokens});
    }
  }
}

// --- The verbs -----------------------------------------------------------------------------------

Result<Reply> VllmOracle::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::extend: return extend(operation);
    case Verb::complete: return complete(operation);
    case Verb::accept: return accept(operation);
    case Verb::checkpoint: return checkpoint(operation);
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt: return end(operation);
    case Verb::step: forward(); return Reply{};
    case Verb::evict: return evict_on(operation);
    case Verb::land: return land(operation);
    case Verb::fail: return end_transfer(operation);
    case Verb::settle: return settle();
    case Verb::flush: return flush();
    case Verb::check: return check();
    default: return refuse(operation, "vLLM's block cache does no such thing");
  }
}

/// The copies are done, the forward runs, and the next step begins (rule 17).
void VllmOracle::forward() {
  std::vector<Number> ends;
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group)
    for (const Copy& copy : copies_)
      if (copy.group == group) {
        ends.push_back(copy.source);
        ends.push_back(copy.target);
      }
  give_back(ends);
  if (has_tier()) end_schedule();
  if (simple_) simple_->save();
  in_order_.clear();
  offers_.clear();
  allocated_.clear();
  copies_.clear();
  stamped_.clear();
  step_has_started_ = false;
  for (auto& [id, request] : requests_) {
    if (buffer_len_ > 0 && request.scheduled) replay(request);
    if (request.scheduled && !request.loading && !request.is_prefill_chunk)
      request.is_inflight_prefill = false;
    request.scheduled = false;
  }
  ++changes_;
}

/// The row's state is written, unless it decodes the last known token into a buffer that has room,
/// and ends no block (rule 52).
void VllmOracle::replay(Request& request) const {
  const Count known = request.known.size();
  if (request.first_row) request.told = known;
  const bool decodes = request.before >= request.told && request.computed == known &&
                       request.computed == request.before + 1;
  if (!decodes) request.told = known;
  if (!decodes || request.computed % state_block_ == 0 ||
      request.computed - request.checkpoint == buffer_len_)
    request.checkpoint = request.computed;
  request.buffered = request.computed - request.checkpoint;
}

void VllmOracle::new_step_starts() {
  if (!any_scheduled() && !step_has_started_) stamped_.clear();
}

/// _inflight_prefill_reserved_blocks(): what requests that are loaded or prefilled have yet to get.
VllmOracle::Count VllmOracle::inflight_prefill_reserved_blocks() const {
  Count blocks = 0;
  if (!reserves_ || !has_tier()) return 0;
  for (const auto& [id, request] : requests_)
    for (int group = 0; request.is_inflight_prefill && group < std::ssize(groups_); ++group)
      blocks += need(group, request, {request.computed, request.computed, request.tokens}, true);
  return blocks;
}

/// load_kv_async: blocks for the hit and for what is sent; nothing is computed, nothing published
/// (rule 25).
Result<Reply> VllmOracle::load(Request& request) {
  if (request.seen != changes_) return Reply::refusal(Refusal::same_step);
  new_step_starts();
  if (const std::optional<Refusal> refusal = allocate(request, 0, false))
    return Reply::refusal(*refusal);
  request.computed = request.hit + request.external;
  take_tier_blocks(request, request.external);
  request.loading = request.scheduled = request.is_inflight_prefill = true;
  ++changes_;
  return Reply().set(ReplyField::n, 0);
}

bool VllmOracle::any_scheduled() const {
  return std::ranges::any_of(requests_, [](const auto& entry) { return entry.second.scheduled; });
}

Result<Reply> VllmOracle::admit(const Operation& operation) {
  const Count size = operation.tokens.size();
  const Count prompt = operation.prompt == Operation::kAbsent ? size : operation.prompt;
  if (requests_.contains(operation.id.text())) return refuse(operation, "it runs already");
  if (size == 0 || prompt == 0 || prompt > size) return refuse(operation, "that is no prompt");
  if (has_tier() && operation.external > 0)
    return refuse(operation, "the CPU tier is the only one that sends tokens");
  if (buffer_len_ > 0 && operation.external > 0)
    return refuse(operation, "with ReplaySSM there is no connector");
  for (const ImageSpan& image : operation.images)
    if (image.end() > prompt) return refuse(operation, "an image lies after the prompt");
  Request& request = requests_[operation.id.text()];
  request.known = operation.tokens;
  request.tokens = size;
  request.salt = operation.salt;
  request.lora = operation.lora;
  request.images = operation.images;
  request.prompt = prompt;
  request.tables.resize(groups_.size());
  request.seen = changes_;
  hash(request);
  look_up(request);
  request.external =
      std::max<Count>(std::min<Count>(operation.external, size - 1) - request.hit, 0);
  if (has_tier() && !look_up_tier(operation, request)) {
    requests_.erase(operation.id.text());
    return Reply::refusal(Refusal::same_step);
  }
  Reply reply;
  reply.set(ReplyField::cached, request.hit + request.external)
      .set(ReplyField::junction, request.junction);
  if (has_tier()) reply.set(ReplyField::host, request.external);
  return reply;
}

Result<void> VllmOracle::check_row(const Request& request, const Operation& operation,
                                   Count start) const {
  const Count drafts = operation.drafts.size();
  Count fresh = request.known.size() + operation.tokens.size() - start;
  if (operation.async != overlaps_)
    return refuse(operation, "either all steps are asynchronous or none is");
  if (operation.n == 0) return refuse(operation, "nothing is computed, and nothing is sent");
  if (has_tier() && request.waits && request.external > 0)
    return refuse(operation, "it loads what the CPU tier has first");
  if (overlaps_ && drafts_ > 0) {
    // Results that have not come yet decide where the row begins and which tokens it has.
    if (!operation.tokens.empty()) return refuse(operation, "its tokens are told by accept");
    fresh = request.tokens + request.placeholders - start;
  }
  if (operation.n > fresh + drafts || (drafts > 0 && operation.n != fresh + drafts))
    return refuse(operation, "n= does not fit its tokens");
  if (drafts > 0 && (drafts > drafts_ || fresh != 1 || (!request.waits && start < request.prompt)))
    return refuse(operation, "drafts stand after one sampled token");
  return {};
}

/// Tokens of the row. Where a padded admission cannot be computed whole, it is not padded.
VllmOracle::Count VllmOracle::row_of(const Request& request, const Operation& operation,
                                     Count start) const {
  const Count n = cut(request, start, operation.n);
  if (n < operation.n && operation.drafts.size() > 0) return 1;
  return leave_rest(request, start, n);
}

Result<Reply> VllmOracle::extend(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return refuse(operation, "there is no such request");
  Request& request = found->second;
  const Count start = request.waits ? request.hit + request.external : request.computed;
  if (!request.drafts.empty()) return refuse(operation, "a verification waits for its accept");
  if (request.loading) return refuse(operation, "it waits for what another server sends");
  if (request.waits && request.external > 0 && operation.async && operation.n == 0)
    return load(request);
  if (const Result<void> is_good = check_row(request, operation, start); !is_good)
    return tl::unexpected(is_good.error());
  if (request.waits && request.seen != changes_) return Reply::refusal(Refusal::same_step);
  if (request.scheduled) forward();
  new_step_starts();
  const Request before = request;
  request.known = request.known.followed_by(operation.tokens);
  if (!overlaps_) request.tokens = request.known.size();
  hash(request);
  const Count n = row_of(request, operation, start);
  if (n == 0) return Reply().set(ReplyField::n, 0);
  if (const std::optional<Refusal> refusal = allocate(request, n)) {
    request.known = before.known;
    request.tokens = before.tokens;
    request.hashes = before.hashes;
    return Reply::refusal(*refusal);
  }
  request.computed = start + n;
  request.before = start;
  request.first_row = before.waits || before.loaded;
  if (request.first_row) take_tier_blocks(request, before.waits ? request.external : 0);
  in_order_.push_back(request.tier_id);
  request.scheduled = true;
  request.is_prefill_chunk = request.computed < request.tokens + request.placeholders;
  if (request.first_row && request.is_prefill_chunk) request.is_inflight_prefill = true;
  ++changes_;
  const Tokens drafts = n == operation.n ? operation.drafts : Tokens();
  if (!overlaps_) {
    request.drafts = drafts;
    return Reply().set(ReplyField::n, n);
  }
  const Count spec_tokens = drafts.size();
  const bool is_prefill = request.computed < request.tokens + request.placeholders;
  request.under_way.push_back({n, spec_tokens, !is_prefill});
  if (!is_prefill) request.placeholders += 1 + spec_tokens;
  request.in_flight += n;
  return Reply().set(ReplyField::n, n);
}

/// update_from_output() for one request.
Result<Reply> VllmOracle::complete(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found != requests_.end() && found->second.loading) {
    // _update_waiting_for_remote_kv(), in the schedule() that takes the request up again.
    Request& loaded = found->second;
    if (has_tier() && !is_received(loaded.tier_id)) return Reply::refusal(Refusal::same_step);
    if (loaded.scheduled) forward();
    new_step_starts();
    step_has_started_ = true;
    loaded.loading = false;
    loaded.loaded = true;
    publish(loaded, loaded.computed);
    ++changes_;
    return Reply{};
  }
  if (found == requests_.end() || found->second.under_way.empty())
    return refuse(operation, "no step of it is under way");
  Request& request = found->second;
  const Request::Row row = request.under_way.front();
  if (row.samples && drafts_ > 0) return refuse(operation, "accept tells what it sampled");
  request.under_way.erase(request.under_way.begin());
  request.in_flight -= row.tokens;
  request.placeholders -= row.samples ? 1 : 0;
  request.tokens += row.samples ? 1 : 0;
  hash(request);
  if (row.samples) publish(request, request.computed - request.in_flight);
  ++changes_;
  return Reply{};
}

/// Whether a row is to bring tokens: with drafts configured, each one that samples tells them (rule
/// 22).
bool VllmOracle::is_result_due(const Request& request) const {
  if (!request.drafts.empty()) return true;
  if (drafts_ == 0 || request.waits) return false;
  if (!overlaps_) return request.computed >= request.tokens;
  return !request.under_way.empty() && request.under_way.front().samples;
}

Result<Reply> VllmOracle::accept(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end() || !is_result_due(found->second))
    return refuse(operation, "it has no drafts");
  Request& request = found->second;
  const std::uint32_t kept = operation.tokens.size();
  const Count drafts =
      overlaps_ ? request.under_way.front().spec_tokens : Count{request.drafts.size()};
  if (kept == 0 || operation.n != kept || kept > drafts + 1)
    return refuse(operation, "that is not what its drafts allow");
  if (!overlaps_ && operation.tokens.prefix(kept - 1) != request.drafts.prefix(kept - 1))
    return refuse(operation, "those were not its drafts");
  if (overlaps_) {
    request.in_flight -= request.under_way.front().tokens;
    request.placeholders -= 1 + drafts;
    request.under_way.erase(request.under_way.begin());
  } else if (request.scheduled) {
    forward();
  }
  request.computed -= drafts + 1 - kept;  // rejected ones were not computed
  request.known = request.known.followed_by(operation.tokens);
  request.tokens = request.known.size();
  hash(request);
  request.drafts = Tokens();
  publish(request, request.computed - request.in_flight);
  ++changes_;
  return Reply().set(ReplyField::n, kept);
}

Result<Reply> VllmOracle::end(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return refuse(operation, "there is no such request");
  if (operation.verb == Verb::finish && !found->second.drafts.empty())
    return refuse(operation, "a verification waits for its accept");
  if (operation.verb != Verb::abort && found->second.loading)
    return refuse(operation, "it waits for what another server sends");
  if (found->second.scheduled) forward();
  if (!found->second.waits) ++changes_;
  if (has_tier() && leave_tier(found->second, operation.verb)) {
    requests_.erase(found);
    return Reply{};
  }
  for (Table& table : found->second.tables) {
    std::ranges::reverse(table.columns);
    give_back(table.columns);
  }
  requests_.erase(found);
  return Reply{};
}

Result<Reply> VllmOracle::checkpoint(const Operation& operation) {
  const auto found = requests_.find(operation.id.text());
  if (found == requests_.end()) return refuse(operation, "there is no such request");
  if (!found->second.drafts.empty() || found->second.loading)
    return refuse(operation, "a verification or a load waits");
  const Request& request = found->second;
  if (operation.up_to > (request.waits ? request.hit + request.external : request.computed))
    return refuse(operation, "that is not computed");
  return Reply().set(ReplyField::exist, 0).set(ReplyField::length, 0);
}

Reply VllmOracle::evict(Count wanted) {
  if (any_scheduled()) forward();
  Count evicted = 0;
  for (const Number block : queue_)
    if (evicted < wanted && !blocks_[static_cast<std::size_t>(block)].entries.empty()) {
      drop_keys(block);
      ++evicted;
    }
  ++changes_;
  return Reply().set(ReplyField::kv, evicted).set(ReplyField::state, 0);
}

// --- The CPU tier (28 to 37) ---------------------------------------------------------------------

VllmOffload::Shown VllmOracle::shown(const Request& request) const {
  VllmOffload::Shown shown{.hashes = request.hashes,
                           .tokens = request.tokens,
                           .prompt = request.prompt,
                           .computed = request.computed,
                           .columns = {}};
  for (const Table& table : request.tables) shown.columns.push_back(table.columns);
  return shown;
}

/// The host's coordinator looks up the hashes after the local hit, as the device's does all (44).
VllmOracle::Count VllmOracle::look_up_host(const Request& request, Count local) {
  Request rest;
  const Count known = static_cast<Count>(request.hashes.size());
  rest.hashes.assign(request.hashes.begin() + std::min(local / hash_block_, known),
                     request.hashes.end());
  rest.tokens = request.tokens - local;
  if (rest.hashes.empty() || rest.tokens <= 1) return 0;
  const auto usual = std::pair(inside_, alignment_);
  if (is_lazy_) std::tie(inside_, alignment_) = std::pair(false, scheduler_block_);
  sought_ = simple_.get();
  look_up(rest);
  sought_ = this;
  std::tie(inside_, alignment_) = usual;
  if (rest.hit > 0) simple_->pin(request.tier_id, rest.offered);
  return rest.hit;
}

/// With a disk, a request that is turned away waits: the same one is known when it asks again.
/// (Without one it would not be told from a new one.)
bool VllmOracle::look_up_tier(const Operation& operation, Request& request) {
  if (!tier_) {
    request.tier_id = ++last_id_;
    return ask_tiers(request);
  }
  const std::string name = operation.id.text(), line = operation.text();
  if (turned_away_.contains(name) && turned_away_[name].first != line) {
    tier_->leave(turned_away_[name].second);
    turned_away_.erase(name);
  }
  const bool is_known = turned_away_.contains(name);
  request.tier_id = is_known ? turned_away_[name].second : ++last_id_;
  if (!is_known) tier_->add(request.tier_id);
  const Count before = tier_->promoted();
  const bool is_let_in = ask_tiers(request);
  if (tier_->promoted() > before) request.seen = ++changes_;
  turned_away_.erase(name);
  if (!is_let_in && tier_->has_disk())
    turned_away_[name] = {line, request.tier_id};
  else if (!is_let_in)
    tier_->remove(request.tier_id);
  return is_let_in;
}

/// The connector is asked with whole blocks of the local hit. A tail of it stays where the
/// connector has no more. Of two connectors the first one with tokens loads (51).
bool VllmOracle::ask_tiers(Request& request) {
  const Count aligned = floor(request.hit, scheduler_block_);
  Count more = 0;
  if (tier_) {
    const std::optional<Count> matched = tier_->matched(request.tier_id, shown(request), aligned);
    if (!matched) return false;
    more = *matched;
  }
  request.from_blocks = more == 0;
  if (simple_) {
    const Count on_host = look_up_host(request, aligned);
    if (request.from_blocks) more = on_host;
  }
  if (more <= request.hit - aligned) return true;
  request.external = more;
  if (request.hit == aligned) return true;
  request.hit = aligned;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const auto most = static_cast<std::size_t>(aligned / groups_[group].block);
    if (request.offered[group].size() > most) request.offered[group].resize(most);
  }
  return true;
}

/// update_state_after_alloc(), which a request meets again, without tokens, after its load.
void VllmOracle::take_tier_blocks(const Request& request, Count external) {
  if (tier_ && external > 0 && !request.from_blocks)
    tier_->load(request.tier_id, shown(request), request.hit, external);
  if (simple_)
    simple_->allocated(request.tier_id, shown(request), request.hit,
                       request.from_blocks ? external : 0);
}

void VllmOracle::end_schedule() {
  std::map<VllmOffload::Id, const Request*> by_id;
  for (const auto& [id, request] : requests_) by_id[request.tier_id] = &request;
  std::vector<VllmOffload::Scheduled> rows, offering;
  for (const VllmOffload::Id id : in_order_)
    if (by_id.contains(id)) rows.push_back({id, shown(*by_id[id])});
  std::ranges::stable_sort(offers_, [](const auto& a, const auto& b) { return a.group < b.group; });
  for (const VllmOffload::Offer& offer : offers_)
    if (std::ranges::none_of(offering, [&](const auto& known) { return known.id == offer.id; }))
      offering.push_back({offer.id, shown(*by_id.at(offer.id))});
  if (simple_) {
    std::vector<VllmSimple::Row> shown_rows;
    shown_rows.reserve(rows.size());
    for (const VllmOffload::Scheduled& row : rows)
      shown_rows.push_back({row.id, row.request, by_id[row.id]->before, by_id[row.id]->first_row});
    simple_->build(shown_rows, offers_);
  }
  if (tier_) tier_->build(rows, offering, offers_, allocated_);
}

/// True where a load is still to write the request's blocks, which stay its own.
bool VllmOracle::leave_tier(Request& request, Verb verb) {
  const VllmOffload::Id id = request.tier_id;
  std::erase_if(offers_, [&](const auto& offer) { return offer.id == id; });
  if (verb == Verb::preempt) {
    if (tier_) tier_->preempt(id);
    if (simple_) simple_->preempt(id);
    return false;
  }
  if (!request.waits) release_behind(request, request.computed);
  if (tier_) tier_->finish(id, shown(request), verb == Verb::abort);
  if (simple_) simple_->finish(id, shown(request));
  if (!request.loading || is_received(id)) return false;
  leaving_.emplace(id, request);
  return true;
}

bool VllmOracle::land_one(bool is_load) {
  return (tier_ && tier_->land(is_load)) || (simple_ && simple_->land(is_load));
}

Result<Reply> VllmOracle::land(const Operation& operation) {
  if (!has_tier()) return refuse(operation, "there is no CPU tier");
  if (operation.from.exists() || operation.tier.text() == "disk") return end_transfer(operation);
  const std::string& tier = operation.tier.text();
  if (tier != "host" && tier != "device") return refuse(operation, "there is no such tier");
  return Reply().set(ReplyField::n, land_one(tier == "device") ? 1 : 0);
}

Result<Reply> VllmOracle::end_transfer(const Operation& operation) {
  const std::string way = operation.from.text() + ">" + operation.tier.text();
  if (!has_disk() || (way != ">disk" && way != "disk>host") || operation.rank >= 0)
    return refuse(operation, "there is no such copy");
  return Reply().set(ReplyField::n,
                     tier_->end_transfer(way == "disk>host", operation.verb == Verb::fail) ? 1 : 0);
}

/// The disk's transfers are seen in a step alone: of the one under way, or of one that follows.
Result<Reply> VllmOracle::settle() {
  if (!has_tier()) return fail("settle: there is no CPU tier");
  if (any_scheduled() || has_disk()) forward();
  if (has_disk() && tier_->has_ended_transfers()) forward();
  auto [count, received] =
      tier_ ? tier_->settle() : std::pair<Count, std::vector<VllmOffload::Id>>();
  if (tier_) count += tier_->take_noted();
  if (simple_) {
    const auto [more, also] = simple_->settle();
    count += more;
    received.insert(received.end(), also.begin(), also.end());
  }
  for (const VllmOffload::Id id : received) {
    const auto left = leaving_.find(id);
    if (left == leaving_.end()) {
      received_.insert(id);
      continue;
    }
    for (Table& table : left->second.tables)
      give_back({table.columns.rbegin(), table.columns.rend()});
    leaving_.erase(left);
  }
  if (count > 0) ++changes_;
  return Reply().set(ReplyField::n, count);
}

Result<Reply> VllmOracle::evict_on(const Operation& operation) {
  const std::string tier = operation.tier.exists() ? operation.tier.text() : "device";
  if (tier == "disk" && has_disk())
    return Reply().set(ReplyField::kv, tier_->empty_disk()).set(ReplyField::state, 0);
  if ((tier != "host" && tier != "device") || (operation.tier.exists() && !has_tier()))
    return refuse(operation, "there is no such tier");
  if (tier == "device") return evict(std::max<Count>(operation.kv, 0));
  forward();
  ++changes_;
  return Reply().set(ReplyField::kv, reset_tier()).set(ReplyField::state, 0);
}

VllmOracle::Count VllmOracle::reset_tier() {
  const Count blocks = simple_ ? simple_->reset() : 0;
  return blocks + (tier_ ? tier_->reset() : 0);
}

Reply VllmOracle::flush() {
  if (any_scheduled() || has_tier()) forward();
  if (has_tier()) {
    while (land_one(false) || land_one(true)) continue;
    settle();
    while (has_disk() && tier_->has_stores()) {
      while (tier_->land(false)) continue;
      settle();
    }
    reset_tier();
    if (tier_) tier_->take_noted();
  }
  const Count keyed = forget();
  ++changes_;
  return Reply().set(ReplyField::kv, keyed).set(ReplyField::state, 0);
}

/// contents=: the digest of vllm.md, 26.
Reply VllmOracle::check() const {
  std::vector<Count> numbers;
  VllmPool::tell(numbers);
  for (const auto& [id, request] : requests_)
    for (const Table& table : request.tables) {
      if (request.waits) continue;
      numbers.insert(numbers.end(), table.columns.begin(), table.columns.end());
      numbers.insert(numbers.end(), {0, table.cached, table.partial, table.partial_block});
    }
  for (const auto& [id, request] : requests_)
    if (buffer_len_ > 0 && !request.waits) numbers.push_back(request.buffered);
  if (simple_) simple_->tell(numbers);
  if (tier_) tier_->tell(numbers);
  unsigned __int128 digest = 0;
  constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;
  for (const Count number : numbers)
    digest =
        (digest * (0x1CE4E5B9BF58476Du % kPrime) + static_cast<std::uint64_t>(number + 1)) % kPrime;
  const auto free = static_cast<Count>(queue_.size());
  return Reply()
      .set(ReplyField::violations, 0)
      .set(ReplyField::kv_free, free)
      .set(ReplyField::kv_locked, static_cast<Count>(blocks_.size()) - 1 - free)
      .set(ReplyField::contents, static_cast<Count>(digest));
}

namespace {

std::unique_ptr<Subject> make_vllm(const SubjectOptions& options) {
  return std::make_unique<VllmOracle>(options.config, VllmOracle::Mode::align);
}
std::unique_ptr<Subject> make_sparse(const SubjectOptions& options) {
  return std::make_unique<VllmOracle>(options.config, VllmOracle::Mode::sparse);
}
std::unique_ptr<Subject> make_all(const SubjectOptions& options) {
  return std::make_unique<VllmOracle>(options.config, VllmOracle::Mode::all);
}

const Registration<OracleEntry> kVllm{
    {"vllm-align", make_vllm}, {"vllm-align-retention-0", make_sparse}, {"vllm-all", make_all}};

}  // namespace
}  // namespace lockstep::reference
