"""A run's weights used: text sampled from a checkpoint, and a Hugging Face folder made of it."""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from whet.figures import error_line
from whet.isolation import quiet_transformers
from whet.models import Model, Sampleable, discover
from whet.models._sampling import generate
from whet.train import checkpoint
from whet.train.build import TrainedModel, built, config_of
from whet.train.data import Shards
from whet.train.log import RUN
from whet.train.optim import Ema
from whet.train.recipe import TrainRecipe, made
from whet.train.tokenize import BPETokenizer, Tokenizer, load_tokenizer


@dataclass
class LoadedRun:
    """A run's model with the weights of one of its checkpoints, averaged ones where the run kept them."""

    recipe: TrainRecipe
    trained: TrainedModel
    path: Path
    step: int


def recipe_of(folder: Path) -> tuple[TrainRecipe, int | None]:
    """The recipe that a run was trained by, as its run.json has it, and its model's vocabulary: the data may be gone by now."""
    try:
        facts = json.loads((folder / RUN).read_text())
        given, vocab = dict(facts["recipe"]), dict(facts["model"]).get("vocab")
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} is no run: it has no {RUN} that `whet train` wrote") from None
    name, flat = given.pop("name", ""), dict[str, Any]()
    for part, values in given.items():
        changes = values.pop("changes", {}) if part == "model" else {}
        flat |= {f"{part}.{k}": v for k, v in (values | changes).items()}
    return made(flat, name), vocab


def load_run(folder: Path, at: str = "") -> LoadedRun:
    """The run at its newest good checkpoint, or at the one that is named: step-00000100. Of runs on tokens alone."""
    recipe, vocab = recipe_of(folder)
    if recipe.data.tasks:
        why = f"{recipe.model.name} predicts numbers, which are no text, and Transformers has no such architecture"
        raise ValueError(f"{folder} was trained on tasks: {why}; its page shows a prediction")
    path = folder / "checkpoints" / at if at else checkpoint.newest(folder / "checkpoints", skipped)
    if path is None:
        raise ValueError(f"{folder} has no checkpoint that is complete")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = built(recipe, device, vocab)
    averaged = Ema(trained.model, recipe.train.ema) if recipe.train.ema else None
    state = checkpoint.load(path, trained.model, None, averaged)
    if averaged is not None:
        with averaged.swapped():
            kept = {name: t.clone() for name, t in trained.model.state_dict().items()}
        trained.model.load_state_dict(kept)
    trained.model.eval()
    return LoadedRun(recipe, trained, path, state["step"])


def skipped(line: str) -> None:
    """A newer checkpoint that is not taken, in a line beside what is printed."""
    print(f"whet: {line}", file=sys.stderr)


def tokenizer_of(recipe: TrainRecipe, name: str = "") -> Tokenizer:
    """The tokenizer of the run's data, or the one that is named."""
    if name:
        return load_tokenizer(name)
    try:
        return Shards(recipe.data.path or None, recipe.data.val).tokenizer()
    except ValueError as e:
        raise ValueError(f"the run's tokenizer lies beside its data: {e}; or name one with --tokenizer") from None


def offered(run: LoadedRun, done: str, able: Callable[[Model], bool]) -> tuple[Model, Any]:
    """The run's model of whet/models and its configuration; an error says which models can be `done` where it cannot."""
    model, config = config_of(run.recipe, run.trained.vocab)
    if not able(model):
        others = ", ".join(m.name for m in discover().values() if able(m))
        raise ValueError(f"a run of model {model.name} cannot be {done}; those of {others} can")
    return model, config


@torch.no_grad()
def sample(
    run: LoadedRun, text: str, tokens: int, temperature: float, top_k: int | None, seed: int, tokenizer: str = ""
) -> str:
    """The text and what the model writes after it."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"sample: --seed must be from 0 to 2**63 - 1, got {seed}")
    model, folder = run.trained.model, run.recipe.model.path
    if not folder:
        offered(run, "sampled", lambda m: m.samples)
    words = tokenizer_of(run.recipe, tokenizer)
    ids = words.encode(text).astype("int64").tolist() or [words.eos]
    start = torch.tensor([ids], device=next(model.parameters()).device)
    if folder:
        torch.manual_seed(seed)
        chance: dict[str, Any] = dict(do_sample=bool(temperature))
        chance |= dict(temperature=temperature, top_k=top_k) if temperature else {}
        found = by_folders_model(model, start, tokens, words.eos, chance)
    else:
        found = generate(cast(Sampleable, model), start, tokens, temperature, top_k, seed)
    new = found[0].tolist()
    end = new.index(words.eos, len(ids)) if words.eos in new[len(ids) :] else len(new)
    return words.decode(new[:end])


def by_folders_model(model: Any, ids: torch.Tensor, tokens: int, eos: int, chance: dict[str, Any]) -> torch.Tensor:
    """Transformers' generate, which goes past the positions of its model: there it begins anew with the later half of them."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ids.shape[1] + tokens
    end = ids.shape[1] + tokens
    while ids.shape[1] < end:
        seen = ids if ids.shape[1] < longest else ids[:, -max(1, longest // 2) :]
        asked = min(end - ids.shape[1], max(1, longest - seen.shape[1]))
        new = model.generate(seen, max_new_tokens=asked, **chance)[:, seen.shape[1] :]
        ids = torch.cat([ids, new], 1)
        if new.shape[1] < asked or (new == eos).any():  # the model's own end, or the text's
            break
    return ids


def export(run: LoadedRun, out: Path, tokenizer: str = "") -> dict:
    """A Hugging Face folder: config.json, model.safetensors, tokenizer.json where it can be made; what was written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"export: {out} is there already and not an empty folder; name another")
    model = run.trained.model
    if run.recipe.model.path:
        with whole_folder(out), quiet_transformers():
            model.save_pretrained(str(out))  # type: ignore[operator]
            for path in (p for name in TOKENIZER_FILES for p in Path(run.recipe.model.path).expanduser().glob(name)):
                shutil.copyfile(path, out / path.name)
        return {"architecture": type(model).__name__, "step": run.step, "folder": str(out)}
    source, size = offered(run, "exported", lambda m: m.to_hf is not None)
    assert source.to_hf is not None
    config, state = source.to_hf(size, dict(model.named_parameters()))
    words = tokenizer_of(run.recipe, tokenizer)
    written = as_tokenizers(words)  # before anything is written: it may need a package that is not there
    config |= {"eos_token_id": words.eos, "bos_token_id": words.eos, "dtype": str(next(model.parameters()).dtype)[6:]}
    with whole_folder(out):
        save_file({k: t.cpu() for k, t in state.items()}, str(out / "model.safetensors"), metadata={"format": "pt"})
        written.save(str(out / "tokenizer.json"))
        (out / "tokenizer_config.json").write_text(json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}, indent=1) + "\n")
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return {"architecture": config["architectures"][0], "step": run.step, "folder": str(out)}


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[None]:
    """A new or empty folder to write into; where that fails, or is stopped, nothing of it is left."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as e:
        shutil.rmtree(out, ignore_errors=True)
        if not isinstance(e, Exception):
            raise
        raise ValueError(f"export: {out} cannot be written: {error_line(e)}") from None


END = "<|endoftext|>"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*")


def as_tokenizers(words: Tokenizer) -> Any:
    """The same tokenizer as an object of the package `tokenizers`: of bytes, BPE without a merge."""
    if isinstance(words, BPETokenizer):
        return words.tokenizer
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    plain = [b for part in (range(33, 127), range(161, 173), range(174, 256)) for b in part]
    others = [b for b in range(256) if b not in plain]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}  # as ByteLevel writes bytes
    made_of = Tokenizer(models.BPE({letters[b]: b for b in range(256)}, []))
    made_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made_of.decoder = decoders.ByteLevel()
    made_of.add_special_tokens([AddedToken(END, special=True)])
    return made_of


