"""The process as it was: what a candidate changes around itself is put back, and what it leaves behind is counted."""

import contextlib
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

UNREADABLE = object()  # what a getter that raises gives: nothing to put back
SIGNALS = (
    signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGABRT,
)


@dataclass(frozen=True)
class Setting:
    """One fact about the process that a candidate may change. Those without a name change of themselves, and are put back."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    same: tuple[Any, ...] = ()  # values that mean the same: to go from one to another is put back, and no change

    def read(self) -> Any:
        try:
            return self.get()
        except Exception:
            return UNREADABLE

    def restore(self, before: Any) -> bool:
        """Whether it had changed."""
        now = self.read()
        if before is UNREADABLE or now is before or (type(now) is type(before) and now == before):
            return False
        with contextlib.suppress(Exception):
            self.set(before)
        return not (before in self.same and now in self.same)


def _precision(backend: str, op: str) -> Setting:
    """Who sets "highest" and then sets back what there was leaves "ieee" where nothing had been set, which is the same."""
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    same = ("none", "ieee")
    return Setting("float32 precision", lambda: get(backend, op), lambda value: put(backend, op, value), same)


def _autocast(device: str) -> Setting:
    def put(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, value[0])
        torch.set_autocast_dtype(device, value[1])
        torch.clear_autocast_cache()

    return Setting("autocast", lambda: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)), put)


def _in_main(get: Callable[[], Any]) -> Callable[[], Any]:
    """Signals belong to the main thread; elsewhere there is nothing to read."""
    return lambda: get() if threading.current_thread() is threading.main_thread() else UNREADABLE


def _set_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _signal(number: signal.Signals) -> Setting:
    def get() -> Any:
        handler = signal.getsignal(number)
        return UNREADABLE if handler is None else handler  # one that Python did not install cannot be put back

    return Setting("signal handlers", _in_main(get), lambda handler: signal.signal(number, handler))


def _modes(length: Callable[[], int], at: Callable, pop: Callable, push: Callable) -> Setting:
    def put(before: tuple) -> None:
        while length():
            pop()
        for mode in before:
            push(mode)

    return Setting("torch modes", lambda: tuple(at(i) for i in range(length())), put)


def _if_started(get: Callable[[], Any]) -> Callable[[], Any]:
    """Of CUDA only once it is started: asking must not start it."""
    return lambda: get() if torch.cuda.is_initialized() else UNREADABLE


def _flag(name: str, get: str, put: str) -> Setting:
    """A flag of torch._C by the names of its getter and setter, where this version has both."""
    return Setting(name, getattr(torch._C, get, lambda: UNREADABLE), getattr(torch._C, put, lambda *_: None))


def _reduction(dtype: str) -> Setting:
    """How cuBLAS may add up products of 16 bits: a bool in older versions of torch, two of them in newer."""
    flag = _flag("", *(f"_{way}_cublas_allow_{dtype}_reduced_precision_reduction" for way in ("get", "set")))
    return Setting("cuBLAS's flags", flag.get, lambda value: flag.set(*value) if isinstance(value, tuple) else flag.set(value))


C = torch._C
SETTINGS: tuple[Setting, ...] = (
    _modes(C._len_torch_function_stack, C._get_function_stack_at, C._pop_torch_function_stack, C._push_on_torch_function_stack),
    _modes(C._len_torch_dispatch_stack, C._get_dispatch_stack_at, C._pop_torch_dispatch_stack, C._push_on_torch_dispatch_stack),
    Setting(
        "the default device", lambda: getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        lambda value: setattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", value),
    ),
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("grad mode", torch.is_grad_enabled, C._set_grad_enabled),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("float32 precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _precision("generic", "all"),
    *(_precision(backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
    Setting(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    *(_flag("cuDNN's flags", f"_get_cudnn_{flag}", f"_set_cudnn_{flag}") for flag in ("enabled", "benchmark", "deterministic")),
    *(
        _flag("SDPA's backends", f"_get_{way}_sdp_enabled", f"_set_sdp_use_{way}")
        for way in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    ),
    _flag("cuBLAS's flags", "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    _reduction("fp16"), _reduction("bf16"),
    _autocast("cpu"), _autocast("cuda"),
    Setting("autocast", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Setting("the CUDA device", _if_started(torch.cuda.current_device), torch.cuda.set_device),
    Setting("the CUDA stream", _if_started(torch.cuda.current_stream), torch.cuda.set_stream),
    Setting("the working directory", os.getcwd, os.chdir),
    Setting("sys.stdout", lambda: sys.stdout, lambda value: setattr(sys, "stdout", value)),
    Setting("sys.stderr", lambda: sys.stderr, lambda value: setattr(sys, "stderr", value)),
    *(_signal(number) for number in SIGNALS),
    Setting(
        "a timer", _in_main(lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0),
        lambda running: None if running else signal.setitimer(signal.ITIMER_REAL, 0.0),
    ),
    Setting("", lambda: dict(os.environ), _set_environment),
    Setting("", random.getstate, random.setstate),
)


@contextlib.contextmanager
def isolated() -> Iterator[list[str]]:
    """Around one candidate: when the block ends, by whatever way, the process's settings are what they were before.

    Gives a list that is empty inside, and afterwards names what had been left changed; a candidate that is right in itself and
    leaves grad mode off is wrong for its neighbours. Random states, the environment and warning filters change in passing: they
    are put back and not named. Nothing here reaches what a candidate did to modules, nor threads and files: see Leftovers.
    """
    changed: list[str] = []
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    before = [(setting, setting.read()) for setting in SETTINGS]
    numbers, nesting = _random_states(), _nesting()
    # A guard of our own: when it ends, autograd's state is what it was, however many others were left open inside.
    with warnings.catch_warnings(), torch.inference_mode(inference):
        C._set_grad_enabled(grad)
        try:
            yield changed
        finally:
            warnings.simplefilter("ignore")  # one that a candidate made an error must not stop what follows
            found = [setting.name for setting, value in before if setting.restore(value)]
            found += ["inference mode"] * (torch.is_inference_mode_enabled() != inference)
            found += ["autocast"] * _unnest(nesting)
            _set_random_states(numbers)
            changed += [name for name in dict.fromkeys(found) if name]
    C._set_grad_enabled(grad)


def _random_states() -> tuple:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, numpy.random.get_state()


def _set_random_states(states: tuple) -> None:
    cpu, cuda, of_numpy = states
    torch.set_rng_state(cpu)
    numpy.random.set_state(of_numpy)
    if cuda is not None:
        with contextlib.suppress(Exception):  # a candidate that broke the GPU is found by its own error
            torch.cuda.set_rng_state(cuda)


def _nesting() -> int:
    """How many autocasts are entered: what the count is after one more, less that one."""
    deep = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return deep - 1


def _unnest(before: int) -> bool:
    """Leave the autocasts that were entered and not left; whether there were any."""
    left = _nesting() - before
    for _ in range(left):
        torch.autocast_decrement_nesting()
    if left > 0:
        torch.clear_autocast_cache()
    return left > 0


DESCRIPTORS = 32  # a first use may open some for good: a cache, a device, a log


@dataclass(frozen=True)
class Leftovers:
    """What a process holds that outlives a call: open files, processes that it started, threads that it would wait for."""

    descriptors: int
    processes: int
    threads: int

    @classmethod
    def now(cls) -> "Leftovers":
        return cls(_descriptors(), len(descendants(os.getpid())), sum(not t.daemon for t in threading.enumerate()))

    def since(self, before: "Leftovers") -> str:
        """What there is more of than before, in words; "" where that is nothing, or too few files to be a leak."""
        more = (
            ("file descriptors open", self.descriptors - before.descriptors, DESCRIPTORS),
            ("processes running", self.processes - before.processes, 0), ("threads running", self.threads - before.threads, 0),
        )
        return " and ".join(f"{what} ({n} more)" for what, n, allowed in more if n > allowed)


def _descriptors() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 0


def descendants(pid: int) -> list[int]:
    """The running processes that a process started, and those that these started; none where the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                if _running(int(child)):
                    found += [int(child), *descendants(int(child))]
    return found


def _running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Transformers prints no bars, warnings or reports: what matters of a loading is said by whoever loads."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
