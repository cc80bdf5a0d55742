"""Write docs/reference/recipe.md from the config classes and docs/reference/cli.md from the command line.

python scripts/write_reference.py
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from linearize.recipe import Recipe
from linearize_cli import app

Sections = dict[tuple[type[BaseModel], ...], list[str]]
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
RECIPE_INTRODUCTION = """# Recipe fields

Written by `python scripts/write_reference.py` from the config classes. A recipe is a YAML file of these fields. A field
that is left out has its default. On the command line, `--set mixer.span.window_size=32` changes one. `linearize recipes
NAME` prints a recipe, and [recipes.md](../recipes.md) explains how the parts work together.

Where a part has a `type`, the type decides which other fields it has. Unknown fields are errors.
"""
CLI_INTRODUCTION = """# Command line

Written by `python scripts/write_reference.py` from the commands' own help. Exit codes are listed in
[files and exit codes](files.md).
"""
BOUNDS = ((annotated_types.Gt, "gt", ">"), (annotated_types.Ge, "ge", ">="), (annotated_types.Lt, "lt", "<"),
          (annotated_types.Le, "le", "<="))  # fmt: skip
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Any: "any"}


def recipe_page() -> str:
    """Return the page of all recipe fields, one section per group of fields."""
    paths = _sections()
    parts = [RECIPE_INTRODUCTION + "\n## Top level", *_table(Recipe, paths)]
    for configs, (path, *others) in paths.items():
        also = f" (also `{'`, `'.join(others)}`)" if others else ""
        parts.append(f"## {path}\n\nFields of `{path}`{also}.\n")
        for config in configs:
            several = "type" in config.model_fields and len(configs) > 1
            about = f"**`type: {config.model_fields['type'].default}`**: " if several else ""
            parts += [about + _sentence(config.__doc__), *_table(config, paths)]
    return "\n".join(parts)


def _sections() -> Sections:
    """Return the groups of fields: the classes that may stand in one place, and the dotted names of these places."""
    waiting: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    found: Sections = {}
    while waiting:
        path, config = waiting.pop(0)
        for name, configs in _groups(config):
            place = f"{path}.{name}" if path else name
            if configs not in found:
                waiting += [(place, part) for part in configs]
            found.setdefault(configs, []).append(place)
    return found


def _groups(config: type[BaseModel]) -> Iterator[tuple[str, tuple[type[BaseModel], ...]]]:
    """Yield the name of each field that holds configs, and the classes that may stand there."""
    for name, field in config.model_fields.items():
        if configs := tuple(dict.fromkeys(_configs(_annotation(field)))):
            yield name, configs


def _annotation(field: FieldInfo) -> Any:
    """Return a field's annotation together with what pydantic keeps apart from it: bounds, and tables of types."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation  # type: ignore


def _configs(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the config classes in an annotation; of a table of types that users may extend, our own."""
    tables = [item.table for item in get_args(annotation)[1:] if hasattr(item, "table")]
    if tables:
        yield from (config for config in tables[0] if config.__module__.startswith("linearize."))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not Literal:
        for argument in get_args(annotation):
            yield from _configs(argument)


def _table(config: type[BaseModel], paths: Sections) -> list[str]:
    fields = {name: field for name, field in config.model_fields.items() if name != "type"}
    if not fields:
        return [""]
    rows = ["", "| field | value | default | description |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        value = _kind(_annotation(field), paths)
        rows.append(f"| `{name}` | {value} | {_default(field)} | {_sentence(field.description)} |".replace("  ", " "))
    return [*rows, ""]


def _kind(annotation: Any, paths: Sections) -> str:
    """Return what a field may hold, in words; a group of fields is a link to its section."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if configs := tuple(dict.fromkeys(_configs(annotation))):
        anchor = paths[configs][0].replace(".", "")
        words = f"[{'fields' if len(configs) == 1 else 'one of several types'}](#{anchor})"
        text = str(annotation)
        return f"{'list of ' if 'tuple[' in text else ''}{words}{' or null' if 'None' in text else ''}"
    if origin is Annotated:
        return " ".join([_kind(arguments[0], paths), *_bounds(arguments[1:])])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        words = [_kind(argument, paths) for argument in arguments if argument is not type(None)]
        return " or ".join(words + (["null"] if type(None) in arguments else []))
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0], paths)}"
    if origin is dict:
        return "mapping"
    return NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(metadata: Any) -> list[str]:
    found = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            found += _bounds(item.metadata)
        elif isinstance(item, annotated_types.Interval):
            found += _bounds(list(item))
        elif isinstance(item, annotated_types.MinLen):
            found.append(f"(at least {item.min_length})")
        for bound, attribute, sign in BOUNDS:
            if isinstance(item, bound):
                limit = getattr(item, attribute)
                found.append(f"{sign} {2}^62" if limit == 2**62 else f"{sign} {limit:g}")
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, BaseModel):
        return f"`type: {value.type}`" if hasattr(value, "type") else "all defaults"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value != "" else "empty"


def _sentence(text: str | None) -> str:
    """Return a description's first paragraph as one line that a table can hold."""
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|").replace("``", "`")


def cli_page() -> str:
    """Return the page of all commands with their arguments and options."""
    parts = [CLI_INTRODUCTION]
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        arguments = [x for x in command.params if x.param_type_name == "argument"]
        options = [x for x in command.params if x.param_type_name == "option" and x.name != "help"]
        usage = " ".join([f"linearize {name}", *(_argument(x) for x in arguments), "[OPTIONS]"])
        parts += [f"## {name}\n", f"    {usage}\n", *_paragraphs(command.help)]
        rows = [f"| `{_argument(x)}` | {_shown(x)} | {_sentence(x.help)} |" for x in arguments]
        rows += [f"| {_names(x)} | {_shown(x)} | {_sentence(x.help)} |" for x in options]
        parts += ["| argument or option | default | description |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(parts)


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[]")
    return name if parameter.required else f"[{name}]"


def _names(parameter: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def _shown(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    if default is None or default is False or default == "" or callable(default) or default == []:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _paragraphs(text: str | None) -> Iterator[str]:
    """Yield a command's help as Markdown; a paragraph after \\b is printed as it is."""
    for paragraph in (text or "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield "\n".join(f"    {line}" for line in paragraph.removeprefix("\b\n").splitlines()) + "\n"
        else:
            yield " ".join(paragraph.split()) + "\n"


PAGES = {"recipe.md": recipe_page, "cli.md": cli_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
