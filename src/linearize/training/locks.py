"""Divide work among jobs that share a folder, by locked files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from linearize.base import UserError


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Lock the file `path` in the `with` block; yield whether that succeeded, False if a running job has the lock.

    The file system drops the lock when a job ends in any way, or its machine is lost.

    Raises:
        UserError: a file system without locks.
    """
    lock = FileLock(path, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except (NotImplementedError, OSError) as error:
        raise UserError(
            f"{path}: expected a file that can be written and locked, with which jobs share the blocks; found: "
            f"{getattr(error, 'strerror', None) or error}; use another output folder"
        ) from None
    try:
        yield True
    finally:
        lock.release()
