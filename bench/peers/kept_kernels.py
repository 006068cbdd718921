"""Kernels that a peer's compiler makes when they are first called, made where the peers are staged instead.

FlashInfer's prefill of the gated delta rule is written in CuTe's Python, FlashQLA's in TileLang's. Their compilers are
hundreds of megabytes and want minutes; the kernels are small libraries. compile_kernels.py makes these without a GPU
and keeps each under the name of what it was compiled for. Here the peers' own files run unchanged, with stand-ins for
the compilers, and find the libraries under the same names.
"""

import ctypes
import functools
import hashlib
import importlib.abc
import importlib.machinery
import sys
import types


def file_name(kernel, choices):
    """The stem of a kept library's file: the kernel's name and a digest of what it was compiled for. `choices` are
    pairs of a name and a value; types count by their names, whichever package they are from."""
    text = repr([(name, value_text(value)) for name, value in choices])
    return f"{kernel.lstrip('_')}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def value_text(value):
    return value.__name__ if isinstance(value, type) else str(value)


# --- Stand-ins ---------------------------------------------------------------------------------------


class Name(type):
    """A class whose attributes are such classes: anything that a compiler's package offers to a module that is
    imported and never compiled. Called with a function it is a decorator and leaves that as it is."""

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
    """A module of such names."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = Name(name, (), {})
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of a package that is not here, and of all that is in it."""

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
    """Lets `package` be imported."""
    sys.meta_path.append(StandIns(package))


# --- CuTe --------------------------------------------------------------------------------------------


class Keyed:
    """FlashInfer's base of a kernel, KeyedCompileMixin: says what the kernel is compiled for."""

    def manual_cache_key(self, *names):
        self.choices = [(name, getattr(self, name)) for name in names]


def compile_cache(folder, load, make):
    """The names of FlashInfer's custom_compile_cache. load(path, symbol) returns a kept kernel's function;
    make(kernel, arguments, options, path, symbol) compiles one."""

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
    """TileLang's decorator `jit`. find(maker, path's stem, arguments, named) returns the kernel that `maker` of these
    arguments is."""

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
    """What TileLang's runtime offers its kernels as __tvm_tensormap_create_tiled, without the compiler that it is
    linked to: (map, type, rank, address, extents, strides, box, element strides, interleave, swizzle, promotion,
    fill), fastest dimension first, strides in bytes."""
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
