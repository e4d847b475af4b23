"""What every test shares. Without a GPU, kernels run in Triton's interpreter: that must be said before Triton is imported."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

os.environ.pop("COLUMNS", None)  # of whoever runs the tests, and of pytest's workers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # another worker has the other core; threads that wait for it only spin

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
from recording import pytest_addoption, pytest_configure  # noqa: E402, F401

from whet.op import DTYPES, Op, discover, tensors  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parent.parent
pytest_plugins = ("compiling", "sharing")


def python(*command: str, interpret: str = "0") -> subprocess.Popen:
    """A fresh Python: in this one kernels may be interpreted, and an interpreted kernel cannot be compiled."""
    env = os.environ | {"TRITON_INTERPRET": interpret, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


LONGEST = (  # files, by the processor time they take where that was measured; the last seven are in no order
    "ops", "persistent", "registered", "mutants", "cli", "doctor", "tune", "attention", "optimize", "exercises", "inference",
    "bad_candidates", "attention_fp8", "decode_kernels", "diagnose", "engine", "prove",
)


def pytest_collection_modifyitems(config, items):
    """Workers take files in this order: the longest first, so that none has one left to itself at the end."""
    from compiling import needs_rows  # here, since pytest rewrites the asserts of a plugin that is not imported yet

    rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    if hasattr(config, "workerinput"):
        waiting = {item.path for item in items if needs_rows(item)}
        items.sort(key=lambda item: (item.path in waiting, rank.get(item.path.stem, len(rank))))
    if DEVICE == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and this machine has none"))


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def lock_path(tmp_path) -> Path:
    return tmp_path / "whet.lock"


@pytest.fixture
def warnings(capsys):
    """The lines printed to stderr since the last call."""
    return lambda: capsys.readouterr().err.strip().splitlines()


@pytest.fixture
def one_thread():
    """A model this small gains nothing from threads, and on a busy machine waits for them at every op."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Nothing is read from or written to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHET_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A whet.lock in the user's folder neither steers a test nor is changed by one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WHET_LOCK", raising=False)


@pytest.fixture(autouse=True)
def kernels_taken_as_right(request, monkeypatch):
    """On a GPU each test has a lock of its own, and would verify the decode kernels again; those about that ask for it."""
    if DEVICE == "cuda" and "verifying" not in request.fixturenames:
        right = lambda model, asked, *_: {path: {"ok": True, "why": ""} for path in asked}  # noqa: E731
        monkeypatch.setattr("whet.decode.trust.verdicts", right)


@contextlib.contextmanager
def without(*names: str):
    """Every op without these impls, as on a machine that lacks them. Put back whole, so that their order is as it was."""
    kept = {op.name: dict(op.impls) for op in discover().values()}
    for op in discover().values():
        for name in names:
            op.impls.pop(name, None)
    try:
        yield
    finally:
        for op in discover().values():
            op.impls.clear()
            op.impls.update(kept[op.name])


def case_id(case: dict) -> str:
    """dict(M=9, N=96, layout="sliced") -> "9x96-sliced"."""
    sizes = "x".join(str(v) for v in case.values() if type(v) is int)
    rest = [str(v) if isinstance(v, str) else f"{k}={v}" for k, v in case.items() if type(v) is not int]
    return "-".join([sizes, *rest] if sizes else rest)


def meta(op: Op, case: dict, dtype: str = "float32") -> dict:
    """The arguments of a case without their memory."""
    return op.inputs(dtype=DTYPES[dtype], device="meta", **case)


def first_case(op: Op, accept=lambda args: True, impl: str = "triton") -> dict:
    """The first case whose tensors are not empty, that the impl takes if the op has it, and that `accept` takes."""
    refuses = op.impls[impl].refuses if impl in op.impls else lambda **_: None

    def fits(case):
        args = meta(op, case, exact(op, impl))
        return all(t.numel() for t in tensors(args)) and refuses(**args) is None and accept(args)

    return next(case for case in op.cases if fits(case))


def is_ragged(args: dict) -> bool:
    """Several rows, and a size that no tile divides."""
    x = tensors(args)[0]
    return x.numel() > x.shape[-1] > 1 and any(n > 1 and n % 8 for n in x.shape)


def ragged_case(op: Op, impl: str = "triton") -> dict:
    """A case whose rows themselves are ragged where there is one, else any ragged one."""
    def rows_too(args):
        x = tensors(args)[0]
        return is_ragged(args) and x.shape[-1] % 8 and x.is_contiguous()

    try:
        return first_case(op, rows_too, impl)
    except StopIteration:
        return first_case(op, is_ragged, impl)


def assert_same_bits(a: dict, b: dict):
    """Of named results; what was changed in place may hold NaN where nothing was written."""
    assert a.keys() == b.keys()
    for k in a:
        assert (a[k] is None) == (b[k] is None), k
        if str(k).startswith("changed "):
            assert torch.equal(a[k].isnan(), b[k].isnan()), f"{k} is not written alike"
            assert torch.equal(a[k].nan_to_num(), b[k].nan_to_num()), f"{k} differs"
        else:
            assert a[k] is None or torch.equal(a[k], b[k]), f"{k} differs"


def every_op(accept=lambda op: True):
    return [pytest.param(op, id=op.name) for op in discover().values() if accept(op)]


def has_triton(op: Op) -> bool:
    return "triton" in op.impls


def takes(op: Op, impl: str, case: dict, dtype: str = "float32") -> bool:
    return op.impls[impl].refuses(**meta(op, case, dtype)) is None


def exact(op: Op, impl: str) -> str:
    """The dtype to test a kernel in: float32, where errors show best, or bfloat16 if it takes that alone."""
    alone = impl in op.impls and not any(takes(op, impl, case) for case in op.cases)
    return "bfloat16" if alone and any(takes(op, impl, case, "bfloat16") for case in op.cases) else "float32"


def narrow(op: Op, impl: str) -> str:
    """The dtype to test a kernel in as models use it: bfloat16, or float32 if it takes that alone."""
    return "bfloat16" if any(takes(op, impl, case, "bfloat16") for case in op.cases) else "float32"


def trained(op: Op) -> bool:
    """Whether the op has gradients; those that have none are for inference."""
    return bool(op.grads)


def every_kernel(accept=lambda op: True) -> list:
    """Each op with each impl that is whet's own kernels throughout: the same bits each time, on the CPU too."""
    accepted = [op for op in discover().values() if accept(op)]
    kernels = [(op, name) for op in accepted for name, impl in op.impls.items() if impl.needs == "triton"]
    return [pytest.param(op, impl, id=op.name if impl == "triton" else f"{op.name}-{impl}") for op, impl in kernels]


@pytest.fixture
def swapped_at_once(monkeypatch):
    """whet.optimize tunes and times nothing: all that is proved is replaced, on stock kernels."""
    from whet.choices import Choices
    from whet.swap import _optimize
    from whet.tune import Tuned

    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    monkeypatch.setattr(_optimize, "_time_group", lambda group, *rest: None)

    def whole(report, *rest):
        report.choose("eager")
        report.replaced.ask(report.choices)
        return True

    monkeypatch.setattr(_optimize, "_whole", whole)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
