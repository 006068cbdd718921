"""Times our kernels and the peers' in one process, interleaved, and writes speed.json.

    python3 bench/peers/run.py --ours build/gpu/liblockstep_torch.so --out reports/speed

Every contestant is first compared with float64 on the first rows of the case; one that disagrees is
named as absent and not timed. Then each contestant's launches, which rotate over the input sets
(cases.py), become a CUDA graph, and the graphs are replayed in turns, so that changes of clocks and
power limits meet all contestants alike.

A contestant can end the process that it runs in, by an illegal access; then a new process continues
the case without the contestant (supervise.py), and the row names it as absent.

LOCKSTEP_LEFT_OUT lists peers, by their names in load.py, that are not loaded; rows name them as
absent.

limit_share is the time that the counted bytes take at this run's copy rate, or that the counted
FLOPs take at its matmul rate if that is longer, divided by the measured time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases
import peers
import supervise

APART = ("less_work", "other_work")  # flags of contestants that are timed and are no row's peer
THE_CASE = "the case itself"  # stands for a contestant while a worker makes the case's inputs
MIN_LAUNCHES = 50
MIN_GRAPH_US = 1500.0  # a shorter graph would measure its own launch
MOST_GRAPH_US = 15000.0  # at 4.3 TB/s; a graph of this length may have fewer launches than MIN_LAUNCHES


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def read_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + tl.program_id(0), tl.sum(tl.load(source + at)))


def event_us(function, repeats):
    """Microseconds of each of `repeats` calls of `function`, measured by CUDA events."""
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def ceilings():
    """The copy rate and the read rate in GB/s, each of the fastest of three ways, and the bf16
    matmul rate in TFLOP/s, the median of 30 products of 8192 x 8192 matrices."""
    count = 1 << 29  # 2 GiB of float32
    a, b = torch.randn(count, device="cuda"), torch.empty(count, device="cuda")
    size = count * 4
    copies, reads = [], []
    ways = [lambda: b.copy_(a)]
    for block, warps in ((4096, 4), (8192, 8)):
        grid = (count // block,)
        ways.append(lambda g=grid, k=block, w=warps: copy_kernel[g](a, b, BLOCK=k, num_warps=w))
        reads.append(lambda g=grid, k=block, w=warps: read_kernel[g](a, b, BLOCK=k, num_warps=w))
    for way in ways:
        event_us(way, 2)
        copies.append(2 * size / statistics.median(event_us(way, 15)) / 1e3)
    read_rates = []
    for way in reads + [lambda: a.sum()]:
        event_us(way, 2)
        read_rates.append(size / statistics.median(event_us(way, 15)) / 1e3)
    del a, b
    torch.cuda.empty_cache()
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    event_us(lambda: x @ y, 3)
    rates = []
    for _ in range(3):  # in bursts of ten, since longer runs reach the power limit
        time.sleep(0.3)
        rates += [2 * 8192**3 / us / 1e6 for us in event_us(lambda: x @ y, 10)]
    return {"copy_gbps": round(max(copies), 1), "read_gbps": round(max(read_rates), 1),
            "matmul_tflops": round(statistics.median(rates), 1)}


def relative_error(got, want):
    """||got - want|| / ||want||, infinite where a value is not finite or a shape differs."""
    if got.shape != want.shape or not torch.isfinite(got).all():
        return float("inf")
    return ((got.double() - want).norm() / want.norm()).item()


def check(case, contestant):
    """The larger relative error of output and state against float64, on the first rows of set 0."""
    s = case.sets[0]
    rows = min(case.B, cases.CHECKED_ROWS)
    if case.kind == "copy":
        s.state[:, s.target] = 0
        rows = 2
    want = case.reference(s, rows)
    if contestant.prepare is not None:
        contestant.prepare(s)
    result = contestant.launch(s)
    torch.cuda.synchronize()
    got = contestant.view(s, result, rows)
    return max(relative_error(g, w) for g, w in zip(got, want, strict=True))


def capture(case, contestant):
    """A CUDA graph of launches that rotate over the sets, and the number of launches."""
    sets = case.sets
    for s in sets[: min(len(sets), 3)]:
        contestant.launch(s)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    roofline_us = case.bytes / 4.3e6
    wanted = max(min(MIN_LAUNCHES, MOST_GRAPH_US / roofline_us), MIN_GRAPH_US / max(roofline_us, 1.5))
    launches = len(sets) * max(1, round(wanted / len(sets) + 0.499))
    graph = torch.cuda.CUDAGraph()
    kept = [None] * len(sets)  # a result lives until its set's next turn: no output stays in L2
    with torch.cuda.graph(graph):
        for i in range(launches):
            kept[i % len(sets)] = contestant.launch(sets[i % len(sets)])
    return graph, launches


def interleaved(graphs, rounds, turn):
    """{name: median microseconds per launch} of graphs that are replayed in turns; each round
    begins with another graph. turn(name) is called before each replay."""
    times = {name: [] for name in graphs}
    began = time.time()
    for name, (graph, _) in graphs.items():
        turn(name)
        graph.replay()
        torch.cuda.synchronize()
    if time.time() - began > 1:  # replays that long vary little: fewer rounds suffice
        rounds = min(rounds, 7)
    names = list(graphs)
    for i in range(rounds):
        for name in names[i % len(names):] + names[: i % len(names)]:
            turn(name)
            graph, launches = graphs[name]
            times[name].append(event_us(graph.replay, 1)[0] / launches)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(case, key, loaded, rates, rounds, dead, turn):
    """The row of speed.json for one case. Contestants in `dead`, {name: why}, are left out and
    named as absent; turn(name) is called before each step of a contestant."""
    found, absent = peers.contestants(case, loaded)
    absent += [{"name": name, "why": why} for name, why in dead.items()]
    graphs, errors = {}, {}
    for contestant in found:
        if contestant.name in dead:
            continue
        turn(contestant.name)
        try:
            errors[contestant.name] = check(case, contestant)
            if not errors[contestant.name] <= case.tolerance:
                absent.append({"name": contestant.name,
                               "why": f"differs from float64 by {errors[contestant.name]:.2e}"})
                continue
            graphs[contestant.name] = capture(case, contestant)
        except Exception as error:  # a peer that fails is named in the report; the rest still run
            why = f"{type(error).__name__}: {error}"[:300]
            print(f"{case.name}: {contestant.name}: {why}", flush=True)
            torch.cuda.synchronize()  # throws where the process has lost its GPU
            absent.append({"name": contestant.name, "why": why})
    times = interleaved(graphs, rounds, turn)
    row = {"case": case.name, "bytes": case.bytes} | ({"flops": case.flops} if case.flops else {})
    ours = times.pop(peers.OURS, None)
    if ours is not None:
        gbps = case.bytes / ours / 1e3
        share = max(gbps / rates["copy_gbps"], case.flops / ours / 1e6 / rates["matmul_tflops"])
        row |= {"time_us": round(ours, 3), "gbps": round(gbps, 1), "limit_share": round(share, 4)}
    timed = [{"name": name, "time_us": round(us, 3), "error": float(f"{errors[name]:.3g}")}
             for name, us in sorted(times.items(), key=lambda item: item[1])]
    kept_apart = {flag: {contestant.name for contestant in found if getattr(contestant, flag)} for flag in APART}
    aside = set().union(*kept_apart.values())
    row["peers"] = [entry for entry in timed if not entry["name"].startswith(peers.OURS) and entry["name"] not in aside]
    row |= {flag: [entry for entry in timed if entry["name"] in names] for flag, names in kept_apart.items() if names}
    row["variants"] = [entry for entry in timed if entry["name"].startswith(peers.OURS)]
    if peers.OURS in errors:
        row["error"] = float(f"{errors[peers.OURS]:.3g}")
    if row["peers"]:
        row |= {"peer": row["peers"][0]["name"], "peer_time_us": row["peers"][0]["time_us"],
                "peer_run": "same"}
    if key in cases.RECORDED and cases.RECORDED_ON in rates["gpu"]:
        name, us = cases.RECORDED[key]
        row["recorded"] = {"name": name, "time_us": us}
    row["absent"] = absent
    return row


def price_boundaries(rows, copy_gbps):
    """Gives rows whose cases keep states at boundaries "boundary_states_over_copy": the time beyond
    the row of the same case without these states, divided by the time to write the states' bytes at
    the copy rate."""
    plain = {row["case"]: row for row in rows if "time_us" in row}
    for row in rows:
        name, has_states, _ = row["case"].partition(", states every ")
        base = plain.get(name) if has_states else None  # two operations may have cases of one name
        if "time_us" in row and base is not None:
            copy_us = (row["bytes"] - base["bytes"]) / copy_gbps / 1e3
            row["boundary_states_over_copy"] = round((row["time_us"] - base["time_us"]) / copy_us, 3)


def name_peers(rows, keys):
    """Gives a row without a peer (no peer runs its form) the peer of an earlier row with the same
    key, or else the recorded one."""
    earlier = {}
    for key, row in zip(keys, rows):
        if row["peers"]:
            earlier[key] = {name: row[name] for name in ("peer", "peer_time_us", "peer_run")}
        elif key in earlier:
            row |= earlier[key]
        elif recorded := row.get("recorded"):
            row |= {"peer": recorded["name"], "peer_time_us": recorded["time_us"], "peer_run": "recorded"}


def show(operations, rates):
    """Prints the table: our time, the fastest peer's, their ratio, our limit_share; then absent
    peers and rates."""
    for operation, rows in operations.items():
        print(f"\n{operation}")
        print(f"  {'case':<44} {'ours us':>9} {'peer us':>9} {'ratio':>6} {'limit':>6} "
              f"{'recorded':>9}  fastest peer; others")
        for row in rows:
            ours, peer = row.get("time_us"), row.get("peer_time_us")
            recorded = row.get("recorded", {}).get("time_us")
            ratio = f"{ours / peer:.3f}" if ours and peer else "-"
            limit = f"{row['limit_share']:.3f}" if ours else "-"
            others = "; ".join(f"{p['name']} {p['time_us']:.2f}"
                               for p in row["peers"][1:] + row["variants"] + sum((row.get(f, []) for f in APART), []))
            mark = "" if row.get("peer_run") == "same" else " (recorded)"
            if ours and peer and ours > 1.02 * peer + 0.1:
                mark += " MISSED (1.02 x + 0.1 us)"
            print(f"  {row['case']:<44} {number_text(ours):>9} {number_text(peer):>9} {ratio:>6} {limit:>6} "
                  f"{number_text(recorded):>9}  {row.get('peer', 'none')}{mark}; {others}")
            for absent in row["absent"]:
                if any(word in absent["why"] for word in ("differs", "its process")) or absent["name"] == peers.OURS:
                    print(f"    {absent['name']}: {absent['why']}")
    missing = {(a["name"], a["why"]) for rows in operations.values() for row in rows
               for a in row["absent"]}
    print("\nabsent:", *(f"  {name}: {why}" for name, why in sorted(missing)), sep="\n")
    print("\n" + ", ".join(f"{key} {value}" for key, value in rates.items()))


def number_text(value):
    """A time in the table, "-" where there is none."""
    return "-" if value is None else f"{value:.2f}"


def driver():
    """The NVIDIA driver's version."""
    done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def chosen(arguments):
    """(operation, key, maker) of the cases that the command line selects."""
    return [case for case in cases.all_cases(arguments.quick)
            if (not arguments.operation or case[0] in arguments.operation)
            and (not arguments.kind or case[1][0] in arguments.kind)
            and (not arguments.key or any(text in str(case[1]) for text in arguments.key))]


def work(arguments):
    """Runs in the worker process: measures the cases that have no row yet and reports each row."""
    state = json.loads(arguments.state.read_text())
    reporter = supervise.Reporter(arguments.report_to)
    torch.manual_seed(1)
    all_of_them = chosen(arguments)
    loaded = peers.Loaded(arguments.ours, {key[0] for _, key, _ in all_of_them})
    facts = state["facts"]
    if facts is None:
        for name, why in loaded.why.items():
            print(f"absent: {name}: {why}", flush=True)
        facts = {"gpu": torch.cuda.get_device_name(), "driver": driver(), "cuda": torch.version.cuda,
                 "torch": torch.__version__, "triton": triton.__version__, **ceilings()}
        print(facts, flush=True)
        reporter.facts(facts)
    for number in state["cases"]:
        if str(number) in state["rows"]:
            continue
        operation, key, make = all_of_them[number]
        began = time.time()
        dead = state["dead"].get(str(number), {})
        if THE_CASE in dead:
            reporter.row(number, {"case": f"{operation} {key}", "peers": [], "variants": [],
                                  "absent": [{"name": THE_CASE, "why": dead[THE_CASE]}]})
            continue
        reporter.turn(number, THE_CASE)
        case = make()
        row = measure(case, key, loaded, facts, 5 if arguments.quick else 11,
                      dead, lambda name: reporter.turn(number, name))
        reporter.row(number, row)
        ours, peer = number_text(row.get("time_us")), number_text(row.get("peer_time_us"))
        print(f"{operation} {case.name}: ours {ours}, peer {peer} us ({time.time() - began:.0f} s)", flush=True)
        del case
        torch.cuda.empty_cache()


def report_of(state, asked):
    """The content of speed.json, of the rows measured so far."""
    report = {**state["facts"], "operations": {}}
    numbers = [number for number in state["cases"] if str(number) in state["rows"]]
    rows = [dict(state["rows"][str(number)]) for number in numbers]
    name_peers(rows, [asked[number][1] for number in numbers])
    price_boundaries(rows, state["facts"]["copy_gbps"])
    for number, row in zip(numbers, rows):
        report["operations"].setdefault(asked[number][0], []).append(row)
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", type=Path, help="liblockstep_torch.so; without it only peers run")
    parser.add_argument("--out", type=Path, required=True, help="folder for speed.json")
    parser.add_argument("--operation", action="append", help="only this one; may be repeated")
    parser.add_argument("--kind", action="append", help="only the cases of this kind in cases.py")
    parser.add_argument("--key", action="append", help="only the cases whose key in cases.py has this text")
    parser.add_argument("--quick", action="store_true", help="two batch sizes, fewer rounds")
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)  # of a worker
    parser.add_argument("--report-to", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.state:
        return work(arguments)

    arguments.out.mkdir(parents=True, exist_ok=True)
    asked = chosen(arguments)
    state_file = arguments.out / "peers_state.json"

    def command(state, descriptor):
        state_file.write_text(state)
        return [sys.executable, __file__, *sys.argv[1:], "--state", str(state_file), "--report-to", str(descriptor)]

    def on_row(state):
        (arguments.out / "speed.json").write_text(json.dumps(report_of(state, asked), indent=1) + "\n")

    state = supervise.supervise(command, range(len(asked)), on_row)
    state_file.unlink()
    report = report_of(state, asked)
    show(report["operations"], {name: report[name] for name in ("copy_gbps", "read_gbps", "matmul_tflops")})
    return None


if __name__ == "__main__":
    main()
