"""weights_digest: tells models apart by all that they are."""

from __future__ import annotations

import mmap
from pathlib import Path

import xxhash

from engine.compute.loading.model_files import gguf_of, weight_files
from engine.errors import StartRefused


def weights_digest(directory: Path) -> str:
    """32 hexadecimal digits of the weights and the configuration of the model in `directory`.

    Every byte counts: a fine-tune may differ from its base in any part of any file. That takes about 0.2 s a
    gigabyte of files that were just read. Raises StartRefused where one cannot be read.
    """
    source = gguf_of(directory)
    digest = xxhash.xxh3_128()
    for path in (directory / "config.json", *(weight_files(directory) if source is None else (source,))):
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                digest.update(len(content).to_bytes(8, "little"))
                digest.update(content)
        except (OSError, ValueError) as error:
            raise StartRefused(f"{path} cannot be read: {error}.") from error
    return digest.hexdigest()
