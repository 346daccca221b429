"""Files of a Hugging Face repo, fetched into the hub's own cache: continued where a fetch ended, and checked.

The hub's client begins a file anew in each process and compares sizes only. Here a file that was begun is
continued, and it gets its place in the cache when its digest is the one that the hub's listing names.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from httpx2 import TransportError
from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

from config.units import rough_size
from engine.compute.loading.hub_files import HubName
from engine.compute.loading.missing_model import no_such_repo, not_fetched
from engine.compute.loading.model_files import first_line
from engine.errors import StartRefused

_UNREACHABLE: Final = (TransportError, OfflineModeIsEnabled)
_SPARE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Listing:
    """A repo's files at one commit, as the hub names them."""

    name: HubName
    commit: str
    files: dict[str, RepoFile]


def list_repo(name: HubName, revision: str | None) -> Listing | None:
    """What the hub has of a repo; None when it cannot be asked. Raises StartRefused."""
    api = HfApi()
    with hub_refusals(name.repo, revision):
        try:
            commit = api.model_info(name.repo, revision=revision).sha
            found = api.list_repo_tree(name.repo, recursive=True, revision=commit)
            files = {entry.path: entry for entry in found if isinstance(entry, RepoFile)}
        except _UNREACHABLE:
            return None
        except HfHubHTTPError as error:
            if error.response.status_code >= 500:  # it is down, which is no word on the repo
                return None
            raise
    return Listing(name, str(commit), files)


def fetch_files(listing: Listing, revision: str | None, files: Sequence[str]) -> Path:
    """The snapshot in the cache with all of `files`, each fetched if it is not there. Raises StartRefused.

    What was fetched of a file stays when this is interrupted or cut off, and the next call continues it.
    """
    with hub_refusals(listing.name.repo, revision):
        store = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=listing.name.repo, repo_type="model"))
        missing = [
            listing.files[file]
            for file in files
            if not (store / "blobs" / _digest(listing.files[file])).exists()
            and not _is_huge(listing.files[file])
        ]
        _check_room(store, missing)
        for entry in missing:
            _fetch(listing, entry, store)
        # Only names are left to be given, but for files so large that plain HTTP does not serve them.
        patterns = [glob.escape(file) for file in files]
        bar = None if any(_is_huge(listing.files[file]) for file in files) else _NoBar
        return Path(
            snapshot_download(listing.name.repo, revision=revision, allow_patterns=patterns, tqdm_class=bar)
        )


def cached_snapshot(name: HubName, revision: str | None) -> Path:
    """The snapshot in the local cache, which may lack files. Raises StartRefused when there is none."""
    try:
        return Path(snapshot_download(name.repo, revision=revision, allow_patterns=[], local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise StartRefused(not_fetched(name.repo, revision)) from error
    except Exception as error:  # a cache that is damaged fails in many ways
        raise StartRefused(f"{name.repo} cannot be read: {first_line(error)}.") from error


@contextlib.contextmanager
def hub_refusals(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's client raises inside into StartRefused, one line."""
    wanted = repo if revision is None else f"{repo} at {revision}"
    try:
        yield
    except StartRefused:
        raise
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{repo}"
        raise StartRefused(f"{repo} is gated: accept its terms at {page} and set HF_TOKEN.") from error
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise StartRefused(not_fetched(repo, revision)) from error
        raise StartRefused(no_such_repo(repo, revision)) from error
    except _UNREACHABLE as error:
        raise StartRefused(
            f"The connection to {constants.ENDPOINT} was lost; what came of {wanted} is kept, and the next "
            "try continues it."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise StartRefused(
                f"{wanted}: {constants.ENDPOINT} refuses access with {status}: set HF_TOKEN to one "
                "that has it."
            ) from error
        raise StartRefused(f"{wanted} cannot be downloaded: {first_line(error)}.") from error
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        raise StartRefused(f"{wanted} cannot be downloaded: {first_line(error)}.") from error


class _NoBar(tqdm):
    """Draws nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]


def _is_huge(entry: RepoFile) -> bool:
    """True for a file that the hub gives to its own client only."""
    return bool(entry.size > constants.MAX_HTTP_DOWNLOAD_SIZE)


def _fetch(listing: Listing, entry: RepoFile, store: Path) -> None:
    """Fetch one file to its place among the blobs; another process that wants it waits."""
    digest = _digest(entry)
    place, begun = store / "blobs" / digest, store / "blobs" / f"{digest}.incomplete"
    lock = store.parent / ".locks" / store.name / f"{digest}.lock"
    for folder in (place.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if place.exists():
            return
        with begun.open("ab") as file:
            if file.tell() > entry.size:
                file.truncate(0)
            http_get(
                hf_hub_url(listing.name.repo, entry.path, revision=listing.commit),
                file,
                resume_size=file.tell(),
                headers={**build_hf_headers(), "accept-encoding": "identity"},
                expected_size=entry.size,
                displayed_filename=entry.path,
            )
            file.flush()
            os.fsync(file.fileno())
        found = _digest_of(begun, entry)
        if found != digest:
            begun.unlink()
            raise StartRefused(
                f"{entry.path} of {listing.name.repo} came damaged: its digest is {found}, and the hub names "
                f"{digest}. It was deleted: run this again."
            )
        begun.replace(place)


def _check_room(store: Path, missing: Sequence[RepoFile]) -> None:
    """Raise StartRefused unless the disk has room for what is still to come."""
    wanted = sum(entry.size for entry in missing)
    begun = [store / "blobs" / f"{_digest(entry)}.incomplete" for entry in missing]
    wanted -= sum(path.stat().st_size for path in begun if path.exists())
    folder = next(path for path in (store, *store.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if wanted > 0 and wanted + _SPARE_BYTES > free:
        raise StartRefused(
            f"{folder} has {rough_size(free)} free, and {rough_size(wanted)} are to be fetched."
        )


def _digest(entry: RepoFile) -> str:
    """What the hub says of a file's content, which is its name in the cache too."""
    return entry.lfs.sha256 if entry.lfs is not None else entry.blob_id


def _digest_of(path: Path, entry: RepoFile) -> str:
    """SHA-256 of a large file; git's SHA-1 of a blob for a small one."""
    if entry.lfs is not None:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
