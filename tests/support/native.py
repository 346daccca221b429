"""The compiled kernels for tests, where this machine can have them."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest
import torch

from engine.compute.native.compiler import find_compiler, library
from engine.compute.native.drawing import NativeDraw
from engine.compute.native.forms import KernelBuild, NativeUnavailable, choose_build, forms_of
from engine.compute.native.kernels import NativeKernels

# The environment of engines whose tests are of other things: compiling takes longer than they do.
WITHOUT_KERNELS = {"SLIPSTREAM_MODEL__COMPILE": "off"}

# A library takes long to compile, so tests share them: in bfloat16 the fastest form and in float32 this one,
# both with formats, which serve for what needs none too; and this form in bfloat16 where there must be none.
PLAIN_FORM = FLOAT32_FORM = forms_of()[-1].name if forms_of() else "auto"

# What the default tests ask for on most machines; the rest is compiled by the first test that needs it.
DEFAULT_BUILDS = (
    (torch.float32, FLOAT32_FORM, True),
    (torch.bfloat16, "auto", True),
    (torch.bfloat16, PLAIN_FORM, False),
    (torch.float16, "avx512", False),
)


def pretend_every_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has all that any form of the kernels is made of, and a system that allows it."""
    every = {name: True for form in forms_of() for name in form.needs}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: every)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)


def fastest_form() -> str:
    """The form that models in bfloat16 get here; empty for none."""
    try:
        return choose_build(torch.bfloat16).form.name
    except NativeUnavailable:
        return ""


@cache
def _home() -> Path:
    home = Path(mkdtemp())
    atexit.register(rmtree, home, ignore_errors=True)
    return home


@cache
def _compiled(build: KernelBuild) -> Path:
    return library(_home(), build)


def build_here(
    dtype: torch.dtype = torch.bfloat16, form: str = "auto", *, formats: bool = False
) -> KernelBuild:
    """The kernels of that form for models of that type.

    Skips the test with the reason where no machine like this could have them.
    """
    try:
        build = choose_build(dtype, form, formats=formats)
        find_compiler()
    except NativeUnavailable as reason:
        pytest.skip(f"compiled kernels: {reason}")
    return build


def _shared(dtype: torch.dtype, form: str, formats: bool) -> KernelBuild:
    """As `build_here`, but in the fastest form in bfloat16 always with formats: other tests need them."""
    build = build_here(dtype, form, formats=formats)
    fastest = choose_build(torch.bfloat16, formats=True)
    return fastest if (build.form, build.dtype) == (fastest.form, fastest.dtype) else build


def compiled_home(dtype: torch.dtype = torch.bfloat16, form: str = "auto", *, formats: bool = False) -> Path:
    """A home with the kernels in it, compiled once a process; as `build_here`.

    Source that does not compile fails the test.
    """
    _compiled(_shared(dtype, form, formats))
    return _home()


@cache
def _loaded(build: KernelBuild) -> NativeKernels:
    return NativeKernels(_compiled(build), build.dtype)


def compiled_kernels(
    dtype: torch.dtype = torch.bfloat16, form: str = "auto", *, formats: bool = False
) -> NativeKernels:
    """The kernels, loaded once a process; as `compiled_home`."""
    return _loaded(_shared(dtype, form, formats))


def compiled_draw(form: str = "auto", dtype: torch.dtype = torch.bfloat16) -> NativeDraw:
    """What draws rows; as `compiled_home`."""
    return NativeDraw(_compiled(_shared(dtype, form, formats=False)))
