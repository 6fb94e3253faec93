"""The command line's parser: jsonargparse's, with hints at what was meant."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

import jsonargparse
from jsonargparse import Namespace

from avalanche_amnesia import __version__
from avalanche_amnesia.lab.study import settings

Handler = Callable[[Namespace], int]


class Parser(jsonargparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line, with the nearest name that exists."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what was wrong, and end the program with status 2."""
        text = str(message)
        for pattern, words in _REWORDED:
            text = re.sub(pattern, words, text)
        if _MISSING in text:
            text = re.sub(r"(\w+)\.(\w+)", self._as_given, text)
        sys.stderr.write(f"amnesia: {text}{_hint(text, self._names())}\n")
        raise SystemExit(2)

    def _as_given(self, found: re.Match[str]) -> str:
        """``unlearn.record`` as it is given: ``--record``; what has no name there, as it is called: ``state``."""
        command, name = found.groups()
        for action in self._actions:
            parser = action.choices.get(command) if isinstance(action.choices, dict) else None
            if isinstance(parser, Parser):
                option = f"--{name.replace('_', '-')}"
                return option if option.lstrip("-") in parser._names() else name
        return found[0]

    def _names(self) -> set[str]:
        """Commands and options that exist here."""
        names: set[str] = set()
        for action in self._actions:
            names |= {option.lstrip("-") for option in action.option_strings} | set(action.choices or ())
        return names


class Commands:
    """The program's commands."""

    def __init__(self) -> None:
        jsonargparse.set_parsing_settings(add_print_completion_argument=True)
        self.parser = Parser(
            prog="amnesia",
            description="Continual learning that can forget on request.",
            version=__version__,
            allow_abbrev=False,
        )
        self._commands = self.parser.add_subcommands(dest="command", required=True)
        self._handlers: dict[str, Handler] = {}

    def add(self, name: str, handler: Handler, help: str) -> Parser:
        """A parser for a new command."""
        parser = Parser(description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
        self._commands.add_subcommand(name, parser, help=help)
        self._handlers[name] = handler
        return parser

    def parse(self, words: Iterable[str] | None) -> tuple[Handler, Namespace]:
        """Handler of a command, and the command's options with their dataclasses made."""
        options = self.parser.instantiate(self.parser.parse_args(None if words is None else list(words)))
        return self._handlers[options.command], options[options.command]


_MISSING = "arguments are required"  # listed with the command in front of each
_REWORDED = (
    (r"\s*\n\s*", " "),
    ("Parser key", "option"),
    (r"Subcommand '\w+' does not accept option", "unknown option"),
    (r"<class '(\w+)'>", r"\1"),
    (r"typing\.", ""),
)
"""Patterns of jsonargparse's messages, and what is said in their place."""

_GIVEN = r"--([\w.-]+)|(?<=value: )(\S+)|(?<=choice: )'([^']+)'|(?:[Oo]ption|method|scenario) '([^']+)'"
"""Words of a message that the user gave."""


def _hint(message: str, names: set[str]) -> str:
    """``; did you mean …?`` where a word of a message nearly is a name that exists."""
    if "did you mean" in message or _MISSING in message:  # what is missing was not misspelt
        return ""
    known = names | {part for name in names for part in name.split(".")} | _vocabulary()
    for word in re.findall(_GIVEN, message):
        given = next(part for part in word if part)
        for candidate in (given, given.rpartition(".")[2]):
            near = difflib.get_close_matches(candidate, known - {candidate}, 1, 0.7)
            if candidate not in known and near:
                return f"; did you mean {near[0]!r}?"
    return ""


def _vocabulary() -> set[str]:
    """Names of settings, and the values that they may have."""
    words: set[str] = set()
    for name, kind in get_type_hints(settings.Experiment).items():
        words |= {f"{name}.{field.name}" for field in fields(kind)} if is_dataclass(kind) else set()
    for kind in filter(is_dataclass, vars(settings).values()):
        words |= {field.name for field in fields(kind)}
        for hint in get_type_hints(kind).values():
            words |= {str(value) for value in get_args(hint)} if get_origin(hint) is Literal else set()
    return words
