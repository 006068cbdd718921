// Names tokens by branch: sequences that share a prefix share its tokens. Where sequences part, the
// first one goes on with its document, and each other one with a new document. So a trace has
// `a16+b1` beside `a18` instead of `a1+a3+a1:4+a3:6…` beside a longer list.
#pragma once

#include <map>

#include "cache_sim/search/legality_model.hpp"

namespace lockstep::cache_sim {

struct BranchNames {
  Steps steps;
  /// By document: the token after which it begins; 0 where it begins a sequence.
  std::map<Document, Token> begins_after;
};

/// The same steps with each token named by the prefix that ends with it. Equal prefixes stay equal,
/// different prefixes stay different; a token that occurs several times in a sequence becomes
/// several tokens. Documents are named a, b, … in order of appearance, without gaps.
BranchNames named_by_branch(Steps steps);

}  // namespace lockstep::cache_sim
