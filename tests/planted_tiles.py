"""An op whose eager refuses and whose stock impl has tiles, planted in the tuner and in its child process."""

import os
import time

import torch

from whet.op import Impl, Op, discover

TILES = ("quick", "wrong", "dies")


def too_large(x, w, eps=1e-6, out_dtype=None):
    return f"the scores of {x.shape[0]} rows do not fit" if x.shape[0] > 4 else None


def run(x, w, eps=1e-6, out_dtype=None, tile=""):
    """The reference; each tile has its own way to go on, all but the quick one slow."""
    if tile == "dies" and x.shape[0] > 4:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
    if tile != "quick":
        time.sleep(0.005)
    return discover()["rms_norm"].reference(x, w, eps) * (1.01 if tile == "wrong" else 1.0)


def impls(op: Op) -> dict[str, Impl]:
    return {"eager": Impl(op.reference, too_large), "torch": Impl(run, tiles=lambda **_: TILES)}


def proof(case: dict) -> dict:
    return case | {"M": min(case["M"], 4)}


def plant(op: Op) -> None:
    made = impls(op)
    op.impls.clear()
    op.impls.update(made)
    object.__setattr__(op, "proof", proof)


if os.environ.get("WHET_PLANT") == "tiles":
    plant(discover()["rms_norm"])
