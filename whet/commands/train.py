"""whet train"""

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.commands._console import Json, LockFile, console, plain_errors, progress_bar

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from whet.train.loop import TrainOutcome
    from whet.train.recipe import TrainRecipe

Name = Annotated[str, typer.Argument(metavar="RECIPE", help="A name, gpt2-d12, or a TOML file; without one they are listed.")]
Settings = Annotated[list[str] | None, typer.Option(
    "--set", metavar="PART.KEY=VALUE", help="A value of the recipe, train.batch_size=4; repeatable (default: the recipe's).",
)]
Folder = Annotated[str, typer.Option(
    "--name", metavar="NAME", help="The run's folder below --runs (default: recipe and time).",
)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint of --name (default off).")]

Seeds = Annotated[str, typer.Option(
    metavar="N,N,...", help="One run for each seed, in folders NAME-seedN: an arm for `whet compare` (default: the recipe's).",
)]
Overhead = Annotated[bool, typer.Option(
    "--overhead", help="At the end, time the loop against the bare plan of its step (default off).",
)]


def command(
    recipe: Name = "",
    settings: Settings = None,
    run: Folder = "",
    runs: Annotated[str, typer.Option(metavar="DIR", help="Folder of all runs.")] = "runs",
    resume: Resume = False,
    tune: Annotated[bool | None, typer.Option(help="Choose kernels before step 0 (default: where there is a GPU).")] = None,
    retune_every: Annotated[int, typer.Option(min=0, help="Time the choices again every N steps (default 0: never).")] = 0,
    lock: LockFile = None,
    seeds: Seeds = "",
    overhead: Overhead = False,
    page: Annotated[bool, typer.Option(help="Write page.html into the run's folder at the end.")] = True,
    as_json: Json = False,
):
    """Train a model by a recipe: kernels chosen first, the step by its best plan, checkpoints, a log of every step.

    Without data it trains on the sources of Python's standard library. Without a GPU it takes the sizes of the recipe's table
    [cpu]. Several processes: torchrun --standalone --nproc_per_node=2 -m whet train gpt2-d12 --set dist.mode=ddp

    Example: whet train gpt2-d12 --set train.steps=2 --set train.batch_size=2 --set train.seq_len=32
    """
    begun: list[Path] = []
    name = run or f"{Path(recipe).stem}-{stamp()}"
    with plain_errors(lambda: left(begun, name, runs)):
        given = settings_of(recipe, settings, tune, retune_every)
        if resume and not run:
            raise ValueError("train: --resume needs --name NAME, the run to go on with")
        wanted = fitting(recipe, given, Path(runs), named(name, seeds), resume)
        with together(recipe, given):
            for folder, more in wanted:
                begun.append(folder)
                outcome = trained(recipe, given | more, folder, resume, lock, as_json, overhead)
                ended(outcome, page, as_json)


def left(begun: list[Path], name: str, runs: str) -> str:
    """What a run that was stopped leaves, and how to go on with it."""
    if not begun:
        return "nothing was begun yet"
    how = f"--resume --name {shlex.quote(name)}" + (f" --runs {shlex.quote(runs)}" if runs != "runs" else "")
    if kept := sorted(path.name for path in begun[-1].glob("checkpoints/step-*")):
        return f"{begun[-1]} keeps its checkpoints; go on with {how}, from {kept[-1]}"
    return f"{begun[-1]} has no checkpoint yet: {how} begins it anew"


def fitting(recipe: str, given: dict, runs: Path, wanted: list[tuple[str, dict]], resume: bool) -> list[tuple[Path, dict]]:
    """The folders, each looked at before the first run begins: the last seed's may be hours away.

    Every process looks: none can have written anything, since they have not met yet.
    """
    from whet.machine import this_machine
    from whet.train.recipe import read
    from whet.train.start import check_folder

    for folder, more in wanted:
        read(recipe, given | more, this_machine().device)
        check_folder(runs / folder, resume)
    return [(runs / folder, more) for folder, more in wanted]


def named(name: str, seeds: str) -> list[tuple[str, dict]]:
    """The folder of each run below --runs, and what its seed sets of the recipe."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.name or not name.isprintable():
        raise ValueError(f"train: --name must be a folder below --runs, such as first or mine/first, got {name!r}")
    if not seeds:
        return [(name, {})]
    texts = [text.strip() for text in seeds.split(",")]
    found = [int(text) for text in texts if text.isascii() and text.isdigit()]
    if len({*found}) < len(texts):
        raise ValueError(f"train: --seeds takes whole numbers, each once, such as 1,2,3, got {seeds!r}")
    return [(f"{name}-seed{seed}", {"train.seed": seed}) for seed in found]


def together(recipe: str, given: dict) -> "AbstractContextManager":
    """The processes that torchrun started, as one group for all seeds: it starts but one."""
    from whet.machine import this_machine
    from whet.train.distributed import processes
    from whet.train.recipe import read

    return processes(read(recipe, given, this_machine().device).dist.mode)


def ended(outcome: "TrainOutcome", page: bool, as_json: bool) -> None:
    """The run's page, and what came of it."""
    if not first_process():
        return
    if page:
        from whet.train.runs import write_page

        write_page(outcome.folder)
    if as_json:
        typer.echo(json.dumps({k: str(v) if k == "folder" else v for k, v in vars(outcome).items()}, indent=1))
    else:
        console.print(f"{outcome.step} steps, {outcome.tokens:,} tokens in {outcome.seconds:.0f} s; run: {outcome.folder}")


def settings_of(recipe: str, settings: list[str] | None, tune: bool | None, retune_every: int) -> dict:
    """What the command line sets of the recipe, by full names."""
    from whet.train.recipe import names, parse_setting

    if not recipe:
        raise ValueError(f"train: name a recipe; there are {', '.join(names())}")
    given = dict(parse_setting(text) for text in settings or ())
    given |= {} if tune is None else {"kernels.tune": tune}
    return given | ({"kernels.retune_every": retune_every} if retune_every else {})


def trained(
    recipe: str, given: dict, folder: Path, resume: bool, lock: str | None, as_json: bool, overhead: bool
) -> "TrainOutcome":
    """One run into its folder."""
    from whet.figures import error_line
    from whet.lock import Lock, lock_path
    from whet.machine import this_machine
    from whet.measure import free_memory
    from whet.train.loop import train
    from whet.train.overhead import measure_overhead
    from whet.train.recipe import read

    device = this_machine().device
    found = read(recipe, given, device)
    shown = not as_json and first_process()
    say = console.print if shown else (lambda text: None)
    for line in notes(found, read(recipe, given, "cuda"), device):
        say(line)
    with progress_bar(shown) as progress:
        after = measure_overhead if overhead else (lambda run: None)
        try:
            live = progress if shown and console.is_terminal else (lambda text, done, total: None)
            return train(found, folder, resume, Lock.read(lock_path(lock)), say, progress, after, live)
        except (RuntimeError, MemoryError) as e:
            if lost_another(e):
                why = f"train: process {os.environ['RANK']} stopped, since another one did: what it printed says why"
                raise ValueError(f"{why}; here it is {error_line(e)}") from None
            if not out_of_memory(e):
                raise
            fix = "lower train.batch_size, train.seq_len or the model's sizes, or set train.checkpointed_blocks=-1"
            raise ValueError(f"train: {folder}: out of memory: {error_line(e)}; {fix}") from None
        finally:
            free_memory()


def notes(found: "TrainRecipe", on_gpu: "TrainRecipe", device: str) -> list[str]:
    """What is said of the sizes and the processes before anything begins."""
    t, m, lines = found.train, found.model, []
    if device == "cpu":
        what = f"tasks of {t.seq_len} points" if found.data.tasks else f"{t.seq_len} tokens"
        size = f"{m.path or m.size or m.name}, {t.steps} steps of {t.batch_size} x {what}"
        by = "by the recipe's table [cpu]" if found != on_gpu else "and the recipe has no table [cpu]: its own sizes"
        lines.append(f"no GPU here, {'so ' if found != on_gpu else ''}{by}: {size}")
    if found.dist.mode and "RANK" not in os.environ:
        lines.append(f"dist.mode={found.dist.mode} has one process here; torchrun --nproc_per_node=2 -m whet train starts two")
    return lines


def out_of_memory(e: BaseException) -> bool:
    """Of a GPU, or of the host, for which PyTorch has no exception of its own."""
    import torch

    text = str(e)
    said = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(e, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in said)


def lost_another(e: BaseException) -> bool:
    """Whether it is no failure of this process's own: one that it exchanges tensors with has gone."""
    import torch

    return "RANK" in os.environ and (isinstance(e, torch.distributed.DistError) or "gloo/transport" in str(e))


def first_process() -> bool:
    """Of those that torchrun started, or the only one: it alone prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def stamp() -> str:
    """The time of day as a folder's name has it: no clock that measures anything."""
    import datetime

    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
