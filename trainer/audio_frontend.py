"""The door to torchaudio, and Whisper's mel filters from it.

torchaudio's wheel links CUDA libraries that a CPU-only torch lacks. Only its compiled extension needs them, and nothing
here uses that, so where the plain import fails for that reason it is repeated with the extension left out.
"""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

EXTENSION = "torchaudio._extension"


def import_torchaudio() -> Any:
    """The torchaudio module, without its compiled extension where that cannot be loaded.

    Raises:
        ImportError: torchaudio is not installed.
    """
    try:
        return importlib.import_module("torchaudio")
    except OSError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
            del sys.modules[name]
        sys.modules[EXTENSION] = _no_extension()
        return importlib.import_module("torchaudio")


def _no_extension() -> types.ModuleType:
    module = types.ModuleType(EXTENSION, "Stands for the compiled extension where it cannot be loaded.")
    absent: dict[str, Any] = {
        "__path__": [],
        "_IS_TORCHAUDIO_EXT_AVAILABLE": False,
        "_IS_ALIGN_AVAILABLE": False,
        "_check_cuda_version": lambda: None,
        "fail_if_no_align": _refuse,
    }
    vars(module).update(absent)
    return module


def _refuse(function: Callable[..., Any]) -> Callable[..., NoReturn]:
    def refused(*args: object, **options: object) -> NoReturn:
        raise RuntimeError(f"torchaudio.{function.__name__} needs torchaudio's compiled extension")

    return refused


def mel_filters_fm(n_fft: int, mels: int, rate_hz: int) -> Tensor:
    """[n_fft / 2 + 1, mels] Slaney-scaled, area-normalised triangles up to half the rate: those of Whisper."""
    filters = import_torchaudio().functional.melscale_fbanks
    found: Tensor = filters(n_fft // 2 + 1, 0.0, rate_hz / 2, mels, rate_hz, norm="slaney", mel_scale="slaney")
    return found.to(torch.float32)
