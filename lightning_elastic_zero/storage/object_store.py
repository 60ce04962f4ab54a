"""A bucket of an object store (``ObjectStore``), by obstore, imported at the first URL.

obstore repeats requests after temporary failures. ``ObjectStore`` adds two cases: after a truncated
answer it repeats the request; after a failed conditional write, which may have been carried out, it
reads the object back. What the store refuses for good is a ``PermissionError`` at once. All
requests of one outage share one time limit (``RETRY_S``); after it, each is made once.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import errno
import importlib
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypeVar

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage.store import Store, StoredObject, Version

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az", "memory")
"""URL schemes that obstore opens for this library. ``memory`` is for tests: one process only."""

_log = logging.getLogger(__name__)


RETRY_S = 30.0
"""How long a request is repeated after temporary failures.

Less than the stall timeout (50 s), since some requests show no progress: a rank raises the cause
before the others consider it stalled. After an outage of this length, the requests that follow,
such as those that remove what was written, are made once.
"""

_AWAY_S = 10.0
"""After this time without a request, a failure begins a new outage."""

_ONCE_S = 5.0
"""Longest duration of a request that is made once."""

_REQUEST_S = 15.0
"""Longest duration of one request, such as the upload of one part.

Half of ``RETRY_S``, so that a request without an answer is repeated.
"""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
"""Waits between repetitions: twice as long each time, times a random factor."""

_CHECK_S = 1.0
"""Interval between progress checks while a request runs."""

_LAST_DROP_S = 0.1
"""Time for obstore's threads at the end of the process."""

PART_BYTES = 16 << 20
"""Smallest part of a streamed write. Stores allow 10,000 parts."""

_NO_BUCKET = re.compile(r"\b(NoSuchBucket|ContainerNotFound)\b")

_FINAL = re.compile(
    r"status code: (301|400|401|403|404)(?!.*<Code>(RequestTimeout|IncompleteBody|BadDigest))"
    "|redirect without LOCATION",
    re.DOTALL,
)
"""In errors of requests that a repetition does not change, such as an expired token."""

_REASON = re.compile("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)

_CAUSE = re.compile(r'^ *(?:message|error): "(.*)",$', re.MULTILINE)
"""In errors of connections, such as "Connection refused"."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables that name an endpoint, by URL scheme."""

_MOST_PARTS = 9000
_PARTS_IN_FLIGHT = 4


class ObjectStore(Store):
    """One bucket of a cloud's or a cluster's object store."""

    access_advice: ClassVar[str] = "the store's credentials, endpoint and region"

    def __init__(self, root: str) -> None:
        """Connect when the first request is made.

        Args:
            root: URL of the bucket. Credentials, endpoint and region come from the environment.

        Raises:
            UnsupportedError: obstore is not installed, or the bucket's name or the environment
                is not valid.
        """
        self.root = root
        self.requests = 0
        self.bytes_read = 0
        self._obstore = _import_obstore(root)
        self._errors = importlib.import_module("obstore.exceptions")
        self._asking_repeatedly = _handle(root, _REQUEST_S, RETRY_S)
        self._asking_once = self._asking_repeatedly
        if not root.startswith("memory://"):
            self._asking_once = _handle(root, _ONCE_S, 0.0)
        # Of an outage: when its first request began, and its last one failed (-inf: none).
        self._away_since_s, self._failed_s = 0.0, -math.inf

    # -- reads -------------------------------------------------------------------------------

    def get(self, key: str, progress: Progress = NO_PROGRESS) -> tuple[bytes, Version, datetime]:
        async def call() -> tuple[bytes, Version, datetime]:
            result = await self._obstore.get_async(self._handle, key)
            data = bytes(await result.bytes_async())
            if len(data) != result.meta["size"]:
                msg = f"{len(data)} bytes, expected {result.meta['size']}"
                raise self._errors.GenericError(msg)
            return data, _version(result.meta), result.meta["last_modified"]

        return self._wait(self._repeated(key, call), key, progress)

    def size(self, key: str, progress: Progress = NO_PROGRESS) -> int:
        async def call() -> int:
            return int((await self._obstore.head_async(self._handle, key))["size"])

        return self._wait(self._repeated(key, call), key, progress)

    def begin_read(self, key: str, start: int, stop: int) -> _Read:
        async def call() -> memoryview:
            options = {"range": (start, stop)}
            try:
                result = await self._obstore.get_async(self._handle, key, options=options)
                data = memoryview(await result.bytes_async())
            except self._errors.GenericError:
                if (await self._obstore.head_async(self._handle, key))["size"] > start:
                    raise
                return memoryview(b"")
            expected = min(stop, result.meta["size"]) - start
            if data.nbytes != expected or result.range[0] != start:
                msg = f"{data.nbytes} bytes, expected {expected}"
                raise self._errors.GenericError(msg)
            self.bytes_read += data.nbytes
            return data

        future = asyncio.run_coroutine_threadsafe(self._repeated(key, call), _loop(os.getpid()))
        return _Read(start, stop, future, lambda progress: self._result(future, key, progress))

    def objects_below(self, prefix: str, progress: Progress = NO_PROGRESS) -> list[StoredObject]:
        async def call() -> list[StoredObject]:
            objects = await self._obstore.list(self._handle, prefix or None).collect_async()
            self.requests += len(objects) // 1000
            return sorted(map(_stored, objects), key=lambda each: each.key)

        return self._wait(self._repeated(prefix, call), prefix, progress)

    def entries(
        self, prefix: str, progress: Progress = NO_PROGRESS
    ) -> tuple[list[str], list[StoredObject]]:
        async def call() -> tuple[list[str], list[StoredObject]]:
            listed = await self._obstore.list_with_delimiter_async(self._handle, prefix or None)
            names = sorted(PurePosixPath(path).name for path in listed["common_prefixes"])
            return names, sorted(map(_stored, listed["objects"]), key=lambda each: each.key)

        return self._wait(self._repeated(prefix, call), prefix, progress)

    # -- writes ------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, progress: Progress = NO_PROGRESS) -> None:
        async def call() -> None:
            await self._obstore.put_async(self._handle, key, data, use_multipart=False)

        self._wait(self._repeated(key, call), key, progress)

    def swap(
        self, key: str, data: bytes, expected: Version | None, progress: Progress = NO_PROGRESS
    ) -> Version:
        # A failed request may have been carried out all the same, and S3 also refuses it while
        # another write is under way. So the object is read back.
        mode: Any = "create" if expected is None else dict(expected)

        async def call() -> Version:
            return _version(await self._obstore.put_async(self._handle, key, data, mode=mode))

        waits_s = _waits_s(time.monotonic() + RETRY_S)
        while True:
            self.requests += 1
            try:
                return self._wait(self._attempt(call), key, progress)
            except PermissionError:
                raise
            except OSError as error:
                present, version = self._current(key, progress)
                if present == data:
                    return version or {}
                if version != expected:
                    msg = "it was written by another process meanwhile"
                    raise FileExistsError(errno.EEXIST, msg, f"{self.root}/{key}") from error
                if (wait_s := next(waits_s, None)) is None:
                    raise
                _log.warning("%s; the request is repeated", error)
            _sleep(wait_s, progress)

    def _current(self, key: str, progress: Progress) -> tuple[bytes, Version | None]:
        try:
            return self.get(key, progress)[:2]
        except FileNotFoundError:
            return b"", None

    def writer(self, key: str, size_bytes: int, progress: Progress = NO_PROGRESS) -> StoreWriter:
        part_bytes = max(PART_BYTES, -(-size_bytes // _MOST_PARTS))

        async def call() -> Any:
            return self._obstore.open_writer_async(
                self._asking_repeatedly,
                key,
                buffer_size=part_bytes,
                max_concurrency=_PARTS_IN_FLIGHT,
            )

        file = self._wait(call(), key, progress)
        return StoreWriter(self, key, file, part_bytes, progress)

    def delete(self, keys: Collection[str], progress: Progress = NO_PROGRESS) -> None:
        async def call(batch: Sequence[str]) -> None:
            try:
                await self._obstore.delete_async(self._handle, batch)
            except FileNotFoundError:
                # Some stores stop at the first object that is missing.
                for key in batch if len(batch) > 1 else ():
                    await call([key])

        in_order = sorted(keys)
        for start in range(0, len(in_order), 1000):
            batch = in_order[start : start + 1000]
            self._wait(self._repeated(batch[0], lambda: call(batch)), batch[0], progress)  # noqa: B023 (runs before the next one)

    def delete_name(self, key: str, progress: Progress = NO_PROGRESS) -> None:
        async def call() -> None:
            with suppress(FileNotFoundError):
                await self._obstore.delete_async(self._asking_once, key)

        self.requests += 1
        self._wait(self._attempt(call), key, progress)

    # -- requests ----------------------------------------------------------------------------

    @property
    def _handle(self) -> Any:
        return self._asking_once if self._is_away() else self._asking_repeatedly

    def _is_away(self) -> bool:
        """Whether the store has not answered for ``RETRY_S``, nor since."""
        return self._failed_s >= self._away_since_s + RETRY_S

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a request, and record whether the store answers."""
        began_s = time.monotonic()
        if began_s > self._failed_s + _AWAY_S:
            self._away_since_s = began_s
        try:
            result = await call()
        except Exception as error:
            is_answer = not isinstance(error, self._errors.GenericError)
            is_answer = is_answer or bool(_FINAL.search(str(error)))
            self._failed_s = -math.inf if is_answer else time.monotonic()
            raise
        self._failed_s = -math.inf
        return result

    async def _repeated(self, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request whose result is the same when it is carried out twice."""
        waits_s = _waits_s(time.monotonic() + RETRY_S)
        while True:
            self.requests += 1
            try:
                return await self._attempt(call)
            except self._errors.GenericError as error:
                is_final = _FINAL.search(str(error)) or self._is_away()
                if is_final or (wait_s := next(waits_s, None)) is None:
                    raise
                _log.warning("%s/%s: %s; the request is repeated", self.root, key, _text(error))
            await asyncio.sleep(wait_s)

    def _wait(self, call: Coroutine[Any, Any, T], key: str, progress: Progress) -> T:
        future = asyncio.run_coroutine_threadsafe(call, _loop(os.getpid()))
        return self._result(future, key, progress)

    def _result(self, future: concurrent.futures.Future[T], key: str, progress: Progress) -> T:
        """Return the result of a request; check progress while it is under way."""
        try:
            while not concurrent.futures.wait([future], _CHECK_S).done:
                progress.check()
        except BaseException:
            future.cancel()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            msg = "the request was cancelled"
            raise OSError(errno.ECANCELED, msg, f"{self.root}/{key}") from error
        except Exception as error:
            raise self._os_error(error, key) from error

    def _os_error(self, error: Exception, key: str) -> OSError:
        url, text = f"{self.root}/{key}", _text(error)
        known = self._errors
        if _NO_BUCKET.search(text):
            return PermissionError(errno.EACCES, "no such bucket", self.root)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "no such object", url)
        refused = isinstance(error, (known.PermissionDeniedError, known.UnauthenticatedError))
        if refused or (isinstance(error, known.GenericError) and _FINAL.search(str(error))):
            return PermissionError(errno.EACCES, f"access denied ({text})", url)
        if isinstance(error, (known.AlreadyExistsError, known.PreconditionError)):
            return FileExistsError(errno.EEXIST, text, url)
        return OSError(errno.EIO, text, url)


@dataclass(frozen=True, slots=True)
class _Read:
    start: int
    stop: int
    _future: concurrent.futures.Future[memoryview]
    _result: Callable[[Progress], memoryview]
    holder: object = None

    def result(self, progress: Progress) -> memoryview:
        return self._result(progress)

    def cancel(self) -> None:
        self._future.cancel()


class StoreWriter:
    """A new object; see ``store.Writer``."""

    def __init__(
        self, store: ObjectStore, key: str, file: Any, part_bytes: int, progress: Progress
    ) -> None:
        """Take over a writer of obstore."""
        self._store, self._key, self._file = store, key, file
        self._part_bytes, self._progress = part_bytes, progress
        self._size_bytes = 0

    def write(self, part: memoryview) -> None:
        # Waits while too many parts are being sent. A copy: obstore keeps the memory until the part
        # is sent, and the caller uses it again.
        call = self._call("write", bytes(part))
        self._store._wait(call, self._key, self._progress)  # noqa: SLF001 (one unit)
        self._size_bytes += part.nbytes

    async def _call(self, name: str, *args: Any) -> None:
        await self._store._attempt(lambda: getattr(self._file, name)(*args))  # noqa: SLF001 (one unit)

    def finish(self) -> None:
        parts = self._size_bytes // self._part_bytes
        self._store.requests += parts + 3 if parts else 1
        try:
            self._store._wait(self._call("close"), self._key, self._progress)  # noqa: SLF001 (one unit)
        except PermissionError:
            raise
        except OSError:
            # The answer may have been lost. An upload appears as a whole, or not at all.
            if not self._is_there():
                raise
        self.close()

    def _is_there(self) -> bool:
        try:
            return self._store.size(self._key, self._progress) == self._size_bytes
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._file = None


def _waits_s(end: float) -> Iterator[float]:
    """Yield the waits between repetitions of one request, until a time of the monotonic clock."""
    longest_s = _FIRST_WAIT_S
    while time.monotonic() + (wait_s := longest_s * random.uniform(0.5, 1.0)) < end:  # noqa: S311 (no secret)
        yield wait_s
        longest_s = min(2 * longest_s, _LONGEST_WAIT_S)


def _sleep(seconds: float, progress: Progress) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        progress.check()
        time.sleep(min(left, _CHECK_S))


def _text(error: Exception) -> str:
    """Return the first line of an error of obstore with the cause, which is in the lines below."""
    text = str(error)
    line = text.partition("\n")[0].partition("<?xml")[0].strip()
    if reason := _REASON.search(text):
        return f"{line} {reason[1]}: {reason[2]}"
    cause = _CAUSE.search(text)
    return f"{line} ({cause[1]})" if cause else line


def _version(of: Mapping[str, Any]) -> Version:
    return {key: of[key] for key in ("e_tag", "version") if of.get(key) is not None}


def _stored(row: Mapping[str, Any]) -> StoredObject:
    return StoredObject(row["path"], row["size"], row["last_modified"])


def _import_obstore(root: str) -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError as error:
        msg = f"{root} needs obstore, which is not installed: pip install obstore s3fs"
        raise UnsupportedError(msg) from error


@cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the loop in which this process waits for requests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="elastic-zero requests", daemon=True)
    thread.start()

    def end() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CHECK_S)
        # obstore's threads drop the objects of the last request a moment after its result is
        # there. If the interpreter ends first, the process aborts.
        time.sleep(_LAST_DROP_S)

    _ends[pid] = end
    return loop


_ends: dict[int, Callable[[], None]] = {}
"""What ends the loop of a process, by its id, since forked processes inherit exit hooks."""


@atexit.register
def _end_loop() -> None:
    """End the loop of this process, if it has one.

    Exit hooks run in reverse order, and the one that waits for a save in flight needs the loop. So
    this one is registered when the module is imported, before any save.
    """
    if (end := _ends.get(os.getpid())) is not None:
        end()


def _handle(root: str, request_s: float, retry_s: float) -> Any:
    """Return obstore's object for a bucket, with the longest times of a request.

    Raises UnsupportedError if the bucket's name or the environment is not valid.
    """
    stores = importlib.import_module("obstore.store")
    if root.startswith("memory://"):
        return stores.MemoryStore()
    options: dict[str, Any] = {
        "client_options": {"timeout": timedelta(seconds=request_s)},
        # By time, not by number: a request that has failed has been repeated for RETRY_S.
        "retry_config": {
            "max_retries": 1000 if retry_s else 0,
            "retry_timeout": timedelta(seconds=retry_s),
            "backoff": {"max_backoff": timedelta(seconds=_LONGEST_WAIT_S)},
        },
    }
    names = _ENDPOINTS.get(root.partition(":")[0], ())
    endpoints = {name: value for name in names if (value := os.environ.get(name))}
    for name, value in endpoints.items():
        if not value.startswith(("https://", "http://")):
            msg = f"{name}={value}: expected a URL that begins with https:// or http://"
            raise UnsupportedError(msg)
    endpoint = next(iter(endpoints.values()), "")
    options["client_options"]["allow_http"] = endpoint.startswith("http://")
    errors = importlib.import_module("obstore.exceptions")
    try:
        return stores.from_url(root, **options)
    except (errors.BaseError, ValueError) as error:
        msg = (
            f"{root} cannot be opened: {_text(error)}. Check the name of the bucket, and the "
            "store's variables in the environment: account or credentials, endpoint and region"
        )
        raise UnsupportedError(msg) from error
