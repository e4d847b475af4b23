"""A candidate that is wrong or hangs, planted in the tuner's child process."""

import os
import time

from whet.op import Impl, discover

HOW = os.environ.get("WHET_PLANT", "wrong")


def hang(x, w, eps=1e-6, out_dtype=None):
    time.sleep(3600)


def wrong(x, w, eps=1e-6, out_dtype=None):
    return discover()["rms_norm"].reference(x, w, eps) * 1.01


op = discover()["rms_norm"]
for name in [n for n in op.impls if n != "eager"]:
    del op.impls[name]  # eager and the planted one are enough
op.impls["torch"] = Impl(globals()[HOW])
