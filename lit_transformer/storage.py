"""Optuna's database storage for work that takes days: a database that goes away is waited for."""

from __future__ import annotations

import errno
import functools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy.exc import DBAPIError, PendingRollbackError, SQLAlchemyError

from lit_transformer.progress import say

PATIENCE_SECONDS = 900
CONTACT_SECONDS = 1  # at first contact, when the address may be wrong


def is_address(url: str) -> bool:
    """Whether it can be read as one: its port may be no number."""
    try:
        sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return False
    return True


def without_password(url: str) -> str:
    """An address fit for a log."""
    if is_address(url):
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    return re.sub(r"(//[^:/@]*:).*@", r"\1***@", url)


class PatientStorage(RDBStorage):
    """Optuna's database storage that waits for a database which is away, instead of failing the study.

    Args:
        stopping: set when the user wants to end; no more waiting then.

    Raises:
        ValueError: the database was away for too long, or there is none at the address.
        OSError: an SQLite file on a full disk.
    """

    def __init__(self, url: str, stopping: threading.Event, **options: Any) -> None:
        self.stopping = stopping
        since: float | None = None  # the first failure; before it, eight processes may have waited for each other
        while True:
            try:
                super().__init__(url, **options)
                return
            except (ImportError, SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
                # Not by kind: a connection that breaks while it is made looks like a refused one, or like none at all,
                # and who reads the study from elsewhere may make its tables just now.
                since = since or time.monotonic()
                patience = 60 if _was_connected(error) else 0 if isinstance(error, ImportError) else CONTACT_SECONDS
                if time.monotonic() - since >= patience:
                    reason = " ".join(str(getattr(error, "orig", error)).split())
                    raise ValueError(
                        f"--storage {without_password(url)} cannot be used: {reason}; start it, or correct the address"
                    ) from error
            time.sleep(0.2)

    def patiently(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        since, wait = time.monotonic(), 0.5
        while True:
            try:
                return method(*args, **options)
            except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
                reason = _what_the_database_says(error)
                if reason is None:
                    raise
                if "disk is full" in reason:
                    raise OSError(errno.ENOSPC, f"the study's database cannot be written: {reason}") from error
                waited = time.monotonic() - since
                if self.stopping.is_set() or waited > PATIENCE_SECONDS:
                    raise ValueError(f"the study's database is away: {reason}; the same command goes on") from error
                if wait == 0.5:
                    say(f"the study's database is away, waiting for it; trials go on meanwhile ({reason})")
            self.stopping.wait(wait)
            wait = min(2 * wait, 8.0)


def _patient(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: PatientStorage, *args: Any, **options: Any) -> Any:
        return self.patiently(functools.partial(method, self), *args, **options)

    return call


# The last ones are what Optuna's cache in front of a database calls.
_MORE = ("_get_trials", "_create_new_trial", "_set_trial_param", "record_heartbeat", "_get_stale_trial_ids")
for _name in (*sorted(BaseStorage.__abstractmethods__), *_MORE):
    setattr(PatientStorage, _name, _patient(getattr(RDBStorage, _name)))


def _cause(error: BaseException | None) -> DBAPIError | PendingRollbackError | None:
    """What stands behind Optuna's own error."""
    while error is not None and not isinstance(error, DBAPIError | PendingRollbackError):
        error = error.__cause__
    return error


def _was_connected(error: BaseException) -> bool:
    cause = _cause(error)
    if cause is None or isinstance(cause, PendingRollbackError):
        return cause is not None
    # The last: PostgreSQL's "operator intervention", where SQLAlchemy was not done with connecting.
    return cause.connection_invalidated or (getattr(cause.orig, "sqlstate", None) or "").startswith("57P")


def _what_the_database_says(error: BaseException) -> str | None:
    """Its words where waiting may help or the disk is full; None where the fault is another one."""
    cause = _cause(error)
    if cause is None:
        return None
    if isinstance(cause, PendingRollbackError):
        return "a connection broke in the middle of a transaction"
    words = " ".join(str(cause.orig).split())
    # Lost connections of a server; SQLite has none, but writers that wait for each other beyond its time-out.
    lost = isinstance(cause, sqlalchemy.exc.OperationalError | sqlalchemy.exc.InterfaceError)
    sqlite = type(cause.orig).__module__.startswith("sqlite3")
    helps = "locked" in words or "disk is full" in words if sqlite else lost or cause.connection_invalidated
    return words if helps else None
