"""The forms of the kernels: one for each set of vector instructions and each type of a model's numbers."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from engine.errors import EngineError

# By the numbers that numbers.h gives them.
ELEMENTS = (torch.bfloat16, torch.float16, torch.float32)


class NativeUnavailable(EngineError):
    """The kernels cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class CpuForm:
    """Instructions that kernels are compiled for: `needs` are torch's names of what a CPU must have.

    `flags` name them one by one and never this machine's own, so that one library serves every CPU that has
    them. `dtypes` are those of the models that have something of them.
    """

    name: str
    needs: tuple[str, ...]
    flags: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ELEMENTS

    @property
    def is_here(self) -> bool:
        """Whether this CPU has the instructions, and the system lets this process use them.

        Linux wants to be asked for AMX once in a process, since it makes the state of threads larger.
        """
        capabilities = torch.cpu.get_capabilities()
        has_all = all(capabilities.get(name, False) for name in self.needs)
        return has_all and ("amx_tile" not in self.needs or bool(torch.cpu._init_amx()))


_V3 = ("avx2", "fma3", "f16c", "bmi2")
_AVX512 = (*_V3, "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_AVX512_FLAGS = ("-march=x86-64-v3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VNNI, _VNNI_FLAGS = (*_AVX512, "avx512_vnni"), (*_AVX512_FLAGS, "-mavx512vnni")
_BF16, _BF16_FLAGS = (*_VNNI, "avx512_bf16"), (*_VNNI_FLAGS, "-mavx512bf16")
_AMX = ("amx_tile", "amx_bf16")

# The fastest first.
FORMS = {
    "x86_64": (
        CpuForm("amx", (*_BF16, *_AMX), (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), (torch.bfloat16,)),
        CpuForm("bf16", _BF16, _BF16_FLAGS),
        CpuForm("vnni", _VNNI, _VNNI_FLAGS),
        CpuForm("avx512", _AVX512, _AVX512_FLAGS),
        CpuForm("v3", _V3, ("-march=x86-64-v3",)),
    ),
    "aarch64": (CpuForm("neon", ("neon",), ("-march=armv8-a",)),),
}
_ARCHITECTURES = {"AMD64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """One compiled library: the instructions it is made of, and the numbers it computes with.

    With `formats` it multiplies weights of every format and attends to K/V of 8 bits too, and takes several
    times as long to compile; without, of weights of few bits it takes Q8_0 alone.
    """

    form: CpuForm
    dtype: torch.dtype
    formats: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """What the compiler is told."""
        formats = ("-DSLIP_FORMATS",) if self.formats else ()
        return (*self.form.flags, f"-DSLIP_ELEMENT={ELEMENTS.index(self.dtype)}", *formats)

    def __str__(self) -> str:
        """In words."""
        return f"{self.form.name}, {str(self.dtype).removeprefix('torch.')}"


def forms_of(machine: str | None = None) -> tuple[CpuForm, ...]:
    """Every form for CPUs of a kind, as Python's `platform` calls it; None for this one."""
    machine = platform.machine() if machine is None else machine
    return FORMS.get(_ARCHITECTURES.get(machine, machine), ())


def choose_build(dtype: torch.dtype, asked: str = "auto", *, formats: bool = False) -> KernelBuild:
    """The fastest library for this CPU, or that of the form `asked`. Raises NativeUnavailable for none."""
    numbers = str(dtype).removeprefix("torch.")
    if dtype not in ELEMENTS:
        raise NativeUnavailable(f"they do not compute in {numbers}")
    known = [form for form in forms_of() if dtype in form.dtypes]
    found = next((form for form in known if asked in ("auto", form.name) and form.is_here), None)
    if found is not None:
        return KernelBuild(found, dtype, formats)
    if asked != "auto":
        here = ", ".join(form.name for form in known if form.is_here) or "none"
        raise NativeUnavailable(f"--cpu-kernels {asked}: this CPU has {here} for models in {numbers}")
    wanted = " or ".join(form.name for form in known) or "kernels"
    raise NativeUnavailable(f"the CPU has no instructions for {wanted}")
