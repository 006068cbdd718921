#include "cache_sim/policies/vllm/label_blocks.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "reference/base/counted.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kMostFindings = 8;  // the first is the one that counts
constexpr std::uint32_t kNoGroup = ~std::uint32_t{0};

std::size_t largest_block(const BlockRules& rules) {
  std::int64_t most = 0;
  for (const GroupSpec& group : rules.groups)
    if (!is_state(group.kind)) most = std::max(most, group.block);
  return static_cast<std::size_t>(most);
}

}  // namespace

LabelBlocks::LabelBlocks(const BlockRules& rules, const BlockPool& pool, NumberedBlocks* numbers)
    : rules_(rules),
      pool_(pool),
      numbers_(numbers),
      kv_size_(largest_block(rules)),
      conv_size_(static_cast<std::size_t>(kConvWidth - 1 + rules.drafts)),
      kv_(static_cast<std::size_t>(rules.all_blocks()) * kv_size_),
      conv_(static_cast<std::size_t>(rules.all_blocks()) * conv_size_),
      recurrent_(static_cast<std::size_t>(rules.all_blocks()), Label{.poisoned = true}),
      rings_(recurrent_.size()),
      written_(recurrent_.size()),
      group_(recurrent_.size(), kNoGroup),
      awaited_(recurrent_.size()),
      readers_(recurrent_.size()),
      guarded_(recurrent_.size()),
      written_places_(recurrent_.size()),
      compared_keys_(recurrent_.size()) {}

void LabelBlocks::report(const std::string& text, const std::string& expected,
                         const std::string& actual, FindingKind kind) {
  if (findings_.size() < kMostFindings) findings_.push_back({kind, text, expected, actual});
}

void LabelBlocks::read(BlockId block) {
  if (awaited_[block] > 0)
    report(fmt::format("block {} is read, and the copy that writes it has not landed", block),
           "nothing reads it before", "a read", FindingKind::read_before_landed);
}

void LabelBlocks::report_write(BlockId block) {
  report(fmt::format("block {} is written while a copy that {} it is in flight", block,
                     awaited_[block] > 0 ? "writes" : "reads"),
         "nothing writes it before that has landed", "a write", FindingKind::source_changed);
}

void LabelBlocks::take_fingerprints(const Tokens& tokens, std::int64_t begin, std::int64_t end) {
  fingerprints_begin_ = std::max<std::int64_t>(begin, 0);
  fingerprints_.resize(static_cast<std::size_t>(end - fingerprints_begin_));
  tokens.prefix_fingerprints(static_cast<std::uint32_t>(fingerprints_begin_),
                             static_cast<std::uint32_t>(end), fingerprints_);
}

void LabelBlocks::admit(std::uint32_t place) {
  if (place >= read_.size()) read_.resize(place + 1);
  read_[place].clear();
}

void LabelBlocks::learn(const std::vector<KeyId>& keys, const Tokens& tokens) {
  // Keys are a chain: where the last one is known, so are those before it.
  for (std::size_t i = keys.size(); i-- > 0;) {
    if (keys[i] >= of_key_.size()) of_key_.resize(std::size_t{keys[i]} + 1);
    if (!of_key_[keys[i]].empty()) return;
    of_key_[keys[i]] = tokens.prefix(
        static_cast<std::uint32_t>((static_cast<std::int64_t>(i) + 1) * rules_.hash_block));
  }
}

// --- What is written -----------------------------------------------------------------------------

/// The block belongs to that group now, and what it held is gone.
void LabelBlocks::destroy(BlockId block, std::uint32_t group) {
  written_places_[block] = {};
  std::fill_n(conv_of(block), conv_size_, 0);
  recurrent_[block] = Label{.poisoned = true};
  rings_[block].clear();
  group_[block] = group;
}

/// These places of the block are written, and those between them and what was written before hold
/// no token's KV.
void LabelBlocks::cover(BlockId block, std::uint32_t first, std::uint32_t end) {
  Places& places = written_places_[block];
  if (places.first == places.end) {
    places = {first, end};
    return;
  }
  if (first > places.end) std::fill(kv_of(block) + places.end, kv_of(block) + first, 0);
  if (end < places.first) std::fill(kv_of(block) + end, kv_of(block) + places.first, 0);
  places = {std::min(places.first, first), std::max(places.end, end)};
}

void LabelBlocks::lose(BlockId block) {
  if (group_[block] == kNoGroup) return;
  ++written_[block];
  destroy(block, kNoGroup);
}

void LabelBlocks::copy(const BlockCopy& copy) {
  write(copy.target, group_[copy.source]);
  if (!is_state(rules_.groups[copy.group].kind)) {
    std::copy_n(kv_of(copy.source), kv_size_, kv_of(copy.target));
    written_places_[copy.target] = written_places_[copy.source];
    return;
  }
  recurrent_[copy.target] = recurrent_[copy.source];
  rings_[copy.target] = rings_[copy.source];
  std::copy_n(conv_of(copy.source), conv_size_, conv_of(copy.target));
}

void LabelBlocks::queue_copy(const BlockCopy& copy, std::int64_t places) {
  read(copy.source);
  // An earlier copy to that block is of the same direction, and lands first.
  const std::uint32_t earlier = std::exchange(awaited_[copy.target], 0);
  write(copy.target, copy.group);
  destroy(copy.target, copy.group);
  awaited_[copy.target] = earlier + 1;
  ++readers_[copy.source];
  guarded_[copy.source] = std::max(guarded_[copy.source], places);
}

void LabelBlocks::land_copy(const BlockCopy& copy) {
  if (--readers_[copy.source] == 0) guarded_[copy.source] = 0;
  const std::uint32_t awaited = std::exchange(awaited_[copy.target], 0);
  this->copy(copy);
  awaited_[copy.target] = awaited - 1;
}

void LabelBlocks::await(BlockId block, std::uint32_t group) {
  write(block, group);
  destroy(block, group);
  ++awaited_[block];
}

void LabelBlocks::arrive(BlockId block, const BlockContent* content) {
  --awaited_[block];
  if (content == nullptr) return;
  ++written_[block];
  group_[block] = content->group;
  recurrent_[block] = content->recurrent;
  written_places_[block] = {content->first, content->end};
  std::ranges::copy(content->kv, kv_of(block));
  std::ranges::copy(content->conv, conv_of(block));
}

void LabelBlocks::guard(BlockId block, std::int64_t places) {
  read(block);
  ++readers_[block];
  guarded_[block] = std::max(guarded_[block], places);
}

BlockContent LabelBlocks::release(BlockId block) {
  if (--readers_[block] == 0) guarded_[block] = 0;
  return {.group = group_[block],
          .recurrent = recurrent_[block],
          .first = written_places_[block].first,
          .end = written_places_[block].end,
          .kv = {kv_of(block), kv_of(block) + kv_size_},
          .conv = {conv_of(block), conv_of(block) + conv_size_}};
}

void LabelBlocks::receive(const BlockRow& row) {
  take_fingerprints(row.tokens, row.start - std::max(kConvWidth - 1, row.external), row.start);
  for (const BlockKv& kv : row.kv) write_kv(kv, row.start - row.external, row.start);
  const Label sent = label_of(row.tokens, static_cast<std::uint32_t>(row.start));
  for (const BlockStates& states : row.states)
    for (const BlockStates::Store& one : states.stores) store(row, states.group, one, sent);
}

void LabelBlocks::forward(const BlockRow& row) {
  take_fingerprints(row.tokens, row.start - (kConvWidth - 1), row.end);
  for (const BlockKv& kv : row.kv) run_kv(row, kv);
  for (const BlockStates& states : row.states) {
    const Label begun = begin(row, states);
    if (row.verifies)
      verify(row, states, begun);
    else if (states.appends)
      append(row, states);
    else
      for (const BlockStates::Store& one : states.stores) store(row, states.group, one, begun);
  }
}

void LabelBlocks::run_kv(const BlockRow& row, const BlockKv& kv) {
  read_[row.place].resize(rules_.groups.size());
  std::vector<Seen>& read = read_[row.place][kv.group];
  read.resize(kv.columns.size());
  for (std::int64_t column = kv.first / kv.size; column * kv.size < row.start; ++column) {
    const BlockId block = block_at(kv.columns, column);
    const Seen now{block, written_[block]};
    const bool exists = column < std::ssize(read);
    if (exists && read[static_cast<std::size_t>(column)] == now) continue;
    read_column(row, kv, column);
    if (exists && (column + 1) * kv.size <= row.start) read[static_cast<std::size_t>(column)] = now;
  }
  write_kv(kv, row.start, row.end);
}

void LabelBlocks::write_kv(const BlockKv& kv, std::int64_t begin, std::int64_t end) {
  while (begin < end) {
    const std::int64_t column = begin / kv.size;
    const std::int64_t piece_end = std::min(end, (column + 1) * kv.size);
    const BlockId block = block_at(kv.columns, column);
    if (block != kNullBlock) {
      write(block, kv.group, begin - column * kv.size);
      cover(block, static_cast<std::uint32_t>(begin - column * kv.size),
            static_cast<std::uint32_t>(piece_end - column * kv.size));
      std::copy_n(&fingerprints_[static_cast<std::size_t>(begin - fingerprints_begin_)],
                  piece_end - begin, kv_of(block) + begin - column * kv.size);
    }
    begin = piece_end;
  }
}

/// The number of tokens from that place on whose KV is that of prefixes_, up to all of these.
std::int64_t LabelBlocks::right_kv(BlockId block, std::uint32_t group, std::int64_t place) {
  const std::uint64_t* const held = kv_of(block) + place;
  const std::int64_t size = std::ssize(prefixes_);
  if (covers(block, group, place, place + size) &&
      std::equal(prefixes_.begin(), prefixes_.end(), held))
    return size;
  std::int64_t right = 0;
  while (covers(block, group, place + right, place + right + 1) &&
         prefixes_[static_cast<std::size_t>(right)] == held[right])
    ++right;
  return right;
}

/// Compares the KV of a column's tokens, from the first that the row reads to those before it.
void LabelBlocks::read_column(const BlockRow& row, const BlockKv& kv, std::int64_t column) {
  const std::int64_t begin = std::max(kv.first, column * kv.size);
  const std::int64_t end = std::min(row.start, (column + 1) * kv.size);
  const BlockId block = block_at(kv.columns, column);
  read(block);
  prefixes_.resize(static_cast<std::size_t>(end - begin));
  row.tokens.prefix_fingerprints(static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end),
                                 prefixes_);
  const std::int64_t wrong = begin + right_kv(block, kv.group, begin - column * kv.size);
  if (wrong == end) return;
  report(fmt::format("group {}: a forward from token {} on reads KV that is not that of token {}, "
                     "in block {}",
                     kv.group, row.start, wrong, block),
         row.tokens.prefix(static_cast<std::uint32_t>(wrong + 1)).text(40), "that of other tokens");
}

/// The state that the row begins with, compared with the tokens before the row.
Label LabelBlocks::begin(const BlockRow& row, const BlockStates& states) {
  if (states.from_nothing) return {};
  read(states.recurrent);
  const Label begun = recurrent_of(states.recurrent, states.group);
  const std::int64_t written = std::max<std::int64_t>(row.start - states.pending, 0);
  const Label expected = label_of(row.tokens, static_cast<std::uint32_t>(written));
  if (begun != expected)
    report(fmt::format("a forward from token {} on begins with the recurrent state of block {}, "
                       "which stands for {}",
                       row.start, states.recurrent, begun.text()),
           expected.text(), begun.text());
  const std::uint64_t* const conv = conv_of(states.conv) + states.conv_begin;
  const bool is_own = group_[states.conv] == states.group;
  for (std::int64_t i = 0; i < kConvWidth - 1; ++i)
    if (!is_own || conv[i] != fingerprint_at(row.start - (kConvWidth - 1) + i)) {
      report(fmt::format("a forward from token {} on begins with a conv window whose row {} is of "
                         "another token",
                         row.start, i),
             fmt::format("token {}", row.start - (kConvWidth - 1) + i), "another one");
      break;
    }
  return states.pending > 0 && begun == expected ? read_ring(row, states, begun) : begun;
}

/// The state with what is pending in the ring.
Label LabelBlocks::read_ring(const BlockRow& row, const BlockStates& states, const Label& begun) {
  const std::vector<Label>& ring = rings_[states.ring];
  for (std::int64_t i = 0; i < states.pending; ++i) {
    const Label due =
        label_of(row.tokens, static_cast<std::uint32_t>(row.start - states.pending + i + 1));
    const bool is_there = group_[states.ring] == states.group && i < std::ssize(ring);
    if (is_there && ring[static_cast<std::size_t>(i)] == due) continue;
    const std::string held =
        is_there ? ring[static_cast<std::size_t>(i)].text() : "nothing that was written";
    report(fmt::format("a forward from token {} on reads entry {} of the ring of block {}, which "
                       "stands for {}",
                       row.start, i, states.ring, held),
           due.text(), held);
    return begun;
  }
  return label_of(row.tokens, static_cast<std::uint32_t>(row.start));
}

/// The row's token goes into the ring, and the state stays as it is.
void LabelBlocks::append(const BlockRow& row, const BlockStates& states) {
  if (states.ring == kNullBlock) return;
  write(states.ring, states.group);
  std::vector<Label>& ring = rings_[states.ring];
  const auto entry = static_cast<std::size_t>(states.pending);
  if (ring.size() <= entry) ring.resize(entry + 1, Label{.poisoned = true});
  ring[entry] = label_of(row.tokens, static_cast<std::uint32_t>(row.end));
  for (const BlockStates::Store& one : states.stores)
    if (one.block != kNullBlock) store_conv(one.block, one.size);
}

/// Stores the state after each token, and the conv rows of all of them in the block of the window.
void LabelBlocks::verify(const BlockRow& row, const BlockStates& states, Label state) {
  if (states.conv != kNullBlock) {
    write(states.conv, states.group);
    std::uint64_t* const conv = conv_of(states.conv);
    const std::int64_t kept = kConvWidth - 2;
    const std::int64_t from = states.conv_begin + 1;
    // A prompt of one token, padded with drafts, has no window before it.
    if (row.start == 0)
      std::fill_n(conv, kept, 0);
    else
      std::copy(conv + from, conv + from + kept, conv);
    for (std::int64_t i = row.start; i < row.end; ++i)
      conv[kept + i - row.start] = fingerprint_at(i);
  }
  for (const BlockStates::Store& one : states.stores) {
    state.digest =
        extend_digest(state.digest, row.tokens[static_cast<std::uint32_t>(one.size - 1)]);
    ++state.size;
    if (one.block == kNullBlock) continue;
    write(one.block, states.group);
    recurrent_[one.block] = state;
  }
}

/// Stores the state after `store.size` tokens, of a row that began with `begun`.
void LabelBlocks::store(const BlockRow& row, std::uint32_t group, const BlockStates::Store& store,
                        const Label& begun) {
  if (store.block == kNullBlock) return;
  write(store.block, group);
  Label& stored = recurrent_[store.block];
  stored = begun;
  stored.digest = extend_digest(begun.digest, row.tokens, static_cast<std::uint32_t>(row.start),
                                static_cast<std::uint32_t>(store.size));
  stored.size += static_cast<std::uint32_t>(store.size - row.start);
  store_conv(store.block, store.size);
}

/// The window after `size` tokens.
void LabelBlocks::store_conv(BlockId block, std::int64_t size) {
  std::uint64_t* const conv = conv_of(block);
  for (std::int64_t i = 0; i < kConvWidth - 1; ++i)
    conv[i] = fingerprint_at(size - (kConvWidth - 1) + i);
}

void LabelBlocks::move(const BlockMove& move) {
  const Label state = recurrent_of(move.recurrent, move.group);
  const std::uint64_t* const source = conv_of(move.conv);
  rows_.assign(source + move.bias, source + conv_size_);
  if (group_[move.conv] != move.group) std::ranges::fill(rows_, 0);
  write(move.target, move.group);
  recurrent_[move.target] = state;
  std::ranges::copy(rows_, conv_of(move.target));
}

// --- What blocks with keys hold ------------------------------------------------------------------

void LabelBlocks::check_all() {
  for (BlockId block = 1; block <= pool_.block_count(); ++block) check_block(block);
}

void LabelBlocks::check(BlockId block) {
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

void LabelBlocks::check_block(BlockId block) {
  if (!pool_.has_key(block)) return;
  for (const BlockPool::Entry& entry : pool_.entries_of(block)) check_entry(entry);
}

void LabelBlocks::check_entry(const BlockPool::Entry& entry) {
  require(entry.key < of_key_.size() && of_key_[entry.key].size() == entry.tokens,
          "a key stands for the tokens that it was made of");
  check_held(entry, of_key_[entry.key]);
}

void LabelBlocks::check_chunk(BlockId block, std::uint32_t group, KeyId key, std::int64_t tokens) {
  BlockPool::Entry entry{};
  entry.key = key;
  entry.group = group;
  entry.block = block;
  entry.tokens = static_cast<std::uint32_t>(tokens);
  check_held(entry, of_key_[key].prefix(entry.tokens));
}

void LabelBlocks::check_content(const BlockContent& content, std::uint32_t group, KeyId key,
                                std::int64_t tokens) {
  const auto scratch = static_cast<BlockId>(rules_.all_blocks() - 1);
  await(scratch, group);
  arrive(scratch, &content);
  check_chunk(scratch, group, key, tokens);
}

/// Compares what the block holds with the prefix, which has the entry's tokens.
void LabelBlocks::check_held(const BlockPool::Entry& entry, const Tokens& prefix) {
  const GroupSpec& spec = rules_.groups[entry.group];
  const std::int64_t tokens = entry.tokens;
  const auto report_block = [&](const std::string& what, const std::string& actual) {
    std::string text = fmt::format("block {} of group {} is keyed for {}, and its {}", entry.block,
                                   entry.group, counted(tokens, "token"), what);
    if (numbers_ != nullptr)
      text.append(kNumbersSay).append(numbers_->said_of(entry.block, entry.group, prefix));
    report(text, label_of(prefix, entry.tokens).text(), actual);
  };
  const auto fingerprint = [&](std::int64_t i) {
    return i < 0 ? 0 : prefix.fingerprint(static_cast<std::uint32_t>(i + 1));
  };
  if (is_state(spec.kind)) {
    const Label state = recurrent_of(entry.block, entry.group);
    if (state != label_of(prefix, entry.tokens))
      report_block("recurrent state stands for " + state.text(), state.text());
    for (std::int64_t i = 0; i < kConvWidth - 1; ++i)
      if (conv_of(entry.block)[i] != fingerprint(tokens - (kConvWidth - 1) + i))
        return report_block("conv window is of other tokens", "other tokens");
    return;
  }
  const std::int64_t first = floor_to(tokens - 1, spec.block);
  prefixes_.resize(static_cast<std::size_t>(tokens - first));
  prefix.prefix_fingerprints(static_cast<std::uint32_t>(first), entry.tokens, prefixes_);
  const std::int64_t right = right_kv(entry.block, entry.group, 0);
  if (first + right < tokens)
    report_block(fmt::format("KV of token {} is another one's", first + right), "another token's");
}

}  // namespace lockstep::cache_sim
