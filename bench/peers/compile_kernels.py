"""Compiles FlashInfer's prefills and decodes and FlashQLA's prefills of the gated delta rule for
Hopper, on a machine without a GPU.

    LOCKSTEP_PEERS=.lockstep/peers python3 bench/peers/compile_kernels.py flashinfer|decodes|flashqla

`flashinfer` compiles the prefills, `decodes` FlashInfer's decodes and verifications.

It needs PyTorch, nvidia-cutlass-dsl, tilelang and their dependencies on PYTHONPATH, and nvcc;
stage.sh provides all of them. The peers' own functions run over the cases of cases.py, on CPU
tensors that claim to be on a GPU. Every kernel that they ask for is compiled and kept
(kept_kernels.py), and none is launched.
"""

import contextlib
import ctypes
import itertools
import os
import sys
import types
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")  # a kernel from TileLang's cache cannot be exported
os.environ.setdefault("TILELANG_DEFAULT_TARGET", '{"kind": "cuda", "arch": "sm_90a"}')

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kept_kernels
from cases import GDN, GDN_PREFILLS

PROCESSORS, CAPABILITY, NAME = 132, (9, 0), "NVIDIA H200"  # an H200's multiprocessors, and sm_90
SHARED_BYTES = 228 * 1024  # shared memory of a multiprocessor
DL_CUDA = 2  # kDLCUDA, DLPack's number of the device type
STEPS, VERIFICATIONS = (1, 2, 3, 4, 8, 16, 32, 64, 96, 256, 1024), (1, 16, 64, 256)  # batches of cases.py


def be_an_h200():
    """Makes torch.cuda answer the peers' questions as on a machine with one H200."""
    properties = types.SimpleNamespace(multi_processor_count=PROCESSORS, name=NAME, major=9, minor=0)
    for name, answer in (("is_available", True), ("device_count", 1), ("current_device", 0),
                         ("get_device_capability", CAPABILITY), ("get_device_name", NAME),
                         ("get_device_properties", properties), ("is_current_stream_capturing", False),
                         ("current_stream", types.SimpleNamespace(cuda_stream=0)),
                         ("device", contextlib.nullcontext())):
        setattr(torch.cuda, name, lambda *arguments, answer=answer, **named: answer)


class OfDevice:
    """A CPU tensor whose DLPack capsule names a CUDA device."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **arguments):
        del arguments
        capsule = torch.utils.dlpack.to_dlpack(self.tensor)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        device_type = pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
        ctypes.cast(device_type, ctypes.POINTER(ctypes.c_int32))[0] = DL_CUDA
        return capsule

    def __dlpack_device__(self):
        return DL_CUDA, 0


def inputs():
    """Inputs with the shapes and types of each prefill case of cases.py, one set per case. Cases
    with slow gates differ only in values."""
    for lengths, more in GDN_PREFILLS:
        if "slow" not in more:
            yield inputs_of(lengths, **more)


def inputs_of(lengths, H=GDN.H, HV=GDN.HV, every=0):
    T, N, K = sum(lengths), len(lengths), GDN.K
    starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    packed = lambda heads: torch.empty(T, heads, K, dtype=torch.bfloat16)
    return types.SimpleNamespace(lengths=lengths, every=every, q=packed(H), k=packed(H), v=packed(HV), out=packed(HV),
                                 g=torch.empty(T, HV), beta=torch.empty(T, HV), state=torch.empty(N + 1, HV, K, K),
                                 starts=starts, slots=torch.arange(N, dtype=torch.int32))


def cute_without_a_gpu():
    """Makes the CuTe compiler take CPU tensors, and `load` launch nothing."""
    from cutlass import cute
    from cutlass.base_dsl.runtime import cuda

    import load

    def get_device_attribute(attribute, device_id=0):
        del device_id
        if "SHARED_MEMORY_PER_MULTIPROCESSOR" not in attribute.name:
            raise RuntimeError(f"the compiler asks for {attribute.name}")
        return SHARED_BYTES

    cuda.get_device_attribute = get_device_attribute
    from_dlpack = cute.runtime.from_dlpack
    cute.runtime.from_dlpack = lambda tensor, **named: from_dlpack(OfDevice(tensor), **named)
    load.load_kernel = lambda path, symbol: lambda *arguments, **named: None
    return cute, load


def compile_flashinfer():
    """Compiles and keeps FlashInfer's prefills, by CuTe."""
    cute, load = cute_without_a_gpu()

    def make(kernel, arguments, options, path, stem):
        if path.exists():
            return lambda *arguments: None
        load.link_kernel(cute.compile[options](kernel, *arguments), stem, path)
        print(path.name, flush=True)
        return lambda *arguments: None

    prefill = load.flashinfer_prefill(make).prefill
    for s in inputs():
        more = {}
        if s.every:
            ends = [sum(n // s.every for n in s.lengths[:row]) for row in range(len(s.lengths) + 1)]
            more = dict(state_checkpoints=torch.empty(ends[-1], *s.state.shape[1:]), checkpoint_every_n_tokens=s.every,
                        checkpoint_cu_starts=torch.tensor(ends, dtype=torch.int32))
        prefill.chunk_gated_delta_rule(
            s.q, s.k, s.v, s.g, s.beta, initial_state=s.state, output_final_state=True, cu_seqlens=s.starts,
            output=s.out, output_state=s.state, state_indices=s.slots, max_seqlen=max(s.lengths), **more)
    from flashinfer.gdn_kernels import qk_l2norm

    qk_l2norm._compiled(torch.bfloat16, 128, qk_l2norm.gdn_device_target("cuda:0").compile_key)


def compile_decodes():
    """Compiles and keeps FlashInfer's decodes and its verifications of four tokens, by CuTe, as the
    calls of peers.py ask for them."""
    _, load = cute_without_a_gpu()
    decode = load.flashinfer().gdn.gated_delta_rule_decode_pretranspose
    target = sys.modules["flashinfer.gdn_kernels.device_target"].gdn_device_target
    for name, module in list(sys.modules.items()):
        if name.startswith("flashinfer") and hasattr(module, "gdn_device_target"):
            module.gdn_device_target = lambda device: target("cuda:0")
    H, HV, K, V = GDN.H, GDN.HV, GDN.K, GDN.V
    narrow = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
    for dtype, (T, B) in itertools.product((torch.float32, torch.bfloat16),
                                           [(1, B) for B in STEPS] + [(4, B) for B in VERIFICATIONS]):
        state = torch.empty(B * T + 1, HV, V, K, dtype=dtype)
        by_slot = dict(state=None, initial_state=state, initial_state_indices=torch.arange(1, B + 1, dtype=torch.int32))
        states = dict(state=state[1:]) if T == 1 and dtype == torch.float32 else by_slot
        if T > 1:
            states |= dict(intermediate_states_buffer=torch.empty(B, T, HV, V, K, dtype=dtype),
                           disable_state_update=True)
        decode(q=narrow(B, T, H, K), k=narrow(B, T, H, K), v=narrow(B, T, HV, V), A_log=torch.empty(HV),
               a=narrow(B, T, HV), dt_bias=torch.empty(HV), b=narrow(B, T, HV), scale=K**-0.5,
               output=narrow(B, T, HV, V), use_qk_l2norm=True, backend="flashinfer", **states)


def compile_flashqla():
    """Compiles and keeps FlashQLA's kernels, by TileLang."""
    import tilelang
    from tilelang.contrib import nvcc

    import load

    nvcc.get_target_compute_version = lambda *arguments: "{}.{}".format(*CAPABILITY)
    compiler = tilelang.jit
    folder = load.ROOT / "flashqla_kernels"
    folder.mkdir(exist_ok=True)

    def find(maker, options, stem, arguments, named):
        path = folder / f"{stem}.so"
        if not path.exists():
            kernel = compiler(**options)(maker)(*arguments, **named)
            kernel.adapter.get_exportable_executable().export_library(str(path))
            print(path.name, flush=True)
        return lambda *tensors: None

    tilelang.jit = kept_kernels.tilelang_jit(find)
    sys.path.append(str(load.ROOT))
    from flash_qla.ops.gated_delta_rule import chunk_gated_delta_rule

    for s in inputs():
        chunk_gated_delta_rule(s.q[None], s.k[None], s.v[None], s.g[None], s.beta[None],
                               initial_state=s.state[1:], output_final_state=True, cu_seqlens=s.starts,
                               state_v_first=True)


if __name__ == "__main__":
    makers = {"flashinfer": compile_flashinfer, "decodes": compile_decodes, "flashqla": compile_flashqla}
    if len(sys.argv) != 2 or sys.argv[1] not in makers:
        sys.exit(__doc__)
    be_an_h200()
    makers[sys.argv[1]]()
