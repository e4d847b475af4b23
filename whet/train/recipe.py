"""A training run as a TOML file: model, optimizer, data, kernels. Every value can be set; a key that is not known is refused.

    recipe = read("gpt2-d12", {"train.batch_size": 4}, device="cpu")     # a name under recipes/, or a path
    recipe.train.batch_size, recipe.to_dict()

A recipe may begin with base = "gpt2-d12": it is that one, but for what it sets itself. The table [cpu] holds what is different
where there is no GPU, by full names: "train.steps" = 200. What a recipe sets itself counts over its base's [cpu].
"""

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from whet import step_plans
from whet.step_plans import AS_IT_IS
from whet.train import optim, schedule
from whet.train.optim import OptimOptions
from whet.train.schedule import Schedule

PLACES = (Path(__file__).parent.parent.parent / "recipes", Path(sys.prefix) / "share/whet/recipes")  # a checkout's, a wheel's
FOLDER = next((place for place in PLACES if place.is_dir()), PLACES[0])
PRECISIONS = ("float32", "tf32", "bfloat16", "bfloat16-weights")
PLANS = ("auto", AS_IT_IS.name, *step_plans.PLANS)
DIST = ("", "ddp", "fsdp")
WANDB = ("", "online", "offline")
KINDS: dict[Any, str] = {  # of a default, in words; a bool is an int to Python, so it stands first
    (bool, type(None)): "true or false", int: "a whole number", float: "a number", str: "a string", Mapping: "a table",
}
MOST_SEED = 2**32  # torch takes 64 bits, and every rank makes its own of it
TASKS = ("", "gp")


@dataclass(frozen=True)
class ModelPart:
    """name and size as in whet/models, with changes to the size's fields; or path, a Hugging Face folder to fine-tune."""

    name: str = "gpt2"
    size: str = ""
    path: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainPart:
    """batch_size: sequences of one forward over all processes; accumulate: forwards of one update."""

    steps: int = 1000
    batch_size: int = 32
    seq_len: int = 1024
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 6e-4
    muon_lr: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    weight_decay: float = 0.1
    schedule: str = "cosine"
    warmup: int = 0
    final: float = 0.1
    decay: float = 0.2
    clip: float = 1.0  # 0: gradients are not clipped
    precision: str = "bfloat16"
    ema: float = 0.0  # the decay of averaged weights; 0: none
    checkpointed_blocks: int = 0  # so many blocks keep no activations; -1: all
    seed: int = 42


@dataclass(frozen=True)
class DataPart:
    """path: a folder of .bin shards or one of them; empty: the sources of Python's standard library, as bytes.

    tasks: "gp" draws regression tasks from Gaussian processes instead, for models that take tasks. train.seq_len is then the
    points of a task, and context how many of them the model sees with their y
    """

    path: str = ""
    val: float = 0.01  # of the tokens, where the folder has no shard of its own for it
    tasks: str = ""
    context: int = 0


@dataclass(frozen=True)
class KernelsPart:
    """tune: kernels are chosen before step 0; empty: on a GPU. force: {op: impl}. retune_every: steps, 0: never.

    plan: auto tries all; another is the only one that is tried
    """

    tune: bool | None = None
    plan: str = "auto"
    retune_every: int = 0
    force: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunPart:
    """Every so many steps; 0: only at the end."""

    log_every: int = 10
    val_every: int = 100
    val_batches: int = 8
    save_every: int = 500
    keep: int = 2
    tensorboard: bool = False
    wandb: str = ""


@dataclass(frozen=True)
class DistPart:
    mode: str = ""


@dataclass(frozen=True)
class TrainRecipe:
    name: str = ""
    model: ModelPart = ModelPart()
    train: TrainPart = TrainPart()
    data: DataPart = DataPart()
    kernels: KernelsPart = KernelsPart()
    run: RunPart = RunPart()
    dist: DistPart = DistPart()

    def to_dict(self) -> dict:
        """As run.json and a checkpoint hold it."""
        return asdict(self)

    @property
    def schedule(self) -> Schedule:
        t = self.train
        return Schedule(t.schedule, t.lr, t.warmup, t.steps, t.final, t.decay)

    @property
    def optim(self) -> OptimOptions:
        t = self.train
        return OptimOptions(
            t.optimizer, t.lr, t.muon_lr, (t.beta1, t.beta2), weight_decay=t.weight_decay, momentum=t.momentum,
            master=t.precision == "bfloat16-weights",
        )

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.seq_len * self.train.accumulate


PARTS = {f.name: f.type for f in fields(TrainRecipe) if f.name != "name"}
CLASSES = {c.__name__: c for c in (ModelPart, TrainPart, DataPart, KernelsPart, RunPart, DistPart)}


def names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def nearest(given: str, known: Iterable[str]) -> str:
    """', did you mean X?', or what there is."""
    known = sorted(known) or ["none here: give a TOML file"]
    found = difflib.get_close_matches(given, known, 1, 0.5)
    return f"did you mean {found[0]}?" if found else f"there are {', '.join(known)}"


def read_toml(text: str, where: str) -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ValueError(f"recipe: {where} is no TOML: {e}") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """'train.batch_size=4' -> ("train.batch_size", 4); what is no TOML value is taken as a string."""
    key, sign, value = text.partition("=")
    if not sign or "." not in key:
        raise ValueError(f"recipe: --set takes part.key=value, such as train.batch_size=4, got {text!r}")
    try:
        return key.strip(), read_toml(f"v = {value}", key)["v"]
    except ValueError:
        return key.strip(), value


def read(target: str, settings: Mapping[str, Any] | None = None, device: str = "cuda") -> TrainRecipe:
    """The recipe of a name or of a file, with [cpu] applied where there is no GPU, then the settings."""
    path = Path(target).expanduser() if target.endswith(".toml") else FOLDER / f"{target}.toml"
    if not path.is_file():
        gone = "is a directory; name the TOML file in it" if path.is_dir() else "is not there"
        missing = f"{target} {gone}" if target.endswith(".toml") else f"no recipe {target!r}; {nearest(target, names())}"
        raise ValueError(f"recipe: {missing}")
    given, small = tables(path)
    flat = given | (small if device == "cpu" else {}) | dict(settings or {})
    found = checked(made(flat, path.stem))
    if found.model.path and (own := beside_path(path, settings or {})):
        raise ValueError(f"recipe: {own[0]} cannot be set: model.path is a folder whose config.json has the sizes")
    asked = (settings or {}).get("train.warmup", 0)
    if asked > found.train.warmup:  # that of a recipe is fitted to fewer steps, one that is asked for is not
        raise ValueError(f"recipe: train.warmup must be below train.steps, {found.train.steps}, got {asked}")
    return found


def beside_path(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """What the settings, or the file that itself names model.path, set of the model besides; a base's values are no mistake."""
    tables = read_toml(path.read_text(encoding="utf-8"), str(path))
    small = flattened(tables.pop("cpu", {}))
    own = flattened({k: v for k, v in tables.items() if k != "base"}) | small
    given = {**(own if own.get("model.path") else {}), **settings}
    return sorted(k for k, v in given.items() if k.startswith("model.") and k != "model.path" and v != "")


def tables(path: Path, depth: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file sets, by full names, and what it sets where there is no GPU; after those of the recipe that is its `base`."""
    try:
        given = read_toml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise ValueError(f"recipe: {path} is not UTF-8, which TOML is written in; save it so") from None
    except OSError as e:
        raise ValueError(f"recipe: {path} cannot be read: {e.strerror}") from None
    small, base = given.pop("cpu", {}), given.pop("base", None)
    for part, values in (("cpu", small), *((k, v) for k, v in given.items() if k in PARTS)):
        if not isinstance(values, Mapping):
            raise ValueError(f"recipe: {path}: {part} is a table, [{part}], and not a value, got {values!r}")
    small = flattened(small)
    if base is None:
        return flattened(given), small
    places = [folder / f"{base}.toml" for folder in (path.parent, FOLDER)]
    other = next((p for p in places if p.is_file() and p.resolve() != path.resolve()), None)
    if depth > 8 or other is None:
        raise ValueError(f"recipe: {path.name}: base must name another recipe in {path.parent} or of whet's, got {base!r}")
    before, small_before = tables(other, depth + 1)
    own = flattened(given)  # counts also where there is no GPU
    return before | own, {k: v for k, v in small_before.items() if k not in own} | small


def flattened(tables: Mapping[str, Any]) -> dict[str, Any]:
    """{"train": {"lr": 1}} and {"train.lr": 1} alike -> {"train.lr": 1}; deeper tables stay under their part."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if "." in key or not isinstance(value, Mapping):
            found[key] = value
        else:
            found |= {f"{key}.{k}": v for k, v in value.items()}
    return found


def made(flat: Mapping[str, Any], name: str) -> TrainRecipe:
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        if part not in PARTS or not rest:
            fix = f"{part} is a part: set one of its keys, {part}.KEY" if part in PARTS else nearest(part, PARTS)
            raise ValueError(f"recipe: there is no {key!r}; {fix}")
        table = parts[part]
        known = {f.name for f in fields(part_class(part))} - {"changes"}
        first, _, deeper = rest.partition(".")
        if rest in known:
            table[rest] = value
        elif part == "kernels" and first == "force" and deeper:
            table["force"] = {**table.get("force", {}), deeper: value}
        elif part == "model":
            table["changes"] = {**table.get("changes", {}), rest: value}  # checked where the model is known
        else:
            raise ValueError(f"recipe: {part} has no {rest!r}; {nearest(rest, known)}")
    return TrainRecipe(name, **{part: part_class(part)(**table) for part, table in parts.items()})


def part_class(part: str) -> Any:
    found = PARTS[part]
    return CLASSES[found] if isinstance(found, str) else found


def settings_of(config: Any) -> dict[str, Any]:
    """A ModelConfig as whet.auto_select_kernels takes it, as settings of a recipe: sizes, and the kernels that it forces."""
    found: dict[str, Any] = {"kernels.tune": None if getattr(config, "benchmark_kernels", True) else False}
    of = {"batch_size": "train.batch_size", "max_seq_len": "train.seq_len", "d_model": "model.width", "n_heads": "model.heads"}
    found |= {ours: getattr(config, theirs) for theirs, ours in of.items() if hasattr(config, theirs)}
    found |= {"model.kv_heads": found["model.heads"]} if "model.heads" in found else {}
    for flag, op in (("use_triton_rmsnorm", "rms_norm"), ("use_triton_rotary", "rope")):
        if (wanted := getattr(config, flag, None)) is not None:
            found[f"kernels.force.{op}"] = "triton" if wanted else "torch" if op == "rms_norm" else "eager"
    return found


def check_tasks(recipe: TrainRecipe) -> None:
    """ValueError where tasks and what is for tokens, or for one of them alone, are set together."""
    d, points = recipe.data, recipe.train.seq_len
    if not d.tasks:
        if d.context:
            raise ValueError(f"recipe: data.context is of tasks, got {d.context} without them; set data.tasks = \"gp\"")
        return
    if d.path:
        raise ValueError(f"recipe: data.tasks = {d.tasks!r} draws its own data and takes no data.path, got {d.path!r}")
    if recipe.model.path:
        raise ValueError(f"recipe: data.tasks is for models of whet's own, got model.path {recipe.model.path!r}")
    if not 0 < d.context < points:
        wanted = f"from 1 to below train.seq_len, the {points} points of a task"
        raise ValueError(f"recipe: data.context must be {wanted}, got {d.context}")


def check_kinds(recipe: TrainRecipe) -> None:
    """ValueError for a value that is not of the kind of its default."""
    for part in PARTS:
        values = getattr(recipe, part)
        plain = part_class(part)()
        for f in fields(values):
            value, default = getattr(values, f.name), getattr(plain, f.name)
            if default is None:
                fine = value is None or isinstance(value, bool)
            elif isinstance(default, bool) or isinstance(value, bool):
                fine = isinstance(default, bool) and isinstance(value, bool)
            elif isinstance(default, float):
                fine = isinstance(value, (int, float))
            else:
                fine = isinstance(value, (type(default), Mapping) if isinstance(default, Mapping) else type(default))
            if not fine:
                kind = next(words for of, words in KINDS.items() if isinstance(default, of))
                raise ValueError(f"recipe: {part}.{f.name} must be {kind}, got {value!r}")


def checked(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe; ValueError in one line, before any work, where a value is of a wrong kind or out of its range."""
    check_kinds(recipe)
    t, k = recipe.train, recipe.kernels
    for key, value in (("steps", t.steps), ("batch_size", t.batch_size), ("seq_len", t.seq_len), ("accumulate", t.accumulate)):
        if value < 1:
            raise ValueError(f"recipe: train.{key} must be at least 1, got {value}")
    r = recipe.run
    counts: list[tuple[str, float, int]] = [
        ("run.log_every", r.log_every, 0), ("run.val_every", r.val_every, 0), ("run.save_every", r.save_every, 0),
        ("run.val_batches", r.val_batches, 0), ("kernels.retune_every", k.retune_every, 0), ("run.keep", r.keep, 1),
        ("train.checkpointed_blocks", t.checkpointed_blocks, -1), ("train.seed", t.seed, 0), ("train.clip", t.clip, 0),
    ]
    for key, number, least in counts:
        if not number >= least:  # nor may it be NaN
            raise ValueError(f"recipe: {key} must be at least {least}, got {number}")
    for key, name, among in (
        ("train.precision", t.precision, PRECISIONS), ("kernels.plan", k.plan, PLANS), ("dist.mode", recipe.dist.mode, DIST),
        ("run.wandb", recipe.run.wandb, WANDB), ("train.optimizer", t.optimizer, optim.KINDS),
        ("train.schedule", t.schedule, schedule.KINDS), ("data.tasks", recipe.data.tasks, TASKS),
    ):
        if name not in among:
            raise ValueError(f"recipe: {key} must be one of {', '.join(map(repr, among))}, got {name!r}")
    for key, share in (("train.ema", t.ema), ("data.val", recipe.data.val)):
        if not 0 <= share < 1:
            raise ValueError(f"recipe: {key} must be from 0 to below 1, got {share}")
    if t.seed >= MOST_SEED:
        raise ValueError(f"recipe: train.seed must be below {MOST_SEED:,}, got {t.seed:,}")
    check_tasks(recipe)
    if t.warmup >= t.steps:
        recipe = replace(recipe, train=replace(t, warmup=max(0, t.steps // 10)))
    _ = recipe.schedule, recipe.optim  # both check their own values
    return recipe
