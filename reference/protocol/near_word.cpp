#include "reference/protocol/near_word.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace lockstep {
namespace {

constexpr std::size_t kLongest = 60;  // characters; longer words get no suggestion
constexpr std::size_t kLongWord = 8;  // characters; from here on two mistakes are tolerated

/// The number of mistakes: letters inserted, left out or replaced, and neighbours swapped.
std::size_t mistakes_between(std::string_view a, std::string_view b) {
  std::vector<std::size_t> last, now(b.size() + 1), next(b.size() + 1);
  std::iota(now.begin(), now.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    next[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      next[j + 1] = std::min({now[j + 1] + 1, next[j] + 1, now[j] + (a[i] != b[j] ? 1 : 0)});
      if (i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j])
        next[j + 1] = std::min(next[j + 1], last[j - 1] + 1);
    }
    last = std::exchange(now, next);
  }
  return now.back();
}

}  // namespace

std::string but_near(std::string_view word, const std::vector<std::string_view>& known) {
  if (word.empty() || word.size() > kLongest) return "";
  std::size_t fewest = word.size() < kLongWord ? 2 : 3;  // a word is near if it has fewer mistakes
  std::string_view nearest;
  for (const std::string_view one : known)
    if (const std::size_t mistakes = mistakes_between(word, one);
        mistakes < fewest && mistakes < one.size()) {
      fewest = mistakes;
      nearest = one;
    }
  return nearest.empty() ? "" : ", but `" + std::string(nearest) + "` is one";
}

}  // namespace lockstep
