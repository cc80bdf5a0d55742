"""From a ``config.json`` to transformers' config, which fills in what the file leaves out; and the field at fault."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging

from linearize.base import UserError

T = TypeVar("T")


def read_contents(contents: dict[str, Any]) -> PreTrainedConfig:
    """The config of a softmax model with these contents; where they make no sense, an error of nearly any kind."""
    return CONFIG_MAPPING[contents["model_type"]].from_dict(copy.deepcopy(contents))  # it writes into nested fields


def positive(name: str, value: Any) -> int:
    """A size.

    Raises:
        UserError: `value` is no positive integer.
    """
    if not isinstance(value, int) or value <= 0:
        raise UserError(f"config.json: {name}: expected a positive integer, found {value!r}")
    return value


def blaming_fields(contents: dict[str, Any], make: Callable[[dict[str, Any]], T]) -> T:
    """Call `make` on the contents of a ``config.json``, without transformers' warnings: loading repeats them.

    Raises:
        UserError: transformers raises something. The field at fault is the first one without which it does not.
    """
    with _without_warnings():
        try:
            return make(contents)
        except UserError:
            raise
        except Exception as error:  # configs and models raise nearly every kind, and seldom say what it is about
            reason = str(error.__cause__ or error).strip().split("\n")[0]
        for name, value in contents.items():
            try:
                with suppress(UserError):  # ours, of what transformers lets pass
                    make({other: x for other, x in contents.items() if other != name})
            except Exception:
                continue
            raise UserError(
                f"config.json: {name}: expected a value that transformers accepts, found {value!r}: {reason}"
            )
    raise UserError(f"config.json: expected fields that transformers accepts, found others: {reason}")


@contextmanager
def _without_warnings() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
