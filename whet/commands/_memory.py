"""Whether a model and all that proving its plans needs fit the memory there is, estimated before anything is built."""

from pathlib import Path
from typing import Any

import torch

from whet.choices import Choices
from whet.decode.cache import free_bytes
from whet.lock import Lock
from whet.models import Model, find, recipe_of

HELD = 4 + 8 + 4 + 4  # bytes a parameter: float32 weights, gradients in float64, those of eager and those of the plan on trial
STEP = 4 + 4 + 8  # of each model that waits for the race: weights, gradients, AdamW's two moments
WAITING = {"cpu": 5, "cuda": 2}  # models in memory at once, the plain one among them: a GPU's are raced in groups
PROOF = 8 + 8 + 4 + 4 + 4  # of a user's whole model proved: weights and gradients in float64, in float32, and those replaced
GIB = 2**30


def parameters(model: Model, size: str) -> int:
    with torch.device("meta"):
        built = model.build(model.sizes[size], model.plain, Choices(default="eager"))
    return sum(p.numel() for p in built.parameters())


def needed(count: int, device: str) -> int:
    """Bytes at least: activations come on top, which `whet.plan_memory` predicts before a plan is built."""
    return count * (HELD + STEP * WAITING[device])


def refuse_what_does_not_fit(lock: Lock, target: str, precision: str, again: bool) -> None:
    """ValueError, with the figures, where a model's plans are to be measured and that takes more memory than is free."""
    model, size = find(target)
    _, at, batch = target.partition("@")
    known = lock.plans.get(f"{model.name}:{size}{at}{batch} {precision}", {}).get("config")
    if known == f"{model.sizes[size]} {recipe_of(target)}" and not again:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count, free = parameters(model, size), free_bytes(torch.device(device))
    if (takes := needed(count, device)) <= free:
        return
    fitting = [f"{model.name}:{s}" for s in model.sizes if needed(parameters(model, s), device) <= free]
    raise ValueError(
        f"optimize: {model.name}:{size} has {count / 1e9:.3g} billion parameters; weights, gradients, optimizer and float64 "
        f"oracle of its plans take at least {takes / GIB:,.0f} GiB, and {free / GIB:,.1f} GiB are free on the "
        f"{'GPU' if device == 'cuda' else 'CPU'}; {f'{fitting[-1]} fits' if fitting else 'free some memory'}"
    )


def refuse_folder_that_does_not_fit(
    folder: Path, cls: Any, config: Any, dtype: torch.dtype, whole: bool, device: str
) -> None:
    """ValueError, with the figures, where a folder's model and its proof take more memory than is free.

    Activations come on top. whole: whether the model is proved as one, not module by module alone
    """
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in cls._from_config(config, dtype=dtype).parameters())
    except Exception:
        return  # what cannot be built without memory cannot be counted
    takes, free = count * (dtype.itemsize + PROOF * whole), free_bytes(torch.device(device))
    if takes > free:
        raise ValueError(
            f"optimize: {folder} has {count / 1e9:.3g} billion parameters; weights{', and proofs in float64,' * whole} take at "
            f"least {takes / GIB:,.0f} GiB, and {free / GIB:,.1f} GiB are free on the {'GPU' if device == 'cuda' else 'CPU'}"
        )
