"""What a run writes: a disk that is full, or a place that takes no files, ends it in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from engine.compute.loading.model_files import first_line
from engine.errors import StartRefused


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn what fails while `path` is written into StartRefused."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise StartRefused(f"{path} cannot be written: {reason}.") from error
