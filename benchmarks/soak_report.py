"""What a soak's record says: how fast each process grows, what came of the requests, and whether all is well. Pure, but
for the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.slopes import Slope, means, slope_of
from benchmarks.soak_record import Record

BOUNDS = {
    "pss_mib": 8.0,
    "rss_mib": 8.0,
    "descriptors": 4.0,
    "threads": 2.0,
    "series": 12.0,
    "state_mib": 4.0,
    "logs_mib": 32.0,
    "ray_mib": 64.0,
}
"""What counts as flat: at most so much more an hour. Memory is counted once where processes share it (PSS), and as each
has it resident (RSS); `series`: on a metrics page; `state`: the journal; `ray`: the folder of Ray, with its logs."""
MOST_WARM_UP_S = 600.0
WIDTH = 150
"""In columns, of a table that does not go to a terminal."""


@dataclass(frozen=True)
class Span:
    """How much of a soak there shall be, and how it is cut up."""

    minutes: float

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    @property
    def warm_up_s(self) -> float:
        """From the beginning of each segment, left out: in it caches and allocators fill."""
        return min(MOST_WARM_UP_S, self.seconds / 4)

    @property
    def bin_s(self) -> float:
        """Samples of so long are one point: a minute of an hour."""
        return max(10.0, self.seconds / 60)


@dataclass(frozen=True)
class Growth:
    """Of one quantity of one process. `is_judged`: the verdict depends on it."""

    process: str
    quantity: str
    slope: Slope
    is_judged: bool

    @property
    def is_flat(self) -> bool:
        return self.slope.is_flat(BOUNDS[self.quantity])


def growths_of(record: Record, span: Span) -> list[Growth]:
    """Where processes are killed, none has an hour to grow in: there the cluster's total and its files are judged."""
    names = sorted({name for segment in record.segments for sample in segment.samples for name in sample["processes"]})
    found = []
    for process in names:
        for quantity in BOUNDS:
            points = [
                means(segment.points(process, quantity), span.warm_up_s, span.bin_s) for segment in record.segments
            ]
            slope = slope_of(points)
            if slope is not None:
                is_judged = record.phase == "stops" or process in ("total", "files")
                found.append(Growth(process, quantity, slope, is_judged and _says_something(process, quantity)))
    return found


def _says_something(process: str, quantity: str) -> bool:
    """Pages that several processes share are counted in each one's RSS, so that their sum says nothing; and log files
    grow until they are full, which takes longer than a soak."""
    return (process, quantity) not in {("total", "rss_mib"), ("files", "logs_mib")}


def failures_of(record: Record, growths: list[Growth], span: Span) -> list[str]:
    """Why the soak is not passed, or nothing."""
    failures = [f"{count} × {kind}" for kind in ("wrong", "lost") if (count := record.counts[kind])]
    failures += [
        f"{g.process}: {g.quantity} grows by {g.slope.per_hour:.2f} ± {g.slope.error:.2f} an hour, which is more than "
        f"{BOUNDS[g.quantity]:g}"
        for g in growths
        if g.is_judged and not g.is_flat
    ]
    if record.seconds < span.seconds:
        failures.append(f"{record.seconds / 60:.1f} of {span.minutes:g} minutes are done")
    for what, count in (("request", record.counts["completed"]), ("fault", sum(record.faults.values()))):
        if not count:
            failures.append(f"there was no {what}")
    if not record.num_quiet:
        failures.append("there was no quiet moment at which to look for what is held")
    if not any(g.is_judged for g in growths):
        failures.append("there are too few samples after the warm-up to find a slope from")
    return failures + record.problems


def document(record: Record, span: Span) -> dict[str, Any]:
    """What `--json` prints."""
    growths = growths_of(record, span)
    failures = failures_of(record, growths, span)
    slopes: dict[str, dict[str, Any]] = {}
    for g in growths:
        slopes.setdefault(g.process, {})[g.quantity] = {
            "per_hour": round(g.slope.per_hour, 3),
            "error": round(g.slope.error, 3),
            "points": g.slope.num_points,
            "bound": BOUNDS[g.quantity],
            "is_judged": g.is_judged,
            "is_flat": g.is_flat,
        }
    return {
        "minutes": round(record.seconds / 60, 2),
        "of_minutes": span.minutes,
        "segments": len(record.segments),
        "capacity_per_s": record.capacity,
        "requests": dict(sorted(record.counts.items())),
        "faults": dict(sorted(record.faults.items())),
        "quiet_moments": record.num_quiet,
        "per_hour": slopes,
        "failures": failures,
    }


def show(found: dict[str, Any]) -> None:
    """Prints one phase."""
    console = Console(width=max(WIDTH, Console().width))
    table = Table(title=f"growth an hour, ± its standard error, in {found['minutes']:g} minutes")
    table.add_column("process")
    for name in BOUNDS:
        table.add_column(name, justify="right")
    for process, quantities in found["per_hour"].items():
        table.add_row(process, *(_cell(quantities.get(name)) for name in BOUNDS))
    console.print(table)
    for title in ("requests", "faults"):
        console.print(f"{title}: " + ", ".join(f"{count} {kind}" for kind, count in found[title].items()))
    console.print(
        f"{found['quiet_moments']} quiet moments; {found['segments']} segments; "
        f"capacity {found['capacity_per_s']} requests a second"
    )
    for failure in found["failures"][:20]:
        console.print(f"FAILED: {failure[:600]}", markup=False)


def _cell(slope: dict[str, Any] | None) -> str:
    if slope is None:
        return ""
    told = f"{slope['per_hour']:+.1f} ± {slope['error']:.1f}"
    if slope["is_flat"]:
        return told
    return f"[red]{told}[/red]" if slope["is_judged"] else f"[yellow]{told}[/yellow]"
