"""Key files for CURVE, ZeroMQ's encryption and authentication by public keys. No ZeroMQ here: only files.

A key is 40 characters of Z85 in a file of one line. A folder of keys (`loader.keys_dir`) holds, on the daemon's host,
`daemon.secret` and a `.public` file of every reader that may come; on a trainer's host, `daemon.public` and
`reader.secret`. A secret that anybody else could read is refused.
"""

import os
import re
import stat
from pathlib import Path

import msgspec

from shared.errors import ConfigError, writing

NAME = "loader.keys_dir"
DAEMON, READER = "daemon", "reader"
KEY = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
MAX_FILE_BYTES = 256
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class DaemonKeys(msgspec.Struct, frozen=True):
    """What a daemon needs: its secret, and the public keys it lets in."""

    secret: bytes
    allowed: frozenset[bytes]


class ReaderKeys(msgspec.Struct, frozen=True):
    """What a reader needs: the daemon's public key, and its own secret."""

    daemon: bytes
    secret: bytes


def daemon_keys(folder: Path) -> DaemonKeys:
    """The daemon's keys in `folder`.

    Raises:
        ConfigError: one is missing, no key, or a secret open to others; or no reader would be let in.
    """
    own = f"{DAEMON}.public"
    allowed = frozenset(_read(path) for path in sorted(folder.glob("*.public")) if path.name != own)
    if not allowed:
        raise ConfigError(NAME, folder, "has no .public file of a reader", "copy reader.public there")
    return DaemonKeys(_read(folder / f"{DAEMON}.secret", secret=True), allowed)


def reader_keys(folder: Path) -> ReaderKeys:
    """A reader's keys in `folder`.

    Raises:
        ConfigError: one is missing, no key, or a secret open to others.
    """
    return ReaderKeys(_read(folder / f"{DAEMON}.public"), _read(folder / f"{READER}.secret", secret=True))


def write_pair(folder: Path, name: str, public: bytes, secret: bytes) -> None:
    """Write NAME.public, and NAME.secret for its owner alone.

    Raises:
        ConfigError: one of them exists, or cannot be written.
    """
    for suffix, key, mode in (("secret", secret, 0o600), ("public", public, 0o644)):
        path = folder / f"{name}.{suffix}"
        with writing("keys", path):
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            except FileExistsError:
                raise ConfigError("keys", path, "exists", "remove it first, or give another folder") from None
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(key + b"\n")
            except OSError:
                path.unlink()
                raise


def _read(path: Path, secret: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(MAX_FILE_BYTES).strip()
    except OSError as error:
        remedy = "make keys with millstream-loader keys, and copy them"
        raise ConfigError(NAME, path, f"cannot be read ({error.strerror})", remedy) from None
    if secret and mode & OTHERS:
        rule = f"has mode {stat.S_IMODE(mode):o}: others may use the secret"
        raise ConfigError(NAME, path, rule, f"chmod 600 {path}; make new keys if somebody may have read it")
    if not KEY.fullmatch(key):
        raise ConfigError(NAME, path, "holds no key (40 characters of Z85)", "make keys with millstream-loader keys")
    return key
