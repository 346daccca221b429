import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings

from config import SchedulerSettings, ServerSettings, Settings
from config.setting import SECTIONS, SETTINGS

# CONTRACT §2, word for word: section, flags, default as it is spelled there.
CONTRACT = {
    "model": {
        "model": "smollm2-135m-instruct",
        "served-model-name": "",
        "dtype": "auto",
        "device": "auto",
        "max-model-len": "auto",
        "revision": "",
        "chat-template": "",
        "compile": "auto",
        "cpu-kernels": "auto",
        "quantization": "none",
        "embedding-model": "",
    },
    "cache": {
        "kv-block-size": "auto",
        "num-kv-blocks": "auto",
        "kv-cache-memory": "1GiB",
        "gpu-memory-utilization": "0.9",
        "kv-cache-dtype": "auto",
        "swap-space": "1GiB",
        "prefix-caching": "on",
        "prefix-cache-dir": "",
        "prefix-cache-disk": "10GiB",
        "share-prefix-cache": "off",
    },
    "scheduler": {
        "max-num-seqs": "auto",
        "max-num-batched-tokens": "auto",
        "max-prefill-tokens": "auto",
        "max-decode-seqs": "auto",
        "scheduling-policy": "priority",
        "preemption": "auto",
        "priority-aging-seconds": "30",
        "read-next-turn": "on",
        "tenant-weight": "",
        "tenant-header": "",
    },
    "speculation": {
        "speculative-method": "auto",
        "draft-model": "",
        "draft-device": "auto",
        "medusa-heads": "",
        "draft-heads": "",
        "num-speculative-tokens": "auto",
        "speculation-schedule": "auto",
        "draft-lanes": "auto",
        "draft-verification": "match",
        "draft-length-policy": "goodput",
        "min-acceptance-rate": "0.3",
        "draft-shrink-rate": "0.5",
        "speculative-config": "",
    },
    "server": {
        "host": "127.0.0.1",
        "port": "8000",
        "api-key": "",
        "api-key-file": "",
        "max-queued-requests": "256",
        "max-queued-tokens": "1000000",
        "queue-timeout": "0",
        "request-timeout": "0",
        "stall-timeout": "60",
        "read-timeout": "30",
        "max-body-bytes": "8MiB",
        "max-header-bytes": "64KiB",
        "max-connections": "2048",
        "max-n": "128",
        "max-logprobs": "20",
        "drain-timeout": "8",
        "watchdog-timeout": "60",
        "strict-params": "off",
        "sse-keepalive-seconds": "10",
        "per-request-metrics": "on",
        "reasoning-parser": "auto",
        "tool-call-parser": "auto",
        "ollama-api": "off",
        "protect-metrics": "off",
        "max-stored-responses": "1000",
        "state-dir": "",
        "max-file-size": "200MiB",
        "cors-origin": "",
        "allowed-host": "",
    },
    "log": {"log-level": "info", "log-format": "auto"},
}


def test_every_setting_of_the_contract_is_there_with_its_default() -> None:
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for setting in SETTINGS:
        if setting.section:
            value = getattr(getattr(Settings(), setting.section), setting.name)
            found[setting.section][setting.word] = setting.spell(value)
    assert found == CONTRACT


def test_one_settings_model_holds_everything() -> None:
    assert issubclass(Settings, BaseSettings)
    assert [setting.key for setting in SETTINGS if not setting.section] == ["home"]
    assert Settings().home == Path("~/.cache/slipstream").expanduser()


def test_constructing_settings_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVER", "PORT", "HOST", "SLIPSTREAM_PORT", "SLIPSTREAM_SERVER__PORT"):
        monkeypatch.setenv(name, "1")
    assert Settings().server.port == 8000


def test_names_are_unique_and_described() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names))
    for setting in SETTINGS:
        assert setting.field.description, setting.key
        assert setting.allowed != "a value", setting.key


@pytest.mark.parametrize("record", [Settings(), Settings().server, Settings().model])
def test_records_are_frozen(record: object) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        record.port = 1  # type: ignore[attr-defined]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Settings.model_validate({"server": {"prot": 1}})
    with pytest.raises(ValidationError, match="Extra inputs"):
        Settings.model_validate({"servr": {}})


def test_a_part_of_a_step_is_not_larger_than_the_step() -> None:
    SchedulerSettings(max_num_seqs=8, max_decode_seqs=8, max_num_batched_tokens=4, max_prefill_tokens=4)
    with pytest.raises(ValidationError, match=re.escape("at most max-num-seqs (8)")):
        SchedulerSettings(max_num_seqs=8, max_decode_seqs=9)
    with pytest.raises(ValidationError, match=re.escape("at most max-num-batched-tokens (4)")):
        SchedulerSettings(max_num_batched_tokens=4, max_prefill_tokens=5)


def test_a_step_that_the_device_sizes_is_compared_when_it_is_known() -> None:
    assert SchedulerSettings(max_decode_seqs=9, max_prefill_tokens=5).max_num_seqs is None


def test_a_budget_smaller_than_the_sequences_is_allowed() -> None:
    assert SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=2).max_num_batched_tokens == 2


def test_served_names_default_to_the_model_as_given() -> None:
    assert Settings.model_validate({"model": {"model": "a/b"}}).model.served_names == ("a/b",)
    named = Settings.model_validate({"model": {"model": "a/b", "served_model_name": ["x", "y"]}})
    assert named.model.served_names == ("x", "y")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("./my-model", "my-model"),
        ("./my-model/", "my-model"),
        ("./my-model.gguf", "my-model"),
        ("models/tiny.Q8_0.GGUF", "models/tiny.Q8_0"),
        ("../my-model", "../my-model"),
        (".gguf", ".gguf"),
        ("./", "./"),
    ],
)
def test_a_served_name_has_nothing_that_only_a_path_needs(model: str, name: str) -> None:
    assert Settings.model_validate({"model": {"model": model}}).model.served_names == (name,)


def test_keys_show_in_no_text_of_the_record() -> None:
    settings = Settings.model_validate({"server": {"api_key": ["s3cret-key"]}})
    dumped = settings.model_dump_json()
    for text in (repr(settings), str(settings), repr(settings.server), dumped, str(settings.model_dump())):
        assert "s3cret" not in text
    assert [key.get_secret_value() for key in settings.server.api_key] == ["s3cret-key"]


def test_errors_do_not_echo_the_input() -> None:
    with pytest.raises(ValidationError) as caught:
        ServerSettings.model_validate({"api_key": ["s3cret key"]})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("server", "port", -1),
        ("server", "port", 65536),
        ("server", "port", True),
        ("server", "port", 80.5),
        ("server", "host", ""),
        ("server", "host", 5),
        ("server", "allowed_host", [""]),
        ("server", "allowed_host", ["http://box"]),
        ("server", "allowed_host", ["box:8000"]),
        ("server", "cors_origin", [""]),
        ("scheduler", "tenant_weight", ["a"]),
        ("scheduler", "tenant_weight", ["a=0"]),
        ("scheduler", "tenant_weight", ["a=nan"]),
        ("scheduler", "tenant_weight", ["a b=1"]),
        ("scheduler", "tenant_header", "authorization"),
        ("scheduler", "tenant_header", "x team"),
        ("server", "cors_origin", ["app.example"]),
        ("server", "cors_origin", ["https://app.example/page"]),
        ("server", "api_key", [""]),
        ("server", "api_key", ["é"]),
        ("server", "api_key", ["a\nb"]),
        ("server", "watchdog_timeout", 0),
        ("server", "drain_timeout", -1),
        ("server", "drain_timeout", "inf"),
        ("server", "drain_timeout", True),
        ("server", "max_body_bytes", 0),
        ("server", "max_body_bytes", True),
        ("server", "strict_params", "maybe"),
        ("cache", "kv_block_size", 0),
        ("cache", "num_kv_blocks", 0),
        ("cache", "num_kv_blocks", True),
        ("cache", "kv_cache_memory", 0),
        ("cache", "kv_cache_memory", "-1"),
        ("cache", "gpu_memory_utilization", 0),
        ("cache", "gpu_memory_utilization", 1.01),
        ("cache", "gpu_memory_utilization", float("nan")),
        ("model", "max_model_len", "none"),
        ("model", "dtype", "float8"),
        ("model", "device", "cuda:x"),
        ("model", "device", 0),
        ("model", "chat_template", "no/such/file"),
        ("model", "chat_template", "nul\0"),
        ("model", "chat_template", "."),
        ("model", "chat_template", "{{ messages }}" * 30),
        ("scheduler", "max_num_seqs", 0),
        ("scheduler", "max_num_seqs", 10**26),
        ("scheduler", "priority_aging_seconds", -0.1),
        ("speculation", "num_speculative_tokens", 33),
        ("speculation", "speculative_config", "{"),
        ("speculation", "speculative_config", "[1]"),
        ("speculation", "speculative_config", '{"nonsense": 1}'),
        ("speculation", "speculative_method", "draft-model"),
        ("speculation", "speculative_method", "medusa"),
        ("speculation", "min_acceptance_rate", 2),
        ("speculation", "draft_shrink_rate", -0.1),
    ],
)
def test_bad_values_are_refused(section: str, name: str, value: object) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({section: {name: value}})


@pytest.mark.parametrize(
    ("section", "name", "value", "read"),
    [
        ("server", "port", 0, 0),
        ("server", "port", "65535", 65535),
        ("server", "allowed_host", ["Box.Example.", "[FD00::1]", "*"], ("box.example", "fd00::1", "*")),
        ("scheduler", "tenant_weight", ["a=2", "b.c = 0.5"], ("a=2", "b.c=0.5")),
        ("scheduler", "tenant_header", "X-Team", "x-team"),
        ("server", "cors_origin", ["HTTPS://App.example:444/", "*"], ("https://app.example:444", "*")),
        ("server", "drain_timeout", "1.5", 1.5),
        ("server", "max_body_bytes", "2MiB", 2**21),
        ("server", "per_request_metrics", "off", False),
        ("model", "max_model_len", "Auto", None),
        ("model", "max_model_len", "512", 512),
        ("model", "dtype", "BFloat16", "bfloat16"),
        ("model", "device", "CUDA:1", "cuda:1"),
        ("model", "device", "cuda", "cuda"),
        ("scheduler", "max_num_seqs", "auto", None),
        ("cache", "kv_block_size", "AUTO", None),
        ("log", "log_level", "INFO", "info"),
        ("cache", "gpu_memory_utilization", 1, 1.0),
        ("speculation", "speculative_config", '{"method": "ngram"}', '{"method": "ngram"}'),
    ],
)
def test_good_values_are_read(section: str, name: str, value: object, read: object) -> None:
    settings = Settings.model_validate({section: {name: value}})
    assert getattr(getattr(settings, section), name) == read
