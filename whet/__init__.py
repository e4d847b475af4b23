"""whet sharpens PyTorch transformers: kernels proven right, measured faster, with the proof shown.

    import whet
    y = whet.ops.rms_norm(x, w)                       # impl="auto": this machine's lock, else the stock call
    whet.optimize(model, batch)                       # your own model, in place; print(model.whet), whet.restore(model)
    whet.pad_weights(model, batch)                    # misaligned weights stored padded, before the optimizer is made
    step = whet.compile_step(model, optimizer)        # the whole training step by its best plan: loss = step(batch)
    whet.plans.best_plan("tiny-llama:small")          # record, verify, time, choose
    whet.auto_select_kernels(config)                  # PyTorch or Triton, decided at the start of training
    whet.LLM("Qwen/Qwen3-0.6B").generate("Hello")     # text: batches, streams, chats
"""

import importlib

__version__ = "0.2.0"

_HOMES = {
    "auto_select_kernels": "autoselect", "manual_kernel_benchmark": "autoselect", "benchmark_rms_norm": "autoselect",
    "benchmark_rotary": "autoselect", "ModelConfig": "autoselect", "Choices": "choices", "use": "choices",
    "LLM": "decode.engine", "optimize": "swap._optimize", "restore": "swap._optimize",
    "pad_weights": "swap._stored", "unpad_weights": "swap._stored", "compile_step": "step", "TrainerCallback": "callback",
}
_MODULES = ("ops", "choices", "models", "plans")
__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str):
    """Loaded when first asked for, so that `import whet` costs nothing."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"whet.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"whet.{name}")
    raise AttributeError(f"module 'whet' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    """What there is, loaded or not."""
    return [*__all__, "__version__"]
