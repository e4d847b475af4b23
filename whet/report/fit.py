"""A terminal table that fits: columns that say nothing are left out, then the least important; at worst one line per fact."""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

SHORT, LONG = 12, 24  # letters: a column of shorter cells is never wrapped, one of longer words is folded inside them
EMPTY = ("", "-")


class Table(RichTable):
    """rich's table, fitted when it is printed.

    keep    the columns without which a row says nothing: where these do not fit, each row is printed as one line per fact
    order   the others, the most important first; None: as they stand
    """

    def __init__(self, *columns: str, keep: Sequence[str] = (), order: Sequence[str] | None = None, **how):
        super().__init__(*columns, **{"title_justify": "left"} | how)
        self.keep, self.order = keep or columns[:1], order if order is not None else columns

    def cells(self, i: int) -> list[str]:
        return [str(cell) for cell in self.columns[i].cells]

    def names(self) -> list[str]:
        return [str(column.header) for column in self.columns]

    def fitted(self, width: int) -> tuple[list[int], bool]:
        """The columns to print, and whether they fit."""
        names = self.names()
        kept = [i for i, _ in enumerate(names) if i == 0 or any(c not in EMPTY for c in self.cells(i))]
        if not self.show_header:
            return kept, True
        least = {i: needed([names[i], *self.cells(i)]) for i in kept}
        rank = {name: at for at, name in enumerate(self.order)}
        optional = sorted((i for i in kept if names[i] not in self.keep), key=lambda i: rank.get(names[i], len(rank)))
        while optional and sum(least[i] + 3 for i in kept) >= width:
            kept.remove(optional.pop())
        return kept, sum(least[i] + 3 for i in kept) < width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, fits = self.fitted(options.max_width)
        if not fits:
            yield from self.facts()
            return
        table = RichTable(title=self.title, title_justify="left", show_header=self.show_header, show_lines=self.show_lines)
        for i in kept:
            least = needed(texts := [self.names()[i], *self.cells(i)])
            table.add_column(texts[0], min_width=least, no_wrap=least == longest(texts), overflow="fold")
        for row, *cells in zip(self.rows, *(self.cells(i) for i in kept)):
            table.add_row(*(Text(cell) for cell in cells), style=row.style, end_section=row.end_section)
        yield table
        said = [name for i, name in enumerate(self.names()) if i not in kept and any(c not in EMPTY for c in self.cells(i))]
        if said:
            yield Text(f"left out of {options.max_width} columns, and in --json: {', '.join(said)}")

    def facts(self) -> RenderResult:
        """Every cell that says something, a line each, under its row's first cell."""
        names = self.names()
        if self.title:
            yield Text(str(self.title), style="italic")
        for row, *cells in zip(self.rows, *(self.cells(i) for i, _ in enumerate(names))):
            if cells[0] not in EMPTY:
                yield Text(cells[0], style="bold")
            told = [(name, cell) for name, cell in zip(names[1:], cells[1:]) if cell not in EMPTY]
            for name, cell in told:
                yield Padding(Text(f"{name}{': ' if name else ''}{cell}", style=row.style or ""), (0, 0, 0, 2))
            if row.end_section or not told:
                yield Text("")


def longest(texts: Sequence[str]) -> int:
    return max((cell_len(line) for text in texts for line in text.splitlines()), default=0)


def needed(texts: Sequence[str]) -> int:
    """The least width at which a column can be read."""
    if (whole := longest(texts)) <= SHORT:
        return whole
    return max(SHORT, min(LONG, longest([word for text in texts for word in text.split()])))
