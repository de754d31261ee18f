"""Pictures that kill decode workers: a `sitecustomize` for worker processes that aborts at a mark in the bytes."""

import io
from pathlib import Path

from PIL import Image

from tests.support.media import photo

MARK = b"kills-decoders"

HOOK = f"""
import os, sys
if "dataloader_svc.worker" in sys.orig_argv:
    from dataloader_svc import headers
    facts = headers.image_facts
    def image_facts(data, *limits):
        if {MARK!r} in data:
            os.abort()
        return facts(data, *limits)
    headers.image_facts = image_facts
"""


def deadly_photo(width: int, height: int, seed: int) -> bytes:
    """A good JPEG whose comment carries the mark."""
    out = io.BytesIO()
    Image.open(io.BytesIO(photo(width, height, seed, "PNG"))).save(out, "JPEG", quality=90, comment=MARK)
    return out.getvalue()


def install(folder: Path) -> str:
    """Write the hook; the value of PYTHONPATH that makes worker processes obey it."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(HOOK)
    return str(folder)
