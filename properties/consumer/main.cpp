// A program of another project: it includes the installed headers and finds the names that the
// installed objects register.
#include <iostream>

#include "reference/protocol/subject.hpp"
#if __has_include(<cuda/std/mdspan>)
#include "reference/tensors/view.hpp"
#endif

int main() {
#if __has_include(<cuda/std/mdspan>)
  std::cout << "with tensors of rank " << lockstep::TensorView<float, 3>::rank() << '\n';
#endif
  using lockstep::OracleEntry;
  using lockstep::PolicyEntry;
  using lockstep::Registry;
  for (const PolicyEntry& policy : Registry<PolicyEntry>::all()) std::cout << policy.name << '\n';
  const bool found = Registry<PolicyEntry>::find("sglang-no-buffer") != nullptr &&
                     Registry<OracleEntry>::find("sglang-no-buffer") != nullptr;
  return found ? 0 : 1;
}
