// Types for integers that would be easy to mix up, and names that become small integers where they
// are read.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace lockstep {

/// An index of one kind of thing. `none()` names nothing.
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
/// integers. The integer depends on the order of interning, so it orders nothing that anyone can
/// see.
class Name {
 public:
  constexpr Name() = default;
  static Name intern(std::string_view text);

  constexpr bool exists() const { return index_ != 0; }
  /// 1 … for names, dense, so that tables can be indexed by it; 0 for no name.
  constexpr std::uint32_t index() const { return index_; }
  const std::string& text() const;
  constexpr bool operator==(const Name&) const = default;

 private:
  std::uint32_t index_ = 0;
};

}  // namespace lockstep
