"""Exports a Qwen3 checkpoint with fixed shapes, and generates from what was exported.

    python -m lockstep.static_kv export CHECKPOINT -o PACKAGE --rows 4 --context 1024 --buckets 1,16,128
    python -m lockstep.static_kv generate PACKAGE --text 'Once upon a time'

CHECKPOINT is a folder with config.json and safetensors. An export compiles a program for each bucket of query lengths;
PACKAGE then serves batches of up to so many rows, and so many tokens each. Needs torch 2.11, transformers 5.23 and g++.
"""
from __future__ import annotations

import argparse
import sys

from lockstep.help import Parser, end_help

STATUSES = {0: "done", 2: "bad usage, or a checkpoint or package that cannot be served",
            3: "the environment: PyTorch or transformers is missing", 130: "interrupted"}


def bucket(word: str) -> int | str:
    return word if word == "dynamic" else int(word)


def buckets(words: str) -> list[int | str]:
    return [bucket(word) for word in words.split(",") if word]


def tokens(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def parser() -> argparse.ArgumentParser:
    words = Parser(prog="python -m lockstep.static_kv", description=__doc__)
    actions = words.add_subparsers(dest="action", required=True)
    add = actions.add_parser("export", help="compile a checkpoint")
    add.add_argument("checkpoint", help="a folder with config.json and safetensors")
    add.add_argument("-o", "--out", required=True, help="the folder to write: new, empty, or an earlier export")
    add.add_argument("--rows", type=int, default=1, help="texts of a batch at most (default: %(default)s)")
    add.add_argument("--context", type=int, default=1024, help="tokens of a text at most (default: %(default)s)")
    add.add_argument("--buckets", type=buckets, default="1,16,128",
                     help="query lengths, each compiled; 1 is decoding; dynamic is one program for every other length (default: %(default)s)")
    add.add_argument("--dtype", choices=["float32", "bfloat16"], help="of weights and cache (default: the checkpoint's)")
    add.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where it will run (default: %(default)s)")
    add.add_argument("--strict", action="store_true", help="torch.export traces Python's bytecode too (default: no)")
    end_help(add, STATUSES, "python -m lockstep.static_kv export Qwen3-0.6B -o package --rows 4 --buckets 1,16,128")
    add = actions.add_parser("generate", help="greedy texts, as plain transformers has them")
    add.add_argument("package", help="a folder that export wrote")
    prompt = add.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--tokens", type=tokens, action="append", help="a prompt, 1,2,3; once more for each further row")
    prompt.add_argument("--text", action="append", help="a prompt for the checkpoint's tokenizer, likewise")
    add.add_argument("--new-tokens", type=int, default=16, help="at most so many a row (default: %(default)s)")
    end_help(add, STATUSES, "python -m lockstep.static_kv generate package --tokens 1,2,3")
    end_help(words, STATUSES, "python -m lockstep.static_kv export Qwen3-0.6B -o package")
    return words


def main(words: list[str]) -> int:
    asked = parser().parse_args(words)
    try:
        from . import command
    except ModuleNotFoundError as error:
        print(f"lockstep.static_kv: {error.name} is missing: pip install torch==2.11.0 transformers==5.23.0",
              file=sys.stderr)
        return 3
    try:
        command.run(asked)
    except command.Refused as refused:
        print(f"lockstep.static_kv: {refused}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
