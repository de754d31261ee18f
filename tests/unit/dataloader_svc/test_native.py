"""What native decoders print is heard: damage that libjpeg only warns of is judged, noise is told once."""

import io
import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

from dataloader_svc import jpeg, native
from shared.batch import Cursor
from tests.support.daemons import ROOT, make_run_file, serving
from tests.support.media import photo, write_tar
from tests.support.reader import RawReader

GOOD, DAMAGED, STRAY = 6, (1, 4), 2


def garbled(seed: int) -> bytes:
    """A JPEG with its end marker, and in its middle a row of ones, which is no code in any Huffman table of a JPEG."""
    data = bytearray(photo(96, 96, seed))
    middle = len(data) * 3 // 4
    data[middle : middle + 60] = b"\xff\0" * 30
    return bytes(data)


def stray(seed: int) -> bytes:
    """A whole JPEG with bytes before its end marker that mean nothing, as some cameras write."""
    data = photo(96, 96, seed)
    return data[:-2] + b"\0" * 9 + data[-2:]


def noisy_png(seed: int) -> bytes:
    """A good PNG whose colour profile libpng finds fault with."""
    out = io.BytesIO()
    Image.open(io.BytesIO(photo(96, 96, seed))).save(out, "PNG", icc_profile=bytes(200))
    return out.getvalue()


def write(path: Path, pictures: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir()
    members = []
    for i, (field, data) in enumerate(pictures):
        members += [(f"k{i:02d}.{field}", data), (f"k{i:02d}.txt", b"words")]
    write_tar(path, members)


def test_pictures_that_libjpeg_repairs_are_bad_and_cost_only_themselves(tmp_path: Path) -> None:
    pictures = [("jpg", garbled(i) if i in DAMAGED else photo(96, 96, i)) for i in range(GOOD)]
    pictures[STRAY] = ("jpg", stray(STRAY))
    write(tmp_path / "data" / "a.tar", pictures)
    path, config = make_run_file(tmp_path)
    with serving(path) as daemon, RawReader(config) as reader:
        reader.join(Cursor())
        ids = {i for batch in reader.read(4) for i in batch.sample_ids}
        log = daemon.log
    assert ids == set(range(GOOD)) - set(DAMAGED)
    assert all(f"k{i:02d} is left out: image_decode, Corrupt JPEG data: bad Huffman code" in log for i in DAMAGED)


def test_noise_of_a_decoder_is_told_once(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.tar", [("png", noisy_png(i)) for i in range(12)])
    path, config = make_run_file(tmp_path)
    with serving(path) as daemon, RawReader(config) as reader:
        reader.join()
        assert {i for batch in reader.read(4) for i in batch.sample_ids} == set(range(12))
        lines = [line for line in daemon.log.splitlines() if "iCCP" in line]
    assert len(lines) == 1
    assert "loader-worker WARNING a decoder says: libpng warning" in lines[0]


def test_messages_that_differ_in_numbers_alone_are_one_kind() -> None:
    program = "import os, sys\nfrom dataloader_svc.native import silence\nfrom shared.logs import setup_logging\n"
    program += "said = silence(int(sys.argv[1]))\nsetup_logging('worker')\nfor i in range(9):\n"
    program += "    os.write(2, b'[ WARN:0@%d.%d] global grfmt.cpp:6%d\\n' % (i, i, i))\n    assert str(i) in said()\n"
    fd, log_fd = native.memory_file(), native.memory_file()
    subprocess.run([sys.executable, "-c", program, str(log_fd)], stderr=fd, pass_fds=(log_fd,), cwd=ROOT, check=True)
    assert native.take(log_fd).count("a decoder says") == 1
    assert native.take(fd) == ""
    os.close(fd)
    os.close(log_fd)


def test_what_is_taken_is_gone_and_the_end_is_kept_for_the_dead() -> None:
    fd = native.memory_file()
    for text in ("first line\n", "second line\n"):
        subprocess.run([sys.executable, "-c", f"import os; os.write(2, {text.encode()!r})"], stderr=fd, check=True)
    assert native.take(fd) == "first line\nsecond line\n"
    assert native.take(fd) == ""
    subprocess.run([sys.executable, "-c", "import os; os.write(2, b'a\\n' * 999 + b'the end')"], stderr=fd, check=True)
    assert native.last_words(fd).endswith("a a the end")
    os.close(fd)


def test_lost_or_false_data_is_damage_and_stray_bytes_are_not() -> None:
    reasons = {
        "Corrupt JPEG data: premature end of data segment": "truncated_image",
        "Premature end of JPEG file": "truncated_image",
        "libpng warning: x\nCorrupt JPEG data: bad Huffman code": "image_decode",
        "Corrupt JPEG data: found marker 0xd9 instead of RST3": "image_decode",
    }
    for said, reason in reasons.items():
        found = jpeg.damage(said)
        assert found and found.reason == reason
    assert jpeg.damage("Corrupt JPEG data: 9 extraneous bytes before marker 0xd9") is None
    assert jpeg.damage("") is None
