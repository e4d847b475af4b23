"""Where choices are written down: the experiment tracker that is open, else one line on stdout."""

import sys
from collections.abc import Mapping
from typing import Any

from whet.figures import error_line


def log_choices(name: str, text: str, figures: Mapping[str, float] | None = None, log_to: Any = None) -> str:
    """Log what was chosen, once, and return where it went: "log_to", "wandb" or "stdout".

    name     what chose: "optimize", "compile_step"
    text     the choice in words
    figures  numbers to log beside it, such as {"speedup": 1.4}
    log_to   a TensorBoard SummaryWriter; without one, the W&B run that is active
    A tracker that fails costs its entry, never the training: the line is then printed.
    """
    figures, why = dict(figures or {}), ""
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    try:
        if log_to is not None:
            log_to.add_text(f"whet/{name}", text)
            for key, value in figures.items():
                log_to.add_scalar(f"whet/{name}/{key}", value)
            return "log_to"
        if run is not None:
            run.summary.update({f"whet/{name}": text} | {f"whet/{name}/{key}": v for key, v in figures.items()})
            return "wandb"
    except Exception as e:
        why = f" (not logged: {error_line(e)})"
    print(f"whet {name}: {text}{why}", flush=True)
    return "stdout"
