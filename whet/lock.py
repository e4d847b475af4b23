"""whet.lock: what was verified, measured and chosen, per machine. Readable, committable JSON.

{"format": 2, "machines": {machine key: {
    "calls": {"<call> @ <mode>": entry}, "plans": {target: result}, "decoders": {shape: verdict},
    "swaps": {group or model: decision}}}}
A result is found by GPU name and versions, so nothing stale is ever reused. Every entry has a checksum and is validated when
it is read; a bad one is dropped alone. Anyone may read; only tune.py saves.
"""

import contextlib
import hashlib
import json
import marshal
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from whet import lock_file, machine
from whet.lock_faults import FAULTS, usable
from whet.op import base, discover
from whet.source import fingerprint

FORMAT = 2
FEW = 5  # so many bad entries get a line each; more are counted in one line
LAUNCH_MS = 0.01  # of the host's time, for one kernel that compiled code launches
NOT_KEPT = "it stays as it is, and what is tuned now is not kept"


def lock_path(path: str | Path | None = None) -> Path:
    """Where the lock is: the path given, else $WHET_LOCK, else ./whet.lock."""
    given = os.environ.get("WHET_LOCK", "whet.lock") if path is None else path
    if not str(given).strip():
        what = "WHET_LOCK" if path is None else "the lock's path"
        raise ValueError(f"{what} must name a file, got {given!r}; give one, or unset WHET_LOCK for ./whet.lock")
    return Path(given)


def say(line: str) -> None:
    print(f"whet: {line}", file=sys.stderr)


_said: set[tuple[str, str]] = set()


def _say_once(path: Path, line: str) -> None:
    """A line about a file, once in this process."""
    if (key := (os.path.realpath(path), line)) not in _said:
        _said.add(key)
        say(f"{path} {line}")


class Untouchable(Exception):
    """What is there may not be read, or a newer whet wrote it: nobody sets it aside or writes over it."""


def load(path: Path) -> tuple[dict | None, str]:
    """What the file holds, its entries not yet checked, and why it is broken, if it is; None where there is no file."""
    try:
        content = lock_file.read(path)
    except OSError as e:
        raise Untouchable(f"cannot be read ({e.strerror})") from None
    if content is None:
        return None, ""
    text, broken = content.decode(errors="replace"), ""  # a byte that is no UTF-8 damages one entry: its checksum finds it
    try:
        data = json.loads(text, strict=False)
    except RecursionError:
        data, broken = salvage(text), "is no lock (brackets nested too deeply)"
    except ValueError as e:
        data, broken = salvage(text), f"is not JSON ({e})"
    if not isinstance(data, dict):
        return {"machines": {}}, "is no lock (it holds no object)"
    written = data.get("format")
    if isinstance(written, (int, float)) and written > FORMAT:
        raise Untouchable(f"was written by a newer whet (its format is {written}, this one's {FORMAT})")
    if not isinstance(data.get("machines"), dict):
        return {"machines": {}}, "is no lock (it has no machines)"
    return data, broken


def salvage(text: str) -> dict:
    """What is whole in a file that is no longer JSON, found by how render() lays it out. Checksums show whether it is right."""
    machines: dict[str, dict] = {}
    who = section = ""
    for found in re.finditer(r'^( {2,4})("(?:[^"\\\n]|\\.)*"): (\{(?:\n {5}.*)*\n {4}\})?', text, re.M):
        with contextlib.suppress(ValueError, RecursionError):
            name = json.loads(found[2], strict=False)
            if len(found[1]) == 2:
                who, section = name, ""
            elif len(found[1]) == 3:
                section = name
            elif found[3]:
                machines.setdefault(who, {}).setdefault(section, {})[name] = json.loads(found[3], strict=False)
    written = re.search(r'"format": *(\d{1,9})', text[:100])
    return {"format": int(written[1]) if written else FORMAT, "machines": machines}


def checksum(where: tuple[str, str, str], entry: dict) -> str:
    """Of an entry and of where it stands: machine, section, key. Spacing and line breaks of the JSON do not count.

    marshal takes a sixth of json's time, and every process that uses impl="auto" reads the lock; in its version 2 there are no
    references, so that equal values are equal bytes.
    """
    summed = [*where, {k: v for k, v in entry.items() if k != "checksum"}]
    try:
        content = marshal.dumps(summed, 2)
    except ValueError:  # a type that only json can write, such as torch's version
        content = marshal.dumps(json.loads(json.dumps(summed)), 2)
    return hashlib.sha256(content).hexdigest()[:16]


def edited(entry: dict, name: str) -> bool:
    """Whether a candidate was proved from another source than the one that is here."""
    op, proved = discover().get(entry.get("call", {}).get("op")), entry["candidates"].get(name, {}).get("source")
    return proved is not None and op is not None and base(name) in op.impls and proved != fingerprint(op, name)


class Checked(NamedTuple):
    """One section of a machine's part, validated."""

    entries: dict[str, dict]
    sums: dict[str, str]
    bad: dict[str, str]  # key: why it is dropped


def check(who: str, section: str, entries: object) -> Checked:
    """The entries that count, without their checksums, which come apart; and those that do not."""
    found = Checked({}, {}, {})
    if not isinstance(entries, dict):
        return found if entries is None else found._replace(bad={section: "it is no object"})
    for key, entry in entries.items():
        try:
            if type(entry) is not dict:
                fault = "it is no object"
            elif entry.get("checksum") != checksum((who, section, key), entry):
                fault = "its checksum does not match" if "checksum" in entry else "it has no checksum"
            else:
                fault = FAULTS[section](key, entry)
        except (RecursionError, ValueError):
            fault = "it is nested too deeply"
        if fault:
            found.bad[key] = fault
        else:
            found.sums[key] = entry.pop("checksum")
            found.entries[key] = entry
    return found


def render(value, depth: int = 6, indent: int = 0) -> str:
    """JSON with a field, a candidate or a plan on each line, so that a diff shows what changed."""
    if not depth or not value or type(value) not in (dict, list):
        return json.dumps(value)
    pad = "\n" + " " * (indent + 1)
    if type(value) is list:
        lines = [render(v, depth - 1, indent + 1) for v in value]
    else:
        lines = [f"{json.dumps(k)}: {render(v, depth - 1, indent + 1)}" for k, v in value.items()]
    begin, end = "[]" if type(value) is list else "{}"
    return f"{begin}{pad}{f',{pad}'.join(lines)}\n{' ' * indent}{end}"


def join(ours: dict, theirs: dict) -> dict:
    """One entry that two writers changed: a finished tuning comes first, then ours; of unfinished ones what either verified."""
    if ours.get("chosen") or "candidates" not in ours:
        return ours
    if theirs.get("chosen"):
        return theirs
    return theirs | ours | {"candidates": theirs["candidates"] | ours["candidates"]}


class Lock:
    def __init__(self, path: Path | None = None, data: dict | None = None):
        """path None: kept in memory only. What is at the path stays there: see read(), and save(), which adds to it."""
        if path is not None:
            lock_file.refuse_other_kinds(path)
        self.path = path
        self.data = data or {"format": FORMAT, "machines": {}}
        self._synced: dict[tuple[str, str], str] = {}  # (section, key): checksum of the entry when it was last read or saved
        self._dropped: set[tuple[str, str]] = set()
        self._swept = False

    @classmethod
    def read(cls, path: str | Path | None = None) -> "Lock":
        """The lock at path (default $WHET_LOCK, else ./whet.lock). What cannot be used is left out, and reported in a line."""
        lock = cls(lock_path(path))
        assert lock.path
        try:
            data, broken = load(lock.path)
        except Untouchable as e:
            _say_once(lock.path, f"{e}; {NOT_KEPT}")
            return lock
        if data is not None:
            lock.data, who = data, machine.this_machine().key
            part = data["machines"].get(who, {})
            checked = lock._check(part, data.get("format"), broken)
            lock._synced = {(section, key): s for section, c in checked.items() for key, s in c.sums.items()}
            data["machines"][who] = (part if isinstance(part, dict) else {}) | {s: c.entries for s, c in checked.items()}
        return lock

    @classmethod
    def of(cls, given: "Lock | str | Path | None") -> "Lock":
        """A lock as it is, or the one at a path."""
        return given if isinstance(given, Lock) else cls.read(given)

    def _check(self, part: object, written: object, broken: str) -> dict[str, Checked]:
        """This machine's part of a file, section by section. What is wrong with it is reported."""
        who, fields = machine.this_machine().key, part if isinstance(part, dict) else {}
        checked = {section: check(who, section, fields.get(section)) for section in FAULTS}
        bad = {key: why for c in checked.values() for key, why in c.bad.items()}
        if not isinstance(part, dict):
            bad["this machine's part"] = "it is no object"
        assert self.path
        if broken:
            whole = sum(len(c.entries) for c in checked.values())
            _say_once(self.path, f"{broken}; going on with{f' {whole} entries of it that are whole' if whole else 'out it'}")
        elif bad and written != FORMAT:
            _say_once(self.path, f"is of an older format ({written!r:.20}): this machine's {len(bad)} entries are tuned again")
        elif len(bad) > FEW:
            key, why = next(iter(bad.items()))
            _say_once(self.path, f"has {len(bad)} bad entries, dropped and to be tuned again; the first, {key!r:.200}: {why}")
        else:
            for key, why in bad.items():
                _say_once(self.path, f"has a bad entry, dropped and to be tuned again, {key!r:.200}: {why!s:.200}")
        return checked

    @property
    def mine(self) -> dict:
        """This machine's part."""
        return self.data["machines"].setdefault(machine.this_machine().key, {section: {} for section in FAULTS})

    @property
    def calls(self) -> dict:
        """{"<call> @ <mode>": what was verified, measured and chosen}"""
        return self.mine.setdefault("calls", {})

    @property
    def plans(self) -> dict:
        """{"<model>:<size> <precision>": the result of best_plan()}"""
        return self.mine.setdefault("plans", {})

    @property
    def decoders(self) -> dict:
        """{a model's shape and a way to decode: {"ok": bool, "why": str, ...}}"""
        return self.mine.setdefault("decoders", {})

    @property
    def swaps(self) -> dict:
        """{a group of like modules, or a model, and its sizes: what optimize() decided of it}"""
        return self.mine.setdefault("swaps", {})

    def drop(self, key: str, section: str = "calls") -> None:
        """Forget an entry, here and in the file at the next save, whatever another process made of it meanwhile."""
        self.mine.setdefault(section, {}).pop(key, None)
        self._dropped.add((section, key))

    def table(self, mode: str = "eager", without: tuple[str, ...] = ()) -> dict[str, str]:
        """{call key: chosen candidate} for Choices; only calls whose tuning was finished.

        without: impls not to use; a call that chose one gets the fastest of its other verified candidates, if there is one.
        """
        end, found = f" @ {mode}", {}
        for key, entry in self.calls.items():
            if key.endswith(end) and (chosen := entry.get("chosen")) and not edited(entry, chosen):
                if base(chosen) in without:
                    timed = {n: c["ms"] for n, c in entry["candidates"].items() if usable(c) and base(n) not in without}
                    chosen = min(timed, key=lambda n: timed[n], default=None)
                if chosen:
                    found[key.removesuffix(end)] = chosen
        return found

    def worth_launching(self, table: dict[str, str], mode: str) -> dict[str, str]:
        """These choices for compiled code whose kernels the host launches, not a CUDA graph.

        A kernel of whet's own that saves less of the GPU's time than a launch takes of the host's gives way to the formula,
        which Inductor fuses with what is around it.
        """
        found = dict(table)
        for key, name in table.items() if mode == "graph" else ():
            timed, ours = self.calls[f"{key} @ {mode}"]["candidates"], discover()[key.split()[0]].impls[base(name)].ours
            fused, own = timed.get("compile"), timed[name].get("ms")
            if ours and fused and usable(fused) and own is not None and fused["ms"] - own < LAUNCH_MS:
                found[key] = "compile"
        return found

    def save(self) -> None:
        """Merge with what others saved, then replace the file, whole or not at all. One that cannot be written costs a line."""
        if self.path is None:
            return
        target = Path(os.path.realpath(self.path))
        try:
            with lock_file.only_writer(target) as alone:
                if alone and not self._swept:
                    lock_file.remove_leftovers(target.parent)
                    self._swept = True
                disk, broken = load(target)
                merged, synced = self._merge(disk, broken)
                aside = lock_file.replace(target, render(merged).encode() + b"\n", keep_old=bool(broken))
        except Untouchable as e:
            return _say_once(self.path, f"{e}; {NOT_KEPT}")
        except (OSError, RecursionError) as e:
            why = getattr(e, "strerror", None) or e
            return _say_once(self.path, f"cannot be written ({why}); going on without it, so the next run tunes again")
        if aside:
            say(f"{self.path} {broken}; set aside as {aside.name}")
        self._synced, self._dropped = synced, set()

    def _merge(self, disk: dict | None, broken: str) -> tuple[dict, dict[tuple[str, str], str]]:
        """What is to be in the file, and the checksums of what is in memory."""
        who, synced = machine.this_machine().key, {}
        machines = self.data["machines"] | (disk["machines"] if disk else {})
        there = machines[who] if disk and who in disk["machines"] else {}
        checked = self._check(there, disk.get("format") if disk else FORMAT, broken)
        part = dict(there) if isinstance(there, dict) else {}
        for section, on_disk in checked.items():
            ours = self.mine.get(section, {})
            kept = {k: e for k, e in on_disk.entries.items() if not self._gone(section, k, ours)}
            sums = dict(on_disk.sums)
            for key, entry in ours.items():
                place = (who, section, key)
                mark = synced[section, key] = checksum(place, entry)
                before = self._synced.get((section, key))
                if mark == before and (key in kept or (disk and not broken and key not in on_disk.bad)):
                    continue  # not changed here, so that what the file has of it, if anything, is the latest
                if key in kept and section == "calls" and sums[key] != before and (section, key) not in self._dropped:
                    entry = join(entry, kept[key])
                kept[key] = json.loads(json.dumps(entry))
                sums[key] = checksum(place, kept[key])
            part[section] = {key: entry | {"checksum": sums[key]} for key, entry in kept.items()}
        return (disk or {}) | {"format": FORMAT, "machines": machines | {who: part}}, synced

    def _gone(self, section: str, key: str, ours: dict) -> bool:
        """Whether this entry was removed here since it was last read or saved."""
        return key not in ours and ((section, key) in self._synced or (section, key) in self._dropped)
