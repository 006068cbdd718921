// One visitor out of several lambdas, for std::visit.
#pragma once

namespace lockstep {

template <class... Case>
struct Overloaded : Case... {
  using Case::operator()...;
};
// A deduction guide, since clang 14 does not deduce aggregates.
template <class... Case>
Overloaded(Case...) -> Overloaded<Case...>;

}  // namespace lockstep
