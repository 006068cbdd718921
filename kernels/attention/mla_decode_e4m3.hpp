// mla_decode over a cache in e4m3 with products in e4m3 too: less exact, and faster.
// Equations: reference/attention/mla_attention.hpp.
#pragma once

#include "kernels/attention/mla_decode.hpp"

namespace lockstep::kernels {

/// Bytes of workspace; they depend on q's shape alone.
std::int64_t mla_decode_e4m3_workspace(const MlaDecode<Bf16, E4m3>& in);

/// As mla_decode(), with two differences. Pages are whole multiples of 64 tokens. And products take
/// e4m3: queries times a power of two for each row, which brings its largest number into (224,
/// 448], so queries that e4m3 holds stay exact; and p, times a power of two that keeps it between
/// 2^-9 and 2^8. Queries must be finite. Errors of outputs are those of p, 4 bits a number: 3e-3 to
/// 1e-2 of a row's largest output; lse is off by up to 2^-12 of the largest score.
void mla_decode_e4m3(const MlaDecode<Bf16, E4m3>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
