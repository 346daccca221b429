"""How a model is sampled where a request says nothing: as its makers advise in generation_config.json."""

from __future__ import annotations

import math
from pathlib import Path

from engine.compute.loading.missing_model import BUILT_IN
from engine.compute.loading.model_files import read_json

_FILE = "generation_config.json"
# What its makers advise for the built-in model, whose GGUF file cannot say it. At temperature 1, the usual
# default, so small a model writes nonsense.
_OF_BUILT_IN = {"temperature": 0.2, "top_p": 0.9}
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def read_default_sampling(directory: Path, name: str) -> dict[str, float]:
    """Parameters by their name in the API, for the model in `directory` that the user calls `name`.

    As in vLLM: temperature, top_p, top_k, min_p and repetition_penalty. A value that no request could have is
    left out. Raises StartRefused for a file that is no JSON.
    """
    if name.lower() in BUILT_IN:
        return dict(_OF_BUILT_IN)
    given = read_json(directory / _FILE) if (directory / _FILE).is_file() else {}
    return {key: given[key] for key, limits in _RANGES.items() if _is_within(given.get(key), limits)}


def _is_within(value: object, limits: tuple[float, float]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return limits[0] <= value <= limits[1]
