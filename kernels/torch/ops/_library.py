"""Finds liblockstep_torch.so, and loads it if it fits the running PyTorch.

The library is compiled for one release of PyTorch, because it uses the C++ interface, which
changes from release to release. The file contains its version (kernels/torch/built_for.cpp).
"""

import mmap
import os
import re
from pathlib import Path

NAME = "liblockstep_torch.so"
VARIABLE = "LOCKSTEP_TORCH_OPS"
BUILT_FOR = re.compile(rb"liblockstep_torch\.so is built for PyTorch (\d+)\.(\d+)\.(\d+)")

try:
    import torch
except ImportError as error:
    raise ImportError(f"lockstep.ops needs PyTorch, which cannot be imported: {error}") from error


def candidates():
    """The paths at which the library may be, in the order of the search."""
    here = Path(__file__).resolve().parent
    if os.environ.get(VARIABLE):
        return [Path(os.environ[VARIABLE])]
    places = [here / NAME, here.parent / NAME]  # an installed package
    if (here.parents[2] / "CMakeLists.txt").is_file():  # kernels/torch/ops of a source tree
        places.append(here.parents[2] / "build" / "current" / NAME)
    return places


def find():
    """The path of the library; raises ImportError if there is none."""
    places = candidates()
    for place in places:
        if place.is_file():
            return place
    raise ImportError(f"lockstep.ops found no {NAME} in {', '.join(map(str, places))}: it is built "
                      f"where PyTorch's headers are, and {VARIABLE} names one")


def built_for(library):
    """The PyTorch (major, minor, patch) that a library was compiled for; None if unknown."""
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = BUILT_FOR.search(data)
        return tuple(int(part) for part in found.groups()) if found else None


def check(library, running):
    """Raises ImportError if a library is for another PyTorch than `running` ("2.11.0+cu130")."""
    version = built_for(library)
    if version is None:
        raise ImportError(f"{library} does not say which PyTorch it is built for: it is no library "
                          "of this lockstep")
    if version[:2] != tuple(int(part) for part in re.findall(r"\d+", running)[:2]):
        raise ImportError(f"{library} is built for PyTorch {'.'.join(map(str, version[:2]))} and "
                          f"this is PyTorch {running}: build it against this one, or install that")


def load():
    """torch.ops.lockstep; loads the library at the first call."""
    if not hasattr(torch.ops.lockstep, "gated_delta_rule_update"):
        library = find()
        check(library, torch.__version__)
        try:
            torch.ops.load_library(library)
        except OSError as error:
            raise ImportError(f"{library} does not load: {error}") from error
    return torch.ops.lockstep


operators = load()
