"""What the command line shows about an index and about a verification, as rich tables."""

from collections import Counter

import numpy as np
from rich.console import Console
from rich.table import Table

from dataloader_svc.index import Index
from dataloader_svc.indexing import BuildReport
from dataloader_svc.summary import PlanSummary
from dataloader_svc.verify import Verdict

BAR_CELLS = 32
MOST_EXAMPLES = 3


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A bar of `cells` characters, filled to `share` (0 to 1)."""
    filled = round(max(0.0, min(1.0, share)) * cells)
    return "█" * filled + "·" * (cells - filled)


def show_index(console: Console, index: Index, report: BuildReport) -> None:
    """Shards and samples, and problems by reason."""
    console.print(_overview(index, report))
    if problems := _problems(index):
        console.print(problems)


def show_plan(console: Console, plan: PlanSummary) -> None:
    """Buckets, datasets where there are several, the padding share and how evenly ranks are loaded."""
    console.print(_buckets(plan))
    if len(plan.shares) > 1:
        console.print(_mixture(plan))
    naive, bucketed = f"{plan.padding_naive:.1%}", f"{plan.padding_bucketed:.1%}"
    console.print(
        f"Epoch 0: {plan.steps} steps of {plan.packs // max(1, plan.steps)} micro-batches, {plan.samples} samples."
    )
    console.print(
        f"Padding: {bucketed} of all tokens in buckets; {naive} if batches were padded to their largest sample. "
        f"Slots left empty: {plan.unused_images:.1%} of images, {plan.unused_clips:.1%} of clips."
    )
    if plan.dropped_samples:
        console.print(f"Left out as data.batch.leftovers asks: {plan.dropped_samples} good samples.")
    mean, worst = plan.imbalance, plan.worst_imbalance
    console.print(
        f"Most loaded data rank over the mean of a step: {mean.balanced:.3f} (worst step {worst.balanced:.3f}); "
        f"{mean.packed:.3f} ({worst.packed:.3f}) before balancing."
    )


def _overview(index: Index, report: BuildReport) -> Table:
    table = Table("what", "count", title="Index", title_justify="left")
    good = index.verdict == 0
    image, audio = good & (index.height > 0), good & (index.clip_samples > 0)
    rows = {
        "shards": len(index.shards),
        "  indexed now": report.built + report.retokenized,
        "samples": len(index),
        "  good": int(good.sum()),
        "  with image only": int((image & ~audio).sum()),
        "  with audio only": int((audio & ~image).sum()),
        "  with image and audio": int((image & audio).sum()),
        "  text alone": int((good & ~image & ~audio).sum()),
        "caption tokens": int(np.sum(index.text_tokens[good], dtype=np.int64)),
    }
    for what, count in rows.items():
        table.add_row(what, f"{count:,}")
    return table


def _problems(index: Index) -> Table | None:
    found = index.problems()
    if not found:
        return None
    table = Table("reason", "count", "for example", title="Left out", title_justify="left")
    for reason, count in Counter(problem.reason for problem in found).most_common():
        examples = [p for p in found if p.reason == reason][:MOST_EXAMPLES]
        table.add_row(reason, f"{count:,}", "\n".join(f"{p.shard} {p.key}: {p.detail}" for p in examples))
    return table


def _buckets(plan: PlanSummary) -> Table:
    table = Table(
        "group", "samples", "share", title="Groups (image height x width, a: clip samples)", title_justify="left"
    )
    most = max(plan.samples_per_group.values(), default=1)
    for name, count in plan.samples_per_group.items():
        table.add_row(name, f"{count:,}", bar(count / most))
    return table


def _mixture(plan: PlanSummary) -> Table:
    columns = ("dataset", "good samples", "in an epoch", "times each", "share asked", "share served")
    table = Table(*columns, title="Datasets of an epoch", title_justify="left")
    for share in plan.shares:
        times = f"{share.samples / max(1, share.good):.2f}"
        shares = f"{share.asked:.1%}", f"{share.served:.1%}"
        table.add_row(share.dataset, f"{share.good:,}", f"{share.samples:,}", times, *shares)
    return table


def show_verdict(console: Console, verdict: Verdict) -> None:
    """What the logs prove."""
    table = Table("what", "micro-batches", "samples", title="Exactly once", title_justify="left")
    table.add_row(f"consumed in {verdict.steps} steps", f"{verdict.batches:,}", f"{verdict.samples:,}")
    table.add_row("lost", f"{verdict.lost_batches:,}", f"{verdict.lost:,}")
    table.add_row("repeated", f"{verdict.repeated_batches:,}", f"{verdict.repeated:,}")
    table.add_row(f"passed over on request: {verdict.skipped_steps} steps", "", f"{verdict.skipped:,}")
    if verdict.unasked_steps:
        table.add_row(f"passed over, not in data.skip_steps: {verdict.unasked_steps} steps", "", "")
    table.add_row("not of this plan", f"{verdict.unknown_batches:,}", "")
    table.add_row("bad, left out", "", f"{verdict.left_out:,}")
    table.add_row("stand-ins for bad ones", "", f"{verdict.substituted:,}")
    console.print(table)
    rest = " that was not to be passed over" if verdict.skipped_steps else ""
    console.print(f"clean: every planned sample{rest} once" if verdict.clean else "NOT clean")
