#!/usr/bin/env python3
"""Runs the libFuzzer programs of the preset `fuzz`, each from a corpus made of the fixtures.

fuzz.py --build build/fuzz [TARGET…] [--runs 10000000] [--time SECONDS] [--seed 1] [--jobs 1]

Runs are made in pieces of a million, each from what the pieces before it have found: names are kept for as long as a
program lives, so that one of ten million would need their memory. With --jobs as many pieces run at once, and find
what the others put into the corpus. A crash leaves its input in BUILD/fuzz/TARGET and ends the script with 1.
"""
import argparse
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PIECE = 1_000_000
MOST_BYTES = {"protocol": 256, "grammar": 1024, "loaders": 2048, "logs": 2048}  # longer ones show nothing more
FIXTURES = {"grammar": ["traces", "regressions"], "loaders": ["workloads", "bad/workloads"]}
WORDS = ["{", "}", "[", "]", ",", ":", "null", "true", "0", "-1", "1e3", "4294967296"] + [
    f'"{key}"' for key in (
        "timestamp input_length output_length hash_ids chat_id parent_chat_id type turn id requests t in out model api_time "
        "think_time block_size hash_id_scope tool_tokens system_tokens stop models local subagent session_id sub_requests "
        "input_toks output_toks input_tok_ids output_tok_ids arrival_time_ns tool_duration_ns prompt_token_ids output_ids "
        "token_ids input_ids prompt output cached_tokens num_cached_tokens meta_info request_id outputs start end greedy text "
        "temperature sampling_params finished").split()]


def first_lines(path, most):
    """A fixture, cut to whole lines that fit."""
    data = path.read_bytes()
    if len(data) <= most or path.suffix == ".zst":
        return data
    return data[:data.rfind(b"\n", 0, most) + 1]


def answers():
    """Every expected answer of the traces, as an answer to each verb: the target's first byte names it."""
    found = set()
    for trace in sorted((ROOT / "fixtures").rglob("*.trace")):
        lines = trace.read_text().splitlines()
        found.update(b for a, b in zip(lines, lines[1:]) if a == "----")
    verbs = re.search(r"enum class Verb [^{]*{(.*?)};", (ROOT / "reference/protocol/operation.hpp").read_text(), re.DOTALL)[1]
    for answer in sorted(found | {"ok", "refused=no_kv", "cached=0 conv=0 state=0", "n=1 evicted_kv=0"}):
        for verb in range(len(re.findall(r"^ *\w+,", verbs, re.MULTILINE))):
            yield bytes([verb]) + answer.encode()


def logs():
    """A line of each format of logs, and two that contradict each other."""
    own = {"id": "r1", "prompt": [1, 2, 3], "output": [4, 5], "cached": 2, "start": 0, "end": 1.5, "greedy": True}
    sglang = {"input_ids": [1, 2, 3], "output_ids": [4], "meta_info": {"id": "r2", "prompt_tokens": 3,
              "cached_tokens": 1, "completion_tokens": 1, "e2e_latency": 0.5}}
    vllm = {"request_id": "r3", "prompt_token_ids": [1, 2, 3], "num_cached_tokens": 0, "finished": True,
            "outputs": [{"index": 0, "token_ids": [4, 6]}]}
    for line in (own, sglang, vllm):
        yield (json.dumps(line) + "\n").encode()
    yield (json.dumps(own) + "\n" + json.dumps({**own, "id": "r4", "output": [9], "cached": 3}) + "\n").encode()


def make_corpus(target, folder):
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    for name in FIXTURES.get(target, []):
        pieces += [first_lines(path, MOST_BYTES[target]) for path in sorted((ROOT / "fixtures" / name).iterdir()) if path.suffix != ".md"]
    pieces += list(answers()) if target == "protocol" else list(logs()) if target == "logs" else []
    for number, piece in enumerate(pieces):
        (folder / f"fixture-{number}").write_bytes(piece)


def fuzz(program, target, options):
    found = options.build / "fuzz" / target
    make_corpus(target, found / "corpus")
    dictionary = found / "words"
    dictionary.write_text("".join('"{}"\n'.format(w.replace('"', '\\"')) for w in WORDS))
    start, seed, runs, crash = time.monotonic(), options.seed, 0, None
    piece = min(PIECE, -(-options.runs // options.jobs))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running, begun = set(), 0
        while True:
            left = options.time - (time.monotonic() - start) if options.time else None
            while len(running) < options.jobs and begun < options.runs and not crash and (left is None or left > 0):
                count = min(piece, options.runs - begun)
                running.add(pool.submit(run_piece, program, target, found, dictionary, count, seed, left))
                begun += count
                seed += 1
            if not running:
                break
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                executed, text = future.result()
                crash = crash or (text if executed is None else None)
                runs += executed or 0
            print(f"{target}: {runs:,} executions in {time.monotonic() - start:.0f} s, "
                  f"{'CRASHED' if crash else 'no crash'}", flush=True)
    if crash:
        print(crash[-6000:])
    return not crash


def run_piece(program, target, found, dictionary, runs, seed, seconds):
    """(executions, "") or (None, what the program said when it crashed)."""
    words = [str(program), f"-runs={runs}", f"-max_len={MOST_BYTES[target]}", f"-seed={seed}", "-print_final_stats=1",
             "-verbosity=0", "-timeout=25", "-reduce_inputs=1", f"-artifact_prefix={found}/"]
    if target in ("loaders", "logs"):
        words.append(f"-dict={dictionary}")
    if seconds is not None:
        words.append(f"-max_total_time={max(1, int(seconds))}")
    done = subprocess.run([*words, str(found / "corpus")], capture_output=True, text=True)
    stats = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    return (int(stats[1]), "") if done.returncode == 0 and stats else (None, done.stderr)


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("targets", nargs="*", metavar="TARGET")
    words.add_argument("--build", type=pathlib.Path, default=ROOT / "build/fuzz")
    words.add_argument("--runs", type=int, default=10_000_000)
    words.add_argument("--time", type=float, default=0)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--jobs", type=int, default=1)
    options = words.parse_args()
    programs = {p.name.removeprefix("lockstep_fuzz_"): p for p in sorted(options.build.glob("lockstep_fuzz_*"))}
    return all([fuzz(programs[target], target, options) for target in options.targets or programs])


sys.exit(0 if main() else 1)
