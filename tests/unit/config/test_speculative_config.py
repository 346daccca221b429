"""vLLM's JSON object means our settings; what it cannot mean is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from config import DraftTuning, SettingsError, SpeculationSettings, load_settings, load_with_origins
from config.toml_file import format_toml

JSON_FLAG = "flag --speculative-config"


def config_flag(**keys: Any) -> str:
    return f"--speculative-config={json.dumps(keys)}"


def load(*argv: str) -> SpeculationSettings:
    return load_settings(argv, {}).speculation


def refusal(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(argv, {})
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 300
    return line


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({}, {}),
        ({"method": "ngram"}, {"speculative_method": "ngram"}),
        ({"method": "suffix", "num_speculative_tokens": 32}, {"num_speculative_tokens": 32}),
        ({"method": "draft_model", "model": "a/b"}, {"speculative_method": "draft-model"}),
        ({"method": "draft_model", "model": "a/b"}, {"draft_model": "a/b"}),
        ({"model": "a/b"}, {"speculative_method": "draft-model", "draft_model": "a/b"}),
        ({"method": "medusa", "model": "heads"}, {"medusa_heads": Path("heads"), "draft_model": None}),
        ({"method": "eagle3", "model": "d"}, {"speculative_method": "heads", "draft_heads": Path("d")}),
        ({"method": "deepseek_mtp"}, {"speculative_method": "mtp"}),
        ({"method": "none"}, {"speculative_method": "none"}),
        ({"method": None, "model": None, "revision": None}, {"speculative_method": "auto"}),
        ({"rejection_sample_method": "standard"}, {"draft_verification": "rejection"}),
        ({"rejection_sample_method": "block"}, {"draft_verification": "block"}),
        ({"verify": "match"}, {"draft_verification": "match"}),
        ({"verify": "rejection", "rejection_sample_method": "standard"}, {"draft_verification": "rejection"}),
        ({"enable_adaptive_verification": True}, {"draft_length_policy": "goodput"}),
        ({"enable_adaptive_verification": False}, {"draft_length_policy": "fixed"}),
        ({"controller": "seed"}, {"draft_length_policy": "threshold"}),
        ({"controller": "fixed"}, {"draft_length_policy": "fixed"}),
        ({"overlap": {"mode": "runahead"}}, {"speculation_schedule": "async"}),
        (
            {"overlap": {"mode": "sync", "worker": "thread", "branches": 1}},
            {"speculation_schedule": "sync", "draft_lanes": 0},
        ),
        ({"overlap": {"branches": 5}}, {"draft_lanes": 4}),
        ({"draft_sample_method": "probabilistic", "draft_tensor_parallel_size": 1}, {}),
        ({"suffix_decoding_max_cached_requests": 0}, {}),
    ],
)
def test_keys_of_vllm_set_our_settings(keys: dict[str, Any], fields: dict[str, object]) -> None:
    speculation = load(config_flag(**keys))
    expected = {**dict(SpeculationSettings()), **fields}
    assert {name: getattr(speculation, name) for name in fields} == {name: expected[name] for name in fields}
    assert speculation.tuning == DraftTuning()


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 5}, (2, 5)),
        ({"prompt_lookup_max": 5, "prompt_lookup_min": 2}, (2, 5)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": None}, (None, None)),
    ],
)
def test_the_lengths_of_ngrams_have_no_flag(
    keys: dict[str, Any], lengths: tuple[int | None, int | None]
) -> None:
    tuning = DraftTuning(*lengths)
    assert load(config_flag(method="ngram", **keys)).tuning == tuning
    assert load(config_flag(**keys), "--speculative-method=NGRAM").tuning == tuning


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"mehtod": "ngram"}, "unknown key mehtod; did you mean method?"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method = 'synthetic' is not available"),
        ({"rejection_sample_method": "typical"}, "expected one of standard, block"),
        ({"num_speculative_tokens_per_batch_size": [[1, 64, 3]]}, "num_speculative_tokens_per_batch_size is"),
        ({"draft_sample_method": "greedy"}, "draft_sample_method = 'greedy' is not available"),
        ({"suffix_decoding_max_cached_requests": 10000}, "suffix_decoding_max_cached_requests = '10000' is"),
        ({"draft_tensor_parallel_size": True}, "draft_tensor_parallel_size = 'True' is not available"),
        ({"synthetic_acceptance_length": 2.0}, "unknown key synthetic_acceptance_length"),
        ({"disable_padded_drafter_batch": True}, "unknown key disable_padded_drafter_batch"),
        ({"revision": "main"}, "revision is not available; give the draft model as a directory"),
        ({"overlap": {"mode": "lanes"}}, "overlap.mode = 'lanes' is not available: use auto"),
        ({"overlap": {"mode": "off"}}, "overlap.mode = 'off' is not available: use method none"),
        ({"overlap": {"max_ahead": 8}}, "overlap.max_ahead is not available"),
        ({"overlap": {"speed": 8}}, "unknown key overlap.speed"),
        ({"overlap": "sync"}, "overlap = 'sync' is not allowed; expected an object"),
        ({"enable_adaptive_verification": 1}, "enable_adaptive_verification = '1' is not allowed"),
        ({"controller": "oracle"}, "expected one of goodput, seed, threshold, fixed"),
        ({"verify": ["match"]}, "expected one of match, rejection, block"),
        ({"verify": "block", "rejection_sample_method": "standard"}, "= 'standard' disagrees with verify"),
        ({"controller": "seed", "enable_adaptive_verification": True}, "disagrees with"),
        ({"method": "ngram", "model": "x"}, "model = 'x' is not used by the method ngram; leave it out"),
        ({"method": "deepseek_mtp", "model": "x"}, "is not used by the method mtp; leave it out"),
        ({"method": "draft_model", "model": ""}, "model = '' is not allowed"),
        ({"model": 5}, "model = '5' is not allowed; expected a name that is not empty"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min = '0' is not allowed; expected a"),
        ({"method": "ngram", "prompt_lookup_max": True}, "prompt_lookup_max = 'True' is not allowed"),
        ({"method": "ngram", "prompt_lookup_max": "5"}, "prompt_lookup_max = '5' is not allowed"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "prompt_lookup_min = '5' is not allowed; expected at most prompt_lookup_max (3)",
        ),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max = '3' is used by the method ngram only"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "is used by the method ngram only"),
        ({"suffix_decoding_max_tree_depth": 24}, "suffix_decoding_max_tree_depth is not available; drafts"),
        ({"suffix_decoding_max_spec_factor": 1.0}, "suffix_decoding_max_spec_factor is not available; "),
        ({"suffix_decoding_min_token_prob": 0.1}, "suffix_decoding_min_token_prob is not available; "),
        ({"a\nb" * 100: 1}, "unknown key a\\nba\\nb"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(keys: dict[str, Any], line: str) -> None:
    found = refusal(config_flag(**keys))
    assert found.startswith(f"{JSON_FLAG}: speculation.speculative_config: ")
    assert line in found


def test_values_that_a_setting_holds_are_checked_by_it() -> None:
    for key, value, setting, allowed in (
        (
            "method",
            "ouija",
            "speculative_method",
            "one of none, ngram, suffix, draft-model, medusa, heads, mtp, auto",
        ),
        ("num_speculative_tokens", 33, "num_speculative_tokens", "a whole number from 1 to 32, or auto"),
        ("num_speculative_tokens", True, "num_speculative_tokens", "a whole number from 1 to 32, or auto"),
        ("method", "medusa", "speculative_method", "--medusa-heads beside it"),
        ("method", "draft_model", "speculative_method", "--draft-model beside it"),
    ):
        line = refusal(config_flag(**{key: value}))
        assert line.startswith(f"{JSON_FLAG} ({key}): speculation.{setting} = ")
        assert line.endswith(f" is not allowed; expected {allowed}")


def test_a_key_given_twice_is_refused() -> None:
    line = refusal('--speculative-config={"method": "ngram", "method": "suffix"}')
    assert line.endswith("a key is given twice")


def test_endless_nesting_is_no_object() -> None:
    assert refusal("--speculative-config=" + "[" * 100_000).endswith("expected a JSON object")


@pytest.mark.parametrize(
    ("flag", "keys", "setting", "key"),
    [
        ("--speculative-method=suffix", {"method": "ngram"}, "speculative_method", "method = 'ngram'"),
        ("--speculative-method=auto", {"method": "ngram"}, "speculative_method", "method = 'ngram'"),
        ("--num-speculative-tokens=3", {"num_speculative_tokens": 4}, "num_speculative_tokens", "= '4'"),
        ("--num-speculative-tokens=auto", {"num_speculative_tokens": 4}, "num_speculative_tokens", "= '4'"),
        (
            "--draft-verification=match",
            {"rejection_sample_method": "standard"},
            "draft_verification",
            "rejection_sample_method = 'standard'",
        ),
        ("--draft-model=y", {"method": "draft_model", "model": "x"}, "draft_model", "model = 'x'"),
        ("--speculative-method=medusa", {"method": "draft_model"}, "speculative_method", "'draft_model'"),
    ],
)
def test_a_setting_that_disagrees_is_named_with_the_key(
    flag: str, keys: dict[str, Any], setting: str, key: str
) -> None:
    name, value = flag.split("=")
    line = refusal(flag, config_flag(**keys))
    assert line.startswith(f"flag {name}: speculation.{setting} = '{value}' disagrees with ")
    assert key in line
    assert line.endswith(f" of {JSON_FLAG}; give only one of them")


def test_sources_that_disagree_are_both_named(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[speculation]\nspeculative-config = \'{"method": "ngram"}\'\n')
    with pytest.raises(SettingsError) as caught:
        load_settings(["--config", str(path)], {"SLIPSTREAM_SPECULATION__SPECULATIVE_METHOD": "none"})
    assert str(caught.value).startswith("env SLIPSTREAM_SPECULATION__SPECULATIVE_METHOD: ")
    assert str(caught.value).endswith(f"of file {path}; give only one of them")


def test_a_setting_that_agrees_keeps_its_own_origin() -> None:
    argv = [config_flag(method="draft_model", model="x", num_speculative_tokens=4)]
    loaded = load_with_origins(
        [*argv, "--speculative-method=DRAFT-MODEL", "--num-speculative-tokens", "4"], {}
    )
    assert loaded.settings.speculation.speculative_method == "draft-model"
    assert loaded.origins["speculation.speculative_method"] == "flag --speculative-method"
    assert loaded.origins["speculation.num_speculative_tokens"] == "flag --num-speculative-tokens"
    assert loaded.origins["speculation.draft_model"] == f"{JSON_FLAG} (model)"
    assert loaded.origins["speculation.draft_verification"] == "default"


def test_the_method_beside_it_says_what_the_model_is() -> None:
    heads = load(config_flag(model="x"), "--speculative-method=medusa")
    assert (heads.medusa_heads, heads.draft_model) == (Path("x"), None)
    auto = load(config_flag(model="x"), "--speculative-method=auto")
    assert (auto.speculative_method, auto.draft_model) == ("auto", "x")


def test_an_object_that_is_overridden_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[speculation]\nspeculative-config = \'{"num_speculative_tokens": 9, "bad": 1}\'\n')
    argv = ["--config", str(path), config_flag(method="ngram")]
    assert load(*argv).num_speculative_tokens is None


def test_what_is_shown_reads_back_as_the_same(tmp_path: Path) -> None:
    argv = [config_flag(model="~/small", num_speculative_tokens=3, controller="seed")]
    first = load_with_origins(argv, {})
    path = tmp_path / "shown.toml"
    path.write_text(format_toml(*first), encoding="utf-8")
    again = load_with_origins(["--config", str(path)], {})
    assert again.settings == first.settings
    shown = format_toml(*first, with_origins=True)
    assert f"# {JSON_FLAG} (controller)" in shown
