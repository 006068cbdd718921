"""The cases of the speed table: inputs, counted bytes, and a reference answer in float64.

A case holds several input sets. Launches rotate over them, so that between two uses of one set
more bytes move than the L2 cache holds. Every contestant of a case gets the same sets.
"""

import functools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Callable

import torch

COLD_BYTES = 256 << 20  # counted traffic between two uses of a set
STATE_FOOTPRINT = 128 << 20  # of in-place states, over all sets
CHECKED_ROWS = 8  # rows of a batch that are compared with float64

CONV = SimpleNamespace(D=8192, W=4)
SSU = SimpleNamespace(H=128, P=64, N=128, G=8)
MAMBA1 = SimpleNamespace(D=8192, N=16, R=256)  # Jamba Mini, FalconMamba
GDN = SimpleNamespace(H=16, HV=32, K=128, V=128)
POOL = SimpleNamespace(layers=36, slots=128, rows=64)
MLA = SimpleNamespace(width=576, values=512, page=64, scale=0.135)  # DeepSeek-V3's 192^-0.5 1.874
PROMPT = SimpleNamespace(width=192, values=128)  # decompressed


@dataclass
class Case:
    """One row of the table. `kind` tells peers.py which calls fit."""

    operation: str
    name: str
    kind: str
    B: int
    bytes: int  # read and written by one launch, each input and output once
    sets: list = field(default_factory=list)
    reference: Callable = None  # (set, rows) -> (out, state) in float64, from the state before
    flops: int = 0  # of matrix products, where these may take longer than the bytes
    tolerance: float = 5e-2  # relative, against float64: tells a wrong call from rounding


def sets_needed(traffic, state_bytes):
    """The number of input sets that keeps L2 cold: one launch of a set counts `traffic` bytes, and
    the states that it updates in place have `state_bytes`."""
    return max(1, math.ceil(COLD_BYTES / traffic), math.ceil(STATE_FOOTPRINT / state_bytes))


def nbytes(*tensors):
    """Bytes of the tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors)


def rand(*shape, dtype=torch.bfloat16, scale=1.0):
    """Values on the GPU from a normal distribution with standard deviation `scale`."""
    return (torch.randn(*shape, device="cuda", dtype=torch.float32) * scale).to(dtype)


def big_rand(*shape, dtype):
    """Standard normal values for whole pools, drawn in parts of about 2^26 values, since a float32
    copy of the pool could exceed the GPU's memory."""
    out = torch.empty(*shape, device="cuda", dtype=dtype)
    for part in out.split(max(1, (1 << 26) // max(1, out[0].numel()))):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.float32))
    return out


def slots(B, extra=1):
    """B slots in random order, int32; slot 0 stays free, since vLLM keeps it for padding."""
    return (torch.randperm(B, device="cuda") + extra).to(torch.int32)


def conv_update(B):
    """x, out [B, D]; conv_state [B + 1, D, W - 1] with channels contiguous; weight [D, W]."""
    D, W = CONV.D, CONV.W

    def make():
        s = SimpleNamespace(
            x=rand(B, D), weight=rand(D, W, scale=0.5), bias=rand(D, scale=0.5),
            out=torch.empty(B, D, device="cuda", dtype=torch.bfloat16),
            state=rand(B + 1, W - 1, D).transpose(1, 2), slots=slots(B))
        s.weight_by_tap = s.weight.t().contiguous().t()  # [D, W] too, with channels contiguous
        return s

    def reference(s, rows):
        history = s.state[s.slots[:rows].long()].double()
        window = torch.cat([history, s.x[:rows, :, None].double()], 2)
        y = (window * s.weight.double()).sum(2) + s.bias.double()
        return y * torch.sigmoid(y), window[:, :, 1:]

    one = make()
    state_bytes = B * D * (W - 1) * 2
    traffic = nbytes(one.x, one.out, one.weight, one.bias, one.slots) + 2 * state_bytes
    sets = [one] + [make() for _ in range(sets_needed(traffic, state_bytes) - 1)]
    name = f"B={B} D={D} W={W} bf16"
    return Case("causal_conv1d_update", name, "conv", B, traffic, sets, reference)


def ssu(B, dtype, H=SSU.H, P=SSU.P, N=SSU.N, G=SSU.G):
    """state [B + 1, H, P, N]; x, out [B, H, P]; dt [B, H]; A, D, dt_bias [H]; B, C [B, G, N]."""
    A = -torch.rand(H, device="cuda") * 4 - 0.5
    D16, dt_bias16 = rand(H), rand(H, scale=0.5) - 2
    D, dt_bias = D16.float(), dt_bias16.float()

    def make():
        return SimpleNamespace(
            x=rand(B, H, P), dt=rand(B, H), B=rand(B, G, N), C=rand(B, G, N), A=A, D=D,
            dt_bias=dt_bias, D16=D16, dt_bias16=dt_bias16,
            out=torch.empty(B, H, P, device="cuda", dtype=torch.bfloat16),
            state=big_rand(B + 1, H, P, N, dtype=dtype), slots=slots(B))

    def reference(s, rows):
        state = s.state[s.slots[:rows].long()].double()
        dt = torch.nn.functional.softplus(s.dt[:rows].double() + s.dt_bias.double())  # [r, H]
        x = s.x[:rows].double()
        Bh, Ch = (t[:rows].double().repeat_interleave(H // G, 1) for t in (s.B, s.C))  # [r, H, N]
        state = state * torch.exp(dt * s.A.double())[..., None, None]
        state = state + (dt[..., None] * x)[..., None] * Bh[:, :, None, :]
        return (state * Ch[:, :, None, :]).sum(-1) + x * s.D.double()[:, None], state

    one = make()
    state_bytes = B * H * P * N * one.state.element_size()
    traffic = 2 * state_bytes
    traffic += nbytes(one.x, one.out, one.dt, one.B, one.C, A, D, dt_bias, one.slots)
    sets = [one] + [make() for _ in range(sets_needed(traffic, state_bytes) - 1)]
    name = f"B={B} H={H} P={P} N={N} G={G} state {short(dtype)}"
    return Case("selective_state_update", name, "ssu", B, traffic, sets, reference)


def mamba1(B, dtype, D=MAMBA1.D, normed=False):
    """A Mamba1 layer's step between dt_proj and out_proj: x, z, dt, out [B, D]; vectors [B, R + 2 N], of
    which low [B, R], B and C [B, N] are parts, as x_proj leaves them; A [D, N]; skip, dt_bias [D]; state
    [B + 1, D, N]. With `normed`, B, C and low are RMS-normalised with weights; dt is what dt_proj makes of
    low as it is, and normed_dt what it makes of the normed one. Each set has weights of its own."""
    N, R, eps = MAMBA1.N, MAMBA1.R, 1e-6

    def make():
        vectors = rand(B, R + 2 * N)
        s = SimpleNamespace(
            x=rand(B, D), z=rand(B, D), dt=rand(B, D), low=vectors[:, :R], B=vectors[:, R:R + N], C=vectors[:, R + N:],
            A=-torch.rand(D, N, device="cuda") * 4 - 0.5, skip=rand(D, dtype=torch.float32),
            dt_bias=rand(D, dtype=torch.float32, scale=0.5) - 2, weight=1 + rand(N, scale=0.1),
            low_weight=1 + rand(R, scale=0.1), out=torch.empty(B, D, device="cuda", dtype=torch.bfloat16),
            state=big_rand(B + 1, D, N, dtype=dtype), slots=slots(B), vectors=vectors, eps=eps)
        s.normed_dt = (s.dt.double() * rstd(s.low)).to(torch.bfloat16)
        return s

    def rstd(v):
        return torch.rsqrt((v.double() ** 2).mean(-1, keepdim=True) + eps)

    def reference(s, rows):
        state = s.state[s.slots[:rows].long()].double()
        dt, Bs, C = (v[:rows].double() for v in (s.dt, s.B, s.C))
        if normed:
            dt = dt * rstd(s.low[:rows])
            Bs, C = (v * rstd(v) * s.weight.double() for v in (Bs, C))
        dt, x, z = torch.nn.functional.softplus(dt + s.dt_bias.double()), s.x[:rows].double(), s.z[:rows].double()
        state = state * torch.exp(dt[..., None] * s.A.double()) + (dt * x)[..., None] * Bs[:, None]
        return ((state * C[:, None]).sum(-1) + x * s.skip.double()) * z * torch.sigmoid(z), state

    one = make()
    state_bytes = B * D * N * one.state.element_size()
    traffic = 2 * state_bytes + nbytes(one.x, one.z, one.dt, one.out, one.vectors, one.A, one.skip, one.dt_bias, one.slots)
    sets = [one] + [make() for _ in range(max(8, sets_needed(traffic, state_bytes)) - 1)]
    name = f"B={B} D={D} N={N} state {short(dtype)}" + (", norms" if normed else "")
    return Case("mamba1_decode", name, "mamba1_normed" if normed else "mamba1", B, traffic, sets, reference)


def mamba1_prefill(lengths, D=MAMBA1.D, fresh=False):
    """Prompts through a Mamba1 layer's scan: x, z, dt, out [T, D]; vectors [T, R + 2 N], of which B and C are parts;
    state [rows + 1, D, N] float32, from which each row continues, or with `fresh` starts at 0. by_channel has what
    peers take: x, dt, z [D, T] and B, C [N, T], whose tokens are contiguous."""
    N, R, T, rows = MAMBA1.N, MAMBA1.R, sum(lengths), len(lengths)

    def make():
        vectors = rand(T, R + 2 * N)
        s = SimpleNamespace(
            x=rand(T, D), z=rand(T, D), dt=rand(T, D), B=vectors[:, R:R + N], C=vectors[:, R + N:],
            A=-torch.rand(D, N, device="cuda") * 4 - 0.5, skip=rand(D, dtype=torch.float32),
            dt_bias=rand(D, dtype=torch.float32, scale=0.5) - 2, state=big_rand(rows + 1, D, N, dtype=torch.float32),
            resumes=torch.full((rows,), not fresh, device="cuda"), fresh=fresh)
        s.by_channel = SimpleNamespace(**{name: getattr(s, name).t().contiguous() for name in ("x", "dt", "z", "B", "C")})
        return packed_rows(s, lengths)

    def reference(s, count):
        outs, states = [], []
        for n in range(count):
            begin, state = int(s.starts[n]), s.state[int(s.slots[n])].double() * (not fresh)
            for t in range(begin, begin + lengths[n]):
                x, z, C = s.x[t].double(), s.z[t].double(), s.C[t].double()
                d = torch.nn.functional.softplus(s.dt[t].double() + s.dt_bias.double())
                state = state * torch.exp(d[:, None] * s.A.double()) + (d * x)[:, None] * s.B[t].double()
                outs.append((state @ C + x * s.skip.double()) * z * torch.sigmoid(z))
            states.append(state)
        return torch.stack(outs), torch.stack(states)

    one = make()
    state_bytes = rows * D * N * 4
    traffic = 4 * nbytes(one.x) + 4 * T * N + (2 - fresh) * state_bytes + nbytes(one.A, one.skip, one.dt_bias)
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    name = f"{lengths_text(lengths)} D={D} N={N}{', from 0' if fresh else ''}"
    return Case("mamba1_prefill", name, "mamba1_prefill", rows, traffic, sets, reference)


def gdn_net(B, dtype, H=GDN.H, HV=GDN.HV, T=1):
    """A gated-delta-net layer's step between its projections, or the verification of T tokens a row: x [B T, D]
    with D = 2 H K + HV V, z, out [B T, HV, V]; a, b [B T, HV]; window [B T + 1, D, T + 2] with channels contiguous;
    state [B T + 1, HV, V, K]. table [B, T] has one slot per token; column 0 also holds the window, and the state
    before the first token."""
    K, V = GDN.K, GDN.V
    D = 2 * H * K + HV * V
    A_log = torch.log(torch.rand(HV, device="cuda") * 8 + 0.5)
    dt_bias = rand(HV, dtype=torch.float32, scale=0.5)
    weight, norm_weight = rand(D, 4, scale=0.5), 1 + rand(V, scale=0.1)

    def make():
        s = SimpleNamespace(
            x=rand(B * T, D), z=rand(B * T, HV, V), a=rand(B * T, HV) - 2, b=rand(B * T, HV), A_log=A_log, dt_bias=dt_bias,
            weight=weight, norm_weight=norm_weight, window=rand(B * T + 1, T + 2, D).transpose(1, 2),
            state=big_rand(B * T + 1, HV, V, K, dtype=dtype), table=slots(B * T).view(B, T),
            mixed=torch.empty(B * T, D, device="cuda", dtype=torch.bfloat16),
            o=torch.empty(B * T, HV, V, device="cuda", dtype=torch.bfloat16))
        s.out = torch.empty_like(s.o)
        s.slots = torch.empty(B, device="cuda", dtype=torch.int32).copy_(s.table[:, 0])
        s.starts = torch.arange(0, B * T + 1, T, device="cuda", dtype=torch.int32)
        s.accepted = torch.ones(B, device="cuda", dtype=torch.int32)
        return s

    def reference(s, rows):
        at = s.slots[:rows].long()
        x, z, a, b = (part.view(B, T, *part.shape[1:])[:rows].double() for part in (s.x, s.z, s.a, s.b))
        history, state = s.window[at][:, :, :3].double(), s.state[at].double()
        outs, states = [], []
        for t in range(T):
            history = torch.cat([history[:, :, -3:], x[:, t, :, None]], 2)
            y = (history * s.weight.double()).sum(2)
            y = (y * torch.sigmoid(y)).split([H * K, H * K, HV * V], 1)
            q, k = (unit(part.view(rows, H, K)).repeat_interleave(HV // H, 1) for part in y[:2])
            g = -torch.exp(A_log.double()) * torch.nn.functional.softplus(a[:, t] + dt_bias.double())
            state = state * torch.exp(g)[..., None, None]
            error = y[2].view(rows, HV, V) - (state * k[:, :, None, :]).sum(-1)
            state = state + (error * torch.sigmoid(b[:, t])[..., None])[..., None] * k[:, :, None, :]
            o = (state * (q * K**-0.5)[:, :, None, :]).sum(-1)
            o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-6) * norm_weight.double()
            outs.append(o * z[:, t] * torch.sigmoid(z[:, t]))
            states.append(state)
        return (outs[0], state) if T == 1 else (torch.stack(outs, 1), torch.stack(states, 1))

    one = make()
    state_bytes = B * HV * V * K * one.state.element_size()
    traffic = (1 + T) * state_bytes + B * D * (3 + T + 2) * 2
    traffic += nbytes(one.x, one.z, one.a, one.b, one.out, one.table, weight, norm_weight, A_log, dt_bias)
    sets = [one] + [make() for _ in range(sets_needed(traffic, state_bytes) - 1)]
    name = f"B={B} H={H} HV={HV} state {short(dtype)}"
    if T == 1:
        return Case("gated_delta_net_decode", name, "gdn_net", B, traffic, sets, reference)
    return Case("gated_delta_net_verify", f"T={T} {name}", "gdn_net_verify", B, traffic, sets, reference)


def mixer(B, dtype, H=SSU.H, P=SSU.P, N=SSU.N, G=SSU.G, T=1):
    """A Mamba2 layer's step between its projections, or the verification of T tokens a row: projected
    [B T, H P + C + H], C = H P + 2 G N, of which z [B T, H, P], x [B T, C] and dt [B T, H] are parts, as in_proj
    leaves them; window [B T + 1, C, T + 2] with channels contiguous; state [B T + 1, H, P, N]; out [B T, H, P]. table
    [B, T] has one slot per token; column 0 also holds the window, and the state before the first token. Each set has
    weights of its own."""
    inner, tokens = H * P, B * T
    C = inner + 2 * G * N

    def make():
        projected = rand(tokens, inner + C + H)
        s = SimpleNamespace(
            projected=projected, z=projected[:, :inner].unflatten(1, (H, P)), x=projected[:, inner:inner + C],
            dt=projected[:, inner + C:], weight=rand(C, 4, scale=0.5), bias=rand(C, scale=0.5),
            A=-torch.rand(H, device="cuda") * 4 - 0.5, D16=rand(H), dt_bias16=rand(H, scale=0.5) - 2,
            norm_weight=1 + rand(inner, scale=0.1), window=rand(tokens + 1, T + 2, C).transpose(1, 2),
            state=big_rand(tokens + 1, H, P, N, dtype=dtype), table=slots(tokens).view(B, T), groups=G, eps=1e-5,
            mixed=torch.empty(tokens, C, device="cuda", dtype=torch.bfloat16),
            out=torch.empty(tokens, H, P, device="cuda", dtype=torch.bfloat16))
        s.slots = torch.empty(B, device="cuda", dtype=torch.int32).copy_(s.table[:, 0])
        s.starts = torch.arange(0, tokens + 1, T, device="cuda", dtype=torch.int32)
        s.accepted = torch.ones(B, device="cuda", dtype=torch.int32)
        s.D, s.dt_bias = s.D16.float(), s.dt_bias16.float()
        s.ssu_x, s.B, s.C = (part.unflatten(1, (n, -1)) for part, n in zip(
            s.mixed.split([inner, G * N, G * N], 1), (H, G, G)))
        return s

    def reference(s, rows):
        at = s.slots[:rows].long()
        x, z, dt = (part.reshape(B, T, *part.shape[1:])[:rows].double() for part in (s.x, s.z, s.dt))
        dt = torch.nn.functional.softplus(dt + s.dt_bias.double())
        history, state = s.window[at][:, :, :3].double(), s.state[at].double()
        outs, states = [], []
        for t in range(T):
            history = torch.cat([history[:, :, -3:], x[:, t, :, None]], 2)
            y = (history * s.weight.double()).sum(2) + s.bias.double()
            v, Bs, Cs = (y * torch.sigmoid(y)).split([inner, G * N, G * N], 1)
            v = v.view(rows, H, P)
            Bs, Cs = (one.view(rows, G, N).repeat_interleave(H // G, 1) for one in (Bs, Cs))
            state = state * torch.exp(dt[:, t] * s.A.double())[..., None, None]
            state = state + (dt[:, t, :, None] * v)[..., None] * Bs[:, :, None, :]
            y = ((state * Cs[:, :, None, :]).sum(-1) + v * s.D.double()[:, None]) * z[:, t] * torch.sigmoid(z[:, t])
            y = y.reshape(rows, G, -1)
            y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + s.eps) * s.norm_weight.double().view(G, -1)
            outs.append(y.reshape(rows, H, P))
            states.append(state)
        return (outs[0], state) if T == 1 else (torch.stack(outs, 1), torch.stack(states, 1))

    one = make()
    state_bytes = B * H * P * N * one.state.element_size()
    traffic = (1 + T) * state_bytes + B * C * (3 + T + 2) * 2
    traffic += nbytes(one.projected, one.out, one.table, one.weight, one.bias, one.norm_weight, one.A, one.D, one.dt_bias)
    sets = [one] + [make() for _ in range(max(8, sets_needed(traffic, state_bytes)) - 1)]
    name = f"B={B} H={H} P={P} N={N} G={G} state {short(dtype)}"
    if T == 1:
        return Case("mamba2_mixer_decode", name, "mixer", B, traffic, sets, reference)
    return Case("mamba2_mixer_verify", f"T={T} {name}", "mixer_verify", B, traffic, sets, reference)


RING = 16  # tokens of a window


def whole_rings(B, layers, make, more, worst):
    """A set for each of the 16 steps of a window and each layer: the layer's tensors with the
    step's cursors, so that over a rotation every row is at every place of its ring once. With
    `worst` there is one set per layer, and every row is at the end of its window. more(cursors,
    slots) returns the further arguments that a peer takes."""
    made = [make() for _ in range(layers)]
    rows = torch.arange(B, device="cuda")
    sets = []
    for step in range(1 if worst else RING):
        places = torch.zeros_like(rows) if worst else 7 * rows + step
        cursors = ((RING - 1 + places) % RING).to(torch.int32)
        for layer in made:
            sets.append(SimpleNamespace(**vars(layer), cursors=cursors, positions=cursors,
                                        **more(cursors, layer.slots)))
    return sets


def ring_layers(traffic):
    """The number of layers at which no layer is in L2 when its turn comes again, and no two
    consecutive launches use the same layer."""
    return max(2, math.ceil(COLD_BYTES / traffic))


def ring_bytes(state_bytes, entry, worst):
    """Bytes of states and rings that a step reads and writes: the mean over the 16 steps, or those
    of a step that flushes every row. `entry` has the bytes of one ring entry of all rows."""
    if worst:
        return 2 * state_bytes + (RING - 1) * entry
    return int(state_bytes * (1 + 1 / RING) + entry * ((RING - 1) / 2 + (RING - 1) / RING))


def ring_text(worst):
    """The part of a case's name that tells the ring."""
    return f", ring of {RING}" + (", every row flushes" if worst else "")


def ssu_ring(B, dtype, H=SSU.H, P=SSU.P, N=SSU.N, G=SSU.G, worst=False):
    """selective_state_update with a ring of 16 pending tokens: the state is written once in 16
    tokens. The inputs of ssu(), and ring_x [B + 1, H, 16, P], ring_B [B + 1, G, 16, N] and ring_dt
    [B + 1, H, 16] float32. Counted bytes are the mean over the 16 steps; with `worst` every row
    writes its state in every launch."""
    A = -torch.rand(H, device="cuda") * 4 - 0.5
    D, dt_bias = rand(H, dtype=torch.float32), rand(H, dtype=torch.float32, scale=0.5) - 2

    def make():
        return SimpleNamespace(
            x=rand(B, H, P), dt=rand(B, H), B=rand(B, G, N), C=rand(B, G, N), A=A, D=D, dt_bias=dt_bias,
            out=torch.empty(B, H, P, device="cuda", dtype=torch.bfloat16),
            state=big_rand(B + 1, H, P, N, dtype=dtype), ring_x=rand(B + 1, H, RING, P),
            ring_B=rand(B + 1, G, RING, N), ring_dt=rand(B + 1, H, RING, dtype=torch.float32).abs() * 0.1,
            slots=slots(B))

    def reference(s, rows):
        at = s.slots[:rows].long()
        live = s.cursors[:rows].long()
        head = torch.arange(H, device="cuda") // (H // G)
        dt = torch.nn.functional.softplus(s.dt[:rows].double() + dt_bias.double())  # [r, H]
        x = torch.cat([s.ring_x[at].double(), s.x[:rows, :, None].double()], 2)  # [r, H, 17, P]
        Bs = torch.cat([s.ring_B[at].double(), s.B[:rows, :, None].double()], 2)[:, head]  # [r, H, 17, N]
        C = s.C[:rows].double()[:, head]
        place = torch.arange(RING + 1, device="cuda")
        counts = (place < live[:, None]) | (place == RING)  # the last one is the token's
        d = torch.cat([s.ring_dt[at].double(), dt[..., None]], 2).where(counts[:, None], 0)  # [r, H, 17]
        log = d * A.double()[:, None]
        since = log.flip(2).cumsum(2).flip(2)
        weight = torch.exp(since - log) * d * (Bs * C[:, :, None]).sum(3)
        y = torch.exp(since[:, :, 0, None]) * (s.state[at].double() * C[:, :, None]).sum(3)
        y = y + (weight[..., None] * x).sum(2) + x[:, :, RING] * D.double()[:, None]
        return (y,)

    one = make()
    state_bytes = B * H * P * N * one.state.element_size()
    traffic = ring_bytes(state_bytes, B * (H * P * 2 + G * N * 2 + H * 4), worst)
    traffic += nbytes(one.x, one.out, one.dt, one.B, one.C, A, D, dt_bias, one.slots)
    del one
    bc = torch.empty(B, G, RING, device="cuda", dtype=torch.float32)  # vLLM's scratch
    flashinfer = SimpleNamespace(  # FlashInfer's scratch; its rings may begin anywhere, here at entry 0
        new=torch.empty(B, H, 32, 8, device="cuda", dtype=torch.bfloat16),
        decay=torch.empty(B, H, 16, device="cuda", dtype=torch.float32),
        old=torch.empty(B, H, 32, 8, device="cuda", dtype=torch.bfloat16),
        begin=torch.zeros(B + 1, device="cuda", dtype=torch.int32))

    def more(cursors, slots):
        of_slot = torch.zeros(B + 1, device="cuda", dtype=torch.int32)
        of_slot[slots.long()] = cursors
        return {"flushes": cursors == RING - 1, "scratch": bc, "flashinfer": flashinfer, "live_of_slot": of_slot}

    sets = whole_rings(B, ring_layers(traffic), make, more, worst)
    name = f"B={B} H={H} P={P} N={N} G={G} state {short(dtype)}{ring_text(worst)}"
    return Case("selective_state_ring", name, "ssu_ring", B, traffic, sets, reference)


def gdn_ring(B, dtype, H=GDN.H, HV=GDN.HV, K=GDN.K, V=GDN.V, worst=False):
    """gated_delta_rule_update with a ring of 16 pending tokens: the state is written once in 16
    tokens. ring_k [B + 1, H, 16, K]; ring_k_scale [B + 1, H, 16] float32; ring_u [B + 1, HV, 16, V]
    in the states' type; ring_g [B + 1, HV, 16] float32. Counted bytes are those of ssu_ring()."""
    A_log = torch.log(torch.rand(HV, device="cuda") * 8 + 0.5)
    dt_bias = rand(HV, dtype=torch.float32, scale=0.5)

    def make():
        q, k, v = rand(B, H, K), rand(B, H, K), rand(B, HV, V)
        a, b = rand(B, HV) - 2, rand(B, HV)
        g = -torch.exp(A_log) * torch.nn.functional.softplus(a.float() + dt_bias)
        ring_k = rand(B + 1, H, RING, K)
        return SimpleNamespace(
            q=q, k=k, v=v, a=a, b=b, g=g, beta=torch.sigmoid(b.float()), A_log=A_log, dt_bias=dt_bias,
            state=big_rand(B + 1, HV, V, K, dtype=dtype), ring_k=ring_k,
            ring_k_scale=1 / torch.sqrt((ring_k.float() ** 2).sum(-1) + 1e-6),
            ring_u=rand(B + 1, HV, RING, V, dtype=dtype),
            ring_g=-rand(B + 1, HV, RING, dtype=torch.float32).abs() * 0.1, slots=slots(B),
            mixed=torch.cat([q.reshape(B, -1), k.reshape(B, -1), v.reshape(B, -1)], 1),
            out=torch.empty(B, 1, HV, V, device="cuda", dtype=torch.bfloat16))

    def reference(s, rows):
        at = s.slots[:rows].long()
        live = s.cursors[:rows].long()
        head = torch.arange(HV, device="cuda") // (HV // H)
        place = torch.arange(RING, device="cuda")
        counts = (place < live[:, None])[:, None]  # [r, 1, 16]
        log = torch.cat([s.ring_g[at].double().where(counts, 0), s.g[:rows, :, None].double()], 2)
        since = log.flip(2).cumsum(2).flip(2)  # [r, HV, 17]
        keys = (s.ring_k[at].double() * s.ring_k_scale[at].double()[..., None])[:, head]  # [r, HV, 16, K]
        weight = torch.exp(since - log)[:, :, :RING].where(counts, 0)
        q, k = (unit(x[:rows].double())[:, head] for x in (s.q, s.k))  # [r, HV, K]
        state = torch.exp(since[:, :, 0])[..., None, None] * s.state[at].double()
        state = state + torch.einsum("bhl,bhlv,bhlk->bhvk", weight, s.ring_u[at].double(), keys)
        u = s.beta[:rows].double()[..., None] * (s.v[:rows].double() - (state * k[:, :, None]).sum(3))
        state = state + u[..., None] * k[:, :, None]
        return ((state * q[:, :, None]).sum(3) * K**-0.5,)

    one = make()
    state_bytes = B * HV * V * K * one.state.element_size()
    entry = B * (H * (K * 2 + 4) + HV * (V * one.state.element_size() + 4))
    traffic = ring_bytes(state_bytes, entry, worst)
    traffic += nbytes(one.q, one.k, one.v, one.g, one.beta, one.slots, one.out)
    del one
    sets = whole_rings(B, ring_layers(traffic), make, lambda cursors, slots: {}, worst)
    name = f"B={B} H={H} HV={HV} K={K} V={V} state {short(dtype)}{ring_text(worst)}"
    return Case("gated_delta_rule_ring", name, "gdn_ring", B, traffic, sets, reference)


# Lengths of a mixed batch of prompts, 8,175 tokens.
MIXED = (17, 2048, 300, 1, 900, 64, 1500, 128, 33, 777, 1200, 400, 63, 65, 600, 79)


def packed_rows(s, lengths):
    """Gives the set `s` the rows of a packed batch: lengths, starts [N + 1] and slots [N]."""
    s.lengths = tuple(lengths)
    s.starts = torch.tensor((0, *lengths), device="cuda").cumsum(0).to(torch.int32)
    s.slots = slots(len(lengths))
    return s


def lengths_text(lengths):
    """The lengths in a case's name: "T=8192", "8x1024" or "16 rows, T=8175"."""
    if len(lengths) == 1:
        return f"T={lengths[0]}"
    if len(set(lengths)) == 1:
        return f"{len(lengths)}x{lengths[0]}"
    return f"{len(lengths)} rows, T={sum(lengths)}"


def conv_prefill(lengths, D=CONV.D):
    """x, out [T, D] packed; conv_state [N + 1, D, W - 1] with channels contiguous."""
    W, T, N = CONV.W, sum(lengths), len(lengths)

    def make():
        s = SimpleNamespace(x=rand(T, D), weight=rand(D, W, scale=0.5), bias=rand(D, scale=0.5),
                            state=rand(N + 1, W - 1, D).transpose(1, 2))
        return packed_rows(s, lengths)

    def reference(s, rows):
        outs, states = [], []
        for n in range(rows):
            begin = int(s.starts[n])
            history = s.state[int(s.slots[n])].t()
            window = torch.cat([history, s.x[begin:begin + lengths[n]]]).double()
            y = sum(window[k:k + lengths[n]] * s.weight[:, k].double() for k in range(W))
            y = y + s.bias.double()
            outs.append(y * torch.sigmoid(y))
            states.append(window[-(W - 1):].t())
        return torch.cat(outs), torch.stack(states)

    one = make()
    state_bytes = N * D * (W - 1) * 2
    traffic = 2 * nbytes(one.x) + nbytes(one.weight, one.bias) + 2 * state_bytes
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    name = f"{lengths_text(lengths)} D={D} W={W} bf16"
    return Case("causal_conv1d", name, "conv_prefill", N, traffic, sets, reference)


def boundaries(s, lengths, every, shape):
    """Gives the set `s` room for the states after every `every` tokens of each row, which a prefix
    cache keeps; every = 0: no such states."""
    s.every, count = every, sum(n // every for n in lengths) if every else 0
    s.boundary = torch.empty(count, *shape, device="cuda", dtype=torch.float32) if every else None
    return s


def ssd_prefill(lengths, H=SSU.H, G=SSU.G, gated=False, slow=False, every=0):
    """x, z, out [T, H, P] packed; dt [T, H]; B, C [T, G, N]; state [R + 1, H, P, N] float32 for R
    rows. A is between -4.5 and -0.5; with `slow` it is a hundredth of that, and states hardly
    decay."""
    P, N, T, R = SSU.P, SSU.N, sum(lengths), len(lengths)
    A = (-torch.rand(H, device="cuda") * 4 - 0.5) * (0.01 if slow else 1)
    D, dt_bias = rand(H, dtype=torch.float32), rand(H, dtype=torch.float32, scale=0.5) - 2

    def make():
        s = SimpleNamespace(
            x=rand(T, H, P), dt=rand(T, H), B=rand(T, G, N), C=rand(T, G, N), A=A, D=D,
            dt_bias=dt_bias, z=rand(T, H, P) if gated else None,
            out=torch.empty(T, H, P, device="cuda", dtype=torch.bfloat16),
            state=big_rand(R + 1, H, P, N, dtype=torch.float32))
        return packed_rows(boundaries(s, lengths, every, (H, P, N)), lengths)

    def reference(s, rows):
        outs, states = [], []
        for n in range(rows):
            begin = int(s.starts[n])
            y, state = ssd_in_float64(s, slice(begin, begin + lengths[n]), int(s.slots[n]))
            outs.append(y)
            states.append(state)
        return torch.cat(outs), torch.stack(states)

    one = make()
    state_bytes = R * H * P * N * 4
    traffic = nbytes(one.x, one.out, one.dt, one.B, one.C) + 2 * state_bytes
    traffic += (nbytes(one.z) if gated else 0) + (nbytes(one.boundary) if every else 0)
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    more = (", z" if gated else "") + (", slow gates" if slow else "") + states_text(every)
    name = f"{lengths_text(lengths)} H={H} P={P} N={N} G={G}{more}"
    return Case("ssd_prefill", name, "ssd_prefill", R, traffic, sets, reference)


def ssd_in_float64(s, tokens, slot, chunk=64):
    """Outputs and last state of one row, in chunks, by the equations of
    reference/recurrent/mamba2.hpp."""
    H, G = s.x.shape[1], s.B.shape[1]
    state, outs = s.state[slot].double(), []
    for begin in range(tokens.start, tokens.stop, chunk):
        part = slice(begin, min(begin + chunk, tokens.stop))
        x = s.x[part].double().transpose(0, 1)  # [H, L, P]
        B, C = (t[part].double().transpose(0, 1).repeat_interleave(H // G, 0) for t in (s.B, s.C))
        d = torch.nn.functional.softplus(s.dt[part].double() + s.dt_bias.double()).t()  # [H, L]
        a = (d * s.A.double()[:, None]).cumsum(1)
        later = torch.ones(a.shape[1], a.shape[1], device="cuda", dtype=torch.bool).triu(1)
        decay = torch.exp((a[:, :, None] - a[:, None, :]).masked_fill(later, -math.inf))
        y = (C @ B.transpose(1, 2) * decay * d[:, None, :]) @ x
        y += torch.exp(a)[:, :, None] * (C @ state.transpose(1, 2))
        y += s.D.double()[:, None, None] * x
        if s.z is not None:
            y *= torch.nn.functional.silu(s.z[part].double().transpose(0, 1))
        outs.append(y.transpose(0, 1))
        w = d * torch.exp(a[:, -1:] - a)
        state = torch.exp(a[:, -1])[:, None, None] * state
        state += (x * w[:, :, None]).transpose(1, 2) @ B
    return torch.cat(outs), state


def delta_rule_in_float64(s, tokens, slot, chunk=64):
    """Outputs and last state of one row, in chunks, by the equations of
    reference/recurrent/gated_delta_rule.hpp."""
    H, K, HV = s.k.shape[1], s.k.shape[2], s.v.shape[1]
    state, outs = s.state[slot].double(), []  # [HV, V, K]
    for begin in range(tokens.start, tokens.stop, chunk):
        part = slice(begin, min(begin + chunk, tokens.stop))
        q, k = (unit(t[part].double()).transpose(0, 1).repeat_interleave(HV // H, 0)
                for t in (s.q, s.k))  # [HV, L, K]
        v, beta = s.v[part].double().transpose(0, 1), s.beta[part].double().t()[:, :, None]
        G = s.g[part].double().t().cumsum(1)  # [HV, L]
        later = torch.ones(G.shape[1], G.shape[1], device=G.device, dtype=torch.bool).triu(1)
        decay = torch.exp((G[:, :, None] - G[:, None, :]).masked_fill(later, -math.inf))
        from_start = torch.exp(G)[:, :, None]
        A = (beta * (k @ k.transpose(1, 2)) * decay).tril(-1)
        new = torch.linalg.solve_triangular(
            A, beta * (v - from_start * (k @ state.transpose(1, 2))), upper=False,
            unitriangular=True)
        out = from_start * (q @ state.transpose(1, 2)) + (q @ k.transpose(1, 2) * decay) @ new
        outs.append(out.transpose(0, 1) * K**-0.5)
        state = torch.exp(G[:, -1])[:, None, None] * state
        state += (torch.exp(G[:, -1:] - G)[:, :, None] * new).transpose(1, 2) @ k
    return torch.cat(outs), state


def states_text(every):
    """The part of a case's name that tells the distance of the kept states."""
    return f", states every {every}" if every else ""


def gdn_prefill(lengths, H=GDN.H, HV=GDN.HV, slow=False, every=0):
    """q, k [T, H, K]; v, out [T, HV, V] packed; g, beta [T, HV]; state [N + 1, HV, V, K] float32.
    exp(A_log) is between 0.5 and 8.5; with `slow` between 0.001 and 0.05, and states hardly
    decay."""
    K, V, T, N = GDN.K, GDN.V, sum(lengths), len(lengths)
    low, high = (0.001, 0.05) if slow else (0.5, 8.5)
    A = torch.rand(HV, device="cuda") * (high - low) + low
    dt_bias = rand(HV, dtype=torch.float32, scale=0.5)

    def make():
        a, b = rand(T, HV) - 2, rand(T, HV)
        s = SimpleNamespace(
            q=rand(T, H, K), k=rand(T, H, K), v=rand(T, HV, V),
            g=-A * torch.nn.functional.softplus(a.float() + dt_bias), beta=torch.sigmoid(b.float()),
            out=torch.empty(T, HV, V, device="cuda", dtype=torch.bfloat16),
            state=big_rand(N + 1, HV, V, K, dtype=torch.float32))
        return packed_rows(boundaries(s, lengths, every, (HV, V, K)), lengths)

    def reference(s, rows):
        outs, states = [], []
        for n in range(rows):
            begin = int(s.starts[n])
            out, state = delta_rule_in_float64(s, slice(begin, begin + lengths[n]), int(s.slots[n]))
            outs.append(out)
            states.append(state)
        return torch.cat(outs), torch.stack(states)

    one = make()
    state_bytes = N * HV * V * K * 4
    traffic = nbytes(one.q, one.k, one.v, one.out, one.g, one.beta) + 2 * state_bytes
    traffic += nbytes(one.boundary) if every else 0
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    more = (", slow gates" if slow else "") + states_text(every)
    name = f"{lengths_text(lengths)} H={H} HV={HV} K=V={K}{more}"
    return Case("gated_delta_rule_prefill", name, "gdn_prefill", N, traffic, sets, reference)


def layer(prefill, lengths):
    """A convolution, the prefill that reads its output, and the next layer's convolution, in the
    order in which a server launches them. A set has the sets `conv`, `core` and `next` of the
    three; into(core, y) replaces the core's inputs by views of y, the first convolution's
    output."""
    if prefill == "gdn":
        core, kind = gdn_prefill(lengths), "layer_gdn"
        parts = (("q", GDN.H, GDN.K), ("k", GDN.H, GDN.K), ("v", GDN.HV, GDN.V))
    else:
        core, kind = ssd_prefill(lengths), "layer_ssd"
        parts = (("x", SSU.H, SSU.P), ("B", SSU.G, SSU.N), ("C", SSU.G, SSU.N))
    D = sum(heads * extent for _, heads, extent in parts)
    convs, nexts = conv_prefill(lengths, D), conv_prefill(lengths, D)
    count = min(len(core.sets), len(convs.sets))

    def into(inputs, y):
        at = 0
        for name, heads, extent in parts:
            setattr(inputs, name, y[:, at:at + heads * extent].unflatten(1, (heads, extent)))
            at += heads * extent
        return inputs

    def reference(s, rows):
        y = convs.reference(s.conv, rows)[0].to(torch.bfloat16)
        return core.reference(into(SimpleNamespace(**vars(s.core)), y), rows)

    sets = [SimpleNamespace(conv=a, core=b, next=c, into=into, slots=b.slots, starts=b.starts)
            for a, b, c in zip(convs.sets[:count], core.sets[:count], nexts.sets[:count])]
    name = f"convolution, {core.name}, next convolution D={D}"
    return Case(core.operation, name, kind, core.B, core.bytes + convs.bytes + nexts.bytes, sets, reference)


def gdn(B, dtype, T=1, H=GDN.H, HV=GDN.HV, K=GDN.K, V=GDN.V):
    """q, k [B, T, H, K]; v, out [B, T, HV, V]; g, beta [B, T, HV], and the raw a, b that they are
    computed from; state [B T + 1, HV, V, K]. table [B, T] has one slot per token; column 0 also
    holds the state before the first token.
    """
    A_log = torch.log(torch.rand(HV, device="cuda") * 8 + 0.5)
    dt_bias = rand(HV, dtype=torch.float32, scale=0.5)

    def make():
        q, k, v = rand(B, T, H, K), rand(B, T, H, K), rand(B, T, HV, V)
        a, b = rand(B, T, HV) - 2, rand(B, T, HV)
        g = -torch.exp(A_log) * torch.nn.functional.softplus(a.float() + dt_bias)
        s = SimpleNamespace(q=q, k=k, v=v, a=a, b=b, g=g, beta=torch.sigmoid(b.float()),
                            A_log=A_log, dt_bias=dt_bias, out=torch.empty_like(v),
                            state=big_rand(B * T + 1, HV, V, K, dtype=dtype))
        s.starts = torch.arange(0, B * T + 1, T, device="cuda", dtype=torch.int32)
        s.table = slots(B * T).view(B, T)
        s.slots = torch.empty(B, device="cuda", dtype=torch.int32).copy_(s.table[:, 0])
        s.accepted = torch.ones(B, device="cuda", dtype=torch.int32)
        if T == 1:
            s.mixed = torch.cat([q.reshape(B, -1), k.reshape(B, -1), v.reshape(B, -1)], 1)
        return s

    def reference(s, rows):
        state = s.state[s.slots[:rows].long()].double()  # [r, HV, V, K]
        outs, states = [], []
        for t in range(T):
            q, k = (unit(x[:rows, t].double()).repeat_interleave(HV // H, 1) for x in (s.q, s.k))
            state = state * torch.exp(s.g[:rows, t].double())[..., None, None]
            error = s.v[:rows, t].double() - (state * k[:, :, None, :]).sum(-1)
            error = error * s.beta[:rows, t].double()[..., None]
            state = state + error[..., None] * k[:, :, None, :]
            outs.append((state * (q * K**-0.5)[:, :, None, :]).sum(-1))
            states.append(state)
        return torch.stack(outs, 1), torch.stack(states, 1)

    one = make()
    state_bytes = B * HV * V * K * one.state.element_size()
    traffic = (1 + T) * state_bytes
    traffic += nbytes(one.q, one.k, one.v, one.g, one.beta, one.out, one.table)
    sets = [one] + [make() for _ in range(sets_needed(traffic, T * state_bytes) - 1)]
    tokens = f" T={T}" if T > 1 else ""
    width = f"K=V={K}" if K == V else f"K={K} V={V}"
    name = f"B={B}{tokens} H={H} HV={HV} {width} state {short(dtype)}"
    kind = "gdn" if T == 1 else "gdn_verify"
    return Case("gated_delta_rule_update", name, kind, B, traffic, sets, reference)


def gdn_replay(B, dtype, folded, T=4):
    """A verification that keeps no state per token: B rows of T tokens only read the state, and a
    commit replays the first 1 ... T of them. The commit is a launch of its own or, with `folded`,
    runs at the beginning of the next verification; it then takes k, v, g and beta of the
    verification before, which are in `before`."""
    case = gdn(B, dtype, T)
    verify = case.reference
    state_bytes = B * GDN.HV * GDN.V * GDN.K * case.sets[0].state.element_size()
    for s in case.sets:
        s.committed = (torch.arange(B, device="cuda") % T + 1).to(torch.int32)
        if folded:
            s.before = SimpleNamespace(k=rand(*s.k.shape), v=rand(*s.v.shape),
                                       g=s.g.roll(1, 0).contiguous(),
                                       beta=s.beta.roll(1, 0).contiguous())

    def reference(s, rows):
        last = (s.committed[:rows] - 1).long()
        if not folded:
            out, states = verify(s, rows)
            return out, states[torch.arange(rows, device="cuda"), last]
        step = SimpleNamespace(**vars(s))
        step.k, step.v, step.g, step.beta = s.before.k, s.before.v, s.before.g, s.before.beta
        states = verify(step, rows)[1]
        committed = states[torch.arange(rows, device="cuda"), last]
        then = SimpleNamespace(**vars(s))
        then.state, then.slots = committed, torch.arange(rows, device="cuda")
        return verify(then, rows)[0], committed

    traffic = case.bytes - (1 + T) * state_bytes + (2 if folded else 3) * state_bytes
    how = "commit folded into the next" if folded else "verify and commit"
    name = f"{case.name}, replay: {how}"
    kind = "gdn_fold" if folded else "gdn_replay"
    return Case("gated_delta_rule_update", name, kind, B, traffic, case.sets, reference)


def unit(x):
    """x / sqrt(sum of squares + 1e-6) over the last dimension, the kernels' L2 norm."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def state_copy(elements):
    """state [layers, slots, elements] bf16; source and target [rows] are disjoint sets of slots."""
    L, S, R = POOL.layers, POOL.slots, POOL.rows

    def make():
        order = torch.randperm(S, device="cuda")
        s = SimpleNamespace(state=big_rand(L, S, elements, dtype=torch.bfloat16),
                            source=order[:R].contiguous(), target=order[R:2 * R].contiguous())
        s.source32, s.target32 = s.source.to(torch.int32), s.target.to(torch.int32)
        return s

    def reference(s, rows):
        moved = s.state[:, s.source[:rows]].double()
        return moved, moved

    traffic = 2 * L * R * elements * 2
    sets = [make() for _ in range(max(1, math.ceil(COLD_BYTES / traffic)))]
    size = elements * 2
    text = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
    name = f"{L} layers x {R} of {S} slots of {text} bf16"
    return Case("state_copy", name, "copy", R, traffic, sets, reference)


def latent_attention(s, rows, latents_of):
    """Outputs [rows, 1, H, 512] and logarithms of the softmax's sums [rows, H, 1], of one query
    token per row, in float64; latents_of(pages) decodes a row's cache pages into latents [L,
    576]."""
    outs, sums = [], []
    for b in range(rows):
        keys = latents_of(s.cache[s.table[b].long()])
        scores = s.scale * (s.q[b, 0].double() @ keys.t())
        outs.append((torch.softmax(scores, 1) @ keys[:, :MLA.values])[None])
        sums.append(torch.logsumexp(scores, 1)[:, None])
    return torch.stack(outs), torch.stack(sums)


def mla_decode(H, B, L, page=MLA.page):
    """q [B, 1, H, 576]; cache [pages, page, 576], whose pages `table` [B, L / page] gives to
    requests in random order; lengths [B], each of them L."""
    blocks, scale = L // page, MLA.scale

    def make():
        table = torch.randperm(B * blocks, device="cuda").to(torch.int32).view(B, blocks)
        return SimpleNamespace(
            q=rand(B, 1, H, MLA.width), cache=big_rand(B * blocks, page, MLA.width, dtype=torch.bfloat16),
            table=table, lengths=torch.full((B,), L, device="cuda", dtype=torch.int32), scale=scale,
            out=torch.empty(B, 1, H, MLA.values, device="cuda", dtype=torch.bfloat16))

    def reference(s, rows):
        return latent_attention(s, rows, lambda pages: pages.flatten(0, 1).double())

    one = make()
    traffic = nbytes(one.q, one.cache, one.table, one.lengths, one.out) + B * H * 4
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    name = f"H={H} B={B} L={L}" + (f", pages of {page}" if page != MLA.page else "")
    return Case("mla_decode", name, "mla_decode", B, traffic, sets, reference,
                2 * B * H * L * (MLA.width + MLA.values))


def latents(stored, form, kv_scale):
    """float64 latents [tokens, 576] of the cache pages `stored`. form "e4m3": numbers times
    kv_scale; "token656": bytes in the layout of reference/contract.md."""
    flat = stored.flatten(0, 1)
    if form == "e4m3":
        return flat.double() * kv_scale
    values = flat[:, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
    scales = flat[:, 512:528].contiguous().view(torch.float32).double()
    rope = flat[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat([(values * scales[..., None]).flatten(1), rope], 1)


def mla_decode_fp8(form, H, B, L, operation="mla_decode"):
    """mla_decode() over caches in e4m3: numbers with one scale, or tokens of 656 bytes with scales
    that are powers of two, like FlashMLA's. Queries are e4m3 numbers times 1/16, because some peers
    take no other queries. `operation` "mla_decode_e4m3": products are in e4m3 too."""
    blocks, scale = L // MLA.page, MLA.scale
    kv_scale, q_scale = 0.02, 1 / 16

    def make():
        pages = B * blocks
        numbers = big_rand(pages, MLA.page, MLA.width, dtype=torch.bfloat16)
        if form == "e4m3":
            cache = (numbers / kv_scale).to(torch.float8_e4m3fn)
        else:
            cache = torch.empty(pages, MLA.page, 656, device="cuda", dtype=torch.uint8)
            cache[..., :512] = (numbers[..., :512] * 64).to(torch.float8_e4m3fn).view(torch.uint8)
            cache[..., 512:528].view(torch.float32).fill_(1 / 64)
            cache[..., 528:] = numbers[..., 512:].contiguous().view(torch.uint8)
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(B, blocks)
        q8 = (rand(B, 1, H, MLA.width, dtype=torch.float32) / q_scale).to(torch.float8_e4m3fn)
        tokens = (table.long()[:, :, None] * MLA.page + torch.arange(MLA.page, device="cuda")).view(B, 1, L)
        return SimpleNamespace(
            q=(q8.float() * q_scale).to(torch.bfloat16), q8=q8, cache=cache, table=table, form=form,
            kv_scale=torch.tensor([kv_scale], device="cuda") if form == "e4m3" else None,
            q_scale=torch.tensor([q_scale], device="cuda"), tokens=tokens.to(torch.int32),
            lengths=torch.full((B,), L, device="cuda", dtype=torch.int32), scale=scale,
            out=torch.empty(B, 1, H, MLA.values, device="cuda", dtype=torch.bfloat16))

    def reference(s, rows):
        return latent_attention(s, rows, lambda pages: latents(pages, form, kv_scale))

    one = make()
    traffic = nbytes(one.q, one.cache, one.table, one.lengths, one.out) + B * H * 4
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    return Case(operation, f"{form} H={H} B={B} L={L}", "mla_decode_fp8", B, traffic, sets, reference,
                2 * B * H * L * (MLA.width + MLA.values) // (2 if operation == "mla_decode_e4m3" else 1))


def mla_prefill(H, lengths, chunk=0):
    """q [T, H, 192] of packed rows, k [L, H, 192] and v [L, H, 128]. Without `chunk` keys are those
    of the rows, and attention is causal; with it they are `chunk` tokens of each row's prefix, and
    every query of the row sees all of them."""
    T, N = sum(lengths), len(lengths)
    keys = [chunk or n for n in lengths]
    L, causal = sum(keys), chunk == 0
    starts, key_starts = (torch.tensor((0, *n), device="cuda").cumsum(0).to(torch.int32) for n in (lengths, keys))

    def make():
        return SimpleNamespace(
            q=rand(T, H, PROMPT.width), k=rand(L, H, PROMPT.width), v=rand(L, H, PROMPT.values), starts=starts,
            key_starts=key_starts, longest=max(lengths), longest_keys=max(keys), causal=causal, scale=MLA.scale,
            tokens=torch.cat([torch.arange(T)[:48], torch.randperm(T)[:96], torch.arange(T)[-48:]]).to("cuda"),
            heads=torch.tensor([0, H // 2, H - 1], device="cuda"),
            out=torch.empty(T, H, PROMPT.values, device="cuda", dtype=torch.bfloat16))

    def reference(s, rows):
        """out [tokens, heads, 128] and lse [heads, tokens] of the set's sampled tokens and
        heads."""
        del rows
        row = torch.searchsorted(starts, s.tokens.int(), right=True) - 1
        last = key_starts[row + 1] - (starts[row + 1] - s.tokens - 1 if causal else 0)  # behind the visible keys
        key = torch.arange(L, device="cuda")
        hidden = (key[None] < key_starts[row][:, None]) | (key[None] >= last[:, None])
        outs, sums = [], []
        for h in s.heads.tolist():
            scores = MLA.scale * (s.q[s.tokens, h].double() @ s.k[:, h].double().t())
            scores = scores.masked_fill(hidden, float("-inf"))
            outs.append(torch.softmax(scores, 1) @ s.v[:, h].double())
            sums.append(torch.logsumexp(scores, 1))
        return torch.stack(outs, 1), torch.stack(sums)

    one = make()
    traffic = nbytes(one.q, one.k, one.v, one.out, starts, key_starts) + H * T * 4
    sets = [one] + [make() for _ in range(sets_needed(traffic, STATE_FOOTPRINT) - 1)]
    pairs = sum(n * chunk if chunk else n * (n + 1) // 2 for n in lengths)
    name = f"H={H} {lengths_text(lengths)}" + (f" over {chunk} of a prefix" if chunk else "")
    return Case("mla_prefill", name, "mla_prefill", N, traffic, sets, reference,
                2 * H * pairs * (PROMPT.width + PROMPT.values))


def short(dtype):
    """The type's name in cases: "fp32" or "bf16"."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


# Lengths of the rows and further arguments of ssd_prefill(). H = 16 and G = 1 are one of eight
# tensor-parallel parts.
SSD_PREFILLS = (
    ((2048,), {}), ((8192,), {}), ((32768,), {}), ((1024,) * 8, {}),
    ((8192,), dict(slow=True)), ((8192,), dict(gated=True)), (MIXED, dict(gated=True)),
    ((8192,), dict(H=SSU.H // 8, G=1)), ((8192,), dict(every=256)), ((131072,), {}), ((131072,), dict(slow=True)))

# 5,120 channels are Jamba 3B's, 1,024 one of 8 parts of Jamba Mini. Prompts that start at 0 are those that
# mamba-ssm's kernel takes, which has neither initial states nor rows of several lengths.
MAMBA1_PREFILLS = (
    ((2048,), dict(fresh=True)), ((8192,), dict(fresh=True)), ((2048,) * 4, dict(fresh=True)), ((2048,), {}),
    (MIXED, {}), ((128,) * 32, {}), ((2048,), dict(D=5120, fresh=True)), ((8192,), dict(D=1024, fresh=True)))

# 16 rows, 12,384 tokens. RECORDED has times of a batch with this number and sum, whose single
# lengths are not known.
GDN_MIXED = (17, 2048, 512, 100, 1500, 64, 333, 900, 30, 1024, 700, 90, 1800, 240, 1300, 1726)
GDN_PREFILLS = (
    ((2048,), {}), ((8192,), {}), ((32768,), {}), (GDN_MIXED, {}),
    ((8192,), dict(slow=True)), ((32768,), dict(slow=True)), (GDN_MIXED, dict(slow=True)),
    ((8192,), dict(H=GDN.H // 4, HV=GDN.HV // 4)), ((8192,), dict(H=GDN.H // 4, HV=GDN.HV // 4, slow=True)),
    ((32768,), dict(H=GDN.H // 4, HV=GDN.HV // 4)),
    ((8192,), dict(every=256)), ((131072,), {}), ((131072,), dict(slow=True)))

# Heads, lengths of the rows, tokens of each row's prefix chunk. 16 heads are one of eight
# tensor-parallel parts.
MLA_PREFILLS = (
    (128, (2048,), 0), (128, (8192,), 0), (128, MIXED, 0), (16, (8192,), 0), (128, (2048,), 8192),
    (32, (8192,), 0), (128, tuple(i * 37 % 97 + 32 for i in range(64)), 0), (128, (512,), 16384))


# (page, H, B). Pages here have fewer tokens than the kernel's tile of 64 keys; SGLang's pools have
# pages of 1 token.
MLA_PAGES = [(page, H, B) for page in (1, 16) for H in (16, 128) for B in (32, 128)]

# Form of the cache in e4m3, heads, requests, tokens of each request.
MLA_FP8 = [(form, H, B, L) for form in ("e4m3", "token656") for H in (16, 128)
           for B, L in ((1, 4096), (32, 4096), (128, 4096))]


# Head shapes of rings. The first three of each operation are timed at every batch; the first is
# Nemotron-H's and Qwen3-Next's.
RING_SHAPES = {
    "selective_state_ring": ({}, {"H": 64}, {"P": 80}, {"H": 32, "P": 128, "N": 256, "G": 2},
                             {"H": 80, "N": 64, "G": 1}, {"H": 16, "G": 1}),
    "gated_delta_rule_ring": ({}, {"HV": 48}, {"HV": 64}, {"H": 4, "HV": 8},
                              {"H": 30, "HV": 30, "K": 96, "V": 192}),
}
RING_BATCHES = (1, 2, 3, 4, 8, 16, 32, 64, 96, 256)

# Heads of a step that writes the state at every token, beside Nemotron-H's and Qwen3-Next's: Nemotron-Nano-v2,
# Falcon-H1-34B, a part of Nemotron-H-56B, Zamba2-2.7B and Granite-4-H-350M; Olmo-Hybrid-7B.
OTHER_HEADS = {
    "ssu": ({"P": 80}, {"H": 32, "P": 128, "N": 256, "G": 2}, {"H": 32, "N": 256, "G": 1}, {"H": 80, "N": 64, "G": 1},
            {"H": 48, "P": 32, "G": 1}),
    "gdn": ({"H": 30, "HV": 30, "K": 96, "V": 192},),
}


TYPES = (torch.float32, torch.bfloat16)


def row(operation, key, make, *arguments, **named):
    """(operation, key, maker) of a case, which make(*arguments, **named) makes."""
    return operation, key, functools.partial(make, *arguments, **named)


def ring_cases(quick):
    """(operation, key, maker) of the cases with rings."""
    found = []
    for operation, kind, make in (("selective_state_ring", "ssu_ring", ssu_ring),
                                  ("gated_delta_rule_ring", "gdn_ring", gdn_ring)):
        chosen = [(B, shape) for shape in RING_SHAPES[operation][:3] for B in ((16, 64) if quick else RING_BATCHES)]
        chosen += [(B, shape) for shape in RING_SHAPES[operation][3:] for B in ((16,) if quick else (8, 64))]
        chosen += [(B, {"worst": True}) for B in ((16,) if quick else (1, 16, 64, 256))]
        found += [row(operation, (kind, short(d), B, *shape.items()), make, B, d, **shape)
                  for d in TYPES for B, shape in chosen]
    return found


def net_cases(quick):
    """(operation, key, maker) of whole layers' steps: Qwen3-Next on one GPU at all batches, on 2 and 4 at some, and its
    verifications."""
    steps = [(B, {}) for B in ((16, 64) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256))]
    steps += [(B, {"H": H, "HV": 2 * H}) for H in (8, 4) for B in ((16,) if quick else (1, 16, 64))]
    verifications = [(4, B) for B in ((16,) if quick else (1, 4, 16, 64, 256))] + [(T, B) for T in (2, 8) for B in (1, 16)]
    found = [row("gated_delta_net_decode", ("gdn_net", short(d), B, *shape.items()), gdn_net, B, d, **shape)
             for d in TYPES for B, shape in steps]
    return found + [row("gated_delta_net_verify", ("gdn_net_verify", short(d), T, B), gdn_net, B, d, T=T)
                    for d in TYPES for T, B in verifications]


def mixer_cases(quick):
    """(operation, key, maker) of whole Mamba2 layers' steps: Nemotron-3-Super at all batches, Nemotron-3-Nano-30B,
    Nemotron-Nano-v2, a fourth of Nemotron-3-Super and groups of 16 heads of 128 channels at some, and its verifications;
    steps of Falcon-H1-34B, a part of Nemotron-H-56B and Falcon-H1-Tiny."""
    shapes = [{"H": 64}, {"P": 80}, {"H": 32, "G": 2}, {"H": 32, "P": 128, "G": 2}]
    others = [{"H": 32, "P": 128, "N": 256, "G": 2}, {"H": 32, "N": 256, "G": 1}, {"H": 24, "P": 32, "N": 64, "G": 1}]
    steps = [(B, {}) for B in ((16, 64) if quick else (1, 2, 3, 4, 8, 16, 32, 64, 96, 256))]
    steps += [(B, shape) for shape in shapes + others for B in ((16,) if quick else (1, 16, 64))]
    verifications = [(4, B, {}) for B in ((16,) if quick else (1, 2, 4, 8, 16, 64, 128))]
    verifications += [(T, B, {}) for T in (2, 8) for B in (1, 16)]
    verifications += [(4, B, shape) for shape in shapes for B in (() if quick else (1, 16))]
    found = [row("mamba2_mixer_decode", ("mixer", short(d), B, *shape.items()), mixer, B, d, **shape)
             for d in TYPES for B, shape in steps]
    return found + [row("mamba2_mixer_verify", ("mixer_verify", short(d), T, B, *shape.items()), mixer, B, d, T=T, **shape)
                    for d in TYPES for T, B, shape in verifications]


def mamba1_cases(quick):
    """(operation, key, maker) of steps of Mamba1: 8,192 channels at all batches, 5,120 (Jamba 3B) and 1,024
    (one of 8 parts of Jamba Mini) at some, and Jamba's norms."""
    chosen = [(B, {}) for B in ((16, 64) if quick else (1, 2, 3, 4, 8, 16, 32, 64, 96, 256))]
    chosen += [(B, {"D": D}) for D in (5120, 1024) for B in ((16,) if quick else (1, 16, 64))]
    chosen += [(B, {"normed": True}) for B in ((16,) if quick else (1, 16, 64))]
    return [row("mamba1_decode", ("mamba1_normed" if "normed" in more else "mamba1", short(d), B, *more.items()), mamba1, B, d,
                **more) for d in TYPES for B, more in chosen]


def mla_decode_cases(quick):
    """(operation, key, maker) of decode over latents: bf16 in pages of 64, in other pages and in e4m3, and with queries in
    e4m3."""
    lengths = [(H, B, L) for H in (128, 16) for B in ((32,) if quick else (1, 32, 128)) for L in (1024, 4096, 16384)]
    found = [row("mla_decode", ("mla_decode", *of), mla_decode, *of) for of in lengths]
    found += [row("mla_decode", ("mla_decode", H, B, 4096, page), mla_decode, H, B, 4096, page)
              for page, H, B in (MLA_PAGES[:1] if quick else MLA_PAGES)]
    found += [row("mla_decode", ("mla_decode_fp8", *of), mla_decode_fp8, *of) for of in (MLA_FP8[:2] if quick else MLA_FP8)]
    return found + [row("mla_decode_e4m3", ("mla_decode_fp8", "e4m3", *of), mla_decode_fp8, "e4m3", *of, "mla_decode_e4m3")
                    for of in lengths]


def all_cases(quick=False):
    """(operation, key, maker) of each case, in the table's order. RECORDED knows figures by key;
    maker() makes the Case."""
    import latents  # not at the top: latents imports names of this module

    batches = (16, 64) if quick else (1, 16, 64, 256, 1024)
    steps = (16, 64) if quick else (1, 2, 3, 4, 8, 16, 32, 64, 96, 256, 1024)
    found = [row("causal_conv1d_update", ("conv", B), conv_update, B) for B in batches if B > 1]
    found += [row("selective_state_update", ("ssu", short(d), B), ssu, B, d) for d in TYPES for B in steps]
    for operation, kind, make in (("selective_state_update", "ssu", ssu), ("gated_delta_rule_update", "gdn", gdn)):
        found += [row(operation, (kind, short(d), B, *shape.items()), make, B, d, **shape)
                  for d in TYPES for B in ((16,) if quick else (1, 8, 64)) for shape in OTHER_HEADS[kind]]
    update = "gated_delta_rule_update"
    found += [row(update, ("gdn", short(d), B), gdn, B, d) for d in TYPES for B in steps]
    found += [row(update, ("gdn_verify", short(d), B), gdn, B, d, T=4) for d in TYPES for B in batches if B <= 256]
    found += [row(update, ("gdn_replay", short(d), B), gdn_replay, B, d, folded)
              for d in TYPES for B in ((64,) if quick else (64, 256)) for folded in (False, True)]
    found += mamba1_cases(quick) + net_cases(quick) + mixer_cases(quick) + ring_cases(quick)
    found += [row("causal_conv1d", ("conv_prefill", lengths), conv_prefill, lengths)
              for lengths in ((2048,), (8192,), (32768,), MIXED) if not quick or lengths != (32768,)]
    found += [row("ssd_prefill", ("ssd_prefill", lengths, *more), ssd_prefill, lengths, **more)
              for lengths, more in (SSD_PREFILLS[:2] if quick else SSD_PREFILLS)]
    found += [row("mamba1_prefill", ("mamba1_prefill", lengths, *more.items()), mamba1_prefill, lengths, **more)
              for lengths, more in (MAMBA1_PREFILLS[:2] if quick else MAMBA1_PREFILLS)]
    found += [row("gated_delta_rule_prefill", ("gdn_prefill", lengths, *more), gdn_prefill, lengths, **more)
              for lengths, more in (GDN_PREFILLS[:2] if quick else GDN_PREFILLS)]
    found += [row(operation, (f"layer_{prefill}", lengths), layer, prefill, lengths)
              for prefill, operation in (("ssd", "ssd_prefill"), ("gdn", "gated_delta_rule_prefill"))
              for lengths in (((8192,),) if quick else ((2048,), (8192,)))]
    found += mla_decode_cases(quick)
    found += [row("mla_prefill", ("mla_prefill", H, (lengths, chunk)), mla_prefill, H, lengths, chunk)
              for H, lengths, chunk in (MLA_PREFILLS[:2] if quick else MLA_PREFILLS)]
    found += latents.all_cases(quick)
    return found + [row("state_copy", ("copy", elements), state_copy, elements) for elements in (24576, 1 << 20)]


# The fastest peer's microseconds, by key: measured earlier on this card with the same method. On it
# run.py names them where no peer can run.
RECORDED_ON = "H200"
RECORDED = {}
for _key, _peer, _times in (
    (("gdn_replay", "fp32"), "FlashInfer 0.7.2.post1 CuTe, snapshots", {64: 190.1, 256: 728.4}),
    (("gdn_replay", "bf16"), "FlashInfer 0.7.2.post1 CuTe, snapshots", {64: 108.7, 256: 395.2}),
    (("conv",), "vLLM 0.33.0 Triton", {16: 2.5, 64: 4.5, 256: 13.5, 1024: 47.4}),
    (("ssu", "fp32"), "vLLM 0.33.0 Triton", {1: 4.6, 16: 38.5, 64: 142.6, 256: 564.5}),
    (("ssu", "fp32"), "FlashInfer 0.7.2.post1 CUDA", {1024: 2257.1}),
    (("ssu", "bf16"), "vLLM 0.33.0 Triton", {1: 3.8, 16: 21.1}),
    (("ssu", "bf16"), "FlashInfer 0.7.2.post1 CUDA", {64: 75.3, 256: 278.9, 1024: 1109.9}),
    (("gdn", "fp32"), "FLA 0.6.0 Triton", {1: 3.8, 256: 261.6, 1024: 1026.4}),
    (("gdn", "fp32"), "FlashInfer 0.7.2.post1 CuTe", {16: 20.5, 64: 70.6}),
    (("gdn", "bf16"), "FlashInfer 0.7.2.post1 CuTe", {1: 3.3, 16: 12.8}),
    (("gdn", "bf16"), "vLLM 0.33.0 Triton", {64: 40.8, 256: 144.8, 1024: 556.1}),
    (("gdn_verify", "fp32"), "FlashInfer 0.7.2.post1 CuTe",
     {1: 7.2, 16: 53.5, 64: 190.1, 256: 728.4}),
    (("gdn_verify", "bf16"), "FlashInfer 0.7.2.post1 CuTe",
     {1: 6.6, 16: 33.2, 64: 108.7, 256: 395.2}),
    (("gdn_prefill",), "FlashQLA 0.1.3 TileLang", {(2048,): 89.3, (32768,): 678.4}),
    (("gdn_prefill",), "FlashInfer 0.7.2.post1 CuTe", {(8192,): 234.8, GDN_MIXED: 194.5}),
    (("mla_decode", 128, 1), "FlashInfer 0.7.2.post1 CUDA", {1024: 13.7, 4096: 19.6}),
    (("mla_decode", 128, 32), "FlashInfer 0.7.2.post1 CUDA", {1024: 31.9, 4096: 77.2}),
    (("mla_decode", 128, 128), "FlashInfer 0.7.2.post1 CUDA", {1024: 77.7}),
    (("mla_decode", 128, 128), "FlashMLA of vLLM 0.33.0", {4096: 247.8, 16384: 1042.7}),
    (("mla_decode", 16, 32), "FlashInfer 0.7.2.post1 CUDA", {1024: 19.8, 4096: 46.6, 16384: 148.7}),
    (("mla_decode", 16, 128), "FlashInfer 0.7.2.post1 CUDA", {1024: 45.6, 4096: 147.7}),
    (("mla_decode", 16, 1), "FlashAttention 3 of vLLM 0.33.0", {1024: 14.2, 4096: 16.8, 16384: 23.5}),
    (("mla_decode", 128, 1), "FlashAttention 3 of vLLM 0.33.0", {16384: 31.9}),
    (("mla_decode", 128, 32), "FlashAttention 3 of vLLM 0.33.0", {16384: 246.3}),
    (("mla_decode", 16, 128), "FlashAttention 3 of vLLM 0.33.0", {16384: 567.4}),
    (("mla_prefill", 128), "FlashAttention 3 of vLLM 0.33.0", {((2048,), 0): 286.6, ((8192,), 0): 4188.4}),
):
    for _B, _us in _times.items():
        RECORDED[(*_key, _B)] = (_peer, _us)
