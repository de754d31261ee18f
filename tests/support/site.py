"""Where real daemons are watched: metrics, and whole epochs by bare readers."""

import urllib.request
from pathlib import Path

from dataloader_svc.metrics import parse
from shared.sections import RunConfig
from tests.support.daemons import Daemon
from tests.support.reader import RawReader


class Site:
    """A daemon that is up, its run file and its metrics."""

    def __init__(self, path: Path, config: RunConfig, daemon: Daemon) -> None:
        self.path, self.config, self.daemon = path, config, daemon
        self.folder = path.parent

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the series of `name` with `labels`."""
        return sum(v for n, own, v in self.scrape() if n == name and labels.items() <= own.items())

    def scrape(self) -> list[tuple[str, dict[str, str], float]]:
        url = f"http://127.0.0.1:{self.config.loader.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return parse(answer.read().decode())


def count_steps(reader: RawReader) -> int:
    """Micro-batches of epoch 0, by reading until epoch 1 begins."""
    reader.join()
    batch = reader.batch()
    count = 1
    while batch.after.epoch == 0:
        reader.release(batch)
        batch = reader.batch()
        count += 1
    reader.bye()
    return count
