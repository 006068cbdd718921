"""Runs a Python candidate on the cases of `lockstep judge`; kernels/judge/run.hpp lists the files.

Tensors are views into allocations that lie between guard bands; what they hold behind each run goes
back as it is, and the program that started this judges it. Needs PyTorch and nothing else.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

FOLDER = Path(sys.argv[1])
BAD_USAGE, ENVIRONMENT = 2, 3


def write(name, value):
    """A JSON file, whole or not at all."""
    part = FOLDER / (name + ".part")
    part.write_text(json.dumps(value))
    part.rename(FOLDER / name)


def refuse(text, status=ENVIRONMENT):
    """Nothing can be judged."""
    write("environment.json", {"text": text, "status": status})
    sys.exit(status)


def brief(error):
    """An exception as one sentence, with the line of the candidate that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    return text + (f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else "")


try:
    import torch
except ImportError as missing:
    refuse(f"{sys.executable} has no PyTorch ({missing}): LOCKSTEP_PYTHON names a Python that has")


def candidate_of(words):
    """The function that MODULE:FUNCTION or FILE.py:FUNCTION names."""
    module, _, path = words.rpartition(":")
    sys.path.insert(0, os.getcwd())
    try:
        if module.endswith(".py") or "/" in module:
            if not Path(module).exists():
                refuse(f"{module}: there is no such file", BAD_USAGE)
            sys.path.insert(0, str(Path(module).resolve().parent))
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            found = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = found
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
    except Exception as error:  # whatever its import throws
        refuse(f"{module} does not import: {brief(error)}")
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            refuse(f"{module} has no `{path}`", BAD_USAGE)
    if not callable(found):
        refuse(f"{words} is no function", BAD_USAGE)
    return found


class Arguments:
    """A case's tensors on the device, and the call."""

    def __init__(self, run, case, number, device):
        self.run, self.case, self.number, self.device = run, case, number, device
        self.bytes = sum(t["bytes"] for t in case["tensors"])
        self.memory = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        self.views = {}
        for t in case["tensors"]:
            dtype = getattr(torch, t["dtype"])
            size = torch.empty(0, dtype=dtype).element_size()
            begin = t["offset"] + run["guard"]
            room = (t["bytes"] - 2 * run["guard"]) // size * size
            flat = self.memory[begin : begin + room].view(dtype)
            self.views[t["name"]] = flat.as_strided(t["extents"], t["strides"])

    def set(self, data):
        """Every byte, guards and holes included."""
        self.memory.copy_(data)

    def call(self, function):
        """The candidate, with the arguments of the schema that the case gives."""
        outputs = [t["name"] for t in self.case["tensors"] if t["role"] == "output"]
        given = {**{n: v for n, v in self.views.items() if n not in outputs},
                 **self.case["scalars"]}
        positional = [given.pop(name, None) for name in self.run["positional"]]
        return function(*positional, **given)

    def write_stages(self, stages):
        """Named stages of the computation, in float32."""
        sizes, data = {}, b""
        for name, value in stages.items():
            one = torch.as_tensor(value).detach().float().cpu().contiguous()
            sizes[name] = one.numel() * 4
            data += ctypes.string_at(one.data_ptr(), one.numel() * 4)
        (FOLDER / f"stages_{self.number}.bin").write_bytes(data)
        write(f"stages_{self.number}.json", sizes)

    def answer(self, result):
        """The bytes behind the call, with what it returned in the place of the output."""
        stages = None
        if isinstance(result, tuple):
            result, *rest = result
            stages = next((r for r in rest if isinstance(r, dict)), None)
        for t in self.case["tensors"]:
            if t["role"] != "output" or not self.run["returns"]:
                continue
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"a tensor was to be returned, and {type(result).__name__} came")
            if list(result.shape) != t["extents"]:
                result_shape = list(result.shape)
                raise ValueError(f"{t['name']} is {t['extents']}, and {result_shape} came back")
            if str(result.dtype) != "torch." + t["dtype"]:
                raise ValueError(f"{t['name']} is {t['dtype']}, and {result.dtype} came back")
            self.views[t["name"]].copy_(result)
        if stages is not None:
            self.write_stages(stages)
        host = self.memory.cpu()
        return ctypes.string_at(host.data_ptr(), self.bytes)


def finish(device):
    """Waits for the device; what went wrong there is raised here."""
    if device == "cuda":
        torch.cuda.synchronize()


def inputs_of(number, fill, device):
    """The allocations of a case as one tensor of bytes."""
    data = bytearray((FOLDER / f"in_{number}_{fill}.bin").read_bytes())
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def event_us(body):
    """Microseconds of the device between two events around body()."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    body()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def time_cuda(sets, function):
    """Median microseconds of a launch, sets in turns, in a CUDA graph where that can be."""
    kept = [None] * len(sets)  # results live until their set's next turn: none stays in the cache

    def launch(i):
        kept[i % len(sets)] = sets[i % len(sets)].call(function)

    for i in range(3):
        launch(i)
    torch.cuda.synchronize()
    once = event_us(lambda: launch(0))
    wanted = max(50.0, 1500.0 / max(once, 1.5))
    launches = len(sets) * max(1, int(wanted / len(sets)))
    rounds = 11
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                launch(i)
        graph.replay()
        torch.cuda.synchronize()
        times = [event_us(graph.replay) / launches for _ in range(rounds)]
        how = f"median of {rounds} CUDA graphs of {launches} launches, L2 cold"
    except Exception as error:  # it waits, allocates elsewhere, or copies to the host
        torch.cuda.synchronize()
        for i in range(3):
            launch(i)
        times = [event_us(lambda i=i: launch(i)) for i in range(max(50, len(sets)))]
        how = (f"median of {len(times)} launches between events, L2 cold; it cannot be captured "
               f"into a CUDA graph ({brief(error)[:120]})")
    return statistics.median(times), how


def time_cpu(sets, function):
    """Median microseconds of a call, sets in turns."""
    sets[0].call(function)
    times = []
    while len(times) < 5 or (sum(times) < 1e6 and len(times) < 200):
        begin = time.perf_counter()
        sets[len(times) % len(sets)].call(function)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times), f"median of {len(times)} calls, sets of inputs in turns"


def timed(run, case, number, function, device):
    """The time of a case whose sets together are larger than the caches."""
    data = inputs_of(number, "finite", device)
    cold = 128 << 20
    if device == "cuda":
        cold = 4 * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    sets = []
    while not sets or (len(sets) < 16 and sum(s.bytes for s in sets) < cold):
        sets.append(Arguments(run, case, number, device))
        sets[-1].set(data)
    us, how = (time_cuda if device == "cuda" else time_cpu)(sets, function)
    return {"time_us": us, "how": how}


def copy_gbps(device):
    """Bytes read plus bytes written per second by a copy."""
    size = 1 << 30 if device == "cuda" else 1 << 27
    a = torch.ones(size, dtype=torch.uint8, device=device)
    b = torch.zeros_like(a)
    times = []
    for _ in range(12 if device == "cuda" else 5):
        if device == "cuda":
            times.append(event_us(lambda: b.copy_(a)))
        else:
            begin = time.perf_counter()
            b.copy_(a)
            times.append((time.perf_counter() - begin) * 1e6)
    return 2 * size / statistics.median(times[2:]) / 1e3


def run_case(run, case, number, function, device):
    """One case: runs with every fill, then its time."""
    for i, fill in enumerate(run["fills"]):
        arguments = Arguments(run, case, number, device)
        arguments.set(inputs_of(number, fill, device))
        try:
            result = arguments.call(function)
            finish(device)
        except NotImplementedError as error:
            return {"status": "unsupported", "message": " ".join(str(error).split())[:300]}
        answer = arguments.answer(result)
        (FOLDER / f"out_{number}_{i}.bin").write_bytes(answer)
    done = {"status": "done"}
    if case["timed"] and run["timed"]:
        done |= timed(run, case, number, function, device)
    return done


def main():
    """All cases, one after the other."""
    run = json.loads((FOLDER / "run.json").read_text())
    device = run["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: PyTorch sees no GPU here")
    function = candidate_of(run["candidate"])
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU, through PyTorch"
    any_timed = run["timed"] and any(c["timed"] for c in run["cases"])
    write("machine.json", {"device": name, "gpu": device == "cuda",
                           "copy_gbps": copy_gbps(device) if any_timed else 0.0})
    broken = None
    for number, case in enumerate(run["cases"]):
        if broken:
            done = {"status": "unsupported", "message": f"not run: {broken}"}
        else:
            try:
                done = run_case(run, case, number, function, device)
            except Exception as error:  # whatever the candidate throws on a valid case
                done = {"status": "raised", "message": brief(error)}
                try:
                    finish(device)
                except Exception:  # an illegal access leaves nothing that could run on
                    broken = f"the GPU cannot be used behind the error of {case['name']}"
        write(f"done_{number}.json", done)


main()
