"""The engine: a model opened once, prompts answered in batches, as a stream or as a chat.

    from whet import LLM

    llm = LLM("Qwen/Qwen3-0.6B")                       # a folder, a GGUF file, or a name in Hugging Face's cache
    print(llm.generate("The capital of France is", max_new_tokens=20).text)
    for piece in llm.stream("Once upon a time", temperature=0.8, seed=1):
        print(piece.text, end="", flush=True)
    llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text
"""

import contextlib
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from whet.decode import persistent
from whet.decode.cache import Cache
from whet.decode.load import config_of, open_model, where_of
from whet.decode.quantize import QUANTS, bytes_per_token, quantize
from whet.decode.request import Completion, Request, Writer
from whet.decode.runner import DecodeRunner, check_path
from whet.decode.sampling import Sampling
from whet.decode.scheduler import Server
from whet.decode.speculate import Contest, Speculator
from whet.decode.text import check_text
from whet.decode.trust import Progress, Verifier, nothing_verified_yet, trusted

SPECULATIONS = ("ngram",)
Prompt = str | Sequence[int] | torch.Tensor
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Options:
    """How to answer a prompt.

    max_new_tokens   generation also ends, for the same reason "length", where the context is full
    temperature, top_k, top_p, seed   see whet.decode.sampling.Sampling; temperature 0 takes the likeliest token
    stop             strings; the text ends before the first that comes
    ignore_eos       go on past the model's end tokens
    reuse            begin from what the cache still holds of an earlier prompt with the same beginning. The answer is the
                     same but for rounding: a prompt fed in other pieces meets other matrix products
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    reuse: bool = False

    def __post_init__(self):
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number from 1 on, got {self.max_new_tokens!r}")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(s, str) or not s for s in stops):
            raise ValueError(f"stop must be strings that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop", stops)
        self.sampling()

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True)
class Piece:
    """One token of a stream and the text it made certain, which may be empty or that of several tokens."""

    text: str
    token: int


class Stream:
    """Pieces as they come. completion is there once the last has come; close() ends it early."""

    def __init__(self, llm: "LLM", request: Request):
        self.llm, self.request = llm, request
        self.steps = llm.server.serve([request])
        self.completion: Completion | None = None

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        try:
            _, token, text = next(self.steps)
        except BaseException:
            self.close()
            raise
        return Piece(text, token)

    def close(self) -> None:
        self.steps.close()
        if self.completion is None:
            if self.request.reason is None:
                self.request.fail("closed before its end")
            self.completion = self.llm.completed(self.request)


class NumberText:
    """What random weights have for a tokenizer: a prompt is its bytes, and tokens are written as numbers."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> "NumberText":
        return self

    def push(self, token: int) -> str:
        return f"{token} "

    def end(self) -> str:
        return ""

    def chat(self, messages: Messages, **options) -> list[int]:
        raise ValueError("this model has no tokenizer, so no chat template: give a plain prompt")


class LLM:
    """A model that answers prompts.

    model            a Hugging Face folder or its name in the local cache, a GGUF file; None: SmolLM2-135M where installed
    device, dtype    "auto": the GPU in bfloat16 where there is one, else the CPU in float32
    quant            int8, int4 or fp8: weights quantised when they are loaded
    max_batch        prompts decoded at once; more wait
    max_context      tokens of prompt and answer together at most; None: what the model was made for
    memory           for keys and values, in bytes or as "8GiB"; None: what is free, less a tenth. It is taken as needed
    speculate        "ngram": guess what came before in the text; greedy, one prompt at a time, the tokens of path="graph"
    path             how one prompt is decoded greedily: "graph", one for each token; "persistent", one kernel for all tokens;
                     "auto": the kernel on the GPUs where it was verified, for models that fit it and contexts where it is
                     faster. Their logits differ in the last bits: a token that is all but tied can come out otherwise
    random_weights   "qwen3:0.6b", say, instead of a model: for benchmarks
    verify           on a GPU the decode kernels are verified once for each shape of model (whet/decode/trust.py), in seconds;
                     where they fail, stock calls decode. False: they are used as they are
    progress         called as progress(text, done, of) while the kernels are verified

    One call at a time: a new one ends a stream that is still open. Any of them can be interrupted.
    """

    def __init__(
        self, model: str | Path | None = None, *, device: str = "auto", dtype: str | torch.dtype = "auto",
        quant: str | None = None, max_batch: int = 8, max_context: int | None = None, memory: int | float | str | None = None,
        speculate: str | None = None, path: str = "auto", random_weights: str | None = None, verify: bool = True,
        progress: Progress = lambda text, done, total: None,
    ):
        check_limits(max_batch, max_context, speculate, path)
        if quant is not None and quant not in QUANTS:
            raise ValueError(f"quant must be one of {', '.join(QUANTS)}, got {quant!r}")
        if path == "persistent":
            persistent.refuse_early(config_of(model, random_weights), **where_of(device, dtype))
        verifier = started(device) if verify else None
        try:
            opened, text = open_model(model, random_weights=random_weights, device=device, dtype=dtype)
            if quant is not None:
                quantize(opened, quant)
            self._trust(opened, max_batch, speculate, path, verify, progress, verifier)
        finally:
            if verifier is not None:
                verifier.close()
        self._set_up(opened, text, max_batch, max_context, memory, speculate, path)

    @classmethod
    def of(
        cls, model: Any, text: Any = None, *, max_batch: int = 8, max_context: int | None = None,
        memory: int | float | str | None = None, speculate: str | None = None, path: str = "auto", verify: bool = True,
        progress: Progress = lambda text, done, total: None,
    ) -> "LLM":
        """An engine for a model that is already open, as open_model gives it."""
        check_limits(max_batch, max_context, speculate, path)
        made = cls.__new__(cls)
        made._trust(model, max_batch, speculate, path, verify, progress, None)
        made._set_up(model, text, max_batch, max_context, memory, speculate, path)
        return made

    def _trust(self, model, max_batch, speculate, path, verify, progress, verifier) -> None:
        """What may decode the model: decided before anything of it runs."""
        wanted = "graph" if speculate else path
        self.trust = trusted(model, wanted, max_batch, speculate is not None, verify, progress, verifier)

    def _set_up(self, model, text, max_batch, max_context, memory, speculate, path) -> None:
        positions = model.c.max_positions
        if max_context is not None and max_context > positions:
            raise ValueError(f"max_context must be at most {positions}, the model's positions, got {max_context}")
        self.model, self.text = model, NumberText() if text is None else text
        self.device = model.embed.device
        self.cache = Cache(model.c, model.embed.dtype, self.device, memory, max_context or positions)
        self.runner = DecodeRunner(model, self.cache, max_batch, self._path(speculate, path), self.trust.kernels)
        self.server = Server(self.runner, Speculator(self.runner) if speculate else None)
        self.open: Stream | None = None

    def _path(self, speculate: str | None, path: str) -> str:
        """A kernel for all tokens only where it was found right; asked for where it does not fit, the runner says why not."""
        one = self.trust.persistent or (path == "persistent" and not self.trust.why)
        return path if one and not speculate else "graph"

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, max_new_tokens: int = 256, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, seed: int | Sequence[int] = 0, stop: str | Sequence[str] = (), ignore_eos: bool = False,
        reuse: bool = False,
    ) -> Any:
        """The Completion of a prompt, or a list of them for a list; a prompt is text or a list of token numbers. See Options.

        A bad prompt among several gives a Completion with reason "error" and the others are answered; alone it raises.
        seed: one for all, so that a prompt's answer does not depend on its place, or one for each.
        """
        single = is_one(prompts)
        each: list[Any] = [prompts] if single else list(prompts)
        seeds = [seed] * len(each) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(each):
            raise ValueError(f"seed must be one number or one for each of the {len(each)} prompts, got {len(seeds)}")
        options = Options(max_new_tokens, temperature, top_k, top_p, 0, stop, ignore_eos, reuse)
        own = [replace(options, seed=s) for s in seeds]
        if single:
            return self._one(self._request(each[0], own[0]))
        if self.server.speculator is not None and len(each) > 1:
            raise ValueError(f"speculation takes one prompt at a time, got {len(each)}; open the model without speculate")
        asked: list[Request | Completion] = []
        for prompt, with_seed in zip(each, own):
            try:
                asked.append(self._request(prompt, with_seed))
            except ValueError as e:
                asked.append(Completion(error=str(e)))
        self._run([a for a in asked if isinstance(a, Request)])
        return [self.completed(a) if isinstance(a, Request) else a for a in asked]

    def stream(self, prompt: Prompt | Messages, **options: Any) -> Stream:
        """Pieces of the answer as they come; its Completion is then the stream's .completion. Messages are a chat."""
        request = self._request(*self._chat_or_prompt(prompt, options))
        self._close_open()
        self.open = Stream(self, request)
        return self.open

    def chat(self, messages: Messages, template: Mapping[str, Any] | None = None, **options: Any) -> Completion:
        """The answer to a conversation: [{"role": "user", "content": ...}, ...], written by the model's chat template.

        template: further variables of the template, such as {"enable_thinking": False}. The turns before are not fed again
        where the cache still holds them.
        """
        return self._one(self._request(self.text.chat(messages, **(template or {})), Options(**({"reuse": True} | options))))

    def completed(self, request: Request) -> Completion:
        made = request.completion()
        if self.device.type == "cuda" and request.alone and made.tokens:
            made.bytes_per_token = bytes_per_token(self.model, len(request.tokens) + len(made.tokens) // 2)
        return made

    def _chat_or_prompt(self, prompt: Any, options: dict[str, Any]) -> tuple[Prompt, Options]:
        if isinstance(prompt, Sequence) and any(isinstance(m, Mapping) for m in prompt):
            return self.text.chat(prompt), Options(**({"reuse": True} | options))
        return prompt, Options(**options)

    def _one(self, request: Request) -> Completion:
        self._run([request])
        if request.reason == "error":
            raise ValueError(request.error)
        return self.completed(request)

    def _run(self, requests: list[Request]) -> None:
        self._close_open()
        with contextlib.closing(self.server.serve(requests)) as steps:
            for _ in steps:
                pass

    def _close_open(self) -> None:
        if self.open is not None:
            self.open.close()
            self.open = None

    def _request(self, prompt: Prompt, options: Options) -> Request:
        """The prompt as tokens, checked; a ValueError says in one line what is wrong with it."""
        vocab, longest = self.model.c.vocab, self.cache.longest
        tokens = tokens_of(prompt, self.text)
        if not tokens:
            raise ValueError("the prompt is empty; give it at least one token")
        if bad := [t for t in tokens if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab]:
            raise ValueError(f"tokens must be whole numbers from 0 to {vocab - 1}, the vocabulary, got {bad[0]!r}")
        if len(tokens) >= longest:
            limit = "the context" if longest == self.cache.max_tokens else f"{self.cache.memory / 2**20:,.0f} MiB of memory"
            raise ValueError(f"the prompt has {len(tokens)} tokens and {longest - 1} would fit: {limit} is {longest} tokens")
        drafts = self.server.speculator is not None
        if drafts and options.temperature > 0:
            raise ValueError(f"speculation needs temperature 0, got {options.temperature}; open the model without speculate")
        return Request(
            tokens, options.sampling(), min(options.max_new_tokens, longest - len(tokens)), Writer(self.text, options.stop),
            frozenset(() if options.ignore_eos else self.model.c.eos), options.reuse, Contest() if drafts else None,
        )


def started(device: str) -> Verifier | None:
    """A child process on its way while the weights are loaded, where nothing was ever verified here."""
    if not torch.cuda.is_available() or str(device).startswith("cpu") or not nothing_verified_yet():
        return None
    made = Verifier()
    made.start()
    return made


def is_one(prompts: Any) -> bool:
    """Whether this is one prompt rather than several. What is neither counts as one, and is refused as such."""
    if isinstance(prompts, torch.Tensor):
        return prompts.dim() < 2
    if not may_be_list(prompts):
        return True
    return len(prompts) > 0 and all(isinstance(t, numbers.Number) for t in prompts)


def may_be_list(given: Any) -> bool:
    no_list = (str, bytes, bytearray, Mapping, Set)
    return isinstance(given, Iterable) and hasattr(given, "__len__") and not isinstance(given, no_list)


def tokens_of(prompt: Any, text: Any) -> list[Any]:
    """A prompt's tokens, their values not yet checked."""
    wanted = "a prompt is text or a list of token numbers"
    if isinstance(prompt, str):
        check_text(prompt, wanted)
        return text.encode(prompt)
    if isinstance(prompt, torch.Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            raise ValueError(f"{wanted}, got a tensor of shape {tuple(prompt.shape)} and {prompt.dtype}")
        return prompt.tolist()
    if not may_be_list(prompt):
        raise ValueError(f"{wanted}, got {type(prompt).__name__}")
    return [int(t) if isinstance(t, numbers.Integral) and not isinstance(t, int) else t for t in prompt]


def check_limits(max_batch: int, max_context: int | None, speculate: str | None, path: str) -> None:
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or not 1 <= max_batch <= 64:
        raise ValueError(f"max_batch must be a whole number from 1 to 64, got {max_batch!r}")
    if max_context is not None and (isinstance(max_context, bool) or not isinstance(max_context, int) or max_context < 2):
        raise ValueError(f"max_context must be a whole number of tokens from 2 on, got {max_context!r}")
    if speculate is not None and speculate not in SPECULATIONS:
        raise ValueError(f"speculate must be None or one of {', '.join(SPECULATIONS)}, got {speculate!r}")
    check_path(path)
    if speculate is not None and path == "persistent":
        raise ValueError("speculation checks drafts with the graph's kernels: leave out path='persistent'")
