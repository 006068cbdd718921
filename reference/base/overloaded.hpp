// One visitor out of several lambdas, for std::visit.
#pragma once

namespace lockstep {

template <class... Case>
struct Overloaded : Case... {
  using Case::operator()...;
};
// clang 14 deduces no aggregates by itself.
template <class... Case>
Overloaded(Case...) -> Overloaded<Case...>;

}  // namespace lockstep
