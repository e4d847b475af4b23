"""What this machine is: GPU, versions, and whether Triton runs, only interprets, or is absent."""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

DEFAULT_SMS = 132  # what launchers size persistent grids for when they are compiled ahead of time, with no GPU to ask

FP32_BACKENDS = ("cuda", "mkldnn")  # whose products torch.set_float32_matmul_precision is about


@dataclass(frozen=True)
class Machine:
    device: str  # "cuda" (NVIDIA or AMD) or "cpu"
    name: str  # the GPU's name, or the CPU's
    capability: tuple[int, int] | None  # CUDA compute capability; None on a CPU or an AMD GPU
    sms: int
    memory_gib: float
    l2_mib: float
    torch: str
    triton: str | None
    whet: str
    python: str
    triton_mode: str  # "gpu", "interpret" or "none"
    threads: int | None = None  # that torch computes with on a CPU; None on a GPU, whose times do not depend on it

    @property
    def key(self) -> str:
        """What a measurement depends on. A result is looked up by this, so nothing stale is reused."""
        name = self.name if self.threads is None else f"{self.name}, threads {self.threads}"
        return f"{name} | torch {self.torch} | triton {self.triton} | whet {self.whet}"

    def as_dict(self) -> dict:
        return asdict(self) | {"key": self.key}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def float32_precision() -> str:
    """torch.get_float32_matmul_precision(), or what torch's newer names say where it cannot: "cuda=tf32 mkldnn=none"."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # raised once a backend's fp32_precision was set to another than the older name's
        return " ".join(f"{backend}={getattr(torch.backends, backend).matmul.fp32_precision}" for backend in FP32_BACKENDS)


float32_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a graph is guarded by what it reads


def set_float32_precision(precision: str) -> None:
    """As torch.set_float32_matmul_precision, also of what only the newer names say."""
    newer = dict(part.split("=") for part in precision.split() if "=" in part)
    torch.set_float32_matmul_precision("highest" if newer else precision)
    for backend, value in newer.items():
        getattr(torch.backends, backend).matmul.fp32_precision = value


def triton_mode() -> str:
    """gpu: kernels run compiled; interpret: TRITON_INTERPRET=1 runs them on the CPU, slowly; none: they cannot run."""
    if not has("triton"):
        return "none"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpret"
    return "gpu" if torch.cuda.is_available() else "none"


def this_machine() -> Machine:
    """Found out once per number of threads, which a program may change."""
    return _machine(None if torch.cuda.is_available() else torch.get_num_threads())


@functools.cache
def _machine(threads: int | None) -> Machine:
    common: dict[str, Any] = dict(
        torch=torch.__version__, triton=version("triton"), whet=whet_version(),
        python=platform.python_version(), triton_mode=triton_mode(), threads=threads,
    )
    if threads is None:
        p = torch.cuda.get_device_properties(0)
        return Machine(
            device="cuda", name=p.name, capability=None if torch.version.hip else (p.major, p.minor),
            sms=p.multi_processor_count, memory_gib=round(p.total_memory / 2**30, 1),
            l2_mib=round(p.L2_cache_size / 2**20, 1), **common,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        device="cpu", name=cpu_name(), capability=None, sms=os.cpu_count() or 1,
        memory_gib=round(memory, 1), l2_mib=0.0, **common,
    )


@functools.cache
def sm_count() -> int:
    """Asked for at every launch of some kernels, and what it asks of CUDA costs as much as the launch."""
    return this_machine().sms if torch.cuda.is_available() else DEFAULT_SMS


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model} x{os.cpu_count()}"


def whet_version() -> str:
    from whet import __version__

    return __version__


def commit() -> str:
    """The commit of the checkout whet runs from, for records, whose own files do not count. `unknown` outside a checkout."""
    if given := os.environ.get("WHET_COMMIT"):
        return given
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        status = ["git", "status", "--porcelain", "--", ".", ":!records"]
        dirty = subprocess.run(status, cwd=root, capture_output=True, text=True).stdout.strip()
        return head + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cache_dir() -> Path:
    """All that is kept between runs and could be made again: $WHET_CACHE, else `whet` in the user's cache."""
    return Path(os.environ.get("WHET_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whet")
