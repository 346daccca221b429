"""Build a wheel with the kernels in it: `python -m deploy.wheel.build FOLDER [MACHINE]`.

It is for machines of this kind; for another MACHINE with Linux, such as aarch64, it takes its cross compiler.
Installed from such a wheel nothing is compiled at the first start. The kernels need no library but the C
library; the wheel's tag names the oldest one that has all they use.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from engine.compute.native.compiler import compile_all

ROOT = Path(__file__).resolve().parents[2]
_GLIBC = re.compile(rb"\0GLIBC_2\.(\d+)(?=\0)")


def build_wheel(target: Path, machine: str | None = None) -> Path:
    """The wheel's file in `target`, which may be there. Raises NativeUnavailable, CalledProcessError.

    `machine` is that of the wheel, as Python's `platform` calls it; None: this one.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        plain, room = Path(folder, "plain"), Path(folder, "room")
        _run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(plain), str(ROOT))
        _run("wheel", "unpack", "--dest", str(room), *map(str, plain.glob("*.whl")))
        (content,) = room.iterdir()
        data = content / f"{content.name}.data" / "data"
        libraries = compile_all(data, machine)
        _mark_as_binary(content)
        packing = Path(folder, "packed")
        packing.mkdir()
        _run("wheel", "pack", "--dest-dir", str(packing), str(content))
        (packed,) = packing.iterdir()
        tags = (
            "--python-tag",
            "py3",
            "--abi-tag",
            "none",
            "--platform-tag",
            platform_tag(libraries, machine),
        )
        _run("wheel", "tags", "--remove", *tags, str(packed))
        (made,) = packing.iterdir()
        return Path(shutil.move(made, target / made.name))


def platform_tag(libraries: list[Path], machine: str | None = None) -> str:
    """The platform that the libraries run on: on Linux by the newest symbol of the C library in them."""
    name = sysconfig.get_platform() if machine is None else f"linux-{machine}"
    own = name.replace("-", "_").replace(".", "_")
    if not own.startswith("linux_") or not libraries:
        return own
    needed = max(int(version) for each in libraries for version in _GLIBC.findall(each.read_bytes()))
    return f"manylinux_2_{needed}_{own.removeprefix('linux_')}"


def _mark_as_binary(content: Path) -> None:
    """What is in it belongs into the place for compiled packages."""
    (file,) = content.glob("*.dist-info/WHEEL")
    file.write_text(file.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"))


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    print(build_wheel(Path(sys.argv[1]), *sys.argv[2:3]))
