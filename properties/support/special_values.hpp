// Values that are no ordinary numbers.
#pragma once

#include <limits>

namespace lockstep::testing_support {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace lockstep::testing_support
