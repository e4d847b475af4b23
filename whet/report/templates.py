"""This folder's templates, filled in: HTML is escaped, markdown and SVG are plain text."""

import functools
from pathlib import Path


@functools.cache
def environment():
    import jinja2  # only pages wait for it

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=lambda name: str(name).endswith(".html.j2"),
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    )


def fill(template: str, **given) -> str:
    return environment().get_template(template).render(**given)
