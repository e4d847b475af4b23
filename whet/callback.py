"""whet.TrainerCallback: whet.optimize at the start of a Hugging Face Trainer's run, on its own first batch."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from whet.figures import error_line
from whet.swap import _optimize
from whet.trackers import log_choices

Base: Any = object
with contextlib.suppress(ImportError):
    from transformers import TrainerCallback as Base


class TrainerCallback(Base):
    """Give it to a Trainer: `Trainer(..., callbacks=[whet.TrainerCallback()])`. It optimises the model as training begins.

    restore   put the model back as it was when training ends
    log_to    a TensorBoard SummaryWriter for the choices; None: the active W&B run, else stdout
    options   as whet.optimize takes them: mode, loss, lock, keep_logits, seconds, progress
    Where the model cannot be optimised it is left as it is, the reason is logged, and training goes on.
    """

    def __init__(self, restore: bool = False, log_to: Any = None, **options: Any):
        if Base is object:
            raise ImportError("TrainerCallback needs transformers: pip install transformers")
        self.restore, self.log_to, self.options = restore, log_to, {"mode": "train"} | options

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        if model is None or train_dataloader is None:
            return
        try:
            with draws_kept():
                batch = first_batch(train_dataloader, getattr(args, "train_batch_size", 1))
                device = next(model.parameters()).device
                _optimize.optimize(model, tree_map_only(torch.Tensor, lambda t: t.to(device), dict(batch)), **self.options)
        except Exception as e:  # a model that cannot be optimised is trained as it is
            log_choices("optimize", f"the model is left as it is: {error_line(e)}", None, self.log_to)
            return
        found = model.whet
        times = {"before_ms": found.before_ms, "after_ms": found.after_ms}
        log_choices("optimize", str(found), {k: v for k, v in times.items() if v is not None}, self.log_to)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if self.restore and model is not None:
            _optimize.restore(model)


@contextlib.contextmanager
def draws_kept() -> Iterator[None]:
    """Random numbers of Python, NumPy and torch are afterwards as they were: the run draws what it would have drawn."""
    numpy = sys.modules.get("numpy")
    python, theirs = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(theirs)


def first_batch(loader: Any, size: int) -> Any:
    """A batch of the loader's: its first rows, collated as it does; what has no rows to index is iterated, and closed."""
    data: Any
    data, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    if collate is not None and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return collate([data[i] for i in range(min(len(data), getattr(loader, "batch_size", None) or size))])
    batches = iter(loader)
    try:
        return next(batches)
    finally:
        for close in (getattr(batches, "close", None), getattr(loader, "end", None)):
            if callable(close):
                close()
