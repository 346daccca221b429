"""The engine and its loop over the fake model: right text, one terminal event, faults that stay local."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    OutOfDeviceMemory,
    Overloaded,
    RequestFailed,
    StartRefused,
)
from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineLimits, EngineParts, EngineState
from engine.plan.request import FinishReason, GenerationRequest, SamplingParams
from engine.plan.step_records import StepInputs
from tests.support.engines import EngineShape, collect, make_parts, running_engine, text_tokenizer
from tests.support.fakes import FakeRunner, ManualClock, expected_output

PROMPT = [1, 2, 3, 4, 5]


async def test_a_request_gets_the_models_tokens_and_ends_by_length() -> None:
    async with running_engine() as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=20))
        assert result.token_ids == expected_output(PROMPT, 20)
        assert result.text == text_tokenizer().decode(result.token_ids, skip_special_tokens=True)
        assert result.finish.reason is FinishReason.LENGTH
        assert result.finish.error is None
        assert (result.finish.num_prompt_tokens, result.finish.num_output_tokens) == (5, 20)


async def test_many_at_once_each_get_their_own_text() -> None:
    shape = EngineShape(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=16)
    prompts = [[seed + step for step in range(3 + seed)] for seed in range(20)]
    async with running_engine(shape) as harness:
        streams = [harness.submit(prompt, max_tokens=12) for prompt in prompts]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == expected_output(prompt, 12)
        assert harness.runner.max_tokens_seen <= 16


async def test_the_host_s_part_of_a_step_counts_in_what_drafts_are_held_against() -> None:
    async with running_engine() as harness:  # whose model takes no time
        await collect(harness.submit(PROMPT, max_tokens=20))
        costs = harness.parts.batcher.decoder.costs
        found = costs.seconds(1, 1)
        assert found is not None
        assert 0 < found < 1


async def test_a_full_cache_preempts_and_still_gives_the_right_text() -> None:
    shape = EngineShape(num_blocks=12, max_num_seqs=6, max_model_len=40)
    prompts = [[seed, 7, 9, seed + 1] for seed in range(6)]
    async with running_engine(shape) as harness:
        streams = [harness.submit(prompt, max_tokens=30) for prompt in prompts]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == expected_output(prompt, 30)
        assert harness.engine.metrics.preemptions["recompute"] > 0


async def test_the_model_runs_on_the_target_thread_only() -> None:
    async with running_engine() as harness:
        await collect(harness.submit(PROMPT))
        assert harness.runner.thread_names == {"target_0"}


async def test_eos_ends_a_request_and_is_not_shown() -> None:
    output = expected_output(PROMPT, 6)
    async with running_engine(eos_token_ids=frozenset({output[3]})) as harness:
        ended = await collect(harness.submit(PROMPT, max_tokens=6))
        assert ended.token_ids == output[: output.index(output[3]) + 1]
        assert ended.text == text_tokenizer().decode(ended.token_ids[:-1], skip_special_tokens=True)
        assert (ended.finish.reason, ended.finish.stop_reason) == (FinishReason.STOP, None)
        ignored = await collect(harness.submit(PROMPT, max_tokens=6, ignore_eos=True))
        assert ignored.token_ids == output


async def test_a_stop_token_names_itself() -> None:
    output = expected_output(PROMPT, 6)
    async with running_engine() as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=6, stop_token_ids=frozenset({output[2]})))
        assert (result.finish.reason, result.finish.stop_reason) == (FinishReason.STOP, output[2])


@pytest.mark.parametrize("stops", [(), ("nowhere to be found",)])
async def test_the_text_of_a_stop_token_is_kept_where_asked_for(stops: tuple[str, ...]) -> None:
    output = expected_output(PROMPT, 6)
    kept: dict[str, Any] = {"include_stop_str_in_output": True, "stop": stops}
    asked: dict[str, Any] = {"max_tokens": 6, "stop_token_ids": frozenset({output[2]})}
    async with running_engine() as harness:
        without = await collect(harness.submit(PROMPT, **asked))
        found = await collect(harness.submit(PROMPT, **asked, **kept))
    async with running_engine(eos_token_ids=frozenset({output[2]})) as harness:
        ended = await collect(harness.submit(PROMPT, max_tokens=6, **kept))
    decode = text_tokenizer().decode
    assert without.text == ended.text == decode(output[:2], skip_special_tokens=True)
    assert found.text == decode(output[:3], skip_special_tokens=True) != without.text
    assert found.finish.stop_reason == output[2]


async def test_a_stop_string_across_tokens_cuts_the_text() -> None:
    tokens = expected_output(PROMPT, 40)
    text = text_tokenizer().decode(tokens, skip_special_tokens=True)
    stop = next(text[i : i + 5] for i in range(8, len(text) - 5) if text[i : i + 5].isascii())
    async with running_engine() as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=40, stop=(stop,)))
        assert result.text == text[: text.find(stop)]
        assert (result.finish.reason, result.finish.stop_reason) == (FinishReason.STOP, stop)
        assert result.token_ids == tokens[: len(result.token_ids)]
        assert len(result.token_ids) < 40


async def test_a_slow_reader_gets_everything_merged() -> None:
    async with running_engine() as harness:
        stream = harness.submit(PROMPT, max_tokens=30)
        await collect(harness.submit(PROMPT, max_tokens=40))
        result = await collect(stream)
        assert result.token_ids == expected_output(PROMPT, 30)
        assert result.num_deltas == 1


async def test_closing_a_stream_frees_its_blocks_within_a_step() -> None:
    async with running_engine() as harness:
        stream = harness.submit(PROMPT, max_tokens=100)
        await anext(stream)
        stream.close()
        stream.close()
        rest = await collect(stream)
        assert rest.finish.reason is FinishReason.ABORT
        assert harness.engine.metrics.request_aborts["disconnect"] == 1
        assert harness.engine.gauges().kv_blocks_used == 0


async def test_cancel_ends_a_waiting_and_a_running_request_once() -> None:
    async with running_engine(EngineShape(max_num_seqs=1)) as harness:
        running, waiting = harness.submit(PROMPT, max_tokens=100), harness.submit([9, 8], max_tokens=100)
        await anext(running)
        assert harness.engine.cancel(waiting.request_id)
        assert harness.engine.cancel(running.request_id)
        for stream in (waiting, running):
            assert (await collect(stream)).finish.reason is FinishReason.ABORT
            assert not harness.engine.cancel(stream.request_id)


async def test_one_bad_row_ends_one_request() -> None:
    def row_errors(step: int, row: int) -> str | None:
        return "the logits are not finite" if (step, row) == (4, 1) else None

    async with running_engine(row_errors=row_errors) as harness:
        streams = [harness.submit([seed, 3], max_tokens=10) for seed in range(3)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        assert [r.finish.reason for r in results].count(FinishReason.ERROR) == 1
        assert isinstance(results[1].finish.error, RequestFailed)
        for seed in (0, 2):
            assert results[seed].token_ids == expected_output([seed, 3], 10)


async def test_text_that_cannot_be_decoded_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine() as harness:
        bad, good = harness.submit([1, 1], max_tokens=10), harness.submit([2, 2], max_tokens=10)

        def decode(token_ids: object) -> None:
            raise ValueError("no such bytes")

        monkeypatch.setattr(bad, "_detokenizer", type("Broken", (), {"decode": staticmethod(decode)}))
        broken, whole = await asyncio.gather(collect(bad), collect(good))
        assert broken.finish.reason is FinishReason.ERROR
        assert whole.token_ids == expected_output([2, 2], 10)


class Faults:
    """Raises on chosen steps."""

    def __init__(self, steps: set[int], error: Exception) -> None:
        self.steps, self.error, self.step = steps, error, 0

    def __call__(self, inputs: StepInputs) -> None:
        self.step += 1
        if self.step in self.steps:
            raise self.error


async def test_a_failed_pass_ends_its_batch_and_the_next_request_is_served() -> None:
    async with running_engine(before=Faults({3}, RuntimeError("boom"))) as harness:
        failed = await collect(harness.submit(PROMPT, max_tokens=10))
        assert failed.finish.reason is FinishReason.ERROR
        assert failed.token_ids == expected_output(PROMPT, 2)
        assert (await collect(harness.submit(PROMPT))).token_ids == expected_output(PROMPT, 8)
        assert harness.engine.state is EngineState.READY


async def test_out_of_memory_is_tried_once_more_with_fewer_requests() -> None:
    async with running_engine(before=Faults({3}, OutOfDeviceMemory("too much"))) as harness:
        streams = [harness.submit([seed, 5], max_tokens=10) for seed in range(4)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        for seed, result in enumerate(results):
            assert result.token_ids == expected_output([seed, 5], 10)


async def test_three_failed_passes_in_a_row_are_death() -> None:
    faults = Faults(set(range(1, 100)), RuntimeError("boom"))
    async with running_engine(before=faults) as harness:
        errors = []
        for _ in range(3):
            errors.append((await collect(harness.submit(PROMPT))).finish.error)
        assert isinstance(errors[-1], EngineDead)
        await asyncio.wait_for(harness.engine.wait_dead(), 1)
        assert harness.engine.fault is not None
        with pytest.raises(EngineDead):
            harness.submit(PROMPT)
        with pytest.raises(EngineDead):
            harness.engine.admit(1)


async def test_a_fault_that_follows_no_request_ends_batches_and_then_the_engine() -> None:
    async with running_engine(before=Faults(set(range(1, 100)), RuntimeError("boom"))) as harness:
        kinds = []
        for _ in range(3):
            streams = [harness.submit([seed, 5]) for seed in range(8)]
            results = await asyncio.gather(*(collect(stream) for stream in streams))
            kinds.append({type(result.finish.error) for result in results})
        assert kinds == [{RequestFailed}, {RequestFailed}, {EngineDead}]
        assert harness.engine.metrics.forward_faults == {"batch": 3}


async def test_the_heartbeat_ages_in_a_step_and_is_fresh_after_it() -> None:
    entered, release = threading.Event(), threading.Event()

    def before(inputs: StepInputs) -> None:
        entered.set()
        release.wait(10)

    clock = ManualClock()
    async with running_engine(before=before, clock=clock) as harness:
        task = asyncio.create_task(collect(harness.submit(PROMPT)))
        await asyncio.to_thread(entered.wait, 10)
        clock.advance(11.0)
        assert harness.engine.gauges().heartbeat_age_s == 11.0
        release.set()
        await task
        assert harness.engine.gauges().heartbeat_age_s == 0.0


async def test_while_loading_nothing_is_faster_or_slower_than_without_drafts() -> None:
    def load() -> EngineParts | None:
        raise NotImplementedError

    assert Engine(load).drafting() is None
    gauges = Engine(load).gauges()
    assert gauges.speculation_speedup == 1.0
    assert (gauges.num_requests_running, gauges.kv_blocks_free, gauges.speculation_draft_length) == (
        0,
        0,
        0.0,
    )


async def test_bad_requests_are_refused_by_name_and_cost_nothing() -> None:
    async with running_engine() as harness:
        with pytest.raises(InvalidRequest, match="empty"):
            harness.submit([])
        with pytest.raises(InvalidRequest, match="0 to 256"):
            harness.submit([1, 257])
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 128 tokens") as caught:
            harness.submit([1] * 100, max_tokens=29)
        assert caught.value.param == "max_tokens"
        with pytest.raises(ContextLengthExceeded) as caught:
            await harness.engine.text.encode("x" * 1_000_000)
        assert caught.value.param == "prompt"
        assert harness.engine.metrics.requests_started == 0


LAST_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "too long": ({"prompt_token_ids": [1] * 128}, {}),
    "too much asked for": ({}, {"max_tokens": 127}),
    "out of the vocabulary": ({"prompt_token_ids": [1, 257]}, {}),
    "nothing left to draw": ({}, {"allowed_token_ids": (5,), "bad_words": ((5,),)}),
    "past its deadline": ({"deadline": 0.0}, {}),
    "too many tokens for the queue": ({"prompt_token_ids": [1] * 50}, {}),
}


@pytest.mark.parametrize("case", LAST_REFUSED)
async def test_a_reply_whose_last_choice_is_refused_has_started_nothing(case: str) -> None:
    fields, sampling = LAST_REFUSED[case]
    async with running_engine(limits=EngineLimits(max_queued_tokens=40)) as harness:
        engine, params = harness.engine, SamplingParams(max_tokens=4, temperature=0.0)
        choices = [GenerationRequest(name, PROMPT, params, group="reply") for name in "abc"]
        last = replace(choices[-1], sampling=replace(params, **sampling), **fields)
        with pytest.raises((InvalidRequest, Overloaded, DeadlineExceeded)):
            engine.submit_all([*choices[:-1], last])
        metrics = engine.metrics
        assert (metrics.requests_started, metrics.requests_finished, metrics.request_aborts) == (0, {}, {})
        assert not harness.parts.batcher.has_work
        for stream in engine.submit_all(choices):
            assert (await collect(stream)).token_ids == expected_output(PROMPT, 4)
        assert metrics.requests_started == metrics.requests_finished.total() == 1


async def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    shape = EngineShape(max_num_seqs=1)
    limits = EngineLimits(max_queued_requests=2, max_queued_tokens=12)
    async with running_engine(shape, limits=limits) as harness:
        running = harness.submit(PROMPT, max_tokens=100)
        await anext(running)
        with harness.engine.admit(2):
            with pytest.raises(Overloaded, match="limit is 2") as caught:
                harness.engine.admit(1)
            assert caught.value.code == "queue_full"
        harness.submit([1] * 10, max_tokens=4)
        with pytest.raises(Overloaded, match="limit is 12"):
            harness.submit([1] * 10, max_tokens=4)
        assert harness.engine.metrics.requests_rejected["queue_full"] == 2


async def test_a_reply_whose_prompts_no_empty_queue_takes_is_refused_for_good() -> None:
    """To come back would never help; one prompt alone is taken, however long."""
    async with running_engine(limits=EngineLimits(max_queued_tokens=12)) as harness:
        engine, params = harness.engine, SamplingParams(max_tokens=4, temperature=0.0)
        choices = [GenerationRequest(name, [1] * 10, params, group="reply") for name in "ab"]
        with pytest.raises(InvalidRequest, match="20 prompt tokens; the queue holds 12") as caught:
            engine.submit_all(choices)
        assert caught.value.param == "prompt"
        assert (await collect(harness.submit([1] * 20, max_tokens=4))).finish.error is None


async def test_one_of_several_tenants_does_not_get_all_places() -> None:
    """Waiting, or being prepared: seven in eight; another gets its share, in the place of the newest."""
    shape, limits = EngineShape(max_num_seqs=1), EngineLimits(max_queued_requests=8, has_tenants=True)
    async with running_engine(shape, limits=limits) as harness:
        engine = harness.engine
        running = harness.submit(PROMPT, max_tokens=100, tenant="a")
        await anext(running)
        waiting = [harness.submit(PROMPT, max_tokens=4, tenant="a") for _ in range(4)]
        with engine.admit(3, "a"):
            with pytest.raises(Overloaded, match="7 requests wait, the limit is 7"):
                engine.admit(1, "a")
            with engine.admit(3, "b"):
                for stream in waiting[2:]:
                    finish = (await collect(stream)).finish
                    assert isinstance(finish.error, Overloaded) and finish.error.code == "queue_full"
                with engine.admit(1, "b"), pytest.raises(Overloaded, match="8 requests wait, the limit is 8"):
                    engine.admit(1, "b")
        assert engine.metrics.request_aborts == {"displaced": 3}
        assert engine.metrics.requests_rejected == {"queue_full": 5}
        with engine.admit(3, "b"), engine.admit(1, "a"):
            pass
        assert engine._admission.num_preparing == 0
        with engine.admit_text("a"), engine.admit_text("b"), pytest.raises(Overloaded):
            engine.admit_text("a")


async def test_a_reply_of_which_a_choice_has_ended_keeps_its_places() -> None:
    shape = EngineShape(max_num_seqs=1, policy="fair")
    limits = EngineLimits(max_queued_requests=4, has_tenants=True)
    async with running_engine(shape, limits=limits) as harness:
        with harness.engine.admit(4, "a"):
            reply = [harness.submit(PROMPT, max_tokens=8, group="reply", tenant="a") for _ in range(4)]
        await anext(reply[0])
        other = harness.submit(PROMPT, max_tokens=100, tenant="b")  # it has the seat when the first has ended
        await collect(reply[0])
        await anext(other)
        with pytest.raises(Overloaded, match="3 requests wait, the limit is 4"):
            harness.engine.admit(2, "b")
        other.close()
        for stream in reply[1:]:
            assert (await collect(stream)).finish.reason is FinishReason.LENGTH


async def test_one_of_several_tenants_does_not_get_the_room_for_all_tokens() -> None:
    shape, limits = EngineShape(max_num_seqs=1), EngineLimits(max_queued_tokens=80, has_tenants=True)
    async with running_engine(shape, limits=limits) as harness:
        await anext(harness.submit(PROMPT, max_tokens=100, tenant="a"))
        for _ in range(6):
            harness.submit([1] * 10, tenant="a")
        with pytest.raises(Overloaded, match="60 prompt tokens wait, the limit is 70"):
            harness.submit([1] * 11, tenant="a")
        harness.submit([1] * 20, tenant="b")
        harness.submit([1] * 20, tenant="b")
        assert harness.engine.metrics.request_aborts == {"displaced": 2}
        with pytest.raises(Overloaded, match="80 prompt tokens wait, the limit is 80"):
            harness.submit([1], tenant="b")


async def test_a_tenant_alone_gets_all_places() -> None:
    async with running_engine(limits=EngineLimits(max_queued_requests=8)) as harness:
        with harness.engine.admit(8, "a"):
            pass


class WatchedIds(list[int]):
    """Token ids that know in which threads they are read."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(token_ids)
        self.readers: set[str] = set()

    def __iter__(self) -> Iterator[int]:
        self.readers.add(threading.current_thread().name)
        return super().__iter__()


async def test_token_ids_are_read_off_the_loop_however_many_they_are() -> None:
    async with running_engine() as harness:
        token_ids = WatchedIds([1, 10**6])
        with pytest.raises(InvalidRequest, match="the token id 1000000"):
            await harness.engine.text.decode(token_ids, skip_special_tokens=False)
        assert token_ids.readers and threading.current_thread().name not in token_ids.readers


async def test_text_work_has_places_of_its_own() -> None:
    """A quarter as many as the queue: whoever asks for token ids alone keeps nobody from generating."""
    async with running_engine(limits=EngineLimits(max_queued_requests=8)) as harness:
        engine = harness.engine
        with engine.admit_text(), engine.admit_text():
            with pytest.raises(Overloaded, match="limit is 2") as caught:
                engine.admit_text()
            assert (caught.value.code, caught.value.retry_after_s) == ("queue_full", 1)
            with engine.admit(8):
                pass
        with engine.admit_text():
            assert engine.metrics.requests_rejected["queue_full"] == 1
        drained = asyncio.create_task(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="shutting down"):
            engine.admit_text()
        await drained


async def test_draining_lets_running_work_finish_and_refuses_new_work() -> None:
    async with running_engine() as harness:
        stream = harness.submit(PROMPT, max_tokens=60)
        drained = asyncio.create_task(harness.engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            harness.engine.admit(1)
        assert caught.value.code == "draining"
        await drained
        assert (await collect(stream)).token_ids == expected_output(PROMPT, 60)


async def test_what_outlasts_the_drain_ends_with_an_error() -> None:
    async with running_engine(before=lambda _: time.sleep(0.01)) as harness:
        stream = harness.submit(PROMPT, max_tokens=120)
        await harness.engine.drain(0.1)
        finish = (await collect(stream)).finish
        assert finish.reason is FinishReason.ABORT
        assert isinstance(finish.error, Overloaded)
        assert harness.engine.metrics.request_aborts["drain"] == 1


async def test_stop_while_requests_run_ends_them() -> None:
    async with running_engine() as harness:
        stream = harness.submit(PROMPT, max_tokens=120)
        await harness.engine.stop()
        assert isinstance((await collect(stream)).finish.error, Overloaded)


async def test_a_refused_start_says_so_and_leaves_no_thread() -> None:
    def load() -> None:
        raise StartRefused("no such model")

    engine = Engine(load)
    with pytest.raises(Overloaded, match="loading"):
        engine.admit(1)
    with pytest.raises(StartRefused, match="no such model"):
        await engine.start()
    await engine.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith("target")]


async def test_stop_while_loading_serves_nothing() -> None:
    release = threading.Event()
    shape = EngineShape()
    parts = make_parts(shape, FakeRunner(shape.num_blocks, shape.block_size))

    def load() -> EngineParts:
        release.wait(10)
        return parts

    engine = Engine(load)
    start = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    stop = asyncio.create_task(engine.drain(0))
    await stop
    release.set()
    await start
    assert engine.state is EngineState.DRAINING
    await engine.stop()


async def test_timing_and_metrics_add_up() -> None:
    async with running_engine() as harness:
        result = await collect(harness.submit(PROMPT, max_tokens=10))
        timing, metrics = result.finish.timing, harness.engine.metrics
        assert timing.queue_s >= 0
        assert timing.time_to_first_token_s is not None
        assert timing.mean_itl_s == pytest.approx(timing.generation_s / 9)
        assert metrics.prompt_tokens == 5
        assert metrics.generation_tokens == 10
        assert metrics.inter_token_latency.count == 9
        assert metrics.time_to_first_token.count == 1
        assert metrics.step_duration["prefill"].count == 1
        assert metrics.step_duration["decode"].count == 9
        assert metrics.requests_finished[FinishReason.LENGTH] == 1


async def test_times_count_from_the_arrival_and_not_from_the_submission() -> None:
    clock = ManualClock()
    async with running_engine(clock=clock) as harness:
        engine, arrival = harness.engine, harness.engine.now()
        clock.advance(7.0)  # in which the text was read
        request = GenerationRequest("late", PROMPT, SamplingParams(max_tokens=2), arrival_time=arrival)
        timing = (await collect(engine.submit(request))).finish.timing
        assert (timing.queue_s, timing.time_to_first_token_s) == (7.0, 7.0)
        metrics = engine.metrics
        for histogram in (
            metrics.time_to_first_token,
            metrics.request_queue_time,
            metrics.e2e_request_latency,
        ):
            assert (histogram.count, histogram.sum) == (1, 7.0)


async def test_a_request_for_no_tokens_is_counted_and_costs_no_step() -> None:
    async with running_engine() as harness:
        streams = [harness.submit(PROMPT, max_tokens=0, group="reply") for _ in range(2)]
        results = await asyncio.wait_for(asyncio.gather(*map(collect, streams)), 5)
        for result in results:
            assert (result.text, result.token_ids) == ("", [])
            finish = result.finish
            assert (finish.reason, finish.error, finish.stop_reason) == (FinishReason.LENGTH, None, None)
            assert (finish.num_prompt_tokens, finish.num_output_tokens) == (5, 0)
            assert (finish.timing.time_to_first_token_s, finish.timing.mean_itl_s) == (None, None)
        metrics = harness.engine.metrics
        assert (metrics.requests_started, metrics.requests_finished[FinishReason.LENGTH]) == (1, 1)
        assert (metrics.prompt_tokens, metrics.generation_tokens) == (0, 0)
        assert sum(each.count for each in metrics.step_duration.values()) == 0


async def test_a_request_for_no_tokens_is_refused_for_what_any_is() -> None:
    async with running_engine() as harness:
        with pytest.raises(InvalidRequest):
            harness.submit([10**6], max_tokens=0)
        with pytest.raises(ContextLengthExceeded):
            harness.submit([1] * 10_000, max_tokens=0)


async def test_the_choices_of_a_reply_count_as_one_request_by_their_gravest_end() -> None:
    async with running_engine() as harness:
        streams = [harness.submit([index, 2], max_tokens=40, group="reply") for index in range(3)]
        harness.engine.cancel(streams[1].request_id)
        await asyncio.gather(*(collect(stream) for stream in streams))
        metrics = harness.engine.metrics
        assert metrics.requests_started == 1
        assert dict(metrics.requests_finished) == {FinishReason.ABORT: 1}


LONG = "x" * 50_000
FORMER_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": [LONG]}}}


@pytest.mark.parametrize(
    ("message", "tools"),
    [
        ({"role": "user", "content": LONG}, []),
        ({"role": "user", "content": "a", "name": LONG}, []),
        ({"role": "tool", "content": "a", "tool_call_id": LONG}, []),
        ({"role": "assistant", "content": "", "tool_calls": [FORMER_CALL]}, []),
        ({"role": "user", "content": "a"}, [{"type": "function", "function": {"name": "f", LONG: 1}}]),
    ],
    ids=["content", "name", "call id", "arguments", "tool"],
)
async def test_all_text_for_the_template_counts_before_any_work_is_done(
    message: dict[str, object], tools: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine() as harness:
        monkeypatch.setattr(harness.parts.tokenizer, "render_chat_text", lambda *_: pytest.fail("worked on"))
        with pytest.raises(ContextLengthExceeded) as refused:
            await harness.engine.text.render_chat([message], tools)
        assert refused.value.param == "messages"


async def test_a_template_that_repeats_texts_is_checked_again_before_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_engine() as harness:
        monkeypatch.setattr(harness.parts.tokenizer, "render_chat_text", lambda *_: LONG)
        monkeypatch.setattr(harness.parts.tokenizer, "encode", lambda *_, **__: pytest.fail("encoded"))
        with pytest.raises(ContextLengthExceeded) as refused:
            await harness.engine.text.render_chat([{"role": "user", "content": "a"}])
        assert refused.value.param == "messages"
