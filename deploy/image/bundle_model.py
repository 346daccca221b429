"""Convert the built-in model once, to where an installation under a prefix finds it.

Run while an image is built: `python bundle_model.py PREFIX`, with the model's package on the path.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from config import ModelSettings
from engine.compute.loading.model_source import installed_model, resolve_model


def main(prefix: Path) -> None:
    """Fill the model's directory under `prefix`. Raises StartRefused when the model's package is missing."""
    settings = ModelSettings()
    with TemporaryDirectory() as home:
        shutil.copytree(resolve_model(settings, Path(home)), installed_model(settings.model, prefix))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
