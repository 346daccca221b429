"""--speculative-config: vLLM's JSON object, key by key onto our settings; a key not honoured is refused.

What one of our settings holds is checked by that setting; what has no flag of its own is a `DraftTuning`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from config.errors import SettingsError, closest, did_you_mean, plain, shown


@dataclass(frozen=True, slots=True)
class DraftTuning:
    """The shortest and the longest n-gram to look up; both None leave it to the drafter."""

    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


class FromJson(NamedTuple):
    """A value for one of our settings, and the key and value of the JSON that ask for it."""

    value: object
    key: str
    raw: object


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """What a JSON object asks for: fields of SpeculationSettings by name, and what none of them holds."""

    settings: Mapping[str, FromJson]
    tuning: DraftTuning


@dataclass(frozen=True, slots=True)
class _Key:
    """A key with a fixed set of values: `words` pairs each with the setting's; `refused` says why not."""

    setting: str
    words: tuple[tuple[object, object], ...]
    refused: Mapping[str, str] = field(default_factory=dict)


_OVERLAP = "overlap"
_TRANSLATED: Mapping[str, _Key] = {
    "rejection_sample_method": _Key(
        "draft_verification",
        (("standard", "rejection"), ("block", "block")),
        {"synthetic": "it accepts drafts without looking at them, so the text would be wrong"},
    ),
    "verify": _Key(
        "draft_verification", (("match", "match"), ("rejection", "rejection"), ("block", "block"))
    ),
    "enable_adaptive_verification": _Key("draft_length_policy", ((True, "goodput"), (False, "fixed"))),
    "controller": _Key(
        "draft_length_policy",
        (("goodput", "goodput"), ("seed", "threshold"), ("threshold", "threshold"), ("fixed", "fixed")),
    ),
    "overlap.mode": _Key(
        "speculation_schedule",
        (("auto", "auto"), ("sync", "sync"), ("runahead", "async"), ("async", "async")),
        {"lanes": "use auto", "off": "use method none"},
    ),
    "overlap.branches": _Key("draft_lanes", tuple((lanes + 1, lanes) for lanes in range(9))),
}
# Keys of which only the value that names what happens anyway can be had.
_ONLY: Mapping[str, tuple[object, str]] = {
    "draft_sample_method": (
        "probabilistic",
        "drafts are drawn from what the draft model says",
    ),
    "draft_tensor_parallel_size": (1, "models are not split"),
    "suffix_decoding_max_cached_requests": (0, "replies are not kept for other requests to draft from"),
    "overlap.worker": ("thread", "models draft in a thread"),
}
_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        "drafts are as long as they are likely to be right",
    ),
    "num_speculative_tokens_per_batch_size": "--draft-length-policy goodput fits drafts to the load",
    "revision": "give the draft model as a directory",
    "quantization": "",
    "max_model_len": "",
    "overlap.max_ahead": "",
}
_KNOWN = ("method", "model", "num_speculative_tokens", *_TRANSLATED, *_ONLY, *_LOOKUP)


def is_json_object(text: object) -> bool:
    """True for the text of a JSON object."""
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_speculative_config(text: str, method: object = None) -> SpeculativeConfig:
    """What the JSON object `text` asks for; `method` is the speculative method given beside it, if any.

    As in vLLM, null is absent and a `model` without a method is a draft model. Raises SettingsError, a line
    that begins with the key.
    """
    keys = _flat(json.loads(text, object_pairs_hook=_refuse_twice))
    for key in keys:
        _check_known(key)
    settings: dict[str, FromJson] = {}
    for name, found in (*_who_drafts(keys, method), *_translated(keys)):
        before = settings.setdefault(name, found)
        if before.value != found.value:
            raise SettingsError(
                f"{found.key} = {shown(found.raw)} disagrees with {before.key} = {shown(before.raw)}"
            )
    if "speculative_method" in settings:
        method = settings["speculative_method"].value
    return SpeculativeConfig(settings, _tuning(keys, method))


def _refuse_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise SettingsError("a key is given twice")
    return table


def _flat(table: Mapping[str, object]) -> dict[str, object]:
    """The keys that hold something, those of the one inner table by their dotted names."""
    inner = table.get(_OVERLAP)
    if inner is not None and not isinstance(inner, dict):
        raise SettingsError(f"{_OVERLAP} = {shown(inner)} is not allowed; expected an object")
    dotted = {f"{_OVERLAP}.{key}": value for key, value in (inner or {}).items()}
    outer = {key: value for key, value in table.items() if key != _OVERLAP}
    return {key: value for key, value in {**outer, **dotted}.items() if value is not None}


def _check_known(key: str) -> None:
    if key in _REFUSED:
        raise SettingsError(f"{key} is not available{'; ' * bool(_REFUSED[key])}{_REFUSED[key]}")
    if key not in _KNOWN:
        raise SettingsError(f"unknown key {plain(key)}{did_you_mean(closest(key, _KNOWN))}")


def _who_drafts(keys: Mapping[str, object], method: object) -> Iterable[tuple[str, FromJson]]:
    """The method, its model where that method looks for one, and the longest draft."""
    if "num_speculative_tokens" in keys:
        raw = keys["num_speculative_tokens"]
        yield "num_speculative_tokens", FromJson(raw, "num_speculative_tokens", raw)
    if "method" in keys:
        raw = keys["method"]
        method = _method_word(raw)
        yield "speculative_method", FromJson(method, "method", raw)
    if "model" not in keys:
        return
    model = keys["model"]
    if method is None:
        method = "draft-model"
        yield "speculative_method", FromJson(method, "model", model)
    method = _method_word(method)
    if method in ("ngram", "suffix", "mtp"):
        raise SettingsError(f"model = {shown(model)} is not used by the method {method}; leave it out")
    if not isinstance(model, str) or not model:
        raise SettingsError(f"model = {shown(model)} is not allowed; expected a name that is not empty")
    if method in ("medusa", "heads"):
        name = "medusa_heads" if method == "medusa" else "draft_heads"
        yield name, FromJson(Path(model), "model", model)
    else:
        yield "draft_model", FromJson(model, "model", model)


def _method_word(raw: object) -> object:
    """vLLM's spelling of a method as ours."""
    if raw in ("eagle3", "EAGLE3"):
        return "heads"
    if isinstance(raw, str) and raw.endswith("_mtp"):  # as vLLM names them by their models
        return "mtp"
    return raw.strip().lower().replace("_", "-") if isinstance(raw, str) else raw


def _translated(keys: Mapping[str, object]) -> Iterable[tuple[str, FromJson]]:
    for key, raw in keys.items():
        if key in _ONLY and not _same(raw, _ONLY[key][0]):
            only, reason = _ONLY[key]
            raise SettingsError(
                f"{key} = {shown(raw)} is not available: {reason}; use {only} or leave it out"
            )
        if key not in _TRANSLATED:
            continue
        known = _TRANSLATED[key]
        value = next((ours for word, ours in known.words if _same(raw, word)), None)
        if value is not None:
            yield known.setting, FromJson(value, key, raw)
        elif isinstance(raw, str) and raw in known.refused:
            raise SettingsError(f"{key} = {shown(raw)} is not available: {known.refused[raw]}")
        else:
            allowed = ", ".join(json.dumps(word).strip('"') for word, _ in known.words)
            raise SettingsError(f"{key} = {shown(raw)} is not allowed; expected one of {allowed}")


def _same(value: object, word: object) -> bool:
    """Equality in JSON's sense: true is not 1."""
    return type(value) is type(word) and value == word


def _tuning(keys: Mapping[str, object], method: object) -> DraftTuning:
    """As in vLLM, one of the two lengths alone is both."""
    lengths: list[int] = []
    for key in _LOOKUP:
        if key not in keys:
            continue
        length = keys[key]
        if _method_word(method) != "ngram":
            raise SettingsError(f"{key} = {shown(length)} is used by the method ngram only")
        if type(length) is not int or length < 1:
            raise SettingsError(f"{key} = {shown(length)} is not allowed; expected a whole number, 1 or more")
        lengths.append(length)
    if not lengths:
        return DraftTuning()
    shortest, longest = lengths[0], lengths[-1]
    if shortest > longest:
        raise SettingsError(
            f"prompt_lookup_min = {shown(shortest)} is not allowed; "
            f"expected at most prompt_lookup_max ({longest})"
        )
    return DraftTuning(shortest, longest)
