"""Writes one file of a checkpoint in the background. No collective and no CUDA call ever happens on that thread."""

import threading
import time
from pathlib import Path

from shared.errors import CheckpointError
from trainer.manifest import FileEntry
from trainer.shard import Image, write_image

REMEDY = "make room there or lower train.keep; what was committed before is untouched"


class Writer:
    """A file on its way to the disk. Look at it with `done` and `failure`; `wait` is bounded.

    Attributes:
        entry: size and hash, once done.
        failure: why it will never be done. seconds: how long it took.
    """

    def __init__(self, path: Path, image: Image) -> None:
        self._path, self._image = path, image
        self._ended = threading.Event()
        self.entry: FileEntry | None = None
        self.failure: Exception | None = None
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether every byte is on the disk."""
        return self._ended.is_set() and self.entry is not None

    def start(self) -> None:
        """Write while the caller goes on; the image must not change meanwhile."""
        threading.Thread(target=self.run, name="checkpoint writer", daemon=True).start()

    def run(self) -> None:
        """Write now."""
        began = time.perf_counter()
        try:
            self.entry = write_image(self._path, self._image)
        except OSError as error:
            self.failure = unwritable(self._path, error)
        except Exception as error:
            self.failure = error
        self.seconds = time.perf_counter() - began
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Until it has ended; after so many seconds it has failed."""
        if not self._ended.wait(seconds):
            text = f"{self._path} was not written within train.checkpoint.write_s ({seconds:g})"
            self.failure = CheckpointError(f"{text}; raise it, or find out what holds up the disk")


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error of a write that the system refused."""
    return CheckpointError(f"{path} cannot be written ({error.strerror}); {REMEDY}")
