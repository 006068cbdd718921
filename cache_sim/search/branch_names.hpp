// Token names by branch: sequences that share a prefix share its tokens, and where they part, each
// but the first goes on with a document of its own. `a16+b1` beside `a18` instead of
// `a1+a3+a1:4+a3:6…` beside something longer.
#pragma once

#include <map>

#include "cache_sim/search/legality_model.hpp"

namespace lockstep::cache_sim {

struct BranchNames {
  Steps steps;
  /// By document: the token after which it begins; 0 where its sequences begin with it.
  std::map<Document, Token> begins_after;
};

/// The same steps, with every token named by the prefix that ends with it. Equal prefixes stay
/// equal and others different; a token that a sequence repeats becomes several. Documents are a, b,
/// … in the order in which they appear, without gaps.
BranchNames named_by_branch(Steps steps);

}  // namespace lockstep::cache_sim
