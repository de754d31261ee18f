"""The jobs that one daemon serves apart: the run file's own, and `loader.jobs`. Same data, own seed, own order."""

import msgspec

from dataloader_svc.index import Index
from dataloader_svc.plan import Planner
from dataloader_svc.plan_file import PlanFiles, key_of
from shared.config import digest, index_dir
from shared.sections import DataSection, RunConfig


class Job:
    """One job: `data` under its own seed, and the plan of that. `content` is the index's."""

    def __init__(self, name: str, data: DataSection, planner: Planner, content: str) -> None:
        self.name, self.digest, self.planner, self.content = name, digest(data), planner, content


def build_jobs(config: RunConfig, index: Index, planner: Planner) -> dict[str, Job]:
    """Every job by name, the run file's own first; `planner` is that one's."""
    jobs = {config.job: Job(config.job, config.data, planner, index.content)}
    for section in config.loader.jobs:
        data = msgspec.structs.replace(config.data, seed=section.seed)
        jobs[section.name] = Job(section.name, data, plan_of(config, index, section.name, data), index.content)
    return jobs


def plan_of(config: RunConfig, index: Index, job: str, data: DataSection) -> Planner:
    """The plan of `data`, the job's; kept between runs in loader.index_dir, where that is set."""
    folder = index_dir(config)
    return Planner(data, index, PlanFiles(folder, job, key_of(data, index.digest)) if folder else None)
