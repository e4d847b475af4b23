"""Processes of their own that need not import torch: they are forked from one that has, and has done nothing else.

On a GPU each imports for itself: whet asks for the GPU while it is imported, and a fork after that cannot use it.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

LIMIT_S = 300
FORKED = multiprocessing.get_context("forkserver")
IMPORTED = ["torch.distributed.fsdp", "torch._dynamo", "whet.train.loop", "whet.train.build"]
FORKED.set_forkserver_preload([] if torch.cuda.is_available() else IMPORTED)


def printed_to(out: Path, *streams: int) -> None:
    """From now on these streams of this process end in a file, also what is printed by C++."""
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in streams:
        os.dup2(file, stream)


def trained(flat: dict, folder: Path, resume: bool, out: Path) -> None:
    """What a process does that trains."""
    printed_to(out, 1, 2)
    from whet.train.loop import train
    from whet.train.recipe import made

    torch.set_num_threads(1)
    train(made(flat, "small"), folder, resume=resume, say=print)


def child(flat: dict, folder: Path, resume: bool = False) -> multiprocessing.process.BaseProcess:
    """A process that trains, started."""
    process = FORKED.Process(target=trained, args=(flat, folder, resume, folder.with_suffix(".out")))
    process.start()
    return process


def commanded(words: list[str], folder: Path, out: Path) -> None:
    """What a process does that is given a command line."""
    printed_to(out.with_suffix(".stdout"), 1)
    printed_to(out.with_suffix(".stderr"), 2)
    os.chdir(folder)
    sys.argv = ["whet", *words]
    from whet.__main__ import main

    main()


def whet(*words: str, folder: Path, out: Path) -> tuple[int | None, str, str]:
    """The command in a process of its own: its exit code, and what it printed to each stream."""
    process = FORKED.Process(target=commanded, args=(list(words), folder, out))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    printed, errors = (out.with_suffix(f".{stream}").read_text() for stream in ("stdout", "stderr"))
    return process.exitcode, printed, errors


def in_group(task: Callable[[int, int, Path], None], rank: int, world: int, folder: Path) -> None:
    printed_to(folder / f"{rank}.out", 1, 2)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    try:
        task(rank, world, folder)
    finally:
        torch.distributed.destroy_process_group()


def together(task: Callable[[int, int, Path], None], world: int, folder: Path) -> None:
    """task(rank, world, folder) in each process of a gloo group; AssertionError with what they printed where one fails."""
    processes = [FORKED.Process(target=in_group, args=(task, rank, world, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
    printed = "\n".join(p.read_text() for p in sorted(folder.glob("*.out")))
    assert all(process.exitcode == 0 for process in processes), printed


def end_children() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def launched(flat: dict, folder: Path, world: int, resume: bool = False) -> None:
    """Processes that train together, under torchrun's agent, which runs here with the options that --standalone stands for."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    out = folder.with_suffix(".out")
    words = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=whet", "--start-method=forkserver"]
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    late = threading.Timer(LIMIT_S, end_children)
    late.start()
    try:
        with mock.patch.dict(os.environ):
            config, *_ = config_from_args(parse_args([*words, f"--nproc-per-node={world}", "no script"]))
            elastic_launch(config, trained)(flat, folder, resume, out)
    except Exception as e:
        raise AssertionError(f"{json.dumps(flat)}: {out.read_text() if out.exists() else e}") from e
    finally:
        late.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
