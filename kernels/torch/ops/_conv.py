"""The causal convolution, shared by all signatures: a step with slots, and a prefill.

The operators take tokens [T, D]; the signatures have channels first, [B, D, S] or [D, T]. If
channels are contiguous, as servers keep them, the conversion is a view.
"""

import torch

from ._layouts import (activation_name, even_starts, expect, forward_only, int32, read_slots,
                       write_slots)
from ._library import operators


def tokens_of(x):
    """x [B, D] or [B, D, S] as tokens [B S, D], and the rows' starts: None for one token each."""
    expect(x.dim() in (2, 3), "x", "[B, D] or [B, D, S]", tuple(x.shape))
    if x.dim() == 2:
        return x, None
    rows, channels, size = x.shape
    if size == 1:
        return x.squeeze(2), None
    return x.transpose(1, 2).reshape(rows * size, channels), even_starts(rows, size, x.device)


def shaped_like(x, out):
    """Tokens [B S, D] in the shape of x, without a copy."""
    if x.dim() == 2:
        return out
    rows, channels, size = x.shape
    return out.view(rows, size, channels).transpose(1, 2)


def update(function, x, state, weight, bias, activation, slots, *, pad=-1, starts=None,
           accepted=None, snapshots=None):
    """A step of every row. It replaces the row's state [slots, D, C], or with snapshots only reads
    it. With starts, x is [T, D]; else [B, D] or [B, D, S]."""
    tokens, starts = (x, int32(starts)) if starts is not None else tokens_of(x)
    word = activation_name(activation)

    def run():
        return operators.causal_conv1d_update(
            tokens, state, weight, bias, state_indices=int32(slots),
            num_accepted_tokens=int32(accepted), query_start_loc=starts, snapshots=snapshots,
            activation=word, pad_slot_id=pad if slots is not None else -1)

    out = forward_only(function, run, x, weight, bias)
    return out if x.dim() == 2 else shaped_like(x, out)


def update_ring(function, x, state, weight, bias, activation, slots, position):
    """update() for states that are rings, of which column position % C is written next.

    It copies the rows' rings into order, oldest column first, and back: two more copies of each
    state than update().
    """
    columns = state.size(2)
    if slots is None:
        slots = torch.arange(state.size(0), dtype=torch.int32, device=state.device)
    slots = int32(slots)
    size = x.size(2) if x.dim() == 3 else 1

    def ring(first):
        at = (first[:, None] + torch.arange(columns, device=state.device)) % columns
        return at.long()[:, None, :].expand(-1, state.size(1), -1)

    rings = read_slots(state, slots)
    ordered = rings.gather(2, ring(position))
    own = torch.arange(slots.numel(), dtype=torch.int32, device=state.device)
    out = update(function, x, ordered, weight, bias, activation, torch.where(slots < 0, -1, own))
    write_slots(state, slots, -1, rings.scatter(2, ring(position + size), ordered))
    return out


def prefill(x, weight, bias, activation, state=None, *, starts=None, slots=None, resumes=None,
            pad=-1):
    """Whole prompts: x [T, D] with starts, or [B, S, D]. It replaces the first W - 1 columns of the
    rows' states; resumes [N] says which rows continue from a state."""
    history = None if state is None else state[:, :, : weight.size(1) - 1]
    return operators.causal_conv1d(
        x, weight, bias, history, query_start_loc=int32(starts), state_indices=int32(slots),
        has_initial_state=resumes, activation=activation_name(activation), pad_slot_id=pad)


def prefill_pool(function, x, weight, bias, conv_states, query_start_loc, cache_indices,
                 has_initial_state, activation, pad):
    """The servers' prefill: x [D, T] of packed rows, with a pool of states. Entries of
    cache_indices and has_initial_state after the last row are ignored."""
    expect(x.dim() == 2, "x", "[D, T]", tuple(x.shape))
    expect(query_start_loc is not None, "query_start_loc", "[N + 1]", "none")
    rows = query_start_loc.numel() - 1
    slots = None if cache_indices is None else cache_indices[:rows]
    if conv_states is None:
        resumes = None
    elif has_initial_state is None:  # in the servers, no row continues from a state then
        resumes = torch.zeros(rows, dtype=torch.bool, device=x.device)
    else:
        resumes = has_initial_state[:rows].bool()

    def run():
        return prefill(x.transpose(0, 1), weight, bias, activation, conv_states,
                       starts=query_start_loc, slots=slots, resumes=resumes,
                       pad=-1 if slots is None else pad)

    return forward_only(function, run, x, weight, bias).transpose(0, 1)


def starts_of_segments(segments):
    """The starts of the runs of equal numbers in segments [B, S]: [B S + 1]. The number of runs is
    not read from the device; rows after the last run are empty."""
    rows, size = segments.shape
    total = rows * size
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    begins = begins.flatten()
    at = torch.arange(total, device=segments.device)
    starts = torch.full((total + 1,), total, dtype=torch.int64, device=segments.device)
    starts.scatter_(0, torch.where(begins, begins.cumsum(0) - 1, total),
                    torch.where(begins, at, total))
    return int32(starts)
