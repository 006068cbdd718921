// The choice of a form of latent attention for a batch, by SGLang's rules, as pure functions. The
// choice only affects speed; mla_by_path() runs any of the forms, and all agree.
//
//   path       form
//   absorbed   multi-query attention over the latents                    mla_absorbed()
//   one_shot   keys and values of the whole context, decompressed        mla_normal()
//   chunked    the new tokens, then the prefix chunk by chunk            mla_chunked_prefix()
#pragma once

#include <algorithm>
#include <vector>

#include "reference/attention/mla_attention.hpp"

namespace lockstep::reference {

enum class MlaPath { absorbed, one_shot, chunked };
enum class MlaBackend { flashinfer, fa3, flashmla, trtllm, triton };

struct MlaBatch {
  bool extend = false;          ///< new tokens of prompts; also a verification or drafts
  bool speculative = false;     ///< a verification, or the extension of drafts
  bool captured = false;        ///< during the capture of a graph
  std::int64_t prefix = 0;      ///< cached tokens of all requests
  std::int64_t all_tokens = 0;  ///< cached and new tokens of all requests
};

struct MlaServer {
  bool deterministic = false;
  bool ragged = true;          ///< kernels for packed rows may be used
  bool chunked_prefix = true;  ///< a prefix may be decompressed in chunks
  bool radix_cache = true;
};

constexpr std::int64_t kPrefixWorthDecompressing = 8192;
constexpr std::int64_t kMostDecompressedAtOnce = 131072;

/// The rule of SGLang 0.5.23.
inline MlaPath mla_path(MlaBackend backend, const MlaBatch& batch, const MlaServer& server) {
  const bool prompt = batch.extend && !batch.speculative;
  if (backend == MlaBackend::trtllm) {
    const bool chunked = batch.extend && (server.chunked_prefix || batch.prefix == 0);
    return chunked ? MlaPath::chunked : MlaPath::absorbed;
  }
  if (backend == MlaBackend::triton) {
    const bool normal = prompt && batch.prefix == 0 && !server.deterministic;
    return normal ? MlaPath::one_shot : MlaPath::absorbed;
  }
  if (batch.captured || (backend == MlaBackend::fa3 && server.deterministic))
    return MlaPath::absorbed;
  const bool long_prefix = batch.prefix >= kPrefixWorthDecompressing && server.chunked_prefix;
  if (!prompt || !server.ragged || !(batch.prefix == 0 || long_prefix)) return MlaPath::absorbed;
  return batch.all_tokens <= kMostDecompressedAtOnce ? MlaPath::one_shot : MlaPath::chunked;
}

/// The rule of earlier versions.
inline MlaPath older_mla_path(MlaBackend backend, const MlaBatch& batch, const MlaServer& server) {
  const bool prompt = batch.extend && !batch.speculative;
  const bool normal = backend == MlaBackend::flashinfer ? batch.extend && !server.radix_cache
                                                        : prompt && batch.prefix == 0;
  return normal ? MlaPath::one_shot : MlaPath::absorbed;
}

/// One chunk of the batch's prefixes: tokens begin ... begin + sizes[b] - 1 of request b.
struct PrefixChunk {
  std::int64_t begin;
  std::vector<std::int64_t> sizes;  ///< by request; 0 if the request's prefix has ended
};

/// The chunks of a batch. Its B requests share a workspace of `capacity` tokens, so a chunk has at
/// most capacity / B tokens of each.
inline std::vector<PrefixChunk> prefix_chunks(const std::vector<std::int64_t>& prefixes,
                                              std::int64_t capacity) {
  const auto B = static_cast<std::int64_t>(prefixes.size());
  if (B == 0) return {};
  require(capacity >= B, "the workspace has a token for every request");
  const std::int64_t size = capacity / B;
  const std::int64_t longest = *std::max_element(prefixes.begin(), prefixes.end());
  std::vector<PrefixChunk> chunks;
  for (std::int64_t begin = 0; begin < longest; begin += size) {
    PrefixChunk chunk{begin, {}};
    for (const std::int64_t prefix : prefixes)
      chunk.sizes.push_back(std::clamp<std::int64_t>(prefix - begin, 0, size));
    chunks.push_back(chunk);
  }
  return chunks;
}

/// Attention of one request by one of the forms.
template <class S>
void mla_by_path(MlaPath path, const MlaInputs<S>& in, const MlaUpWeights<S>& w,
                 const AttentionOptions& options, std::int64_t chunk, TensorView<S, 3> out,
                 TensorView<S, 2> lse) {
  switch (path) {
    case MlaPath::absorbed: mla_absorbed(in, w, options, out, lse); break;
    case MlaPath::one_shot: mla_normal(in, w, options, out, lse); break;
    case MlaPath::chunked: mla_chunked_prefix(in, w, options, chunk, out, lse); break;
  }
}

}  // namespace lockstep::reference
