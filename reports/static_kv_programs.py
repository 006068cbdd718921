"""Digests of the programs that a GPU is given: {name: digest}, on standard output.

    python3 reports/static_kv_programs.py FOLDER [NAME…]    FOLDER has the package `lockstep`, as cache_sim/python has;
                                                            NAMEs of programs, or all

A digest is of every node of an exported graph with its operands, shapes, strides and types, of what goes in and comes
out and which input is written, and of constants; the device is left out, so that a CPU says what a GPU would. Every
bucket of both tiny models and the decode of the full size, with a sidecar and in place. Needs the Python of
`python3 fixtures/subjects/transformers setup`."""
import hashlib
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def lines_of(program):
    import torch

    for name, module in program.graph_module.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            yield f"graph {name}"
            for node in module.graph.nodes:
                value = node.meta.get("val")
                made = ""
                if isinstance(value, torch.Tensor):
                    made = f"{tuple(value.shape)} {tuple(value.stride())} {value.dtype}"
                yield f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {made}"
    signature = program.graph_signature
    yield from map(str, (*signature.input_specs, *signature.output_specs))
    for name, constant in sorted(program.constants.items()):
        yield f"constant {name} {constant.dtype} {constant.tolist()}"


def digest(program):
    text = "\n".join(lines_of(program))
    text = re.sub(r"device\(type='\w+'(, index=\d+)?\)", "device", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests(wanted):
    import packages
    import table
    import torch
    import weights
    from lockstep.static_kv import export

    weights.drawn = lambda seed, stream, shape, *law: torch.zeros(shape)  # no program depends on them
    found = {}
    for shape in ("tied", "untied", *packages.SIZES):
        rows, positions, dtype = packages.sizes(shape)
        buckets = (1,) if shape in packages.SIZES else table.BUCKETS
        each = [("buckets", Q) for Q in buckets] + [("in_place", 1)]
        names = {f"{shape}, {form}, {Q}": (form, Q) for form, Q in each}
        names = {name: which for name, which in names.items() if not wanted or name in wanted}
        causal = weights.model(shape, dtype=dtype) if names else None
        for name, (form, Q) in names.items():
            found[name] = digest(export.exported(causal, rows, Q, positions, export.FORMS[form]))
    return found


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]).resolve()
    subjects = ROOT / "fixtures/subjects"
    sys.path[1:1] = [str(folder), str(subjects / "static_kv"), str(subjects / "transformers")]
    print(json.dumps(digests(sys.argv[2:])))
