// A verification through a Mamba2 layer between its projections, in one launch: 1 to 8 tokens of
// each row, one after another. Equations and names: reference/recurrent/mamba2_mixer_verify.hpp;
// the layer: mamba2_mixer_decode.hpp.
//
//   here              vLLM                     shape, all in device memory
//   x, z, dt, out     as of a decode           [T, ...], the tokens of all rows
//   starts            query_start_loc          [N + 1]
//   slots.table       spec_state_indices       [N, columns]: slots for the states after each token
//   slots.num_accepted  num_accepted_tokens    [N]
//   conv_state        conv_state               [slots, H P + 2 G N, C], C of at least 2 + columns
#pragma once

#include "kernels/models/mamba2_mixer_decode.hpp"

namespace lockstep::kernels {

/// Windows, states and outputs have the bits of causal_conv1d_update, selective_state_update and
/// gated_rms_norm one after another, with the same table and counts. A row has at most as many
/// tokens as the table has columns, 1 to 8; its window lies in the slot of column 0, its state in
/// that of column accepted - 1, and the state after its token i goes to that of column i. Outputs
/// of rows without these slots or with more tokens, and of tokens behind the last row, are 0; such
/// rows leave nothing else. `parts` may also be 3, of which one has a tile of 8 or 16 channels more
/// or less than another. Throws ArgumentError, also on a device without thread block clusters.
template <class S>
void mamba2_mixer_verify(const Mamba2MixerDecode<S>& in, const IndexView& starts,
                         cudaStream_t stream);

}  // namespace lockstep::kernels
