"""/v1/files: what batches read and write. A file belongs to the key that made it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from server.api.batches.batches import Batches, batches_of
from server.api.batches.objects import PAGE_PARAMETERS, cannot_go_on, file_object, listing, read_page
from server.api.batches.records import LONGEST_LIFE_S, SHORTEST_LIFE_S, StoredFile
from server.api.batches.store import UNFINISHED, BatchStore, NotListed
from server.api.batches.upload import Upload
from server.http.context import context_of, exchange_of
from server.http.errors import INVALID, NOT_FOUND, ApiError, ErrorReply, invalid, shown
from server.http.json_reply import json_response
from server.http.site_guard import WANTED_OF_FORMS, refuse_simple

router = APIRouter(tags=["batches"])

FILES_PATH = "/v1/files"
PURPOSES = ("batch", "batch_output")
MAX_FILES = 1000  # of one tenant
MAX_STORED = 20  # times the largest file, of all tenants together
_SECONDS = re.compile(r"[0-9]{1,9}")

FileId = Annotated[str, Path(description="The id of a file.")]

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "JSON Lines: one request a line, with `custom_id`, `method`, "
                            "`url` and `body`.",
                        },
                        "purpose": {"const": "batch", "description": "What the file is for."},
                        "expires_after[anchor]": {
                            "const": "created_at",
                            "description": "From when `expires_after[seconds]` counts.",
                        },
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": SHORTEST_LIFE_S,
                            "maximum": LONGEST_LIFE_S,
                            "description": "How long the file is kept.",
                        },
                    },
                }
            }
        },
    }
}
_PURPOSE = {
    "name": "purpose",
    "in": "query",
    "description": "List files of this purpose only.",
    "schema": {"type": "string"},
}


@router.post(FILES_PATH, openapi_extra=_FORM)
async def create_file(request: Request) -> Response:
    """Upload a file of requests, which is written to disk as it arrives."""
    refuse_simple(request, WANTED_OF_FORMS)
    tenant = owner_of(request)
    state, limit = batches_of(request).state, context_of(request).settings.server.max_file_size
    file_id, part = await state.run(lambda store: _begin(store, tenant, limit))
    upload = Upload(part, limit)
    try:
        await upload.read(request.headers.get("content-type", ""), request.receive)
        purpose, lifetime_s = _read_form(upload.fields)

        def keep(store: BatchStore) -> StoredFile:
            check_room(store, tenant, limit)  # others have come meanwhile
            now = store.now()
            name = upload.filename or "upload"
            file = StoredFile(
                *(file_id, tenant, name, purpose, upload.num_bytes, upload.num_lines, now, now + lifetime_s)
            )
            store.add_file(file, part)
            return file

        return json_response(file_object(await state.run(keep)))
    except OSError as error:
        raise state.refusal(error) from error
    finally:
        upload.close()


@router.get(FILES_PATH, openapi_extra={"parameters": [_PURPOSE, *PAGE_PARAMETERS]})
async def list_files(request: Request) -> Response:
    """The caller's files, newest first."""
    page, tenant = read_page(request.query_params, 10_000), owner_of(request)
    purpose = request.query_params.get("purpose")
    try:
        found = await batches_of(request).state.run(lambda store: store.list_files(tenant, purpose, page))
    except NotListed:
        raise cannot_go_on(page) from None
    return json_response(listing([file_object(file) for file in found], page))


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: FileId) -> Response:
    """What is known of a file."""
    return json_response(file_object(await find_file(batches_of(request), owner_of(request), file_id)))


@router.get("/v1/files/{file_id}/content")
async def get_content(request: Request, file_id: FileId) -> Response:
    """The file itself."""
    tenant = owner_of(request)

    def find(store: BatchStore) -> _Content:
        file = existing_file(store, tenant, file_id)
        return _Content(file, store.path(file.id))

    return await batches_of(request).state.run(find)


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: FileId) -> Response:
    """Delete a file; not one that a running batch still reads."""
    batches = batches_of(request)
    file = await find_file(batches, owner_of(request), file_id)

    def delete(store: BatchStore) -> str | None:
        user = store.user_of(file.id)
        if user is None:
            store.delete_file(file.id)
        return user

    user = await batches.state.run(delete)
    if user is not None:
        message = f"The batch {user} still reads the file: cancel it first, or wait for its end."
        raise ApiError(ErrorReply(409, INVALID, message, "file_id", "file_in_use"))
    return json_response({"id": file.id, "object": "file", "deleted": True})


def owner_of(request: Request) -> str:
    """The tenant that asks, empty without keys."""
    return exchange_of(request.scope).tenant or ""


async def find_file(batches: Batches, tenant: str, file_id: str) -> StoredFile:
    """The tenant's file. Raises ApiError (404)."""
    return await batches.state.run(lambda store: existing_file(store, tenant, file_id))


def existing_file(store: BatchStore, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
    """The same, on the store's thread."""
    found = store.find_file(file_id, tenant)
    if found is None:
        raise _not_found(file_id, param)
    return found


def _not_found(file_id: str, param: str = "file_id") -> ApiError:
    message = f"The file '{shown(file_id)}' does not exist or is no longer kept."
    return ApiError(ErrorReply(404, NOT_FOUND, message, param, "file_not_found"))


class _Content(FileResponse):
    """The content of a file, whole even if that is deleted meanwhile. Raises ApiError if it is before."""

    def __init__(self, file: StoredFile, path: FilePath) -> None:
        self._file = file
        try:
            found = path.stat()
        except FileNotFoundError:
            raise _not_found(file.id) from None
        super().__init__(
            path, 200, None, "application/octet-stream", filename=file.filename, stat_result=found
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def send_opened(message: Message) -> None:
            """The head is sent with the first piece: the file is open then."""
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                head, start = start, None
                await send(head)
            await send(message)

        try:
            await super().__call__(scope, receive, send_opened)
        except FileNotFoundError:
            raise _not_found(self._file.id) from None


def _begin(store: BatchStore, tenant: str, max_file_size: int) -> tuple[str, FilePath]:
    """A fresh id and where to write. Raises ApiError when there is no room for another file."""
    check_room(store, tenant, max_file_size)
    file_id = store.new_file_id()
    return file_id, store.path(file_id + UNFINISHED)


def check_room(store: BatchStore, tenant: str, max_file_size: int) -> None:
    """Raises ApiError when there is no room for another file."""
    num_files, num_bytes = store.room_taken(tenant)
    if num_files >= MAX_FILES:
        message = f"{num_files} files are kept for this key, the limit: delete some first."
        raise ApiError(ErrorReply(409, INVALID, message, code="too_many_files"))
    if num_bytes >= MAX_STORED * max_file_size:
        message = f"Files take {num_bytes} bytes; no more are taken beyond {MAX_STORED * max_file_size}."
        raise ApiError(ErrorReply(507, INVALID, message, code="insufficient_storage"))


def _read_form(fields: Mapping[str, str]) -> tuple[str, int]:
    """The purpose and the lifetime in seconds. Raises ApiError."""
    purpose = fields.get("purpose")
    if purpose != "batch":
        what = "missing" if purpose is None else f"'{shown(purpose)}'"
        raise invalid(f"'purpose' is {what}; it must be 'batch'.", "purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, LONGEST_LIFE_S
    if anchor != "created_at":
        raise invalid("'expires_after[anchor]' must be 'created_at'.", "expires_after[anchor]")
    lifetime_s = int(seconds) if seconds is not None and _SECONDS.fullmatch(seconds) else 0
    if not SHORTEST_LIFE_S <= lifetime_s <= LONGEST_LIFE_S:
        message = f"'expires_after[seconds]' must be from {SHORTEST_LIFE_S} to {LONGEST_LIFE_S}."
        raise invalid(message, "expires_after[seconds]")
    return purpose, lifetime_s
