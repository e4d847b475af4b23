"""A decoder small enough for a CPU whose greedy text wanders, a tokenizer of single letters, and graphs as a GPU has them."""

import torch
from conftest import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

from whet.decode.engine import LLM
from whet.models.qwen3 import Qwen3, Qwen3Config, random_weights

CONFIG = Qwen3Config(
    vocab=96, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, max_positions=1024, theta=1e4, tied=False
)


def small_model(config: Qwen3Config = CONFIG, scale: float = 12.0) -> Qwen3:
    """Random weights so large that a token depends on those before it; the same on every device."""
    model = random_weights(config, device="cpu", dtype=torch.float32).requires_grad_(False).to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(scale)
    return model


class Letters:
    """Token t is the character chr(32 + t)."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 32 for c in text]

    def stream(self) -> "Letters":
        return self

    def push(self, token: int) -> str:
        return chr(32 + token)

    def end(self) -> str:
        return ""

    def chat(self, messages, **options) -> list[int]:
        return self.encode("".join(f"{m['role'][0]}:{m['content']}|" for m in messages) + "a:")


def small_llm(model: Qwen3 | None = None, ahead: bool = False, **options) -> LLM:
    """ahead: as on a GPU: bursts of eight, the next enqueued before one is read, steps captured as graphs."""
    llm = LLM.of(model or small_model(), Letters(), **options)
    if ahead and DEVICE == "cpu":
        llm.server.burst, llm.server.ahead = 8, 1
        llm.runner.capture = Tape
    return llm


class Recording(TorchDispatchMode):
    """Notes every operator call. What the host reads of a tensor is refused, as it is while a graph is captured."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []
        self.before: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}  # what is written to, as it was

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.startswith(("_local_scalar_dense", "nonzero", "equal")):
            raise RuntimeError(f"{func} waits for the device")
        kwargs = kwargs or {}
        for argument, given in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, torch.Tensor):
                self.before.setdefault((given.data_ptr(), given.shape), (given, given.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class Tape:
    """graphs.Graph on a CPU: warm-up runs count, the captured one does not, a replay repeats operators and no Python."""

    def __init__(self, run, warm_up: int = 3, beside=None):
        for _ in range(warm_up):
            run()
        with Recording() as recording:
            run()
        for tensor, old in reversed(recording.before.values()):
            tensor.copy_(old)
        self.kept, self.calls = recording.calls, []
        made: dict[int, tuple[int, int]] = {}  # a tensor of the recording -> the call that makes it, and which it is
        for n, (func, args, kwargs, out) in enumerate(recording.calls):
            self.calls.append((func, [self.bound(a, made) for a in args], kwargs))
            made |= {id(t): (n, i) for i, t in enumerate(out if isinstance(out, tuple | list) else [out])}

    def bound(self, given, made: dict[int, tuple[int, int]]):
        """How to have an argument at a replay: a function of the tensors that the replay has made so far."""
        if isinstance(given, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in given):
            parts = [self.bound(t, made) for t in given]
            return lambda now: [part(now) for part in parts]
        at = made.get(id(given)) if isinstance(given, torch.Tensor) else None
        return (lambda now: given) if at is None else (lambda now: now[at[0]][at[1]])

    def __call__(self):
        now: list = []
        for func, args, kwargs in self.calls:
            out = func(*[a(now) for a in args], **kwargs)
            now.append(out if isinstance(out, tuple | list) else [out])
