"""Checkpoints of a training run: written whole or not at all, verified before they are read, without pickle.

    save(folder, step, model, optimizer, state)      # folder/step-00000100; the newest 3 are kept
    state = load(newest(folder), model, optimizer)   # weights, optimizer and random numbers as they were

A checkpoint is a folder: model.safetensors, optimizer.safetensors, rng.safetensors, ema.safetensors where weights are averaged,
state.json, and done.json with the sha256 of each. It is written under a temporary name beside its place and renamed when every
file is on the disk, so a writer that is killed leaves what was there, and the next one removes what it left.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from whet.lock_file import only_writer
from whet.padding import cut, logical_shapes
from whet.train.optim import Ema, describe, restore, state_tensors
from whet.train.stored import CheckpointError, StoredTensors, packed

FORMAT = 1
MODEL, OPTIMIZER, RNG, EMA = (f"{name}.safetensors" for name in ("model", "optimizer", "rng", "ema"))
STATE, DONE = "state.json", "done.json"
GO_ON = "once there is room, --resume goes on from it"
NEEDED = {MODEL, OPTIMIZER, RNG, STATE}
NAME, TEMPORARY = re.compile(r"step-(\d{8,})"), re.compile(r"\.step-(\d{8,})-[0-9a-f]{16}\.tmp")
def save(
    folder: str | Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, ema: Ema | None = None,
    keep: int | None = 3, elsewhere: StoredTensors | None = None,
) -> Path:
    """Write the checkpoint of a step; the folder that it is.

    state       what the loop wants back: tokens, position in the data, losses, choices, recipe; anything that JSON holds
    keep        how many of the newest stay; None: all. None is removed before the new one is complete
    elsewhere   has the values of tensors that are sharded over processes, each as file/name
    """
    folder, where = Path(folder), Path(folder) / f"step-{step:08d}"
    if isinstance(step, bool) or not isinstance(step, int) or step < 0 or keep is not None and keep < 1:
        raise ValueError(f"checkpoint: step must be at least 0 and keep at least 1 or None, got step={step!r}, keep={keep!r}")
    if not isinstance(state, dict):
        raise ValueError(f"checkpoint: state must be a dict, got {type(state).__name__}")
    weights, tied = _weights(model)
    doc = {"format": FORMAT, "step": step, "state": state, "tied": tied, "ema": None if ema is None else {"decay": ema.decay}}
    try:
        text = json.dumps(doc | {"optimizer": describe(model, optimizer)}, indent=1).encode()
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"checkpoint: state and optimizer settings must be what JSON holds: {e}") from None
    tensors = state_tensors(optimizer, model)
    contents = {MODEL: packed(weights, elsewhere, MODEL), OPTIMIZER: packed(tensors, elsewhere, OPTIMIZER)}
    contents[RNG] = packed(_random_states())
    if ema is not None:
        contents[EMA] = packed(_averages(ema, model), elsewhere, EMA)
    contents[STATE] = iter([text])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with only_writer(where) as alone:
            with contextlib.suppress(OSError):
                _recover(folder, alone)
            _write_folder(where, step, contents)
            with contextlib.suppress(OSError):
                _prune(folder, step, keep)
    except OSError as e:
        left = newest(folder, lambda line: None)
        kept = f"the newest good one there is {left.name}; {GO_ON}" if left else "there is no earlier one"
        raise CheckpointError(f"checkpoint: {where} could not be written: {e.strerror or e}; {kept}") from None
    return where


def _write_folder(where: Path, step: int, contents: Mapping[str, Iterator]) -> None:
    temporary, aside = _temporary(where), _temporary(where)
    try:
        temporary.mkdir()
        files = {name: _write(temporary / name, parts) for name, parts in contents.items()}
        _write(temporary / DONE, iter([json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1).encode()]))
        _sync(temporary)
        if where.exists():
            os.rename(where, aside)
        os.rename(temporary, where)
        _sync(where.parent)
    except BaseException:
        if aside.exists() and not where.exists():
            os.rename(aside, where)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if aside.exists():
        with contextlib.suppress(OSError):
            _remove(aside)


def _temporary(where: Path) -> Path:
    return where.with_name(f".{where.name}-{secrets.token_hex(8)}.tmp")


def _write(path: Path, parts: Iterator) -> dict:
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as f:
        for part in parts:
            f.write(part)
            digest.update(part)
            size += len(part)
        f.flush()
        os.fsync(f.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers, each once, and the other names of those that are tied."""
    kept: dict[str, Tensor] = {}
    first: dict[tuple, str] = {}
    tied: dict[str, str] = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if not isinstance(t, Tensor):
            raise CheckpointError(f"checkpoint: {name} of the model is a {type(t).__name__}, no tensor; give it in `state`")
        same = (id(t),) if t._base is None else (id(t._base), t.shape, t.stride(), t.storage_offset())  # cut from a padded one
        if same in first:
            tied[name] = first[same]
        else:
            first[same], kept[name] = name, t
    return kept, tied


def _averages(ema: Ema, model: nn.Module) -> dict[str, Tensor]:
    """Averaged weights, those of parameters that are stored padded cut to their logical shape."""
    shapes = logical_shapes(model)
    return {name: cut(t, shapes.get(id(ema.params[name]), t.shape)) for name, t in ema.tensors.items()}


def _random_states() -> dict[str, Tensor]:
    """The default generators of torch (CPU, every GPU), Python and NumPy, as bytes."""
    numpy: Any = np.random.get_state()
    others = {"python": random.getstate(), "numpy": [numpy[0], numpy[1].tolist(), *numpy[2:]]}
    found = {name: torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8) for name, value in others.items()}
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return found | {"torch": torch.get_rng_state()} | {f"cuda.{i}": t for i, t in enumerate(gpus)}


def _set_random_states(saved: Mapping[str, Tensor]) -> None:
    version, numbers, gauss = json.loads(bytes(saved["python"].tolist()))
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = json.loads(bytes(saved["numpy"].tolist()))
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    for i in range(torch.cuda.device_count()):
        if f"cuda.{i}" in saved:
            torch.cuda.set_rng_state(saved[f"cuda.{i}"], i)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Every checkpoint, torn ones too, the newest first; of one step that under its own name first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            if match := NAME.fullmatch(name):
                found.append((int(match[1]), 1, name))
            elif (match := TEMPORARY.fullmatch(name)) and (folder / name / DONE).exists():
                found.append((int(match[1]), 0, name))
    return [(step, folder / name) for step, _, name in sorted(found, reverse=True)]


def _recover(folder: Path, alone: bool) -> None:
    """What killed writers left is removed, or put in its place where it is complete and its place has nothing good."""
    for name in os.listdir(folder) if alone else ():
        if not (match := TEMPORARY.fullmatch(name)):
            continue
        left, where = folder / name, folder / f"step-{match[1]}"
        if (left / DONE).exists() and fault(where) and not fault(left):
            if where.exists():
                _remove(where)
            os.rename(left, where)
        else:
            _remove(left)


def _remove(path: Path) -> None:
    """First out of sight, then no longer complete, then gone: whoever looks meanwhile meets no torn checkpoint."""
    if not TEMPORARY.fullmatch(path.name):
        hidden = _temporary(path)
        os.rename(path, hidden)
        path = hidden
    if not path.is_dir():  # someone's file by the name of a checkpoint
        return path.unlink()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / DONE)
    shutil.rmtree(path)


def _prune(folder: Path, step: int, keep: int | None) -> None:
    complete = [path for at, path in _found(folder) if at <= step and NAME.fullmatch(path.name) and (path / DONE).exists()]
    for path in complete[keep:] if keep is not None else ():
        _remove(path)


def remove_after(folder: str | Path, step: int) -> list[str]:
    """Remove the checkpoints of later steps, for a run that goes on from an earlier one; their names."""
    later = [path for at, path in _found(Path(folder)) if at > step]
    for path in later:
        _remove(path)
    return [path.name for path in later]


def fault(path: str | Path) -> str:
    """Why a checkpoint cannot be trusted: torn, changed, of a newer format. Empty where it is intact; reads every byte."""
    path = Path(path)
    if not path.is_dir():
        return "there is no such folder"
    try:
        done = json.loads((path / DONE).read_bytes())
        version, files = done["format"], done["files"]
        if version > FORMAT:
            return f"it has format {version}, and this whet reads formats up to {FORMAT}: update whet"
        if wrong := sorted(NEEDED - set(files)) + sorted(set(files) - NEEDED - {EMA}):
            return f"{DONE} does not list the files of a checkpoint: {wrong[0]}"
        for name, facts in files.items():
            size = os.stat(path / name).st_size
            if size != facts["bytes"]:
                return f"it is torn: {name} has {size:,} of {facts['bytes']:,} bytes"
            if _sha256(path / name) != facts["sha256"]:
                return f"it is damaged: {name} has another sha256 than when it was written"
    except FileNotFoundError as e:
        return f"it is torn: {Path(e.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"it cannot be read: {type(e).__name__}: {e}"
    return ""


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    with open(path, "rb", buffering=0) as f:
        while n := f.readinto(buffer):
            digest.update(buffer[:n])
    return digest.hexdigest()


def newest(
    folder: str | Path, say: Callable[[str], Any] = warnings.warn, fits: Callable[[Path], bool] = lambda path: True,
) -> Path | None:
    """The newest checkpoint that is complete and intact; None where there is none.

    say    is told, in a line each, which were skipped and why
    fits   a further condition
    """
    for _, path in _found(Path(folder)):
        if why := fault(path):
            say(f"checkpoint: {path} is skipped: {why}")
        elif fits(path):
            return path
    return None


def _refused(path: Path, why: str, fits: Callable[[Path], bool] = lambda path: True) -> CheckpointError:
    other = newest(path.parent, lambda line: None, lambda p: p.name != path.name and fits(p))
    return CheckpointError(f"checkpoint: {path} is refused: {why}; " + (
        f"the newest good one there is {other.name}" if other else "there is no other good one there"
    ))


def _foreign(path: Path, model: nn.Module) -> str:
    """How the weights differ from the model's; empty where they fit."""
    weights, tied = _weights(model)
    saved = json.loads((path / STATE).read_bytes())["tied"]
    for name in sorted({*tied, *saved}):
        if tied.get(name) != saved.get(name):
            where, other = ("model", "checkpoint") if name in tied else ("checkpoint", "model")
            return f"{name} is tied to {tied.get(name) or saved[name]} in the {where} and not so in the {other}"
    return StoredTensors(path / MODEL).misfit(weights, "the model")


def _optimizer_differs(saved: dict, stored: StoredTensors, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    mine = describe(model, optimizer)
    theirs, this = saved["kind"], mine["kind"]
    for i, pair in enumerate(zip_longest(saved["parameters"], mine["parameters"], fillvalue="none")):
        if pair[0] != pair[1]:
            return f"parameter {i} of its {theirs} is {pair[0]}, and of this {this} {pair[1]}"
    counts = [[group["params"] for group in described["groups"]] for described in (saved, mine)]
    if counts[0] != counts[1]:
        return f"its {theirs} has groups of {counts[0]} parameters, and this {this} of {counts[1]}"
    tensors = state_tensors(optimizer, model)
    return stored.misfit(tensors, f"this {this}") if tensors else ""


def _ema_differs(stored: StoredTensors | None, ema: Ema | None, model: nn.Module) -> str:
    if stored is None or ema is None:
        has, given = ("has averaged", "no ema= is given") if stored is not None else ("has no averaged", "ema= is given")
        return "" if stored is ema else f"it {has} weights, and {given}"
    return stored.misfit(_averages(ema, model), "the average")


def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, ema: Ema | None = None,
    fill_sharded: Callable[[Path, Mapping[str, Tensor]], Collection[str]] = lambda path, wanted: (),
) -> dict:
    """Weights, optimizer, averages and random numbers as they were; the state that save was given, and the step.

    optimizer      None: the weights alone, as for generation, and the averages where ema= is given
    fill_sharded   fills those of these tensors that are sharded over processes from a file of the checkpoint; their names
    Every tensor is filled in the memory that it has. Nothing is changed where anything does not fit.
    """
    path = Path(path)
    if why := fault(path):
        raise _refused(path, why)
    try:
        doc = json.loads((path / STATE).read_bytes())
        if why := _foreign(path, model):
            raise _refused(path, why, lambda p: not _foreign(p, model))
        weights, optimizer_state, states = (StoredTensors(path / name) for name in (MODEL, OPTIMIZER, RNG))
        average = StoredTensors(path / EMA) if (path / EMA).exists() else None
        why = "" if optimizer is None else _optimizer_differs(doc["optimizer"], optimizer_state, model, optimizer)
        if optimizer is not None or ema is not None:
            why = why or _ema_differs(average, ema, model)
        if why:
            raise _refused(path, why)
        with torch.no_grad():
            mine = _weights(model)[0]
            weights.into(mine, fill_sharded(path / MODEL, mine))
            if average is not None and ema is not None:
                averages = _averages(ema, model)
                average.into(averages, fill_sharded(path / EMA, averages))
            if optimizer is not None:
                filled = fill_sharded(path / OPTIMIZER, state_tensors(optimizer, model))
                restore(optimizer, doc["optimizer"], optimizer_state.but(filled), model)
                _set_random_states(states.but())
    except (SafetensorError, KeyError, json.JSONDecodeError) as e:
        raise _refused(path, f"it is no checkpoint of whet's: {type(e).__name__}: {e}") from None
    return doc["state"] | {"step": doc["step"]}


def state_of(path: str | Path) -> dict:
    """The state that save was given, alone, of a checkpoint without a fault."""
    return json.loads((Path(path) / STATE).read_bytes())["state"]


def inspect(path: str | Path) -> dict:
    """What a checkpoint holds, also a damaged one, as far as it can be read; its `fault` says what is wrong with it."""
    path = Path(path)
    found: dict[str, Any] = {"path": str(path), "fault": fault(path)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        doc = json.loads((path / STATE).read_bytes())
        found |= {k: doc[k] for k in ("format", "step", "state", "tied", "ema")}
        found |= {"optimizer": doc["optimizer"]["kind"], "groups": doc["optimizer"]["groups"]}
    with contextlib.suppress(OSError, SafetensorError):
        found["files"] = {p.name: p.stat().st_size for p in sorted(path.iterdir())}
        found["bytes"] = sum(found["files"].values())
        found["tensors"] = {k: [dtype, shape] for k, (shape, dtype) in StoredTensors(path / MODEL).facts.items()}
    return found
