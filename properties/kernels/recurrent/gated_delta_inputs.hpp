// The inputs of a layer of the gated delta rule, for the tests of its kernels.
#pragma once

#include "properties/support/gpu.hpp"

namespace lockstep::testing_support {

struct GatedDeltaExtents {
  std::int64_t H, HV, K, V;
};

/// For the tokens and slots of a batch, on the grid: exact in every type.
struct GatedDeltaInputs {
  GatedDeltaInputs(const Batch& batch, const GatedDeltaExtents& e, std::uint64_t seed)
      : q(draw<3>({batch.tokens, e.H, e.K}, seed, 1)),
        k(draw<3>({batch.tokens, e.H, e.K}, seed, 2)),
        v(draw<3>({batch.tokens, e.HV, e.V}, seed, 3)),
        a(draw<2>({batch.tokens, e.HV}, seed, 4)),
        b(draw<2>({batch.tokens, e.HV}, seed, 5)),
        A_log(draw<1>({e.HV}, seed, 6)),
        dt_bias(draw<1>({e.HV}, seed, 7)),
        state(draw<4>({batch.slots, e.HV, e.V, e.K}, seed, 8)) {}

  Array<double, 3> q, k, v;
  Array<double, 2> a, b;
  Array<double, 1> A_log, dt_bias;
  Array<double, 4> state;
};

}  // namespace lockstep::testing_support
