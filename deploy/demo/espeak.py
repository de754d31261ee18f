"""The espeak-ng speech synthesiser through ctypes, and a child process that runs it.

espeak-ng keeps generator state between sentences that no call resets (measured on 1.52: neither `espeak_Terminate` nor
`espeak_ng_SetRandSeed` does), so a sentence's samples depend on the sentences before it. `synthesize` therefore gives
every batch a process of its own: equal batches give equal samples.

The child runs this file as a script, so it imports nothing from the repository.
"""

import atexit
import ctypes
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import espeakng_loader

# speak_lib.h and espeak_ng.h
AUDIO_OUTPUT_SYNCHRONOUS, INITIALIZE_DONT_EXIT = 2, 0x8000
POS_CHARACTER, CHARS_UTF8 = 1, 1
PARAMETER_RATE, PARAMETER_PITCH = 1, 3
MAX_DATA_PATH = 159  # N_PATH_HOME - 1; a longer path makes espeak_Initialize fail

RANDOM_SEED = 1
HEADER = struct.Struct("<II")  # rate_hz, samples

SynthCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class EspeakError(RuntimeError):
    """espeak-ng refused a call."""


class Utterance(NamedTuple):
    """One sentence and how to say it."""

    text: str
    voice: str
    speed_wpm: int
    pitch: int


class Waveform(NamedTuple):
    """One channel of 16-bit samples."""

    rate_hz: int
    pcm: bytes


class Espeak:
    """The library, initialised. Make one per process and keep it: the library's state is global."""

    def __init__(self) -> None:
        self._lib = _bind(ctypes.CDLL(espeakng_loader.get_library_path()))
        self._data_path = _short_path(Path(espeakng_loader.get_data_path()))
        self._pcm = bytearray()
        self._callback = SynthCallback(self._receive)  # the library keeps the pointer: hold the object
        self.rate_hz = self._initialize()
        self._lib.espeak_SetSynthCallback(self._callback)
        self._lib.espeak_ng_SetRandSeed(RANDOM_SEED)

    def say(self, utterance: Utterance) -> Waveform:
        """Synthesise one utterance."""
        self._pcm.clear()
        text = utterance.text.encode()
        self._call("espeak_SetVoiceByName", utterance.voice.encode())  # first: a voice resets the parameters
        self._call("espeak_SetParameter", PARAMETER_RATE, utterance.speed_wpm, 0)
        self._call("espeak_SetParameter", PARAMETER_PITCH, utterance.pitch, 0)
        self._call("espeak_Synth", text, len(text) + 1, 0, POS_CHARACTER, 0, CHARS_UTF8, None, None)
        if not self._pcm:
            raise EspeakError(f"espeak_Synth gave no sound for {utterance}; give it a text with words in it")
        return Waveform(self.rate_hz, bytes(self._pcm))

    def _initialize(self) -> int:
        path = str(self._data_path).encode()
        rate_hz: int = self._lib.espeak_Initialize(AUDIO_OUTPUT_SYNCHRONOUS, 0, path, INITIALIZE_DONT_EXIT)
        if rate_hz <= 0:
            raise EspeakError(
                f"espeak_Initialize({self._data_path}) returned {rate_hz}, must be a sample rate; "
                "reinstall espeakng-loader"
            )
        return rate_hz

    def _receive(self, samples: Any, count: int, _events: Any) -> int:
        if samples and count > 0:
            self._pcm += ctypes.string_at(samples, count * 2)
        return 0

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._lib, function)(*arguments)
        if status:
            raise EspeakError(f"{function}{arguments} returned {status}, must be 0 (EE_OK)")


def synthesize(utterances: Sequence[Utterance]) -> list[Waveform]:
    """Say every utterance, in order, in a fresh process."""
    command = [sys.executable, "-P", __file__]
    request = json.dumps(utterances).encode()
    child = subprocess.run(command, input=request, capture_output=True, check=False)
    if child.returncode:
        error = child.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise EspeakError(f"the speech process ended with status {child.returncode}: {error[-1]}")
    return _split(child.stdout, len(utterances))


def _split(stream: bytes, count: int) -> list[Waveform]:
    waveforms, offset = [], 0
    for _ in range(count):
        rate_hz, samples = HEADER.unpack_from(stream, offset)
        start = offset + HEADER.size
        offset = start + samples * 2
        waveforms.append(Waveform(rate_hz, stream[start:offset]))
    return waveforms


def _bind(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the C signatures that this module uses."""
    c_int, c_uint, c_char_p, c_void_p = ctypes.c_int, ctypes.c_uint, ctypes.c_char_p, ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "espeak_Initialize": (c_int, [c_int, c_int, c_char_p, c_int]),
        "espeak_SetSynthCallback": (None, [SynthCallback]),
        "espeak_SetVoiceByName": (c_int, [c_char_p]),
        "espeak_SetParameter": (c_int, [c_int, c_int, c_int]),
        "espeak_ng_SetRandSeed": (c_int, [ctypes.c_long]),
        "espeak_Synth": (
            c_int,
            [c_char_p, ctypes.c_size_t, c_uint, c_int, c_uint, c_uint, ctypes.POINTER(c_uint), c_void_p],
        ),
    }
    for name, (restype, argtypes) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return lib


def _short_path(path: Path) -> Path:
    """`path`, or a link to it where it is longer than the library's buffer."""
    if len(str(path).encode()) <= MAX_DATA_PATH:
        return path
    link_dir = Path(tempfile.mkdtemp(prefix="espeak-"))
    atexit.register(shutil.rmtree, link_dir)
    link = link_dir / path.name
    link.symlink_to(path)
    return link


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """The child process: JSON utterances in, headers and samples out."""
    engine = Espeak()
    for fields in json.load(requests):
        waveform = engine.say(Utterance(*fields))
        replies.write(HEADER.pack(waveform.rate_hz, len(waveform.pcm) // 2) + waveform.pcm)


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
