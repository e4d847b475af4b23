"""whet train"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.commands._console import Json, console, plain_errors, progress_bar

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from whet.train.loop import TrainOutcome

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
    lock: Annotated[str | None, typer.Option(metavar="FILE", help="The lock (default $WHET_LOCK, else whet.lock).")] = None,
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
    with plain_errors("the checkpoints that are there stay; go on with --resume"):
        given = settings_of(recipe, settings, tune, retune_every)
        if resume and not run:
            raise ValueError("train: --resume needs --name NAME, the run to go on with")
        name = run or f"{Path(recipe).stem}-{stamp()}"
        with together(recipe, given):
            for folder, more in named(name, seeds):
                outcome = trained(recipe, given | more, Path(runs) / folder, resume, lock, as_json, overhead)
                ended(outcome, page, as_json)


def named(name: str, seeds: str) -> list[tuple[str, dict]]:
    """The folder of each run, and what its seed sets of the recipe."""
    if not seeds:
        return [(name, {})]
    found = [text.strip() for text in seeds.split(",")]
    if not all(text.isdigit() for text in found) or len({*found}) < len(found):
        raise ValueError(f"train: --seeds takes whole numbers, each once, such as 1,2,3, got {seeds!r}")
    return [(f"{name}-seed{text}", {"train.seed": int(text)}) for text in found]


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
    if device == "cpu":
        t, m = found.train, found.model
        what = f"tasks of {t.seq_len} points" if found.data.tasks else f"{t.seq_len} tokens"
        size = f"{m.size or m.name}, {t.steps} steps of {t.batch_size} x {what}"
        say(f"no GPU here, so by the recipe's table [cpu]: {size}")
    with progress_bar(shown) as progress:
        after = measure_overhead if overhead else (lambda run: None)
        try:
            return train(found, folder, resume, Lock.read(lock_path(lock)), say, progress, after)
        finally:
            free_memory()


def first_process() -> bool:
    """Of those that torchrun started, or the only one: it alone prints and writes."""
    import os

    return os.environ.get("RANK", "0") == "0"


def stamp() -> str:
    """The time of day as a folder's name has it: no clock that measures anything."""
    import datetime

    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
