// Token sequences. A token is 64 bits: (document << 32) | index, where document 0 holds the
// explicit token ids of real prompts and every other document is a named, endless text `a`, `b`, …
// whose tokens all differ from each other.
//
// A sequence is stored as runs (a slice of a document, or an array of explicit ids), so that
// `a1000` costs what `a1` costs, and shared: copies and slices are views of one storage, and the
// tree, the request and the trace hold the same bytes.
//
// The digest of a prefix is a polynomial hash over the prime p = 2^61 - 1,
//
//   H(t_0 … t_{n-1}) = sum_i e(t_i) r^(n-1-i)  mod p,   e(document << 32 | i) = c document + i + 1
//
// (Carter and Wegman 1979; two sequences of at most n tokens collide with probability n / p for a
// random r). Documents lie far apart by c, since a token is wider than p. H(xy) = H(x) r^|y| + H(y)
// extends a label by a *piece* of a sequence without reading the tokens again, and a slice of a
// document has a closed form. With the length it is what "the exact token prefix" means in a label.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep {

using Token = std::uint64_t;
using Document = std::uint32_t;  ///< 0: explicit ids

constexpr Token token_of(Document document, std::uint32_t index) {
  return Token{document} << 32 | index;
}

/// Bijective base 26: a = 1, …, z = 26, aa = 27, so that every name that is printed is read back;
/// names of numbers from 2^31 on are hashed into the upper half.
Result<Document> document_from_name(std::string_view letters);
std::string document_name(Document document);

struct TokenRun {
  std::uint32_t begin;  ///< position in the sequence
  Document document;    ///< 0: `first` is an index into the array of explicit ids
  std::uint32_t first;  ///< the document's token index at `begin`
};

/// `size` tokens of a document from index `first` on; a term of the grammar.
struct DocumentSlice {
  Document document;
  std::uint32_t first;
  std::uint32_t size;
};

struct TokenStorage;

/// A view of a shared, immutable sequence.
class Tokens {
 public:
  static constexpr std::uint32_t kMaxSize = 1u << 24;

  Tokens() = default;
  static Tokens of_document(Document document, std::uint32_t first, std::uint32_t size);
  /// The slices one after the other, at most kMaxSize tokens; no document is 0.
  static Tokens of_slices(std::span<const DocumentSlice> slices);
  static Tokens of_ids(std::vector<std::uint32_t> ids);
  static Tokens of_values(const std::vector<Token>& values);

  std::uint32_t size() const { return end_ - begin_; }
  bool empty() const { return begin_ == end_; }
  Token operator[](std::uint32_t index) const {
    return flat_ != nullptr ? Token{flat_[index]} : token_at(begin_ + index);
  }

  /// Tokens first … last - 1 of this sequence, sharing its storage.
  Tokens slice(std::uint32_t first, std::uint32_t last) const;
  Tokens prefix(std::uint32_t size) const { return slice(0, size); }

  /// This sequence followed by another; no copy where `tail` is what follows in the same storage.
  Tokens followed_by(const Tokens& tail) const;
  /// *this = followed_by(tail).
  void append(const Tokens& tail) {
    if (!empty() && storage_ == tail.storage_ && end_ == tail.begin_)
      end_ = tail.end_;
    else if (!tail.empty())
      *this = followed_by(tail);
  }
  static Tokens concatenated(const std::vector<Tokens>& pieces);

  /// The number of equal tokens from `at` here and `other_at` there on, at most `limit`. Both
  /// ranges must exist.
  std::uint32_t common(std::uint32_t at, const Tokens& other, std::uint32_t other_at,
                       std::uint32_t limit) const;
  bool operator==(const Tokens& other) const {
    return size() == other.size() && common(0, other, 0, size()) == size();
  }

  /// The number of explicit ids that all calls of common() have compared so far (on one thread),
  /// for benchmarks.
  static std::uint64_t compared();

  /// Digest of tokens 0 … size - 1.
  std::uint64_t digest(std::uint32_t size) const;
  std::uint64_t digest() const { return digest(size()); }
  /// A fingerprint of each prefix that ends with a token first … last - 1, into out[0] …: equal
  /// exactly where the prefixes are, like a digest, and several times cheaper where every length is
  /// asked for. The digest of the whole blocks of 64 tokens before a token, plus a multilinear hash
  /// of its block up to it (Lemire and Kaser 2014, "Strongly universal string hashing is fast").
  void prefix_fingerprints(std::uint32_t first, std::uint32_t last,
                           std::span<std::uint64_t> out) const;
  /// The fingerprint of the prefix of `size` tokens, size >= 1.
  std::uint64_t fingerprint(std::uint32_t size) const;

  /// The grammar's terms: `a1000+b8:16+[7,7,9]`; longer than `limit` characters is cut in the
  /// middle. 0: no limit.
  std::string text(std::size_t limit = 0) const;
  std::vector<Token> values() const;

 private:
  Tokens(std::shared_ptr<const TokenStorage> storage, std::uint32_t begin, std::uint32_t end);
  Token token_at(std::uint32_t position) const;
  std::uint32_t common_runs(std::uint32_t at, const Tokens& other, std::uint32_t other_at,
                            std::uint32_t limit) const;

  std::shared_ptr<const TokenStorage> storage_;
  const std::uint32_t* flat_ =
      nullptr;  // this view's ids, where all of the storage is one array of them
  std::uint32_t begin_ = 0;
  std::uint32_t end_ = 0;
};

/// Parses the grammar's terms (cache_sim/trace/grammar.md, "Tokens"). Errors name the term, not
/// file and line: the caller adds those.
Result<Tokens> parse_tokens(std::string_view text);

/// Extends a label: the digest of xy from that of x, where y = sequence[begin, end).
std::uint64_t extend_digest(std::uint64_t digest, const Tokens& sequence, std::uint32_t begin,
                            std::uint32_t end);

/// Extends a digest by one token. Every other digest function is defined as a loop over this one.
std::uint64_t extend_digest(std::uint64_t digest, Token token);

}  // namespace lockstep
