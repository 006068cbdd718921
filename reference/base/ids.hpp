// Types for integers that are easily mixed up, and names that are interned as small integers.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace lockstep {

/// An index of one kind of object. `none()` is no index.
template <class Tag>
struct Id {
  std::uint32_t value = std::numeric_limits<std::uint32_t>::max();

  static constexpr Id none() { return {}; }
  constexpr bool exists() const { return value != std::numeric_limits<std::uint32_t>::max(); }
  constexpr auto operator<=>(const Id&) const = default;
};

using StateSlot =
    Id<struct StateSlotTag>;  ///< a row of the recurrent-state pool; slot 0 is the padding target
using RequestRow = Id<struct RequestRowTag>;  ///< a row of the request table: not a state slot
using NodeIndex = Id<struct NodeIndexTag>;    ///< a node of a policy's tree

/// A name from a trace (a request, a slot, a lock, a salt), interned: equal names are equal
/// integers. The integer depends on the order of interning, so no visible order may depend on it.
class Name {
 public:
  constexpr Name() = default;
  static Name intern(std::string_view text);

  constexpr bool exists() const { return index_ != 0; }
  /// 1, 2, ... for names, dense, so that it can index tables; 0 for no name.
  constexpr std::uint32_t index() const { return index_; }
  const std::string& text() const;
  constexpr bool operator==(const Name&) const = default;

 private:
  std::uint32_t index_ = 0;
};

}  // namespace lockstep
