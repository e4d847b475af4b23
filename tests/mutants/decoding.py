"""The decode kernel judged as a mutant's question asks: by whet's proof on a GPU, in the emulator of its source on a CPU."""

import ctypes
import dataclasses
import subprocess
import tempfile
from pathlib import Path

import test_persistent as emulated

from whet.decode import persistent

SPECIAL = ("old", "quant", "least")  # of a case; the rest changes the model's sizes and options


def changed(case: dict) -> dict:
    return {k: v for k, v in case.items() if k not in SPECIAL}


def on_gpu(case: dict) -> dict:
    """The proof that stands between a model's shape and its first token."""
    from whet.decode import proof

    config = dataclasses.replace(emulated.SMALL, vocab=30000, max_positions=8192, **changed(case))
    verdict = proof.verify_shape(config, path="persistent", fmt=case.get("quant") or "bf16", device="cuda")
    return {"ok": verdict.ok, "share": verdict.share, "why": verdict.why, "rule": "" if verdict.ok else "decode"}


def build(model, folder: str) -> ctypes.CDLL:
    source, library = Path(folder) / "whole.cu", Path(folder) / "whole.so"
    source.write_text(persistent.source())
    sizes = persistent.sizes_of(model, emulated.BLOCKS, emulated.SHARED)
    options = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-shared", f'-DSOURCE="{source}"']
    options += [f"-D{name}={value}" for name, value in sizes.items()]
    emulator = Path(emulated.__file__).with_name("cuda_on_cpu.cpp")
    subprocess.run(["g++", *options, str(emulator), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def on_cpu(case: dict) -> dict:
    """Two tokens in the emulator, as tests/test_persistent.py judges them."""
    model = emulated.weights(dataclasses.replace(emulated.SMALL, **changed(case)), case.get("quant"))
    with tempfile.TemporaryDirectory() as folder:
        place = emulated.Place(build(model, folder), model, case["old"], steps=2)
        place.run(least=case.get("least", 64), patience=1 << 12)
    try:
        emulated.check(place)
    except AssertionError as e:
        return {"ok": False, "rule": "emulator", "why": str(e).splitlines()[0] if str(e) else "another result"}
    return {"ok": True, "why": ""}
