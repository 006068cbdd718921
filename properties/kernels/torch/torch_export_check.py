#!/usr/bin/env python3
# ctest: name=operators.survive_export labels=full timeout=1800 skip=77 python=torch args={lockstep_torch_ops}
# ctest: name=operators.export_a_package labels=full timeout=1800 skip=77 python=torch fixtures_setup=exported_operators args="{lockstep_torch_ops} --package {build}/exported_operators"
"""The operators torch.ops.lockstep.* through torch.export, on the CPU.

    properties/kernels/torch/torch_export_check.py build/current/liblockstep_torch.so [--package FOLDER]

  export    each case of torch_ops_check.py becomes a program whose tensors are all inputs, and whose
            outputs are what the operator gives and every tensor that it writes: explicit state in
            and out. The program's own inputs stay as they were; its bits are those of a call
  A         a block of Mamba2 in bfloat16 keeps A_log in float32 through its export
  package   one decode block (convolution, then gated delta rule) as an AOTInductor package with the
            operators inside, and what it has to say, for the C++ test to load (FOLDER)

One line per operator; the first difference ends the run with status 1."""

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch
import torch_ops_check as ops


class Explicit(torch.nn.Module):
    """An operator whose written tensors are copies that are given back."""

    def __init__(self, op, constants):
        super().__init__()
        self.op, self.constants = op, constants
        schema = op.default._schema.arguments
        self.written = [a.name for a in schema if a.alias_info and a.alias_info.is_write]

    def forward(self, tensors):
        mine = {name: x.clone() if name in self.written else x for name, x in tensors.items()}
        given = self.op(**mine, **self.constants)
        results = () if given is None else given if isinstance(given, tuple) else (given,)
        return results, {name: mine[name] for name in self.written if name in mine}


def flat(found):
    results, states = found
    return {**{f"result {i}": x for i, x in enumerate(results)}, **states}


def check(name):
    op = getattr(torch.ops.lockstep, name)
    count = 0
    for number, case in enumerate(ops.CASES[name](ops.Data("cpu", seed=1))):
        tensors = {key: x for key, x in case.items() if torch.is_tensor(x)}
        # A layout that is not contiguous is a view of one that is: an export has none of its own.
        constants = {key: x for key, x in case.items() if not torch.is_tensor(x)}
        what = f"{name}, case {number}"
        module = Explicit(op, constants)
        before = ops.copied(tensors)
        expected = flat(module(ops.copied(tensors)))
        try:
            program = torch.export.export(module, (ops.copied(tensors),), strict=False)
            if not any(name in str(node.target) for node in program.graph.nodes):
                raise ops.Difference(f"{what}: the operator is not in the exported graph")
            found = flat(program.module()(tensors))
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise ops.Difference(f"{what}: torch.export: {error}") from error
        ops.expect_bits(found, expected, f"{what}: exported")
        ops.expect_bits(tensors, before, f"{what}: inputs of the exported program")
        count += 1
    print(f"{name}: {count} cases exported", flush=True)


class MambaBlock(torch.nn.Module):
    """A decode of Mamba2 whose weights are bfloat16, and A_log float32: exp(A_log) in bfloat16 would
    move every decay."""

    def __init__(self, heads):
        super().__init__()
        self.dt_bias = torch.nn.Parameter(torch.zeros(heads))
        self.to(torch.bfloat16)
        values = torch.log(torch.arange(1, heads + 1, dtype=torch.float32) + 1 / 3)
        self.A_log = torch.nn.Parameter(values)  # after the conversion

    def forward(self, state, x, dt, B, C, state_indices):
        state = state.clone()
        out = torch.ops.lockstep.selective_state_update(
            state=state, x=x, dt=dt, A=-torch.exp(self.A_log), B=B, C=C,
            dt_bias=self.dt_bias.float(), dt_softplus=True, state_indices=state_indices)
        return out, state


def check_float32():
    case = ops.mamba(ops.Data("cpu", 1), ops.ROWS)
    names = ("state", "x", "dt", "B", "C", "state_indices")
    inputs = tuple(case[name] for name in names)
    block = MambaBlock(case["A"].shape[0])
    expected = block(*inputs)
    program = torch.export.export(block, inputs, strict=False)
    if program.state_dict["A_log"].dtype != torch.float32:
        raise ops.Difference("A_log is not float32 in the exported program")
    ops.expect_bits(dict(enumerate(program.module()(*inputs))), dict(enumerate(expected)), "A_log")
    rounded = MambaBlock(case["A"].shape[0])
    rounded.A_log.data = rounded.A_log.data.bfloat16().float()
    try:
        ops.expect_bits(dict(enumerate(rounded(*inputs))), dict(enumerate(expected)), "A_log rounded")
    except ops.Difference:
        print("A_log: float32 through the export; rounded to bfloat16 the state is another")
        return
    raise ops.Difference("A_log rounded to bfloat16 shows nowhere: the check cannot fail")


class DecodeBlock(torch.nn.Module):
    """A token of a gated delta net: the short convolution, then the recurrence. All states are
    inputs and outputs."""

    def forward(self, x, conv_state, weight, q, k, g, beta, state, slots):
        conv_state, state = conv_state.clone(), state.clone()
        mixed = torch.ops.lockstep.causal_conv1d_update(
            x=x, conv_state=conv_state, weight=weight, bias=None, activation="silu",
            state_indices=slots)
        v = mixed.reshape(mixed.shape[0], state.shape[1], state.shape[2])
        out = torch.ops.lockstep.gated_delta_rule_update(
            q=q, k=k, v=v, g=g, beta=beta, state=state, use_qk_l2norm=True, state_indices=slots)
        return out, conv_state, state


def write_package(folder):
    data = ops.Data("cpu", 3)
    heads, K, V = 4, 5, 3
    f32 = {"dtype": torch.float32}
    inputs = (
        data.normal(ops.ROWS, heads * V, **f32), data.normal(ops.SLOTS, heads * V, 3, **f32),
        data.normal(heads * V, 4, **f32), data.normal(ops.ROWS, 2, K, **f32),
        data.normal(ops.ROWS, 2, K, **f32), data.negative(ops.ROWS, heads),
        -data.negative(ops.ROWS, heads) / 4, data.normal(ops.SLOTS, heads, V, K, **f32),
        data.indices())
    block = DecodeBlock()
    expected = block(*inputs)
    program = torch.export.export(block, inputs, strict=False)
    folder.mkdir(parents=True, exist_ok=True)
    torch._inductor.config.cpp_cache_precompile_headers = False
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "decode_block.pt2"),
        inductor_configs={"aot_inductor.link_libtorch": False, "cpp.threads": 1})
    def told(x):
        return {"shape": list(x.shape), "integers": not x.is_floating_point(),
                "values": x.flatten().tolist()}
    words = {"inputs": [told(x) for x in inputs], "outputs": [told(x) for x in expected]}
    (folder / "decode_block.json").write_text(json.dumps(words))
    print(f"decode_block: a package in {folder}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", help="liblockstep_torch.so")
    parser.add_argument("--package", type=Path, help="folder of the package")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.ops.load_library(arguments.library)
    if arguments.package:
        return write_package(arguments.package)
    for name in ops.CASES:
        check(name)
    check_float32()


if __name__ == "__main__":
    try:
        main()
    except ops.Difference as difference:
        sys.exit(f"{difference}")
