"""/v1/files and /v1/batches over a real socket, mostly as the official client uses them."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import openai
import pytest

from engine import Overloaded
from server.api.batches import runner
from server.api.batches.seats import LinePace
from server.api.batches.store import BatchStore
from server.api.batches.upload import Upload
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import RawReply, Wire, ask
from tests.support.fake_engine import FakeEngine

COMPLETIONS: Any = "/v1/completions"
WAIT_S = 20.0


def line(custom_id: str, prompt: str = "abc", **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}


def jsonl(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def client_of(url: str, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@asynccontextmanager
async def client_for(folder: Path, engine: FakeEngine | None = None, **server: Any) -> AsyncIterator[Any]:
    """The official client of a server that keeps its state in `folder`."""
    async with (
        server_url(engine or FakeEngine(), state_dir=folder, **server) as url,
        client_of(url) as client,
    ):
        yield client


async def submit(
    client: Any, lines: Sequence[dict[str, Any]] | bytes, window: str = "24h", endpoint: str = COMPLETIONS
) -> Any:
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window)


async def ended(client: Any, batch: Any) -> Any:
    return await until(
        client, batch, lambda each: each.status in ("completed", "failed", "expired", "cancelled")
    )


async def until(client: Any, batch: Any, is_so: Callable[[Any], bool]) -> Any:
    """The batch once it `is_so`; there is nothing to wait for but its state."""
    async with asyncio.timeout(WAIT_S):
        while not is_so(batch):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def rows_of(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = (await client.files.content(file_id)).text
    return [json.loads(row) for row in content.splitlines()]


async def test_each_line_is_answered_once_and_in_order(tmp_path: Path) -> None:
    lines = [line(f"r{i}", f"{i:03}") for i in range(150)]
    async with client_for(tmp_path) as client:
        batch = await submit(client, lines)
        assert batch.status == "validating"
        batch = await ended(client, batch)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert (batch.request_counts.total, batch.request_counts.completed) == (150, 150)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        rows = await rows_of(client, batch.output_file_id)
        assert [row["custom_id"] for row in rows] == [each["custom_id"] for each in lines]
        assert [row["response"]["body"]["choices"][0]["text"] for row in rows] == [
            f"{i:03}" for i in range(150)
        ]
        assert {row["response"]["status_code"] for row in rows} == {200}
        assert len({row["id"] for row in rows}) == 150
        assert {row["error"] for row in rows} == {None}


async def test_chats_and_responses_run_as_over_http(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "hi"}]
    chat: Any = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": message},
    }
    items: Any = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": {"input": "hi"}}
    async with client_for(tmp_path) as client:
        for each, kind in ((chat, "chat.completion"), (items, "response")):
            batch = await ended(client, await submit(client, [each], endpoint=each["url"]))
            (row,) = await rows_of(client, batch.output_file_id)
            assert row["response"]["body"]["object"] == kind


@pytest.mark.parametrize("prompt", ["\u6cb3" * 200, list(range(1, 200))])
async def test_a_line_within_the_limit_of_a_body_is_answered_however_it_is_written(
    tmp_path: Path, prompt: Any
) -> None:
    content = json.dumps(line("a", prompt), ensure_ascii=False, separators=(",", ":")).encode()
    async with client_for(tmp_path, max_body_bytes=len(content)) as client:
        batch = await ended(client, await submit(client, content))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)


async def test_a_line_that_is_refused_lands_in_the_errors_with_the_reply_of_http(tmp_path: Path) -> None:
    wrong = [line("bad", temperature=9), line("elsewhere", model="nowhere")]
    async with client_for(tmp_path) as client:
        batch = await ended(client, await submit(client, [line("good"), *wrong]))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
        assert [row["custom_id"] for row in await rows_of(client, batch.output_file_id)] == ["good"]
        bad, elsewhere = await rows_of(client, batch.error_file_id)
        assert (bad["response"]["status_code"], bad["response"]["body"]["error"]["param"]) == (
            400,
            "temperature",
        )
        assert elsewhere["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b'{"custom_id": "a"\n', "invalid_json_line", 1),
        (b'{"custom_id": "a\x00b"}\n', "invalid_json_line", 1),
        (b'{"custom_id": "\xff"}\n', "invalid_json_line", 1),
        (b"[1]\n", "invalid_json_line", 1),
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3),
        (jsonl([{**line("a"), "custom_id": 7}]), "invalid_custom_id", 1),
        (jsonl([{**line("a"), "method": "GET"}]), "invalid_method", 1),
        (jsonl([{**line("a"), "url": "/v1/chat/completions"}]), "invalid_url", 1),
        (jsonl([{**line("a"), "body": []}]), "invalid_body", 1),
        (jsonl([line("a", stream=True)]), "invalid_body", 1),
        (jsonl([line("a"), line("long", "x" * 20_000)]), "line_too_long", 2),
        (lambda: b"{}\n" * 1_000_000, "invalid_custom_id", 1),
        (lambda: jsonl([line(str(i), "") for i in range(50_001)]), "too_many_lines", 50_001),
    ],
)
async def test_a_file_with_a_wrong_line_runs_nothing(
    tmp_path: Path, content: bytes | Callable[[], bytes], code: str, number: int | None
) -> None:
    content = content() if callable(content) else content  # what is large is not made to be collected
    engine = FakeEngine()
    async with client_for(tmp_path, engine, max_body_bytes=10_000) as client:
        batch = await ended(client, await submit(client, content))
        assert batch.status == "failed"
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
        assert len(batch.errors.data) <= 100
        assert not engine.requests


async def test_a_cancelled_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def gate(_: int) -> None:
        if len(engine.streams) > 3:
            await held.wait()

    engine = FakeEngine(gate=gate)
    async with client_for(tmp_path, engine) as client:
        batch = await submit(client, [line(f"r{i}") for i in range(200)])
        batch = await until(client, batch, lambda each: each.status == "in_progress" and bool(engine.streams))
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch)
        assert batch.status == "cancelled"
        counts = batch.request_counts
        assert counts.completed + counts.failed == counts.total == 200
        answered = await rows_of(client, batch.output_file_id) if counts.completed else []
        refused = await rows_of(client, batch.error_file_id)
        assert {row["error"]["code"] for row in refused} == {"batch_cancelled"}
        assert sorted(row["custom_id"] for row in answered + refused) == sorted(f"r{i}" for i in range(200))
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)
        assert not engine.num_open


async def test_a_window_that_ends_first_expires_the_rest(tmp_path: Path) -> None:
    async def never(_: int) -> None:
        await asyncio.Event().wait()

    engine = FakeEngine(gate=never)
    async with client_for(tmp_path, engine) as client:
        begun_at = time.monotonic()
        batch = await ended(client, await submit(client, [line("a"), line("b")], window="1s"))
        assert time.monotonic() - begun_at > 1
        assert (batch.status, batch.output_file_id) == ("expired", None)
        assert [row["error"]["code"] for row in await rows_of(client, batch.error_file_id)] == [
            "batch_expired"
        ] * 2
        assert not engine.num_open


@pytest.mark.parametrize(("ending", "num_told"), [("expired", 2), ("cancelled", 0)])
async def test_a_batch_that_is_over_before_it_was_validated_tells_of_all_its_lines_or_of_none(
    tmp_path: Path, ending: str, num_told: int
) -> None:
    async def never(_: int) -> None:
        await asyncio.Event().wait()

    async with client_for(tmp_path, FakeEngine(gate=never)) as client:
        batch = await submit(client, [line("a"), line("b")])
        await until(client, batch, lambda each: each.status == "in_progress")
    status = "validating" if ending == "expired" else "cancelling"
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as database, database:
        database.execute("DELETE FROM lines WHERE custom_id = 'b'")  # validation was interrupted between them
        database.execute(
            "UPDATE batches SET status = ?, in_progress_at = NULL, total = 0, expires_at = created_at - 9",
            (status,),
        )
    async with client_for(tmp_path) as client:
        batch = await ended(client, batch)
        assert (batch.status, batch.output_file_id) == (ending, None)
        assert (batch.request_counts.total, batch.request_counts.failed) == (num_told, num_told)
        told = [] if batch.error_file_id is None else await rows_of(client, batch.error_file_id)
        assert [row["error"]["code"] for row in told] == [f"batch_{ending}"] * num_told


async def test_a_window_that_cannot_be_met_is_refused(tmp_path: Path) -> None:
    async def slow(_: int) -> None:
        await asyncio.sleep(0.02)

    async with client_for(tmp_path, FakeEngine(gate=slow)) as client:
        await ended(client, await submit(client, [line(str(i)) for i in range(100)]))
        with pytest.raises(openai.BadRequestError) as refusal:
            await submit(client, [line(str(i)) for i in range(20_000)], window="1s")
        assert refusal.value.code == "completion_window_too_short"


async def test_a_batch_that_would_break_the_promise_to_a_later_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(LinePace, "needed_s", lambda _, num_lines: float(num_lines))
    async with client_for(tmp_path, FakeEngine(gate=never)) as client:

        async def promise(num_lines: int, window: str) -> None:
            await submit(client, [line(str(i)) for i in range(num_lines)], window=window)

        await promise(100, "150s")
        with pytest.raises(openai.BadRequestError, match=r"160 lines .* another batch's window"):
            await promise(60, "120s")
        await promise(10, "120s")
        await promise(100, "1h")


async def test_lines_give_their_seats_to_requests_that_somebody_waits_for(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def gate(_: int) -> None:
        await held.wait()

    engine = FakeEngine(gate=gate)
    times = [0.01] * 4 + [0.01 + 0.001 * n for n in range(1, 61)]
    engine.decode_steps_s = lambda most: times[:most]  # type: ignore[method-assign]
    async with client_for(tmp_path, engine) as client:
        batch = await submit(client, [line(f"r{i}") for i in range(100)])
        await until(client, batch, lambda _: engine.num_open == 56)  # of 64 seats, an eighth stays free
        waiting = asyncio.create_task(client.completions.create(model=MODEL, prompt="me", max_tokens=2))
        await until(
            client, batch, lambda _: engine.num_open == 4
        )  # itself, and three that a step does not feel
        assert [each.priority for each in engine.requests[-1:]] == [0]
        assert {each.priority for each in engine.requests[:-1]} == {1000}
        held.set()
        assert (await waiting).choices[0].text
        batch = await ended(client, batch)
        assert len({row["custom_id"] for row in await rows_of(client, batch.output_file_id)}) == 100


async def test_a_server_without_room_asks_the_line_again(tmp_path: Path) -> None:
    engine = FakeEngine(refusal=Overloaded("The queue is full.", code="queue_full", retry_after_s=1))
    async with client_for(tmp_path, engine) as client:
        batch = await submit(client, [line("a")])
        batch = await until(client, batch, lambda each: each.status == "in_progress")
        engine.refusal = None
        assert (await ended(client, batch)).request_counts.completed == 1


async def test_the_next_server_goes_on_where_this_one_ended(tmp_path: Path) -> None:
    async def gate(_: int) -> None:
        if len(engine.streams) > 100:
            await asyncio.Event().wait()

    engine, other = FakeEngine(gate=gate), FakeEngine()
    async with client_for(tmp_path, engine) as client:
        batch = await submit(client, [line(f"r{i}") for i in range(200)])
        batch = await until(client, batch, lambda each: each.request_counts.completed >= 40)
    async with client_for(tmp_path, other) as client:
        batch = await ended(client, batch)
        assert [row["custom_id"] for row in await rows_of(client, batch.output_file_id)] == [
            f"r{i}" for i in range(200)
        ]
        assert 100 <= len(other.requests) <= 160


async def test_files_and_batches_belong_to_the_key_that_made_them(tmp_path: Path) -> None:
    keys = ("first", "second")
    engine = FakeEngine()
    async with (
        server_url(engine, state_dir=tmp_path, api_key=keys) as url,
        client_of(url, "first") as first,
        client_of(url, "second") as second,
    ):
        batch = await ended(first, await submit(first, [line("a")]))
        assert engine.requests[0].tenant is not None
        for name in (batch.input_file_id, batch.output_file_id):
            for call in (second.files.retrieve, second.files.content, second.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(name)
        for attempt in (second.batches.retrieve, second.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await attempt(batch.id)
        with pytest.raises(openai.NotFoundError):
            await second.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )
        assert [each async for each in second.files.list()] == []
        assert [each async for each in second.batches.list()] == []
        assert [each.id async for each in first.batches.list()] == [batch.id]


async def test_a_key_finds_its_own_after_the_next_start_wherever_that_is(tmp_path: Path) -> None:
    """All that outlives a container may be the directory of the state."""
    found: list[list[tuple[str, str | None]]] = []
    for _ in range(2):
        server = server_url(FakeEngine(), state_dir=tmp_path, api_key=("first", "second"))
        async with server as url, client_of(url, "first") as client, client_of(url, "second") as other:
            if not found:
                await ended(client, await submit(client, [line("a")]))
            found.append([(each.id, each.output_file_id) async for each in client.batches.list()])
            assert [each async for each in other.batches.list()] == []
    assert found[0] == found[1] and len(found[0]) == 1


async def test_files_are_listed_deleted_and_kept_from_deletion_while_they_are_read(tmp_path: Path) -> None:
    async def never(_: int) -> None:
        await asyncio.Event().wait()

    async with client_for(tmp_path, FakeEngine(gate=never)) as client:
        made = [await client.files.create(file=(f"{i}.jsonl", b"{}"), purpose="batch") for i in range(5)]
        assert [each.id async for each in client.files.list(limit=2)] == [each.id for each in reversed(made)]
        assert (await client.files.retrieve(made[0].id)).filename == "0.jsonl"
        assert (await client.files.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made[0].id)
        batch = await submit(client, [line("a")])
        with pytest.raises(openai.ConflictError):
            await client.files.delete(batch.input_file_id)
        assert len(list((tmp_path / "files").iterdir())) == 5


async def test_a_list_goes_on_behind_what_is_there_or_says_that_it_cannot(tmp_path: Path) -> None:
    async with (
        server_url(FakeEngine(), state_dir=tmp_path, api_key=("first", "second")) as url,
        client_of(url, "first") as first,
        client_of(url, "second") as second,
    ):
        made = [(await first.files.create(file=(str(i), b"{}"), purpose="batch")).id for i in range(5)]
        page = await first.files.list(limit=2)
        assert [each.id for each in page.data] == [made[4], made[3]]
        await first.files.delete(made[3])
        with pytest.raises(openai.BadRequestError) as refusal:
            await page.get_next_page()
        assert refusal.value.param == "after"
        with pytest.raises(openai.BadRequestError):
            await second.files.list(after=made[0])
        with pytest.raises(openai.BadRequestError):
            await first.batches.list(after="batch_none")
        assert [each.id for each in (await first.files.list(after=made[4])).data] == made[2::-1]


async def test_a_file_is_deleted_or_gets_a_batch_but_never_both(tmp_path: Path) -> None:
    async with client_for(tmp_path) as client:
        for i in range(30):
            file = await client.files.create(file=("in", jsonl([line("a")])), purpose="batch")
            calls = [
                client.files.delete(file.id),
                client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"),
            ]
            found = await asyncio.gather(*(calls if i % 2 else calls[::-1]), return_exceptions=True)
            refused = [each for each in found if isinstance(each, openai.APIStatusError)]
            assert [each.status_code for each in refused] in ([404], [409])
        for batch in (await client.batches.list(limit=100)).data:
            assert (await ended(client, batch)).request_counts.completed == 1


async def test_a_file_that_is_deleted_while_it_is_fetched_is_there_whole_or_not_found(tmp_path: Path) -> None:
    content = b"0123456789" * 100_000
    async with client_for(tmp_path) as client:
        for _ in range(20):
            file = await client.files.create(file=("in", content), purpose="batch")
            calls = (client.files.content(file.id), client.files.delete(file.id))
            both: Any = await asyncio.gather(*calls, return_exceptions=True)
            found, deleted = both
            assert deleted.deleted
            if not isinstance(found, openai.NotFoundError):
                assert found.content == content


async def upload(url: str, body: bytes, content_type: str = "multipart/form-data; boundary=b") -> RawReply:
    wire = await Wire.connect(url)
    try:
        await wire.send("POST", "/v1/files", body, {"content-type": content_type, "x-request-id": "u"})
        return await wire.reply()
    finally:
        await wire.close()


def form(*parts: tuple[str, bytes]) -> bytes:
    made = [
        b'--b\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        % (name.encode(), b'; filename="x"' if name == "file" else b"", content)
        for name, content in parts
    ]
    return b"".join(made) + b"--b--\r\n"


PURPOSE = ("purpose", b"batch")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (form(PURPOSE, ("file", b"x" * 2000)), 413, "file"),
        (form(PURPOSE), 400, "file"),
        (form(("file", b"x")), 400, "purpose"),
        (form(("purpose", b"fine-tune"), ("file", b"x")), 400, "purpose"),
        (form(PURPOSE, ("file", b"x"), ("file", b"y")), 400, "file"),
        (form(PURPOSE, ("file", b"x"))[:-8], 400, None),
        (form(*[(f"f{i}", b"x") for i in range(20)]), 400, None),
        (form(*[PURPOSE] * 20, ("file", b"x")), 400, None),
        (form(("purpose", b"x" * 5000)), 400, None),
        (b"\x00" * 1000, 400, None),
        (b"--b\r\n" + b"x" * 9000, 400, None),
        (form(PURPOSE, ("file", b"x"), ("expires_after[anchor]", b"now")), 400, "expires_after[anchor]"),
        (
            form(
                *(PURPOSE, ("file", b"x"), ("expires_after[anchor]", b"created_at")),
                ("expires_after[seconds]", b"5"),
            ),
            *(400, "expires_after[seconds]"),
        ),
    ],
)
async def test_a_hostile_upload_is_refused_and_leaves_nothing(
    tmp_path: Path, body: bytes, status: int, param: str | None
) -> None:
    async with server_url(FakeEngine(), state_dir=tmp_path, max_file_size=1000) as url:
        reply = await upload(url, body)
        assert (reply.status, reply.json()["error"]["param"]) == (status, param)
        assert not list((tmp_path / "files").iterdir())


async def test_a_form_whose_boundary_no_form_may_have_is_refused(tmp_path: Path) -> None:
    async with server_url(FakeEngine(), state_dir=tmp_path) as url:
        for boundary in ("x" * 300, "x" * 5000, '"', '"a b"'):
            reply = await upload(
                url, form(PURPOSE, ("file", b"x")), f"multipart/form-data; boundary={boundary}"
            )
            assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_request_error")
        assert not list((tmp_path / "files").iterdir())


async def test_uploads_at_the_same_time_are_kept_up_to_the_limit_of_all(tmp_path: Path) -> None:
    async with client_for(tmp_path, max_file_size=1000) as client:
        uploads = [client.files.create(file=("in", bytes(1000)), purpose="batch") for _ in range(30)]
        found = await asyncio.gather(*uploads, return_exceptions=True)
        refused = [each for each in found if isinstance(each, openai.InternalServerError)]
        assert len(found) - len(refused) == len((await client.files.list(limit=100)).data) == 20
        assert {(each.status_code, each.code) for each in refused} == {(507, "insufficient_storage")}
    assert len(list((tmp_path / "files").iterdir())) == 20


async def test_an_upload_that_breaks_off_or_is_no_form_leaves_nothing(tmp_path: Path) -> None:
    async with server_url(FakeEngine(), state_dir=tmp_path) as url:
        wire = await Wire.connect(url)
        body = form(PURPOSE, ("file", b"x" * 5_000_000))
        headers = {"content-type": "multipart/form-data; boundary=b", "content-length": str(len(body))}
        headers["x-request-id"] = "u"
        await wire.send("POST", "/v1/files", body[:3_000_000], headers)
        await wire.close()
        for content_type in ("application/json", "multipart/form-data"):
            assert (await upload(url, b"{}", content_type)).status == 415
        async with client_of(url) as client:
            assert (await client.files.create(file=("x", body), purpose="batch")).bytes == len(body)
        assert len(list((tmp_path / "files").iterdir())) == 1


async def test_a_server_that_cannot_keep_anything_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with (
        server_url(FakeEngine(), state_dir=tmp_path / "file" / "state") as url,
        client_of(url) as client,
    ):
        with pytest.raises(openai.InternalServerError) as refusal:
            await client.files.list()
        assert (refusal.value.status_code, refusal.value.code) == (503, "batches_unavailable")
        assert (await client.completions.create(model=MODEL, prompt="ab", max_tokens=2)).choices[0].text


async def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    async with client_for(tmp_path) as first, client_for(tmp_path) as second:
        await first.files.list()
        with pytest.raises(openai.InternalServerError) as refusal:
            await second.files.list()
        assert refusal.value.code == "batches_unavailable"


async def test_a_server_that_starts_before_another_has_let_go_of_the_folder_goes_on_there(
    tmp_path: Path,
) -> None:
    async def gate(_: int) -> None:
        await asyncio.Event().wait()

    async with AsyncExitStack() as ending:
        first = await ending.enter_async_context(client_for(tmp_path, FakeEngine(gate=gate)))
        batch = await submit(first, [line("a")])
        await until(first, batch, lambda each: each.status == "in_progress")
        async with client_for(tmp_path) as second:
            with pytest.raises(openai.InternalServerError):
                await second.batches.retrieve(batch.id)
            await ending.aclose()
            assert (await ended(second, batch)).request_counts.completed == 1


async def test_a_full_disk_refuses_uploads_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: Upload, content: bytearray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with client_for(tmp_path) as client:
        monkeypatch.setattr(Upload, "_write", write)
        with pytest.raises(openai.InternalServerError) as refusal:
            await client.files.create(file=("x", b"{}"), purpose="batch")
        assert (refusal.value.status_code, refusal.value.code) == (507, "insufficient_storage")
        monkeypatch.undo()
        assert not list((tmp_path / "files").iterdir())
        assert (await client.files.create(file=("x", b"{}"), purpose="batch")).bytes == 2


async def test_a_line_whose_answer_finds_no_room_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(store: BatchStore, *_: Any, **__: Any) -> bool:
        refused.append(store)
        raise sqlite3.OperationalError("database or disk is full")

    refused: list[BatchStore] = []
    monkeypatch.setattr(runner, "_PAUSE_S", 0.1)
    async with client_for(tmp_path) as client:
        with monkeypatch.context() as full:
            full.setattr(BatchStore, "answer", fill)
            batch = await submit(client, [line("a"), line("b")])
            batch = await until(client, batch, lambda _: len(refused) > 3)
            assert batch.request_counts.completed == 0
        batch = await ended(client, batch)
        assert [row["custom_id"] for row in await rows_of(client, batch.output_file_id)] == ["a", "b"]


async def test_what_a_batch_writes_is_kept_as_long_as_it_says_and_the_batch_for_a_month(
    tmp_path: Path,
) -> None:
    async with client_for(tmp_path) as client:
        file = await client.files.create(file=("in", jsonl([line("a")])), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint=COMPLETIONS,
            completion_window="24h",
            output_expires_after={"anchor": "created_at", "seconds": 7200},
        )
        batch = await ended(client, batch)
        output = await client.files.retrieve(batch.output_file_id)
        assert output.expires_at - output.created_at == 7200
        with pytest.raises(openai.BadRequestError, match="seconds from 3600 to 2592000"):
            await client.batches.create(
                input_file_id=file.id,
                endpoint=COMPLETIONS,
                completion_window="24h",
                output_expires_after={"anchor": "created_at", "seconds": 60},
            )
    store = BatchStore(tmp_path, lambda: output.expires_at)
    assert store.find_file(output.id, "") is None
    assert store.find_batch(batch.id, "") is not None
    store.close()
    store = BatchStore(tmp_path, lambda: batch.completed_at + 30 * 86_400)
    assert store.find_batch(batch.id, "") is None
    assert not list((tmp_path / "files").iterdir())
    store.close()


async def test_a_folder_of_the_first_schema_is_read(tmp_path: Path) -> None:
    async with client_for(tmp_path) as client:
        batch = await ended(client, await submit(client, [line("a")]))
    database = sqlite3.connect(tmp_path / "batches.sqlite3")
    database.executescript("ALTER TABLE batches DROP COLUMN output_lifetime_s; PRAGMA user_version = 1;")
    database.close()
    async with client_for(tmp_path) as client:
        assert await client.batches.retrieve(batch.id) == batch
        await ended(client, await submit(client, [line("b")]))


async def test_the_metrics_tell_what_runs_and_what_waits(tmp_path: Path) -> None:
    async def gate(_: int) -> None:
        await asyncio.Event().wait()

    async with server_url(FakeEngine(gate=gate), state_dir=tmp_path) as url, client_of(url) as client:
        batch = await submit(client, [line(f"r{i}") for i in range(100)])
        await until(client, batch, lambda each: each.status == "in_progress")
        async with asyncio.timeout(WAIT_S):
            while True:
                page = (await ask(url, "GET", "/metrics")).body.decode()
                found = [
                    float(value) for value in re.findall(r"batch_lines_(?:running|waiting){.*?} (.*)", page)
                ]
                if found[0] == 56:
                    break
                await asyncio.sleep(0.01)
        assert found == [56, 44]
