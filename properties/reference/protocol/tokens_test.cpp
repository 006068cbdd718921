// Token sequences against plain vectors: however a sequence came to be (terms, slices, pieces put
// together, values), it has the same tokens, the same text and the same digest.
#include "reference/protocol/tokens.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reference/base/require.hpp"

namespace lockstep {
namespace {

Tokens parsed(const std::string& text) {
  const Result<Tokens> tokens = parse_tokens(text);
  require(tokens.has_value(), "a test's terms are well formed");
  return *tokens;
}

std::uint64_t folded(const std::vector<Token>& values) {
  std::uint64_t digest = 0;
  for (const Token token : values) digest = extend_digest(digest, token);
  return digest;
}

/// A sequence, and the same one as plain values.
struct Pair {
  Tokens tokens;
  std::vector<Token> values;
};

/// Put together of terms of few documents and few ids, so that pieces often continue each other and
/// sequences often agree for a while. Then cut, so that storage begins before the view does.
Pair random_pair() {
  Pair pair;
  for (int pieces = *rc::gen::inRange(0, 7); pieces > 0; --pieces) {
    const auto document = static_cast<Document>(*rc::gen::inRange(0, 3));
    const auto first = static_cast<std::uint32_t>(*rc::gen::inRange(0, 9));
    const auto size = static_cast<std::uint32_t>(*rc::gen::element(0, 1, 2, 3, 4, 5, 7, 63, 65));
    Tokens piece;
    if (document == 0) {
      std::vector<std::uint32_t> ids;
      for (std::uint32_t i = 0; i < size; ++i)
        ids.push_back(*rc::gen::element(0u, 1u, 2u, 4294967295u));
      piece = Tokens::of_ids(ids);
      for (const std::uint32_t id : ids) pair.values.push_back(id);
    } else {
      piece = Tokens::of_document(document, first, size);
      for (std::uint32_t i = 0; i < size; ++i) pair.values.push_back(token_of(document, first + i));
    }
    pair.tokens = pair.tokens.followed_by(piece);
  }
  const auto last = *rc::gen::inRange<std::size_t>(0, pair.values.size() + 1);
  const auto first = *rc::gen::inRange<std::size_t>(0, last + 1);
  pair.tokens =
      pair.tokens.slice(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(last));
  pair.values = {pair.values.begin() + static_cast<std::ptrdiff_t>(first),
                 pair.values.begin() + static_cast<std::ptrdiff_t>(last)};
  return pair;
}

RC_GTEST_PROP(Tokens, areTheVectorTheyStandFor, ()) {
  const Pair pair = random_pair();
  RC_ASSERT(pair.tokens.size() == pair.values.size());
  RC_ASSERT(pair.tokens.empty() == pair.values.empty());
  RC_ASSERT(pair.tokens.values() == pair.values);
  for (std::uint32_t i = 0; i < pair.values.size(); ++i)
    RC_ASSERT(pair.tokens[i] == pair.values[i]);
}

// A trace that was printed is the trace that was run.
RC_GTEST_PROP(Tokens, printedTokensParseToTheSame, ()) {
  const Pair pair = random_pair();
  RC_PRE(!pair.values.empty());
  const Result<Tokens> again = parse_tokens(pair.tokens.text());
  RC_ASSERT(again.has_value());
  RC_ASSERT(*again == pair.tokens);
  RC_ASSERT(again->text() == pair.tokens.text());
}

// Equal sequences are printed equally, so that texts can be compared.
RC_GTEST_PROP(Tokens, textAndDigestDoNotDependOnHowTheSequenceWasBuilt, ()) {
  const Pair pair = random_pair();
  const Tokens flat = Tokens::of_values(pair.values);
  RC_ASSERT(flat == pair.tokens);
  RC_ASSERT(flat.text() == pair.tokens.text());
  RC_ASSERT(flat.digest() == pair.tokens.digest());
  RC_ASSERT(pair.tokens.digest() == folded(pair.values));
}

RC_GTEST_PROP(Tokens, sequencesPutTogetherAreVectorsPutTogether, ()) {
  const Pair a = random_pair(), b = random_pair(), c = random_pair();
  std::vector<Token> all = a.values;
  all.insert(all.end(), b.values.begin(), b.values.end());
  RC_ASSERT(a.tokens.followed_by(b.tokens).values() == all);
  all.insert(all.end(), c.values.begin(), c.values.end());
  RC_ASSERT(Tokens::concatenated({a.tokens, b.tokens, c.tokens}).values() == all);
  RC_ASSERT(a.tokens.values() == a.values);  // nothing that exists changes
}

// A cut sequence put together again is itself, and the way a prefix grows in a request shares its
// storage: both must not depend on where the cut is.
RC_GTEST_PROP(Tokens, aCutThatIsUndoneChangesNothing, ()) {
  const Pair pair = random_pair();
  const auto at = *rc::gen::inRange<std::uint32_t>(0, pair.tokens.size() + 1);
  const Tokens head = pair.tokens.prefix(at), tail = pair.tokens.slice(at, pair.tokens.size());
  const Tokens again = head.followed_by(tail);
  RC_ASSERT(again == pair.tokens);
  RC_ASSERT(again.text() == pair.tokens.text());
  RC_ASSERT(extend_digest(head.digest(), tail, 0, tail.size()) == pair.tokens.digest());
  RC_ASSERT(extend_digest(head.digest(), pair.tokens, at, pair.tokens.size()) ==
            pair.tokens.digest());
}

RC_GTEST_PROP(Tokens, commonCountsWhatAPlainLoopCounts, ()) {
  const Pair a = random_pair();
  Pair b = random_pair();
  if (*rc::gen::inRange(0, 2) == 0) {  // two sequences that share more than a few tokens
    b.tokens = a.tokens.followed_by(b.tokens);
    b.values.insert(b.values.begin(), a.values.begin(), a.values.end());
  }
  const auto at = *rc::gen::inRange<std::uint32_t>(0, a.tokens.size() + 1);
  const auto other_at = *rc::gen::inRange<std::uint32_t>(0, b.tokens.size() + 1);
  const std::uint32_t most = std::min(a.tokens.size() - at, b.tokens.size() - other_at);
  const auto limit = *rc::gen::inRange<std::uint32_t>(0, most + 1);
  std::uint32_t same = 0;
  while (same < limit && a.values[at + same] == b.values[other_at + same]) ++same;
  RC_ASSERT(a.tokens.common(at, b.tokens, other_at, limit) == same);
}

RC_GTEST_PROP(Tokens, equalityIsThatOfValues, ()) {
  const Pair a = random_pair(), b = random_pair();
  RC_ASSERT((a.tokens == b.tokens) == (a.values == b.values));
}

RC_GTEST_PROP(TokenDigest, eachPrefixHasItsOwn, ()) {
  const Pair pair = random_pair();
  const auto last = *rc::gen::inRange<std::uint32_t>(0, pair.tokens.size() + 1);
  const auto first = *rc::gen::inRange<std::uint32_t>(0, last + 1);
  std::vector<std::uint64_t> prints(last - first + 1, 77);
  pair.tokens.prefix_fingerprints(first, last, prints);
  for (std::uint32_t i = first; i < last; ++i) {
    const auto end = pair.values.begin() + static_cast<std::ptrdiff_t>(i + 1);
    RC_ASSERT(prints[i - first] == pair.tokens.fingerprint(i + 1));
    RC_ASSERT(prints[i - first] ==
              Tokens::of_values({pair.values.begin(), end}).fingerprint(i + 1));
    std::vector<Token> other(pair.values.begin(), end);
    other[*rc::gen::inRange<std::size_t>(0, other.size())] ^= 1;
    RC_ASSERT(prints[i - first] != Tokens::of_values(other).fingerprint(i + 1));
  }
  RC_ASSERT(prints.back() == 77u);  // nothing after the last one is written
}

// H(xy) = H(x) r^|y| + H(y): what makes it possible to extend a label.
RC_GTEST_PROP(TokenDigest, isExtendedByAPieceAsByItsTokens, ()) {
  const Pair x = random_pair(), y = random_pair();
  const auto end = *rc::gen::inRange<std::uint32_t>(0, y.tokens.size() + 1);
  const auto begin = *rc::gen::inRange<std::uint32_t>(0, end + 1);
  std::uint64_t one_by_one = x.tokens.digest();
  for (std::uint32_t i = begin; i < end; ++i) one_by_one = extend_digest(one_by_one, y.values[i]);
  RC_ASSERT(extend_digest(x.tokens.digest(), y.tokens, begin, end) == one_by_one);
}

// Longer documents than anyone would fold by hand use the closed form.
TEST(TokenDigest, closedFormOfADocumentIsItsTokensOneByOne) {
  for (const std::uint32_t size : {1u, 2u, 63u, 64u, 65u, 4095u, 4097u, 70'001u})
    for (const std::uint32_t first : {0u, 1u, 4'294'000'000u}) {
      const Tokens tokens = Tokens::of_document(0xFFFF'FFFF, first, size);
      std::uint64_t digest = 0;
      for (std::uint32_t i = 0; i < size; ++i)
        digest = extend_digest(digest, token_of(0xFFFF'FFFF, first + i));
      EXPECT_EQ(tokens.digest(), digest) << first << " " << size;
    }
}

TEST(TokenDigest, differsWhereOneTokenDoes) {
  std::set<std::uint64_t> digests;
  std::size_t count = 0;
  for (const std::string text :
       {"[0]", "[0,0]", "[0,0,0]", "[1]", "a1", "a2", "a3", "b1", "a1:2", "a1+b1", "b1+a1", "a1+a1",
        "[1,0]", "[0,1]", "aa1", "a1000", "a999+a998:999", "a999+[999]"}) {
    digests.insert(parsed(text).digest());
    ++count;
  }
  EXPECT_EQ(digests.size(), count);
  EXPECT_EQ(Tokens().digest(), 0u);
}

TEST(Tokens, tokensOfAnyTwoDocumentsHaveDigestsOfTheirOwn) {
  // Every power of two among the documents, since a token is wider than the field of its digest.
  std::set<std::uint64_t> digests;
  std::size_t count = 0;
  const auto add = [&](Document document) {
    for (std::uint32_t index = 0; index < 64; ++index, ++count)
      digests.insert(extend_digest(0, token_of(document, index)));
  };
  add(0);
  for (std::uint32_t bit = 0; bit < 32; ++bit)
    for (Document above = 0; above < std::min(8u, 1u << bit); ++above) add((1u << bit) + above);
  EXPECT_EQ(digests.size(), count);
}

// --- The grammar's terms -------------------------------------------------------------------------

TEST(TokenTerms, areReadAsTheContractSays) {
  EXPECT_EQ(parsed("a3").values(),
            (std::vector<Token>{token_of(1, 0), token_of(1, 1), token_of(1, 2)}));
  EXPECT_EQ(parsed("a64:66").values(), (std::vector<Token>{token_of(1, 64), token_of(1, 65)}));
  EXPECT_EQ(parsed("[7,7,9]").values(), (std::vector<Token>{7, 7, 9}));
  EXPECT_EQ(parsed("z1+aa1+[0]").values(),
            (std::vector<Token>{token_of(26, 0), token_of(27, 0), 0}));
  EXPECT_EQ(parsed("a5:5+b1").values(), (std::vector<Token>{token_of(2, 0)}));
  EXPECT_EQ(parsed("a0").size(), 0u);
  EXPECT_EQ(parsed("[]").size(), 0u);
  EXPECT_EQ(parsed("a4294967290:4294967295").size(), 5u);
}

// A document's tokens are 2^32 and more, explicit ones below, and documents differ at once.
TEST(TokenTerms, documentsAndIdsNeverMeet) {
  EXPECT_GE(parsed("a1")[0], Token{1} << 32);
  EXPECT_LT(parsed("[4294967295]")[0], Token{1} << 32);
  EXPECT_EQ(parsed("a5").common(0, parsed("b5"), 0, 5), 0u);
}

TEST(TokenTerms, onePieceIsPrintedAsOne) {
  const std::vector<std::pair<std::string, std::string>> texts = {
      {"a3+a3:5", "a5"},          {"[1]+[2,3]", "[1,2,3]"}, {"a0+b2", "b2"},
      {"a00012", "a12"},          {"a2+a2", "a2+a2"},       {"a2:4+a4:9+[1]", "a2:9+[1]"},
      {"[]+a1+[]+a1:2+[]", "a2"}, {"[01]", "[1]"},
  };
  for (const auto& [text, canonical] : texts) EXPECT_EQ(parsed(text).text(), canonical) << text;
}

TEST(TokenTerms, longTextIsCutInTheMiddleAndSaysHowLongItIs) {
  const Tokens tokens = parsed("[1000000,1000001,1000002,1000003,1000004]+a5");
  EXPECT_EQ(tokens.text(0), "[1000000,1000001,1000002,1000003,1000004]+a5");
  const std::string cut = tokens.text(20);
  EXPECT_EQ(cut.find("[1000000"), 0u) << cut;
  EXPECT_NE(cut.find("+a5 (10 tokens)"), std::string::npos) << cut;
  EXPECT_EQ(tokens.text(100), tokens.text());
  for (const std::size_t limit : {1, 2, 3, 4, 5}) EXPECT_EQ(tokens.text(limit), "… (10 tokens)");
}

TEST(TokenTerms, malformedTermsAreNamed) {
  for (const std::string text :
       {"",       "+",     "a",     "8",       "a8+",   "+a8",  "a8++b8",  "A8",
        "a-8",    "a8:",   "a:8",   "a8:9:10", "a8 ",   " a8",  "a8.5",    "a8b",
        "[",      "]",     "[1",    "1]",      "[1,]",  "[,1]", "[1,,2]",  "[1 2]",
        "[a]",    "[-1]",  "[1]2",  "[1][2]",  "[+1]",  "a+8",  "a9:8",    "ä8",
        "[0x10]", "a0x10", "[1;2]", "a8,b8",   "a1e3",  "[1,2", "a8+[1,2", "[1]+",
        "[[1]]",  "a8:b9", "a_b8",  "[1]a8",   "a8[1]", "a8+8", "a 8",     "\xff"})
    EXPECT_FALSE(parse_tokens(text).has_value()) << text;
  for (const std::string text : {"a4294967296", "[4294967296]", "a1:4294967296",
                                 "a99999999999999999999", "[18446744073709551616]"})
    EXPECT_FALSE(parse_tokens(text).has_value()) << text;
  EXPECT_NE(parse_tokens("a3+b9:8").error().text.find("`b9:8`"), std::string::npos);
  const std::string long_term(5000, 'x');
  EXPECT_LT(parse_tokens("[" + long_term).error().text.size(), 200u);
}

TEST(TokenTerms, aSequenceHasAtMostTwoToThe24Tokens) {
  EXPECT_EQ(parsed("a16777216").size(), Tokens::kMaxSize);
  EXPECT_EQ(parsed("a16777215+[1]").size(), Tokens::kMaxSize);
  EXPECT_EQ(parsed("a4000000000:4016777216").size(), Tokens::kMaxSize);
  EXPECT_FALSE(parse_tokens("a16777217"));
  EXPECT_FALSE(parse_tokens("a16777216+[1]"));
  EXPECT_FALSE(parse_tokens("a16777216+b16777216"));
  EXPECT_FALSE(parse_tokens("a1:16777218"));
  EXPECT_THROW(parsed("a16777216").followed_by(parsed("b1")), ContractViolation);
}

TEST(TokenTerms, namesAreNumbersAndBack) {
  for (Document document = 1; document <= 26 + 26 * 26 + 26 * 26 * 26 + 5; ++document) {
    const std::string name = document_name(document);
    ASSERT_EQ(document_from_name(name).value(), document) << name;
  }
  // Blocks of workloads, outputs that no file names, wrong drafts: a child repeats such names.
  for (const unsigned bit : {28, 29, 30, 31})
    for (const Document document : {(Document{1} << bit) - 1, (Document{1} << (bit - 1)) + 2})
      EXPECT_EQ(document_from_name(document_name(document)).value(), document) << document;
  for (const std::string name : {"a", "z", "aa", "az", "ba", "zz", "aaa", "zzzzzz", "aaaaaa"})
    EXPECT_EQ(document_name(document_from_name(name).value()), name);
  EXPECT_EQ(document_from_name("zzzzzz").value(), 321'272'406u);
}

// Names of larger numbers fall into the upper half; the text keeps its meaning.
TEST(TokenTerms, longNamesAreDocumentsToo) {
  std::set<Document> documents;
  for (const std::string name :
       {"zzzzzzz", "document", "conversation", "zzzzzzzzzzzzzzzzzzzzzzzz"}) {
    const Result<Document> document = document_from_name(name);
    ASSERT_TRUE(document) << name;
    EXPECT_GE(*document, Document{1} << 31) << name;
    documents.insert(*document);
    EXPECT_EQ(parsed(parsed(name + "7").text()), parsed(name + "7")) << parsed(name + "7").text();
  }
  EXPECT_EQ(documents.size(), 4u);
  for (const std::string name : {"", "A", "a1", "a-b", "ä"})
    EXPECT_FALSE(document_from_name(name)) << name;
}

TEST(Tokens, placesThatDoNotExistAreRefused) {
  const Tokens tokens = parsed("a3+[1,2]");
  EXPECT_THROW(tokens.slice(2, 6), ContractViolation);
  EXPECT_THROW(tokens.slice(3, 2), ContractViolation);
  EXPECT_THROW((void)tokens.digest(6), ContractViolation);
  EXPECT_THROW((void)extend_digest(0, tokens, 4, 6), ContractViolation);
}

}  // namespace
}  // namespace lockstep
