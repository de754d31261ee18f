"""The house's laws, held by parsing imports: who may import whom, and one door per foreign library."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "dataloader_svc", "trainer")
DOORS = {
    "zmq": {"dataloader_svc/server.py", "trainer/link.py"},
    "nvidia": {"dataloader_svc/dali.py", "dataloader_svc/pipeline.py"},
    "simplejpeg": {"dataloader_svc/jpeg.py"},
    "tarfile": {"dataloader_svc/shards.py"},
    "webdataset": {"dataloader_svc/shards.py"},
    "fsspec": {"dataloader_svc/remote.py"},
    "deepspeed": {"trainer/engine.py", "trainer/parallel/expert_state.py"},
    "flash_attn": {"trainer/models/flash2.py", "trainer/models/flash4.py"},
    "torchaudio": {"trainer/audio_frontend.py"},
    "prometheus_client": {"shared/telemetry.py", "dataloader_svc/metrics.py", "trainer/metrics.py"},
}
FORBIDDEN = {
    "shared": {"dataloader_svc", "trainer", "torch"},
    "dataloader_svc": {"trainer", "torch"},
    "trainer": {"dataloader_svc"},
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Top-level names of everything the file imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found |= {str(a.value).split(".")[0] for a in node.args if isinstance(a, ast.Constant)}
    return found


def test_there_is_something_to_hold() -> None:
    assert all(len(sources(package)) > 5 for package in PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_halves_never_import_each_other(package: str) -> None:
    broken = {str(p.relative_to(ROOT)): bad for p in sources(package) if (bad := imports(p) & FORBIDDEN[package])}
    assert broken == {}


@pytest.mark.parametrize("library", DOORS)
def test_each_foreign_library_has_its_door(library: str) -> None:
    users = {str(p.relative_to(ROOT)) for package in PACKAGES for p in sources(package) if library in imports(p)}
    assert users <= DOORS[library]


def test_nothing_pickles() -> None:
    words = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    guilty = [str(p) for package in PACKAGES for p in sources(package) if imports(p) & set(words)]
    assert guilty == []
    texts = [p for package in PACKAGES for p in sources(package) if "_pyobj" in p.read_text()]
    assert texts == []


def test_the_trainer_draws_from_torch_alone() -> None:
    """Checkpoints keep torch's generators and no others."""
    drawing = [str(p) for p in sources("trainer") if "random" in imports(p) or "np.random" in p.read_text()]
    assert drawing == []


def test_files_stay_readable() -> None:
    ours = [p for folder in (*PACKAGES, "deploy", "examples", "tests") for p in sources(folder)]
    assert {str(p): n for p in ours if (n := len(p.read_text().splitlines())) > 400} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").rglob("configs/*.yaml")), ids=lambda p: p.name)
def test_every_shipped_run_file_loads(path: Path) -> None:
    from shared.config import load

    assert load(path).job
