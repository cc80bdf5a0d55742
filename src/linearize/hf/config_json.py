"""Turn a ``config.json`` into transformers' config, which adds defaults, and name the field that causes an error."""

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
    """Return the config of a softmax model with these contents; invalid ones raise nearly any kind of error."""
    return CONFIG_MAPPING[contents["model_type"]].from_dict(copy.deepcopy(contents))  # it writes into nested fields


def positive(name: str, value: Any) -> int:
    """Return `value`, the size in the field `name`; raise UserError if it is no positive integer."""
    if not isinstance(value, int) or value <= 0:
        raise UserError(f"config.json: {name}: expected a positive integer, found {value!r}")
    return value


def blaming_fields(contents: dict[str, Any], make: Callable[[dict[str, Any]], T]) -> T:
    """Call `make` on the contents of a ``config.json``, without transformers' warnings, which loading repeats.

    Raises:
        UserError: transformers raises an error. The message names the first field without which it does not.
    """
    with _without_warnings():
        try:
            return make(contents)
        except UserError:
            raise
        except Exception as error:  # configs and models raise nearly every kind, and seldom name the field
            reason = str(error.__cause__ or error).strip().split("\n")[0]
        for name, value in contents.items():
            try:
                with suppress(UserError):  # our own checks come after those of transformers
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
