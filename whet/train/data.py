"""Token shards and the order in which training reads them: `.bin` files, Shards, Loader, and a text where none is named.

A shard is 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens as uint16: the format of llm.c.
Beside the shards, shards.json says how they were made and what decodes them.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from whet import machine
from whet.train.tokenize import ByteTokenizer, Document, Progress, Tokenizer, load_tokenizer, standard_library, tokenized

MAGIC, VERSION, HEADER = 20240520, 1, 256  # HEADER: int32 values
HEADER_BYTES, MOST_TOKENS = 4 * HEADER, 2**31 - 1  # of one shard: its header counts in an int32
SHARD_TOKENS, VAL = 100_000_000, 0.01
META = "shards.json"
OPEN_SHARDS = 128  # memory maps kept open, each with a file descriptor
SCAN = 2**24  # tokens looked at at once
SAMPLES, SAMPLE = 256, 4096  # of a fingerprint: samples, and tokens of one
STANDARD_LIBRARY = f"the sources of Python {platform.python_version()}'s standard library"
Source = str | Path | Sequence[str | Path] | None


def header_of(path: Path) -> int:
    """The number of tokens of a shard, checked against the size of the file."""
    try:
        with open(path, "rb") as f:
            head, size = f.read(HEADER_BYTES), os.fstat(f.fileno()).st_size
    except OSError as e:
        raise ValueError(f"data: {path} cannot be read: {e.strerror}; make shards with `whet data FILES -o DIR`") from None
    if len(head) < HEADER_BYTES:
        raise ValueError(f"data: {path} is truncated: {size:,} bytes, and the header alone has {HEADER_BYTES:,}; make it again")
    magic, version, count = (int(v) for v in np.frombuffer(head, "<i4")[:3])
    if magic != MAGIC:
        raise ValueError(f"data: {path} is no token shard: its magic is {magic}, not {MAGIC}; make one with `whet data`")
    if version != VERSION:
        raise ValueError(f"data: {path} has version {version} of the format, not {VERSION}; make one with `whet data`")
    there = (size - HEADER_BYTES) // 2
    if count < 0 or count > there:
        raise ValueError(f"data: {path} is truncated: its header says {count:,} tokens, the file has {there:,}; make it again")
    if over := size - HEADER_BYTES - 2 * count:
        raise ValueError(f"data: {path} has {over:,} bytes after the {count:,} tokens that its header says; make it again")
    return count


def find_shards(source: Source = None) -> list[Path]:
    """The `.bin` files of a folder, or those named; of the default text where nothing is."""
    source = default_text() if source is None else source
    if not isinstance(source, str | Path):
        return [Path(p) for p in source]
    folder = Path(source)
    if not folder.is_dir():
        return [folder]
    found = sorted(folder.glob("*.bin"))
    if not found:
        raise ValueError(f"data: {folder} has no .bin shards; make them with `whet data FILES -o {folder}`")
    return found


def is_val(path: Path) -> bool:
    return not {"val", "valid", "validation"}.isdisjoint(re.split(r"[^a-z0-9]+", path.stem.lower()))


def read_meta(folder: Path) -> dict | None:
    """What shards.json says; None where there is none."""
    path = Path(folder) / META
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise ValueError(f"data: {path} cannot be read: {e}; make the shards again") from None
    wanted = {"tokenizer", "vocab", "eos", "files", "tokens", "source"}
    if not isinstance(meta, dict) or meta.get("format") != 1 or not wanted <= set(meta):
        raise ValueError(f"data: {path} is not of format 1; make the shards again with this version of whet")
    return meta


class Shards:
    """Shards as one row of tokens, memory-mapped: those of training first, then those of validation.

    paths          a folder of shards, a shard, several; None: the sources of the Python standard library
    val_fraction   which last part of the tokens validates, where no shard is named val
    """

    def __init__(self, paths: Source = None, val_fraction: float = VAL):
        if not 0 <= val_fraction < 1:
            raise ValueError(f"data: val_fraction must be at least 0 and below 1, got {val_fraction}")
        self.paths = sorted(find_shards(paths), key=is_val)
        if not self.paths:
            raise ValueError("data: there are no shards; name a folder or `.bin` files")
        counts = [header_of(p) for p in self.paths]
        self.starts = np.cumsum([0, *counts])
        self.total = int(self.starts[-1])
        val = sum(count for path, count in zip(self.paths, counts) if is_val(path))
        self.train_tokens = self.total - (val if any(map(is_val, self.paths)) else int(self.total * val_fraction))
        self.meta = read_meta(self.paths[0].parent)
        self.whole = paths is None or isinstance(paths, str | Path) and Path(paths).is_dir()  # then shards.json is of all
        self.where = str(self.paths[0].parent if self.whole or len(counts) > 1 else self.paths[0])
        if self.meta and self.whole and self.meta["tokens"] != self.total:
            known = f"{META} says {self.meta['tokens']:,} in {self.meta['files']}: shards are missing or not its own"
            raise ValueError(f"data: {self.where} has {self.total:,} tokens in {len(counts)} shards, and its {known}")
        said = self.meta["source"] if self.meta else [self.where]
        self.source = ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")
        self.vocab = 0  # of the model: no batch has a token beyond it; 0: not known
        self._map = functools.lru_cache(OPEN_SHARDS)(self._open)

    def _open(self, i: int) -> np.ndarray:
        count = int(self.starts[i + 1] - self.starts[i])
        return np.memmap(self.paths[i], "<u2", "r", HEADER_BYTES, (count,)) if count else np.zeros(0, np.uint16)

    def tokens(self, start: int, n: int) -> np.ndarray:
        """n tokens from `start` on, across the borders of shards, as uint16."""
        if start < 0 or n < 0 or start + n > self.total:
            raise ValueError(f"data: tokens {start:,} to {start + n:,} of {self.where}, which has {self.total:,}")
        out, done = np.empty(n, np.uint16), 0
        i = int(np.searchsorted(self.starts, start, "right")) - 1
        while done < n:
            at = start + done - int(self.starts[i])
            part = self._map(i)[at : at + n - done]
            out[done : done + len(part)] = part
            done, i = done + len(part), i + 1
        return out

    def span(self, split: str) -> tuple[int, int]:
        """Where the tokens of train or val begin and end."""
        if split not in ("train", "val"):
            raise ValueError(f"data: split must be train or val, got {split!r}")
        return (0, self.train_tokens) if split == "train" else (self.train_tokens, self.total)

    def sequences(self, split: str, seq_len: int) -> int:
        """How many sequences an epoch has: windows of seq_len + 1 tokens that do not overlap."""
        start, stop = self.span(split)
        return (stop - start) // (seq_len + 1)

    def loader(
        self, batch: int, seq_len: int, rank: int = 0, world: int = 1, seed: int = 0, split: str = "train"
    ) -> "Loader":
        return Loader(self, batch, seq_len, rank, world, seed, split)

    def check_vocab(self, vocab: int) -> None:
        """ValueError for a token that a model with `vocab` tokens does not have. Reads every token."""
        for i, path in enumerate(self.paths):
            mapped = self._map(i)
            for start in range(0, len(mapped), SCAN):
                if (most := int(mapped[start : start + SCAN].max())) >= vocab:
                    fix = "take the tokenizer the model is for, or a model with a larger vocabulary"
                    raise ValueError(f"data: {path} has token {most}, and the model's vocabulary ends at {vocab - 1}; {fix}")

    def fingerprint(self) -> str:
        """sha256 of the counts and of samples; the same tokens in other shards or another folder have the same."""
        found = hashlib.sha256(f"{MAGIC} {VERSION} {self.train_tokens} {self.total}".encode())
        if self.total <= SAMPLES * SAMPLE:
            found.update(self.tokens(0, self.total).astype("<u2").tobytes())
        else:
            for i in range(SAMPLES):
                found.update(self.tokens(i * (self.total - SAMPLE) // (SAMPLES - 1), SAMPLE).astype("<u2").tobytes())
        return found.hexdigest()

    def tokenizer(self, name: str | None = None) -> Tokenizer:
        """What decodes these tokens: what shards.json says, or the one named."""
        if name is None and self.meta is None:
            raise ValueError(f"data: {self.paths[0].parent} has no {META} to say which tokenizer decodes it; name one")
        if name is not None or self.meta is None:
            return load_tokenizer(str(name))
        said = self.meta["tokenizer"]
        return load_tokenizer(said if said in ("bytes", "gpt2") else str(self.paths[0].parent / said), self.meta["eos"])


class Loader:
    """Batches of sequences in an order that (seed, epoch) fixes, whatever the number of ranks; without end.

    batch     sequences of all ranks together; a rank gets batch / world of them, every world-th
    split     train: each epoch is another permutation of the windows; val: always as they lie
    A batch that an epoch cannot fill goes on in the next. The state counts sequences of all ranks, so a run may go on with
    another world or batch.
    """

    def __init__(
        self, shards: Shards, batch: int, seq_len: int, rank: int = 0, world: int = 1, seed: int = 0, split: str = "train",
        pin: bool | None = None,
    ):
        if batch < 1 or seq_len < 1:
            raise ValueError(f"data: batch and seq_len must be at least 1, got {batch} and {seq_len}")
        if not 0 <= rank < world:
            raise ValueError(f"data: rank must be below world, got rank {rank} of {world}")
        if batch % world:
            fix = f"set train.batch_size to a multiple of {world}"
            raise ValueError(f"data: a batch of {batch} sequences cannot be divided among {world} processes; {fix}")
        self.shards, self.batch, self.seq_len, self.rank, self.world = shards, batch, seq_len, rank, world
        self.seed, self.split, self.pin = seed, split, torch.cuda.is_available() if pin is None else pin
        self.sequences = shards.sequences(split, seq_len)
        if self.sequences < batch:
            start, stop = shards.span(split)
            made = f"{stop - start:,} {split} tokens make {self.sequences:,} sequences of {seq_len:,} + 1"
            fix = "take more text, a smaller batch or shorter sequences"
            raise ValueError(f"data: {shards.where}: {made}, too few for a batch of {batch:,}; {fix}")
        self.position = 0  # sequences that all ranks have read
        self._order = functools.lru_cache(1)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        """Of RandomState: its stream never changes between versions of NumPy."""
        words = np.frombuffer(hashlib.sha256(f"{self.seed} {epoch}".encode()).digest(), "<u4")
        order = np.arange(self.sequences, dtype=np.int64)
        np.random.RandomState(words).shuffle(order)
        return order

    def windows(self) -> list[int]:
        """Which windows of the split this rank's next batch has."""
        numbers = range(self.position + self.rank, self.position + self.batch, self.world)
        if self.split == "val":
            return [n % self.sequences for n in numbers]
        return [int(self._order(n // self.sequences)[n % self.sequences]) for n in numbers]

    def next(self) -> dict[str, torch.Tensor]:
        """dict(tokens=(B, T), labels=(B, T)), int64 on the CPU, pinned where there is a GPU; labels are the next tokens."""
        width, first = self.seq_len + 1, self.shards.span(self.split)[0]
        rows = np.stack([self.shards.tokens(first + w * width, width) for w in self.windows()])
        if self.shards.vocab and (most := int(rows.max())) >= self.shards.vocab:
            fix = f"{META} knows no such token, so that a shard was changed or damaged; make the shards again"
            known = f"the model's vocabulary ends at {self.shards.vocab - 1}"
            raise ValueError(f"data: {self.shards.where} has token {most}, and {known}: {fix}")
        self.position += self.batch
        both = torch.from_numpy(rows.astype(np.int64))
        made = dict(tokens=both[:, :-1].contiguous(), labels=both[:, 1:].contiguous())
        return {name: t.pin_memory() for name, t in made.items()} if self.pin else made

    __next__ = next

    def __iter__(self) -> "Loader":
        return self

    def state(self) -> dict[str, int]:
        return {"epoch": self.position // self.sequences, "index": self.position % self.sequences}

    def load_state(self, state: dict[str, int]) -> None:
        epoch, index = state["epoch"], state["index"]
        if epoch < 0 or not 0 <= index < self.sequences:
            there = f"{self.shards.where} has {self.sequences:,} of {self.seq_len:,} + 1 tokens"
            fix = "resume with the data and the seq_len it was saved with"
            raise ValueError(f"data: the state is at sequence {index:,} of epoch {epoch}, and {there}; {fix}")
        self.position = epoch * self.sequences + index


class ShardWriter:
    """Tokens of one split into shards of at most `most` tokens. A header is written when its shard is full or closed."""

    def __init__(self, folder: Path, split: str, most: int):
        self.folder, self.split, self.most = folder, split, most
        self.shards = self.total = self.count = 0  # count: tokens of the open shard
        self.file: BinaryIO | None = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.close()
        elif self.file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses what is still buffered, too
                self.file.close()

    def write(self, ids: np.ndarray) -> None:
        while len(ids):
            if self.file is None:
                self.file = open(self.folder / f"{self.split}_{self.shards:06d}.bin", "wb")  # noqa: SIM115
                self.file.write(bytes(HEADER_BYTES))
                self.shards, self.count = self.shards + 1, 0
            part, ids = ids[: self.most - self.count], ids[self.most - self.count :]
            self.file.write(part.astype("<u2").tobytes())
            self.count, self.total = self.count + len(part), self.total + len(part)
            if self.count == self.most:
                self.close()

    def close(self) -> None:
        if self.file is None:
            return
        with self.file as f:
            f.seek(0)
            f.write(np.array([MAGIC, VERSION, self.count, *[0] * (HEADER - 3)], "<i4").tobytes())
            f.flush()
            os.fsync(f.fileno())
        self.file = None


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder inside `out` whose files move there when the block ends well; else nothing of it is left."""
    missing: list[Path] = []
    moved: list[Path] = []
    stage = out / f".building-{os.getpid()}"
    try:
        missing += [p for p in (out, *out.absolute().parents) if not p.exists()]
        stage.mkdir(parents=True)
        if old := sorted([*out.glob("*.bin"), *out.glob("shards*.json")]):
            raise ValueError(f"data: {out} holds {old[0].name} already; name another folder or remove its shards")
        yield stage
        for path in sorted(stage.iterdir(), key=lambda p: p.name == META):
            moved.append(out / path.name)
            os.replace(path, moved[-1])
        stage.rmdir()
    except BaseException as e:
        shutil.rmtree(stage, ignore_errors=True)
        for path in moved:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for made in missing:
                made.rmdir()
        if isinstance(e, OSError):
            raise ValueError(f"data: {out} cannot be written: {e.strerror or e}; nothing is kept") from None
        raise


def write_shards(
    files: Sequence[Document], out: str | Path, tokenizer: Tokenizer, val: float = VAL, shard_tokens: int = SHARD_TOKENS,
    source: Sequence[str] = (), progress: Progress | None = None,
) -> dict[str, Any]:
    """Shards of the files, the last `val` of their bytes as validation, and shards.json, which is returned. All or nothing."""
    if not 0 <= val < 1:
        raise ValueError(f"data: val must be at least 0 and below 1, got {val}")
    if not 1 <= shard_tokens <= MOST_TOKENS:
        raise ValueError(f"data: a shard holds 1 to {MOST_TOKENS:,} tokens, got {shard_tokens:,}")
    if not files:
        raise ValueError(f"data: there is no text in {', '.join(map(str, source)) or 'no files'}")
    total, at = sum(f.bytes for f in files), 0
    border = total * (1 - val)
    with staged(Path(out)) as stage:
        with ShardWriter(stage, "train", shard_tokens) as train, ShardWriter(stage, "val", shard_tokens) as valid:
            for ids, size in tokenized(files, tokenizer):
                cut = len(ids) if at + size <= border else round(len(ids) * max(0.0, border - at) / max(1, size))
                train.write(ids[:cut])
                valid.write(ids[cut:])
                at += size
                if progress:
                    progress("tokenizing, MB", at // 10**6, total // 10**6)
        name = tokenizer.name
        if name not in ("bytes", "gpt2"):
            name = shutil.copyfile(name, stage / "shards-tokenizer.json").name
        meta: dict[str, Any] = {"format": 1, "tokenizer": name, "vocab": tokenizer.vocab, "eos": tokenizer.eos}
        meta |= {"files": train.shards + valid.shards, "tokens": train.total + valid.total, "source": [str(s) for s in source]}
        meta |= {"train_tokens": train.total, "val_tokens": valid.total, "documents": len(files), "bytes": total}
        (stage / META).write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def default_text() -> Path:
    """The folder with the shards of the standard library's sources, as bytes: made once, then found in whet's cache."""
    files = standard_library()
    facts = hashlib.sha256("\n".join(f"{f.name} {f.bytes}" for f in files).encode()).hexdigest()[:12]
    kept = machine.cache_dir() / f"text-python-{platform.python_version()}-{facts}"
    if _intact(kept):
        return kept
    shutil.rmtree(kept, ignore_errors=True)
    making = kept.with_name(f".{kept.name}-{os.getpid()}")
    try:
        write_shards(files, making, ByteTokenizer(), source=[STANDARD_LIBRARY])
    except ValueError:  # a read-only home costs the cache, not the run
        folder = Path(_temporary().name) / kept.name
        if not folder.exists():
            write_shards(files, folder, ByteTokenizer(), source=[STANDARD_LIBRARY])
        return folder
    try:
        os.rename(making, kept)
    except OSError:  # another rank was first
        shutil.rmtree(making, ignore_errors=True)
    return kept


def _intact(folder: Path) -> bool:
    try:
        meta = read_meta(folder)
        return meta is not None and sum(map(header_of, folder.glob("*.bin"))) == meta["tokens"]
    except ValueError:
        return False


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="whet-text-")
