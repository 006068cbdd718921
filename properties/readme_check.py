#!/usr/bin/env python3
"""Runs the commands of README.md as they stand there.

readme_check.py --build DIR [--only TEXT]

Each command of a fenced block runs in a folder that looks like the root of the checkout, where placeholders
(`my.trace`, `log.jsonl`, `my_package`) are files that are there. A command must end with the exit status that stands
behind it in EXITS, or with 0; where the block shows what the command prints, it must print that. What cannot run
here (a GPU, a network, many minutes) is in NOT_RUN with the reason, and has to be in README.md still.
"""
import argparse
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = re.compile(r"^(\$ )?((\w+=\S+ )*)(\./lockstep|python3|build/|bench/|properties/|reports/|cmake |\.ci/)")
# Part of a command, and why it is not run.
NOT_RUN = {
    "./lockstep report": "writes into the checkout; run by .ci/bare_machine",
    "./lockstep test": "these are the tests; run by .ci/bare_machine",
    "build/current/lockstep_bench": "a benchmark",
    "properties/mutants/": "takes an hour",
    "properties/cover_reference.py": "takes minutes",
    "properties/torch_ops_check.py": "a test of its own",
    "bench/on_gpu.sh": "needs a GPU machine, or a network",
    "reports/evidence.py merge": "needs results of a GPU",
    "--device cuda": "needs a GPU",
    "fixtures/subjects/sglang": "brings SGLang in from PyPI, or needs it",
    "fixtures/subjects/llama_cpp": "builds llama.cpp, or needs it",
    "fixtures/subjects/static_kv": "needs transformers; a test of its own",
    "fixtures/subjects/transformers": "brings transformers in from PyPI",
    ".ci/bare_machine": "makes a whole machine",
    "fixtures/subjects/llama_cpp": "builds llama.cpp",
    "--program .lockstep/llama_cpp": "needs llama.cpp",
    "server search openai": "needs a server of one's own",
    "fixtures/subjects/toy_server.py --bug": "the word `server` is the script's; a test of its own",
    "server replay": "needs what a search has found",
}
# Pattern of a command, and its exit status.
EXITS = {"(replay|explore|shrink) .*--defect": 10, "gdn_no_scale": 11,
         "path/to/file.py": 2}  # the placeholder refuses every case: nothing was judged
SHORTER = {"--time 60s": "--time 2s"}


def blocks(text):
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)


def commands(text):
    """Of each command of README.md: the command, and the lines that it should print (none where none are shown)."""
    for _, block in blocks(text):
        lines = block.splitlines()
        for i, line in enumerate(lines):
            if PROGRAM.match(line):
                command = re.sub(r"\s+#.*$", "", line)
                yield command.removeprefix("$ "), lines[i + 1:] if line.startswith("$ ") else []


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as SGLang does, with nothing cached."""

    def do_POST(self):  # noqa: N802 (the library's name)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        prompt = json.loads(body)["input_ids"] if body else []
        answer = json.dumps({"output_ids": [sum(prompt) % 100], "meta_info": {"cached_tokens": 0}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words):
        pass


def fill(folder, build, text):
    """A folder that looks like the root, with what the placeholders stand for."""
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "build", "lockstep", "findings"):
            (folder / entry.name).symlink_to(entry)
    (folder / "lockstep").write_text(f'#!/bin/sh\nexec "{build}/lockstep" "$@"\n')
    (folder / "lockstep").chmod(0o755)
    (folder / "build").mkdir()
    for name in ("current", "cpu", "cuda"):
        (folder / "build" / name).symlink_to(build)
    trace = next(block for _, block in blocks(text) if block.startswith("# ") and "\nconfig " in block)
    (folder / "my.trace").write_text(trace)
    (folder / "big.trace").write_text((ROOT / "fixtures/traces/finish_keeps_its_state.trace").read_text())
    (folder / "my_trace.jsonl.zst").write_bytes(
        (ROOT / "fixtures/workloads/qwen_bailian_small.jsonl.zst").read_bytes())
    (folder / "prompts.jsonl").write_text("[1, 2, 3]\n[1, 2, 3, 4]\n")
    (folder / "vllm_outputs.jsonl").write_text(
        '{"request_id": "a", "prompt_token_ids": [1, 2, 3], "num_cached_tokens": 0, "outputs": [{"token_ids": [4]}]}\n')
    for source in ("my_package/kernels.py", "path/to/file.py"):
        (folder / source).parent.mkdir(parents=True)
    candidates = str(ROOT / "fixtures/candidates")
    head = f"import sys\nsys.path.insert(0, {candidates!r})\n"
    (folder / "my_package/kernels.py").write_text(head + "from torch_delta_rule import right as update\n")
    (folder / "path/to/file.py").write_text(
        "def update(*args, **kwargs):\n    raise NotImplementedError('a placeholder')\n")
    (folder / "my_server.py").write_text((ROOT / "fixtures/subjects/minimal_cache.py").read_text())


def same(line, shown):
    """A printed line is the one that README.md shows; `…` stands for any text, and so does a processor's name."""
    pattern = re.escape(shown).replace("…", ".*")
    return re.fullmatch(re.sub(r"Intel.*?Processor", ".*", pattern), line) is not None


def complaint(command, shown, folder, port):
    """Runs a command; a sentence if it does not end as README.md says."""
    command = command.replace("http://localhost:30000", f"http://127.0.0.1:{port}")
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    shutil.rmtree(folder / "findings", ignore_errors=True)  # a search also replays what earlier ones have found
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=300,
                          stdin=subprocess.DEVNULL)
    wanted = next((status for pattern, status in EXITS.items() if re.search(pattern, command)), 0)
    if done.returncode != wanted:
        return f"ends with {done.returncode}, not {wanted}:\n{(done.stdout + done.stderr)[-1500:]}"
    printed = done.stdout.splitlines()
    for line in shown:
        while printed and not same(printed[0], line):
            printed.pop(0)
        if not printed:
            return f"does not print, in this order:\n{line}\nbut:\n{done.stdout[-3000:]}"
    return ""


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--build", type=pathlib.Path, required=True)
    words.add_argument("--only", default="", help="commands that contain this text")
    options = words.parse_args()
    text = (ROOT / "README.md").read_text()
    failed = ran = 0
    for part in NOT_RUN:
        if part not in text:
            print(f"NOT_RUN: README.md does not speak of {part}")
            failed += 1
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        fill(folder, options.build.resolve(), text)
        os.environ.setdefault("LOCKSTEP_PYTHON", sys.executable)
        has_torch = subprocess.run([os.environ["LOCKSTEP_PYTHON"], "-c", "import torch"],
                                   capture_output=True).returncode == 0
        for command, shown in commands(text):
            why = next((reason for part, reason in NOT_RUN.items() if part in command), "")
            if not why and not has_torch and re.search(r"judge .*--candidate (?!\S*\.so:)", command):
                why = "the Python has no PyTorch"
            if options.only not in command:
                continue
            if why:
                print(f"not run ({why}): {command}")
                continue
            ran += 1
            said = complaint(command, shown, folder, server.server_port)
            failed += bool(said)
            print(f"{'FAILS' if said else 'ok'}: {command}{': ' + said if said else ''}", flush=True)
    print(f"{ran} commands ran, {failed} complaints")
    return 1 if failed or (ran == 0 and not options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
