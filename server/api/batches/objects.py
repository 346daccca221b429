"""OpenAI's objects for files and batches, and their lists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.api.batches.records import Page, StoredBatch, StoredFile
from server.http.errors import ApiError, invalid, shown

PAGE_PARAMETERS: tuple[dict[str, Any], ...] = (
    {
        "name": "limit",
        "in": "query",
        "description": "Most of them to list.",
        "schema": {"type": "integer", "minimum": 1, "default": 20},
    },
    {
        "name": "after",
        "in": "query",
        "description": "The id behind which the list goes on.",
        "schema": {"type": "string"},
    },
    {
        "name": "order",
        "in": "query",
        "description": "Newest first or oldest first.",
        "schema": {"enum": ["desc", "asc"], "default": "desc"},
    },
)
_STAMPS = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)


def file_object(file: StoredFile) -> dict[str, object]:
    """A file; every one that is kept is whole."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: StoredBatch) -> dict[str, object]:
    """A batch as it stands."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None if batch.errors is None else {"object": "list", "data": json.loads(batch.errors)},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: getattr(batch, name) for name in _STAMPS},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": None if batch.metadata is None else json.loads(batch.metadata),
    }


def listing(found: Sequence[dict[str, object]], page: Page) -> dict[str, object]:
    """A page of a list that was asked for with one entry more."""
    data = found[: page.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > page.limit,
    }


def cannot_go_on(page: Page) -> ApiError:
    """A 400: a list that ended in silence there would look whole."""
    message = f"'after' is '{shown(page.after or '')}', which is not in the list any more: begin it anew."
    return invalid(message, "after")


def read_page(query: Mapping[str, str], most: int) -> Page:
    """The part of a list that a query asks for. Raises ApiError."""
    text, order = query.get("limit", "20"), query.get("order", "desc")
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise invalid(f"'limit' is {shown(text)}; it goes from 1 to {most}.", "limit")
    if order not in ("asc", "desc"):
        raise invalid(f"'order' is '{shown(order)}'; it must be 'asc' or 'desc'.", "order")
    return Page(limit, query.get("after"), order == "desc")
