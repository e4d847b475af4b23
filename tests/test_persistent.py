"""The persistent kernel: its source run on a CPU, compiled for GPUs, and on a GPU measured against the graph's tokens."""

import ctypes
import dataclasses
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch

from whet.decode import nvrtc, persistent
from whet.decode.bench.agree import CHECKED, Truth
from whet.decode.bench.contender import PersistentContender
from whet.decode.cache import Cache
from whet.decode.engine import LLM
from whet.decode.oracle import by_formulas, widened
from whet.decode.quantize import quantize
from whet.decode.runner import DecodeRunner
from whet.models import qwen3
from whet.op import discover
from whet.verify import judge

SMALL = dataclasses.replace(
    qwen3.SIZES["tiny"], hidden=1024, layers=2, heads=8, kv_heads=4, head_dim=128, ffn=1024, vocab=600, max_positions=2048
)
BLOCKS, SHARED = 16, 232448  # blocks of the run on a CPU: a row of the residual for each of 64 threads
PLACES = dict(token=7, old=40)
ATTENTION = discover()["cached_attention"]


def weights(c, quant=None, **where):
    torch.manual_seed(0)
    model = qwen3.random_weights(c, dtype=torch.bfloat16, **where).requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() == 1:  # norms and biases that are all alike would hide a wrong index
            p.uniform_(-0.5, 0.5) if name.endswith("bias") else p.uniform_(0.5, 1.5)
    if quant is not None:
        quantize(model, quant)
    return model


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source compiled for this CPU, one library for each set of sizes."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    folder, made = tmp_path_factory.mktemp("persistent"), {}
    (folder / "whole.cu").write_text(persistent.source())

    def build(model, blocks: int = BLOCKS) -> ctypes.CDLL:
        sizes = persistent.sizes_of(model, blocks, SHARED)
        key = tuple(sizes.items())
        if key not in made:
            file = folder / f"{len(made)}.so"
            options = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-shared", f'-DSOURCE="{folder / "whole.cu"}"']
            options += [f"-D{name}={value}" for name, value in key]
            subprocess.run(["g++", *options, str(Path(__file__).with_name("cuda_on_cpu.cpp")), "-o", str(file)], check=True)
            made[key] = ctypes.CDLL(str(file))
        return made[key]

    return build


class Place:
    """A sequence of `old` random tokens in a cache, and what the kernel needs beside it."""

    def __init__(self, lib, model, old: int, steps: int):
        c, self.model, self.old, self.n = model.c, model, old, steps
        shape = (c.layers, 1, c.kv_heads, old + steps + 3, c.head_dim)
        self.cache = [torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in range(2)]  # what is unwritten is not read
        if old:
            model.extend(torch.randint(c.vocab, (1, old)), *self.cache, torch.zeros(1, dtype=torch.int64), start=0)
        self.before = [t.clone() for t in self.cache]
        self.lib, self.layers = lib, persistent.layer_table(model)
        self.mailbox = torch.zeros(ctypes.c_int.in_dll(lib, "MAILBOX_WORDS").value, dtype=torch.int64)
        self.token, self.position = torch.tensor([PLACES["token"]]), torch.tensor([old])
        self.out_tokens, self.logit = torch.full((steps,), -1), torch.zeros(steps)
        self.logits = torch.full((steps, c.vocab), float("nan"))
        self.epoch, self.failed = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def run(self, steps: int | None = None, least: int = 64, seed: int = 0, patience: int = 1 << 20, silent: int = -1) -> int:
        names = ("layers", "mailbox", "token", "position", "out_tokens", "logit", "logits", "epoch", "failed")
        held = {name: getattr(self, name) for name in names}
        held |= dict(cache_k=self.cache[0][:, 0], cache_v=self.cache[1][:, 0])
        args = persistent.arguments(self.model, held, self.n if steps is None else steps, least, patience)
        return self.lib.launch(ctypes.byref(args), seed, silent)

    def expected(self, dtype) -> torch.Tensor:
        """Logits of the tokens that the kernel was given, by the plain formulas."""
        model = self.model if dtype == torch.bfloat16 else widened(self.model, dtype)
        fed = torch.cat([torch.tensor([PLACES["token"]]), self.out_tokens[:-1]])[None]
        with by_formulas(model):
            hidden = model.extend(fed, *(t.to(dtype) for t in self.before), torch.tensor([self.old]), start=self.old)
            return model.logits(hidden)[0]


def check(place: Place) -> None:
    assert place.failed.item() == 0 and place.position.item() == place.old + place.n
    assert torch.equal(place.out_tokens, place.logits.argmax(-1)) and place.token.item() == place.out_tokens[-1]
    assert torch.equal(place.logit, place.logits.amax(-1))
    eager, oracle = ({"logits": place.expected(dtype)} for dtype in (torch.bfloat16, torch.float32))
    verdict = judge({"logits": place.logits}, eager, oracle, torch.finfo(torch.bfloat16).eps)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("old, least", [(0, 64), (63, 64), (127, 64), (300, 64), (190, 512), (460, 512)])
def test_its_logits_are_those_of_the_formulas(built, old, least):
    """No old keys, a full unit and one more, two splits and four, one split of several units."""
    model = weights(SMALL)
    place = Place(built(model), model, old, steps=2)
    assert place.run(least=least) == 0
    check(place)


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("change", [dict(qk_norm=False, qkv_bias=True), dict(heads=16, kv_heads=4, ffn=2048, tied=False)])
def test_others_of_the_family(built, change, quant):
    model = weights(dataclasses.replace(SMALL, **change), quant)
    place = Place(built(model), model, PLACES["old"], steps=2)
    assert place.run() == 0
    check(place)


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_blocks_with_eight_rows(built, quant):
    """As with many multiprocessors: a tile of eight rows, every stage whole in registers."""
    model = weights(dataclasses.replace(SMALL, layers=1, vocab=4096), quant)
    place = Place(built(model, 128), model, PLACES["old"], steps=1)
    assert place.run() == 0
    check(place)


@pytest.mark.parametrize("quant, old", [(None, 63), (None, 193), (None, 129), ("int8", 129), ("int4", 129)])
def test_a_head_whose_first_rows_are_taken_ahead(built, quant, old):
    """As with Qwen3-0.6B: what follows the last layer, and the last step, begins as a layer does."""
    model = weights(dataclasses.replace(SMALL, vocab=2304), quant)
    place = Place(built(model, 32), model, old, steps=2)
    assert ctypes.c_int.in_dll(place.lib, "IS_AHEAD").value == 1
    assert place.run(least=4096) == 0
    check(place)


def attended(place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last layer's attention was given, (1, 1, heads), and what came of it, from the mailbox of the last step."""
    c, at = place.model.c, {name: ctypes.c_int.in_dll(place.lib, name).value for name in ("QKV_AT", "PART_AT", "Y_AT")}
    epoch, value = place.mailbox.view(torch.int32)[1::2], place.mailbox.view(torch.float32)[0::2]
    combined = epoch[at["Y_AT"]] == epoch[at["QKV_AT"]]
    begin, width = at["Y_AT" if combined else "PART_AT"], c.heads * c.head_dim
    qkv = value[at["QKV_AT"] : at["QKV_AT"] + width + 2 * c.kv_heads * c.head_dim]
    return qkv[None, None], place.mailbox.view(torch.bfloat16).view(-1, 4)[begin : begin + width // 2, :2].reshape(1, 1, width)


SPANS = [(1, 64), (64, 64), (129, 64), (257, 64), (300, 64), (330, 512)]


@pytest.mark.parametrize(
    "old, least, heads, kv_heads", [(*s, 8, 4) for s in SPANS] + [(*s, *h) for s in SPANS[-2:] for h in ((8, 8), (16, 4))]
)
def test_no_key_is_missing_or_seen_twice(built, old, least, heads, kv_heads):
    """Keys that are nearly alike, so that each counts: logits hide one of hundreds."""
    model = weights(dataclasses.replace(SMALL, heads=heads, kv_heads=kv_heads))
    place = Place(built(model), model, old, steps=1)
    for t, spread in zip(place.cache, (0.05, 1.0)):
        t[:, :, :, :old] = torch.randn(t[:, :, :, :old].shape) * spread
    assert place.run(least=least) == 0 and place.failed.item() == 0
    (qkv, found), layer = attended(place), model.layers[-1]

    def by_formula(dtype):
        given = [t.to(dtype, copy=True) for t in (qkv, place.cache[0][-1], place.cache[1][-1])]
        norms = [t.to(dtype) for t in (layer.q_norm, layer.k_norm)]
        return {"y": ATTENTION.reference(*given, torch.tensor([old]), model.cos, model.sin, *norms, eps=model.c.eps)}

    verdict = judge({"y": found}, by_formula(torch.bfloat16), by_formula(torch.float64), torch.finfo(torch.bfloat16).eps)
    assert verdict.ok, verdict.why


def test_the_same_bits_whatever_comes_first_and_however_the_steps_are_cut(built):
    model = weights(SMALL)
    first = Place(built(model), model, PLACES["old"], steps=3)
    assert first.run() == 0
    again = Place(built(model), model, PLACES["old"], steps=3)
    again.cache = [t.clone() for t in first.before]
    again.epoch.fill_(-4)  # it wraps within the run
    found = []
    for seed in (0, 0, 1):
        assert again.run(steps=1, seed=seed) == 0
        found.append(again.out_tokens[0].item())
    assert found == first.out_tokens.tolist() and again.failed.item() == 0
    assert torch.equal(again.logits[0], first.logits[-1])
    for ours, theirs in zip(again.cache, first.cache):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_a_block_that_is_silent_ends_the_kernel_and_is_told(built):
    model = weights(SMALL)
    place = Place(built(model), model, PLACES["old"], steps=1)
    assert place.run(patience=50, silent=3) == 0 and place.failed.item() == 1


@pytest.mark.parametrize("quant", [None, "int8"])
def test_what_is_not_a_number_is_seen(built, quant):
    model = weights(SMALL, quant)
    model.layers[1].norm1[5] = float("nan")
    place = Place(built(model), model, 3, steps=1)
    assert place.run() == 0 and not place.logit.isfinite().any()


def test_a_model_that_does_not_fit_is_told_why():
    whole = lambda **change: qwen3.Qwen3(dataclasses.replace(SMALL, **change), device="meta", dtype=torch.bfloat16)  # noqa: E731
    assert persistent.model_refused(whole()) is None
    assert "bfloat16, got float32" in persistent.model_refused(qwen3.Qwen3(SMALL, device="meta"))
    assert "multiples of 1024, got hidden 512" in persistent.model_refused(whole(hidden=512))
    assert "heads must be of 128" in persistent.model_refused(whole(head_dim=64))
    assert "sliding window" in persistent.model_refused(whole(window=64))
    apart = whole(layers=1)
    apart.layers[0].o.data = torch.nn.Parameter(apart.layers[0].o.data.t())
    assert "must be contiguous" in persistent.model_refused(apart)
    assert "int8 or int4, got fp8" in persistent.model_refused(weights(dataclasses.replace(SMALL, layers=1), "fp8"))
    with pytest.raises(ValueError, match="persistent kernel does not fit"):
        persistent.Persistent(weights(SMALL))
    with pytest.raises(ValueError, match="path must be one of auto, graph, persistent"):
        DecodeRunner(None, None, 1, path="fast")


def test_no_block_has_fewer_rows_of_the_residual_than_it_must():
    of = lambda hidden, processors: persistent.blocks_for(  # noqa: E731
        qwen3.Qwen3(dataclasses.replace(SMALL, hidden=hidden, layers=1), device="meta"), processors
    )
    assert of(1024, 132) == of(2048, 132) == 128 and of(1024, 128) == 128 and of(1024, 148) == 147 and of(1024, 2000) == 1024


BUILDS = [("sm_90a", 132, 16), ("sm_90a", 132, 8), ("sm_90a", 132, 4), ("sm_100a", 148, 16)]


@pytest.mark.parametrize("arch, processors, bits", BUILDS)
def test_it_compiles_for_gpus_without_spills(arch, processors, bits):
    try:
        nvrtc.nvrtc()
    except ValueError as e:
        pytest.skip(str(e))
    model = qwen3.Qwen3(qwen3.SIZES["0.6b"], device="meta", dtype=torch.bfloat16)
    sizes = persistent.sizes_of(model, persistent.blocks_for(model, processors), SHARED) | dict(BITS=bits)
    code, said = nvrtc.compiled(persistent.source(), arch, sizes, verbose=True)
    assert len(code) > 10_000 and re.search(r"\b0 bytes spill stores, 0 bytes spill loads", said), said


def test_the_compiler_says_what_is_wrong():
    try:
        nvrtc.nvrtc()
    except ValueError as e:
        pytest.skip(str(e))
    with pytest.raises(ValueError, match="NVRTC for sm_90a: .*nothing"):
        nvrtc.compiled("__device__ void f() { nothing(); }", "sm_90a", {})


def test_a_kernel_that_does_not_load_leaves_the_graph(caplog):
    class Broken:
        kernel = None

        def load(self):
            raise ValueError("no NVRTC library")

    assert persistent.loaded(Broken(), "auto") is None and "decoded by a graph: no NVRTC library" in caplog.text
    with pytest.raises(ValueError, match="no NVRTC library"):
        persistent.loaded(Broken(), "persistent")
    assert persistent.loaded(None, "auto") is None


def test_a_kernel_that_is_still_compiled_is_not_ready():
    runner = DecodeRunner(weights(SMALL), Cache(SMALL, torch.bfloat16, torch.device("cpu"), max_tokens=64), 2)
    steps = ("step", 1, 64, "greedy")
    assert runner.persistent is None and runner.ready(steps)  # plain calls, on a CPU
    runner.persistent = types.SimpleNamespace(kernel=None)  # to load it, or to wait, would fail
    assert runner.persistent_serves(1, "greedy") and not runner.ready(steps)
    runner.persistent.kernel = object()
    assert runner.ready(steps) and not runner.persistent_serves(2, "greedy") and not runner.persistent_serves(1, "sampled")


def test_compiled_code_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compiled", lambda source, arch, sizes: (source.encode() + str(sizes).encode(), ""))
    first = nvrtc.cached("a", "sm_90a", {"N": 1})
    monkeypatch.setattr(nvrtc, "compiled", None)
    assert nvrtc.cached("a", "sm_90a", {"N": 1}) == first and len(list((tmp_path / "cubins").iterdir())) == 1


def big(device, quant=None, **change):
    return weights(dataclasses.replace(SMALL, vocab=30000, max_positions=8192, **change), quant, device=device)


@pytest.fixture
def able(device):
    """A GPU that can run it."""
    if why := persistent.device_refused(torch.device(device)):
        pytest.skip(why)
    return device


def begun(model, old: int):
    """A contender that has read `old` tokens, and what it is judged by."""
    prompt, first = torch.randint(model.c.vocab, (1, old), device="cuda"), torch.tensor([[PLACES["token"]]], device="cuda")
    made = PersistentContender(model, 1, old + 40)
    made.feed(prompt, first)
    return made, Truth(model, prompt, torch.randint(model.c.vocab, (1, CHECKED), device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("old", [1, 63, 200, 1520, 6000])  # from 1536 on splits are longer, and read what others wrote
@pytest.mark.parametrize("change", [dict(), dict(qk_norm=False, qkv_bias=True, heads=16), dict(hidden=2048, ffn=6144)])
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_on_a_gpu_it_agrees_and_gives_the_same_bits_again(able, old, change, quant):
    made, truth = begun(big(able, quant, **change), old)
    verdict = truth.judge(made)
    assert verdict.ok, verdict.why
    runs = []
    for _ in range(5):
        for t in made.runner.cache.kv:
            t[:, :, :, old:].fill_(float("nan"))  # a key that is read before it is written is seen
        runs.append((made.chain(32), made.runner.logit[0, :32].clone()))
    for tokens, logits in runs:
        assert torch.equal(tokens, runs[0][0]) and torch.equal(logits, runs[0][1]) and logits.isfinite().all()


@pytest.mark.gpu
def test_on_a_gpu_impatience_ends_the_kernel_and_is_told(able, monkeypatch):
    monkeypatch.setattr(persistent, "PATIENCE", 0)
    made, _ = begun(big(able), 100)
    made.rewind()
    with pytest.raises(RuntimeError, match="gave up polling"):
        made.runner.steps(4, 1, made.context, "greedy").read()


def engine_tells_of_what_is_not_a_number(model, path: str) -> None:
    """Several bursts of tokens, the same ones again; then the row of one of them in the embedding is broken."""
    llm, asked = LLM.of(model, path=path), dict(max_new_tokens=150, ignore_eos=True)
    first, again = (llm.generate([[1, 2, 3]], **asked)[0] for _ in range(2))
    assert first.reason == "length" and len(first.tokens) == 150 and first.tokens == again.tokens
    broken = first.tokens[70]
    model.embed.data[broken] = float("nan")
    told = llm.generate([[1, 2, 3]], **asked)[0]
    at = first.tokens.index(broken) + 1
    assert told.reason == "error" and told.error.startswith(f"the logits after {at} new tokens are not finite")
    assert told.tokens == first.tokens[:at]


def test_an_engine_tells_of_what_is_not_a_number():
    engine_tells_of_what_is_not_a_number(weights(dataclasses.replace(SMALL, tied=False)), "graph")


@pytest.mark.gpu
def test_on_a_gpu_an_engine_that_decodes_with_it_does_so_too(able):
    engine_tells_of_what_is_not_a_number(big(able, tied=False), "persistent")
