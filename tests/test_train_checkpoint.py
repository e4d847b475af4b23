"""Checkpoints: exact resumes, refusals in one line, and a writer that may be killed at any point."""

import errno
import json
import os
import random
import resource
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import python
from safetensors.torch import load_file
from torch import nn

from whet.train.checkpoint import NEEDED, CheckpointError, fault, inspect, load, newest, remove_after, save
from whet.train.optim import Ema, make
from whet.train.schedule import Schedule, set_lr


class Tiny(nn.Module):
    """Embedding, one hidden layer, dropout, a head that is the embedding."""

    def __init__(self, width: int = 8, tied: bool = True, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, width)
        self.hidden, self.drop = nn.Linear(width, width), nn.Dropout(0.3)
        self.out = nn.Linear(width, 7, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3, dtype=torch.bool))
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens):
        self.seen += 1
        return nn.functional.cross_entropy(self.out(self.drop(torch.tanh(self.hidden(self.embed(tokens))))).float(), tokens)


MAKES = {
    "adamw": lambda m: make(m, lr=1e-2),
    "muon": lambda m: make(m, kind="muon", lr=1e-2),
    "masters": lambda m: make(m.bfloat16(), kind="muon", lr=1e-2, master=True),
    "torch.AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "torch.SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
}


def train(model, optimizer, steps, ema=None) -> list[float]:
    """Tokens come of NumPy, one weight of the loss of Python, dropout of torch: all three must be as they were."""
    losses = []
    for i in steps:
        set_lr(optimizer, Schedule("cosine", lr=1e-2, warmup=2, steps=12), i)
        optimizer.zero_grad()
        loss = model(torch.from_numpy(np.random.randint(0, 7, 5))) * random.gauss(1.0, 0.1)
        loss.backward()
        optimizer.step()
        if ema is not None:
            ema.update()
        losses.append(loss.item())
    return losses


def saved(folder, steps=(1,), **changes) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tiny()
    optimizer = make(model)
    for step in steps:
        train(model, optimizer, [step])
        save(folder, step, model, optimizer, {"tokens": step * 5}, **changes)
    return model, optimizer


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("kind", MAKES)
def test_a_resumed_run_has_the_losses_of_one_that_was_never_interrupted(kind, tmp_path):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    model = Tiny()
    optimizer = MAKES[kind](model)
    ema = Ema(model, 0.9, optimizer)
    train(model, optimizer, range(4), ema)
    save(tmp_path, 4, model, optimizer, {"tokens": 20, "data": {"epoch": 0, "index": 4}}, ema)
    whole = train(model, optimizer, range(4, 10), ema)

    other = Tiny(seed=99)
    resumed = MAKES[kind](other)
    average = Ema(other, 0.9, resumed)
    state = load(newest(tmp_path), other, resumed, average)
    assert state == {"tokens": 20, "data": {"epoch": 0, "index": 4}, "step": 4}
    assert train(other, resumed, range(4, 10), average) == whole
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    assert all(torch.equal(ema.tensors[k], average.tensors[k]) for k in ema.tensors)
    assert other.out.weight is other.embed.weight


def test_files_are_read_by_safetensors_and_json_and_tied_weights_are_there_once(tmp_path):
    model, optimizer = saved(tmp_path)
    path = tmp_path / "step-00000001"
    assert names(path) == ["done.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]
    weights = load_file(path / "model.safetensors")
    assert sorted(weights) == ["embed.weight", "hidden.bias", "hidden.weight", "nothing", "seen"]
    own = model.state_dict()
    assert all(torch.equal(t, own[k]) and t.dtype == own[k].dtype for k, t in weights.items())
    stored = load_file(path / "optimizer.safetensors")
    params = [p for g in optimizer.param_groups for p in g["params"]]
    assert torch.equal(stored["1.exp_avg_sq"], optimizer.state[params[1]]["exp_avg_sq"]) and stored["0.step"].item() == 1
    doc = json.loads((path / "state.json").read_text())
    assert doc["tied"] == {"out.weight": "embed.weight"} and doc["step"] == 1 and doc["format"] == 1
    assert doc["optimizer"]["parameters"] == ["embed.weight", "hidden.weight", "hidden.bias"]
    assert not fault(path)


def test_strided_and_overlapping_weights_are_saved_each_as_it_is(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    model = with_buffers(columns=whole.T, part=whole[1:])
    path = save(tmp_path, 1, model, make(model), {})
    weights = load_file(path / "model.safetensors")
    assert torch.equal(weights["columns"], whole.T) and torch.equal(weights["part"], whole[1:])


def test_load_fills_the_memory_that_is_there_so_that_a_captured_graph_stays_valid(tmp_path):
    saved(tmp_path)
    model = Tiny(seed=3)
    optimizer = make(model)
    group = optimizer.param_groups[0]
    group["lr"], group["capturable"] = torch.tensor(7.0), "of this machine"

    def places():
        held = [t for state in optimizer.state.values() for t in state.values()]
        return [t.data_ptr() for t in (*model.parameters(), *held, group["lr"])]

    before = places()
    load(newest(tmp_path), model, optimizer)
    assert places() == before and optimizer.param_groups[0] is group
    assert group["capturable"] == "of this machine" and group["betas"] == (0.9, 0.95) and 0 < group["lr"] < 1e-2


def test_weights_alone_leave_random_numbers_alone(tmp_path):
    model, _ = saved(tmp_path)
    other = Tiny(seed=3)
    before = torch.get_rng_state()
    assert load(newest(tmp_path), other, None)["tokens"] == 5
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(other.out.weight, model.out.weight)


def test_the_newest_are_kept_none_of_a_later_step_is_removed_and_one_saved_again_is_replaced(tmp_path):
    model, optimizer = saved(tmp_path, range(1, 6), keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    save(tmp_path, 3, model, optimizer, {}, keep=1)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    save(tmp_path, 6, model, optimizer, {}, keep=None)
    assert newest(tmp_path).name == "step-00000006"
    assert remove_after(tmp_path, 4) == ["step-00000006", "step-00000005"] and newest(tmp_path).name == "step-00000004"
    path = save(tmp_path, 4, model, optimizer, {"tokens": 6})
    assert names(tmp_path) == ["step-00000003", "step-00000004"] and load(path, model, optimizer) == {"tokens": 6, "step": 4}


def truncate(path: Path) -> None:
    os.truncate(path / "model.safetensors", 100)


def flip(path: Path) -> None:
    content = (path / "optimizer.safetensors").read_bytes()
    (path / "optimizer.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def done(text: str):
    return lambda path: (path / "done.json").write_text(text)


FAULTS = {
    "missing done.json": (lambda p: (p / "done.json").unlink(), "it is torn: done.json is missing"),
    "missing file": (lambda p: (p / "rng.safetensors").unlink(), "it is torn: rng.safetensors is missing"),
    "truncated": (truncate, "it is torn: model.safetensors has 100 of"),
    "another bit": (flip, "it is damaged: optimizer.safetensors has another sha256"),
    "newer format": (done('{"format": 2, "files": []}'), "it has format 2, and this whet reads formats up to 1: update whet"),
    "done.json is no JSON": (done("{"), "it cannot be read: JSONDecodeError"),
    "done.json is a list": (done("[]"), "it cannot be read: TypeError"),
    "files are missing": (done('{"format": 1, "files": {}}'), "done.json does not list the files of a checkpoint: model."),
    "a file elsewhere": (done(json.dumps({"format": 1, "files": [*NEEDED, "../a"]})), "done.json does not list the files"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_faulty_checkpoint_is_skipped_and_refused_in_one_line_that_names_the_newest_good_one(case, tmp_path):
    model, optimizer = saved(tmp_path, (1, 2, 3))
    bad, (break_it, words) = tmp_path / "step-00000003", FAULTS[case]
    break_it(bad)
    said = []
    assert newest(tmp_path, said.append) == tmp_path / "step-00000002"
    assert len(said) == 1 and said[0].startswith(f"checkpoint: {bad} is skipped: {words}")
    with pytest.warns(UserWarning, match="step-00000003 is skipped: "):
        newest(tmp_path)
    with pytest.raises(CheckpointError) as e:
        load(bad, model, optimizer)
    assert str(e.value).startswith(f"checkpoint: {bad} is refused: {words}") and "\n" not in str(e.value)
    assert str(e.value).endswith("; the newest good one there is step-00000002")
    assert inspect(bad)["fault"].startswith(words)


def test_a_folder_without_a_good_one_says_so(tmp_path):
    assert newest(tmp_path) is None and newest(tmp_path / "none") is None
    model, optimizer = saved(tmp_path)
    truncate(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="; there is no other good one there$"):
        load(tmp_path / "step-00000001", model, optimizer)
    with pytest.raises(CheckpointError, match="step-00000009 is refused: there is no such folder; "):
        load(tmp_path / "step-00000009", model, optimizer)


def with_buffers(**buffers: torch.Tensor | None) -> Tiny:
    model = Tiny()
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


@pytest.mark.parametrize("other, words", [
    (lambda: Tiny(width=4), r"embed.weight has shape \(7, 8\) in model.safetensors and \(7, 4\) in the model"),
    (lambda: Tiny(tied=False), "out.weight is tied to embed.weight in the checkpoint and not so in the model"),
    (lambda: with_buffers(more=torch.zeros(2)), "the model has more, which model.safetensors does not have"),
    (lambda: with_buffers(nothing=None), "model.safetensors has nothing, which the model does not have"),
    (lambda: Tiny().bfloat16(), "embed.weight is F32 in model.safetensors and BF16 in the model"),
])
def test_a_checkpoint_of_another_model_is_refused_by_its_first_difference(other, words, tmp_path):
    saved(tmp_path, (1, 2))
    model = other()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = make(model)
    with pytest.raises(CheckpointError, match=f"step-00000002 is refused: {words}; there is no other good one there$"):
        load(tmp_path / "step-00000002", model, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    save(tmp_path, 1, model, optimizer, {})
    with pytest.raises(CheckpointError, match="; the newest good one there is step-00000001$"):
        load(tmp_path / "step-00000002", model, optimizer)


@pytest.mark.parametrize("other, words", [
    (lambda m: make(m, kind="muon"), "parameter 0 of its MuonAdamW is embed.weight, and of this MuonAdamW hidden.weight"),
    (lambda m: torch.optim.AdamW(m.parameters()), r"its MuonAdamW has groups of \[2, 1\] parameters, and this AdamW of \[3\]"),
])
def test_the_state_of_another_optimizer_is_refused(other, words, tmp_path):
    saved(tmp_path)
    model = Tiny(seed=4)
    with pytest.raises(CheckpointError, match=f"is refused: {words}"):
        load(newest(tmp_path), model, other(model))


def test_masters_are_not_loaded_where_there_are_none(tmp_path):
    model = Tiny().bfloat16()
    path = save(tmp_path, 1, model, make(model, master=True), {})
    with pytest.raises(CheckpointError, match="optimizer.safetensors has 0.master, which this MuonAdamW does not have"):
        load(path, model, make(model))


def test_averaged_weights_must_be_taken_and_must_be_there(tmp_path):
    model, optimizer = saved(tmp_path)
    ema = Ema(model)
    with pytest.raises(CheckpointError, match="it has no averaged weights, and ema= is given"):
        load(newest(tmp_path), model, optimizer, ema)
    path = save(tmp_path, 2, model, optimizer, {}, ema)
    with pytest.raises(CheckpointError, match="it has averaged weights, and no ema= is given; the newest good one there is "):
        load(path, model, optimizer)
    assert load(path, model, None) == {"step": 2} == load(path, model, None, ema)


def test_inspect_says_what_is_there(tmp_path):
    saved(tmp_path)
    found = inspect(path := tmp_path / "step-00000001")
    assert found["fault"] == "" and found["step"] == 1 and found["state"] == {"tokens": 5} and found["optimizer"] == "MuonAdamW"
    assert found["tensors"]["hidden.weight"] == ["F32", [8, 8]] and found["groups"][0]["rule"] == "adamw"
    assert found["bytes"] == sum(p.stat().st_size for p in path.iterdir()) and json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("again", [False, True], ids=["new step", "step again"])
@pytest.mark.parametrize("at", range(7))
def test_a_full_disk_is_one_line_and_leaves_the_earlier_ones(at, again, tmp_path, monkeypatch):
    """No space at one of the six fsyncs of a save, or at the rename after them."""
    model, optimizer = saved(tmp_path, (1, 2), keep=2)
    calls = []

    def full(real):
        def call(*args):
            calls.append(real.__name__)
            if len(calls) == at + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)
        return call

    for real in (os.fsync, os.rename):
        monkeypatch.setattr(os, real.__name__, full(real))
    where = tmp_path / ("step-00000002" if again else "step-00000003")
    with pytest.raises(CheckpointError) as e:
        save(tmp_path, 2 if again else 3, model, optimizer, {"tokens": -1}, keep=2)
    words = "could not be written: No space left on device; the newest good one there is step-00000002; once there is room"
    assert (str(e.value), calls[at]) == (f"checkpoint: {where} {words}, --resume goes on from it", ("fsync", "rename")[at == 6])
    assert names(tmp_path) == ["step-00000001", "step-00000002"] and not fault(tmp_path / "step-00000001")
    assert load(newest(tmp_path), model, optimizer) == {"step": 2, "tokens": 10}


def test_a_limit_on_the_size_of_files_leaves_no_partial_folder(tmp_path):
    model, optimizer = saved(tmp_path, (1, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, limits[1]))
    try:
        with pytest.raises(CheckpointError) as e:
            save(tmp_path, 3, model, optimizer, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "could not be written: File too large; the newest good one there is step-00000002; once" in str(e.value)
    assert names(tmp_path) == ["step-00000001", "step-00000002"] and newest(tmp_path).name == "step-00000002"


@pytest.mark.parametrize("arguments, words", [
    (dict(step=-1), "step must be at least 0 and keep at least 1 or None, got step=-1, keep=3"),
    (dict(keep=0), "got step=7, keep=0"),
    (dict(state=[1]), "state must be a dict, got list"),
    (dict(state={"x": torch.zeros(1)}), "state and optimizer settings must be what JSON holds: Object of type Tensor"),
])
def test_what_cannot_be_saved_is_refused_before_anything_is_written(arguments, words, tmp_path):
    model = Tiny()
    with pytest.raises(ValueError, match=f"^checkpoint: .*{words}"):
        save(**dict(folder=tmp_path / "new", step=7, model=model, optimizer=make(model), state={}) | arguments)
    assert not (tmp_path / "new").exists()


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_train_checkpoint import saved
from whet.train import checkpoint

def kill_at(n):
    left = [n]
    def counted(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    packed = checkpoint.packed
    def parts(tensors, elsewhere=None, file=""):
        for part in packed(tensors, elsewhere, file):
            yield part[: len(part) // 2]
            counted(bytes)()
            yield part[len(part) // 2 :]
    checkpoint.packed = parts

before = Path({folder!r}) / "before"
model, optimizer = saved(before, (1, 2), keep=2)
for step in (3, 2):
    for n in range(1000):
        folder = shutil.copytree(before, before.with_name(f"save-{{step}}-killed-at-{{n:03d}}"))
        child = os.fork()
        if not child:
            kill_at(n)
            checkpoint.save(folder, step, model, optimizer, {{"tokens": -1}}, keep=2)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            break
print("ended")
"""


def test_a_writer_killed_at_any_point_leaves_an_intact_checkpoint_and_the_next_one_cleans_up(tmp_path):
    """SIGKILL before each mkdir, fsync, rename, unlink and rmdir of save, and amid each tensor: a new step, and one again."""
    script = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    out = python("-c", script).communicate()[0]
    assert out.endswith("ended\n"), out
    ends = set()
    for folder in sorted(tmp_path.glob("save-*")):
        step = int(folder.name.split("-")[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing torn is met
            found = newest(folder)
        model = Tiny(seed=9)
        state = load(found, model, optimizer := make(model))
        assert state in ({"step": 2, "tokens": 10}, {"step": step, "tokens": -1})
        ends.add((step, state["tokens"]))
        save(folder, 4, model, optimizer, {}, keep=3)
        assert all(name.startswith("step-") and not fault(folder / name) for name in names(folder))
    assert ends == {(2, 10), (2, -1), (3, 10), (3, -1)} and len(names(tmp_path)) > 40


def test_leftovers_that_are_good_come_back_where_their_place_is_bad(tmp_path):
    model, optimizer = saved(tmp_path, (1, 2))
    shutil.copytree(tmp_path / "step-00000002", tmp_path / f".step-00000002-{'0' * 16}.tmp")
    truncate(tmp_path / "step-00000002")
    save(tmp_path, 3, model, optimizer, {})
    assert names(tmp_path) == [f"step-0000000{i}" for i in (1, 2, 3)] and not fault(tmp_path / "step-00000002")
