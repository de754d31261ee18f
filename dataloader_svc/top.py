"""`millstream-loader top`: a running daemon's metrics page as a terminal screen, refreshed in place."""

import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dataloader_svc.metrics import Sample, parse
from dataloader_svc.tables import bar
from shared.errors import MillstreamError

WAIT_S = 2.0
QUANTILES = (0.5, 0.95, 0.99)
STAGES = ("queue", "read", "decode", "assemble", "handover")
CELLS = 24


class Scrape:
    """One reading of the page: values by name and label."""

    def __init__(self, samples: list[Sample], at: float) -> None:
        self.samples, self.at = samples, at

    def value(self, name: str, **labels: str) -> float:
        """Sum of all series of `name` that carry `labels`."""
        return sum(v for n, own, v in self.samples if n == name and labels.items() <= own.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values of `name` for each value of `label`, largest first."""
        found: dict[str, float] = defaultdict(float)
        for sample_name, labels, value in self.samples:
            if sample_name == name and label in labels:
                found[labels[label]] += value
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound."""
        series = [(own, v) for n, own, v in self.samples if n == name + "_bucket"]
        return {float(own["le"]): v for own, v in series if labels.items() <= own.items()}


def quantile(share: float, cumulative: Mapping[float, float]) -> float:
    """The `share` quantile of a histogram's cumulative counts, linear within a bucket as PromQL's histogram_quantile.

    NaN without observations; the largest finite bound when it lies beyond that.
    """
    bounds = sorted(cumulative)
    total = cumulative[bounds[-1]] if bounds else 0.0
    if not total:
        return float("nan")
    low, below = 0.0, 0.0
    for bound in bounds:
        if cumulative[bound] >= share * total:
            inside = cumulative[bound] - below
            return low if bound == float("inf") else low + (bound - low) * (share * total - below) / inside
        low, below = bound, cumulative[bound]
    return low


def scrape(url: str) -> Scrape:
    """Read the page.

    Raises:
        MillstreamError: nothing answers there.
    """
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return Scrape(parse(answer.read().decode()), time.monotonic())
    except (OSError, ValueError, urllib.error.URLError) as error:
        hint = "is the daemon running, and is this its loader.metrics_port?"
        raise MillstreamError(f"no metrics at {url} ({error}); {hint}") from None


def watch(console: Console, url: str, once: bool, every_s: float) -> None:
    """Show frames until Ctrl-C, or one frame.

    Raises:
        MillstreamError: nothing answers at the first reading.
    """
    last = scrape(url)
    if once:
        console.print(frame(last, None))
        return
    with Live(frame(last, None), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every_s)
                last = _refresh(live, url, last)
        except KeyboardInterrupt:
            return


def _refresh(live: Live, url: str, last: Scrape) -> Scrape:
    try:
        now = scrape(url)
    except MillstreamError as error:
        live.update(Text(str(error), style="red"), refresh=True)
        return last
    live.update(frame(now, last), refresh=True)
    return now


def frame(now: Scrape, before: Scrape | None) -> Group:
    """One screen. Rates are since `before`, or absent without it."""
    return Group(_head(now, before), _stages(now), _slots(now), *_optional(now))


def _head(now: Scrape, before: Scrape | None) -> Text:
    state = "ready" if now.value("loader_ready") else "not ready"
    parts = [state, f"{now.value('loader_clients'):.0f} readers", f"{now.value('loader_shards'):.0f} shards"]
    for name, label, extra in (
        ("loader_samples_total", "samples", {"modality": "sample"}),
        ("loader_batches_sent_total", "batches", {}),
    ):
        total = now.value(name, **extra)
        rate = (total - before.value(name, **extra)) / max(1e-9, now.at - before.at) if before else None
        parts.append(f"{total:,.0f} {label}" + (f" ({rate:,.1f}/s)" if rate is not None else ""))
    parts.append(f"{now.value('loader_worker_restarts_total'):.0f} worker restarts")
    padding = now.by("loader_padding_ratio", "kind")
    parts.append(f"padding {padding.get('bucketed', 0):.1%} (naive {padding.get('naive', 0):.1%})")
    load = now.by("loader_step_imbalance_ratio", "kind")
    parts.append(f"fullest rank {load.get('balanced', 1):.2f} of the mean")
    parts += [f"GPU shared by {how.replace('_', ' ')}" for how in now.by("loader_gpu_sharing", "how")]
    parts += [f"GPU memory {use} {size / 2**20:,.0f} MiB" for use, size in now.by("loader_device_bytes", "use").items()]
    return Text("millstream-loader: " + " · ".join(parts), style="bold")


def _stages(now: Scrape) -> Table:
    table = Table("stage", "batches", "p50", "p95", "p99", "share of time", title="Latency", title_justify="left")
    sums = {stage: now.value("loader_stage_seconds_sum", stage=stage) for stage in STAGES}
    whole = sum(sums.values()) or 1.0
    for stage in STAGES:
        cumulative = now.buckets("loader_stage_seconds", stage=stage)
        count = f"{now.value('loader_stage_seconds_count', stage=stage):,.0f}"
        marks = [_seconds(quantile(share, cumulative)) for share in QUANTILES]
        table.add_row(stage, count, *marks, bar(sums[stage] / whole, CELLS))
    hold = now.buckets("loader_lease_seconds")
    marks = [_seconds(quantile(share, hold)) for share in QUANTILES]
    table.add_row("held by reader", f"{now.value('loader_lease_seconds_count'):,.0f}", *marks, "")
    return table


def _seconds(value: float) -> str:
    if value != value:
        return "-"
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"


def _slots(now: Scrape) -> Table:
    return _shares(now.by("loader_slots", "state"), "slots", "state")


def _optional(now: Scrape) -> list[Table]:
    tables = (
        _shares(now.by("loader_batches_filled_total", "group"), "Buckets", "group"),
        _shares(now.by("loader_samples_quarantined_total", "reason"), "Bad samples", "reason"),
    )
    return [table for table in tables if table.row_count]


def _shares(values: Mapping[str, float], title: str, label: str) -> Table:
    table = Table(label, "count", "share", title=title.capitalize(), title_justify="left")
    whole = sum(values.values()) or 1.0
    for name, value in values.items():
        table.add_row(name, f"{value:,.0f}", bar(value / whole, CELLS))
    return table
