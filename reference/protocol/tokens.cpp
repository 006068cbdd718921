#include "reference/protocol/tokens.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "reference/base/mix.hpp"
#include "reference/base/require.hpp"

namespace lockstep {
namespace {

// Arithmetic modulo the Mersenne prime p = 2^61 - 1.
constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;
constexpr std::uint64_t kRadix =
    mix64(0x10C4'57E9) & kPrime;  // any fixed element that no trace aims at
__extension__ using Wide = unsigned __int128;

constexpr std::uint64_t reduce(std::uint64_t x) {
  x = (x & kPrime) + (x >> 61);
  return x >= kPrime ? x - kPrime : x;
}
constexpr std::uint64_t plus(std::uint64_t a, std::uint64_t b) {
  return reduce(a + b);
}
constexpr std::uint64_t minus(std::uint64_t a, std::uint64_t b) {
  return reduce(a + kPrime - b);
}
constexpr std::uint64_t times(std::uint64_t a, std::uint64_t b) {
  const Wide product = Wide{a} * b;
  return reduce((static_cast<std::uint64_t>(product) & kPrime) +
                static_cast<std::uint64_t>(product >> 61));
}

constexpr int kLevels = 25;  // 2^24 tokens and their sum of powers

/// r^(2^k); the sum of r^i over i < 2^k; and the same sum weighted so that slices of documents have
/// a closed form.
struct Powers {
  std::array<std::uint64_t, kLevels> power{};  // r^(2^k)
  std::array<std::uint64_t, kLevels> sum{};    // S(2^k)  = sum_{i<n} r^(n-1-i)
  std::array<std::uint64_t, kLevels> ramp{};   // R(2^k)  = sum_{i<n} i r^(n-1-i)
  constexpr Powers() {
    power[0] = kRadix;
    sum[0] = 1;
    ramp[0] = 0;
    for (int k = 1; k < kLevels; ++k) {
      const std::uint64_t half = std::uint64_t{1} << (k - 1);
      power[k] = times(power[k - 1], power[k - 1]);
      sum[k] = plus(times(sum[k - 1], power[k - 1]), sum[k - 1]);
      ramp[k] = plus(times(ramp[k - 1], power[k - 1]), plus(ramp[k - 1], times(half, sum[k - 1])));
    }
  }
};
constexpr Powers kPowers;

std::uint64_t radix_to_the(std::uint32_t n) {
  std::uint64_t result = 1;
  for (int k = 0; n != 0; ++k, n >>= 1)
    if (n & 1) result = times(result, kPowers.power[k]);
  return result;
}

/// A token as an element of the field. A token has 64 bits and an element 61, so documents are
/// spread over the field: as a number, the first token of document 2^30 would be explicit id 2.
constexpr std::uint64_t element(Token token) {
  constexpr std::uint64_t spread = mix64(0xD0C5) & kPrime;
  return plus(times(token >> 32, spread), (token & 0xFFFF'FFFF) + 1);
}

/// H extended by a document's tokens from `first` on: binary doubling over n, from the largest
/// power down.
std::uint64_t extend_by_ramp(std::uint64_t digest, Token first, std::uint32_t n) {
  std::uint64_t next = element(first);
  for (int k = kLevels - 1; k >= 0; --k) {
    const std::uint32_t length = std::uint32_t{1} << k;
    if (!(n & length)) continue;
    const std::uint64_t piece = plus(times(next, kPowers.sum[k]), kPowers.ramp[k]);
    digest = plus(times(digest, kPowers.power[k]), piece);
    next = plus(next, length);
  }
  return digest;
}

/// H extended by an array of ids: four a step, because a step's latency is that of one
/// multiplication either way.
std::uint64_t extend_by_ids(std::uint64_t digest, const std::uint32_t* ids, std::uint32_t n) {
  constexpr std::uint64_t r1 = kRadix;
  constexpr std::uint64_t r2 = times(r1, r1);
  constexpr std::uint64_t r3 = times(r2, r1);
  constexpr std::uint64_t r4 = times(r2, r2);
  std::uint32_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const Wide sum = Wide{ids[i] + std::uint64_t{1}} * r3 +
                     Wide{ids[i + 1] + std::uint64_t{1}} * r2 +
                     Wide{ids[i + 2] + std::uint64_t{1}} * r1 + (ids[i + 3] + std::uint64_t{1}) +
                     Wide{digest} * r4;
    // sum < 2^61 * 2^61 + 3 * 2^32 * 2^61 + 2^33 < 2^123, so both parts and their sum fit 64 bits.
    digest =
        reduce((static_cast<std::uint64_t>(sum) & kPrime) + static_cast<std::uint64_t>(sum >> 61));
  }
  for (; i < n; ++i) digest = plus(times(digest, r1), ids[i] + std::uint64_t{1});
  return digest;
}

}  // namespace

/// Runs by position and the explicit ids that they point into. Immutable but for the memo of prefix
/// digests, which belongs to the thread that owns the trace.
struct TokenStorage {
  static constexpr std::uint32_t kMemoStride = 64;

  std::vector<TokenRun> runs;
  std::vector<std::uint32_t> ids;
  std::uint32_t size = 0;
  mutable std::vector<std::uint64_t> memo;  // digest of the first (i + 1) * kMemoStride tokens
  struct Recent {
    std::uint32_t size = 0;
    std::uint64_t digest = 0;
  };
  mutable std::array<Recent, 8> recent{};  // a run asks for the same few lengths again and again

  std::size_t run_at(std::uint32_t position) const {
    if (runs.size() == 1) return 0;
    const auto after = std::ranges::upper_bound(runs, position, {}, &TokenRun::begin);
    return static_cast<std::size_t>(after - runs.begin()) - 1;
  }
  std::uint32_t run_end(std::size_t run) const {
    return run + 1 < runs.size() ? runs[run + 1].begin : size;
  }

  std::uint64_t extend(std::uint64_t digest, std::uint32_t begin, std::uint32_t end) const {
    for (std::size_t r = begin < end ? run_at(begin) : 0; begin < end; ++r) {
      const TokenRun& run = runs[r];
      const std::uint32_t stop = std::min(end, run_end(r));
      const std::uint32_t first = run.first + (begin - run.begin);
      digest = run.document == 0
                   ? extend_by_ids(digest, ids.data() + first, stop - begin)
                   : extend_by_ramp(digest, token_of(run.document, first), stop - begin);
      begin = stop;
    }
    return digest;
  }

  std::uint64_t prefix_digest(std::uint32_t n) const {
    Recent& known = recent[n % recent.size()];
    if (known.size != n) known = {n, find_prefix_digest(n)};
    return known.digest;
  }

  std::uint64_t find_prefix_digest(std::uint32_t n) const {
    const std::uint32_t whole = n / kMemoStride;
    while (memo.size() < whole) {
      const auto at = static_cast<std::uint32_t>(memo.size()) * kMemoStride;
      memo.push_back(extend(memo.empty() ? 0 : memo.back(), at, at + kMemoStride));
    }
    return extend(whole == 0 ? 0 : memo[whole - 1], whole * kMemoStride, n);
  }

  void append_run(Document document, std::uint32_t first, std::uint32_t length) {
    if (length == 0) return;
    if (!runs.empty()) {
      const TokenRun& last = runs.back();
      if (last.document == document && last.first + (size - last.begin) == first) {
        size += length;
        return;
      }
    }
    runs.push_back({size, document, first});
    size += length;
  }

  void append(const TokenStorage& other, std::uint32_t begin, std::uint32_t end) {
    for (std::size_t r = begin < end ? other.run_at(begin) : 0; begin < end; ++r) {
      const TokenRun& run = other.runs[r];
      const std::uint32_t stop = std::min(end, other.run_end(r));
      std::uint32_t first = run.first + (begin - run.begin);
      if (run.document == 0) {
        const auto from = other.ids.begin() + first;
        first = static_cast<std::uint32_t>(ids.size());
        ids.insert(ids.end(), from, from + (stop - begin));
      }
      append_run(run.document, first, stop - begin);
      begin = stop;
    }
  }
};

namespace {

constexpr Document kHashedNames = Document{1} << 31;

/// Names whose number does not fit below kHashedNames, by their hash, so that they can be printed
/// and a collision is an error, not a mix-up.
struct LongNames {
  std::mutex mutex;
  std::unordered_map<Document, std::string> text_of;
};
LongNames& long_names() {
  static LongNames names;
  return names;
}

thread_local std::uint64_t compared_ids = 0;

/// The number of equal ids from the start on: compares blocks with memcmp, then the one that
/// differs in smaller pieces.
std::uint32_t common_ids(const std::uint32_t* a, const std::uint32_t* b, std::uint32_t n) {
  constexpr std::uint32_t kBlock = 256;  // 1 KiB, long enough for memcmp to stream
  constexpr std::uint32_t kPiece = 16;   // a cache line
  const auto equal = [&](std::uint32_t at, std::uint32_t size) {
    return std::memcmp(a + at, b + at, size * sizeof *a) == 0;
  };
  std::uint32_t i = 0;
  for (std::uint32_t size; i < n; i += size) {
    size = std::min(kBlock, n - i);
    if (equal(i, size)) continue;
    while (i + kPiece <= n && equal(i, kPiece)) i += kPiece;
    while (a[i] == b[i]) ++i;
    break;
  }
  compared_ids += i;
  return i;
}

}  // namespace

Result<Document> document_from_name(std::string_view letters) {
  if (letters.empty()) return fail("a document's name has at least one lower-case letter");
  std::uint64_t number = 0, hash = 0;
  for (const char c : letters) {
    if (c < 'a' || c > 'z') return fail("a document's name is lower-case letters");
    number = std::min<std::uint64_t>(number * 26 + static_cast<std::uint64_t>(c - 'a' + 1),
                                     kHashedNames);
    hash = mix64(hash ^ static_cast<std::uint64_t>(c));
  }
  if (number < kHashedNames) return static_cast<Document>(number);
  const Document document = kHashedNames | static_cast<Document>(hash >> 33);
  LongNames& names = long_names();
  const std::lock_guard lock(names.mutex);
  const auto [at, fresh] = names.text_of.emplace(document, letters);
  if (!fresh && at->second != letters)
    return fail(
        fmt::format("documents {} and {} have the same number; rename one", at->second, letters));
  return document;
}

std::string document_name(Document document) {
  if (document >= kHashedNames) {
    LongNames& names = long_names();
    const std::lock_guard lock(names.mutex);
    const auto found = names.text_of.find(document);
    if (found != names.text_of.end()) return found->second;
  }
  std::string letters;
  for (; document != 0; document = (document - 1) / 26)
    letters.insert(letters.begin(), static_cast<char>('a' + (document - 1) % 26));
  return letters;
}

Tokens Tokens::of_document(Document document, std::uint32_t first, std::uint32_t size) {
  require(document != 0, "document 0 holds explicit ids");
  auto storage = std::make_shared<TokenStorage>();
  storage->append_run(document, first, size);
  return {std::move(storage), 0, size};
}

Tokens Tokens::of_slices(std::span<const DocumentSlice> slices) {
  auto storage = std::make_shared<TokenStorage>();
  storage->runs.reserve(slices.size());
  for (const DocumentSlice& slice : slices) {
    require(slice.document != 0, "document 0 holds explicit ids");
    require(slice.size <= kMaxSize - storage->size, "a sequence has at most 2^24 tokens");
    storage->append_run(slice.document, slice.first, slice.size);
  }
  const std::uint32_t size = storage->size;
  return {std::move(storage), 0, size};
}

Tokens Tokens::of_ids(std::vector<std::uint32_t> ids) {
  require(ids.size() <= kMaxSize, "a sequence has at most 2^24 tokens");
  auto storage = std::make_shared<TokenStorage>();
  const auto size = static_cast<std::uint32_t>(ids.size());
  storage->ids = std::move(ids);
  storage->append_run(0, 0, size);
  return {std::move(storage), 0, size};
}

Tokens Tokens::of_values(const std::vector<Token>& values) {
  require(values.size() <= kMaxSize, "a sequence has at most 2^24 tokens");
  auto storage = std::make_shared<TokenStorage>();
  for (const Token value : values) {
    const auto document = static_cast<Document>(value >> 32);
    auto first = static_cast<std::uint32_t>(value);
    if (document == 0) {
      storage->ids.push_back(first);
      first = static_cast<std::uint32_t>(storage->ids.size()) - 1;
    }
    storage->append_run(document, first, 1);
  }
  return {std::move(storage), 0, static_cast<std::uint32_t>(values.size())};
}

Tokens::Tokens(std::shared_ptr<const TokenStorage> storage, std::uint32_t begin, std::uint32_t end)
    : storage_(std::move(storage)), begin_(begin), end_(end) {
  if (storage_->runs.size() == 1 && storage_->runs[0].document == 0)
    flat_ = storage_->ids.data() + storage_->runs[0].first + begin_;
}

Token Tokens::token_at(std::uint32_t position) const {
  const TokenRun& run = storage_->runs[storage_->run_at(position)];
  const std::uint32_t first = run.first + (position - run.begin);
  return run.document == 0 ? Token{storage_->ids[first]} : token_of(run.document, first);
}

Tokens Tokens::slice(std::uint32_t first, std::uint32_t last) const {
  require(first <= last && last <= size(), "a slice lies inside its sequence");
  Tokens part = *this;
  part.begin_ += first;
  part.end_ = begin_ + last;
  if (flat_ != nullptr) part.flat_ += first;
  return part;
}

Tokens Tokens::followed_by(const Tokens& tail) const {
  if (tail.empty()) return *this;
  if (empty()) return tail;
  if (storage_ == tail.storage_ && end_ == tail.begin_) {
    Tokens whole = *this;
    whole.end_ = tail.end_;
    return whole;
  }
  return concatenated({*this, tail});
}

Tokens Tokens::concatenated(const std::vector<Tokens>& pieces) {
  if (pieces.size() == 1) return pieces.front();
  auto storage = std::make_shared<TokenStorage>();
  for (const Tokens& piece : pieces) {
    require(std::uint64_t{storage->size} + piece.size() <= kMaxSize,
            "a sequence has at most 2^24 tokens");
    if (!piece.empty()) storage->append(*piece.storage_, piece.begin_, piece.end_);
  }
  const std::uint32_t size = storage->size;
  return {std::move(storage), 0, size};
}

std::uint64_t Tokens::compared() {
  return compared_ids;
}

std::uint32_t Tokens::common(std::uint32_t at, const Tokens& other, std::uint32_t other_at,
                             std::uint32_t limit) const {
  if (flat_ != nullptr && other.flat_ != nullptr)
    return common_ids(flat_ + at, other.flat_ + other_at, limit);
  return limit == 0 ? 0 : common_runs(at, other, other_at, limit);
}

std::uint32_t Tokens::common_runs(std::uint32_t at, const Tokens& other, std::uint32_t other_at,
                                  std::uint32_t limit) const {
  const TokenStorage& a = *storage_;
  const TokenStorage& b = *other.storage_;
  std::uint32_t i = begin_ + at;
  std::uint32_t j = other.begin_ + other_at;
  std::size_t run_a = a.run_at(i);
  std::size_t run_b = b.run_at(j);
  std::uint32_t equal = 0;
  while (equal < limit) {
    const TokenRun& p = a.runs[run_a];
    const TokenRun& q = b.runs[run_b];
    const std::uint32_t end_a = a.run_end(run_a);
    const std::uint32_t end_b = b.run_end(run_b);
    const std::uint32_t piece = std::min({end_a - i, end_b - j, limit - equal});
    if (p.document != q.document) return equal;
    const std::uint32_t from_a = p.first + (i - p.begin);
    const std::uint32_t from_b = q.first + (j - q.begin);
    if (p.document == 0) {
      const std::uint32_t same = common_ids(a.ids.data() + from_a, b.ids.data() + from_b, piece);
      if (same < piece) return equal + same;
    } else if (from_a != from_b) {
      return equal;  // two places of one document differ in every token
    }
    equal += piece;
    i += piece;
    j += piece;
    if (i == end_a) ++run_a;
    if (j == end_b) ++run_b;
  }
  return equal;
}

std::uint64_t Tokens::digest(std::uint32_t size) const {
  require(size <= this->size(), "a prefix is not longer than its sequence");
  if (size == 0) return 0;
  if (begin_ == 0) return storage_->prefix_digest(size);
  return storage_->extend(0, begin_, begin_ + size);
}

std::uint64_t extend_digest(std::uint64_t digest, Token token) {
  return plus(times(digest, kRadix), element(token));
}

namespace {

constexpr std::uint32_t kBlock = TokenStorage::kMemoStride;

/// An odd factor for each place of a block.
constexpr auto kFactors = [] {
  std::array<std::uint64_t, kBlock> factors{};
  for (std::uint32_t i = 0; i < kBlock; ++i) factors[i] = mix64(0x5EED + i) | 1;
  return factors;
}();

}  // namespace

void Tokens::prefix_fingerprints(std::uint32_t first, std::uint32_t last,
                                 std::span<std::uint64_t> out) const {
  require(first <= last && last <= size() && out.size() >= last - first,
          "there is a place for each prefix asked for");
  std::size_t i = 0;
  for (std::uint32_t at = first / kBlock * kBlock; at < last; at += kBlock) {
    std::uint64_t sum = digest(at);
    const std::uint32_t stop = std::min(kBlock, last - at);
    const auto add = [&](std::uint32_t place, Token token) {
      sum += (token + 1) * kFactors[place];
      if (at + place >= first) out[i++] = sum;
    };
    if (flat_ != nullptr)
      for (std::uint32_t place = 0; place < stop; ++place) add(place, flat_[at + place]);
    else
      for (std::uint32_t place = 0; place < stop; ++place)
        add(place, token_at(begin_ + at + place));
  }
}

std::uint64_t Tokens::fingerprint(std::uint32_t size) const {
  require(size >= 1 && size <= this->size(), "a fingerprint is that of a token's prefix");
  std::uint64_t one = 0;
  prefix_fingerprints(size - 1, size, {&one, 1});
  return one;
}

std::uint64_t extend_digest(std::uint64_t digest, const Tokens& sequence, std::uint32_t begin,
                            std::uint32_t end) {
  require(begin <= end && end <= sequence.size(), "a label is extended by tokens that exist");
  const std::uint64_t shift = radix_to_the(end - begin);
  const std::uint64_t piece = minus(sequence.digest(end), times(sequence.digest(begin), shift));
  return plus(times(digest, shift), piece);
}

std::vector<Token> Tokens::values() const {
  std::vector<Token> result(size());
  for (std::uint32_t i = 0; i < size(); ++i) result[i] = (*this)[i];
  return result;
}

std::string Tokens::text(std::size_t limit) const {
  std::string out;
  for (std::uint32_t at = begin_; at < end_;) {
    const std::size_t r = storage_->run_at(at);
    const TokenRun& run = storage_->runs[r];
    const std::uint32_t stop = std::min(end_, storage_->run_end(r));
    const std::uint32_t first = run.first + (at - run.begin);
    const std::uint32_t last = first + (stop - at);
    if (!out.empty()) out += '+';
    if (run.document == 0) {
      out += '[';
      for (std::uint32_t i = first; i < last; ++i) {
        if (i != first) out += ',';
        // Tokens that the cut will remove are not written: each takes at least two characters.
        if (limit != 0 && i - first == limit && last - i > limit)
          i = last - static_cast<std::uint32_t>(limit);
        out += std::to_string(storage_->ids[i]);
      }
      out += ']';
    } else {
      out += document_name(run.document);
      if (first != 0) out += std::to_string(first) + ':';
      out += std::to_string(last);
    }
    at = stop;
  }
  if (limit != 0 && out.size() > limit) {
    const std::size_t keep = limit / 2 - std::min<std::size_t>(limit / 2, 2);
    out = fmt::format("{}…{} ({} tokens)", out.substr(0, keep), out.substr(out.size() - keep),
                      size());
  }
  return out;
}

namespace {

/// Digits at the front of `text`, which is shortened by them.
Result<std::uint32_t> take_number(std::string_view& text, std::string_view term) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range)
    return fail(fmt::format("token term `{}` has a number past 32 bits", term.substr(0, 60)));
  if (error != std::errc{})
    return fail(fmt::format("token term `{}` has no number where one is due", term.substr(0, 60)));
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

Result<Tokens> parse_ids(std::string_view term) {
  std::string_view rest = term.substr(1);
  std::vector<std::uint32_t> ids;
  if (rest != "]") {
    for (;;) {
      const Result<std::uint32_t> id = take_number(rest, term);
      if (!id) return tl::unexpected(id.error());
      ids.push_back(*id);
      if (ids.size() > Tokens::kMaxSize) return fail("a prompt has more than 2^24 tokens");
      if (rest.empty() || (rest[0] != ',' && rest[0] != ']')) break;
      const bool last = rest[0] == ']';
      rest.remove_prefix(1);
      if (last) break;
    }
  } else {
    rest.remove_prefix(1);
  }
  if (!rest.empty() || term.back() != ']')
    return fail(
        fmt::format("token term `{}` is not a list of ids like [7,7,9]", term.substr(0, 60)));
  return Tokens::of_ids(std::move(ids));
}

Result<Tokens> parse_slice(std::string_view term) {
  const std::size_t letters = static_cast<std::size_t>(
      std::ranges::find_if(term, [](char c) { return c < 'a' || c > 'z'; }) - term.begin());
  if (letters == 0)
    return fail(fmt::format("token term `{}` starts with neither a document's name (a-z) nor `[`",
                            term.substr(0, 60)));
  const Result<Document> document = document_from_name(term.substr(0, letters));
  if (!document) return tl::unexpected(document.error());
  std::string_view rest = term.substr(letters);
  Result<std::uint32_t> last = take_number(rest, term);
  if (!last) return tl::unexpected(last.error());
  std::uint32_t first = 0;
  if (!rest.empty() && rest[0] == ':') {
    rest.remove_prefix(1);
    first = *last;
    last = take_number(rest, term);
    if (!last) return tl::unexpected(last.error());
  }
  if (!rest.empty())
    return fail(fmt::format("token term `{}` goes on after its numbers", term.substr(0, 60)));
  if (first > *last)
    return fail(fmt::format("token term `{}` is a reversed slice", term.substr(0, 60)));
  if (*last - first > Tokens::kMaxSize)
    return fail(fmt::format("token term `{}` has more than 2^24 tokens", term.substr(0, 60)));
  return Tokens::of_document(*document, first, *last - first);
}

}  // namespace

Result<Tokens> parse_tokens(std::string_view text) {
  if (text.empty()) return fail("a token sequence has at least one term");
  std::vector<Tokens> pieces;
  std::uint64_t size = 0;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t plus_at = std::min(text.find('+', at), text.size());
    const std::string_view term = text.substr(at, plus_at - at);
    if (term.empty()) return fail("a token term is empty");
    Result<Tokens> piece = term[0] == '[' ? parse_ids(term) : parse_slice(term);
    if (!piece) return piece;
    size += piece->size();
    if (size > Tokens::kMaxSize) return fail("a prompt has more than 2^24 tokens");
    pieces.push_back(std::move(*piece));
    at = plus_at + 1;
  }
  return Tokens::concatenated(pieces);
}

}  // namespace lockstep
