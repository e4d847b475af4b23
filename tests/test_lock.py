"""The lock: a bad entry is dropped alone, a broken file set aside by a writer, strangers' files left alone."""

import errno
import json
import os
import random
import timeit
from dataclasses import asdict

import pytest
import torch
from lock_entries import HERE, call, entry, key, part, put, saved
from typer.testing import CliRunner

import whet.choices
import whet.ops
from whet import lock_file
from whet.commands import app
from whet.lock import FORMAT, Lock, check, render
from whet.op import discover
from whet.tune import save_decoder, tune


@pytest.fixture
def auto(monkeypatch):
    """A call with impl="auto", as the first of a process."""
    def run():
        monkeypatch.setattr(whet.choices, "_active", [])
        return whet.ops.rms_norm(torch.ones(8, 32), torch.ones(32))

    return run


def test_what_is_saved_is_read_back_whatever_else_it_holds(lock_path, warnings):
    lock = Lock.read(lock_path)
    lock.calls[key()], lock.calls[key(8, "graph")] = entry(), entry(chosen=None, mode="graph")
    calls = [{"call": asdict(call()), "count": 1}]
    lock.plans["tiny float32"] = {"config": "c", "calls": calls, "plans": [], "torch": torch.__version__}
    save_decoder(lock, "qwen3 persistent", {"ok": True, "why": "", "seconds": 2.0})
    again = Lock.read(lock_path)
    assert again.calls == lock.calls and again.plans == lock.plans and again.decoders == lock.decoders and not warnings()
    assert again.table() == {call().key: "eager"} and again.table("graph") == {}, "an unfinished tuning is kept and not used"
    assert json.loads(lock_path.read_text())["format"] == FORMAT and os.listdir(lock_path.parent) == ["whet.lock"]
    lock_path.write_text(json.dumps(json.loads(lock_path.read_text()), indent=7))
    assert Lock.read(lock_path).calls == lock.calls, "how the JSON is laid out does not count"


def eager(e: dict, **changed) -> dict:
    return e | {"candidates": {"eager": e["candidates"]["eager"] | changed}}


BAD = {
    "a number": lambda e: 5, "null": lambda e: None, "a list": lambda e: [e], "text": lambda e: "chosen",
    "no call": lambda e: e.pop("call") and e, "a call of text": lambda e: e | {"call": "rms_norm"},
    "a call without sizes": lambda e: e | {"call": {"op": "rms_norm"}}, "the call of another": lambda e: entry(16),
    "sizes in a list": lambda e: e | {"call": e["call"] | {"case": []}},
    "a size that is a list": lambda e: e | {"call": e["call"] | {"case": {"M": [8]}}},
    "the mode of another": lambda e: e | {"mode": "graph"}, "a mode that is none": lambda e: e | {"mode": None},
    "no candidates": lambda e: e | {"candidates": []}, "a candidate of text": lambda e: e | {"candidates": {"eager": "ok"}},
    "an unknown choice": lambda e: e | {"chosen": "liger"}, "a number chosen": lambda e: e | {"chosen": 1},
    "a wrong one chosen": lambda e: e | {"chosen": "compile"}, "an interpreted one chosen": lambda e: e | {"chosen": "triton"},
    "one not timed chosen": lambda e: e["candidates"]["eager"].pop("ms") and e,
    "null chosen": lambda e: e | {"chosen": None}, "a count of text": lambda e: e | {"count": "3"},
    "untimed and not stock": lambda e: e | {"chosen": "triton", "untimed": True},
    "untimed where one was timed": lambda e: e | {"chosen": "torch", "untimed": True},
} | {
    f"{field} of {str(value)[:9]!r}": lambda e, field=field, value=value: eager(e, **{field: value})
    for field, value in [
        ("ok", "true"), ("low", []), ("samples", 2.5), ("why", None), ("source", 5), ("interpreted", True),
        ("ms", "0.5"), ("ms", float("nan")), ("ms", float("inf")), ("ms", -1.0), ("ms", 10**300),
    ]
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_entry_is_dropped_alone_with_one_line(how, lock_path, warnings, auto):
    saved(lock_path, 16, 32)
    put(lock_path, "calls", key(), BAD[how](entry()))
    lock = Lock.read(lock_path)
    assert set(lock.calls) == {key(16), key(32)} and lock.table() == {call(16).key: "eager", call(32).key: "eager"}
    lines = warnings()
    assert len(lines) == 1 and str(lock_path) in lines[0] and call().key in lines[0]
    assert auto().shape == (8, 32) and Lock.read(lock_path).calls == lock.calls and not warnings(), "reported once in a process"
    lock.save()
    assert set(part(lock_path)["calls"]) == {key(16), key(32)} and Lock.read(lock_path).calls == lock.calls


@pytest.mark.parametrize("section, value", [
    ("plans", {"config": "c", "calls": [{"call": 5}], "plans": []}), ("plans", {"config": "c"}), ("plans", 5),
    ("decoders", {"ok": "yes", "why": ""}), ("decoders", {"ok": True}), ("decoders", None),
])
def test_a_bad_plan_or_decoder_is_dropped_alone(section, value, lock_path, warnings):
    put(saved(lock_path), section, "it", value)
    lock = Lock.read(lock_path)
    assert lock.plans == lock.decoders == {} and key() in lock.calls and len(warnings()) == 1


@pytest.mark.parametrize("damage", [
    {"calls": 5}, {"calls": [], "plans": None}, {"plans": {}}, 5, None, [], {"calls": {}, "decoders": "x"},
])
def test_a_part_of_a_wrong_shape_ends_nothing(damage, lock_path, auto):
    lock_path.write_text(json.dumps({"format": FORMAT, "machines": {HERE: damage, "other": damage}}))
    auto()
    lock = Lock.read(lock_path)
    assert lock.calls == lock.plans == lock.decoders == {}
    lock.calls[key()] = entry()
    lock.save()
    assert Lock.read(lock_path).calls == {key(): entry()} and json.loads(lock_path.read_text())["machines"]["other"] == damage


def test_an_entry_counts_only_where_it_was_written(lock_path, warnings):
    """Its checksum covers its place: another call's key, another section, another machine."""
    mine = part(saved(lock_path))["calls"][key()]
    assert check(HERE, "calls", {key(): dict(mine)}).entries
    for who, section, name in ((HERE, "calls", key(16)), ("Other GPU", "calls", key()), (HERE, "plans", key())):
        assert check(who, section, {name: dict(mine)}).bad[name].startswith("its checksum")
    put(lock_path, "calls", key(), entry() | {"ms": 0.25} | {"checksum": mine["checksum"]}, summed=False)
    put(lock_path, "calls", key(16), entry(16), summed=False)
    assert Lock.read(lock_path).calls == {} and len(warnings()) == 2


def test_many_bad_entries_are_counted_in_one_line(lock_path, warnings):
    saved(lock_path, *range(1, 60))
    lock_path.write_text(lock_path.read_text().replace('"share": 0.25', '"share": 0.20'))
    assert Lock.read(lock_path).calls == {}
    lines = warnings()
    assert len(lines) == 1 and "59 bad entries" in lines[0]


def test_where_nothing_could_be_timed_that_is_decided_once(lock_path, monkeypatch):
    refused = {"ok": False, "share": 0.0, "why": "refused: it is too large"}
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: None)
    monkeypatch.setattr("whet.worker.Worker.ask", lambda *_, **__: dict(refused))
    tune([(call(), 1)], Lock.read(lock_path), modes=("eager",))
    monkeypatch.setattr("whet.worker.Worker.ask", lambda *_, **__: pytest.fail("it was tuned again"))
    found = tune([(call(), 1)], Lock.read(lock_path), modes=("eager",))
    assert found.choices["eager"].table == {call().key: discover()["rms_norm"].stock}


def test_a_lock_of_an_older_format_is_tuned_again(lock_path, warnings):
    old = {"calls": {key(): entry(), key(16): entry(16)}, "plans": {}}
    lock_path.write_text(json.dumps({"format": 1, "machines": {HERE: old, "Other GPU": old}}))
    lock = Lock.read(lock_path)
    assert lock.table() == {} and len(lines := warnings()) == 1 and "older format (1)" in lines[0]
    lock.calls[key(32)] = entry(32)
    lock.save()
    assert set(part(lock_path)["calls"]) == {key(32)} and not warnings() and os.listdir(lock_path.parent) == ["whet.lock"]
    assert json.loads(lock_path.read_text())["machines"]["Other GPU"] == old, "other machines' parts are theirs"


@pytest.mark.parametrize("how", ["whole", "cut off"])
@pytest.mark.parametrize("when", ["before it is read", "before it is saved"])
def test_what_a_newer_whet_wrote_is_left_alone(when, how, lock_path, warnings, auto):
    newer = json.dumps({"format": FORMAT + 1, "calls": "elsewhere"})[: -1 if how == "cut off" else None]
    if when == "before it is read":
        lock_path.write_text(newer)
    lock = Lock.read(lock_path)
    lock_path.write_text(newer)
    lock.calls[key()] = entry()
    lock.save()
    lock.save()
    auto()
    assert lock_path.read_text() == newer and os.listdir(lock_path.parent) == ["whet.lock"]
    assert lock.table() == {call().key: "eager"}
    assert len(lines := warnings()) == 1 and "newer" in lines[0]


def test_what_may_not_be_read_is_left_alone(lock_path, warnings, monkeypatch, auto):
    def denied(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    text = saved(lock_path).read_text()
    monkeypatch.setattr(lock_file, "read", denied)
    auto()
    lock = Lock.read(lock_path)
    lock.calls[key(16)] = entry(16)
    lock.save()
    assert lock_path.read_text() == text and os.listdir(lock_path.parent) == ["whet.lock"]
    assert len(lines := warnings()) == 1 and "Permission denied" in lines[0]


BROKEN = {"empty": "", "half": '{"format": 2, "machi', "list": "[]", "bytes": "\x00\x01", "brackets": "[" * 200_000,
          "closed brackets": '{"machines": ' + "[" * 200_000 + "]" * 200_000 + "}", "no machines": '{"format": 2}'}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_only_a_writer_sets_a_broken_file_aside_and_never_over_an_earlier_one(text, lock_path, warnings, auto):
    for n, name in enumerate(("whet.lock.bad", "whet.lock.bad.1", "whet.lock.bad.2")):
        lock_path.write_text(text)
        auto()
        lock = Lock.read(lock_path)
        assert lock_path.read_text() == text and len(os.listdir(lock_path.parent)) == n + 1, "a reader changes nothing"
        assert len(warnings()) == (n == 0)
        lock.calls[key()] = entry()
        lock.save()
        assert len(lines := warnings()) == 1 and lines[0].endswith(name)
        assert (lock_path.parent / name).read_text() == text and Lock.read(lock_path).calls == {key(): entry()}


@pytest.mark.parametrize("how", ["", " ", "FIFO", "directory", "device"])
def test_a_path_that_is_no_files_is_refused(how, tmp_path, monkeypatch, auto):
    os.mkfifo(tmp_path / "fifo")
    where = {"FIFO": str(tmp_path / "fifo"), "directory": str(tmp_path), "device": "/dev/null"}.get(how, how)
    monkeypatch.setenv("WHET_LOCK", where)
    for attempt in (Lock.read, auto, lambda: Lock.read(where)):
        with pytest.raises(ValueError, match=f"{how} {where}" if how.strip() else "must name a file"):
            attempt()
    done = CliRunner().invoke(app, ["optimize", "tiny-llama:tiny"])
    assert done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1 and "WHET_LOCK" in done.stderr


def test_no_flipped_byte_serves_another_choice(lock_path, capsys, monkeypatch):
    lock = Lock(lock_path)
    for n in (8, 9, 10, 24):
        lock.calls[key(n)] = entry(n, chosen="torch" if n % 2 else "eager")
    lock.calls[key(11)] = entry(11, chosen=None)
    lock.save()
    table, content, chance, kept = lock.table(), lock_path.read_bytes(), random.Random(1), 0
    for _ in range(400):
        flipped = bytearray(content)
        for _ in range(chance.choice((1, 1, 2))):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        monkeypatch.setattr(lock_file, "read", lambda _, flipped=flipped: bytes(flipped))
        found = Lock.read(lock_path)
        assert found.table().items() <= table.items()
        assert all(e == lock.calls[k] for k, e in found.calls.items())
        kept += len(found.calls)
    assert kept > 0.6 * 400 * len(lock.calls), "what was not hit is kept"


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_what_is_whole_in_a_file_that_is_cut_off_is_used_and_kept(cut, lock_path, warnings):
    saved(lock_path, *range(10))
    data = json.loads(lock_path.read_text())
    data["machines"] = {"Other GPU": {"calls": {"a": {"as": {"it": "was"}}}}} | data["machines"]
    text = render(data)
    lock_path.write_text(text[: int(cut * len(text))])
    lock = Lock.read(lock_path)
    assert 10 * cut - 2 < len(lock.calls) < 10 and all(e == entry(e["call"]["case"]["M"]) for e in lock.calls.values())
    assert len(warnings()) == 1
    lock.save()
    assert Lock.read(lock_path).calls == lock.calls and (lock_path.parent / "whet.lock.bad").exists()
    assert json.loads(lock_path.read_text())["machines"]["Other GPU"] == data["machines"]["Other GPU"]


def test_reading_takes_little_more_than_parsing(lock_path):
    """Every process that uses impl="auto" reads the lock once."""
    lock = Lock(lock_path)
    lock.calls.update({key(n): entry(n) for n in range(1000)})
    lock.save()
    parse = min(timeit.repeat(lambda: json.loads(lock_path.read_bytes()), number=1, repeat=3))
    assert min(timeit.repeat(lambda: Lock.read(lock_path), number=1, repeat=3)) < 6 * parse


@pytest.mark.parametrize(
    ("own_ms", "mode", "chosen"), [(0.495, "graph", "compile"), (0.48, "graph", "triton"), (0.495, "eager", "triton")]
)
def test_a_kernel_that_saves_less_than_its_launch_gives_way_to_the_formula_in_compiled_code(own_ms, mode, chosen):
    lock, made = Lock(None), entry(chosen="triton", mode=mode)
    made["candidates"] |= {"compile": made["candidates"]["eager"], "triton": made["candidates"]["eager"] | {"ms": own_ms}}
    lock.calls[key(mode=mode)] = made
    assert lock.worth_launching({call().key: "triton"}, mode) == {call().key: chosen}


def test_a_formula_that_was_not_verified_does_not_take_a_kernels_place_in_compiled_code():
    lock, made = Lock(None), entry(chosen="triton", mode="graph")
    made["candidates"]["triton"] = made["candidates"]["eager"] | {"ms": 0.499}
    lock.calls[key(mode="graph")] = made
    assert lock.worth_launching({call().key: "triton"}, "graph") == {call().key: "triton"}
