"""What every bench does with its rows: a JSON file, a table on the terminal, a plot.

A row is a flat mapping of snake_case column names; missing or NaN values are ``null`` in JSON and "–" on the terminal.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_LONGEST = 500
_IMAGES = (".png", ".pdf", ".svg", ".jpg")

_PACKAGES = ("blendstore", "blendstore-transformers", "torch", "transformers", "tokenizers", "numpy", "httpx")


def command_line() -> str:
    """The command that is running, as one could type it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def versions(**extra: str | float) -> dict[str, str | float]:
    """Versions of what the numbers depend on, with ``extra`` facts about the run."""
    found: dict[str, str | float] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, **extra}


def write_json(path: Path, rows: Sequence[Row], **facts: str | float) -> None:
    """``{command, versions, rows}`` as strict JSON. A file is replaced whole; a pipe or a device is written to."""
    content = {"command": command_line(), "versions": versions(**facts), "rows": [_finite(dict(row)) for row in rows]}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def check_target(path: Path | None, *, plot: bool = False) -> None:
    """Makes the folder of a file that is written at the end of a long run. Raises ``OSError`` where it can't be, and
    ``ValueError`` for a ``plot`` that is no image file."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file")
    if plot and path.suffix.lower() not in _IMAGES:
        raise ValueError(f"--plot {path}: give a file that ends with one of {', '.join(_IMAGES)}")
    there = path.exists()
    if there and not path.is_file():
        return  # to open a pipe waits for its reader
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()  # permissions do not say it all: not for root, nor on a file system that is read only
    except OSError as error:
        raise OSError(f"{path} can't be written ({error.strerror}): give a file in a folder of yours") from None
    if not there:
        path.unlink()


def one_line(error: BaseException) -> str:
    """What an error says, on one line; its type where it says nothing."""
    text = " ".join(str(error).split())
    if not text:
        return type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def print_table(title: str, rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Rows as a table; ``columns`` maps row keys to headings. Numbers are right-aligned with useful digits."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for key, heading in columns.items():
        numeric = any(isinstance(row.get(key), int | float) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(shown(row.get(key)) for key in columns))
    # Without a terminal the width is whatever the table needs, so that logs keep whole rows.
    console = Console() if sys.stdout.isatty() else Console(width=220)
    console.print(table)


def shown(value: object) -> str:
    """A value for a person: at most three significant decimals, ranges as "a … b"."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, list | tuple) and len(value) == 2:
            return f"{shown(value[0])} … {shown(value[1])}"
        return str(value)
    if isinstance(value, int) or value.is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def plot_quality(
    path: Path,
    rows: Sequence[Row],
    *,
    title: str,
    y: str = "kl_share_left",
    y_label: str = "share of full reuse's KL that is left",
) -> None:
    """Scatter of median TTFT against quality, one labelled point a row; rows without both values are left out."""
    points = [(row, row["ttft_ms_median"], row[y]) for row in rows if _number(row.get("ttft_ms_median"), row.get(y))]
    figure, axes = _axes(title)
    for index, (row, x, value) in enumerate(points):
        interval = row.get(f"{y}_ci")
        if interval and _number(*interval):
            axes.plot([x, x], interval, color="0.75", linewidth=2, zorder=1)
        axes.scatter([x], [value], s=42, color=f"C{index % 10}", zorder=2)
    _label(axes, [(label(row), x, value) for row, x, value in points])
    axes.set_xlabel("median time to first token, ms (lower left is better)")
    axes.set_ylabel(y_label)
    axes.set_xlim(left=0, right=max((x for _, x, _ in points), default=1) * 1.3)
    axes.set_ylim(bottom=min(0.0, -0.03 * max((v for *_, v in points), default=1)))
    _save(figure, path)


def plot_rates(path: Path, rows: Sequence[Row], *, title: str) -> None:
    """Share of KL left against the recompute ratio, one line for each selector and provenance, with its interval."""
    figure, axes = _axes(title)
    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if _number(row.get("ratio"), row.get("kl_share_left")):
            series.setdefault((row["selector"], row["provenance"]), []).append(row)
    ends = []
    for index, ((selector, provenance), members) in enumerate(series.items()):
        members.sort(key=lambda row: float(row["ratio"]))
        xs = [100 * float(row["ratio"]) for row in members]
        ys = [float(row["kl_share_left"]) for row in members]
        axes.plot(xs, ys, marker="o", color=f"C{index % 10}", linewidth=1.6)
        bounds = [row["kl_share_left_ci"] for row in members]
        if len(xs) > 1 and all(_number(*bound) for bound in bounds):
            axes.fill_between(xs, [b[0] for b in bounds], [b[1] for b in bounds], color=f"C{index % 10}", alpha=0.12)
        ends.append((f"{selector} · {provenance}", xs[-1], ys[-1]))
    _label(axes, ends)
    axes.set_xlabel("tokens of the documents that are recomputed, %")
    axes.set_ylabel("share of full reuse's KL that is left")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0, right=max((x for _, x, _ in ends), default=1) * 1.35)
    _save(figure, path)


def label(row: Row) -> str:
    """A row's method in a few words."""
    ratio = row.get("ratio")
    return str(row.get("method") or row["selector"]) + (f" {ratio:.2f}" if ratio else "")


def _axes(title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=130, layout="constrained")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92", zorder=0)
    return figure, axes


def _label(axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Names next to the points, right of each; names that would overlap are spread vertically."""
    if not points:
        return
    (low, high), width = axes.get_ylim(), axes.get_xlim()[1]
    gap = (high - low) / 26
    placed: list[tuple[float, float]] = []
    for name, x, y in sorted(points, key=lambda point: point[2]):
        near = [other for left, other in placed if abs(left - x) < 0.3 * width]
        at = max([y, *(other + gap for other in near)])
        placed.append((x, at))
        axes.annotate(
            name,
            (x, y),
            xytext=(x + 0.02 * width, at),
            fontsize=8.5,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _number(*values: object) -> bool:
    return all(isinstance(value, int | float) and not math.isnan(value) for value in values)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
