"""Runs that save, overwrite and load while one request fails, and the checks after each."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning_elastic_zero.errors import ElasticZeroError
from tests.storage._store_ranks import (
    NEW,
    OLD,
    Outcome,
    Settings,
    load_state,
    prepare,
    save_in_background,
    save_state,
)
from tests.support.engines import EngineCase
from tests.support.fault_proxy import Fault, FaultProxy, Request
from tests.support.ranks import Pools, World
from tests.support.state_digests import read_digests
from tests.support.store_servers import s3_environment
from tests.support.tables import STORE_FAULTS

SAVE, OVERWRITE, BACKGROUND, LOAD = "save", "overwrite", "background overwrite", "load"
PHASES = (SAVE, OVERWRITE, BACKGROUND, LOAD)

FOREIGN = {
    "run/notes.txt": b"a file of a user",
    "run/other.ckpt/data.bin": b"a folder of other software",
    "run/.zero-owner-of-nobody.txt": b"a name that only resembles one of this library",
    "run2/state.ckpt/manifest.json": b"{}",
}
"""Objects that this library must neither change nor remove."""

Digests = dict[str, str]


@dataclass
class StoreRuns:
    """One name in a bucket, and the world that saves to it."""

    pools: Pools
    proxy: FaultProxy
    bucket: str
    setup: EngineCase
    client: Any
    """A boto3 client without the proxy."""
    wrong: list[str] = field(default_factory=list)
    states: dict[int, Digests] = field(default_factory=dict)
    """Digests of each state, from undisturbed saves to a disk."""

    @property
    def url(self) -> str:
        """The checkpoint."""
        return f"s3://{self.bucket}/run/state.ckpt"

    @property
    def settings(self) -> Settings:
        """The settings of the ranks."""
        return Settings(s3_environment(self.proxy.url), self.setup)

    def begin(self, folder: str) -> None:
        """Take the expected digests from saves to a disk, and add objects of other owners."""
        for state in (OLD, NEW):
            path = f"{folder}/{state}.ckpt"
            self._succeed(partial(save_state, self.settings, path, state))
            self.states[state] = read_state(path)
        for key, data in FOREIGN.items():
            self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    # -- one run -----------------------------------------------------------------------------

    def set_up(self, phase: str) -> int:
        """Bring the name into the initial state of a phase; return the state to save."""
        self.proxy.reset()
        if phase == SAVE:
            self.delete_all()
            return NEW
        if self.published() is None:
            self._succeed(partial(save_state, self.settings, self.url, OLD))
        return OLD if self.published() == NEW else NEW

    def requests_of(self, phase: str) -> list[Request]:
        """Return the requests of an undisturbed run."""
        state = self.set_up(phase)
        self.proxy.reset()
        self._succeed(self.call(phase, state))
        return self.proxy.requests

    def call(self, phase: str, state: int) -> Callable[[], Outcome]:
        """Return the call that the ranks make."""
        if phase == LOAD:
            return partial(load_state, self.settings, self.url)
        save = save_in_background if phase == BACKGROUND else save_state
        return partial(save, self.settings, self.url, state)

    def fail(self, phase: str, fault: Fault, row: str = "", *, must_raise: bool = False) -> None:
        """Run a phase with a fault, and check the objects."""
        state = self.set_up(phase)
        before = self.published() if phase != SAVE else None
        self.proxy.reset(fault)
        outcomes = self.pools.run(self.setup.world, self.call(phase, state))
        injected = self.proxy.injected
        self.proxy.reset()
        if not injected:
            return
        errors = {outcome.error for outcome in outcomes}
        what = f"{phase} with {fault.kind} at {injected[0]}"
        row = row or fault.kind
        STORE_FAULTS.count(row, "tried")
        raised = any(errors)
        STORE_FAULTS.count(row, "raised" if raised else "succeeded")
        if must_raise and not raised:
            self._note(row, "silent errors", f"{what}: nothing was raised")
        if raised and not all(errors):
            self._note(row, "silent errors", f"{what}: only some ranks raised: {errors}")
        if phase == LOAD:
            self._check_load(row, what, outcomes[0], before, raised=raised)
        else:
            self._check_save(row, what, state, before, raised=raised, errors=errors)
        self._check_foreign(row, what)

    def kill(self, phase: str, fault: Fault) -> bool:
        """Kill all ranks at a request, check the objects, and save again.

        Returns:
            Whether the request was reached.
        """
        state = self.set_up(phase)
        before = self.published() if phase != SAVE else None
        states = (0, OLD, NEW) if phase == LOAD else (state,)
        world = self.pools.start(self.setup.world)
        try:
            for connection in world.ranks:
                connection.send(partial(prepare, self.settings, states))
            assert len(world.results(600)) == self.setup.world
            self.proxy.on_kill = partial(_kill, world)
            self.proxy.reset(fault)
            for connection in world.ranks:
                connection.send(self.call(phase, state))
            world.results(600)
        finally:
            self.proxy.on_kill = None
            _kill(world)
            world.end()
        injected = self.proxy.injected
        self.proxy.reset()
        if not injected:
            return False
        what = f"{phase} with {fault.kind} at {injected[0]}"
        STORE_FAULTS.count(fault.kind, "tried")
        STORE_FAULTS.count(fault.kind, "raised")
        # A killed load must have changed nothing.
        wanted = before if phase == LOAD else state
        self._check_save(fault.kind, what, wanted, before, raised=True, errors={"killed"})
        after = replace(self.settings, leftovers_age_s=-1.0)
        error = self._run(partial(save_state, after, self.url, OLD))
        if error or self.published() != OLD:
            self._note(fault.kind, "not saved again", f"{what}: the next save: {error}")
        if remaining := self.leftovers():
            self._note(fault.kind, "leftovers", f"{what}: left: {remaining}")
        self._check_foreign(fault.kind, what)
        return True

    def _run(self, call: Callable[[], Outcome]) -> str:
        """Run a call on all ranks; return the error of rank 0."""
        return self.pools.run(self.setup.world, call)[0].error

    def _succeed(self, call: Callable[[], Outcome]) -> None:
        error = self._run(call)
        assert not error, error

    # -- checks ------------------------------------------------------------------------------

    def published(self) -> int | None:
        """Return the state of the whole checkpoint at the name; None: there is none."""
        keys = self.keys()
        if f"{self.url.removeprefix(f's3://{self.bucket}/')}/manifest.json" not in keys:
            return None
        found = read_state(self.url)
        for state, wanted in self.states.items():
            if found == wanted:
                return state
        msg = f"{self.url} is none of the states"
        raise AssertionError(msg)

    def keys(self) -> list[str]:
        """Return all objects of the bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def leftovers(self) -> list[str]:
        """Return the objects that belong neither to the checkpoint nor to others."""
        from lightning_elastic_zero.storage.paths import StorePath, parse_path
        from lightning_elastic_zero.storage.store_checkpoints import read_commit

        path = parse_path(self.url)
        assert isinstance(path, StorePath)
        commit = read_commit(path)
        save_id = commit.save_id if commit else "none"
        ours = (f"{path.key}/manifest.json", f"{path.key}/{save_id}/")
        return [key for key in self.keys() if key not in FOREIGN and not key.startswith(ours)]

    def delete_all(self) -> None:
        """Delete all objects except those of others, after late requests were executed."""
        with self.proxy.late:
            pass
        keys = [{"Key": key} for key in self.keys() if key not in FOREIGN]
        if keys:
            self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": keys})

    def _check_save(
        self,
        row: str,
        what: str,
        new: int | None,
        old: int | None,
        *,
        raised: bool,
        errors: set[str],
    ) -> None:
        try:
            found = self.published()
        except (ElasticZeroError, AssertionError) as error:
            self._note(row, "lost checkpoints", f"{what}: {error}; raised: {errors}")
            self.delete_all()
            return
        if found == new:
            STORE_FAULTS.count(row, "new one published")
        elif found == old:
            STORE_FAULTS.count(row, "old one kept")
        if found not in {new, old} or (found is None and old is not None):
            self._note(row, "lost checkpoints", f"{what}: state {found} after {old}, new {new}")
        if not raised and found != new:
            self._note(row, "silent errors", f"{what}: succeeded, but published is {found}")

    def _check_load(
        self, row: str, what: str, outcome: Outcome, state: int | None, *, raised: bool
    ) -> None:
        wanted = "unchanged" if raised else f"state {state}"
        if outcome.held != wanted:
            self._note(row, "silent errors", f"{what}: {outcome}, expected {wanted}")

    def _check_foreign(self, row: str, what: str) -> None:
        for key, data in FOREIGN.items():
            with suppress(self.client.exceptions.NoSuchKey):
                if self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read() == data:
                    continue
            self._note(row, "objects of others", f"{what}: {key} was changed or removed")
            self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def _note(self, row: str, column: str, text: str) -> None:
        STORE_FAULTS.count(row, column)
        print(f"{column}: {text}")
        self.wrong.append(f"{column}: {text}")


def read_state(path: str) -> Digests:
    """Return the digests of a checkpoint, without those that differ between equal saves.

    Raises:
        ElasticZeroError: the checkpoint is refused.
    """
    from lightning_elastic_zero.storage.paths import parse_path

    found = read_digests(parse_path(path))
    del found["manifest"]
    return found


@contextmanager
def store_environment(variables: Any) -> Iterator[None]:
    """Set variables of this process."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kill(world: World) -> None:
    for pid in world.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
