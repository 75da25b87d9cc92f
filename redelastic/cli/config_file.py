"""The file of ``redelastic run --config``: its options as TOML, read into the parser and printed from its result."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from redelastic.redis.endpoint import parse_endpoint
from redelastic.workers.logs import redacted, redacted_words

from . import common

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCRIPT: Final = "training_script"
ARGUMENTS: Final = "training_script_args"
REPEATED: Final = ("health_check", "preflight_path")  # by flags, which outweigh the file's list
LISTS: Final = (*REPEATED, "duplicate_stdout_filters", "duplicate_stderr_filters", ARGUMENTS)  # of texts
_NOT_IN_FILES: Final = ("help", "config", "print_config", "print_completion", argparse.SUPPRESS)  # one is newer torch's
_WITHOUT_EFFECT: Final = ("master_addr", "master_port", "node_rank")
# What a value may be, in words and as an example, by the type that it has to have.
_KINDS: Final = {
    bool: ("true or false", "true"),
    int: ("a whole number", "3"),
    float: ("a number", "1.5"),
    str: ("a text", '"…"'),
    list: ("a list of texts", '["…"]'),
}
_NAMES_IN_TOML: Final = {bool: "a boolean", int: "a whole number", float: "a number", str: "a text", list: "a list"}


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, with the file that it names: flags outweigh variables PET_…, and these the file.

    Raises:
        ValueError: the file cannot be read, or an option in it is unknown or has a wrong value.
    """
    script = next(action for action in parser._actions if action.dest == SCRIPT)  # noqa: SLF001  # no other access
    script.nargs, script.required = "?", False  # the file may name it
    arguments = parser.parse_args(argv)
    given = _read(arguments.config, parser) if arguments.config else {}
    if given:
        names_script = arguments.training_script is not None  # then its arguments are not those of the file's script
        own = {name: given.pop(name, None) for name in (SCRIPT, ARGUMENTS, *REPEATED)}
        parser.set_defaults(**given)
        arguments = parser.parse_args(argv)
        for name in REPEATED:
            if own[name] and not getattr(arguments, name):
                setattr(arguments, name, own[name])
        if not names_script:
            arguments.training_script, arguments.training_script_args = own[SCRIPT], own[ARGUMENTS] or []
    if arguments.training_script is None and not arguments.print_config:
        parser.error(f"the following arguments are required: {SCRIPT}")
    return arguments


def to_toml(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """All options that have a value, as a file for ``--config``; a line with a secret is a comment.

    Raises:
        ValueError: the endpoint is invalid.
    """
    return "".join(f"{_line(name, value)}\n" for name, value in _values(parser, arguments))


def _line(name: str, value: Any) -> str:
    if name == "rdzv-endpoint" and re.search("[@?]", value):
        return f"# {name} = {_literal(str(parse_endpoint(value)))}  # its login belongs in REDELASTIC_REDIS_URL"
    shown = _without_secrets(value)
    return f"{name} = {_literal(value)}" if shown == value else f"# {name} = {_literal(shown)}  # it has a secret"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, list):
        return redacted_words(value, os.environ)
    return redacted(value, os.environ) if isinstance(value, str) else value


def _values(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for name, action in _options(parser).items():
        value = getattr(arguments, action.dest)
        if action.dest not in _WITHOUT_EFFECT and value not in (None, "", []) and (name, value) != ("rdzv-id", "none"):
            yield name, value


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options that may be in a file, by their names there: the flags', without their leading dashes."""
    actions = [action for action in parser._actions if action.dest not in _NOT_IN_FILES]  # noqa: SLF001
    actions.sort(key=lambda action: not action.option_strings)  # the script and its arguments come last
    return {action.dest.replace("_", "-"): action for action in actions}


def _read(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The options of a file by their ``dest``, without those that a variable PET_… sets."""
    try:
        found = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise ValueError(f"The file of --config, {path!r}, cannot be read: {e.strerror or e}.") from e
    except ValueError as e:  # no TOML, or not UTF-8
        raise ValueError(f"The file of --config, {path!r}, is not TOML: {e}.") from e
    options, values = _options(parser), dict[str, Any]()
    for key, value in found.items():
        name = key.replace("_", "-")
        if name not in options:
            meant = common.suggestion(name, options)
            raise ValueError(f"{path}: {key} is no option{meant or ':'} see redelastic run --help for their names.")
        action = options[name]
        if action.dest in values:
            raise ValueError(f"{path}: {name} is there twice, once with underscores: remove one.")
        values[action.dest] = _checked(f"{path}: {key}", key, value, action)
    return {dest: value for dest, value in values.items() if f"PET_{dest.upper()}" not in os.environ}


def _checked(where: str, key: str, value: Any, action: argparse.Action) -> Any:
    """A value of a file as the parser would have it of a flag."""
    kind: type = list if action.dest in LISTS else bool if action.nargs == 0 else str
    if action.type in (int, float):
        kind = int if action.type is int else float
    fits = type(value) is kind or (kind in (str, float) and type(value) is int)  # nnodes = 2 is as good as "2"
    if not fits or (kind is list and not all(isinstance(item, str) for item in value)):
        wanted, example = _KINDS[kind]
        found = _NAMES_IN_TOML.get(type(value), "a table" if isinstance(value, Mapping) else "a date or time")
        raise ValueError(f"{where} must be {wanted}, not {found}: write {key} = {example}.")
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{where} is {value!r}: it must be one of {', '.join(map(str, action.choices))}.")
    return value if kind is list else kind(value)


def _literal(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
