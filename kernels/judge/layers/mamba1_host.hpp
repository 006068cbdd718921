// The tensors of a Mamba1 layer on the host, for the judges of its steps and of its prompts.
#pragma once

#include <cmath>
#include <optional>
#include <string_view>

#include "kernels/judge/operation.hpp"

namespace lockstep::judging {

/// A case's tensors in S, changed by a mistake that steps and prompts have in common.
template <class S>
struct Mamba1Host {
  Mamba1Host(const Case& c, std::string_view mistake)
      : rows(c),
        x(array_of<S, 2>(c, "x")),
        dt(array_of<S, 2>(c, "dt")),
        A(array_of<S, 2>(c, "A")),
        B(array_of<S, 2>(c, mistake == "swapped-BC" ? "C" : "B")),
        C(array_of<S, 2>(c, mistake == "swapped-BC" ? "B" : "C")),
        state(array_of<S, 3>(c, "state")),
        z(maybe_array_of<S, 2>(c, "z")),
        skip(maybe_array_of<S, 1>(c, "D")),
        bias(maybe_array_of<S, 1>(c, "dt_bias")) {
    softplus = (c.flag("dt_softplus") && mistake != "no-softplus") || mistake == "always-softplus";
    change_slots(rows, mistake, x.extent(0));
    if (mistake == "no-dt-bias") bias.reset();
    if (mistake == "no-D") skip.reset();
    if (mistake == "no-z") z.reset();
    for (S& a : A) {
      if (mistake == "no-decay") a = S{0};
      if (mistake == "log-A") a = -std::exp(a);
      if (mistake == "grow") a = -a;
    }
  }

  /// Inputs of type In, reference::Mamba1Decode<S> or reference::Mamba1Prefill<S>, but its rows.
  template <class In>
  In inputs_of() const {
    In in{.x = x, .dt = dt, .A = A, .B = B, .C = C};
    if (skip) in.skip = skip->view();
    if (z) in.z = z->view();
    if (bias) in.dt_bias = bias->view();
    in.dt_softplus = softplus;
    return in;
  }

  HostRows rows;
  Array<S, 2> x, dt, A, B, C;
  Array<S, 3> state;
  std::optional<Array<S, 2>> z;
  std::optional<Array<S, 1>> skip, bias;
  bool softplus = false;
};

}  // namespace lockstep::judging
