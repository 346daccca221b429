"""What a build must be handed so that pip inside it finds packages as the pip of this machine does."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CERTIFICATES = "/mnt/pip/certificates.pem"  # an image has its own where they usually lie


@dataclass(frozen=True)
class PipConfiguration:
    """A pip.conf, and the folders and files of this machine that it names, with their names in the build."""

    file: Path
    places: dict[str, str]

    def secret(self) -> list[str]:
        """Options that hand the file in."""
        return ["--secret", f"id=pip.conf,src={self.file}"]

    def volumes(self) -> list[str]:
        """Options that hand the places in."""
        return [f"--volume={here}:{there}:ro" for here, there in self.places.items()]


def read_pip_configuration(python: str, folder: Path) -> PipConfiguration:
    """The configuration of `python`'s pip, written to a file in `folder`."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = re.findall(r"^(:env:|[^.:]+)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    # The environment's values win, whatever they are listed after.
    values = {key: value for scope, key, value in sorted(found, key=lambda each: each[0] == ":env:")}
    places = {place: place for value in values.values() for place in map(_folder, value.split()) if place}
    if certificates := values.get("cert"):
        values["cert"] = places[certificates] = _CERTIFICATES
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in values.items()))
    return PipConfiguration(file, places)


def _folder(word: str) -> str | None:
    """The folder of this machine that a value names; an index's pages point to files beside it."""
    path = Path(word.removeprefix("file://"))
    if not path.is_absolute() or not path.is_dir():
        return None
    return str(path.parent if word.startswith("file://") else path)
