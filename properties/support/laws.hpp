// Random cases for the laws of the references: shapes that hurt, cuts, slots, ragged rows.
#pragma once

#include <rapidcheck.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "reference/tensors/array.hpp"
#include "reference/tensors/eigen.hpp"
#include "reference/tensors/grid.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::testing_support {

using Sizes = std::vector<std::int64_t>;

/// A length at most `most`, often one at which a chunk or a window begins or ends.
inline std::int64_t draw_length(std::int64_t most) {
  Sizes lengths;
  for (const std::int64_t length : {0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 129})
    if (length <= most) lengths.push_back(length);
  return *rc::gen::elementOf(lengths);
}

/// A seed for the test data of one case.
inline std::uint64_t draw_seed() {
  return *rc::gen::inRange<std::uint64_t>(0, 1 << 20);
}

/// Pieces that add up to `total`; some may be empty.
inline Sizes draw_pieces(std::int64_t total) {
  Sizes cuts{0, total};
  for (int count = *rc::gen::inRange(0, 6); count > 0; --count)
    cuts.push_back(*rc::gen::inRange<std::int64_t>(0, total + 1));
  std::sort(cuts.begin(), cuts.end());
  Sizes pieces;
  for (std::size_t i = 1; i < cuts.size(); ++i) pieces.push_back(cuts[i] - cuts[i - 1]);
  return pieces;
}

/// Lengths of the rows of a batch, empty ones among them.
inline Sizes draw_row_lengths(std::int64_t most_rows, std::int64_t most) {
  Sizes lengths(static_cast<std::size_t>(*rc::gen::inRange<std::int64_t>(1, most_rows + 1)));
  for (std::int64_t& length : lengths) length = draw_length(most);
  return lengths;
}

inline std::int64_t sum(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

inline Array<std::int32_t, 1> ints(const Sizes& values) {
  Array<std::int32_t, 1> array(Shape<1>{static_cast<std::int64_t>(values.size())}, 0);
  for (std::size_t i = 0; i < values.size(); ++i)
    array.data()[i] = static_cast<std::int32_t>(values[i]);
  return array;
}

/// [0, l0, l0 + l1, ...]
inline Array<std::int32_t, 1> starts_of(const Sizes& lengths) {
  Sizes starts{0};
  for (const std::int64_t length : lengths) starts.push_back(starts.back() + length);
  return ints(starts);
}

/// The numbers 0 ... count - 1 in an order that RapidCheck draws.
inline Sizes draw_order(std::int64_t count) {
  Sizes order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[*rc::gen::inRange<std::size_t>(0, i)]);
  return order;
}

/// A chain's parents are i - 1. A tree's are any earlier token; -2 and later tokens are invalid.
inline Array<std::int32_t, 1> draw_parents(std::int64_t count, bool with_invalid) {
  Sizes parents;
  for (std::int64_t i = 0; i < count; ++i) {
    parents.push_back(i == 0 ? -1 : *rc::gen::inRange<std::int64_t>(0, i));
    if (with_invalid && *rc::gen::inRange(0, 6) == 0)
      parents.back() = *rc::gen::element<std::int64_t>(-2, i, i + 1);
  }
  return ints(parents);
}

/// The bits agree, NaN and the sign of zero included.
template <AnyView A, AnyView B>
bool same_bits(const A& a, const B& b) {
  if (shape_of(a) != shape_of(b)) return false;
  bool same = true;
  for_each_element(a, [&](const auto& index, const auto& element) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * b.stride(i);
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): bits are what is compared
    same = same && std::memcmp(&element, b.data_handle() + offset, sizeof element) == 0;
  });
  return same;
}

template <class T, std::size_t Rank>
bool same_bits(const Array<T, Rank>& a, const Array<T, Rank>& b) {
  return same_bits(a.view(), b.view());
}

/// Arrays with the same trailing dimensions, one after the other.
template <AnyView V>
auto joined(const std::vector<V>& parts) {
  Shape<V::rank()> shape = shape_of(parts.at(0));
  shape[0] = 0;
  for (const V& part : parts) shape[0] += part.extent(0);
  Array<std::remove_const_t<ElementOf<V>>, V::rank()> all(shape);
  std::int64_t next = 0;
  for (const V& part : parts)
    for_each_element(part, [&](const auto&, const auto& element) { all.data()[next++] = element; });
  return all;
}

}  // namespace lockstep::testing_support
