// Draft trees. A row's tokens are packed; `parents` names, by numbers within the row, the token
// that each follows: -1 for token 0, else 0 <= parent < own number. A token with another value, and
// every token below one, is invalid: its output is 0 and its state the committed one.
#pragma once

#include <algorithm>
#include <vector>

#include "reference/tensors/slots.hpp"

namespace lockstep {

/// The numbers of the tokens from the row's first to `token`, both included; empty where `token` is
/// invalid. Without parents, a row is a chain.
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
