// Numbers of a cache compared with those of a run without one, and the sentences about them.
// Memory that nobody has written since it was free holds a quiet NaN whose payload is the number of
// its place, so that a difference names the place it came from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/numbers/truth.hpp"

namespace lockstep::cache_sim {

double poison_of(std::uint32_t place);
void poison(std::span<double> numbers, std::uint32_t place);

bool same_bits(std::span<const double> a, std::span<const double> b);

/// The largest difference relative to the largest expected number; infinite where one is NaN.
double distance(std::span<const double> actual, std::span<const double> expected);

/// The order of magnitude alone: last digits depend on the machine.
std::string magnitude(double x);

/// The first of the largest logits.
std::ptrdiff_t likeliest_of(std::span<const double> logits);

/// The logits after `tokens` tokens are off: by how much, and which token is the likeliest instead
/// of the right one. Nothing where they are not.
std::optional<std::string> moved_logits(std::uint32_t tokens, std::span<const double> own,
                                        std::span<const double> right);

/// For a page: a row's last logits beside the right ones, which are those `of` a run.
std::string told_row(std::string_view request, std::uint32_t tokens, std::span<const double> own,
                     std::span<const double> right, std::string_view of);

/// Says which place wrong numbers come from, if they are poison; else empty. `kind`: "KV slot".
std::string origin(std::span<const double> numbers, std::string_view kind);

/// The tokens [begin, end) of `text`, computed after a prefix.
struct ComparedRow {
  const Tokens& text;
  std::uint32_t begin, end, drafts;       ///< the last tokens are drafts
  std::span<const std::int64_t> parents;  ///< as ForwardRow's
};

/// "a row over tokens 3 to 5 of a9"
std::string row_text(std::uint32_t begin, std::uint32_t end, const Tokens& text);

/// The prefixes after each of the row's tokens.
std::vector<Truth::Node> nodes_after(Truth& truth, Truth::Node base, const ComparedRow& row);

/// Says by how much a row's logits, [tokens that have some, vocabulary], are off; nothing where
/// they are right to the last bit. `after` are the prefixes after the row's tokens: each of a
/// verification has logits, of another row the last one.
std::optional<std::string> moved_logits(const Truth& truth, std::span<const Truth::Node> after,
                                        bool verifies, std::span<const double> logits);
inline constexpr std::string_view kOnlyReadsWrong = "logits are right, but not what they come from";

}  // namespace lockstep::cache_sim
