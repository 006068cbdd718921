#!/usr/bin/env python3
# ctest: name=readme.commands_run labels=quick timeout=600 args="--build {build}"
"""Runs the commands of README.md, and of the pages that it leads to, as they stand there.

readme_check.py --build DIR [--only TEXT]              DIR holds the program: build/current, or /usr/bin where a package is

Each command of a fenced block runs in a folder that looks like the root of the checkout, where placeholders
(`my.trace`, `log.jsonl`, `my_package`) are files that are there. A command must end with the exit status that stands
after it in EXITS, or with 0; where the block shows what the command prints, it must print that. What cannot run
here (a GPU, a network, many minutes) is in NOT_RUN with the reason, and has to be in one of the pages still. The run
of a bug in reports/found finds something. Links of all pages lead to files and headings that are there.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
    "README.md", "bench/README.md", "cache_sim/check/protocol.md", "cache_sim/check/findings.md",
    "cache_sim/compare/comparing.md", "cache_sim/logs/server_logs.md", "cache_sim/policies/README.md",
    "cache_sim/program/commands.md", "cache_sim/python/README.md", "cache_sim/python/sweep.md", "cache_sim/replay/json.md",
    "cache_sim/server/schedulers.md", "cache_sim/trace/grammar.md", "cache_sim/workloads/workloads.md",
    "fixtures/subjects/README.md", "fixtures/subjects/edge_llm/README.md", "fixtures/subjects/static_kv/README.md",
    "kernels/judge/judge.md",
    "kernels/torch/operators.md", "reference/README.md", "reference/contract.md", "reference/caches/edge_llm.md",
    "reference/caches/marconi.md", "reference/caches/sglang.md", "reference/caches/static_kv.md",
    "reference/caches/vllm.md", "reports/README.md", "reports/found/README.md", "reports/kernels/README.md",
]
PROGRAM = re.compile(r"^(\$ )?((\w+=\S+ )*)(\./lockstep|python3|c\+\+ |build/|bench/|properties/|reports/|cmake |\.ci/)")
# Pattern of a command, and why it is not run.
NOT_RUN = {
    "--batch-invariant": "whether the bits of PyTorch's products depend on the batch is the machine's; a test of its own",
    r"^\./lockstep report$": "writes into the checkout; run by .ci/bare_machine",
    r"\./lockstep test\b": "these are the tests; run by .ci/bare_machine",
    "build/current/lockstep_bench": "a benchmark",
    "properties/mutants/": "takes an hour",
    r"(bench/(static_kv_)?on_gpu\.sh|reports/(numbers|ranks)_on_gpu\.py run)": "needs a GPU machine, or a network",
    r"reports/evidence\.py merge": "needs results of a GPU",
    "--device cuda": "needs a GPU",
    "fixtures/subjects/sglang": "brings SGLang in from PyPI, or needs it",
    "fixtures/subjects/vllm": "brings vLLM in from PyPI, or needs it",
    "fixtures/subjects/llama_cpp": "builds llama.cpp, or needs it",
    r"--program \.lockstep/llama_cpp": "needs llama.cpp",
    "fixtures/subjects/edge_llm": "brings onnx in from PyPI, or needs it; a test of its own",
    "fixtures/subjects/static_kv": "needs transformers; a test of its own",
    "lockstep_static_kv_generate": "needs what lockstep.static_kv has exported; a test of its own",
    "fixtures/subjects/transformers": "brings transformers in from PyPI",
    "server search openai": "needs a server of one's own",
    r"fixtures/subjects/toy_server\.py --bug": "the word `server` is the script's; a test of its own",
    "server replay": "needs what a search has found",
    r"\./lockstep nightly": "the word `nightly` is the script's; a test of its own",
}
# Pattern of a command, and its exit status.
EXITS = {"(replay|explore|shrink) .*--defect": 10, "gdn_no_scale": 11, "publishes-early": 11, "SharingHybridCache": 10, "no_delta": 11,
         "path/to/file.py": 2}  # the placeholder refuses every case: nothing was judged
SHORTER = {"--time 60s": "--time 2s"}


def blocks(text):
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)


def commands(text):
    """Of each command of a page: the command, and the lines that it should print (none where none are shown)."""
    for _, block in blocks(text):
        lines = block.splitlines()
        for i, line in enumerate(lines):
            if PROGRAM.match(line):
                command = re.sub(r"\s+#.*$", "", line)
                yield command.removeprefix("$ "), lines[i + 1:] if line.startswith("$ ") else []


def why_not(command):
    return next((reason for part, reason in NOT_RUN.items() if re.search(part, command)), "")


def anchors(page):
    """GitHub's names of the headings of a page in links."""
    outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", outside, re.M)}


def dead_links(page):
    """Sentences about links of a page to files or headings that are not there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            yield f"{page.relative_to(ROOT)}: {target} is not there"
        elif heading and heading not in anchors(file):
            yield f"{page.relative_to(ROOT)}: {target} has no such heading"


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
    # As the script does, for the words that are Python's.
    (folder / "lockstep").write_text(f'#!/bin/sh\n[ "$1" != sweep ] || export PYTHONPATH="{ROOT}/cache_sim/python"\nexec "{build}/lockstep" "$@"\n')
    (folder / "lockstep").chmod(0o755)
    (folder / "build").mkdir()
    for name in ("current", "cpu", "cuda"):
        (folder / "build" / name).symlink_to(build)
    trace = next(block for _, block in blocks(text) if block.startswith("# ") and "\nconfig " in block)
    (folder / "my.trace").write_text(trace)
    (folder / "bug.trace").write_text(trace)
    (folder / "tests" / "traces").mkdir(parents=True)
    (folder / "tests" / "traces" / "my.trace").write_text(trace)
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
    """A printed line is the one that the page shows; `…` stands for any text, and so does a processor's name."""
    pattern = re.escape(shown).replace("…", ".*")
    return re.fullmatch(re.sub(r"Intel.*?Processor", ".*", pattern), line) is not None


def complaint(command, shown, folder, port):
    """Runs a command; a sentence if it does not end as the page says."""
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


def transcript_complaint(build):
    """The conversation in protocol.md is what minimal_cache.py answers; `…` stands for every other config field."""
    text = (ROOT / "cache_sim/check/protocol.md").read_text()
    told = next(block for _, block in blocks(text) if block.startswith("> hello"))
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "x.trace")
        trace.write_text("check\n")
        run = pathlib.Path(folder, "x.json")
        subprocess.run([build / "lockstep", "replay", trace, "--json", run], check=True, capture_output=True)
        config = json.loads(run.read_text())["workload"]["config"]
    asked = [line[2:] for line in told.splitlines() if line.startswith("> ")]
    asked[0] = "hello protocol=1 " + " ".join(f"{key}={value}" for key, value in config.items())
    said = subprocess.run([sys.executable, ROOT / "fixtures/subjects/minimal_cache.py"], input="\n".join(asked) + "\n",
                          capture_output=True, text=True).stdout.splitlines()
    shown = [line[2:] for line in told.splitlines() if line.startswith("< ")]
    return "" if said == shown else f"protocol.md shows the answers {shown}, and the child gives {said}"


def foreign_python(pages):
    """Lines of Python in a page that are in no file which a test runs. (The operators' example runs in torch_ops_check.py,
    and the replay of a folder in python_package_test.py.)"""
    tested = {"def test_what_was_found_once():", 'lockstep.replay("tests/traces", LruCache)'}
    for name in ("lru_cache.py", "test_lru_cache.py", "hybrid_cache.py", "test_hybrid_cache.py"):
        tested |= {line.split("  #")[0].strip() for line in (ROOT / "fixtures/subjects" / name).read_text().splitlines()}
    for page, text in pages.items():
        for language, block in blocks(text):
            if language == "python" and "torch.ops" not in block:
                yield from (f"{page}: no test runs `{line.strip()}`" for line in block.splitlines()
                            if line.split("  #")[0].strip() not in tested)


def bugs_not_shown(folder):
    """Pages about bugs of servers whose run finds nothing. Each names a trace and the defect that is the bug, or its
    script alone."""
    runs = [(page.name, command) for page in sorted((ROOT / "reports/found").glob("*.md"))
            for command in re.findall(r"\*\*Its run\*\*.*?`(\./lockstep replay [^`]+)`", page.read_text())]
    for name, command in runs or [("reports/found", "no page names its run")]:
        if subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True).returncode not in range(10, 14):
            yield f"{name}: finds nothing: {command}"


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--build", type=pathlib.Path, required=True)
    words.add_argument("--only", default="", help="commands that contain this text")
    options = words.parse_args()
    pages = {name: (ROOT / name).read_text() for name in PAGES}
    failed = ran = 0
    told = {command for text in pages.values() for command, _ in commands(text)}
    for part in NOT_RUN:
        if not any(re.search(part, command) for command in told):
            print(f"NOT_RUN: no page has a command with {part}")
            failed += 1
    tops = [entry for entry in ROOT.iterdir() if entry.is_dir() and entry.name != "build" and entry.name[0] != "."]
    for page in sorted([*ROOT.glob("*.md"), *(page for top in tops for page in top.rglob("*.md"))]):
        for sentence in dead_links(page):
            print(sentence)
            failed += 1
    for sentence in foreign_python(pages):
        print(sentence)
        failed += 1
    if said := transcript_complaint(options.build.resolve()):
        print(said)
        failed += 1
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        fill(folder, options.build.resolve(), pages["README.md"])
        os.environ.setdefault("LOCKSTEP_PYTHON", sys.executable)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # on a busy machine PyTorch's threads wait for each other
        has_torch = subprocess.run([os.environ["LOCKSTEP_PYTHON"], "-c", "import torch"],
                                   capture_output=True).returncode == 0
        has_pytest = subprocess.run(["python3", "-c", "import pytest"], capture_output=True).returncode == 0
        listed = subprocess.run([options.build.resolve() / "lockstep", "list", "operations"], capture_output=True, text=True)
        has_judge = bool(listed.stdout)  # not in a package: Debian has no headers of cuda::std::mdspan
        for sentence in bugs_not_shown(folder):
            print(sentence)
            failed += 1
        done = set()
        for name, (command, shown) in ((name, one) for name, text in pages.items() for one in commands(text)):
            why = why_not(command)
            if not why and not shutil.which("c++") and re.search(r"^c\+\+ |exec:\./block_cache", command):
                why = "there is no compiler"
            if not why and not has_judge and re.search(r"lockstep (judge|list operations)", command):
                why = "the program has no judge"
            if not why and not has_torch and re.search(r"judge .*--candidate (?!\S*\.so:)", command):
                why = "the Python has no PyTorch"
            if not why and not has_pytest and "-m pytest" in command:
                why = "the Python has no pytest"
            if options.only not in command or (command in done and not shown):
                continue
            done.add(command)
            if why:
                print(f"not run ({why}): {command}")
                continue
            ran += 1
            said = complaint(command, shown, folder, server.server_port)
            failed += bool(said)
            print(f"{'FAILS' if said else 'ok'}: {name}: {command}{': ' + said if said else ''}", flush=True)
    print(f"{ran} commands ran, {failed} complaints")
    return 1 if failed or (ran == 0 and not options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
