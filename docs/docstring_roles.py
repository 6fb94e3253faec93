"""Docstrings as Markdown: references (``:class:`Name```) become code, and ``a, b: text`` an entry for each name."""

import re

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`~?([^`]+)`")
DOUBLE = re.compile(r"``([^`]+)``")
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", flags=re.MULTILINE)


class DocstringRoles(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda found: f"`{found[1].rsplit('.', 1)[-1]}`", obj.docstring.value)
            text = SEVERAL.sub(_one_by_one, text)
            obj.docstring.value = DOUBLE.sub(r"`\1`", text)


def _one_by_one(found: re.Match[str]) -> str:
    indent, names, text = found.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))
