"""The process of a Python candidate: answers the requests of `lockstep judge`, one per line.
kernels/judge/run.hpp lists the requests.

Tensors are views into allocations between guard bands. After each run the whole memory goes back
through shared memory, and the judge, which started this process, judges it. Needs only PyTorch.
"""

import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import statistics
import sys
import traceback
from pathlib import Path

SHARED, DEVICE, CANDIDATE = int(sys.argv[1]), sys.argv[2], sys.argv[3]
BAD_USAGE, ENVIRONMENT = 2, 3
# The judge's pipes move to other descriptors, and the candidate's output to standard error.
REQUESTS = os.fdopen(os.dup(0), "r")
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)


class Refusal(Exception):
    """The candidate cannot be judged; `status` is the exit status of the program."""

    def __init__(self, text, status=ENVIRONMENT):
        super().__init__(text)
        self.status = status


def brief(error):
    """An exception as one sentence, with the line of the candidate that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    return text + (f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else "")


try:
    import torch
    MISSING = ""
except ImportError as missing:
    MISSING = (f"{sys.executable} has no PyTorch ({missing}): set LOCKSTEP_PYTHON to a Python that "
               "has it")


def candidate_of(words):
    """The function that MODULE:FUNCTION or FILE.py:FUNCTION names."""
    module, _, path = words.rpartition(":")
    if (module.endswith(".py") or "/" in module) and not Path(module).exists():
        raise Refusal(f"{module}: there is no such file", BAD_USAGE)
    sys.path.insert(0, os.getcwd())
    try:
        if module.endswith(".py") or "/" in module:
            sys.path.insert(0, str(Path(module).resolve().parent))
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            found = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = found
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
    except Exception as error:  # the import runs the candidate's code, which may raise anything
        raise Refusal(f"{module} does not import: {brief(error)}") from None
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise Refusal(f"{module} has no `{path}`", BAD_USAGE) from None
    if not callable(found):
        raise Refusal(f"{words} is no function", BAD_USAGE)
    return found


class FarTensor:
    """A tensor whose dimension 0 has the stride t["far"], in memory that is poison but for it."""

    PART = 1 << 28  # bytes looked at in one step

    def __init__(self, t, near, guard):
        size = near.element_size()
        strides = [t["far"], *t["strides"][1:]]
        span = 1 + sum((n - 1) * step for n, step in zip(t["extents"], strides))
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
        self.bytes = torch.full((2 * guard + span * size,), 255, dtype=torch.uint8, device=near.device)
        flat = self.bytes[guard : guard + span * size]
        self.view = flat.view(near.dtype).as_strided(t["extents"], strides)
        self.bits, self.near = flat.view(bits).as_strided(t["extents"], strides), near.view(bits)

    def fill(self):
        """Copies the elements to where the candidate finds them."""
        self.bits.copy_(self.near)

    def take(self):
        """Copies them back; tells whether anything between them was written."""
        self.near.copy_(self.bits)
        self.bits.fill_(255 if self.bits.dtype == torch.uint8 else -1)
        return any(bool((part != 255).any()) for part in self.bytes.split(self.PART))


class Arguments:
    """The memory and the tensors of one call, on the device."""

    def __init__(self, case, device):
        self.case, self.bytes = case, case["bytes"]
        self.memory = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        self.views, self.far = {}, {}
        for t in case["tensors"]:
            dtype = getattr(torch, t["dtype"])
            size = torch.empty(0, dtype=dtype).element_size()
            begin = t["offset"] + case["guard"]
            room = (t["bytes"] - 2 * case["guard"]) // size * size
            flat = self.memory[begin : begin + room].view(dtype)
            view = flat.as_strided(t["extents"], t["strides"])
            if t["far"]:
                self.far[t["name"]] = FarTensor(t, view, case["guard"])
                view = self.far[t["name"]].view
            self.views[t["name"]] = view
        self.result = None

    def call(self, function):
        """Calls the candidate with the arguments of the schema that the case gives."""
        outputs = [t["name"] for t in self.case["tensors"] if t["role"] == "output"]
        given = {**{n: v for n, v in self.views.items() if n not in outputs},
                 **self.case["scalars"]}
        positional = [given.pop(name, None) for name in self.case["positional"]]
        self.result = function(*positional, **given)

    def take_result(self):
        """Copies the returned tensors to the outputs' memory, in order; returns stages, if any."""
        results = list(self.result) if isinstance(self.result, tuple) else [self.result]
        stages = next((r for r in results[1:] if isinstance(r, dict)), None)
        outputs = [t for t in self.case["tensors"] if t["role"] == "output"]
        for number, t in enumerate(outputs if self.case["returns"] else []):
            result = results[number] if number < len(results) else None
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"{t['name']}: a tensor was to be returned, and {type(result).__name__} came")
            if list(result.shape) != t["extents"]:
                result_shape = list(result.shape)
                raise ValueError(f"{t['name']} is {t['extents']}, and {result_shape} came back")
            if str(result.dtype) != "torch." + t["dtype"]:
                raise ValueError(f"{t['name']} is {t['dtype']}, and {result.dtype} came back")
            self.views[t["name"]].copy_(result)
        return stages


def event_us(body):
    """Microseconds of the device between two events around body()."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    body()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_gbps():
    """Bytes read plus bytes written per second by a copy on the device."""
    size = 1 << 30
    a = torch.ones(size, dtype=torch.uint8, device="cuda")
    b = torch.zeros_like(a)
    times = [event_us(lambda: b.copy_(a)) for _ in range(12)]
    return 2 * size / statistics.median(times[2:]) / 1e3


class Server:
    """Has a method for each request."""

    def __init__(self):
        self.function, self.case, self.sets, self.inputs, self.graph = None, None, [], [], None

    def finish(self):
        """Waits for the device, and raises its error if there is one."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def shared(self, offset, size):
        """Part of the shared memory as a tensor of bytes."""
        begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        room = mmap.mmap(SHARED, offset - begin + size, offset=begin)
        return torch.frombuffer(room, dtype=torch.uint8, count=size, offset=offset - begin)

    def machine(self, copy_rate, **_):
        """Describes the machine. Asked before the candidate is loaded and could interfere."""
        if MISSING:
            raise Refusal(MISSING)
        if DEVICE == "cuda" and not torch.cuda.is_available():
            raise Refusal("--device cuda: PyTorch sees no GPU here")
        if DEVICE != "cuda":
            return {"device": "the CPU, through PyTorch", "gpu": False}
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
        return {"device": torch.cuda.get_device_name(), "gpu": True, "cold_bytes": 4 * cache,
                "copy_gbps": copy_gbps() if copy_rate else 0.0}

    def load(self, **_):
        """Loads the function that the command line names."""
        self.function = candidate_of(CANDIDATE)

    def case_(self, **case):
        """Sets the case of the following requests."""
        self.case, self.sets, self.inputs, self.graph = case, [], [], None

    def run(self, **_):
        """Calls the candidate once, on the arguments in shared memory."""
        arguments = Arguments(self.case, DEVICE)
        arguments.memory.copy_(self.shared(0, arguments.bytes))
        for far in arguments.far.values():
            far.fill()
        try:
            arguments.call(self.function)
            self.finish()
        except NotImplementedError as error:
            return {"outcome": "unsupported", "message": " ".join(str(error).split())[:300]}
        stages = arguments.take_result()
        strayed = [name for name, far in arguments.far.items() if far.take()]
        self.shared(0, arguments.bytes).copy_(arguments.memory)
        return {"outcome": "done", "stages": self.write_stages(stages or {}, arguments.bytes),
                "strayed": ", ".join(strayed)}

    def write_stages(self, stages, offset):
        """Writes named stages, in float32, to shared memory behind the results; returns sizes."""
        sizes = {}
        for name, value in stages.items():
            one = torch.as_tensor(value).detach().float().cpu().contiguous()
            sizes[name] = one.numel() * 4
            data = memoryview(ctypes.string_at(one.data_ptr(), sizes[name]))
            while data:
                done = os.pwrite(SHARED, data, offset)
                data, offset = data[done:], offset + done
        return sizes

    def sets_(self, count, **_):
        """Allocates memory for `count` calls, and reads the two inputs that they start from."""
        self.graph, self.sets, self.inputs = None, [], []
        if count:
            size = self.case["bytes"]
            self.inputs = [self.shared(i * size, size).clone().to(DEVICE) for i in range(2)]
            self.sets = [Arguments(self.case, DEVICE) for _ in range(count)]

    def place(self, first, **_):
        """Writes an input to each set, with its guards and holes."""
        for i, one in enumerate(self.sets):
            one.memory.copy_(self.inputs[(first + i) % 2])
        self.finish()

    def call_all(self):
        """Calls every set. Results are copied while the clock runs: a lazy one is computed then."""
        for one in self.sets:
            one.call(self.function)
            one.take_result()

    def record(self, **_):
        """Captures all calls in a CUDA graph, if that is possible; describes the timing."""
        if DEVICE != "cuda":
            return {"how": "calls by the clock"}
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.call_all()
        except Exception as error:  # the calls wait, allocate elsewhere, or copy to the host
            torch.cuda.synchronize()
            return {"how": "plain launches between events (they cannot be captured into a graph: "
                           + brief(error)[:120] + ")"}
        self.graph = graph
        return {"how": "CUDA graphs"}

    def calls(self, **_):
        """Calls every set once."""
        if DEVICE != "cuda":
            self.call_all()
            return {"outcome": "done", "device_us": 0.0}
        us = event_us(self.graph.replay if self.graph else self.call_all)
        self.finish()
        return {"outcome": "done", "device_us": us}

    def fetch(self, index, **_):
        """Copies the memory of a set to shared memory."""
        one = self.sets[index]
        self.shared(2 * one.bytes, one.bytes).copy_(one.memory)

    def broken(self):
        """Whether the GPU is unusable, as after an illegal access."""
        try:
            self.finish()
            return False
        except Exception:
            return True


def words(value):
    """A copy whose text is valid UTF-8, for JSON: paths and messages may have other bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return {k: words(v) for k, v in value.items()} if isinstance(value, dict) else value


def main():
    """Answers requests until the pipe ends."""
    server = Server()
    methods = {"ping": lambda **_: None, "case": server.case_, "sets": server.sets_}
    for line in REQUESTS:
        request = json.loads(line)
        name = request["do"]
        try:
            answer = (methods.get(name) or getattr(server, name))(**request) or {}
        except Refusal as refusal:
            answer = {"refused": str(refusal), "status": refusal.status}
        except BaseException as error:  # a candidate may raise anything, SystemExit too
            answer = {"outcome": "raised", "message": brief(error), "broken": server.broken()}
        ANSWERS.write(json.dumps(words({**answer, "n": request["n"]})) + "\n")
        ANSWERS.flush()


main()
