"""Loads the peers' kernels from the files that stage.sh unpacked.

An installed package is used as it is. A staged one is imported without its packages' own
`__init__` files, which would pull in whole servers: empty packages stand in their places, and the
few names that the kernels' files ask for (a logger, the platform) are given here.
"""

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch

import kept_kernels

ROOT = Path(
    os.environ.get("LOCKSTEP_PEERS", Path(__file__).resolve().parents[2] / ".lockstep" / "peers")
)


class Absent(Exception):
    """Raised where a peer cannot be run; the text tells the reason."""


def staged(name):
    """The staged folder of a peer and its version; raises Absent where it is not staged."""
    folder = ROOT / name
    if not (folder / "VERSION").exists():
        raise Absent(f"{name} is neither installed nor staged in {ROOT.name}/")
    return folder, (folder / "VERSION").read_text().strip()


def installed(name, distribution=None):
    """The installed version of a package, or None."""
    try:
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.metadata.version(distribution or name)
    except (ImportError, ValueError, importlib.metadata.PackageNotFoundError):
        return None


def package(name, path=None, **names):
    """Registers an empty package that finds its modules in `path` and holds `names`."""
    module = types.ModuleType(name)
    module.__path__ = [str(path)] if path else []
    for key, value in names.items():
        setattr(module, key, value)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)
    return module


def quiet_logger(name):
    """A logger that has the methods debug_once, info_once and warning_once of vLLM's and
    FlashInfer's loggers; here they do nothing."""
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, f"{level}_once", lambda *args, **kwargs: None)
    return logger


def vllm():
    """vLLM's Triton kernels: modules `conv`, `ssu`, `recurrent`, `gating`, and `version`."""
    version = installed("vllm")
    if version is None:
        folder, version = staged("vllm")
        stub_vllm(folder)
    ops = "vllm.model_executor.layers.mamba.ops"
    linear = "vllm.third_party.flash_linear_attention.ops"
    return types.SimpleNamespace(
        version=version, conv=importlib.import_module(f"{ops}.causal_conv1d"),
        ssu=importlib.import_module(f"{ops}.mamba_ssm"), recurrent=importlib.import_module(f"{linear}.fused_recurrent"),
        gating=importlib.import_module(f"{linear}.fused_sigmoid_gating"))


def vllm_ring():
    """vLLM's Mamba2 decode with a ring of pending tokens: module `ring`, and `version`."""
    version = vllm().version
    ring = importlib.import_module(
        "vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only")
    return types.SimpleNamespace(version=version, ring=ring)


def vllm_verify():
    """vLLM's verification of the gated delta rule with the gated norm behind it, in one CUDA
    kernel: operator `verify`, and `version`."""
    version = load_packed("_C_stable_libtorch.abi3.so")
    return types.SimpleNamespace(version=version, verify=torch.ops._C.fused_gdn_decode_post_conv_mtp)


def vllm_rms_norm():
    """vLLM's RMS norm in CUDA: operator `norm`, and `version`."""
    version = load_packed("_C_stable_libtorch.abi3.so")
    return types.SimpleNamespace(version=version, norm=torch.ops._C.rms_norm)


def vllm_scan():
    """vLLM's scan of Mamba1 in CUDA: operator `scan`, and `version`."""
    version = load_packed("_C_stable_libtorch.abi3.so")
    return types.SimpleNamespace(version=version, scan=torch.ops._C.selective_scan_fwd)


def vllm_norm():
    """vLLM's gated RMS norm in Triton: function `norm`, and `version`."""
    version = vllm().version
    if installed("vllm") is None:
        any_kernel = type("VllmJitKernel", (), {"__class_getitem__": classmethod(lambda cls, key: cls)})
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))  # einops is staged there
        package("vllm.model_executor.warmup")
        package("vllm.model_executor.warmup.jit_warmup", VllmJitKernel=any_kernel)
        package("vllm.model_executor.warmup.jit_warmup_triton_helper", TritonPointerInputVariant=object,
                TritonWarmupTensor=object, triton_scalar_specialization_rep=None)
        package("vllm.utils.math_utils", cdiv=lambda a, b: (a + b - 1) // b,
                next_power_of_2=lambda n: 1 << (n - 1).bit_length())
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        sys.modules["vllm.utils.platform_utils"].num_compute_units = lambda device=0: properties.multi_processor_count
    guard = importlib.import_module("vllm.third_party.flash_linear_attention.ops.layernorm_guard")
    return types.SimpleNamespace(version=version, norm=guard.rmsnorm_fn)


def vllm_invariant():
    """vLLM's products in Triton whose bits do not depend on the batch: functions `mm` and `bmm`, and
    `version`."""
    version = installed("vllm")
    if version is None:
        folder, version = staged("vllm")
        stub_vllm(folder)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = types.SimpleNamespace(major=properties.major, minor=properties.minor)
        sys.modules["vllm.platforms"].current_platform.get_device_capability = lambda device_id=0: capability
        package("vllm.platforms.interface", DeviceCapability=tuple)
        package("vllm.utils.mem_utils",
                get_max_shared_memory_bytes=lambda device=0: properties.shared_memory_per_block_optin)
        package("vllm.utils.nccl", pin_nccl_env=None)
        sys.modules["vllm.utils.platform_utils"].num_compute_units = lambda device=0: properties.multi_processor_count
        sys.modules["vllm.utils.torch_utils"].is_torch_equal_or_newer = None
        package("vllm.model_executor.determinism", folder / "model_executor" / "determinism")
    invariant = importlib.import_module("vllm.model_executor.determinism.batch_invariant")
    return types.SimpleNamespace(version=version, mm=invariant.matmul_persistent, bmm=invariant.bmm_batch_invariant)


class CublasInvariant:
    """cuBLAS without a workspace, which then cannot divide K: so vLLM multiplies on Hopper where bits must
    not depend on the batch. PyTorch gives its own handle a workspace, so this is another one."""

    def __init__(self):
        self.library = ctypes.CDLL(loaded_library(r"/libcublas\.so"))
        self.handle = ctypes.c_void_p()
        self.ask("cublasCreate_v2", ctypes.byref(self.handle))
        number = ctypes.c_int()
        self.ask("cublasGetVersion_v2", self.handle, ctypes.byref(number))
        self.version = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def ask(self, function, *arguments):
        status = getattr(self.library, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function}: status {status}")

    def bmm(self, x, w):
        """x [G, M, K] times w [G, N, K] transposed, in bf16 with sums in float32."""
        (G, M, K), N = x.shape, w.shape[1]
        out = torch.empty(G, M, N, device=x.device, dtype=x.dtype)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        bf16, float32, transposed, plain, tensor_cores = 14, 68, 1, 0, 99  # of the library's enumerations
        size, data = ctypes.c_longlong, ctypes.c_void_p
        self.ask("cublasSetStream_v2", self.handle, data(torch.cuda.current_stream().cuda_stream))
        self.ask("cublasSetWorkspace_v2", self.handle, data(), ctypes.c_size_t(0))  # a new stream resets it
        self.ask("cublasGemmStridedBatchedEx", self.handle, transposed, plain, N, M, K, ctypes.byref(one),
                 data(w.data_ptr()), bf16, K, size(N * K), data(x.data_ptr()), bf16, K, size(M * K),
                 ctypes.byref(zero), data(out.data_ptr()), bf16, N, size(M * N), G, float32, tensor_cores)
        return out


def cublas_invariant():
    """cuBLAS without a workspace: function `bmm`, and `version`."""
    torch.mm(*torch.ones(2, 8, 8, device="cuda"))  # PyTorch loads the library
    return CublasInvariant()


def deep_gemm():
    """DeepGEMM's product in e4m3, as vLLM's wheel has it: `product`, which takes the scales that
    `aligned` has arranged, and `version`. It compiles its kernels when they are called first."""
    archive = ROOT / "deep_gemm.tar.xz"
    if not archive.exists():
        raise Absent(f"{archive.name} is not staged")
    folder = tempfile.mkdtemp(prefix="deep_gemm_")
    subprocess.run(["tar", "-C", folder, "-xJf", str(archive)], check=True)
    os.environ.setdefault("DG_JIT_CACHE_DIR", f"{folder}/cache")
    sys.path.insert(0, folder)
    library = importlib.import_module("deep_gemm")
    return types.SimpleNamespace(version=library.__version__, product=library.fp8_gemm_nt,
                                 aligned=library.utils.layout.get_mn_major_tma_aligned_tensor)


def sglang_ring():
    """SGLang's decode of the gated delta rule with a ring of pending tokens, in Triton: function
    `decode`, and `version`."""
    version = installed("sglang")
    if version is None:
        folder, version = staged("sglang")
        package("sglang", folder)
        for name in ("kernels", "kernels.ops", "kernels.ops.attention", "kernels.ops.attention.linear"):
            package(f"sglang.{name}", folder / name.replace(".", "/"))
    ring = importlib.import_module("sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm")
    return types.SimpleNamespace(version=version, decode=ring.fused_recurrent_linear_replayssm_decode)


def vllm_prefill():
    """vLLM's chunked scan of Mamba2: module `ssd`, and `version`."""
    version = vllm().version
    ssd = importlib.import_module("vllm.model_executor.layers.mamba.ops.ssd_combined")
    return types.SimpleNamespace(version=version, ssd=ssd)


def vllm_delta_prefill():
    """vLLM's chunked prefill of the gated delta rule: module `chunk`, and `version`."""
    version = vllm().version
    chunk = importlib.import_module("vllm.third_party.flash_linear_attention.ops.chunk")
    return types.SimpleNamespace(version=version, chunk=chunk)


def stub_vllm(folder):
    """Registers stand-ins for the modules outside the kernels' own folders that vLLM's Triton files
    import."""
    import triton
    import triton.language as tl
    import triton.language.extra.libdevice as tldevice

    capability = torch.cuda.get_device_capability()
    number = capability[0] * 10 + capability[1]
    platform = types.SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: True, is_cuda_alike=lambda: True, is_rocm=lambda: False,
        is_xpu=lambda: False, is_arch_support_pdl=lambda: capability >= (9, 0),
        is_device_capability_family=lambda family, device_id=0: capability[0] == family // 10,
        is_device_capability=lambda wanted, device_id=0: number == wanted,
        has_device_capability=lambda wanted, device_id=0: number >= wanted)
    device_name = torch.cuda.get_device_name().replace(" ", "_")
    package("vllm", folder)
    package("vllm.platforms", current_platform=platform)
    package("vllm.triton_utils", HAS_TRITON=True, triton=triton, tl=tl, tldevice=tldevice)
    package("vllm.envs", VLLM_TUNED_CONFIG_FOLDER=None)
    package("vllm._custom_ops")
    package("vllm.logger", init_logger=quiet_logger)
    package("vllm.utils")
    package("vllm.utils.platform_utils", get_device_name_as_file_name=lambda: device_name)
    package("vllm.utils.torch_utils", async_tensor_h2d=None)
    package("vllm.utils.gpu_sync_debug", gpu_sync_allowed=None)
    for name in ("v1", "v1.attention", "v1.attention.backends"):
        package(f"vllm.{name}")
    package("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0, PAD_SLOT_ID=-1)
    for name in ("model_executor", "model_executor.layers", "model_executor.layers.mamba",
                 "model_executor.layers.mamba.ops", "third_party",
                 "third_party.flash_linear_attention", "third_party.flash_linear_attention.ops"):
        package(f"vllm.{name}", folder / name.replace(".", "/"))


def fla():
    """FLA's recurrent gated delta rule: module `recurrent`, and `version`."""
    version = installed("fla", "fla-core")
    if version is None:
        folder, version = staged("fla")
        package("fla", folder, __version__=version)
        for name in ("ops", "ops.utils", "ops.gated_delta_rule"):
            package(f"fla.{name}", folder / name.replace(".", "/"))
    recurrent = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
    return types.SimpleNamespace(version=version, recurrent=recurrent)


def fla_prefill():
    """FLA's chunked prefill of the gated delta rule, in Triton: module `chunk`, and `version`."""
    version = fla().version
    if installed("fla", "fla-core") is None:
        os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # other backends are not staged
        folder, _ = staged("fla")
        for name in ("modules", "modules.norm", "ops.common", "ops.common.backends", "ops.cp",
                     "ops.gated_delta_rule.backends"):
            package(f"fla.{name}", folder / name.replace(".", "/"))
        sys.modules["fla.ops.cp"].FLACPContext = object  # a type for runs over several GPUs, which none is
        del sys.modules["fla.ops.utils"]  # the chunks import names of the real package, so no stand-in may be there
    chunk = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    return types.SimpleNamespace(version=version, chunk=chunk)


def mamba_ssm():
    """mamba-ssm's Triton kernel: module `ssu`, and `version`."""
    version = installed("mamba_ssm", "mamba-ssm")
    if version is None:
        folder, version = staged("mamba_ssm")
        package("mamba_ssm", folder)
        package("mamba_ssm.ops", folder / "ops")
        package("mamba_ssm.ops.triton", folder / "ops" / "triton")
    ssu = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    return types.SimpleNamespace(version=version, ssu=ssu)


def mamba_ssm_prefill():
    """mamba-ssm's chunked scan: module `ssd`, and `version`."""
    version = mamba_ssm().version
    if "mamba_ssm.utils" not in sys.modules and not installed("mamba_ssm", "mamba-ssm"):
        package("mamba_ssm.utils", staged("mamba_ssm")[0] / "utils")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # ssd_combined imports einops, which is staged there
    ssd = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    return types.SimpleNamespace(version=version, ssd=ssd)


def mamba_ssm_scan():
    """mamba-ssm's scan of Mamba1 in CUDA, as stage.sh compiles it: operator `scan`, and `version`."""
    version, library = staged("mamba_ssm")[1], ROOT / "mamba_kernels" / "selective_scan.so"
    if not library.exists():
        raise Absent("its CUDA sources were not compiled when the peers were staged")
    torch.ops.load_library(str(library))
    return types.SimpleNamespace(version=version, scan=torch.ops.mamba_ssm.selective_scan_fwd)


def flashinfer():
    """FlashInfer's CuTe decode kernels of the gated delta rule: module `gdn`, and `version`."""
    version = installed("flashinfer", "flashinfer-python")
    if version is None:
        folder, version = staged("flashinfer")
        stub_flashinfer(folder)
    gdn = importlib.import_module("flashinfer.gdn_decode")
    return types.SimpleNamespace(version=version, gdn=gdn)


def flashinfer_prefill(make=None):
    """FlashInfer's chunked prefill of the gated delta rule: module `prefill`, and `version`. `make`
    compiles a kernel that is not kept yet (compile_cache() in kept_kernels.py); without it only the
    kernels that compile_kernels.py has kept can run."""
    version = flashinfer().version
    if installed("flashinfer", "flashinfer-python") is None:
        def missing(kernel, *arguments):
            raise Absent(f"FlashInfer's kernel {type(kernel).__name__} was not compiled for this")

        cache = kept_kernels.compile_cache(ROOT / "flashinfer_kernels", load_kernel, make or missing)
        inner = "flashinfer.gdn_kernels.delta_rule_dsl"
        package("flashinfer.api_logging", flashinfer_api=lambda **named: lambda function: function)
        package("flashinfer.cute_dsl")
        package("flashinfer.cute_dsl.availability", is_cute_dsl_arch_supported=lambda *capability: True)
        for name in ("trace", "trace.templates"):
            package(f"flashinfer.{name}")
        package("flashinfer.trace.templates.gdn", gdn_prefill_trace=None)
        package(inner, staged("flashinfer")[0] / "gdn_kernels" / "delta_rule_dsl")
        package(f"{inner}.custom_compile_cache", **cache)
        single = importlib.import_module(f"{inner}.delta_rule_sm90").delta_rule_prefill_dsl_sm90
        chunked = importlib.import_module(f"{inner}.delta_rule_cp_sm90").cp_delta_rule_dsl_sm90
        kernels = sys.modules["flashinfer.gdn_kernels"]
        kernels.chunk_gated_delta_rule_sm90, kernels.cp_delta_rule_dsl_sm90 = single, chunked
    prefill = importlib.import_module("flashinfer.gdn_prefill")
    return types.SimpleNamespace(version=version, prefill=prefill)


def flashqla():
    """FlashQLA's chunked prefill of the gated delta rule: function `chunk_gated_delta_rule`, and
    `version`. If it is staged and not installed, its kernels are those that compile_kernels.py has
    kept, and TileLang's runtime is there without its compiler."""
    version = installed("flash_qla", "flash-qla")
    if version is None:
        version = staged("flash_qla")[1]
        stub_tilelang()
    ops = importlib.import_module("flash_qla.ops.gated_delta_rule")
    return types.SimpleNamespace(version=version, chunk_gated_delta_rule=ops.chunk_gated_delta_rule)


def stub_tilelang():
    """Registers stand-ins for TileLang's modules that FlashQLA's files import; the stand-in for its
    `jit` finds kept kernels."""
    tvm_ffi = load_tvm_ffi()
    runtime, kernels = ROOT / "tilelang_runtime" / "libtvm_runtime.so", ROOT / "flashqla_kernels"
    if not runtime.exists() or not list(kernels.glob("*.so")):
        raise Absent("FlashQLA's kernels were not compiled when the peers were staged")
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    tvm_ffi.register_global_func("__tvm_tensormap_create_tiled", kept_kernels.create_tensor_map)

    def find(maker, options, stem, arguments, named):
        del options, arguments
        path = kernels / f"{stem}.so"
        if not path.exists():
            raise Absent(f"FlashQLA's kernel {maker.__name__} was not compiled for {named}")
        return tvm_ffi.load_module(str(path))["main"]

    language = kept_kernels.StandIn("tilelang.language")
    package("tilelang", jit=kept_kernels.tilelang_jit(find), cdiv=lambda a, b: (a + b - 1) // b, language=language,
            PassConfigKey=language.PassConfigKey, layout=language.layout)
    sys.modules["tilelang.language"] = language
    package("tilelang.contrib")
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    package("tilelang.contrib.nvcc", get_target_compute_version=lambda: capability)


def load_tvm_ffi():
    """The staged apache-tvm-ffi, which loads FlashInfer's and FlashQLA's libraries."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")  # it must not build its torch bridge here
    if importlib.util.find_spec("tvm_ffi") is None:
        raise Absent("apache-tvm-ffi is not here")
    return importlib.import_module("tvm_ffi")


def stub_flashinfer(folder):
    """Registers FlashInfer's package with stand-ins for all but the gated delta rule's files, and
    replaces its disk cache of compiled kernels by ours.

    With the CuTe compiler (installed, or staged as cutlass_dsl_*.tar.xz) a kernel is compiled once
    and kept as a small library; without it the kept libraries are loaded, and stand-ins, which are
    never called, have the compiler's names.
    """
    load_tvm_ffi()
    compiler = has_cute_compiler()
    kernels = ROOT / "flashinfer_kernels"
    if not compiler and not list(kernels.glob("*.so")):
        raise Absent("neither the CuTe compiler nor kernels compiled by it are here")
    if not compiler:
        kept_kernels.stand_in_for("cutlass")

    def build_and_load(module_name, kernel_name, compile_fn, extra_key_files=()):
        del extra_key_files
        symbol = re.sub(r"[^0-9a-zA-Z_]", "_", f"{module_name}_{kernel_name}")
        library = kernels / f"{symbol}.so"
        if not library.exists():
            if not compiler:
                raise Absent(f"FlashInfer's kernel {symbol} was not compiled before")
            compiled = compile_fn()
            try:
                link_kernel(compiled, symbol, library)
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                text = getattr(error, "stderr", None) or error
                print(f"kernel {symbol} could not be kept: {text}", flush=True)
                return compiled
        return load_kernel(library, symbol)

    capability = torch.cuda.get_device_capability()
    package("flashinfer", folder)
    name, properties = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0)
    package("flashinfer.utils", get_compute_capability=lambda device: capability, get_device_name=lambda device: name,
            get_device_sm_count=lambda device: properties.multi_processor_count, _get_cache_buf=scratch_buffer)
    package("flashinfer.jit")
    package("flashinfer.jit.core", logger=quiet_logger("flashinfer"))
    package("flashinfer.jit.cute_dsl_core", build_and_load_cute_dsl_kernel=build_and_load)


@functools.cache
def scratch_buffer(name, size, device):
    """Replaces FlashInfer's _get_cache_buf: a buffer of `size` bytes whose address is a multiple of
    128, the same one for the same arguments."""
    del name
    buffer = torch.empty(size + 128, dtype=torch.uint8, device=device)
    begin = -buffer.data_ptr() % 128
    return buffer[begin:begin + size]


def flashinfer_ssu(state_dtype):
    """FlashInfer's function selective_state_update for one state type, bf16 inputs and weights,
    float32 A, P = 64, N = 128 and one token. nvcc builds its CUDA kernels at the first use."""
    tvm_ffi = load_tvm_ffi()
    folder, _ = staged("flashinfer")
    kernels = ROOT / "flashinfer_kernels"
    name = str(state_dtype).removeprefix("torch.")
    library = kernels / f"selective_state_update_{name}.so"
    if not library.exists():
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        if not Path(nvcc).exists():
            raise Absent("there is no nvcc to build FlashInfer's CUDA kernels")
        build_ssu(nvcc, folder / "data", state_dtype, library)
    return tvm_ffi.load_module(str(library))["selective_state_update"]


def ring_library(state_dtype, H, P, N, G):
    """The path of the library of flashinfer_ring() for one type and shape of states."""
    name = str(state_dtype).removeprefix("torch.")
    return ROOT / "flashinfer_kernels" / f"checkpointing_ssu_{name}_{H}x{P}x{N}_{G}.so"


def flashinfer_ring():
    """FlashInfer's Mamba2 decode with a ring of pending tokens, which stage.sh builds for some
    shapes: function `decode(state_dtype, H, P, N, G)`, which returns its function checkpointing_ssu
    for one token and a ring of 16 entries, and `version`."""
    tvm_ffi = load_tvm_ffi()
    if not list((ROOT / "flashinfer_kernels").glob("checkpointing_ssu_*.so")):
        raise Absent("FlashInfer's checkpointing_ssu was not built when the peers were staged")

    @functools.cache
    def decode(state_dtype, H, P, N, G):
        library = ring_library(state_dtype, H, P, N, G)
        if not library.exists():
            raise Absent(f"FlashInfer's checkpointing_ssu was not built for {library.stem}")
        return tvm_ffi.load_module(str(library))["checkpointing_ssu"]

    return types.SimpleNamespace(version=staged("flashinfer")[1], decode=decode)


def flashinfer_mla():
    """FlashInfer's CUDA kernel for MLA on Hopper, which stage.sh builds: functions `plan` and
    `run`, and `version`."""
    library = ROOT / "flashinfer_kernels" / "batch_mla_sm90.so"
    if not library.exists():
        raise Absent("FlashInfer's kernel for MLA was not built when the peers were staged")
    module = load_tvm_ffi().load_module(str(library))
    return types.SimpleNamespace(version=staged("flashinfer")[1], plan=module["plan"], run=module["run"])


def flashinfer_ragged():
    """FlashInfer's CUDA kernels for ragged prompts on Hopper, with keys of 192 and values of 128
    columns, which stage.sh builds: functions `plan` and `run`, and `version`."""
    library = ROOT / "flashinfer_kernels" / "batch_prefill_sm90.so"
    if not library.exists():
        raise Absent("FlashInfer's kernels for ragged prompts were not built when the peers were staged")
    module = load_tvm_ffi().load_module(str(library))
    return types.SimpleNamespace(version=staged("flashinfer")[1], plan=module["plan"], run=module["ragged_run"])


def flashinfer_rope():
    """FlashInfer's kernel that rotates queries and keys, rounds them into e4m3 and writes keys into
    a paged cache, which stage.sh builds: function `write`, and `version`."""
    library = ROOT / "flashinfer_kernels" / "rope.so"
    if not library.exists():
        raise Absent("FlashInfer's rotation and write was not built when the peers were staged")
    module = load_tvm_ffi().load_module(str(library))
    return types.SimpleNamespace(version=staged("flashinfer")[1], write=module["rope_quantize_append_paged_kv_cache"])


def vllm_libraries():
    """The folder with the staged CUDA libraries of vLLM's wheel, and the wheel's version."""
    return staged("vllm_libraries")


def flashmla():
    """DeepSeek's FlashMLA as vLLM builds it: operators `decode` and `sparse_decode`, and `version`."""
    folder, version = vllm_libraries()
    torch.ops.load_library(str(folder / "_flashmla_C.abi3.so"))
    ops = torch.ops._flashmla_C
    return types.SimpleNamespace(version=version, decode=ops.dense_decode_fwd, sparse_decode=ops.sparse_decode_fwd)


def flashmla_fp8():
    """FlashMLA's dense kernel for e4m3 as vLLM builds it: operators `decode` and `plan`, and `version`."""
    folder, version = vllm_libraries()
    torch.ops.load_library(str(folder / "_flashmla_extension_C.abi3.so"))
    ops = torch.ops._flashmla_extension_C
    return types.SimpleNamespace(version=version, decode=ops.fwd_kvcache_mla_fp8,
                                 plan=ops.get_mla_decoding_metadata_dense_fp8)


def load_packed(name):
    """Loads a library of vLLM's wheel that stage.sh has packed: _vllm_fa3_C has 14 MB instead of
    170, _C_stable_libtorch 11 instead of 93. Returns the wheel's version."""
    folder, version = vllm_libraries()
    if not (folder / f"{name}.xz").exists():
        raise Absent(f"{name} was not packed when the peers were staged")
    with tempfile.TemporaryDirectory() as unpacked:
        library = Path(unpacked) / name
        with lzma.open(folder / f"{name}.xz") as packed, library.open("wb") as file:
            shutil.copyfileobj(packed, file)
        torch.ops.load_library(str(library))
    return version


def flash_attention_3():
    """FlashAttention 3 as vLLM builds it: its operators `forward` and `plan`, and `version`."""
    version = load_packed("_vllm_fa3_C.abi3.so")
    ops = torch.ops._vllm_fa3_C
    return types.SimpleNamespace(version=version, forward=ops.fwd, plan=ops.get_scheduler_metadata)


def vllm_cache():
    """vLLM's own CUDA kernels: `rms_norm`; `write`, which rotates and writes latents in one launch;
    and `version`."""
    version = load_packed("_C_stable_libtorch.abi3.so")
    return types.SimpleNamespace(version=version, rms_norm=torch.ops._C.rms_norm,
                                 write=torch.ops._C_cache_ops.concat_and_cache_mla_rope_fused)


def build_ssu(nvcc, data, state_dtype, library):
    """Builds the library of flashinfer_ssu() with the flags that FlashInfer's own build uses."""
    state_type = {torch.float32: "float", torch.bfloat16: "nv_bfloat16"}[state_dtype]
    types = {"state_dtype": state_type, "input_dtype": "nv_bfloat16",
             "weight_dtype": "nv_bfloat16", "matrixA_dtype": "float", "stateIndex_dtype": "int32_t",
             "cu_seqlens_dtype": "int32_t", "num_accepted_tokens_dtype": "int64_t",
             "state_scale_type": "void", "dim": "64", "dstate": "128", "ntokens_mtp": "1",
             "philox_rounds": "0"}
    sources = ("selective_state_update.cu", "selective_state_update_kernel_inst.cu",
               "flashinfer_mamba_binding.cu")
    with tempfile.TemporaryDirectory() as folder:
        text = (data / "csrc" / "selective_state_update_customize_config.jinja").read_text()
        for key, value in types.items():
            text = text.replace("{{ " + key + " }}", value)
        (Path(folder) / "selective_state_update_config.inc").write_text(text)
        for source in sources:
            shutil.copy(data / "csrc" / source, folder)
        shutil.copytree(data / "include", Path(folder) / "include")
        for header in (Path(folder) / "include").rglob("mamba/*.cuh"):  # nvcc 13.0 refuses a narrowing there
            text = header.read_text()
            header.write_text(text.replace("* DIM, params.state_stride_batch}",
                                           "* DIM, (uint64_t)params.state_stride_batch}"))
        flags = ["-DFLASHINFER_ENABLE_" + f for f in
                 ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")]
        includes = [Path(folder), Path(folder) / "include", data / "csrc",
                    ROOT / "tvm_ffi" / "include"]
        includes += sorted({p.parent.parent for p in (ROOT / "tvm_ffi").rglob("dlpack/dlpack.h")})
        command = [nvcc, "-shared", "-std=c++17", "-O3", "-use_fast_math", "-Xcompiler", "-fPIC",
                   "--expt-relaxed-constexpr",
                   "-gencode=arch=compute_90a,code=sm_90a", "-DFLASHINFER_MAMBA_ENABLE_SM90",
                   "--threads", "4", *flags, *(f"-I{path}" for path in includes), *sources,
                   "-o", str(library.resolve()), "-lcuda"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = re.findall(r"^.*error.*$", done.stderr, re.MULTILINE)
            raise Absent(f"nvcc: {' | '.join(errors)[:250]}")


def has_cute_compiler():
    """True if `cutlass.cute` can be imported. Where it is not installed but staged, it is unpacked
    into a temporary folder first."""
    if importlib.util.find_spec("cutlass") is not None:
        return True
    archives = sorted(ROOT.glob("cutlass_dsl_*.tar.xz"))
    if not archives:
        return False
    folder = Path(tempfile.mkdtemp(prefix="cutlass_dsl_"))
    inner = folder / "nvidia_cutlass_dsl"
    inner.mkdir()
    for archive in archives:
        subprocess.run(["tar", "-C", str(inner), "-xJf", str(archive)], check=True)
    sys.path[:0] = [str(folder), str(inner / "dsl_packages"), str(inner)]
    importlib.invalidate_caches()
    return importlib.util.find_spec("cutlass") is not None


def loaded_library(pattern):
    """The path of a shared library that this process has loaded and whose path matches
    `pattern`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if re.search(pattern, path):
            return path
    raise OSError(f"no loaded library matches {pattern}")


def link_kernel(compiled, symbol, library):
    """Links a kernel that the CuTe compiler has compiled into the shared library `library`."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernel.o"
        compiled.export_to_c(str(made), function_name=symbol)
        subprocess.run(
            ["g++", "-shared", "-o", str(library), str(made),
             str(library.parent / "libcuda_dialect_runtime_static.a")],
            check=True, capture_output=True, text=True)


def load_kernel(library, symbol):
    """The function `symbol` of a kept library. The library finds the symbols of tvm_ffi and of the
    CUDA runtime in this process, whose copies are made global first."""
    import tvm_ffi

    torch.cuda.init()
    for pattern in (r"libtvm_ffi\.so", r"libcudart\.so"):
        ctypes.CDLL(loaded_library(pattern), mode=ctypes.RTLD_GLOBAL)
    provide_error_hook()
    return getattr(tvm_ffi.load_module(str(library)), symbol)


@functools.cache
def provide_error_hook():
    """Builds and loads the one function that kept kernels call in the CuTe compiler's runtime,
    which has 40 MB and is not staged: it reports a CUDA error as a Python exception."""
    source = """
        void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
        int CuteDSLRT_TVMFFISetRaisedCudaError(void) {
          TVMFFIErrorSetRaisedFromCStr("RuntimeError", "a CUDA call of this kernel failed");
          return -1;
        }
    """
    library = Path(tempfile.mkdtemp(prefix="error_hook_")) / "error_hook.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], check=True,
                   input=source, text=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
