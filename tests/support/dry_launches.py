"""Launch all that models launch on a GPU that need not be there: `python -m tests.support.dry_launches`.

Every kernel is compiled for the arguments that it is called with, as on a device, and does nothing: whatever
compares results is told that they are right. Fails where a kernel does not compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.compute.native import closeness
from tests.support.dry_device import SHARED_MEMORY, DryDevice

closeness.is_close = lambda *_: True  # before others have taken it from there

from engine.compute.attention import choice  # noqa: E402
from engine.compute.attention.layer_kv import LayerKv  # noqa: E402
from engine.compute.cuda import fused_model  # noqa: E402
from engine.compute.cuda.coded_choice import multiply_codes  # noqa: E402
from engine.compute.cuda.device_draw import DrawColumns, column_words, filtered_rows  # noqa: E402
from engine.compute.cuda.fused_eagle import FusedEagle  # noqa: E402
from engine.compute.cuda.fused_module import fused_layer  # noqa: E402
from engine.compute.cuda.fused_router import router_class_of  # noqa: E402
from engine.compute.cuda.graphs.recorded_rounds import RecordedSteps  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from engine.compute.cuda.triton_draw import draw_plain_at_once  # noqa: E402
from engine.compute.cuda.triton_filter import draw_filtered_at_once  # noqa: E402
from engine.compute.drafters.eagle_torch import TorchEagle  # noqa: E402
from engine.compute.drafters.layer_chains import DraftLayer  # noqa: E402
from engine.compute.drafters.mtp_layer import MtpLayer  # noqa: E402
from engine.compute.loading.coded_weights import CodedLinear, CodeKind, round_weights  # noqa: E402
from engine.compute.loading.loader import LoadedModel  # noqa: E402
from engine.compute.recurrent import recurrent_forward  # noqa: E402
from engine.compute.runner import packed_forward  # noqa: E402
from engine.compute.runner.dummy_steps import plain_sampling  # noqa: E402
from engine.compute.runner.scratch_pass import forward_of  # noqa: E402
from engine.compute.runner.self_check import packed_sample  # noqa: E402
from tests.support.eagle_rounds import Case, eagle_case, mtp_case  # noqa: E402
from tests.support.packed import as_loaded  # noqa: E402
from tests.support.recorded import Playback  # noqa: E402
from tests.support.recurrent_classes import loaded_from, model_of  # noqa: E402
from tests.support.tiny_models import GEMMA4_EXPERTS, NEMOTRON_EXPERTS, tiny_model  # noqa: E402

CAPABILITY = 90
_FAMILIES = (
    *("llama", "qwen3", "gemma3", "gemma4", "glm4", "olmo2", "cohere2", "exaone4", "granite", "phi3"),
    *("mixtral", "qwen2_moe", "gpt_oss", "qwen3_5_hybrid", "qwen3_next_hybrid", "granite_hybrid_moe"),
    *("bamba_hybrid", "nemotron_h_hybrid", "mamba", "lfm2_hybrid"),
)
_CHANGES: dict[str, dict[str, Any]] = {"gemma4": GEMMA4_EXPERTS, "nemotron_h_hybrid": NEMOTRON_EXPERTS}
_CLASSES = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "KimiLinear", "BailingHybrid", "MiniMax")
_IN_BYTES = (torch.int8, torch.float8_e4m3fn)


def prepare(device: DryDevice) -> TritonAttention:
    """Have models get what they get on a GPU like `device`, whatever its kernels answer."""
    device.install()
    backend = TritonAttention(Gpu(132, SHARED_MEMORY[CAPABILITY]))
    for module in (packed_forward, recurrent_forward):
        module.choose_backend = lambda *_, **__: backend  # type: ignore[attr-defined]
    for name, told in (("packed_difference", lambda *_, **__: None), ("equal_router", _any_router)):
        setattr(fused_model, name, told)
    torch.allclose = lambda *_, **__: True
    return backend


@torch.inference_mode()
def _any_router(original: Any, seen: Any, dtype: torch.dtype) -> Any:
    """The router fused: numbers that nobody has written choose no experts."""
    router_class = router_class_of(original, dtype)
    assert router_class is not None
    made = router_class(original)
    made(*seen.args)
    return made


def try_device(backend: TritonAttention, kept: torch.dtype | None) -> None:
    """What a device is tried with before all else."""
    for layer in (LayerKv(1, 64, 64), LayerKv(1, 576, 512, value_in_key=True)):
        choice._try(backend, layer, torch.device("cpu"), kept)


def serve(load: Callable[[], LoadedModel], dtype: torch.dtype, kept: torch.dtype | None = None) -> str:
    """Fuse a model and compute prompts and decodes with it; what was fused."""
    loaded = load()
    loaded = replace(loaded, model=loaded.model.to(dtype), dtype=dtype, kept_kv=kept)
    fused = fused_model.with_fused_layers(loaded, 16, _refuse)
    packed_sample(forward_of(fused), kept, 16)
    return fused.kernels_used


def draft(backend: TritonAttention, kind: str) -> str:
    """Rounds of a drafter of one layer, read and drawn."""
    with TemporaryDirectory() as directory:
        files = Path(directory) / "files"
        case = eagle_case(files) if kind == "eagle" else mtp_case(kind, files)
        quick = _quick(case, backend)
        steps = case.recorded(case.kv(), Playback(), backend, [quick])
    if not isinstance(steps, RecordedSteps) or steps.layer is not quick:
        raise RuntimeError("they cannot be recorded, or not fused")
    return f"{len(steps.sizes)} sizes"


def _quick(case: Case, backend: TritonAttention) -> DraftLayer:
    """Its layer fused."""
    if isinstance(case.layer, TorchEagle):
        return FusedEagle(case.layer.weights)
    assert isinstance(case.layer, MtpLayer) and case.target is not None
    made = fused_layer(case.layer.module, case.target, 16, backend)
    assert made is not None
    return made


def _refuse() -> LoadedModel:
    raise RuntimeError("the kernels do not compile")


def coded(family: str, kind: CodeKind) -> LoadedModel:
    """A tiny model whose projections are codes, but for its head."""
    model = tiny_model(family, dtype=torch.bfloat16)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and "router" not in name:
            weight = round_weights(module.weight.float(), kind, 32)
            model.set_submodule(name, CodedLinear(weight, module.bias))
    loaded = as_loaded(model)
    multiply_codes(loaded.model, torch.bfloat16)
    return loaded


def draw(dtype: torch.dtype) -> None:
    """Tokens of rows that ask for nothing, and of such that are filtered."""
    rows = np.arange(5)
    sampling = replace(
        plain_sampling(rows, 0.5), top_p=np.full(5, 0.5, np.float32), top_k=np.full(5, 9, np.int32)
    )
    logits = torch.zeros((5, 50_257), dtype=dtype)
    words = {name: torch.from_numpy(column) for name, column in column_words(sampling, rows, 5).items()}
    draw_plain_at_once(logits, DrawColumns.of(words))
    filtered = filtered_rows(sampling, logits.shape[1])
    assert filtered is not None
    sent = {name: torch.from_numpy(word) for name, word in filtered.words.items()}
    draw_filtered_at_once(logits, torch.from_numpy(filtered.rows), filtered.filters(sent), sent["keys"])


def cases(backend: TritonAttention) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All that is launched, by name."""
    for kept in (None, *_IN_BYTES):
        yield f"the try over {kept}", partial(try_device, backend, kept)
    for dtype in (torch.bfloat16, torch.float16):
        yield f"draws from {dtype}", partial(draw, dtype)
        for family in _FAMILIES:
            load = partial(_tiny, family, dtype)
            yield f"{family} in {dtype}", partial(serve, load, dtype)
        for name in _CLASSES:
            yield f"{name} in {dtype}", partial(serve, partial(_of_class, name), dtype)
    for drafter in ("eagle", "mimo", "deepseek_v3"):
        yield f"rounds of {drafter}", partial(draft, backend, drafter)
    for kept in _IN_BYTES:
        yield (
            f"llama over {kept}",
            partial(serve, partial(_tiny, "llama", torch.bfloat16), torch.bfloat16, kept),
        )
        yield (
            f"latent rows in {kept}",
            partial(serve, partial(_of_class, "DeepseekV3"), torch.bfloat16, kept),
        )
    for kind in (CodeKind.INT4, CodeKind.INT8):
        yield f"llama of {kind.value}", partial(serve, partial(coded, "llama", kind), torch.bfloat16)


def _tiny(family: str, dtype: torch.dtype) -> LoadedModel:
    return as_loaded(tiny_model(family, dtype=dtype, **_CHANGES.get(family, {})))


def _of_class(name: str) -> LoadedModel:
    return loaded_from(model_of(name))


def main() -> int:
    """Launch everything, with a line for each; 1 when something could not be compiled or fused."""
    device, bad = DryDevice(CAPABILITY), 0
    backend = prepare(device)
    for name, launch in cases(backend):
        before = device.launches.total()
        try:
            told = launch()
        except Exception as error:
            bad += 1
            told = f"<- {type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
        print(f"{name}: {device.launches.total() - before} launches {told or ''}", flush=True)
    print(dict(device.launches))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
