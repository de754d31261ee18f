"""Key files: made with safe modes, refused when others may read them."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.keys import daemon_keys, reader_keys, write_pair
from tests.support.keys import make_keys

PUBLIC, SECRET = b"p" * 40, b"s" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("daemon", "reader"):
        write_pair(tmp_path, name, PUBLIC, SECRET)
    return tmp_path


def test_a_pair_survives_its_files(folder: Path) -> None:
    assert reader_keys(folder).daemon == PUBLIC
    assert reader_keys(folder).secret == daemon_keys(folder).secret == SECRET


def test_the_command_makes_secrets_that_only_their_owner_reads(tmp_path: Path) -> None:
    made = make_keys(tmp_path / "keys")
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    assert {name: mode for name, mode in modes.items() if name.endswith(".secret")} == {
        "daemon.secret": 0o600,
        "reader.secret": 0o600,
    }
    assert made.stat().st_mode & 0o777 == 0o700
    assert len(daemon_keys(made).allowed) == 1
    assert daemon_keys(made).secret != reader_keys(made).secret


def test_every_public_key_but_the_daemons_is_let_in(folder: Path) -> None:
    write_pair(folder, "node7", b"7" * 40, SECRET)
    (folder / "daemon.public").write_bytes(b"d" * 40)
    assert daemon_keys(folder).allowed == {PUBLIC, b"7" * 40}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_may_read_is_refused(folder: Path, mode: int) -> None:
    for name, load in (("daemon", daemon_keys), ("reader", reader_keys)):
        path = folder / f"{name}.secret"
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"{name}\.secret\) has mode {mode:o}: others may use the secret; chmod"):
            load(folder)


def test_keys_are_never_overwritten(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"daemon\.secret\) exists; remove it first"):
        write_pair(folder, "daemon", b"x" * 40, b"y" * 40)
    assert daemon_keys(folder).secret == SECRET


@pytest.mark.parametrize("content", [b"", b"short", b"s" * 41, b"\xff" * 40, b"~" * 40])
def test_what_is_no_key_is_refused(folder: Path, content: bytes) -> None:
    (folder / "daemon.public").write_bytes(content)
    with pytest.raises(ConfigError, match="holds no key"):
        reader_keys(folder)


def test_missing_files_are_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loader\.keys_dir .*has no \.public file of a reader; copy reader\.public"):
        daemon_keys(tmp_path)
    with pytest.raises(ConfigError, match=r"daemon\.public\) cannot be read .*millstream-loader keys"):
        reader_keys(tmp_path)
