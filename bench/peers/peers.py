"""The contestants of each kind of case: calls that launch our kernel or a peer's once on an input
set.

Each peer gets the most favourable form that it supports of the same work: the same bytes read and
written, its own layout of the small inputs, its output buffer reused where it takes one.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Callable

import torch

import latents
import load

OURS = "lockstep"
BY_TAP = ", weight channels contiguous"  # [D, W] by strides: vLLM's kernel is twice as fast on it


@dataclass
class Contestant:
    """launch(set) launches once and returns a result; view(set, result, rows) returns the output
    and state of the first `rows` rows."""

    name: str
    launch: Callable
    view: Callable
    prepare: Callable = None  # of a set, before its result is compared; not timed
    less_work: bool = False   # part of the work was done before: it is timed, but is no row's peer
    other_work: bool = False  # it does more than the case or something else: likewise


class Loaded:
    """The peers of one process, each loaded once: `modules` has those that loaded, `why` the reason
    of each that did not, both by name."""

    def __init__(self, ours, kinds):
        """Loads the peers of these kinds of cases. `ours` is the path of the library of our
        operators, or None."""
        self.why = {}
        self.modules = {}
        self.ours = False
        left_out = os.environ.get("LOCKSTEP_LEFT_OUT", "").split()  # for example peers whose tuning takes minutes
        asked = {name for kind in kinds for name in PEERS_OF[kind]}
        for name in ("vllm", "vllm_ring", "vllm_verify", "vllm_norm", "vllm_rms_norm", "sglang_ring", "flashinfer_ring", "vllm_prefill",
                     "vllm_delta_prefill", "fla", "fla_prefill", "mamba_ssm", "mamba_ssm_prefill", "vllm_scan",
                     "mamba_ssm_scan", "flashinfer",
                     "flashinfer_prefill", "flashqla", "flashinfer_mla", "flashinfer_ragged", "flashmla",
                     "flashmla_fp8", "flash_attention_3", "vllm_cache", "flashinfer_rope", "vllm_invariant",
                     "cublas_invariant", "deep_gemm"):
            if name not in asked:
                continue
            if name in left_out:
                self.why[name] = "left out of this run"
                continue
            try:
                self.modules[name] = getattr(load, name)()
            except Exception as error:  # whatever a peer's import throws, the others still run
                self.why[name] = f"{type(error).__name__}: {error}"[:300]
        if ours is not None:
            torch.ops.load_library(str(ours))
            self.ours = True
        pool = ThreadPoolExecutor(2)  # nvcc builds these while other cases run
        self.flashinfer_ssu = {dtype: pool.submit(load.flashinfer_ssu, dtype)
                               for dtype in (torch.float32, torch.bfloat16) if {"ssu", "mixer"} & set(kinds)}
        pool.shutdown(wait=False)

    def operator(self, name):
        """Our operator, or None where the library has none of that name."""
        return getattr(torch.ops.lockstep, name, None) if self.ours else None


# The peers of each kind of case, by their names in load.py. NOT_FETCHED has those that stage.sh
# does not fetch, with the reason, which the report prints.
PEERS_OF = {
    "conv": ("vllm",),
    "ssu": ("vllm", "mamba_ssm"),
    "mamba1": ("vllm", "mamba_ssm"),
    "mamba1_normed": ("vllm", "vllm_rms_norm"),
    "mamba1_prefill": ("vllm_scan", "mamba_ssm_scan"),
    "ssu_ring": ("vllm_ring", "flashinfer_ring"),
    "gdn_ring": ("sglang_ring",),
    "gdn": ("fla", "vllm", "flashinfer"),
    "gdn_verify": ("vllm", "vllm_verify", "flashinfer"),
    "gdn_replay": ("vllm", "flashinfer"),
    "gdn_fold": (),
    "gdn_net": ("vllm", "vllm_verify", "vllm_norm"),
    "gdn_net_verify": ("vllm", "vllm_verify", "vllm_norm"),
    "mixer": ("vllm", "vllm_norm", "mamba_ssm"),
    "mixer_verify": ("vllm", "vllm_norm"),
    "conv_prefill": ("vllm",),
    "ssd_prefill": ("vllm_prefill", "mamba_ssm_prefill"),
    "gdn_prefill": ("flashqla", "flashinfer_prefill", "vllm_delta_prefill", "fla_prefill"),
    "layer_ssd": ("vllm", "vllm_prefill", "mamba_ssm_prefill"),
    "layer_gdn": ("vllm", "flashqla", "flashinfer_prefill", "vllm_delta_prefill", "fla_prefill"),
    "mla_decode": ("flashmla", "flashinfer_mla", "flash_attention_3"),
    "mla_decode_fp8": ("flashmla", "flashmla_fp8"),
    "mla_prefill": ("flash_attention_3", "flashinfer_ragged"),
    "copy": (),
    **latents.PEERS_OF,
}
NOT_FETCHED = {
    "conv": [("causal-conv1d", "its CUDA sources are not built here"),
             ("FLA", "its cache is W wide, other bytes")],
    "mamba1": [("FlashInfer", "its selective_state_update takes one A per head")],
    "mamba1_normed": [("mamba-ssm, FlashInfer", "they have no Mamba1 with norms of B and C")],
    "mamba1_prefill": [("SGLang, FlashInfer", "they have no scan of Mamba1")],
    "gdn_ring": [("vLLM", "0.33.0 has no ring for the delta rule"),
                 ("FlashInfer", "its ring for the delta rule (gated_delta_rule_mtp) is for Blackwell")],
    "gdn": [("TileOPs", "0.1.0 needs PyTorch 2.13; it writes the states beside the pool, without slots")],
    "gdn_verify": [("FLA", "it returns only the last state")],
    "gdn_replay": [("FLA", "it returns only the last state")],
    "gdn_fold": [("FlashInfer", "it commits by copies")],
    "gdn_net": [("FlashInfer, SGLang", "they have no launch with a convolution or a norm beside the rule")],
    "gdn_net_verify": [("FlashInfer, SGLang", "they have no launch with a convolution or a norm beside the rule")],
    "mixer": [("SGLang", "its kernels are vLLM's")],
    "mixer_verify": [("SGLang, mamba-ssm", "their updates take no table of slots for the states after each token"),
                     ("FlashInfer", "its selective_state_update is built for one token here")],
    "conv_prefill": [("causal-conv1d", "its CUDA sources are not built here"),
                     ("FLA", "it takes no slots")],
    "mla_decode_fp8": [("FlashInfer", "its kernel for caches in e4m3 is not staged"),
                       ("FlashAttention 3", "vLLM's build for MLA takes no cache in e4m3")],
    "mla_prefill": [("FlashMLA", "its dense prefill is for Blackwell")],
    **latents.NOT_FETCHED,
}


def contestants(case, loaded):
    """(contestants, absent) of a case. `absent` lists its peers that cannot run, as {"name",
    "why"}."""
    makers = {
        "conv": conv, "ssu": ssu, "mamba1": mamba1, "mamba1_normed": mamba1, "mamba1_prefill": mamba1_prefill,
        "ssu_ring": ssu_ring, "gdn_ring": gdn_ring,
        "gdn": gdn, "gdn_verify": gdn_verify, "gdn_replay": gdn_replay, "gdn_fold": gdn_fold, "gdn_net": gdn_net,
        "gdn_net_verify": gdn_net, "mixer": mixer, "mixer_verify": mixer, "copy": copy, "conv_prefill": conv_prefill,
        "ssd_prefill": ssd_prefill, "gdn_prefill": gdn_prefill, "layer_ssd": layer, "layer_gdn": layer,
        "mla_decode": mla_decode, "mla_decode_fp8": mla_decode_fp8, "mla_prefill": mla_prefill, **latents.products(Contestant)}
    found = makers[case.kind](case, loaded)
    absent = [{"name": n, "why": loaded.why[n]} for n in PEERS_OF[case.kind] if n in loaded.why]
    absent += [{"name": n, "why": why} for n, why in NOT_FETCHED.get(case.kind, ())]
    if case.kind in ("ssu", "mixer"):
        error = loaded.flashinfer_ssu[case.sets[0].state.dtype].exception()
        if error is not None:
            why = f"{type(error).__name__}: {error}"[:300]
            absent.append({"name": "FlashInfer CUDA", "why": why})
    if case.kind == "ssu" and not flashinfer_ssu_takes(case):
        absent.append({"name": "FlashInfer CUDA", "why": "its selective_state_update is built here for heads of 64 x 128"})
    if case.kind == "ssu_ring" and "flashinfer_ring" in loaded.modules and flashinfer_decode(case, loaded) is None:
        P = case.sets[0].state.shape[2]
        absent.append({"name": "FlashInfer CUDA", "why": "its checkpointing_ssu does not compile for P = 80" if P == 80
                       else "its checkpointing_ssu is not built for this shape"})
    if case.kind == "gdn_ring" and not sglang_takes(case):
        absent.append({"name": "SGLang", "why": "its kernel takes no K of 96"})
    return found, absent


def slot_view(s, result, rows):
    """Output and state, for contestants that update the state in its slot."""
    out = result[0] if isinstance(result, tuple) else result
    return out[:rows], s.state[s.slots[:rows].long()]


def conv(case, loaded):
    """One token per row, x [B, D]."""
    found = []
    ours = loaded.operator("causal_conv1d_update")
    if ours is not None:
        for weight, name in (("weight", OURS), ("weight_by_tap", f"{OURS}{BY_TAP}")):
            found.append(Contestant(name, lambda s, weight=weight: ours(
                s.x, s.state, getattr(s, weight), s.bias, state_indices=s.slots,
                activation="silu"), slot_view))
    if "vllm" in loaded.modules:
        vllm = loaded.modules["vllm"]
        update = vllm.conv.causal_conv1d_update
        for weight, note in (("weight", ""), ("weight_by_tap", BY_TAP)):
            found.append(Contestant(
                f"vLLM {vllm.version} Triton{note}", lambda s, weight=weight: update(
                    s.x, s.state, getattr(s, weight), s.bias, activation="silu",
                    conv_state_indices=s.slots, out=s.out), slot_view))
    return found


def ssu(case, loaded):
    """The peers take A, D, dt and dt_bias as views broadcast over P and N."""
    found = []
    ours = loaded.operator("selective_state_update")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(
            s.state, s.x, s.dt, s.A, s.B, s.C, D=s.D, dt_bias=s.dt_bias, dt_softplus=True,
            state_indices=s.slots), slot_view))

    def wide(s):
        P, N = s.state.shape[2:]
        return dict(state=s.state, x=s.x, dt=s.dt[..., None].expand(-1, -1, P),
                    A=s.A[:, None, None].expand(-1, P, N), B=s.B, C=s.C,
                    D=s.D[:, None].expand(-1, P), dt_bias=s.dt_bias[:, None].expand(-1, P),
                    dt_softplus=True, state_batch_indices=s.slots)

    if "vllm" in loaded.modules:
        vllm = loaded.modules["vllm"]

        def launch(s):
            vllm.ssu.selective_state_update(**wide(s), out=s.out)
            return s.out

        found.append(Contestant(f"vLLM {vllm.version} Triton", launch, slot_view))
    if "mamba_ssm" in loaded.modules:
        mamba = loaded.modules["mamba_ssm"]
        found.append(Contestant(f"mamba-ssm {mamba.version} Triton",
                                lambda s: mamba.ssu.selective_state_update(**wide(s)), slot_view))
    future = loaded.flashinfer_ssu[case.sets[0].state.dtype]
    if flashinfer_ssu_takes(case) and future.exception() is None:
        _, version = load.staged("flashinfer")
        found += [flashinfer_ssu(future.result(), wide, f"FlashInfer {version} CUDA {name}", number)
                  for name, number in (("simple", 1), ("vertical", 2))]
    return found


def mamba1(case, loaded):
    """A step of Mamba1. With norms, vLLM's chain is its kernel for RMS norms over B and C, in front of its
    update; the norm of the low-rank dt, which stands in front of dt_proj, is timed in the chain too."""
    found, normed = [], case.kind == "mamba1_normed"
    ours, general = loaded.operator("mamba1_decode"), loaded.operator("selective_state_update")
    if ours is not None:
        def norms(s):
            return dict(norm_eps=s.eps, dt_low=s.low, b_weight=s.weight, c_weight=s.weight) if normed else {}

        found.append(Contestant(OURS, lambda s: ours(
            s.state, s.x, s.dt, s.A, s.B, s.C, D=s.skip, z=s.z, dt_bias=s.dt_bias, dt_softplus=True, state_indices=s.slots,
            **norms(s)), slot_view))
    if general is not None and not normed:
        found.append(Contestant(f"{OURS}, selective_state_update", lambda s: general(
            s.state[:, None], s.x[:, None], s.dt[:, None], s.A[None], s.B[:, None], s.C[:, None], D=s.skip[None],
            z=s.z[:, None], dt_bias=s.dt_bias[None], dt_softplus=True, state_indices=s.slots),
            lambda s, result, rows: (result[:rows, 0], s.state[s.slots[:rows].long()])))

    def common(s, dt, B, C):
        return dict(state=s.state, x=s.x, dt=dt, A=s.A, B=B, C=C, D=s.skip, z=s.z, dt_bias=s.dt_bias, dt_softplus=True,
                    state_batch_indices=s.slots)

    if normed and "vllm" in loaded.modules and "vllm_rms_norm" in loaded.modules:
        vllm, norm = loaded.modules["vllm"], loaded.modules["vllm_rms_norm"].norm
        for s in case.sets:  # results of the norms
            s.normed = [torch.empty(case.B, n, device="cuda", dtype=torch.bfloat16) for n in (s.low.shape[1], 16, 16)]

        def chain(s):
            for out, v, weight in zip(s.normed, (s.low, s.B, s.C), (s.low_weight, s.weight, s.weight)):
                norm(out, v, weight, s.eps)
            vllm.ssu.selective_state_update(**common(s, s.normed_dt, *s.normed[1:]), out=s.out)
            return s.out

        found.append(Contestant(f"vLLM {vllm.version} CUDA norms, Triton update", chain, slot_view))
    if not normed and "vllm" in loaded.modules:
        vllm = loaded.modules["vllm"]

        def launch(s):
            vllm.ssu.selective_state_update(**common(s, s.dt, s.B, s.C), out=s.out)
            return s.out

        found.append(Contestant(f"vLLM {vllm.version} Triton", launch, slot_view))
    if not normed and "mamba_ssm" in loaded.modules:
        mamba = loaded.modules["mamba_ssm"]
        found.append(Contestant(f"mamba-ssm {mamba.version} Triton",
                                lambda s: mamba.ssu.selective_state_update(**common(s, s.dt, s.B, s.C)), slot_view))
    return found


def mamba1_prefill(case, loaded):
    """Packed prompts. The peers take tokens side by side, [D, T], as they stand in by_channel; the transposition before
    them is not timed. vLLM's kernel writes the outputs to z."""
    found = []
    ours = loaded.operator("mamba1_prefill")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(
            s.x, s.dt, s.A, s.B, s.C, s.state, D=s.skip, z=s.z, dt_bias=s.dt_bias, dt_softplus=True,
            query_start_loc=s.starts, state_indices=s.slots, has_initial_state=s.resumes), prefill_view))
    if "vllm_scan" in loaded.modules:
        vllm = loaded.modules["vllm_scan"]

        def scan(s):
            p = s.by_channel
            vllm.scan(p.x, p.dt, s.A, p.B[None], p.C[None], s.skip, p.z, s.dt_bias, True, s.starts, s.slots, s.resumes,
                      s.state, -1, 1024, None, None, None, None, None)
            return p.z.t()

        found.append(Contestant(f"vLLM {vllm.version} CUDA", scan, prefill_view,
                                prepare=lambda s: s.by_channel.z.copy_(s.z.t())))
    lengths = case.sets[0].lengths
    if "mamba_ssm_scan" in loaded.modules and case.sets[0].fresh and len(set(lengths)) == 1:
        mamba = loaded.modules["mamba_ssm_scan"]
        for s in case.sets:  # [rows, D, tokens], and [rows, 1, N, tokens] for B and C
            s.batch = {name: getattr(s, name).unflatten(0, (-1, lengths[0])).transpose(1, 2).contiguous()
                       for name in ("x", "dt", "z", "B", "C")}

        def batch(s):
            p = s.batch
            _, s.last, out = mamba.scan(p["x"], p["dt"], s.A, p["B"][:, None], p["C"][:, None], s.skip, p["z"], s.dt_bias,
                                        True)
            return out

        found.append(Contestant(f"mamba-ssm {mamba.version} CUDA", batch, lambda s, result, rows: (
            result[:rows].transpose(1, 2).flatten(0, 1), s.last[:rows, :, -1, 1::2])))
    return found


def out_view(s, result, rows):
    """The output alone; the tests compare the states of rings."""
    return (result[:rows],)


LATE = ", states asked for late"  # after the launch before has ended
SNAPSHOTS = ", snapshots"  # the kernel that writes the state at every token


def ssu_ring(case, loaded):
    """A decode with rings: the state is read at each token and written once in 16. Ours asks for
    states before the launch before has ended, as FlashInfer's kernel does: by cases.ring_layers
    consecutive launches have different layers, so that none writes what the next one reads. The
    kernel that writes the state at every token runs beside, on states that `prepare` has brought up
    to date."""
    found = []
    ours, flush = loaded.operator("selective_state_ring_update"), loaded.operator("selective_state_ring_flush")
    snapshots = loaded.operator("selective_state_update")
    if ours is not None:
        def update(s, early):
            return ours(s.state, s.ring_x, s.ring_B, s.ring_dt, s.x, s.dt, s.A, s.B, s.C, s.cursors, s.positions,
                        D=s.D, dt_bias=s.dt_bias, dt_softplus=True, state_indices=s.slots, early_state=early)

        found += [Contestant(OURS, lambda s: update(s, True), out_view),
                  Contestant(f"{OURS}{LATE}", lambda s: update(s, False), out_view)]
    if "vllm_ring" in loaded.modules:
        vllm = loaded.modules["vllm_ring"]

        def launch(s):
            P, N = s.state.shape[2:]
            return vllm.ring.selective_state_update_replayssm_output_only(
                s.state, s.x, s.dt[..., None].expand(-1, -1, P), s.A[:, None, None].expand(-1, P, N), s.B, s.C,
                s.D[:, None].expand(-1, P), s.dt_bias[:, None].expand(-1, P), None, True, s.ring_x, s.ring_dt,
                s.ring_B, s.scratch, s.cursors, s.flushes, state_batch_indices=s.slots, out=s.out)

        found.append(Contestant(f"vLLM {vllm.version} replayssm Triton", launch, out_view))
    if "flashinfer_ring" in loaded.modules:
        found += flashinfer_ring(case, loaded)
    if ours is not None:
        found.append(Contestant(f"{OURS}{SNAPSHOTS}", lambda s: snapshots(
            s.state, s.x, s.dt, s.A, s.B, s.C, D=s.D, dt_bias=s.dt_bias, dt_softplus=True, state_indices=s.slots),
            out_view, lambda s: flush(s.state, s.ring_x, s.ring_B, s.ring_dt, s.A, s.cursors, s.slots,
                                      state_indices=s.slots)))
    return found


def flashinfer_decode(case, loaded):
    """FlashInfer's checkpointing_ssu for the shape and type of the case's states, or None."""
    one = case.sets[0]
    try:
        return loaded.modules["flashinfer_ring"].decode(one.state.dtype, *one.state.shape[1:], one.B.shape[1])
    except load.Absent:
        return None


def flashinfer_ring(case, loaded):
    """FlashInfer's two algorithms; the one of two kernels has a pipeline of one stage, its default,
    or of two, which its own comments call faster for large batches alone. It flushes a row whose
    ring has no room for two further tokens, and then keeps the new token in the ring: with a ring
    of 16 rows and the case's cursors it flushes the same rows as the others."""
    one = case.sets[0]
    H, P, N = one.state.shape[1:]
    decode, version = flashinfer_decode(case, loaded), loaded.modules["flashinfer_ring"].version
    if decode is None:
        return []
    few = case.B * H <= 8 * torch.cuda.get_device_properties(0).multi_processor_count
    halves = 2 if one.state.dtype == torch.float32 and few and P % 64 == 0 else 1  # of a head, as its wrapper decides

    def contestant(note, parts, stages, blocks):
        def launch(s):
            f = s.flashinfer
            scratch = (f.new, f.decay, f.old) if stages else (None, None, None)
            decode(s.state, s.x[:, None], s.dt[:, None, :, None].expand(-1, -1, -1, P),
                   s.A[:, None, None].expand(-1, P, N), s.B[:, None], s.C[:, None], s.out[:, None], s.ring_x, s.ring_B,
                   s.ring_dt, f.begin, s.live_of_slot, s.D[:, None].expand(-1, P), None,
                   s.dt_bias[:, None].expand(-1, P), True, s.slots, -1, None, None, parts, None, *scratch, 0, stages,
                   blocks)
            return s.out

        return Contestant(f"FlashInfer {version} CUDA {note}", launch, out_view)

    return [contestant("one kernel", halves, 0, 0), contestant("two kernels", 1, 1, 0),
            contestant("two kernels, 2 stages", 1, 2, 4)]


def sglang_takes(case):
    """Whether SGLang's kernel takes keys of the case's length: it reads whole powers of two."""
    return case.sets[0].k.shape[-1] in (64, 128)


def gdn_ring(case, loaded):
    """The contestants of ssu_ring() for the gated delta rule. SGLang's ring keeps normalised keys
    in the states' type, so its keys are tensors of their own."""
    found = []
    ours, flush = loaded.operator("gated_delta_rule_ring_update"), loaded.operator("gated_delta_rule_ring_flush")
    snapshots = loaded.operator("gated_delta_rule_update")
    if ours is not None:
        def update(s, early):
            return ours(s.q, s.k, s.v, s.g, s.beta, s.state, s.ring_k, s.ring_k_scale, s.ring_u, s.ring_g, s.cursors,
                        s.positions, state_indices=s.slots, use_qk_l2norm=True, early_state=early)

        found += [Contestant(OURS, lambda s: update(s, True), out_view),
                  Contestant(f"{OURS}{LATE}", lambda s: update(s, False), out_view)]
    if "sglang_ring" in loaded.modules and sglang_takes(case):
        sglang = loaded.modules["sglang_ring"]
        scale = case.sets[0].k.shape[-1] ** -0.5
        normal_keys = {}  # one tensor per layer: sets of a layer share ring_k

        def keys(s):
            normal = s.ring_k.float() * s.ring_k_scale[..., None]
            return normal_keys.setdefault(s.ring_k.data_ptr(), normal.to(s.state.dtype)).copy_(normal)

        for s in case.sets:
            if s.ring_k.data_ptr() not in normal_keys:
                keys(s)
            s.normal_ring_k = normal_keys[s.ring_k.data_ptr()]

        def launch(s):
            sglang.decode(s.mixed, s.a, s.b, s.A_log, s.dt_bias, scale, s.state, s.ring_u, s.normal_ring_k, s.ring_g,
                          s.out, s.slots, s.cursors, use_qk_l2norm_in_kernel=True)
            return s.out[:, 0]

        found.append(Contestant(f"SGLang {sglang.version} replayssm Triton", launch, out_view, keys))
    if ours is not None:
        found.append(Contestant(f"{OURS}{SNAPSHOTS}", lambda s: snapshots(
            s.q, s.k, s.v, s.g, s.beta, s.state, state_indices=s.slots, use_qk_l2norm=True),
            out_view, lambda s: flush(s.state, s.ring_k, s.ring_k_scale, s.ring_u, s.ring_g, s.cursors, s.slots,
                                      state_indices=s.slots)))
    return found


def flashinfer_update(function, wide, algorithm):
    """A launch of FlashInfer's CUDA kernel; its dt, D and dt_bias share one type, here bf16."""

    def launch(s):
        w = wide(s)
        D, dt_bias = (t[:, None].expand(-1, s.state.shape[2]) for t in (s.D16, s.dt_bias16))
        function(w["state"], w["x"], w["dt"], w["A"], w["B"], w["C"], D, None, dt_bias, True,
                 s.slots, None, -1, None, s.out, False, None, None, None, None, 0, None, None,
                 algorithm)
        return s.out

    return launch


def flashinfer_ssu_takes(case):
    """Whether load.flashinfer_ssu() builds FlashInfer's kernel for the shape of the case's states."""
    return case.sets[0].state.shape[2:] == (64, 128)


def flashinfer_ssu(function, wide, name, algorithm):
    """FlashInfer's CUDA kernel as a contestant of its own."""
    return Contestant(name, flashinfer_update(function, wide, algorithm), slot_view)


def mixer(case, loaded):
    """A Mamba2 layer's step between its projections, or its verification of several tokens a row: our launch, with
    groups divided among other numbers of blocks too, our launches of the convolution and the update with vLLM's norm
    behind them, and vLLM's chains: its Triton convolution, an update of vLLM, and for one token of mamba-ssm or
    FlashInfer too, and its Triton norm of groups."""
    found, one = [], case.sets[0]
    verifies = case.kind == "mixer_verify"
    view = table_view if verifies else slot_view
    H, P, N = one.state.shape[1:]
    channels = H * P // one.groups
    ours, conv, update = (loaded.operator(name) for name in
                          ("mamba2_mixer_decode", "causal_conv1d_update", "selective_state_update"))

    def rows(s):
        if not verifies:
            return dict(state_indices=s.slots)
        return dict(state_indices=s.table, query_start_loc=s.starts, num_accepted_tokens=s.accepted)

    if ours is not None:
        def layer_step(s, parts=0):
            return ours(s.x, s.z, s.dt, s.window, s.state, s.weight, s.A, s.D, s.dt_bias, s.norm_weight, conv_bias=s.bias,
                        eps=s.eps, parts=parts, **rows(s))

        found.append(Contestant(OURS, layer_step, view))
        for parts in (1, 2, 4, 8) if verifies or (H, P, N) == (128, 64, 128) else ():
            found.append(Contestant(f"{OURS}, {parts} parts", lambda s, n=parts: layer_step(s, n), view))
    if "vllm" not in loaded.modules or "vllm_norm" not in loaded.modules:
        return found
    vllm, norm = loaded.modules["vllm"], loaded.modules["vllm_norm"].norm

    def wide(s):
        return dict(state=s.state, x=s.ssu_x, dt=s.dt[..., None].expand(-1, -1, P), A=s.A[:, None, None].expand(-1, P, N),
                    B=s.B, C=s.C, D=s.D[:, None].expand(-1, P), dt_bias=s.dt_bias[:, None].expand(-1, P), dt_softplus=True,
                    state_batch_indices=s.slots)

    def normed(s, y):
        return norm(y.view(-1, H * P), s.norm_weight, None, z=s.z.flatten(1), eps=s.eps, group_size=channels,
                    norm_before_gate=False).view(-1, H, P)

    if conv is not None and update is not None:
        def apart(s):
            mixed = conv(s.x, s.window, s.weight, s.bias, activation="silu", **rows(s))
            x, B, C = (part.unflatten(1, (n, -1)) for part, n in zip(
                mixed.split([H * P, one.groups * N, one.groups * N], 1), (H, one.groups, one.groups)))
            return normed(s, update(s.state, x, s.dt, s.A, B, C, D=s.D, dt_bias=s.dt_bias, dt_softplus=True,
                                    **rows(s)))

        found.append(Contestant(f"{OURS}, convolution and update apart, vLLM's norm", apart, view))

    def vllm_update(s):
        several = dict(state_batch_indices=s.table, num_accepted_tokens=s.accepted, cu_seqlens=s.starts)
        vllm.ssu.selective_state_update(**(wide(s) | (several if verifies else {})), out=s.out)
        return s.out

    updates = [(f"vLLM {vllm.version} Triton chain", vllm_update)]
    if "mamba_ssm" in loaded.modules and not verifies:
        mamba = loaded.modules["mamba_ssm"]
        updates.append((f"vLLM's chain, update of mamba-ssm {mamba.version}",
                        lambda s: mamba.ssu.selective_state_update(**wide(s))))
    future = None if verifies else loaded.flashinfer_ssu[one.state.dtype]
    if future is not None and (P, N) == (64, 128) and future.exception() is None:
        _, version = load.staged("flashinfer")
        updates += [(f"vLLM's chain, update of FlashInfer {version} CUDA {name}", flashinfer_update(future.result(), wide, number))
                    for name, number in (("simple", 1), ("vertical", 2))]
    for name, step in updates:
        def chain(s, step=step):
            several = dict(num_accepted_tokens=s.accepted, query_start_loc=s.starts, max_query_len=s.table.shape[1])
            vllm.conv.causal_conv1d_update(s.x, s.window, s.weight, s.bias, activation="silu", conv_state_indices=s.slots,
                                           out=s.mixed, **(several if verifies else {}))
            return normed(s, step(s))

        found.append(Contestant(name, chain, view))
    return found


def gdn(case, loaded):
    """One token per row. FLA takes no slots, and FlashInfer's float32 kernel is called without
    them, so row b has slot b + 1 for every contestant."""
    found = []
    for s in case.sets:
        s.slots = torch.arange(1, case.B + 1, device="cuda", dtype=torch.int32)
        s.table = s.slots[:, None]
    scale = case.sets[0].k.shape[-1] ** -0.5
    ours = loaded.operator("gated_delta_rule_update")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(
            s.q[:, 0], s.k[:, 0], s.v[:, 0], s.g[:, 0], s.beta[:, 0], s.state,
            state_indices=s.slots, use_qk_l2norm=True), single(slot_view)))
    if "fla" in loaded.modules:
        fla = loaded.modules["fla"]  # reads one buffer, writes another, always float32
        found.append(Contestant(f"FLA {fla.version} Triton",
                                lambda s: fla.recurrent.fused_recurrent_gated_delta_rule(
                                    s.q, s.k, s.v, g=s.g, beta=s.beta, scale=scale,
                                    initial_state=s.state[1:], output_final_state=True,
                                    use_qk_l2norm_in_kernel=True, state_v_first=True),
                                lambda s, result, rows: (result[0][:rows], result[1][:rows, None])))
    if "vllm" in loaded.modules:
        vllm = loaded.modules["vllm"]
        found.append(Contestant(
            f"vLLM {vllm.version} Triton packed decode",
            lambda s: vllm.recurrent.fused_recurrent_gated_delta_rule_packed_decode(
                s.mixed, s.a[:, 0], s.b[:, 0], s.A_log, s.dt_bias, scale, s.state, s.out, s.slots,
                use_qk_l2norm_in_kernel=True), single(slot_view)))
        found.append(vllm_recurrent(vllm, scale))
    if "flashinfer" in loaded.modules:
        flashinfer = loaded.modules["flashinfer"]
        direct = case.sets[0].state.dtype == torch.float32  # by slots it is 2 to 3 % slower

        def launch(s):
            state = dict(state=s.state[1:]) if direct else dict(
                state=None, initial_state=s.state, initial_state_indices=s.slots)
            return flashinfer.gdn.gated_delta_rule_decode_pretranspose(
                q=s.q, k=s.k, v=s.v, A_log=s.A_log, a=s.a, dt_bias=s.dt_bias, b=s.b, scale=scale,
                output=s.out, use_qk_l2norm=True, backend="flashinfer", **state)[0]

        found.append(Contestant(f"FlashInfer {flashinfer.version} CuTe", launch, single(slot_view)))
    return found


def gdn_net(case, loaded):
    """A layer's step between its projections, or its verification of several tokens a row: our launch, with key heads
    divided among other numbers of blocks too, our launches of the convolution and the rule with vLLM's norm behind them,
    and vLLM's chains: three Triton kernels, and the Triton convolution with its CUDA kernel of rule and norm."""
    found = []
    verifies = case.kind == "gdn_net_verify"
    view = table_view if verifies else slot_view
    heads = case.sets[0].z.shape[1] * 128
    keys = (case.sets[0].x.shape[1] - heads) // 2
    ours, conv, rule = (loaded.operator(name) for name in
                        ("gated_delta_net_decode", "causal_conv1d_update", "gated_delta_rule_update"))

    def rows(s):
        if not verifies:
            return dict(state_indices=s.slots)
        return dict(state_indices=s.table, query_start_loc=s.starts, num_accepted_tokens=s.accepted)

    def split(mixed):
        return [part.unflatten(1, (-1, 128)) for part in mixed.split([keys, keys, heads], 1)]

    if ours is not None:
        def net(s, parts=0):
            return ours(s.x, s.z, s.a, s.b, s.window, s.state, s.weight, None, s.A_log, s.dt_bias, s.norm_weight,
                        parts=parts, **rows(s))

        found.append(Contestant(OURS, net, view))
        for parts in (1, 2, 4, 8):
            found.append(Contestant(f"{OURS}, {parts} parts", lambda s, n=parts: net(s, n), view))
    if "vllm" not in loaded.modules:
        return found
    vllm, scale = loaded.modules["vllm"], 128**-0.5

    def convolve(s):
        several = dict(num_accepted_tokens=s.accepted, query_start_loc=s.starts, max_query_len=s.table.shape[1])
        vllm.conv.causal_conv1d_update(s.x, s.window, s.weight, None, activation="silu", conv_state_indices=s.slots,
                                       out=s.mixed, **(several if verifies else {}))

    def vllm_rule(s):
        if not verifies:
            vllm.recurrent.fused_recurrent_gated_delta_rule_packed_decode(
                s.mixed, s.a, s.b, s.A_log, s.dt_bias, scale, s.state, s.o[:, None], s.slots, use_qk_l2norm_in_kernel=True)
            return s.o
        q, k, v = (part[None] for part in split(s.mixed))
        return vllm.gating.fused_sigmoid_gating_delta_rule_update(
            A_log=s.A_log, a=s.a, b=s.b, dt_bias=s.dt_bias, q=q, k=k, v=v, scale=scale, initial_state=s.state,
            inplace_final_state=True, cu_seqlens=s.starts, ssm_state_indices=s.table,
            num_accepted_tokens=s.accepted, use_qk_l2norm_in_kernel=True)[0]

    if "vllm_norm" in loaded.modules:
        norm = loaded.modules["vllm_norm"].norm

        def normed(s, o):
            return norm(o.reshape(-1, 128), s.norm_weight, None, z=s.z.view(-1, 128), eps=1e-6).view(s.z.shape)

        if conv is not None and rule is not None:
            def apart(s):
                mixed = conv(s.x, s.window, s.weight, None, activation="silu", **rows(s))
                return normed(s, rule(*split(mixed), s.a, s.b, s.state, A_log=s.A_log, dt_bias=s.dt_bias,
                                      use_qk_l2norm=True, **rows(s)))

            found.append(Contestant(f"{OURS}, convolution and rule apart, vLLM's norm", apart, view))

        def chain(s):
            convolve(s)
            return normed(s, vllm_rule(s))

        found.append(Contestant(f"vLLM {vllm.version} Triton chain", chain, view))
    if "vllm_verify" in loaded.modules:
        verify = loaded.modules["vllm_verify"].verify

        def fused(s):
            convolve(s)
            verify(s.mixed, s.a, s.b, s.A_log, s.dt_bias, s.table, s.starts, s.accepted, s.state, s.z, s.norm_weight,
                   s.out, scale, 1e-6, "silu")
            return s.out

        found.append(Contestant(f"vLLM {vllm.version} Triton convolution, CUDA rule and norm", fused, view))
    return found


def single(view):
    """`view` for one token per row, widened to out [rows, 1, HV, V] and state [rows, 1, HV, V,
    K]."""

    def widened(s, result, rows):
        out, state = view(s, result, rows)
        return out.reshape(rows, 1, *out.shape[-2:]), state[:, None]

    return widened


def table_view(s, result, rows):
    """Output [rows, T, HV, V] and the states after each token, read from the table's slots."""
    out = result[0] if isinstance(result, tuple) else result
    B, T = s.table.shape
    return out.reshape(B, T, *out.shape[-2:])[:rows], s.state[s.table[:rows].long()]


def packed(x):
    """x [B, T, ...] as one packed batch [1, B T, ...]."""
    return x.reshape(1, -1, *x.shape[2:])


def vllm_recurrent(vllm, scale):
    """vLLM's recurrent kernel with gates computed before; T slots per row, T = 1 or more."""

    def launch(s):
        accepted = dict(num_accepted_tokens=s.accepted) if s.table.shape[1] > 1 else {}
        return vllm.recurrent.fused_recurrent_gated_delta_rule(
            packed(s.q), packed(s.k), packed(s.v), packed(s.g), packed(s.beta), scale, s.state,
            True, s.starts, s.table, use_qk_l2norm_in_kernel=True, **accepted)

    return Contestant(f"vLLM {vllm.version} Triton recurrent", launch, table_view)


def gdn_verify(case, loaded):
    """T tokens per row; the state after each of them is written."""
    found = []
    scale = case.sets[0].k.shape[-1] ** -0.5
    ours = loaded.operator("gated_delta_rule_update")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(
            s.q.flatten(0, 1), s.k.flatten(0, 1), s.v.flatten(0, 1), s.g.flatten(0, 1),
            s.beta.flatten(0, 1), s.state, query_start_loc=s.starts, state_indices=s.table,
            num_accepted_tokens=s.accepted, use_qk_l2norm=True), table_view))
    if "vllm" in loaded.modules:
        vllm = loaded.modules["vllm"]
        found.append(vllm_recurrent(vllm, scale))
        found.append(Contestant(
            f"vLLM {vllm.version} Triton sigmoid gating",
            lambda s: vllm.gating.fused_sigmoid_gating_delta_rule_update(
                A_log=s.A_log, a=packed(s.a)[0], b=packed(s.b)[0], dt_bias=s.dt_bias, q=packed(s.q),
                k=packed(s.k), v=packed(s.v), scale=scale, initial_state=s.state,
                inplace_final_state=True, cu_seqlens=s.starts, ssm_state_indices=s.table,
                num_accepted_tokens=s.accepted, use_qk_l2norm_in_kernel=True), table_view))
    if "vllm_verify" in loaded.modules:
        found.append(vllm_verify(loaded.modules["vllm_verify"], case, scale))
    if "flashinfer" in loaded.modules:
        flashinfer = loaded.modules["flashinfer"]
        for s in case.sets:  # it writes the states into a buffer of their own
            B, T = s.table.shape
            s.snapshots = torch.empty(B, T, *s.state.shape[1:], device="cuda", dtype=s.state.dtype)

        def launch(s):
            return flashinfer.gdn.gated_delta_rule_decode_pretranspose(
                q=s.q, k=s.k, v=s.v, state=None, A_log=s.A_log, a=s.a, dt_bias=s.dt_bias, b=s.b,
                scale=scale, output=s.out, use_qk_l2norm=True, initial_state=s.state,
                initial_state_indices=s.slots, intermediate_states_buffer=s.snapshots,
                disable_state_update=True, backend="flashinfer")[0]

        found.append(Contestant(f"FlashInfer {flashinfer.version} CuTe", launch,
                                lambda s, result, rows: (result[:rows], s.snapshots[:rows])))
    return found


def vllm_verify(vllm, case, scale):
    """vLLM's kernel that has the gated norm behind the verification: other work than the row's. Its
    gate is open and its norm has weights of 1, so that its output times the root of the mean square
    of float64's is the verification's."""
    for s in case.sets:
        s.packed = torch.cat([x.flatten(0, 1).flatten(1) for x in (s.q, s.k, s.v)], 1)
        s.gate = torch.full_like(s.v.flatten(0, 1), 40.0)
        s.norm_weight = torch.ones(s.v.shape[-1], device="cuda", dtype=torch.bfloat16)
        s.normed = torch.empty_like(s.gate)

    def prepare(s):
        out = case.reference(s, min(case.B, 8))[0]
        s.root_mean_square = out.square().mean(-1, keepdim=True).sqrt()

    def launch(s):
        vllm.verify(s.packed, s.a.flatten(0, 1), s.b.flatten(0, 1), s.A_log, s.dt_bias, s.table, s.starts, s.accepted,
                    s.state, s.gate, s.norm_weight, s.normed, scale, 1e-12, "sigmoid")
        return s.normed

    def view(s, result, rows):
        out, states = table_view(s, result, rows)
        return out * s.root_mean_square, states

    return Contestant(f"vLLM {vllm.version} CUDA with gated norm", launch, view, prepare, other_work=True)


def tokens(s):
    """k, v, g and beta of `s`, a set or a set's `before`, packed over the rows."""
    return tuple(x.flatten(0, 1) for x in (s.k, s.v, s.g, s.beta))


def replay_view(s, result, rows):
    """Output [rows, T, HV, V] and the state in the row's slot."""
    B, T = s.table.shape
    return result.reshape(B, T, *result.shape[-2:])[:rows], s.state[s.slots[:rows].long()]


def gdn_replay(case, loaded):
    """A verification and a commit by replay, in two launches; beside them the contestants of
    gdn_verify(), which write the state after every token."""
    found = []
    verify, commit = (loaded.operator(f"gated_delta_rule_{name}") for name in ("update", "replay"))
    if verify is not None and commit is not None:
        def launch(s):
            out = verify(s.q.flatten(0, 1), *tokens(s), s.state, query_start_loc=s.starts,
                         state_indices=s.slots, use_qk_l2norm=True, read_only=True)
            commit(*tokens(s), s.state, s.committed, query_start_loc=s.starts,
                   state_indices=s.slots, use_qk_l2norm=True)
            return out

        found.append(Contestant(OURS, launch, replay_view))
    for other in gdn_verify(case, loaded):
        if other.other_work:
            continue

        def view(s, result, rows, view=other.view):
            out, states = view(s, result, rows)
            return out, states[torch.arange(rows, device="cuda"), (s.committed[:rows] - 1).long()]

        found.append(Contestant(f"{other.name}, snapshots", other.launch, view))
    return found


def gdn_fold(case, loaded):
    """A verification that first commits the verification before it, in one launch."""
    del case
    verify = loaded.operator("gated_delta_rule_update")
    if verify is None:
        return []

    def launch(s):
        k, v, g, beta = tokens(s.before)
        return verify(s.q.flatten(0, 1), *tokens(s), s.state, query_start_loc=s.starts,
                      state_indices=s.slots, use_qk_l2norm=True, fold_k=k, fold_v=v, fold_g=g,
                      fold_beta=beta, fold_query_start_loc=s.starts,
                      fold_num_accepted_tokens=s.committed)

    return [Contestant(OURS, launch, replay_view)]


def prefill_view(s, result, rows):
    """Outputs of the first rows' tokens, and the rows' states in their slots."""
    return result[:int(s.starts[rows])], s.state[s.slots[:rows].long()]


def conv_prefill(case, loaded):
    """Packed prompts, each of which continues from its state."""
    found = []
    ours = loaded.operator("causal_conv1d")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(
            s.x, s.weight, s.bias, s.state, query_start_loc=s.starts, state_indices=s.slots,
            activation="silu"), prefill_view))
    if "vllm" in loaded.modules:
        vllm = loaded.modules["vllm"]
        metadata = vllm_conv_programs(case.sets[0].lengths)
        resumes = torch.ones(case.B, dtype=torch.bool, device="cuda")
        found.append(Contestant(
            f"vLLM {vllm.version} Triton", lambda s: vllm.conv.causal_conv1d_fn(
                s.x.t(), s.weight, s.bias, s.state, s.starts, cache_indices=s.slots,
                has_initial_state=resumes, activation="silu", metadata=metadata).t(),
            prefill_view))
    return found


def vllm_conv_programs(lengths, block=8):
    """The row, and the block of 8 tokens of that row, of each of vLLM's Triton programs. vLLM's
    server makes these tensors once a step, so they are not timed."""
    counts = [-(-n // block) for n in lengths]
    as_tensor = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
    rows = as_tensor([row for row, count in enumerate(counts) for _ in range(count)])
    blocks = as_tensor([i for count in counts for i in range(count)])
    numbers = {"tot": sum(counts), "mlist": None, "mlist_len": sum(counts), "offsetlist": None,
               "batch_ptr": rows, "token_chunk_offset_ptr": blocks}
    return SimpleNamespace(nums_dict={block: numbers}, batch_ptr=rows,
                           token_chunk_offset_ptr=blocks)


def ssd_prefill(case, loaded):
    """Packed prompts, each of which continues from its state. vLLM takes the initial states
    gathered into one tensor, which is made before the timing; mamba-ssm takes no initial states for
    packed rows, so it runs only cases of one row."""
    found = []
    ours = loaded.operator("ssd_prefill")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(
            s.x, s.dt, s.A, s.B, s.C, s.state, D=s.D, z=s.z, dt_bias=s.dt_bias, dt_softplus=True,
            query_start_loc=s.starts, state_indices=s.slots, boundary_states=s.boundary,
            boundary_every=s.every), prefill_view))
    if case.sets[0].every:  # no peer leaves these states in a pool of float32
        return found
    for s in case.sets:
        gather_states(s)
    if "vllm_prefill" in loaded.modules:
        vllm = loaded.modules["vllm_prefill"]
        for chunk in (128, 256):
            found.append(vllm_ssd(vllm, case.sets[0].lengths, chunk))
    if "mamba_ssm_prefill" in loaded.modules and case.B == 1:
        mamba = loaded.modules["mamba_ssm_prefill"]

        def launch(s):
            z = None if s.z is None else s.z[None]
            out, s.last = mamba.ssd.mamba_chunk_scan_combined(
                s.x[None], s.dt[None], s.A, s.B[None], s.C[None], 128, D=s.D, z=z,
                dt_bias=s.dt_bias, initial_states=s.initial, dt_softplus=True,
                return_final_states=True)
            return out[0]

        found.append(Contestant(f"mamba-ssm {mamba.version} Triton, chunks of 128", launch,
                                lambda s, result, rows: (result, s.last), gather_states))
    return found


def gather_states(s):
    """Copies the rows' states into s.initial, in the order of rows. s.initial stays where it is,
    because captured launches have its address."""
    states = s.state[s.slots.long()]
    if hasattr(s, "initial"):
        s.initial.copy_(states)
    else:
        s.initial = states


def vllm_ssd(vllm, lengths, chunk):
    """vLLM's scan in chunks of at most `chunk` tokens, none of which spans two rows. It takes the
    chunks' ends, the last chunk of each row and the row of each chunk, made before the timing."""
    ends, last, row_of = [0], [], []
    for row, length in enumerate(lengths):
        begin = ends[-1]
        ends += [min(begin + i, begin + length) for i in range(chunk, length + chunk, chunk)]
        row_of += [row] * (len(ends) - 1 - len(row_of))
        last.append(len(ends) - 2)
    ends, last, row_of = (torch.tensor(x, dtype=torch.int32, device="cuda")
                          for x in (ends, last, row_of))

    def launch(s):
        vllm.ssd.mamba_chunk_scan_combined_varlen(
            s.x, s.dt, s.A, s.B, s.C, chunk, s.starts, ends, last, row_of, s.out, D=s.D, z=s.z,
            dt_bias=s.dt_bias, initial_states=s.initial, dt_softplus=True,
            state_dtype=s.state.dtype, final_states_out=s.state, final_state_indices=s.slots)
        return s.out

    return Contestant(f"vLLM {vllm.version} Triton, chunks of {chunk}", launch, prefill_view,
                      gather_states)


def gdn_prefill(case, loaded):
    """Packed prompts, each of which continues from its state, with gates computed before. The peers
    take the initial states gathered and the list of each row's chunks, both made before the timing.
    FLA runs a single row as a batch of one, its fastest form."""
    found = []
    ours = loaded.operator("gated_delta_rule_prefill")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(
            s.q, s.k, s.v, s.g, s.beta, s.state, query_start_loc=s.starts, state_indices=s.slots,
            use_qk_l2norm=True, boundary_states=s.boundary, boundary_every=s.every), prefill_view))
    if "flashinfer_prefill" in loaded.modules:
        found += flashinfer_delta(loaded.modules["flashinfer_prefill"], case)
    if case.sets[0].every:  # the others have no room for these states
        return found
    for s in case.sets:
        gather_states(s)
    if "flashqla" in loaded.modules:
        found += flashqla_delta(loaded.modules["flashqla"], case)
    chunks = [-(-n // 64) for n in case.sets[0].lengths]
    as_tensor = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
    indices = as_tensor([(row, i) for row, count in enumerate(chunks) for i in range(count)])
    offsets = as_tensor([sum(chunks[:row]) for row in range(len(chunks) + 1)])

    def contestant(name, function, **arguments):
        def launch(s):
            packed = {"cu_seqlens": s.starts} if "chunk_indices" in arguments else {}
            out, s.last = function(
                s.q[None], s.k[None], s.v[None], s.g[None], s.beta[None], initial_state=s.initial,
                output_final_state=True, use_qk_l2norm_in_kernel=True, **packed, **arguments)
            return out[0]

        def view(s, result, rows):
            return result[:int(s.starts[rows])], s.last[:rows]

        found.append(Contestant(name, launch, view, gather_states))

    if "vllm_delta_prefill" in loaded.modules:
        vllm = loaded.modules["vllm_delta_prefill"]
        contestant(f"vLLM {vllm.version} Triton", vllm.chunk.chunk_gated_delta_rule,
                   chunk_indices=indices, chunk_offsets=offsets)
    if "fla_prefill" in loaded.modules:
        fla = loaded.modules["fla_prefill"]
        contestant(f"FLA {fla.version} Triton", fla.chunk.chunk_gated_delta_rule,
                   state_v_first=True, **({"chunk_indices": indices} if case.B > 1 else {}))
    return found


NORMALISED = ", q and k normalised before"  # in a layer its convolution or a norm of its own does that


def normalised(x):
    """q or k after the L2 norm, rounded to its own type as the peers' norms round it."""
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def flashinfer_delta(flashinfer, case):
    """FlashInfer takes exp(g) in place of g, and states by slot. With use_cp "auto" it may cut a
    few long rows into parts that run side by side; a case of one row also times the row in one
    part."""
    lengths, every = case.sets[0].lengths, case.sets[0].every
    ends = [sum(n // every for n in lengths[:row]) for row in range(len(lengths) + 1)] if every else []
    ends = torch.tensor(ends, dtype=torch.int32, device="cuda")

    def contestant(note, cut, norm):
        def launch(s):
            q, k = (s.q, s.k) if norm else (s.normal_q, s.normal_k)
            kept = dict(state_checkpoints=s.boundary, checkpoint_cu_starts=ends,
                        checkpoint_every_n_tokens=every) if every else {}
            return flashinfer.prefill.chunk_gated_delta_rule(
                q.contiguous(), k.contiguous(), s.v.contiguous(), s.alpha, s.beta, initial_state=s.state,
                output_final_state=True, cu_seqlens=s.starts, use_qk_l2norm_in_kernel=norm, output=s.out,
                output_state=s.state, state_indices=s.slots, use_cp=cut, max_seqlen=max(lengths), **kept)[0]

        return Contestant(f"FlashInfer {flashinfer.version} CuTe{note}", launch, prefill_view, less_work=not norm)

    for s in case.sets:
        s.alpha = s.g.exp()  # once: captured launches know where it is
    found = [contestant("", "auto", True)]
    if len(lengths) == 1 and not every:
        found.append(contestant(", rows whole", False, True))
    return found + before_norm(case, every, lambda: contestant(NORMALISED, "auto", False))


def before_norm(case, every, make):
    """[make()], a contestant that takes q and k normalised before, which the sets get here; []
    where q and k come from a layer's convolution."""
    if every or case.kind != "gdn_prefill":
        return []
    for s in case.sets:
        if not hasattr(s, "normal_q"):
            s.normal_q, s.normal_k = normalised(s.q), normalised(s.k)
    return [make()]


def flashqla_delta(flashqla, case):
    """FlashQLA caches its plan of a batch by the identity of the tensor of the rows' starts, so all
    sets pass the first set's tensor."""
    starts = case.sets[0].starts

    def contestant(note, norm):
        def launch(s):
            q, k = (s.q, s.k) if norm else (s.normal_q, s.normal_k)
            out, s.last = flashqla.chunk_gated_delta_rule(
                q[None], k[None], s.v[None], s.g[None], s.beta[None], initial_state=s.initial,
                output_final_state=True, use_qk_l2norm_in_kernel=norm, cu_seqlens=starts, state_v_first=True)
            return out[0]

        def view(s, result, rows):
            return result[:int(s.starts[rows])], s.last[:rows]

        return Contestant(f"FlashQLA {flashqla.version} TileLang{note}", launch, view, gather_states, not norm)

    return [contestant("", True), *before_norm(case, 0, lambda: contestant(NORMALISED, False))]


def layer(case, loaded):
    """A convolution, a prefill and the next convolution. Our prefill runs between our convolutions,
    the peers' prefills between vLLM's, the only peer's convolution that takes slots."""
    def only(part):
        return SimpleNamespace(sets=[getattr(s, part) for s in case.sets], B=case.B, kind=f"part of {case.kind}")

    convs = {one.name.split()[0]: one for one in conv_prefill(only("conv"), loaded)}
    cores = (ssd_prefill if case.kind == "layer_ssd" else gdn_prefill)(only("core"), loaded)

    def joined(core, conv):
        def launch(s):
            s.into(s.core, conv.launch(s.conv))
            out = core.launch(s.core)
            conv.launch(s.next)
            return out

        prepare = None if core.prepare is None else lambda s: core.prepare(s.core)
        return Contestant(core.name, launch, lambda s, result, rows: core.view(s.core, result, rows), prepare)

    pairs = ((core, convs.get(OURS if core.name == OURS else "vLLM")) for core in cores)
    return [joined(core, conv) for core, conv in pairs if conv is not None]


def mla_decode(case, loaded):
    """One token per request. The peers divide the keys among blocks by a plan that is made before
    the timing, since their servers make one plan for all layers of a step. Our kernel divides them
    in each launch."""
    found = []
    one = case.sets[0]
    page = one.cache.shape[1]
    H, L = one.q.shape[2], one.table.shape[1] * page
    starts = torch.arange(case.B + 1, device="cuda", dtype=torch.int32)
    ours = loaded.operator("mla_decode")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(s.q, s.cache, s.table, s.lengths, s.scale),
                                lambda s, result, rows: (result[0][:rows], result[1][:rows])))
    if "flashmla" in loaded.modules and page == 64:  # it takes no other
        flashmla, plan = loaded.modules["flashmla"], []

        def launch_flashmla(s):
            out, lse, parts, splits = flashmla.decode(
                s.q, s.cache[:, :, None], 512, s.lengths, s.table, s.scale, False, *(plan or (None, None)), s.out)
            plan[:] = [parts, splits]  # the first call makes it
            return out, lse

        found.append(Contestant(f"FlashMLA of vLLM {flashmla.version}", launch_flashmla,
                                lambda s, result, rows: (result[0][:rows], result[1][:rows])))
    if "flash_attention_3" in loaded.modules:
        fa3 = loaded.modules["flash_attention_3"]
        plan_fa3 = fa3.plan(case.B, 1, L, H, 1, 64, 512, torch.bfloat16, one.lengths, starts, None, None, None, None,
                            page, 0, True, -1, -1, False, 0, None, 0)

        def launch_fa3(s):
            q, cache, nothing = s.q[:, 0], s.cache[:, :, None], None
            out, lse, *_ = fa3.forward(
                q[..., 512:], cache[..., 512:], cache[..., :512], nothing, nothing, q[..., :512], s.out[:, 0], starts,
                nothing, nothing, nothing, s.lengths, 1, L, s.table, *[nothing] * 8, s.scale, True, -1, -1, 0.0, True,
                plan_fa3, 0, nothing, 0, nothing, 1, 0, nothing)
            return out, lse

        found.append(Contestant(f"FlashAttention 3 of vLLM {fa3.version}", launch_fa3, lambda s, result, rows: (
            result[0][:rows, None], result[1].t()[:rows, :, None])))
    if "flashinfer_mla" in loaded.modules:
        found.append(flashinfer_mla(loaded.modules["flashinfer_mla"], case, starts, H, L, page))
    return found


def mla_decode_fp8(case, loaded):
    """One token per request over caches in e4m3. FlashMLA's dense kernel takes a cache with one
    scale, and queries in e4m3; only its sparse kernel takes tokens of 656 bytes, and gets the
    places of all tokens of a request."""
    found = []
    one = case.sets[0]
    H = one.q.shape[2]

    def view(s, result, rows):
        return result[0][:rows], result[1][:rows]

    ours = loaded.operator("mla_decode")
    if ours is not None:
        def decode(s, e4m3):
            return ours(s.q, s.cache, s.table, s.lengths, s.scale, kv_scale=s.kv_scale, e4m3_products=e4m3)

        in_e4m3 = case.operation == "mla_decode_e4m3"
        found.append(Contestant(OURS, lambda s: decode(s, in_e4m3), view))
        if in_e4m3:
            found.append(Contestant("mla_decode, products in float16", lambda s: decode(s, False), view, other_work=True))
    if one.form == "e4m3" and "flashmla_fp8" in loaded.modules:
        dense = loaded.modules["flashmla_fp8"]
        parts, splits = dense.plan(one.lengths, H, 1)
        found.append(Contestant(
            f"FlashMLA fp8 of vLLM {dense.version}",
            lambda s: dense.decode(s.q8, s.cache[:, :, None], 512, s.lengths, s.table, s.scale, False, parts, splits,
                                   s.q_scale, s.kv_scale), view))
    if one.form == "token656" and "flashmla" in loaded.modules:
        sparse, plan = loaded.modules["flashmla"], []

        def launch(s):
            out, lse, *made = sparse.sparse_decode(
                s.q, s.cache[:, :, None], s.tokens, None, None, *(plan or (None, None)), None, None, None, 512, s.scale,
                s.out, False)
            plan[:] = made  # the first call makes it
            return out, lse

        found.append(Contestant(f"FlashMLA sparse of vLLM {sparse.version}, all tokens", launch, view))
    return found


def flashinfer_scratch():
    """FlashInfer's workspaces, in bytes: 128 MiB on the GPU for partial results, 8 MiB on the GPU
    for the plan, and 8 MiB of pinned host memory in which the plan is made."""
    return (torch.empty(128 << 20, device="cuda", dtype=torch.uint8), torch.empty(8 << 20, device="cuda", dtype=torch.uint8),
            torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True))


def flashinfer_mla(flashinfer, case, starts, H, L, page):
    """FlashInfer's MLA kernel for Hopper. It takes the page numbers of all requests in one list
    instead of a table; the table's rows have no padding, so its flat view is that list."""
    floats, ints, pinned = flashinfer_scratch()
    lengths = torch.full((case.B,), L, dtype=torch.int32)
    plan, size = flashinfer.plan(floats, ints, pinned, starts.cpu(), starts.cpu() * (L // page), lengths, H, 512, False)
    ints[:size].copy_(pinned[:size])
    for s in case.sets:
        s.lse = torch.empty(case.B, H, device="cuda")

    def launch(s):
        q = s.q[:, 0]
        flashinfer.run(floats, ints, plan, q[..., :512], q[..., 512:], s.cache[..., :512], s.cache[..., 512:],
                       s.table.view(-1), s.out[:, 0], s.lse, 0, H, page, s.scale, True, 1.0, 1.0, None)
        return s.out, s.lse

    return Contestant(f"FlashInfer {flashinfer.version} CUDA", launch,
                      lambda s, result, rows: (result[0][:rows], result[1][:rows, :, None]))


def mla_prefill(case, loaded):
    """Prompts of packed rows, over decompressed keys and values."""

    def view(s, result, rows):
        del rows
        return result[0][s.tokens][:, s.heads], result[1][s.heads][:, s.tokens]

    found = []
    ours = loaded.operator("mla_prefill")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(s.q, s.k, s.v, s.starts, s.key_starts, s.scale, causal=s.causal),
                                view))
    if "flash_attention_3" in loaded.modules:
        fa3, nothing = loaded.modules["flash_attention_3"], None

        def launch(s):
            out, lse, *_ = fa3.forward(
                s.q, s.k, s.v, nothing, nothing, nothing, s.out, s.starts, s.key_starts, nothing, nothing, nothing,
                s.longest, s.longest_keys, *[nothing] * 9, s.scale, s.causal, -1, -1, 0.0, True, nothing, 1, nothing,
                0, nothing, 1, 0, nothing)
            return out, lse

        found.append(Contestant(f"FlashAttention 3 of vLLM {fa3.version}", launch, view))
    if "flashinfer_ragged" in loaded.modules:
        found.append(flashinfer_ragged(loaded.modules["flashinfer_ragged"], case, view))
    return found


def flashinfer_ragged(flashinfer, case, view):
    """FlashInfer's kernels for ragged prompts, with a plan made before the timing. Their lse is
    [tokens, heads] and a logarithm to base 2, so the view transposes it and multiplies it by ln
    2."""
    floats, ints, pinned = flashinfer_scratch()
    one = case.sets[0]
    starts, key_starts = one.starts.cpu(), one.key_starts.cpu()
    T, H = one.q.shape[:2]
    plan = flashinfer.plan(floats, ints, pinned, starts, key_starts, key_starts.diff(), T, len(starts) - 1, H, H, 1, False,
                           one.q.shape[2], one.v.shape[2], one.causal, -1)
    for s in case.sets:
        s.lse = torch.empty(T, H, device="cuda")

    def launch(s):
        flashinfer.run(floats, ints, plan, s.q, s.k, s.v, s.starts, s.key_starts, s.out, s.lse, int(s.causal), 0, -1, False,
                       None, None, None, None, 0.0, s.scale, 1.0, 0)
        return s.out, s.lse

    return Contestant(f"FlashInfer {flashinfer.version} CUDA", launch,
                      lambda s, result, rows: view(s, (result[0], result[1].t() * math.log(2)), rows))


def copy(case, loaded):
    """Slots copied within a pool [layers, slots, elements]."""
    del case

    def view(s, result, rows):
        del result
        moved = s.state[:, s.target[:rows]]
        return moved, moved

    def assign(s):
        s.state[:, s.target] = s.state[:, s.source]

    found = []
    ours = loaded.operator("state_copy")
    if ours is not None:
        found.append(Contestant(OURS, lambda s: ours(s.state, s.source32, s.target32), view))
    found.append(Contestant(f"torch {torch.__version__} indexing", assign, view))

    def words(s):  # index_copy_ moves element by element: it is faster on elements of 8 bytes
        state = s.state.view(torch.int64)
        state.index_copy_(1, s.target, state.index_select(1, s.source))

    found.append(Contestant(f"torch {torch.__version__} index_copy_ of int64", words, view))
    return found
