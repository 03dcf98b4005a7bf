"""The display of `baton top`, made from a router's status and activity as text that rich lays out. Pure but for rich.

Where there are no colours, letters stand for the phases of a request: q(ueue), p(refill), h(and-off), d(ecode).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.status import no_controller, silent_s
from cluster.pb import admin_pb2, worker_pb2
from cluster.text import format_bytes, role_name, state_name

_KEPT_SECONDS = 60
_KEPT_REQUESTS = 100
_WIDE = 112
"""Columns from which on KV bytes sent and received are shown."""
_BAR = 12
_BESIDE_CURVE = 26
"""Columns that a curve's name and maximum take."""
_LIFE, _LEAST_LIFE = 32, 6
_WITH_WORKERS, _BESIDE_LIFE = 100, 56
"""Columns from which on the workers of requests are shown; columns beside a request's life without them."""
_LEVELS = "▁▂▃▄▅▆▇█"
_ROLE_COLORS = {"prefill": "blue", "decode": "yellow"}
_PHASES = {
    "queued": ("q", "bright_black"),
    "prefilling": ("p", "blue"),
    "transferring": ("h", "magenta"),
    "decoding": ("d", "yellow"),
}
_OTHER_ROWS = 19
"""Lines that are not workers, pairs or requests."""
_LEAST_REQUESTS = 3


class Seen:
    """The answers received so far. `problem`: why the last poll failed."""

    def __init__(self) -> None:
        self.status = admin_pb2.GetStatusResponse()
        self.activity = admin_pb2.GetActivityResponse()
        self.seconds: deque[admin_pb2.ActivitySecond] = deque(maxlen=_KEPT_SECONDS)
        self.requests: deque[admin_pb2.RequestLife] = deque(maxlen=_KEPT_REQUESTS)
        self.problem = ""

    def since(self) -> admin_pb2.GetActivityRequest:
        return admin_pb2.GetActivityRequest(
            life=self.activity.life,
            after_second=self.seconds[-1].number if self.seconds else 0,
            after_request=self.requests[-1].number if self.requests else 0,
        )

    def note(self, status: admin_pb2.GetStatusResponse, activity: admin_pb2.GetActivityResponse) -> None:
        """Adds the responses to one poll; a restarted router starts anew."""
        if activity.life != self.activity.life:
            self.seconds.clear()
            self.requests.clear()
        self.status, self.activity, self.problem = status, activity, ""
        self.seconds.extend(activity.seconds)
        self.requests.extend(activity.requests)


def render(seen: Seen, console: Console) -> RenderableType:
    """Shows as many requests as the console has lines for; ten where it is no terminal."""
    is_plain = not console.is_terminal or console.no_color
    num_workers, num_pairs = len(seen.status.workers), len(seen.activity.pairs)
    num_lines = console.height - _OTHER_ROWS - num_workers - num_pairs if console.is_terminal else 10
    parts: list[RenderableType] = [
        _head(seen),
        _figures(seen),
        _curves(seen, console.width),
        _workers(seen, console.width),
    ]
    if num_pairs:
        parts.append(_pairs(seen.activity.pairs))
    if seen.requests:
        newest = list(seen.requests)[-max(_LEAST_REQUESTS, num_lines) :][::-1]
        parts.append(_requests(newest, console.width, is_plain=is_plain))
    return Group(*parts)


def _head(seen: Seen) -> Text:
    status, router = seen.status, seen.status.router
    roles = [role_name(w.role) for w in status.workers if not w.is_draining]
    split = f"{roles.count('prefill')}:{roles.count('decode')}"
    text = Text(f"{status.model} at {status.router_address}, up {_age(router.uptime_s)}, {split}")
    if status.config_version:
        text.append(f", configuration {status.config_version}")
    if problem := no_controller(silent_s(router)):
        text.append(f"\n{problem}", style="red")
    if seen.problem:
        text.append(f"\nno answer, this is how it was: {seen.problem}", style="red")
    return text


def _figures(seen: Seen) -> Text:
    window, router = seen.activity.window, seen.status.router
    per = 1 / window.duration_s if window.duration_s else 0.0
    lost = window.num_failed + window.num_rejected
    output, prompt = (_rate(number * per) for number in (window.num_output_tokens, window.num_prompt_tokens))
    return Text(
        f"requests  {_rate(window.num_finished * per)}/s, {router.num_running} running, {router.num_queued} of "
        f"{router.max_queued} queued, {router.num_finished} finished, {lost} failed or rejected in the last minute\n"
        f"tokens    {output}/s output, {prompt}/s prompt\n"
        f"TTFT      {_quantiles(window.ttft)}\n"
        f"ITL       {_quantiles(window.itl)}"
    )


def _quantiles(quantiles: admin_pb2.Quantiles) -> str:
    if not quantiles.count:
        return "-"
    return f"p50 {_time(quantiles.p50)}, p95 {_time(quantiles.p95)}, p99 {_time(quantiles.p99)}"


def _curves(seen: Seen, width: int) -> Table:
    """Curves of the last minute, a mark for each second; fewer on a narrow console."""
    table = Table.grid(padding=(0, 1))
    num_marks = max(1, min(_KEPT_SECONDS, width - _BESIDE_CURVE))
    seconds = list(seen.seconds)[-num_marks:]
    for name, values, show in (
        ("output/s", [s.num_output_tokens / max(s.duration_s, 1e-3) for s in seconds], _rate),
        ("TTFT p50", [s.ttft.p50 for s in seconds], _time),
        ("ITL p50 ", [s.itl.p50 for s in seconds], _time),
    ):
        most = max(values, default=0.0)
        table.add_row(
            name, Text(_sparkline(values).rjust(num_marks), style="cyan"), f"most {show(most)}" if most else ""
        )
    return table


def _sparkline(values: Sequence[float]) -> str:
    most = max(values, default=0.0)
    marks = (" " if not value else _LEVELS[min(7, int(8 * value / most))] for value in values)
    return "".join(marks)


def _workers(seen: Seen, width: int) -> Table:
    rates = {rate.worker_id: rate for rate in seen.activity.rates}
    table = _table(("worker", "role", "state", "KV held"), ("seqs", "wait", "prefill/s", "decode/s"))
    if width >= _WIDE:
        for name in ("KV out", "KV in"):
            table.add_column(name, justify="right", no_wrap=True)
    tiers = [tier.tier for worker in seen.status.workers for tier in worker.stats.tiers]
    for name in dict.fromkeys(tiers):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in sorted(seen.status.workers, key=lambda w: (w.role, w.worker_id)):
        rate = rates.get(worker.worker_id, admin_pb2.WorkerRates())
        role, state, stats = role_name(worker.role), state_name(worker), worker.stats
        cells: list[RenderableType] = [
            worker.worker_id,
            Text(role or "-", style=_ROLE_COLORS.get(role, "")),
            Text(
                "draining" if worker.is_draining else "slow" if worker.is_slow else state,
                style="" if state == "ready" else "red",
            ),
            _kv(stats, _ROLE_COLORS.get(role, "")),
            *(str(n) if stats.blocks_total else "-" for n in (stats.num_running_seqs, stats.num_waiting_requests)),
            _rate(rate.prefill_tokens_per_s),
            _rate(rate.decode_tokens_per_s),
        ]
        if width >= _WIDE:
            cells += [f"{format_bytes(round(n))}/s" for n in (rate.kv_sent_bytes_per_s, rate.kv_received_bytes_per_s)]
        kept = {tier.tier: tier.blocks_kept / tier.blocks_total for tier in stats.tiers}
        cells += [f"{kept[name]:.0%}" if name in kept else "-" for name in dict.fromkeys(tiers)]
        table.add_row(*cells)
    return table


def _kv(stats: worker_pb2.WorkerStats, color: str) -> Text:
    """Draws held, cached and free blocks as a bar, with the held share."""
    total = stats.blocks_total
    if not total:
        return Text("-")
    held = round(_BAR * stats.blocks_held / total)
    cached = min(_BAR - held, round(_BAR * stats.blocks_cached / total))
    return Text.assemble(
        ("█" * held, color), ("▒" * cached, color), "·" * (_BAR - held - cached), f" {stats.blocks_held / total:4.0%}"
    )


def _pairs(pairs: Iterable[admin_pb2.PairActivity]) -> Table:
    numbers = ("now", "last minute", "tokens", "KV p50", "KV p95")
    table = _table(("hand-offs from", "to"), numbers)
    for pair in pairs:
        transfer = pair.kv_transfer
        times = (_time(transfer.p50), _time(transfer.p95)) if transfer.count else ("-", "-")
        counts = (pair.num_now, pair.num_handed_over, pair.num_prompt_tokens)
        table.add_row(pair.prefill_id, pair.decode_id, *map(str, counts), *times)
    return table


def _requests(requests: Sequence[admin_pb2.RequestLife], width: int, *, is_plain: bool) -> Table:
    table = _table(("ended", "life, on one scale"), ("took", "TTFT", "prompt", "cached", "output"))
    has_workers = width >= _WITH_WORKERS
    num_marks = _LIFE if has_workers else max(_LEAST_LIFE, min(_LIFE, width - _BESIDE_LIFE))
    if has_workers:
        table.add_column("workers", no_wrap=True)
    longest = max((_took(life) for life in requests), default=0.0)
    for life in requests:
        workers = f"{life.prefill_id} > {life.decode_id}" if life.prefill_id else life.decode_id or "-"
        cells: list[RenderableType] = [
            Text(life.outcome, style="" if life.outcome == "finished" else "red"),
            _life(life, longest, num_marks, is_plain=is_plain),
            _time(_took(life)),
            _time(life.first_token_s) if life.HasField("first_token_s") else "-",
            *map(str, (life.num_prompt_tokens, life.num_cached_tokens, life.num_output_tokens)),
        ]
        table.add_row(*cells, *([workers] if has_workers else []))
    return table


def _life(life: admin_pb2.RequestLife, longest: float, most_marks: int, *, is_plain: bool) -> Text:
    """Draws a mark for each part of the longest time, with the phase of the request at that time."""
    text, took = Text(), _took(life)
    num_marks = max(1, round(most_marks * took / longest)) if longest else 1
    for mark in range(num_marks):
        at_s = took * (mark + 0.5) / num_marks
        state = next((p.state for p in reversed(life.phases) if p.at_s <= at_s and p.state in _PHASES), "queued")
        letter, color = _PHASES[state]
        text.append(letter if is_plain else "━", style=color)
    return text


def _table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _took(life: admin_pb2.RequestLife) -> float:
    return life.phases[-1].at_s if life.phases else 0.0


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value else "0"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _age(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86_400 else f"{seconds / 86_400:.1f} days"
