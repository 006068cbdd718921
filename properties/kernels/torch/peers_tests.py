#!/usr/bin/env python3
"""Runs the peers' own unit tests of their operators against lockstep.ops.

    properties/kernels/torch/peers_tests.py                 fetches what is missing, and runs everything
    properties/kernels/torch/peers_tests.py --fetch         only fetches, for a machine without a network
    properties/kernels/torch/peers_tests.py --peer vllm -k update

The tests are fetched at fixed versions into .lockstep/peers_tests, which git ignores; without a
network, and without them, they are listed. Each peer's tests run under pytest with its own module
names, behind which stand lockstep.ops and the peer's references; everything else of the peer is a
name that raises when it is called. So a test ends in one of these ways:

  passed    as it stands
  forward   what it says of outputs and states holds; it asks for gradients too, and there are none
  left out  it needs what lockstep.ops says it does not do, another operator of the peer, or a
            machine that the peer itself asks for; or float64's result fails it too (mamba-ssm's
            bfloat16 reference rounds a state before the output, and its limits are narrow)
  failed    status 1

It needs PyTorch, pytest, einops and, for FLA and mamba-ssm, Triton. LOCKSTEP_TORCH_OPS names the
library; on a GPU it is one of all types (LOCKSTEP_ALL_SHAPES). LOCKSTEP_OPS_MODULE names another
module than this source tree's, lockstep.ops of an installed package. On a machine without a GPU the
tests run on the CPU, where they take minutes: --every 50 runs one of 50.
"""

import argparse
import collections
import fnmatch
import hashlib
import html
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import types
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".lockstep" / "peers_tests"
GRADIENTS = "gradients: the operators serve inference"
CUDA_ONLY = "another kernel of the peer"


class Peer:
    """A peer's tests: where they come from, which files are fetched, and what stands behind its
    names."""

    def __init__(self, version, files, tests, real=(), sdist=None, git=None, left_out=()):
        self.version, self.files, self.tests, self.real = version, files, tests, real
        self.sdist, self.git = sdist, git  # (project, file name, sha256) or (URL, what to fetch)
        self.left_out = left_out  # (pattern of test names, reason)

    def place(self):
        if self.sdist:
            return f"PyPI: {self.sdist[1]}"
        return f"{self.git[0]} at {self.git[1]}"


PEERS = {
    "causal-conv1d": Peer(
        "1.7.0", sdist=("causal-conv1d", "causal_conv1d-1.7.0.tar.gz",
                        "3202758494eaa7b597ce1c282dfa188889506bfcb92cad3c407d26736bfcd32b"),
        files=["tests/test_causal_conv1d.py", "causal_conv1d/causal_conv1d_interface.py"],
        tests=["tests/test_causal_conv1d.py"], real=["causal_conv1d.causal_conv1d_interface"],
        left_out=[("test_causal_conv1d_bwd_*", GRADIENTS),
                  ("test_causal_conv1d_ref_*", "a test of the peer's reference alone")]),
    "mamba-ssm": Peer(
        "2.3.2.post1", git=("https://github.com/state-spaces/mamba", "v2.3.2.post1"),
        files=["tests/ops/triton/test_selective_state_update.py",
               "mamba_ssm/ops/triton/selective_state_update.py",
               "mamba_ssm/ops/triton/softplus.py"],
        tests=["tests/ops/triton/test_selective_state_update.py"],
        real=["mamba_ssm.ops.triton.selective_state_update", "mamba_ssm.ops.triton.softplus"]),
    "fla": Peer(
        "0.5.2",
        git=("https://github.com/fla-org/flash-linear-attention", "v0.5.2"),
        files=["tests/ops/test_gdn.py", "fla/utils", "fla/ops/utils", "fla/ops/backends",
               "fla/ops/gated_delta_rule/naive.py", "fla/ops/gated_delta_rule/gate.py"],
        tests=["tests/ops/test_gdn.py"],
        real=["fla.utils*", "fla.ops.utils*", "fla.ops.backends*",
              "fla.ops.gated_delta_rule.naive", "fla.ops.gated_delta_rule.gate"],
        left_out=[("test_gate*", CUDA_ONLY), ("test_prepare_wy_repr*", CUDA_ONLY),
                  ("test_flash_qla*", CUDA_ONLY), ("*_blackwell_*", CUDA_ONLY)]),
    "vllm": Peer(
        "0.33.0", sdist=("vllm", "vllm-0.33.0.tar.gz",
                         "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"),
        files=["tests/kernels/mamba/test_causal_conv1d.py", "tests/kernels/mamba/test_mamba_ssm.py",
               "tests/kernels/mamba/utils.py",
               "tests/kernels/fla/test_fused_recurrent_packed_decode.py",
               "tests/kernels/fla/test_fused_sigmoid_gating_delta_rule.py"],
        tests=["tests/kernels/mamba/test_causal_conv1d.py", "tests/kernels/mamba/test_mamba_ssm.py",
               "tests/kernels/fla/test_fused_recurrent_packed_decode.py",
               "tests/kernels/fla/test_fused_sigmoid_gating_delta_rule.py"],
        real=["tests.kernels.mamba.utils"],
        left_out=[("test_selective_scan*", "states of 8 numbers a channel; the kernel takes 16")]),
    "sglang": Peer(
        "05f70dc5", git=("https://github.com/sgl-project/sglang",
                         "05f70dc503324fcbc7cb999e78ab990f27a9597e"),
        files=["test/registered/layers/mamba/test_causal_conv1d.py",
               "test/registered/layers/mamba/test_mamba_ssm.py"],
        tests=["test/registered/layers/mamba/test_causal_conv1d.py",
               "test/registered/layers/mamba/test_mamba_ssm.py"]),
}


# --- Fetching -------------------------------------------------------------------------------------


def fetch_sdist(peer, folder):
    """Takes the peer's files out of its source distribution, checked by its digest."""
    project, name, digest = peer.sdist
    # In HTML, the one form that every package index has (PEP 503).
    with urllib.request.urlopen(f"https://pypi.org/simple/{project}/", timeout=60) as page:
        listed = re.search(rf'href="([^"]*/{re.escape(name)})[#"]', page.read().decode())
        if not listed:
            raise OSError(f"PyPI has no {name}")
        address = urllib.parse.urljoin(page.url, html.unescape(listed[1]))
    with tempfile.NamedTemporaryFile() as archive:
        with urllib.request.urlopen(address, timeout=60) as data:
            while block := data.read(1 << 20):
                archive.write(block)
        archive.flush()
        found = hashlib.sha256(Path(archive.name).read_bytes()).hexdigest()
        if found != digest:
            raise OSError(f"{name} has the digest {found}, not {digest}")
        with tarfile.open(archive.name) as content:
            top = name.removesuffix(".tar.gz")
            for file in peer.files:
                place = folder / file
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content.extractfile(f"{top}/{file}").read())


def fetch_git(peer, folder, repository):
    """Takes the peer's files out of one commit of its repository."""
    with tempfile.TemporaryDirectory() as clone:
        def git(*words):
            return subprocess.run(["git", "-C", clone, *words], check=True, stdout=subprocess.PIPE)

        git("init", "-q")
        git("remote", "add", "origin", repository)
        git("fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", peer.git[1])
        archive = git("archive", "FETCH_HEAD", *peer.files).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def fetch(name, folder, source):
    """The folder of a peer's tests at its version, fetched unless it is there; None without."""
    peer = PEERS[name]
    place = folder / f"{name}-{peer.version}"
    if all((place / file).exists() for file in peer.files):
        return place
    place.mkdir(parents=True, exist_ok=True)
    try:
        if peer.sdist:
            fetch_sdist(peer, place)
        else:
            fetch_git(peer, place, source or peer.git[0])
        return place
    except (OSError, KeyError, subprocess.CalledProcessError) as error:
        print(f"{name} {peer.version}: cannot be fetched from {source or peer.place()}: {error}",
              file=sys.stderr)
        return None


# --- The peers' modules ---------------------------------------------------------------------------


class LeftOut(NotImplementedError):
    """A test needs something of the peer that is not there."""


class Missing:
    """Stands for anything else of a peer."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **kwargs):
        raise LeftOut(f"needs the peer's own {self.name}")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")


class Names:
    """Finds a peer's modules: `real` ones in its folder, the others made of `given` attributes."""

    def __init__(self, folder, packages, real, given):
        self.folder, self.packages, self.real, self.given = folder, packages, real, given

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in self.packages:
            return None
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.real):
            return None  # the usual way, through the __path__ of its package
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = [str(self.folder.joinpath(*spec.name.split(".")))]
        module.__getattr__ = lambda attribute: self.missing(spec.name, attribute)
        return module

    def exec_module(self, module):
        vars(module).update(self.given.get(module.__name__, {}))

    def missing(self, module, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{module.split('.')[-1]}.{attribute}")


def load_ops():
    """lockstep.ops, or what LOCKSTEP_OPS_MODULE names; by default that of this source tree."""
    name = os.environ.get("LOCKSTEP_OPS_MODULE")
    if not name:
        name = "ops"
        sys.path.insert(0, str(ROOT / "kernels" / "torch"))
    return importlib.import_module(name)


class Platform:
    """Answers to what vLLM's tests ask of the machine."""

    def __init__(self, torch, device):
        self.torch, self.device_type = torch, device

    def is_cpu(self):
        return False  # there the references stand in for the kernels, and can the same

    def is_cuda(self):
        return self.device_type == "cuda"

    def is_cuda_alike(self):
        return True

    def is_rocm(self):
        return False

    is_xpu = is_rocm

    def is_device_capability_family(self, family):
        if not self.is_cuda():
            return False
        return self.torch.cuda.get_device_capability()[0] == family // 10


def functions(module, *names):
    return {name: getattr(module, name) for name in names}


def substitute(name, folder, device):
    """Puts lockstep.ops behind the peer's names."""
    import torch

    ops = load_ops()
    conv = functions(ops, "causal_conv1d_fn", "causal_conv1d_update")
    real_given = {}  # attributes of real modules, replaced after they are loaded
    if name == "causal-conv1d":
        given = {}
        real_given["causal_conv1d.causal_conv1d_interface"] = conv
    elif name == "mamba-ssm":
        given = {}
        real_given["mamba_ssm.ops.triton.selective_state_update"] = functions(
            ops, "selective_state_update")
    elif name == "fla":
        os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # or tests with HV > H skip
        given = {"fla": {"__version__": PEERS[name].version},
                 "fla.ops.gated_delta_rule": functions(ops, "chunk_gated_delta_rule",
                                                       "fused_recurrent_gated_delta_rule")}
        if device == "cpu":
            real_given["fla.utils"] = {"device": "cpu"}
    elif name == "vllm":
        servers = ops.vllm
        given = {
            "vllm.platforms": {"current_platform": Platform(torch, device)},
            "vllm.utils.torch_utils": {"set_random_seed": torch.manual_seed},
            "vllm.v1.attention.backends.utils": functions(servers, "NULL_BLOCK_ID", "PAD_SLOT_ID"),
            "vllm.model_executor.layers.mamba.ops.causal_conv1d": functions(
                servers, "causal_conv1d_fn", "causal_conv1d_update"),
            "vllm.model_executor.layers.mamba.ops.mamba_ssm": {
                **functions(servers, "selective_state_update")},
            "vllm.third_party.flash_linear_attention.ops": functions(
                servers, "fused_recurrent_gated_delta_rule",
                "fused_recurrent_gated_delta_rule_packed_decode",
                "fused_sigmoid_gating_delta_rule_update")}
    else:
        servers = ops.sglang
        nothing = lambda **words: None  # noqa: E731
        given = {
            "sglang.test.ci.ci_register": {"register_cuda_ci": nothing, "register_amd_ci": nothing},
            "sglang.srt.utils": {"get_device": lambda: device, "is_sm100_supported": lambda: False},
            "sglang.test.test_utils": {"empty_gpu_cache": nothing},
            "sglang.kernels.ops.mamba.causal_conv1d_triton": functions(
                servers, "PAD_SLOT_ID", "causal_conv1d_fn", "causal_conv1d_update"),
            "sglang.kernels.ops.mamba.triton_ops.mamba_ssm": functions(
                servers, "selective_state_update")}
    packages = {"causal-conv1d": ["causal_conv1d"], "mamba-ssm": ["mamba_ssm"], "fla": ["fla"],
                "vllm": ["vllm", "tests"], "sglang": ["sglang"]}[name]
    sys.meta_path.insert(0, Names(folder, packages, PEERS[name].real, given))
    for module, attributes in real_given.items():
        vars(importlib.import_module(module)).update(attributes)


def exact_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                       state_batch_indices=None):
    """mamba-ssm's selective_state_update in float64, rounded once."""
    import torch
    import torch.nn.functional as F

    pool = state
    if state.dim() == 3:  # without heads: as one
        pool, A = state.unsqueeze(1), A.unsqueeze(0)
        x, dt, B, C, D, z, dt_bias = (None if one is None else one.unsqueeze(-2)
                                      for one in (x, dt, B, C, D, z, dt_bias))
    slots = slice(x.size(0)) if state_batch_indices is None else state_batch_indices.long()
    B, C = (one.double().repeat_interleave(x.size(1) // one.size(1), 1)[:, :, None]
            for one in (B, C))
    dt = dt.double() + (0 if dt_bias is None else dt_bias.double())
    dt = (F.softplus(dt) if dt_softplus else dt)[..., None]
    after = pool[slots].double() * torch.exp(dt * A.double()) + dt * B * x.double()[..., None]
    pool[slots] = after.to(state.dtype)
    out = (after * C).sum(-1) + (0 if D is None else D.double() * x.double())
    out = out if z is None else out * F.silu(z.double())
    return out.to(x.dtype).squeeze(1) if state.dim() == 3 else out.to(x.dtype)


EXACT = {"mamba-ssm": {"selective_state_update": exact_state_update}}


# --- In pytest's process: this file is its plugin -------------------------------------------------


class Run:
    """One process of pytest: a share of one peer's tests."""

    def __init__(self):
        self.name = os.environ["LOCKSTEP_PEER"]
        self.device = os.environ["LOCKSTEP_PEER_DEVICE"]
        self.share, self.shares = map(int, os.environ["LOCKSTEP_PEER_SHARE"].split("/"))
        self.no_gradient = False
        self.counts = collections.Counter()
        substitute(self.name, Path(os.environ["LOCKSTEP_PEER_FOLDER"]), self.device)

    def guard_backward(self):
        """A gradient that does not exist is remembered, and the test goes on to what it says of
        outputs."""
        import torch

        backward = torch.Tensor.backward

        def guarded(tensor, *args, **kwargs):
            try:
                backward(tensor, *args, **kwargs)
            except NotImplementedError as error:
                if "has no gradient" not in str(error):
                    raise
                self.no_gradient = True

        torch.Tensor.backward = guarded

    def fails_exactly(self, item):
        """Whether a test fails with exact functions in the operators' place."""
        names = vars(item.module)
        ours = {name: names[name] for name in EXACT.get(self.name, {}) if name in names}
        names.update((name, EXACT[self.name][name]) for name in ours)
        try:
            item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
            return False
        except AssertionError:
            return bool(ours)
        finally:
            names.update(ours)

    def on_cpu(self):
        """Tests name "cuda": everything that asks for it gets the CPU."""
        import torch
        from torch.overrides import TorchFunctionMode

        class OnCpu(TorchFunctionMode):
            def __torch_function__(self, function, kinds, args=(), kwargs=None):
                kwargs = dict(kwargs or {})
                if "cuda" in str(kwargs.get("device", "")):
                    kwargs["device"] = "cpu"
                if function is torch.Tensor.cuda:
                    return args[0]
                if function is torch.Tensor.to:
                    args = tuple("cpu" if str(x).startswith("cuda") else x for x in args)
                return function(*args, **kwargs)

        torch.accelerator.empty_cache = lambda: None
        OnCpu().__enter__()


RUN = None


def pytest_configure(config):
    global RUN
    RUN = Run()
    RUN.guard_backward()
    if RUN.device == "cpu":
        RUN.on_cpu()


def pytest_collection_modifyitems(config, items):
    import pytest

    items[:] = [item for i, item in enumerate(items) if i % RUN.shares == RUN.share]
    for item in items:
        for pattern, reason in PEERS[RUN.name].left_out:
            if fnmatch.fnmatchcase(item.originalname or item.name, pattern):
                item.add_marker(pytest.mark.skip(reason=f"left out: {reason}"))


def pytest_runtest_setup(item):
    RUN.no_gradient = False


def pytest_runtest_makereport(item, call):
    """Turns a test that needs what is not there into a skipped one with the reason."""
    from _pytest.runner import TestReport

    report = TestReport.from_item_and_call(item, call)
    error = call.excinfo.value if call.excinfo else None
    if report.when == "call" and report.failed:
        reason = None
        if isinstance(error, NotImplementedError):
            reason = f"left out: {error}"
        elif RUN.no_gradient and isinstance(error, (TypeError, AttributeError)):
            reason = "forward"
        elif isinstance(error, AssertionError) and RUN.fails_exactly(item):
            reason = "left out: the result of float64 fails it too"
        if reason:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, reason)
    elif report.when == "call" and report.passed and RUN.no_gradient:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "forward")
    if report.when == "call" or report.skipped or report.failed:
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else report.outcome
        RUN.counts[f"{getattr(item, 'originalname', item.name)}\t{reason}"] += 1
    return report


def pytest_sessionfinish(session, exitstatus):
    if RUN:
        Path(os.environ["LOCKSTEP_PEER_RESULT"]).write_text(json.dumps(RUN.counts))


# --- The program ----------------------------------------------------------------------------------


def start(name, folder, device, share, shares, words, result):
    peer = PEERS[name]
    environment = dict(
        os.environ, LOCKSTEP_PEER=name, LOCKSTEP_PEER_FOLDER=str(folder),
        LOCKSTEP_PEER_DEVICE=device, LOCKSTEP_PEER_SHARE=f"{share}/{shares}",
        LOCKSTEP_PEER_RESULT=str(result), PYTHONDONTWRITEBYTECODE="1",
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peers_tests", "-p", "no:cacheprovider",
               "--import-mode=importlib", "-c", os.devnull, "--rootdir", str(folder), "--tb=short",
               "--no-header", "-W", "ignore", "--show-capture=no",
               *[str(folder / test) for test in peer.tests], *words]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def report(name, counts):
    """One line per peer and reason; whether a test failed."""
    ways = collections.Counter()
    reasons = collections.Counter()
    for key, count in counts.items():
        test, outcome = key.split("\t")
        way = outcome if outcome in ("passed", "forward", "failed") else "left out"
        ways[way] += count
        if way == "left out":
            reasons[(outcome.removeprefix("left out: "), test)] += count
    line = ", ".join(f"{ways[way]} {way}" for way in ("passed", "forward", "left out", "failed"))
    print(f"{name} {PEERS[name].version}: {line}")
    for (reason, test), count in sorted(reasons.items()):
        print(f"    left out {count}: {test}: {reason}")
    return ways


def run(names, folders, device, jobs, every, words):
    """Runs the peers one after the other, each in `jobs` processes; the ways of all tests."""
    total = collections.Counter()
    with tempfile.TemporaryDirectory() as results:
        for name in names:
            processes = [
                start(name, folders[name], device, share, jobs * every, words,
                      Path(results) / f"{name}.{share}.json") for share in range(jobs)]
            counts = collections.Counter()
            for share, process in enumerate(processes):
                text, _ = process.communicate()
                result = Path(results) / f"{name}.{share}.json"
                if process.returncode not in (0, 1, 5) or not result.exists():
                    print(text[-4000:])
                    counts["pytest\tfailed"] += 1
                    continue
                if process.returncode == 1:
                    print(text[-6000:])
                counts.update(json.loads(result.read_text()))
            total.update(report(name, counts))
            sys.stdout.flush()
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="Other words go to pytest.")
    parser.add_argument("--peer", action="append", choices=PEERS, help="one of them; else all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where fetched tests lie")
    parser.add_argument("--source", action="append", default=[], metavar="PEER=REPOSITORY",
                        help="a clone to fetch from instead of GitHub")
    parser.add_argument("--fetch", action="store_true", help="only fetch")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda, where there is one")
    parser.add_argument("--jobs", type=int, default=4, help="processes side by side")
    parser.add_argument("--every", type=int, default=1, help="run one test of so many")
    arguments, words = parser.parse_known_args()

    sources = dict(source.split("=", 1) for source in arguments.source)
    names = arguments.peer or list(PEERS)
    folders = {name: fetch(name, arguments.folder, sources.get(name)) for name in names}
    for name in names:
        state = folders[name] or "not here"
        print(f"{name} {PEERS[name].version}: {', '.join(PEERS[name].tests)} ({state})")
    present = [name for name in names if folders[name]]
    if arguments.fetch:
        return 0 if len(present) == len(names) else 3
    if not present:
        return 3

    lacking = [module for module in ("torch", "pytest", "einops")
               if importlib.util.find_spec(module) is None]
    if lacking:
        print(f"{sys.executable} has no {', '.join(lacking)}: the tests need them", file=sys.stderr)
        return 3
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    print(f"PyTorch {torch.__version__}, {device}", flush=True)
    total = run(present, folders, device, arguments.jobs, arguments.every, words)
    print(f"together: {total['passed']} passed, {total['forward']} forward, "
          f"{total['left out']} left out, {total['failed']} failed")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
