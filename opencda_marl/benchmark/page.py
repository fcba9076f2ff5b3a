"""Tables and pictures of results: as files of a report, and as the generated part of docs/benchmark.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opencda_marl.benchmark.tables import (
    COLUMNS,
    aggregates,
    as_csv,
    as_markdown,
    beaten,
    missing,
    rows_of,
    scores_of,
    training_rows,
    verdicts,
)
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.files import write_whole, writing
from opencda_marl.plots import density_plot, profile_plot

__all__ = ["BEGIN", "END", "densities_in", "page_text", "updated_page", "write_report"]

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def densities_in(results: Sequence[Mapping[str, Any]]) -> list[float]:
    """Every density that somebody was measured at, ascending."""
    return sorted({float(key) for result in results for key in result.get("densities", {})})


def page_text(
    results: Sequence[Mapping[str, Any]], densities: Sequence[float], *, whole: bool = True, asked: Sequence[str] = ()
) -> str:
    """All tables as Markdown.

    Args:
        results: files of results.
        densities: columns of the benchmark.
        whole: list what the whole benchmark lacks; False: only what these runs lack.
        asked: learners and controllers of which alone it is listed whether they were measured; empty: all.
    """
    measured = [result for result in results if result.get("densities")]
    rows = rows_of(measured, densities)
    cells = [[write(row[name]) for name, (_, write) in COLUMNS.items()] for row in rows]
    table = as_markdown if whole else _filled
    parts = ["### Figures\n", table([heading for heading, _ in COLUMNS.values()], cells)] if rows else []
    trained = training_rows(measured)
    if trained:
        headings = list(dict.fromkeys(key for row in trained for key in row))
        parts += ["### Training\n", table(headings, [[row.get(key, "-") for key in headings] for row in trained])]
    summed = aggregates(measured, densities)
    if summed:
        parts += [
            f"### Over densities and seeds\n\nComplete runs only, at {_listed(densities)} vph.\n",
            _aggregates(summed),
        ]
    if any(result["kind"] == "learner" for result in measured):
        parts.append("### Better than simple drivers?\n")
        parts.append((_beaten if whole else _told)(measured, densities))
    parts += [_generalisation(result) for result in results if result.get("cases")]
    asked = asked if whole else _policies(measured)
    absent = missing(measured, densities, asked) if asked else missing(measured, densities)
    if absent or not all(result.get("own") for result in results):
        parts.append("### What is missing\n\n" + ("".join(f"- {line}\n" for line in absent) or "Nothing.\n"))
    parts.append(_origins(results, table))
    return "\n".join(parts)


def _filled(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table without the columns that nobody fills."""
    kept = [index for index in range(len(headings)) if any(row[index] not in ("", "-") for row in cells)]
    return as_markdown([headings[index] for index in kept], [[row[index] for index in kept] for row in cells])


def _told(results: Sequence[Mapping[str, Any]], densities: Sequence[float]) -> str:
    told = verdicts(results, densities)
    return "\n".join(f"**{name}**\n\n" + "".join(f"- {line}\n" for line in lines) for name, lines in told.items())


def _beaten(results: Sequence[Mapping[str, Any]], densities: Sequence[float]) -> str:
    """One table: there are many learners, and a sentence for each density and driver would be pages."""
    rows = beaten(results, densities)
    explained = (
        "On the same traffic, at which vph a learner beats a driver: fewer crash or more get through, beyond chance, "
        "and neither the other way round. `report` says the same of single runs in sentences, with the figures.\n"
    )
    return f"{explained}\n" + as_markdown(list(rows[0]), [list(row.values()) for row in rows])


def _policies(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(result["policy"]) for result in results))


def _listed(densities: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in densities)


def _aggregates(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table a measure."""
    tables = []
    for measure in dict.fromkeys(row["measure"] for row in rows):
        own = [row for row in rows if row["measure"] == measure]
        others = [row["policy"] for row in own]
        heading = COLUMNS[measure][0]
        rivals = others if len(others) > 1 else []  # nobody is better than himself
        headings = ["learner", "runs", f"IQM of {heading}", "95 % interval", *(f"P(better than {n})" for n in rivals)]
        cells = []
        for row in own:
            interval = "-" if row["low"] is None else f"{100 * row['low']:.2f} to {100 * row['high']:.2f}"
            better = ["" if name == row["policy"] else f"{row['improvement'][name]:.2f}" for name in rivals]
            cells.append([row["policy"], str(row["runs"]), f"{100 * row['iqm']:.2f}", interval, *better])
        tables.append(as_markdown(headings, cells))
    return "\n".join(tables)


def _generalisation(result: Mapping[str, Any]) -> str:
    names = ("success_rate", "collision_rate", "near_miss_rate", "mean_delay_s", "running_at_end", "vehicles")
    cells = [[case, *(COLUMNS[name][1](block.get(name)) for name in names)] for case, block in result["cases"].items()]
    return f"### Elsewhere than it was trained: {result['policy']}\n\n" + as_markdown(
        ["case", *(COLUMNS[name][0] for name in names)], cells
    )


def _origins(results: Sequence[Mapping[str, Any]], table: Callable[..., str]) -> str:
    """Commit, machine, date and command of each file."""
    cells = [
        [
            str(result["name"]),
            f"`{result.get('commit') or '-'}`",
            _machine(result.get("machine", {})),
            str(result.get("date", "-")),
            f"`{result['command']}`" if "command" in result else "-",
        ]
        for result in results
    ]
    return "### Where the figures come from\n\n" + table(["file", "commit", "machine", "date", "command"], cells)


def _machine(facts: Mapping[str, Any]) -> str:
    return f"{facts.get('processor', '-')}, {facts.get('cores', '-')} cores" if facts else "-"


def updated_page(text: str, generated: str, name: str = "the page") -> str:
    """A page with its generated part replaced.

    Args:
        text: of the page.
        generated: the new part.
        name: of the page, for the message.

    Raises:
        ConfigError: it does not say where that part is.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{name} has no lines {BEGIN} and {END}", fix="put both where the tables should stand")
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def write_report(results: Sequence[Mapping[str, Any]], densities: Sequence[float], out: Path) -> list[Path]:
    """report.md, report.csv, report.json, and pictures; returns the files.

    Raises:
        StorageError: they cannot be written.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    rows = rows_of(results, densities)
    write_whole(out / "report.md", page_text(results, densities, whole=False).encode())
    write_whole(out / "report.csv", as_csv(rows).encode())
    told = {"rows": rows, "aggregates": aggregates(results, densities), "verdicts": verdicts(results, densities)}
    absent = missing(results, densities, _policies(results))
    write_whole(out / "report.json", json.dumps({**told, "missing": absent}, indent=1).encode())
    files = [out / "report.md", out / "report.csv", out / "report.json"]
    if rows:
        files.append(density_plot(_curves(results, densities), out / "densities.png"))
    scores = scores_of(results, densities)
    if scores:
        files.append(profile_plot(scores, out / "profiles.png"))
    return files


def _curves(
    results: Sequence[Mapping[str, Any]], densities: Sequence[float]
) -> dict[str, dict[str, dict[float, list[float]]]]:
    """Field -> policy, or name of a run of one's own -> density -> values of its runs."""
    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    for result in results:
        for row in rows_of([result], densities):
            for name in ("collision_rate", "through_rate", "mean_delay_s"):
                if row[name] is not None:
                    # seeds of the benchmark share a line; two runs of one's own may differ in anything
                    own = result.get("own") and result["kind"] == "learner"
                    line = str(result["name" if own else "policy"])
                    curve = found.setdefault(name, {}).setdefault(line, {})
                    curve.setdefault(row["rate_vph"], []).append(float(row[name]))
    return found
