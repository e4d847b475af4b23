"""CUDA source compiled on the user's machine by NVRTC, which comes with PyTorch, and launched cooperatively. No nvcc."""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from whet import machine

SHARED_LIMIT, MAX_SHARED = 8, 97  # CUfunction_attribute and CUdevice_attribute of the driver's API


def cache_folder() -> Path:
    """Of compiled kernels."""
    return machine.cache_dir() / "cubins"


def _candidates(name: str) -> Iterator[str]:
    """Where a library of CUDA may lie: PyTorch's own packages, then wherever the system looks."""
    for package in ("nvidia.cu13", "nvidia.cu12", "nvidia.cuda_nvrtc", "nvidia"):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(package)
            for folder in (spec.submodule_search_locations or []) if spec else []:
                yield from (str(p) for p in sorted(Path(folder).glob(f"**/lib/{name}.so*")))
    for major in (13, 12):
        yield f"{name}.so.{major}"
        yield f"/usr/local/cuda/lib64/{name}.so.{major}"
    yield f"{name}.so"


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """The compiler. A version other than PyTorch's own would do: it makes machine code, which any driver that knows it runs."""
    for builtins in _candidates("libnvrtc-builtins"):  # the compiler looks for it by name; what is loaded is found
        with contextlib.suppress(OSError):
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
            break
    for path in _candidates("libnvrtc"):
        if "builtins" in path or ".alt." in path:
            continue
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise ValueError("no NVRTC library: install nvidia-cuda-nvrtc, or PyTorch with CUDA, which brings it")


@functools.cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise ValueError(f"no CUDA driver: {e}") from None


def compiled(source: str, arch: str, sizes: dict[str, int], verbose: bool = False) -> tuple[bytes, str]:
    """Machine code for an architecture such as sm_90, and the compiler's log."""
    lib, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{k}={v}" for k, v in sizes.items())]
    options += ["--ptxas-options=-v"] if verbose else []
    if lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"whet.cu", 0, None, None):
        raise ValueError("NVRTC could not begin a program")
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        failed = lib.nvrtcCompileProgram(program, len(options), given)
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        compiler_log = log.value.decode(errors="replace")
        if failed:
            first = next((line for line in compiler_log.splitlines() if "error" in line), f"error {failed}")
            raise ValueError(f"NVRTC for {arch}: {first.strip()}")
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, code)
        return code.raw, compiler_log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def cached(source: str, arch: str, sizes: dict[str, int]) -> bytes:
    """compiled, kept in a folder: compiling takes seconds, a second start should not."""
    key = hashlib.sha256(repr((source, arch, sorted(sizes.items()))).encode()).hexdigest()[:32]
    file = cache_folder() / f"{key}.cubin"
    with contextlib.suppress(OSError):
        return file.read_bytes()
    code, _ = compiled(source, arch, sizes)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(code)
        part.replace(file)
    return code


def check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()}")


def max_shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may ask for."""
    value, index = ctypes.c_int(), torch.device(device).index
    given = torch.cuda.current_device() if index is None else index
    check(driver().cuDeviceGetAttribute(ctypes.byref(value), MAX_SHARED, given), "shared memory of the device")
    return value.value


class LoadedKernel:
    """A compiled kernel on the current device, one block on each multiprocessor at most."""

    def __init__(self, code: bytes, name: str):
        torch.cuda.current_stream().synchronize()  # there is a context from here on
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(self.module), code), f"loading {name}")
        check(driver().cuModuleGetFunction(ctypes.byref(self.function), self.module, name.encode()), f"finding {name}")

    def constant(self, name: str) -> int:
        """An int that the source names."""
        at, size, value = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
        check(driver().cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), self.module, name.encode()), name)
        check(driver().cuMemcpyDtoH_v2(ctypes.byref(value), at, ctypes.c_size_t(4)), name)
        return value.value

    def reserve(self, shared: int) -> None:
        check(driver().cuFuncSetAttribute(self.function, SHARED_LIMIT, shared), "shared memory")

    def launch(self, blocks: int, threads: int, shared: int, args: ctypes.Structure) -> None:
        """All blocks at once, or an error: cooperative. On the current stream; may be captured."""
        given = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(driver().cuLaunchCooperativeKernel(self.function, blocks, 1, 1, threads, 1, 1, shared, stream, given), "launch")
