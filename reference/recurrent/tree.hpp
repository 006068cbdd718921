// Draft trees. A row's tokens are packed; `parents` gives, by numbers within the row, the token
// that each token follows: -1 for token 0, else 0 <= parent < own number. A token with another
// value is invalid, and so are its descendants: their outputs are 0, and their states are the
// committed one.
#pragma once

#include <algorithm>
#include <vector>

#include "reference/tensors/slots.hpp"

namespace lockstep {

/// The numbers of the tokens on the path from token 0 to `token`, both included; empty if `token`
/// is invalid. Without parents a row is a chain.
inline std::vector<std::int64_t> path_to(const std::optional<IndexView>& parents,
                                         const RowRange& row, std::int64_t token) {
  std::vector<std::int64_t> path;
  while (token >= 0) {
    const std::int64_t parent = parents ? (*parents)(row.begin + token) : token - 1;
    const bool valid = token == 0 ? parent == -1 : 0 <= parent && parent < token;
    if (!valid) return {};
    path.push_back(token);
    token = parent;
  }
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace lockstep
