"""Divide work among jobs that share a folder, by files that one of them locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from linearize.base import UserError


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Within, whether this job alone has claimed the file `path`; false where another has, which is still alive.

    The file system drops the lock of a job that ends, however that ends, and of a machine that is lost.

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
