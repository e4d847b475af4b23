"""Candidates that misbehave, as tiles of one impl, planted in the tuner and in its child: one process can try many of them."""

import os
import signal
import sys
import warnings

import torch

from whet.op import Impl, Op, discover

reference = discover()["rms_norm"].reference
kept: list = []


class Doubled(torch.autograd.Function):
    """The identity, with a gradient twice too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return 2 * dx


def everything():
    """All that can be left changed without a word to autograd."""
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.enable_flash_sdp(False)
    os.environ["WHET_LOCK"] = "/nowhere"
    os.chdir("/")
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(1)
    sys.stdout = None


def inference_mode():
    kept.append(torch.inference_mode())
    kept[-1].__enter__()


def out_of_memory():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB. And more words")


def fail():
    raise RuntimeError("kernel does not compile: unexpected token")


def dies_when_timed():
    """Right while it is verified, and in a process that verifies nothing, dead."""
    if "verified" not in kept:
        os.abort()


WAYS = {
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda: signal.pause(), "hangs_gpu": lambda: kept.append("launched"),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "print": lambda: [stream.write('{"ok": true}\n' * 100_000) for stream in (sys.stdout, sys.stderr)],
    "input": lambda: (sys.stdin.read(), os.read(0, 1000)),
    "leak": lambda: kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(40)),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "grad_mode": lambda: torch.set_grad_enabled(False),
    "inference_mode": inference_mode, "everything": everything, "fail": fail, "out_of_memory": out_of_memory,
    "dies_when_timed": dies_when_timed,
}
# As they are tried: what leaves something changed comes before a candidate that would profit from it.
TILES = (
    "grad_mode", "inference_mode", "default_dtype", "everything", "print", "input", "exit", "interrupt", "doubled", "wrong",
    "fail", "out_of_memory", "leak", "segfault", "hang", "hangs_gpu", "dies_when_timed",
)


def run(x, w, eps=1e-6, out_dtype=None, tile=""):
    """The reference; a tile misbehaves after it, when the values are right."""
    y = reference(Doubled.apply(x) if tile == "doubled" else x, w, eps)
    if tile in WAYS:
        WAYS[tile]()
    return y * (1.01 if tile == "wrong" else 1.0)


def impls(op: Op) -> dict[str, Impl]:
    return {"eager": Impl(op.reference), "torch": Impl(run, tiles=lambda **_: TILES)}


if __name__ == "whet_preload":  # in the child
    op = discover()["rms_norm"]
    made = impls(op)
    op.impls.clear()
    op.impls.update(made)

    import whet.worker
    from whet import graphs

    graphs.hang_s, synchronize = 0.5, graphs.synchronize
    graphs.synchronize = lambda: signal.pause() if "launched" in kept else synchronize()

    def verifying(*args, answer=whet.worker.ANSWERS["verify"], **options):
        kept.append("verified")
        return answer(*args, **options)

    whet.worker.ANSWERS["verify"] = verifying
