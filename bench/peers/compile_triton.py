"""Compiles the peers' Triton kernels in all their configurations, in many processes, before run.py
tunes them.

    python3 bench/peers/compile_triton.py [--operation ssd_prefill] [--jobs 16]

Triton's autotuner compiles the configurations of a kernel one after the other, while the GPU idles
for minutes. Here each process compiles a share of the configurations and launches nothing; the
compiled kernels stay in Triton's cache on disk. It runs on the GPU machine, over the cases of at
most 8192 tokens, since longer cases use the same kernels.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton.runtime.autotuner as autotuner
import triton.runtime.jit as jit

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases
import load
import peers

MOST_TOKENS = 8192
PEERS_OF = {"ssd_prefill": ("vllm", "vllm_prefill", "mamba_ssm_prefill"),
            "gated_delta_rule_prefill": ("vllm", "vllm_delta_prefill", "fla_prefill")}


def compile_a_share(share, shares):
    """From now on Triton compiles kernels and does not launch them; of an autotuner's
    configurations this process compiles every `shares`-th, beginning with number `share`."""
    run = jit.JITFunction.run

    def compile_alone(kernel, *arguments, grid, warmup, **named):
        del warmup
        return run(kernel, *arguments, grid=grid, warmup=True, **named)

    def compile_some(tuner, *arguments, **named):
        tuner.nargs = dict(zip(tuner.arg_names, arguments))
        configurations = list(tuner.prune_configs(named))
        tuner.best_config = configurations[0]  # vLLM reads this attribute
        tuner.nargs = None
        for configuration in configurations[share::shares]:
            try:
                tuner.fn.run(*arguments, **named, **configuration.all_kwargs())
            except Exception as error:  # the tuner too skips a configuration that needs too much of a resource
                print(f"{tuner.base_fn.__name__}: {type(error).__name__}: {error}"[:200])

    jit.JITFunction.run = compile_alone
    autotuner.Autotuner.run = compile_some


def tokens(key):
    """The number of tokens of a prefill's case, whose rows' lengths come second in its key."""
    return sum(key[1])


def load_peers(operations):
    """The operations' peers that can be loaded and are not left out, in an object like
    peers.Loaded."""
    loaded = SimpleNamespace(modules={}, why={}, operator=lambda name: None)
    for name in sorted({name for operation in operations for name in PEERS_OF[operation]} - left_out()):
        with contextlib.suppress(load.Absent, ImportError):
            loaded.modules[name] = getattr(load, name)()
    return loaded


def left_out():
    """The peers in LOCKSTEP_LEFT_OUT, which run.py does not load either."""
    return set(os.environ.get("LOCKSTEP_LEFT_OUT", "").split())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operation", action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # this process's number, given by the parent
    arguments = parser.parse_args()
    operations = [name for name in arguments.operation or PEERS_OF if name in PEERS_OF]
    operations = [name for name in operations if set(PEERS_OF[name][1:]) - left_out()]
    if not operations:
        return 0
    if arguments.share is None:
        processes = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--share", str(i)])
                     for i in range(arguments.jobs)]
        return max(process.wait() for process in processes)
    compile_a_share(arguments.share, arguments.jobs)
    loaded = load_peers(operations)
    for operation, key, make in cases.all_cases():
        if operation not in operations or tokens(key) > MOST_TOKENS:
            continue
        case = make()
        for contestant in peers.contestants(case, loaded)[0]:
            contestant.launch(case.sets[0])
        del case
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
