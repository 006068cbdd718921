// `speculate=`: instead of listing a request's verifications one by one, draws from a seed how many
// drafts each has and how many of these are kept.
#pragma once

#include <cstdint>
#include <string_view>

#include "reference/base/result.hpp"
#include "reference/protocol/request.hpp"

namespace lockstep {

struct Speculation {
  enum class Kind : std::uint8_t {
    chain,  ///< a draft model or MTP layers: every verification has `drafts` of them
    ngram,  ///< drafts found in the text so far: 0 to `drafts`; 0 is a row without drafts
  };
  Kind kind = Kind::chain;
  std::int64_t drafts = 0;  ///< 0: no verification at all
  /// Per mille: the chance of a draft to be kept where the one before it is, as in rejection
  /// sampling; 1000 is greedy decoding whose drafts are always right.
  std::int64_t accepted = 700;
  std::uint64_t seed = 1;
};

/// `chain:DRAFTS:PERMILLE[:SEED]` or `ngram:…`; the error says what was wrong with it.
Result<Speculation> parse_speculation(std::string_view text);

/// Fills the request's `drafts` and `accept` until its output is sampled. A pure function of the
/// speculation's seed, the stream and the request; of a tree (`branches`), the drafts on its
/// longest way can be kept.
void speculate(RequestSpec& request, const Speculation& speculation, std::uint64_t stream);

}  // namespace lockstep
