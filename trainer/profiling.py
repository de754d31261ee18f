"""One step under torch's profiler: which kernels took the time, and a trace for chrome://tracing or Perfetto."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shared.errors import writing

ROWS = 40


def profiled(step: Callable[[], object], device: torch.device, folder: Path) -> None:
    """Run `step` and write `kernels.txt` (a table, the costliest first) and `trace.json.gz` into `folder`."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize(device)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    text = profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=90)
    with writing("--profile", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.txt").write_text(text)
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
