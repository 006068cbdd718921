#include "cache_sim/numbers/compared.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::uint64_t kQuietNan = 0x7FF8000000000000u;

}  // namespace

double poison_of(std::uint32_t place) {
  return std::bit_cast<double>(kQuietNan | place);
}

void poison(std::span<double> numbers, std::uint32_t place) {
  std::ranges::fill(numbers, poison_of(place));
}

bool same_bits(std::span<const double> a, std::span<const double> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

double distance(std::span<const double> actual, std::span<const double> expected) {
  double far = 0, largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(actual[i])) return std::numeric_limits<double>::infinity();
    far = std::max(far, std::abs(actual[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0 ? far / largest : far;
}

std::string magnitude(double x) {
  if (std::isinf(x)) return "NaN";
  return x > 0 ? fmt::format("1e{:+03d}", static_cast<int>(std::floor(std::log10(x)))) : "0";
}

std::ptrdiff_t likeliest_of(std::span<const double> logits) {
  return std::ranges::max_element(logits) - logits.begin();
}

namespace {

/// Which token is the likeliest instead of the right one; empty where it is the same.
std::string other_token(std::span<const double> own, std::span<const double> right) {
  const std::ptrdiff_t token = likeliest_of(own), wanted = likeliest_of(right);
  if (token == wanted) return "";
  const bool is_tie =
      right[static_cast<std::size_t>(token)] == right[static_cast<std::size_t>(wanted)];
  return fmt::format("token {} is the likeliest instead of {}{}", token, wanted,
                     is_tie ? ", a tie" : "");
}

}  // namespace

std::optional<std::string> moved_logits(std::uint32_t tokens, std::span<const double> own,
                                        std::span<const double> right) {
  const double far = distance(own, right);
  if (far == 0) return {};
  std::string moved =
      fmt::format("logits after {} are {} off", counted(tokens, "token"), magnitude(far));
  if (std::isinf(far)) return moved;
  const std::string other = other_token(own, right);
  return moved + ", " + (other.empty() ? "the likeliest token is the same" : other);
}

std::string told_row(std::string_view request, std::uint32_t tokens, std::span<const double> own,
                     std::span<const double> right, std::string_view of) {
  std::string said = fmt::format("{} after {}: ", request, counted(tokens, "token"));
  const double far = distance(own, right);
  if (std::isinf(far)) return said + "logits are NaN";
  const std::string other = other_token(own, right);
  said += other.empty() ? fmt::format("token {} is the likeliest", likeliest_of(own)) : other;
  if (same_bits(own, right)) return said + fmt::format(", bit by bit as {}", of);
  return said + fmt::format("; logits are {} off", magnitude(far));
}

std::string origin(std::span<const double> numbers, std::string_view kind) {
  for (const double x : numbers)
    if (std::isnan(x) &&
        (std::bit_cast<std::uint64_t>(x) & ~std::uint64_t{0xFFFFFFFF}) == kQuietNan)
      return fmt::format(", which holds what {} {} had before anybody wrote it", kind,
                         static_cast<std::uint32_t>(std::bit_cast<std::uint64_t>(x)));
  return "";
}

std::string row_text(std::uint32_t begin, std::uint32_t end, const Tokens& text) {
  return fmt::format("a row over tokens {} to {} of {}", begin, end, text.text(60));
}

std::vector<Truth::Node> nodes_after(Truth& truth, Truth::Node base, const ComparedRow& row) {
  const std::uint32_t size = row.end - row.begin, inputs = size - row.drafts;
  std::vector<Truth::Node> after;
  for (std::uint32_t i = 0; i < size; ++i) {
    Truth::Node parent = i == 0 ? base : after[i - 1];
    if (i >= inputs && !row.parents.empty()) {
      const auto draft = static_cast<std::uint32_t>(row.parents[i - inputs]);
      parent = draft == 0 ? (inputs == 0 ? base : after[inputs - 1]) : after[inputs + draft - 1];
    }
    after.push_back(truth.next(parent, row.text[row.begin + i]));
  }
  return after;
}

std::optional<std::string> moved_logits(const Truth& truth, std::span<const Truth::Node> after,
                                        bool verifies, std::span<const double> logits) {
  const std::size_t V = truth.model().vocabulary();
  std::optional<std::string> moved;
  for (const Truth::Node node : verifies ? after : after.last(1)) {
    const std::span<const double> own = logits.first(V), right = truth.logits(node);
    logits = logits.subspan(V);
    if (same_bits(own, right)) continue;
    if (auto off = moved_logits(truth.size(node), own, right)) return off;
    moved = kOnlyReadsWrong;
  }
  return moved;
}

}  // namespace lockstep::cache_sim
