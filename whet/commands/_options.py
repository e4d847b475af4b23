"""Options of the decoder's commands."""

from typing import Annotated, Any

import typer


def option(help: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help, **limits)


Device = Annotated[str, option("auto (the GPU where there is one), cpu or cuda.")]
