// Which form of latent attention is taken, and that it does not matter.
#include "reference/attention/mla_dispatch.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/reference/attention/latents.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::MlaBackend;
using reference::MlaBatch;
using reference::MlaPath;
using reference::MlaServer;

constexpr MlaBackend kBackends[] = {MlaBackend::flashinfer, MlaBackend::fa3, MlaBackend::flashmla,
                                    MlaBackend::trtllm, MlaBackend::triton};

// The outputs are those of the definition, for every answer of the rule and every batch.
RC_GTEST_PROP(MlaDispatch, everyPathGivesTheSame, ()) {
  const std::int64_t prefix = draw_length(33), T = draw_length(5);
  const Mla<double> mla(T, prefix + T, draw_seed());
  const MlaBackend backend = *rc::gen::elementOf(std::vector<MlaBackend>(kBackends, kBackends + 5));
  const MlaBatch batch{.extend = *rc::gen::arbitrary<bool>(),
                       .speculative = *rc::gen::arbitrary<bool>(),
                       .captured = *rc::gen::arbitrary<bool>(),
                       .prefix = *rc::gen::element<std::int64_t>(0, 1, 8191, 8192, 200000),
                       .all_tokens = *rc::gen::element<std::int64_t>(64, 131072, 131073)};
  const MlaServer server{*rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>(),
                         *rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>()};
  Result<double> whole(mla), chosen(mla), older(mla);
  reference::mla_normal<double>(mla.inputs(), mla.w, {.scale = 0.3}, whole.out, whole.lse);
  const std::int64_t chunk = *rc::gen::inRange<std::int64_t>(1, 40);
  reference::mla_by_path<double>(reference::mla_path(backend, batch, server), mla.inputs(), mla.w,
                                 {.scale = 0.3}, chunk, chosen.out, chosen.lse);
  reference::mla_by_path<double>(reference::older_mla_path(backend, batch, server), mla.inputs(),
                                 mla.w, {.scale = 0.3}, chunk, older.out, older.lse);
  RC_ASSERT(chosen.near(whole, 1e-12) && older.near(whole, 1e-12));
}

// SGLang 0.5.23's table, by hand.
TEST(MlaDispatch, isSglangsRule) {
  const auto path = [](MlaBackend backend, const MlaBatch& batch, const MlaServer& server = {}) {
    return reference::mla_path(backend, batch, server);
  };
  const MlaBatch decode{}, fresh{.extend = true, .all_tokens = 100};
  for (const MlaBackend backend : kBackends) EXPECT_EQ(path(backend, decode), MlaPath::absorbed);
  for (const MlaBackend backend : {MlaBackend::flashinfer, MlaBackend::fa3, MlaBackend::flashmla}) {
    EXPECT_EQ(path(backend, fresh), MlaPath::one_shot);
    MlaBatch batch = fresh;
    batch.speculative = true;
    EXPECT_EQ(path(backend, batch), MlaPath::absorbed) << "a verification";
    batch = fresh, batch.captured = true;
    EXPECT_EQ(path(backend, batch), MlaPath::absorbed);
    EXPECT_EQ(path(backend, fresh, {.ragged = false}), MlaPath::absorbed);
    batch = fresh, batch.prefix = 1;
    EXPECT_EQ(path(backend, batch), MlaPath::absorbed) << "a short prefix is not decompressed";
    batch.prefix = 8191;
    EXPECT_EQ(path(backend, batch), MlaPath::absorbed);
    batch.prefix = 8192;
    EXPECT_EQ(path(backend, batch), MlaPath::one_shot);
    EXPECT_EQ(path(backend, batch, {.chunked_prefix = false}), MlaPath::absorbed);
    batch.all_tokens = 131072;
    EXPECT_EQ(path(backend, batch), MlaPath::one_shot);
    batch.all_tokens = 131073;
    EXPECT_EQ(path(backend, batch), MlaPath::chunked);
  }
  EXPECT_EQ(path(MlaBackend::fa3, fresh, {.deterministic = true}), MlaPath::absorbed);
  EXPECT_EQ(path(MlaBackend::flashmla, fresh, {.deterministic = true}), MlaPath::one_shot);
  const MlaBatch later{.extend = true, .prefix = 1, .all_tokens = 100};
  EXPECT_EQ(path(MlaBackend::trtllm, later), MlaPath::chunked);
  EXPECT_EQ(path(MlaBackend::trtllm, later, {.chunked_prefix = false}), MlaPath::absorbed);
  EXPECT_EQ(path(MlaBackend::trtllm, fresh, {.chunked_prefix = false}), MlaPath::chunked);
  EXPECT_EQ(path(MlaBackend::triton, fresh), MlaPath::one_shot);
  EXPECT_EQ(path(MlaBackend::triton, later), MlaPath::absorbed);
  EXPECT_EQ(path(MlaBackend::triton, fresh, {.deterministic = true}), MlaPath::absorbed);
  EXPECT_EQ(path(MlaBackend::triton, {.extend = true, .speculative = true}), MlaPath::absorbed);
}

TEST(MlaDispatch, isTheOlderRule) {
  using reference::older_mla_path;
  const MlaBatch fresh{.extend = true}, later{.extend = true, .prefix = 5};
  const MlaServer no_cache{.radix_cache = false};
  EXPECT_EQ(older_mla_path(MlaBackend::flashinfer, later, no_cache), MlaPath::one_shot);
  EXPECT_EQ(older_mla_path(MlaBackend::flashinfer, fresh, {}), MlaPath::absorbed);
  EXPECT_EQ(older_mla_path(MlaBackend::flashinfer, {}, no_cache), MlaPath::absorbed);
  EXPECT_EQ(older_mla_path(MlaBackend::triton, fresh, {}), MlaPath::one_shot);
  EXPECT_EQ(older_mla_path(MlaBackend::triton, later, {}), MlaPath::absorbed);
  EXPECT_EQ(older_mla_path(MlaBackend::triton, {.extend = true, .speculative = true}, {}),
            MlaPath::absorbed);
}

// Chunks of a batch's prefixes: every cached token once, in order, never more than the workspace.
RC_GTEST_PROP(MlaDispatch, chunksCoverEveryPrefixOnce, ()) {
  const Sizes prefixes = draw_row_lengths(5, 129);
  const std::int64_t capacity =
      static_cast<std::int64_t>(prefixes.size()) + *rc::gen::inRange<std::int64_t>(0, 200);
  const auto chunks = reference::prefix_chunks(prefixes, capacity);
  Sizes covered(prefixes.size(), 0);
  for (const reference::PrefixChunk& chunk : chunks) {
    RC_ASSERT(sum(chunk.sizes) <= capacity);
    RC_ASSERT(sum(chunk.sizes) > 0);
    for (std::size_t b = 0; b < prefixes.size(); ++b) {
      RC_ASSERT(chunk.sizes[b] >= 0 && (chunk.sizes[b] == 0 || chunk.begin == covered[b]));
      covered[b] += chunk.sizes[b];
    }
  }
  RC_ASSERT(covered == prefixes);
}

// More requests than the workspace has tokens: a division by zero elsewhere, an error here.
TEST(MlaDispatch, aWorkspaceHasATokenForEveryRequest) {
  EXPECT_THROW(reference::prefix_chunks({5, 5}, 1), ContractViolation);
  EXPECT_TRUE(reference::prefix_chunks({}, 1).empty());
  EXPECT_TRUE(reference::prefix_chunks({0, 0}, 2).empty());
  EXPECT_EQ(reference::prefix_chunks({5, 1}, 4)[1].sizes, (Sizes{2, 0}));
}

}  // namespace
}  // namespace lockstep
