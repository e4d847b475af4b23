"""A table described once, columns and rows, and written three ways: for a terminal, in markdown, and in HTML."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from whet.figures import ms
from whet.report.cells import aligned, breakable, number
from whet.report.templates import fill

SHORT, LONG = 12, 24  # letters: a column of shorter cells is never wrapped, one of longer words is folded inside them
EMPTY = ("", "-")


@dataclass(frozen=True)
class Column:
    """One column: its title, how its values are written, and how much it matters.

    form    None: text, set to the left. Otherwise figures, set to the right: a format ("{:.2f}x") or a function (ms).
            A value that is text already is written as it is, and one that is missing as a dash.
    rank    where a terminal is too narrow, the columns of the highest rank go first; 0: never; None: not on a terminal
    code    names from a program: HTML may break their lines after a dot
    cut     letters after which a terminal cuts a name, and HTML folds it; 0: never
    """

    title: str
    form: str | Callable[[Any], str] | None = None
    rank: int | None = 0
    code: bool = False
    cut: int = 0

    def text(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{value[:self.cut]}…" if 0 < self.cut < len(value) else value
        if self.form is None or number(value) is None:
            return "-" if value is None or self.form else str(value)
        return self.form.format(value) if isinstance(self.form, str) else self.form(value)

    def texts(self, values: Sequence) -> list[str]:
        return [self.text(v) for v in values]

    def html(self, values: Sequence) -> list[dict]:
        """Each cell, and the whole of a name where the cell shows its start; times get one number of decimals."""
        if self.form is ms and not any(isinstance(v, str) for v in values):
            return [{"text": text, "whole": ""} for text in aligned([number(v) for v in values])]
        shown = map(breakable, self.texts(values)) if self.code else self.texts(values)
        return [{"text": text, "whole": breakable(v) if 0 < self.cut < len(str(v)) else ""} for text, v in zip(shown, values)]


def columns(*titles: str, form: str | Callable[[Any], str] | None = None, rank: int | None = 0) -> list[Column]:
    """Several columns with the same form and rank."""
    return [Column(title, form, rank) for title in titles]


@dataclass
class Table:
    """Columns and rows of values. On a terminal and in HTML a column without a value is left out, unless it is the first.

    merge   the number of leading columns that identify a group of rows: a terminal writes them once per group
    head    whether the titles of the columns are shown
    """

    title: str
    columns: Sequence[Column]
    merge: int = 0
    head: bool = True
    lines: bool = False  # on a terminal, a line between any two rows
    rows: list[tuple] = field(default_factory=list)
    marked: list[bool] = field(default_factory=list)

    def add(self, *values: Any, marked: bool = False) -> None:
        assert len(values) == len(self.columns), f"{self.title}: {len(values)} values for {len(self.columns)} columns"
        self.rows.append(values)
        self.marked.append(marked)

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, i: int) -> list:
        return [row[i] for row in self.rows]

    def filled(self) -> list[int]:
        """The columns to show: the first, and every one with a value."""
        return [i for i, c in enumerate(self.columns) if i == 0 or any(t not in EMPTY for t in c.texts(self.values(i)))]

    def to_markdown(self) -> str:
        """Lines of a pipe table, a marked row in bold; without its title."""
        titles = [c.title if self.head else "" for c in self.columns]
        lines = [titles, ["---" if c.form is None else "---:" for c in self.columns]]
        for row, marked in zip(self.rows, self.marked):
            texts = [c.text(value).replace("|", "\\|") for c, value in zip(self.columns, row)]
            lines.append([f"**{t}**" if marked and t not in EMPTY else t for t in texts])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_html(self) -> str:
        """A table element in a region that scrolls sideways; names are escaped."""
        kept = [self.columns[i] for i in self.filled()]
        rows = zip(self.marked, *(self.columns[i].html(self.values(i)) for i in self.filled()))
        return Markup(fill("table.html.j2", title=self.title, columns=kept, rows=list(rows)))

    def to_rich(self, width: int) -> RenderableType:
        """What fits the width: columns are left out by rank, and listed; where that is not enough, one line per cell."""
        filled = [i for i in self.filled() if self.columns[i].rank is not None]
        kept, texts = list(filled), {i: self.terminal_texts(i) for i in filled}
        least = {i: needed([self.columns[i].title, *texts[i]]) for i in kept}
        optional = sorted((i for i in kept[1:] if self.columns[i].rank), key=lambda i: self.columns[i].rank or 0)
        while self.head and optional and sum(least[i] + 3 for i in kept) >= width:
            kept.remove(optional.pop())
        if self.head and sum(least[i] + 3 for i in kept) >= width:
            return Group(*self.facts(texts))
        table = RichTable(title=self.title, title_justify="left", show_header=self.head, show_lines=self.lines)
        for i in kept:
            c, whole = self.columns[i], longest([self.columns[i].title, *texts[i]])
            table.add_column(
                c.title, min_width=least[i], no_wrap=least[i] == whole, overflow="fold",
                justify="left" if c.form is None else "right",
            )
        for at, marked in enumerate(self.marked):
            style = "bold green" if marked else None
            table.add_row(*(Text(texts[i][at]) for i in kept), style=style, end_section=self.ends(at))
        left_out = ", ".join(self.columns[i].title for i in filled if i not in kept)
        return Group(table, Text(f"left out of {width} columns, and in --json: {left_out}")) if left_out else table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.to_rich(options.max_width)

    def terminal_texts(self, i: int) -> list[str]:
        texts = self.columns[i].texts(self.values(i))
        if i >= self.merge:
            return texts
        return [text if at == 0 or self.ends(at - 1) else "" for at, text in enumerate(texts)]

    def ends(self, at: int) -> bool:
        """Whether a row is the last of its group."""
        return self.merge > 0 and self.rows[at][:self.merge] != (self.rows[at + 1][:self.merge] if at + 1 < len(self) else None)

    def facts(self, texts: dict[int, list[str]]) -> Iterator[RenderableType]:
        """Every cell with a value, a line each, under its row's first cell."""
        if self.title:
            yield Text(self.title, style="italic")
        for at, marked in enumerate(self.marked):
            if texts[0][at] not in EMPTY:
                yield Text(texts[0][at], style="bold")
            cells = [(self.columns[i].title, texts[i][at]) for i in texts if i and texts[i][at] not in EMPTY]
            for title, cell in cells:
                line = Text(f"{title}{': ' if title else ''}{cell}", style="bold green" if marked else "")
                yield Padding(line, (0, 0, 0, 2))
            if self.ends(at) or not cells:
                yield Text("")


def longest(texts: Sequence[str]) -> int:
    return max((cell_len(line) for text in texts for line in text.splitlines()), default=0)


def needed(texts: Sequence[str]) -> int:
    """The least width at which a column can be read."""
    if (whole := longest(texts)) <= SHORT:
        return whole
    return max(SHORT, min(LONG, longest([word for text in texts for word in text.split()])))
