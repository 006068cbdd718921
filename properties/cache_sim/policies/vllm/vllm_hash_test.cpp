// Block hashes are vLLM's own, byte by byte. The expected ones were printed by vLLM 0.33's
// vllm/utils/hashing.py under Python 3.11 (xxhash 3.5.0, cbor2 5).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cache_sim/policies/vllm/block_hash.hpp"
#include "cache_sim/policies/vllm/block_keys.hpp"

namespace lockstep::cache_sim {
namespace {

std::string hex(const BlockHash& hash) {
  std::string text;
  for (const char byte : hash) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

std::vector<Token> counted(Token first, std::size_t size) {
  std::vector<Token> tokens(size);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

struct Known {
  const char* algorithm;
  const char* none;
  const char* plain;   // a block of tokens 1 … 16 after NONE_HASH
  const char* sizes;   // after that one: tokens at the ends of each form of an integer, twice
  const char* extra;   // LoRA, two images, a salt, prompt embeddings
  const char* one;     // one token of lookahead
  const char* two;     // two of them, and a salt
  const char* frames;  // 30,000 tokens: pickle needs three frames
  const char* edge;    // 13,100 tokens: the first frame is full to the byte
};

constexpr Known kKnown[] = {
    {"sha256", "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
     "7b255da405e1d722823892e4fef187b4d8ac78215d7f0dd2137bb037547f4caf",
     "e2995049a9c084f11c8bdbbe1b5092757f0e5f76fa25379768bc603509565b03",
     "423f81358651ec9691edb42fc51de7e6a1a8acf3fb5efb870f229d9971a21f03",
     "8a35c24a38f8f50aaf83cba0b53d963fb2675ab887f29db462ea3a065186c708",
     "c615da173c52d5a4ec96fb4975c9baa10f7ddcef85c93f336007523e608c3b5b",
     "1d4771804d1fdc1613970b8f6e62170d29fbe0fbbe1806ff3a581f0528fd2164",
     "688c787ab3df927d424cbc7c0b9508b4f354cc886447604cdaddc80910545fe5"},
    {"sha256_cbor", "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
     "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
     "9eec13d8bed6c9998ff94b42350c89ba663b82efab5a0f550bdf4b8360576f33",
     "3a5e0e03a7fe43e5f4afb27a710dc88772300a4f18d5ca41e48ee55d3b3df8dd",
     "45a8d824e18169fe473a27ae6adceea3d5f3ebd7eb501574e7dba598d2abc4b0",
     "7650dcc356ce916ffec41b0e26586209e4b62cd8a73429ab638e2a3ec92623c1",
     "972767a35bee34598cecbf29950f464fe784e52cf466f8251fef2e1eec5fbb68",
     "d1368bee4abe4da25bef7755b260b3854d15ead0148223c051a03b35ebabfa5e"},
    {"xxhash", "d98f72b9c430d985211489af307f0229", "c3ef62aeb627e1dbb7d10298670cdfde",
     "78f772df64acf3f42a7a4f8654b78718", "85ce4b801c95144f6e74b39f4123b78c",
     "de86f8c2fd8aec9f3a5092e048de0784", "dee6600b1e5b11e7a6b83d6e16051c10",
     "6081cd398c9ad139aae4629cee062533", "41aac79395723bf0f29bec7ce24830da"},
    {"xxhash_cbor", "a4e364baa0791a6f63bbf917db9b700d", "94bdea02d195af01562671ef4f8c323f",
     "d324a2875a0355d00d80603cf0ef4c11", "df6f952f68fcd12cfc68fc7d58909bd1",
     "cdc5d8961aeddcd300b5bebd37dd0efd", "9254619c0725f412f0e5fb822d052dbf",
     "46c3334f0b11ecc53d45ad05fa44db15", "14be967a386c7ba158709618c9404f77"},
};

TEST(VllmHash, isVllmsOwn) {
  const std::vector<Token> four = counted(1, 4);
  std::vector<Token> sizes = {0, 255, 256, 65535, 65536, 2147483647, 2147483648, 151935};
  sizes.insert(sizes.end(), sizes.begin(), sizes.begin() + 8);
  const std::vector<Token> behind = {5, 6};
  BlockExtraKeys salted;
  salted.cache_salt = "tenant";
  BlockExtraKeys all = salted;
  all.lora = {"adapter", "/models/adapter"};
  all.images = {{"image-1", 3}, {"image-2", -5}};
  all.prompt_embeds.emplace();
  for (char byte = 0; byte < 32; ++byte) all.prompt_embeds->push_back(byte);
  for (const Known& known : kKnown) {
    SCOPED_TRACE(known.algorithm);
    const BlockHashAlgorithm algorithm = *block_hash_algorithm_from(known.algorithm);
    const BlockHash none = none_hash(algorithm, kNoneHashSeed);
    const auto hash = [&](const BlockHash& parent, const std::vector<Token>& tokens,
                          const BlockExtraKeys& extra, std::size_t lookahead) {
      return hash_block(algorithm, parent, tokens, extra,
                        std::span<const Token>(behind).first(lookahead));
    };
    EXPECT_EQ(hex(none), known.none);
    const BlockHash plain = hash(none, counted(1, 16), {}, 0);
    EXPECT_EQ(hex(plain), known.plain);
    EXPECT_EQ(hex(hash(plain, sizes, {}, 0)), known.sizes);
    EXPECT_EQ(hex(hash(none, four, all, 0)), known.extra);
    EXPECT_EQ(hex(hash(none, four, {}, 1)), known.one);
    EXPECT_EQ(hex(hash(none, four, salted, 2)), known.two);
    EXPECT_EQ(hex(hash(none, counted(100'000, 30'000), {}, 0)), known.frames);
    EXPECT_EQ(hex(hash(none, counted(100'000, 13'100), {}, 0)), known.edge);
  }
  EXPECT_FALSE(block_hash_algorithm_from("md5"));
}

// Every part of a block's content is in its hash: no two of these are the same.
TEST(VllmHash, coversEverythingThatABlockDependsOn) {
  for (const Known& known : kKnown) {
    const BlockHashAlgorithm algorithm = *block_hash_algorithm_from(known.algorithm);
    const BlockHash none = none_hash(algorithm, kNoneHashSeed);
    std::vector<BlockHash> hashes;
    const auto add = [&](const BlockHash& parent, std::vector<Token> tokens,
                         const BlockExtraKeys& extra, std::vector<Token> lookahead) {
      hashes.push_back(hash_block(algorithm, parent, tokens, extra, lookahead));
    };
    BlockExtraKeys lora, other_lora, image, moved_image, salt;
    lora.lora = {"a", "b"};
    other_lora.lora = {"a", "c"};
    image.images = {{"i", 1}};
    moved_image.images = {{"i", 2}};
    salt.cache_salt = "s";
    add(none, {1, 2}, {}, {});
    add(none_hash(algorithm, "0"), {1, 2}, {}, {});
    add(none, {2, 1}, {}, {});
    add(none, {1, 2}, {}, {3});
    add(none, {1, 2}, {}, {4});
    add(none, {1, 2}, lora, {});
    add(none, {1, 2}, other_lora, {});
    add(none, {1, 2}, image, {});
    add(none, {1, 2}, moved_image, {});
    add(none, {1, 2}, salt, {});
    for (std::size_t i = 0; i < hashes.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) EXPECT_NE(hashes[i], hashes[j]) << i << " and " << j;
  }
}

// The chain over a request's tokens, block by block, and the numbers that stand for its hashes:
// they are those that digests give.
TEST(VllmHash, aChainOfBlocksHasTheNumbersOfItsDigests) {
  const Tokens one = Tokens::of_ids({1, 2, 3, 4, 5, 6, 7, 8, 9});
  const Tokens other = Tokens::of_ids({1, 2, 3, 4, 9, 9, 9, 9, 9, 9});
  for (const Known& known : kKnown)
    for (const std::uint32_t lookahead : {0u, 1u, 2u}) {
      const BlockHashAlgorithm algorithm = *block_hash_algorithm_from(known.algorithm);
      KeyTable hashed(4, lookahead, algorithm);
      KeyTable digested(4, lookahead);
      for (const Name salt : {Name(), Name::intern("tenant")})
        for (const Tokens& tokens : {one, other, one}) {
          std::vector<KeyId> by_hash, by_digest;
          hashed.extend(by_hash, tokens.prefix(5),
                        {.salt = salt});  // what is there already is gone on from
          hashed.extend(by_hash, tokens, {.salt = salt});
          digested.extend(by_digest, tokens, {.salt = salt});
          EXPECT_EQ(by_hash, by_digest);
          ASSERT_EQ(by_hash.size(), (tokens.size() - lookahead) / 4);
          BlockExtraKeys extra;
          if (salt.exists()) extra.cache_salt = salt.text();
          BlockHash parent = none_hash(algorithm, kNoneHashSeed);
          for (std::size_t i = 0; i < by_hash.size(); ++i) {
            const auto all = tokens.values();
            const std::span<const Token> span(all);
            parent =
                hash_block(algorithm, parent, span.subspan(4 * i, 4),
                           i == 0 ? extra : BlockExtraKeys{}, span.subspan(4 * i + 4, lookahead));
            EXPECT_EQ(hashed.hash(by_hash[i]), parent);
          }
        }
    }
}

struct KnownChain {
  const char* algorithm;
  std::uint32_t lookahead;
  std::vector<std::string> hashes;
};

/// An adapter, a salt, and two images that lie in two blocks each.
const ContentKeys kEverything{.salt = Name::intern("tenant"),
                              .lora = Name::intern("sql"),
                              .images = {{2, 3, Name::intern("cat")}, {7, 4, Name::intern("dog")}}};

// Printed by vLLM's Request with LoRARequest("sql", 1, "/sql"), two mm_features and a cache_salt.
TEST(VllmHash, ofBlocksWithExtraKeysAreVllmsOwn) {
  const KnownChain chains[] = {
      {"sha256",
       0u,
       {"56b9b263edf6026891b77d32561dd5440ad3ebe57e1909146ef8fcbe21c19c3c",
        "b6226c728ab4477dedac36f099e31f63b48d584d35a7fa2bb9436a255af5552b",
        "7b2a6a50260f2a262e4b6f83ff67dde1aa6d9a026e42e33a4cc3bec8da28375c"}},
      {"sha256",
       1u,
       {"ef2826158b4dd98456c2f682e8a18d499ec20dab8406a2b1babe3d27f1ba1c6c",
        "e82c2a9029cfc289a3dad521c7819ec25615313eaa26617b6382401eb3f8016b",
        "2c81bfabb2293717cc18d93594b960f2b8ef1d5c72acdfe97b9b5862905ca80e"}},
      {"sha256_cbor",
       0u,
       {"eb868fdab3b3fa44a781955dd0294a34b8c6cf3dba5846ac8a34780ba3c90ced",
        "2fd0dfdbca5f6b7c640cac11baa6550ce746e3a22363039c4f2b8fbf3be05a50",
        "97c9746e68401bb2a0aee343fbba8665e3cc5d5a75d0275289257551d0f99a16"}},
      {"sha256_cbor",
       1u,
       {"3692c2293125d8c7f392c9007e0366258ec9e58f79431b119ec5dfa6b9880a21",
        "06cdd6116fb4cab44724fcd32d37de958266f884c15bd6e4497912f6cf3dea1c",
        "64d09ea8b81c119c765d37bff3c88f5653eada97fbafbe47e744dabeed9d1216"}},
  };
  const Tokens tokens = Tokens::of_ids({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14});
  for (const KnownChain& known : chains) {
    KeyTable table(4, known.lookahead, block_hash_algorithm_from(known.algorithm));
    std::vector<KeyId> keys;
    table.extend(keys, tokens, kEverything);
    ASSERT_EQ(keys.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(hex(table.hash(keys[i])), known.hashes[i]);
  }
}

// A digest takes the place of the chain: contents that differ in anything have other numbers, from
// the block on in which they differ.
TEST(VllmHash, partWhereExtraKeysPart) {
  const Tokens tokens = Tokens::of_ids({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14});
  ContentKeys other_salt = kEverything, other_lora = kEverything, moved = kEverything;
  ContentKeys other_image = kEverything, longer = kEverything;
  other_salt.salt = Name();
  other_lora.lora = Name::intern("chat");
  moved.images[1].begin = 6;
  other_image.images[1].name = Name::intern("cat");
  longer.images[1].size = 1;  // no part of it is in the third block
  for (const auto algorithm :
       {std::optional<BlockHashAlgorithm>(), std::optional(BlockHashAlgorithm::sha256)}) {
    KeyTable table(4, 0, algorithm);
    const auto common = [&](const ContentKeys& other) {
      std::vector<KeyId> here, there;
      table.extend(here, tokens, kEverything);
      table.extend(there, tokens, other);
      return std::mismatch(here.begin(), here.end(), there.begin()).first - here.begin();
    };
    EXPECT_EQ(common(kEverything), 3);
    EXPECT_EQ(common(other_salt), 0);
    EXPECT_EQ(common(other_lora), 0);
    EXPECT_EQ(common(moved), 1);
    EXPECT_EQ(common(other_image), 1);
    EXPECT_EQ(common(longer), 2);
  }
}

// Labels see the keys as other tokens.
TEST(VllmHash, keyedTokensAreEqualWhereTokensAndKeysAre) {
  const Tokens tokens = Tokens::of_ids({1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(keyed_tokens(tokens, {}), tokens);
  const Tokens plain = keyed_tokens(tokens, {.images = {{4, 2, Name::intern("cat")}}});
  const Tokens other = keyed_tokens(tokens, {.images = {{4, 2, Name::intern("dog")}}});
  EXPECT_EQ(plain.size(), tokens.size());
  EXPECT_EQ(plain.common(0, other, 0, 9), 4u);
  EXPECT_EQ(plain.common(5, other, 5, 4), 4u);
  EXPECT_EQ(keyed_tokens(tokens, kEverything), keyed_tokens(tokens, kEverything));
  EXPECT_EQ(keyed_tokens(tokens, kEverything).common(0, tokens, 0, 9), 0u);
}

}  // namespace
}  // namespace lockstep::cache_sim
