"""Candidates that misbehave, planted in the tuner's child process: each costs its candidacy, never the run."""

import os
import time

from whet.op import Impl, discover

HOW = os.environ.get("WHET_PLANT", "crash")


def crash(x, w, eps=1e-6):
    os.abort()


def hang(x, w, eps=1e-6):
    time.sleep(3600)


def fail(x, w, eps=1e-6):
    raise RuntimeError("kernel does not compile: unexpected token")


def out_of_memory(x, w, eps=1e-6):
    import torch

    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB. And more words")


def wrong(x, w, eps=1e-6):
    return discover()["rms_norm"].reference(x, w, eps) * 1.01


def second_time(x, w, eps=1e-6):
    """Right while verified, dead when timed."""
    second_time.calls += 1
    if second_time.calls > 2:
        os.abort()
    return discover()["rms_norm"].reference(x, w, eps)


second_time.calls = 0
op = discover()["rms_norm"]
for name in [n for n in op.impls if n != "eager"]:
    del op.impls[name]  # eager and the planted one are enough
op.impls["torch"] = Impl(globals()[HOW])
