#include "cache_sim/policies/vllm/align_worker.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kMostFindings = 8;  // the first is the one that counts

std::size_t largest_block(const BlockRules& rules) {
  std::int64_t most = 0;
  for (const GroupSpec& group : rules.groups)
    if (!is_state(group.kind)) most = std::max(most, group.block);
  return static_cast<std::size_t>(most);
}

std::size_t conv_rows(const BlockRules& rules) {
  return static_cast<std::size_t>(AlignWorker::kConvWidth - 1 + rules.drafts);
}

}  // namespace

AlignWorker::AlignWorker(const BlockRules& rules, const BlockPool& pool)
    : rules_(rules),
      pool_(pool),
      kv_size_(largest_block(rules)),
      conv_size_(conv_rows(rules)),
      kv_((std::size_t{pool.block_count()} + 1) * kv_size_),
      conv_((std::size_t{pool.block_count()} + 1) * conv_size_),
      recurrent_(std::size_t{pool.block_count()} + 1, Label{.poisoned = true}),
      written_(recurrent_.size()),
      compared_keys_(recurrent_.size()) {
  for (std::uint32_t group = 0; group < rules.groups.size(); ++group)
    (is_state(rules.groups[group].kind) ? state_groups_ : kv_groups_).push_back(group);
}

void AlignWorker::report(const std::string& text, const std::string& expected,
                         const std::string& actual) {
  if (findings_.size() < kMostFindings)
    findings_.push_back({FindingKind::wrong_state_prefix, text, expected, actual});
}

/// The null block where there is no such column.
BlockId AlignWorker::block_at(const std::vector<BlockId>& columns, std::int64_t column) {
  if (column < 0 || column >= std::ssize(columns)) return kNullBlock;
  return columns[static_cast<std::size_t>(column)];
}

BlockId AlignWorker::column_of(const BlockTable& table, std::int64_t column) {
  return block_at(table.columns, column);
}

void AlignWorker::take_fingerprints(const WorkerRow& row) {
  const std::int64_t window = std::max(kConvWidth - 1, row.external);
  fingerprints_begin_ = std::max<std::int64_t>(row.start - window, 0);
  fingerprints_.resize(static_cast<std::size_t>(row.end - fingerprints_begin_));
  row.tokens.prefix_fingerprints(static_cast<std::uint32_t>(fingerprints_begin_),
                                 static_cast<std::uint32_t>(row.end), fingerprints_);
}

// --- Requests ------------------------------------------------------------------------------------

void AlignWorker::admit(std::uint32_t place) {
  if (place >= seats_.size()) seats_.resize(place + 1);
  const std::int64_t old = seats_[place].accepted;
  seats_[place] = Seat{};
  if (rules_.resumes_with_old_accepted) seats_[place].accepted = old;
}

void AlignWorker::learn(const std::vector<KeyId>& keys, const Tokens& tokens) {
  // Keys are a chain: where the last one is known, so are those before it.
  for (std::size_t i = keys.size(); i-- > 0;) {
    if (keys[i] >= of_key_.size()) of_key_.resize(std::size_t{keys[i]} + 1);
    if (!of_key_[keys[i]].empty()) return;
    of_key_[keys[i]] = tokens.prefix(
        static_cast<std::uint32_t>((static_cast<std::int64_t>(i) + 1) * rules_.hash_block));
  }
}

// --- A step --------------------------------------------------------------------------------------

void AlignWorker::forward(const std::vector<BlockCopy>& copies, std::span<const WorkerRow> rows) {
  copy_blocks(copies, false);
  for (const WorkerRow& row : rows) run(row);
  if (rules_.defers_last_group) copy_blocks(copies, true);
  for (const BlockCopy& copy : copies) check_block_once(copy.target);
  for (const WorkerRow& row : rows) check_tables(*row.request);
}

/// All copies; where the last group is deferred, those before the forward or those after it.
void AlignWorker::copy_blocks(const std::vector<BlockCopy>& copies, bool is_late) {
  if (!rules_.copies_blocks) return;
  for (const BlockCopy& copy : copies) {
    if (rules_.copies_first_group_alone && copy.group != 0) continue;
    if (rules_.defers_last_group && is_late != (copy.group + 1 == rules_.groups.size())) continue;
    copy_block(copy);
  }
}

void AlignWorker::copy_block(const BlockCopy& copy) {
  ++written_[copy.target];
  if (!is_state(rules_.groups[copy.group].kind)) {
    std::copy_n(kv_of(copy.source), kv_size_, kv_of(copy.target));
    return;
  }
  recurrent_[copy.target] = recurrent_[copy.source];
  std::copy_n(conv_of(copy.source), conv_size_, conv_of(copy.target));
}

void AlignWorker::run(const WorkerRow& row) {
  take_fingerprints(row);
  if (row.external > 0) load(row);
  run_kv(row);
  if (state_groups_.empty()) return;
  if (rules_.splitter_block == 0)
    run_all_states(row);
  else
    run_states(row);
}

void AlignWorker::receive(const WorkerRow& row) {
  take_fingerprints(row);
  load(row);
  check_tables(*row.request);
}

/// Writes the received KV where the group has a block for it, and the state after the last token.
void AlignWorker::load(const WorkerRow& row) {
  const auto is_left_out = [&](std::uint32_t group) {
    return rules_.loads_one_group_less && group + 1 == rules_.groups.size();
  };
  for (const std::uint32_t group : kv_groups_) {
    if (is_left_out(group)) continue;
    const std::int64_t size = rules_.groups[group].block;
    for (std::int64_t i = row.start - row.external; i < row.start; ++i) {
      const BlockId block = column_of(row.request->tables[group], i / size);
      if (block == kNullBlock) continue;
      kv_of(block)[i % size] = fingerprint_at(i);
      ++written_[block];
    }
  }
  for (const std::uint32_t group : state_groups_) {
    if (is_left_out(group)) continue;
    const std::int64_t column = (row.start - 1) / rules_.state_block;
    const BlockId block = column_of(row.request->tables[group], column);
    if (block != kNullBlock)
      store_prefix(row, block, row.start,
                   label_of(row.tokens, static_cast<std::uint32_t>(row.start)));
  }
}

void AlignWorker::run_kv(const WorkerRow& row) {
  Seat& seat = seats_[row.place];
  seat.read.resize(rules_.groups.size());
  for (const std::uint32_t group : kv_groups_) {
    const GroupSpec& spec = rules_.groups[group];
    const BlockTable& table = row.request->tables[group];
    const std::int64_t first =
        spec.kind == GroupKind::window ? std::max<std::int64_t>(0, row.start - spec.window + 1) : 0;
    checks_.kv += row.start - first;
    std::vector<Seen>& read = seat.read[group];
    read.resize(table.columns.size());
    for (std::int64_t column = first / spec.block; column * spec.block < row.start; ++column) {
      const BlockId block = column_of(table, column);
      const Seen now{block, written_[block]};
      const bool exists = column < std::ssize(read);
      if (exists && read[static_cast<std::size_t>(column)] == now) continue;
      read_column(row, group, column, first);
      if (exists && (column + 1) * spec.block <= row.start)
        read[static_cast<std::size_t>(column)] = now;
    }
    for (std::int64_t i = row.start; i < row.end; ++i) {
      const BlockId block = column_of(table, i / spec.block);
      kv_of(block)[i % spec.block] = fingerprint_at(i);
      ++written_[block];
    }
  }
}

/// Compares the KV of a column's tokens, from token `first` to those before the row.
void AlignWorker::read_column(const WorkerRow& row, std::uint32_t group, std::int64_t column,
                              std::int64_t first) {
  const std::int64_t size = rules_.groups[group].block;
  const std::int64_t begin = std::max(first, column * size);
  const std::int64_t end = std::min(row.start, (column + 1) * size);
  const BlockId block = column_of(row.request->tables[group], column);
  prefixes_.resize(static_cast<std::size_t>(end - begin));
  row.tokens.prefix_fingerprints(static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end),
                                 prefixes_);
  for (std::int64_t i = begin; i < end; ++i) {
    if (kv_of(block)[i % size] == prefixes_[static_cast<std::size_t>(i - begin)]) continue;
    return report(
        fmt::format(
            "group {}: a forward from token {} on reads KV that is not that of token {}, in "
            "block {}",
            group, row.start, i, block),
        row.tokens.prefix(static_cast<std::uint32_t>(i + 1)).text(40), "that of other tokens");
  }
}

/// Whether the row runs in the kernels for verifications. A row of one token after the prompt does,
/// even without drafts. A replay of several known tokens does not.
bool AlignWorker::is_verification(const WorkerRow& row, bool is_new) const {
  if (rules_.drafts == 0) return false;
  const std::int64_t n = row.end - row.start;
  if (row.drafts > 0 || (row.start >= row.request->prompt && n == 1)) return true;
  return rules_.verifies_replays && is_new && row.start >= row.request->prompt &&
         n <= rules_.drafts + 1;
}

/// "all" mode: kernels load the state from the column of the token before the row and store one at
/// every block end that they pass, and after the last token.
void AlignWorker::run_all_states(const WorkerRow& row) {
  const std::int64_t block = rules_.state_block;
  const std::int64_t last = ceil_div(row.end, block) - 1;
  for (const std::uint32_t group : state_groups_) {
    const BlockTable& table = row.request->tables[group];
    begin(row, table, row.start == 0 ? 0 : (row.start - 1) / block, 0);
    for (std::int64_t column = row.start / block; column <= last; ++column)
      if (column == last || !rules_.stores_chunk_ends_alone)
        store_prefix(row, column_of(table, column), std::min((column + 1) * block, row.end),
                     loaded_);
  }
}

void AlignWorker::run_states(const WorkerRow& row) {
  Seat& seat = seats_[row.place];
  const std::int64_t block = rules_.state_block;
  const bool is_new = seat.running == kNone;
  const bool verifies = is_verification(row, is_new);
  note_columns(seat, *row.request);
  const std::int64_t unit = rules_.resumes_by_hash_block ? rules_.hash_block : block;
  std::int64_t previous = seat.running;
  if (is_new) previous = row.start == 0 ? kNone : (row.start - 1) / unit;
  const std::int64_t current = ceil_div(row.end, block) - 1;
  // A session's next turn, or sampled tokens that a trace computes in a row without drafts: such a
  // row begins at column `current`, so the accepted state has to be moved there.
  if (rules_.forgets_accepted_before_turn && !verifies) seat.accepted = 1;
  const bool moves_in_place = !is_new && !verifies && seat.accepted > 1;
  if (previous != kNone && (previous != current || moves_in_place)) {
    const std::int64_t bias = rules_.copies_accepted_state ? seat.accepted - 1 : 0;
    move_state(seat, *row.request, previous, current, bias);
    if (rules_.copy_resets_accepted) seat.accepted = 1;
  }
  std::int64_t offset = seat.accepted - 1;
  if (rules_.forgets_accepted_without_drafts && row.drafts == 0) offset = 0;
  for (const std::uint32_t group : state_groups_) {
    const BlockTable& table = row.request->tables[group];
    begin(row, table, current, verifies ? offset : 0);
    if (verifies)
      verify(row, table, current, offset);
    else
      compute(row, table, current);
  }
  seat.running = current;
  seat.decided = row.end - row.drafts;
  settle(seat, *row.request, 1);  // the token that is sampled in any case
}

/// Loads the state that the row begins with, and compares it with the tokens before the row.
void AlignWorker::begin(const WorkerRow& row, const BlockTable& table, std::int64_t column,
                        std::int64_t offset) {
  const bool is_recycled = row.drafts > 0 && rules_.begins_with_recycled_states;
  if (row.start == 0 && !is_recycled) {
    loaded_ = Label{};
    return;
  }
  ++checks_.states;
  const BlockId block = column_of(table, column + offset);
  loaded_ = recurrent_[block];
  const Label expected = label_of(row.tokens, static_cast<std::uint32_t>(row.start));
  if (loaded_ != expected)
    report(fmt::format("a forward from token {} on begins with the recurrent state of block {}, "
                       "which stands for {}",
                       row.start, block, loaded_.text()),
           expected.text(), loaded_.text());
  const std::uint64_t* const conv = conv_of(column_of(table, column)) + offset;
  for (std::int64_t i = 0; i < kConvWidth - 1; ++i)
    if (conv[i] != fingerprint_at(row.start - (kConvWidth - 1) + i)) {
      report(fmt::format("a forward from token {} on begins with a conv window whose row {} is of "
                         "another token",
                         row.start, i),
             fmt::format("token {}", row.start - (kConvWidth - 1) + i), "another one");
      return;
    }
}

/// Stores the state after each token, and the conv rows of all of them in the running column.
void AlignWorker::verify(const WorkerRow& row, const BlockTable& table, std::int64_t column,
                         std::int64_t offset) {
  std::uint64_t* const conv = conv_of(column_of(table, column));
  ++written_[column_of(table, column)];
  const std::int64_t kept = kConvWidth - 2;
  // A prompt of one token, padded with drafts, has no window before it.
  if (row.start == 0)
    std::fill_n(conv, kept, 0);
  else
    std::copy(conv + offset + 1, conv + offset + 1 + kept, conv);
  for (std::int64_t i = row.start; i < row.end; ++i) conv[kept + i - row.start] = fingerprint_at(i);
  Label state = loaded_;
  for (std::int64_t i = row.start; i < row.end; ++i) {
    state.digest = extend_digest(state.digest, row.tokens[static_cast<std::uint32_t>(i)]);
    ++state.size;
    const BlockId block = column_of(table, column + i - row.start);
    if (block == kNullBlock) continue;
    recurrent_[block] = state;
    ++written_[block];
  }
}

/// Stores the last state, and one inside the chunk wherever kernels can store one, whether or not
/// the manager uses it.
void AlignWorker::compute(const WorkerRow& row, const BlockTable& table, std::int64_t column) {
  const std::int64_t position = last_checkpoint(rules_, row.end, rules_.hit_alignment);
  const std::int64_t block = rules_.state_block;
  if (is_checkpoint_valid(rules_, row.start, row.end, position, block))
    store_prefix(row, column_of(table, ceil_div(row.end, block) - 2), position, loaded_);
  store_prefix(row, column_of(table, column), row.end, loaded_);
}

void AlignWorker::store_prefix(const WorkerRow& row, BlockId block, std::int64_t tokens,
                               const Label& state) {
  if (block == kNullBlock) return;
  ++written_[block];
  Label& stored = recurrent_[block];
  stored = state;
  stored.digest = extend_digest(state.digest, row.tokens, static_cast<std::uint32_t>(row.start),
                                static_cast<std::uint32_t>(tokens));
  stored.size += static_cast<std::uint32_t>(tokens - row.start);
  std::uint64_t* const conv = conv_of(block);
  for (std::int64_t i = 0; i < kConvWidth - 1; ++i)
    conv[i] = fingerprint_at(tokens - (kConvWidth - 1) + i);
}

/// Keeps each column's first block. When the manager moves a scratch block to another column, the
/// worker's old column still leads to it, and a chunk that passes that column begins with its
/// state.
void AlignWorker::note_columns(Seat& seat, const BlockRequest& request) const {
  seat.columns.resize(state_groups_.size());
  for (std::size_t i = 0; i < state_groups_.size(); ++i) {
    const std::vector<BlockId>& columns = request.tables[state_groups_[i]].columns;
    std::vector<BlockId>& noted = seat.columns[i];
    if (noted.size() < columns.size())
      noted.insert(noted.end(), columns.begin() + std::ssize(noted), columns.end());
  }
}

/// Copies the state at column from + bias to column `to`.
void AlignWorker::move_state(const Seat& seat, const BlockRequest& request, std::int64_t from,
                             std::int64_t to, std::int64_t bias) {
  for (std::size_t i = 0; i < state_groups_.size(); ++i) {
    const std::vector<BlockId>& noted = seat.columns[i];
    const BlockId target = column_of(request.tables[state_groups_[i]], to);
    if (target == kNullBlock) continue;
    ++written_[target];
    recurrent_[target] = recurrent_[block_at(noted, from + bias)];
    const std::uint64_t* const source = conv_of(block_at(noted, from));
    rows_.assign(source + bias, source + conv_size_);
    std::copy(rows_.begin(), rows_.end(), conv_of(target));
  }
}

/// After the forward: stores the state of a block end that these `kept` tokens have passed. A
/// verification settles twice, first with the one token that it keeps in any case, because a trace
/// may hold other operations before its accept. (In vLLM none comes between.)
void AlignWorker::settle(Seat& seat, const BlockRequest& request, std::int64_t kept) {
  seat.accepted = kept;
  if (state_groups_.empty() || !rules_.keeps_block_ends) return;
  const std::int64_t block = rules_.state_block;
  const std::int64_t end = floor_to(seat.decided + kept - 1, block);
  if (end < seat.decided) return;
  const std::int64_t bias = end - seat.decided;
  const std::int64_t target = end / block - 1;
  if (target == seat.running && bias == 0) return;
  LOCKSTEP_MARK("vllm.state_of_a_passed_block_end");
  move_state(seat, request, seat.running, target, bias);
  if (target == seat.running) seat.accepted = 1;
}

void AlignWorker::accept(std::uint32_t place, const BlockRequest& request, std::int64_t kept) {
  settle(seats_[place], request, kept);
  check_tables(request);
}

// --- What blocks hold ----------------------------------------------------------------------------

void AlignWorker::check_all() {
  for (BlockId block = 1; block <= pool_.block_count(); ++block) check_block(block);
}

void AlignWorker::check_tables(const BlockRequest& request) {
  for (const BlockTable& table : request.tables)
    for (const BlockId block : table.columns)
      if (block != kNullBlock) check_block_once(block);
}

/// Skips a block if neither its content nor its keys have changed since the last comparison.
void AlignWorker::check_block_once(BlockId block) {
  SeenKeys now{.written = written_[block]};
  if (pool_.has_key(block)) {
    const BlockPool::Entry& primary = pool_.primary(block);
    now = {written_[block],       primary.group, primary.tokens,
           primary.next_of_block, primary.key,   true};
  }
  if (now == compared_keys_[block]) return;
  compared_keys_[block] = now;
  check_block(block);
}

void AlignWorker::check_block(BlockId block) {
  if (!pool_.has_key(block)) return;
  for (const BlockPool::Entry& entry : pool_.entries_of(block)) check_entry(entry);
}

void AlignWorker::check_entry(const BlockPool::Entry& entry) {
  const GroupSpec& spec = rules_.groups[entry.group];
  const std::int64_t tokens = entry.tokens;
  require(entry.key < of_key_.size() && of_key_[entry.key].size() == entry.tokens,
          "a key stands for the tokens that it was made of");
  const Tokens& prefix = of_key_[entry.key];
  const auto report_block = [&](const std::string& what, const std::string& actual) {
    report(fmt::format("block {} of group {} is keyed for {}, and its {}", entry.block, entry.group,
                       counted(tokens, "token"), what),
           label_of(prefix, entry.tokens).text(), actual);
  };
  const auto fingerprint = [&](std::int64_t i) {
    return i < 0 ? 0 : prefix.fingerprint(static_cast<std::uint32_t>(i + 1));
  };
  if (is_state(spec.kind)) {
    ++checks_.hashed;
    const Label& state = recurrent_[entry.block];
    if (state != label_of(prefix, entry.tokens))
      report_block("recurrent state stands for " + state.text(), state.text());
    for (std::int64_t i = 0; i < kConvWidth - 1; ++i)
      if (conv_of(entry.block)[i] != fingerprint(tokens - (kConvWidth - 1) + i))
        return report_block("conv window is of other tokens", "other tokens");
    return;
  }
  ++checks_.hashed;
  const std::int64_t first = floor_to(tokens - 1, spec.block);
  prefixes_.resize(static_cast<std::size_t>(tokens - first));
  prefix.prefix_fingerprints(static_cast<std::uint32_t>(first), entry.tokens, prefixes_);
  for (std::int64_t i = first; i < tokens; ++i)
    if (kv_of(entry.block)[i - first] != prefixes_[static_cast<std::size_t>(i - first)])
      return report_block(fmt::format("KV of token {} is another one's", i), "another token's");
}

}  // namespace lockstep::cache_sim
