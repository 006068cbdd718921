"""Lets peers whose kernels are compiled at their first call run with kernels that were compiled
before.

FlashInfer's prefill of the gated delta rule is written in CuTe's Python, FlashQLA's in TileLang's.
Their compilers have hundreds of megabytes and take minutes; the kernels are small libraries.
compile_kernels.py compiles them without a GPU, where the peers are staged, and keeps each in a file
whose name has a digest of its compile-time choices. On the GPU machine the peers' own files run
unchanged, with stand-ins from this module for the compilers, and the stand-ins find the libraries
by the same file names.
"""

import ctypes
import functools
import hashlib
import importlib.abc
import importlib.machinery
import sys
import types


def file_name(kernel, choices):
    """The stem of a kept library's file: the kernel's name and a digest of `choices`, the pairs
    (name, value) that it was compiled for. A value that is a type counts by its name alone, since
    with a stand-in it comes from another package."""
    text = repr([(name, value_text(value)) for name, value in choices])
    return f"{kernel.lstrip('_')}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def value_text(value):
    return value.__name__ if isinstance(value, type) else str(value)


# --- Stand-ins ---------------------------------------------------------------------------------------


class Name(type):
    """The type of stand-ins for names in a compiler's package. A stand-in is a class whose every
    attribute is another stand-in, so that modules that use the compiler can be imported. Called
    with one function it returns the function, as a decorator that changes nothing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = Name(name, (), {})
        setattr(cls, name, made)
        return made

    def __getitem__(cls, key):
        return cls

    def __call__(cls, *arguments, **named):
        only = arguments[0] if len(arguments) == 1 and not named else None
        return only if isinstance(only, (types.FunctionType, staticmethod)) else Name(cls.__name__, (), {})


class StandIn(types.ModuleType):
    """A module whose every attribute is a stand-in of type Name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = Name(name, (), {})
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads a StandIn for every import of `package` and of modules in it."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        del path, target
        inside = name.partition(".")[0] == self.package
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def stand_in_for(package):
    """From now on imports of `package`, which is not installed, give stand-ins."""
    sys.meta_path.append(StandIns(package))


# --- CuTe --------------------------------------------------------------------------------------------


class Keyed:
    """Replaces FlashInfer's KeyedCompileMixin, the base class of its kernels: a kernel names by
    manual_cache_key() the attributes that it is compiled for."""

    def manual_cache_key(self, *names):
        self.choices = [(name, getattr(self, name)) for name in names]


def compile_cache(folder, load, make):
    """Replacements for the names of FlashInfer's module custom_compile_cache. load(path, symbol)
    returns the function of a kept kernel; make(kernel, arguments, options, path, symbol) compiles a
    kernel that is not kept."""

    kept = {}

    def get_cached_compile(kernel, compile_options=None):
        del compile_options
        stem = file_name(type(kernel).__name__, kernel.choices)
        path = folder / f"{stem}.so"
        if stem not in kept and path.exists():
            kept[stem] = load(path, stem)
        return kept.get(stem)

    def cached_compile(kernel, *arguments, compile_options=None):
        stem = file_name(type(kernel).__name__, kernel.choices)
        return make(kernel, arguments, compile_options, folder / f"{stem}.so", stem)

    return dict(KeyedCompileMixin=Keyed, get_cached_compile=get_cached_compile, cached_compile=cached_compile)


# --- TileLang ----------------------------------------------------------------------------------------


def tilelang_jit(find):
    """Replaces TileLang's decorator `jit`. find(maker, options, stem, arguments, named) returns the
    kernel that `maker` defines for these arguments; `stem` is the stem of its kept file."""

    def jit(maker=None, **options):
        if maker is None:
            return lambda maker: jit(maker, **options)

        @functools.cache
        def kernel(arguments, named):
            choices = [*enumerate(arguments), *named]
            return find(maker, options, file_name(maker.__name__, choices), arguments, dict(named))

        @functools.wraps(maker)
        def call(*arguments, **named):
            return kernel(arguments, tuple(sorted(named.items())))

        return call

    return jit


TENSOR_MAP_BYTES = 128
CU_TENSOR_MAP_RANKS = range(1, 6)


def create_tensor_map(*arguments):
    """Replaces the function __tvm_tensormap_create_tiled, which TileLang's kernels call and which
    TileLang links to its compiler. Arguments: map, type, rank, address, extents, strides, box,
    element strides, interleave, swizzle, promotion, fill; the fastest dimension first, strides in
    bytes."""
    driver = ctypes.CDLL("libcuda.so.1")
    number = lambda x: x.value if isinstance(x, ctypes.c_void_p) else int(x)
    target, kind, rank, address, *rest = arguments
    rank = int(rank)
    if rank not in CU_TENSOR_MAP_RANKS or len(rest) != 4 * rank + 4:
        raise ValueError(f"a tensor map of rank {rank} with {len(rest)} further arguments")
    extents, strides, box, steps = (list(map(int, rest[i * rank:(i + 1) * rank])) for i in range(4))
    many = lambda kind, values: (kind * max(len(values), 1))(*values)
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(number(target)), ctypes.c_int(int(kind)), ctypes.c_uint32(rank),
        ctypes.c_void_p(number(address)), many(ctypes.c_uint64, extents), many(ctypes.c_uint64, strides[1:]),
        many(ctypes.c_uint32, box), many(ctypes.c_uint32, steps), *(ctypes.c_int(int(x)) for x in rest[4 * rank:]))
    if status != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled returned {status}")
    return status
