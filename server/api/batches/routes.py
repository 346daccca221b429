"""/v1/batches: make, list, look at and cancel jobs. A batch belongs to the key that made it."""

from __future__ import annotations

import json
import uuid
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from server.api.batches.batches import batches_of
from server.api.batches.files import check_room, existing_file, owner_of
from server.api.batches.objects import PAGE_PARAMETERS, batch_object, cannot_go_on, listing, read_page
from server.api.batches.protocol import BatchRequest, window_s
from server.api.batches.records import StoredBatch
from server.api.batches.seats import LinePace
from server.api.batches.store import BatchStore, NotListed
from server.api.body import read_fields
from server.api.openapi import json_body
from server.http.context import context_of
from server.http.errors import INVALID, NOT_FOUND, ApiError, ErrorReply, invalid, shown
from server.http.json_reply import json_response
from server.http.site_guard import refuse_simple

router = APIRouter(tags=["batches"])

BATCHES_PATH = "/v1/batches"
MAX_OPEN = 100  # batches of one tenant at once
MAX_KEPT = 10_000  # of one tenant: of more, those that ended are forgotten, the oldest first
_CANCELLABLE = ("validating", "in_progress")

BatchId = Annotated[str, Path(description="The id of a batch.")]

_EXAMPLE = {
    "input_file_id": "file-0123456789abcdef0123456789abcdef",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}


@router.post(BATCHES_PATH, openapi_extra=json_body(BatchRequest, _EXAMPLE))
async def create_batch(request: Request) -> Response:
    """Answer the requests in a file until the end of a window, in seats that nobody else needs."""
    batches, tenant = batches_of(request), owner_of(request)
    body = await read_fields(request, BatchRequest, {})
    max_file_size = context_of(request).settings.server.max_file_size

    def add(store: BatchStore) -> StoredBatch:
        check_room(store, tenant, max_file_size)  # for what it will write
        return _add(store, batches.runner.pace, body, tenant)

    batch = await batches.state.run(add)
    batches.runner.start()
    batches.runner.take(batch)
    return json_response(batch_object(batch))


@router.get(BATCHES_PATH, openapi_extra={"parameters": [*PAGE_PARAMETERS]})
async def list_batches(request: Request) -> Response:
    """The caller's batches, newest first."""
    page, tenant = read_page(request.query_params, 100), owner_of(request)
    batches = batches_of(request)
    try:
        found = await batches.state.run(lambda store: store.list_batches(tenant, page))
    except NotListed:
        raise cannot_go_on(page) from None
    batches.runner.start()
    return json_response(listing([batch_object(batch) for batch in found], page))


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: BatchId) -> Response:
    """A batch as it stands."""
    return json_response(batch_object(await _find_batch(request, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: BatchId) -> Response:
    """End a batch; what is answered already is in its output."""
    refuse_simple(request)
    batches = batches_of(request)
    batch = await _find_batch(request, batch_id)
    if batch.status == "cancelling":
        return json_response(batch_object(batch))

    def cancel(store: BatchStore) -> StoredBatch:
        found = store.find_batch(batch.id, batch.tenant)
        if found is None or found.status not in _CANCELLABLE:
            raise _ended(batch if found is None else found)
        return store.change_batch(batch.id, "cancelling")

    batch = await batches.state.run(cancel)
    batches.runner.take(batch)
    return json_response(batch_object(batch))


def _add(store: BatchStore, pace: LinePace, body: BatchRequest, tenant: str) -> StoredBatch:
    """A new batch. Raises ApiError when there are too many, or it cannot end in time.

    It is there before anybody else may delete its file, which is not deleted from then on.
    """
    file = existing_file(store, tenant, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise invalid(f"The file's purpose is '{file.purpose}'; it must be 'batch'.", "input_file_id")
    now = store.now()
    expires_at = now + window_s(body.completion_window)
    open_batches = store.open_batches()
    if sum(batch.tenant == tenant for batch in open_batches) >= MAX_OPEN:
        message = f"{MAX_OPEN} batches of this key are open, the limit: wait for one to end."
        raise ApiError(ErrorReply(409, INVALID, message, code="too_many_batches"))
    later = {batch.expires_at for batch in open_batches if batch.expires_at > expires_at}
    for until in sorted({expires_at, *later}):
        _check_window(pace, file.num_lines, store.num_unanswered(until), until - now, until == expires_at)
    batch = StoredBatch(
        id=f"batch_{uuid.uuid4().hex}",
        tenant=tenant,
        input_file_id=file.id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        status="validating",
        created_at=now,
        expires_at=expires_at,
        metadata=None if body.metadata is None else json.dumps(body.metadata),
        output_lifetime_s=body.output_expires_after,
    )
    store.add_batch(batch, MAX_KEPT)
    return batch


def _check_window(pace: LinePace, num_new: int, num_open: int, left_s: int, is_own: bool) -> None:
    """Refuse a batch whose lines would have a window missed, its own or a later one that would be met.

    `num_open` lines are promised until the end of that window already, which is `left_s` away.
    """
    needed_s, needed_without_s = pace.needed_s(num_new + num_open), pace.needed_s(num_open)
    if needed_s is None or needed_without_s is None or needed_s <= left_s:
        return
    if not is_own and needed_without_s > left_s:
        return
    whose = "the completion window has" if is_own else "another batch's window, which would be missed, has"
    message = f"{num_new + num_open} lines are to be answered until then, which takes about {needed_s:.0f} s "
    message += f"at the measured rate; {whose} {left_s} s left."
    raise ApiError(ErrorReply(400, INVALID, message, "completion_window", "completion_window_too_short"))


async def _find_batch(request: Request, batch_id: str) -> StoredBatch:
    """The caller's batch, which runs if it is open. Raises ApiError (404)."""
    tenant, batches = owner_of(request), batches_of(request)
    found = await batches.state.run(lambda store: store.find_batch(batch_id, tenant))
    batches.runner.start()  # it did not if another server had the folder, or its disk was full, at the start
    if found is None:
        message = f"The batch '{shown(batch_id)}' does not exist."
        raise ApiError(ErrorReply(404, NOT_FOUND, message, "batch_id", "batch_not_found"))
    return found


def _ended(batch: StoredBatch) -> ApiError:
    message = f"The batch is {batch.status}: there is nothing to cancel."
    return ApiError(ErrorReply(409, INVALID, message, "batch_id", "batch_ended"))
