// Block hashes are vLLM's own, byte by byte. The expected ones were printed by vLLM 0.33's
// vllm/utils/hashing.py under Python 3.11 (xxhash 3.5.0, cbor2 5).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>
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
  const char* plain;   // a block of tokens 1 … 16 behind NONE_HASH
  const char* sizes;   // behind that one: tokens at the ends of each form of an integer, twice
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
          hashed.extend(by_hash, tokens.prefix(5), salt);  // what is there already is gone on from
          hashed.extend(by_hash, tokens, salt);
          digested.extend(by_digest, tokens, salt);
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

}  // namespace
}  // namespace lockstep::cache_sim
