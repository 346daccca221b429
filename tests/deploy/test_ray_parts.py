"""What decides for the Ray cluster, without Ray: routing, settings, metrics of all replicas, scaling."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from config import SettingsError
from deploy.ray.affinity import FIRST_CUT, MAX_HOLDERS, Affinity, ReplicaLoad, prompt_keys
from deploy.ray.exposition import merge_expositions
from deploy.ray.figures import add_figures, join_requests
from deploy.ray.options import RayOptions, read_options
from deploy.ray.scaling import QUEUE_DEPTH, QueueDepthPolicy
from engine import Engine, FinishReason
from server.observability.figure_history import FigureHistory
from server.observability.http_metrics import HttpMetrics
from tests.support.fake_engine import FakeEngine

SYSTEM = "You are a patient assistant who explains how a river finds its way to the sea. " * 8


def chat(*contents: str, **fields: Any) -> bytes:
    """A chat's body; the speakers take turns."""
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return json.dumps({"messages": messages, **fields}).encode()


def completion(prompt: object, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()


def loads(**requests: float) -> dict[str, ReplicaLoad]:
    return {name: ReplicaLoad(number) for name, number in requests.items()}


class TestPromptKeys:
    def test_prompts_share_the_keys_of_their_common_prefix(self) -> None:
        one, other = prompt_keys(completion(SYSTEM + "one")), prompt_keys(completion(SYSTEM + "two"))
        assert len(SYSTEM) >= 4 * FIRST_CUT
        assert set(one) & set(other) == set(one[-3:])

    def test_longer_prefixes_come_first(self) -> None:
        longer, shorter = prompt_keys(completion(SYSTEM)), prompt_keys(completion(SYSTEM[: 2 * FIRST_CUT]))
        assert longer[-len(shorter) :] == shorter
        assert len(longer) > len(shorter) > 0

    def test_a_conversation_continues_its_beginning(self) -> None:
        first = prompt_keys(chat(SYSTEM, "Where does it start?"))
        second = prompt_keys(chat(SYSTEM, "Where does it start?", "In the hills.", "And then?"))
        assert set(first) <= set(second)

    @pytest.mark.parametrize("fields", [{"cache_salt": "mine"}, {"tools": [{"type": "function"}]}])
    def test_what_stands_before_the_prompt_or_parts_the_caches_counts(self, fields: dict[str, Any]) -> None:
        assert not set(prompt_keys(chat(SYSTEM, "Hi", **fields))) & set(prompt_keys(chat(SYSTEM, "Hi")))

    def test_what_does_not_change_the_prompt_does_not_count(self) -> None:
        body = chat(SYSTEM, "Hi", temperature=0.5, max_tokens=9, user="u")
        assert prompt_keys(body) == prompt_keys(chat(SYSTEM, "Hi"))

    def test_token_ids_have_keys_too(self) -> None:
        one, other = [*range(100), 1], [*range(100), 2]
        assert set(prompt_keys(completion(one))) & set(prompt_keys(completion(other)))

    def test_a_session_is_the_strongest_key(self) -> None:
        by_header = prompt_keys(completion(SYSTEM), session="a")
        by_field = prompt_keys(completion(SYSTEM, prompt_cache_key="a"))
        assert by_header == by_field
        assert by_header[1:] == prompt_keys(completion(SYSTEM))
        assert by_header[0] != prompt_keys(completion(SYSTEM), session="b")[0]

    @pytest.mark.parametrize(
        "body", [b"", b"{", b"[1]", b"3", b'{"prompt": ""}', b'{"prompt": "short"}', b"\xff\xfe", b"null"]
    )
    def test_whatever_holds_no_long_prompt_has_none(self, body: bytes) -> None:
        assert prompt_keys(body) == ()

    @pytest.mark.parametrize(
        "body",
        [
            b'{"prompt":' + b"[" * 100_000,
            b'{"prompt":[' + b"9" * 10_000 + b"]}",
            b'{"prompt":"x","prompt_cache_key":' + b"9" * 10_000 + b"}",
            b'{"prompt":"x","prompt_cache_key":"\\ud800"}',
        ],
    )
    def test_no_body_is_too_strange(self, body: bytes) -> None:
        assert prompt_keys(body) == ()


class TestAffinity:
    def test_a_known_prefix_leads_back(self) -> None:
        affinity: Affinity[str] = Affinity(spill=4)
        affinity.record([b"long", b"short"], "b")
        assert affinity.choose([b"long", b"short"], loads(a=0, b=4, c=0)) == "b"
        assert affinity.choose([b"other", b"short"], loads(a=0, b=4, c=0)) == "b"

    def test_a_holder_with_too_much_to_do_is_left_alone(self) -> None:
        affinity: Affinity[str] = Affinity(spill=4)
        affinity.record([b"key"], "b")
        assert affinity.choose([b"key"], loads(a=1, b=5)) == "b"
        assert affinity.choose([b"key"], loads(a=0, b=5)) == "a"

    def test_a_holder_whose_cache_is_full_is_left_alone(self) -> None:
        affinity: Affinity[str] = Affinity(spill=4)
        affinity.record([b"key"], "b")
        full = {"a": ReplicaLoad(0), "b": ReplicaLoad(1, 0.99)}
        assert affinity.choose([b"key"], full) == "a"

    def test_of_several_holders_the_emptiest_is_asked(self) -> None:
        affinity: Affinity[str] = Affinity(spill=4)
        affinity.record([b"key"], "a")
        affinity.record([b"key"], "b")
        assert affinity.choose([b"key"], loads(a=3, b=2, c=0)) == "b"
        assert affinity.choose([b"key"], loads(a=2, b=3, c=0)) == "a"

    def test_a_shorter_prefix_counts_when_the_longer_ones_holder_is_busy(self) -> None:
        affinity: Affinity[str] = Affinity(spill=1)
        affinity.record([b"short"], "a")
        affinity.record([b"long", b"short"], "b")
        assert affinity.choose([b"long", b"short"], loads(a=1, b=9, c=0)) == "a"

    def test_a_replica_that_is_gone_is_never_chosen(self) -> None:
        affinity: Affinity[str] = Affinity(spill=4)
        affinity.record([b"key"], "gone")
        assert affinity.choose([b"key"], loads(a=1, b=0)) == "b"

    def test_unknown_prompts_go_to_the_emptiest(self) -> None:
        affinity: Affinity[str] = Affinity(spill=100)
        assert affinity.choose([b"new"], loads(a=2, b=1, c=3)) == "b"
        assert affinity.choose([], loads(a=2, b=1, c=3), "any") == "b"

    def test_routers_that_never_met_agree_and_spread(self) -> None:
        keys = [[b"%d" % number] for number in range(60)]
        one, other = Affinity[str](spill=1), Affinity[str](spill=1)
        idle, reversed_idle = loads(a=0, b=0, c=0), loads(c=0, b=0, a=0)
        chosen = [one.choose(key, idle) for key in keys]
        assert chosen == [other.choose(key, reversed_idle) for key in keys]
        assert all(chosen.count(name) > 8 for name in "abc")
        seeded = {one.choose([], idle, str(number)) for number in range(20)}
        assert seeded == {"a", "b", "c"}

    def test_only_so_much_is_remembered(self) -> None:
        affinity: Affinity[str] = Affinity(spill=1, capacity=2)
        for name in (b"first", b"second", b"first", b"third"):
            affinity.record([name], "b")
        busy = loads(a=0, b=1)
        kept = [name for name in (b"first", b"second", b"third") if affinity.choose([name], busy) == "b"]
        assert kept == [b"first", b"third"]

    def test_only_so_many_holders_are_remembered(self) -> None:
        affinity: Affinity[int] = Affinity(spill=1)
        for replica in range(MAX_HOLDERS + 1):
            affinity.record([b"key"], replica)
        assert affinity.choose([b"key"], {0: ReplicaLoad(1), 99: ReplicaLoad(0)}) == 99
        assert affinity.choose([b"key"], {1: ReplicaLoad(1), 99: ReplicaLoad(0)}) == 1


class TestOptions:
    def test_what_is_not_rays_is_a_flag_of_serve(self) -> None:
        args = {
            **{"model": "a-model", "replicas": "3", "max_replicas": 5, "cpus": "0.5", "gpus": 1},
            **{
                "max-num-seqs": "8",
                "max_queued_requests": 9,
                "prefix-caching": False,
                "strict-params": "true",
            },
            **{"api-key": ["one", "two"], "log_format": "json"},
        }
        options = read_options(args, {"SLIPSTREAM_SCHEDULER__MAX_NUM_BATCHED_TOKENS": "256"})
        settings = options.settings
        assert (options.replicas, options.max_replicas, options.cpus, options.gpus) == (3, 5, 0.5, 1.0)
        assert options.scales
        assert settings.model.model == "a-model"
        assert settings.scheduler.max_num_seqs == 8
        assert settings.scheduler.max_num_batched_tokens == 256
        assert settings.server.max_queued_requests == 9
        assert len(settings.server.api_key) == 2
        assert not settings.cache.prefix_caching
        assert settings.server.strict_params
        assert options.max_ongoing_requests > 8 + 9
        assert options.spill_requests == 2

    def test_nothing_given_is_two_replicas_of_the_default(self) -> None:
        options = read_options({}, {})
        assert options == RayOptions(settings=options.settings)
        assert options.replicas == 2
        assert not options.scales

    @pytest.mark.parametrize(
        ("args", "named"),
        [
            ({"replicas": 0}, "replicas = 0"),
            ({"replicas": "1.5"}, "replicas"),
            ({"fronts": "none"}, "fronts"),
            ({"cpus": -1}, "cpus"),
            ({"cpus": "nan"}, "cpus"),
            ({"replicas": 3, "max-replicas": 2}, "max_replicas = 2"),
            ({"max-num-sqs": 3}, "--max-num-seqs"),
            ({"max-num-seqs": "many"}, "many"),
            ({"port": 80}, "http_options"),
            ({"host": "0.0.0.0"}, "http_options"),
        ],
    )
    def test_wrong_arguments_are_refused_by_name(self, args: dict[str, object], named: str) -> None:
        with pytest.raises(SettingsError, match=named):
            read_options(args, {})


class TestMergedMetrics:
    def test_families_stay_together_and_samples_say_whose_they_are(self) -> None:
        one = '# HELP up Up.\n# TYPE up gauge\nup 1\n# HELP n N.\n# TYPE n counter\nn_total{model="a b"} 2\n'
        two = '# HELP up Up.\n# TYPE up gauge\nup 0\n# HELP n N.\n# TYPE n counter\nn_total{model="{"} 3\n'
        assert merge_expositions({"x": one, "y": two}).splitlines() == [
            *("# HELP up Up.", "# TYPE up gauge", 'up{replica="x"} 1', 'up{replica="y"} 0'),
            *("# HELP n N.", "# TYPE n counter"),
            *('n_total{replica="x",model="a b"} 2', 'n_total{replica="y",model="{"} 3'),
        ]

    def test_none_is_nothing(self) -> None:
        assert merge_expositions({}) == ""


class TestFigures:
    def test_the_page_adds_up_what_the_replicas_count(self) -> None:
        history = FigureHistory(
            cast(Engine, FakeEngine()), HttpMetrics(), iter([0.0, 5.0, 9.0, 9.0]).__next__
        )
        history.keep()
        engine = FakeEngine(draft_gauges=(4.0, 0.5, 3.0))
        engine.metrics.generation_tokens += 7
        engine.metrics.requests_finished[FinishReason.STOP] += 2
        engine.metrics.time_to_first_token.observe(0.2)
        other = FigureHistory(cast(Engine, engine), HttpMetrics(), iter([0.0, 4.0]).__next__)
        replies: list[dict[str, Any]] = [
            {"model": "m", "started": started, "samples": [json.loads(each) for each in kept.since(-1)]}
            for started, kept in ((50, history), (60, other))
        ]
        added = add_figures(replies)
        (sample,) = added["samples"]
        assert (added["model"], added["started"], sample["at"]) == ("m", 60, 4.0)
        assert (sample["generated"], sample["speedup"], sample["kv"]) == (7, 2.0, [0, 0, 128])
        assert (sample["counts"]["completed"], sample["ttft"][-1]) == (2, 1)
        assert sample.keys() == replies[0]["samples"][-1].keys()


class TestRequests:
    @pytest.mark.parametrize(
        ("limit", "ids", "has_more"), [(2, "ca", True), (4, "cabd", False), (5, "cabd", False)]
    )
    def test_the_oldest_of_all_replicas_come_first(self, limit: int, ids: str, has_more: bool) -> None:
        lists = [[("a", 30), ("b", 20)], [("c", 40), ("d", 10)], []]
        replies = [
            {"object": "list", "data": [{"id": name, "age_ms": age} for name, age in each], "has_more": False}
            for each in lists
        ]
        joined = join_requests(replies, limit)
        assert ("".join(each["id"] for each in joined["data"]), joined["has_more"]) == (ids, has_more)

    def test_what_a_replica_left_out_is_more(self) -> None:
        replies = [{"data": [{"id": "a", "age_ms": 1}], "has_more": True}, {"data": [], "has_more": False}]
        assert join_requests(replies, 1)["has_more"]


class TestScaling:
    @pytest.mark.parametrize(
        ("depths", "wanted"), [({"a": 6.0, "b": 0.0}, 1.0), ({"a": 9.0, "b": 9.0}, 3.0), ({"a": 0.0}, 0.0)]
    )
    def test_the_queues_together_ask_for_so_many(self, depths: dict[str, float], wanted: float) -> None:
        context = SimpleNamespace(aggregated_metrics={QUEUE_DEPTH: depths}, target_num_replicas=5)
        assert QueueDepthPolicy(6.0)(context) == (wanted, {})

    @pytest.mark.parametrize("metrics", [None, {}, {QUEUE_DEPTH: {}}])
    def test_without_reports_the_number_stays(self, metrics: Any) -> None:
        context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=5)
        assert QueueDepthPolicy(6.0)(context) == (5, {})
