"""What `locant.compare` and `locant.inspect` return: rows, figures and a page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.report.figures import Cell, Figure
from locant.report.page import Report, figures_of, page_html, write_page
from locant.report.tables import records

if TYPE_CHECKING:
    from locant.report.drawing import Drawing

HEIGHT = 720
"""Pixels of the frame in which a notebook shows a page."""


class Result(ABC):
    """Results as rows, figures and a page. A notebook that displays the object shows the page."""

    @property
    @abstractmethod
    def report(self) -> Report:
        """The content of the page."""

    @property
    @abstractmethod
    def table(self) -> list[dict[str, Cell]]:
        """The main table, one dict per row."""

    @property
    def figures(self) -> list[str]:
        """The titles of all figures, in the order of the page."""
        return [figure.title for figure in figures_of(self.report)]

    def rows(self, name: str) -> list[dict[str, Cell]]:
        """Returns the numbers of a figure: one dict per point of a line, cell of a heat map or row of a table."""
        return records(self._find(name))

    def frame(self, name: str | None = None) -> Any:
        """Returns `table` as a pandas DataFrame; with the name of a figure, the numbers of that figure."""
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "frame() needs pandas; install it with: pip install pandas. `table` has the same rows as dicts"
            ) from None
        return pandas.DataFrame(self.table if name is None else self.rows(name))

    def figure(self, name: str) -> Drawing:
        """Returns a figure of the page, drawn by matplotlib. `name` is its title, or a part that no other title has."""
        found = self._find(name)
        try:
            from locant.report.drawing import draw
        except ImportError:
            raise ImportError("figure() needs matplotlib; install it with: pip install 'locant[plot]'") from None
        return draw(found)

    def page(self, path: Path | str, *, tables: Path | str | None = None) -> Path:
        """Writes the page, and the numbers of its figures as csv files into the folder `tables`; returns its path.

        By default the tables of `page.html` go to `page-csv`.
        """
        path = Path(path)
        return write_page(self.report, path, csv_folder=Path(tables or path.with_name(f"{path.stem}-csv")))

    def _find(self, name: str) -> Figure:
        every = figures_of(self.report)
        exact = [figure for figure in every if figure.title == name]
        near = exact or [figure for figure in every if name.lower() in figure.title.lower()]
        if len(near) == 1:
            return near[0]
        titles = ", ".join(repr(figure.title) for figure in near or every)
        problem = f"{len(near)} figures have {name!r} in their title" if near else f"no figure is called {name!r}"
        raise ValueError(f"{problem}; name one of: {titles}")

    def _repr_html_(self) -> str:
        """The page in a frame of its own: its style and script cannot reach the notebook, nor the notebook's the page.

        A sandbox without `allow-same-origin` gives the frame an origin that nothing else has. Without the base, a link
        to a section would lead to the notebook.
        """
        page = page_html(self.report).replace("<head>", '<head>\n<base href="about:srcdoc">', 1)
        return (
            f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts allow-downloads" '
            f'title="{escape(self.report.title)}" width="100%" height="{HEIGHT}" style="border:0"></iframe>'
        )

    def __str__(self) -> str:
        """The title and the findings, one per line."""
        return "\n".join([self.report.title, *(f"  • {sentence}" for sentence in self.report.verdict)])

    __repr__ = __str__
