"""What the site has beside the pages in this folder: results and scripts of ``experiments/``, and an API page per room.

MkDocs calls :func:`on_files` and :func:`on_page_markdown`; both leave the pages as they are read in the repository.
"""

import ast
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGE = "avalanche_amnesia"
SHOWN = {".md", ".png", ".csv", ".py", ".yaml"}
SHOWN_FOLDERS = ("experiments", "benchmarks", "results")


def rooms() -> dict[str, list[str]]:
    """Room → full names of what it makes public, as its ``__init__.pyi`` lists them."""
    found = {}
    stubs = [
        s for folder in ("*", "contrib/*", "lab/*") for s in sorted((ROOT / PACKAGE).glob(f"{folder}/__init__.pyi"))
    ]
    for stub in stubs:
        room = ".".join(stub.parent.relative_to(ROOT / PACKAGE).parts)
        imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
        places = [(node.module, name.name) for node in imports for name in node.names]
        found[room] = [".".join(filter(None, [PACKAGE, room, module, name])) for module, name in places]
    return found


def api_page(room: str, names: list[str]) -> str:
    """The page of a room, for mkdocstrings to fill."""
    title = f"# `{PACKAGE}.{room}`\n\nEverything on this page is imported by `from {PACKAGE}.{room} import …`.\n"
    return "\n".join([title, *(f"::: {name}\n" for name in sorted(names, key=lambda name: name.rsplit(".", 1)[1]))])


def on_config(config: MkDocsConfig, **kwargs: Any) -> MkDocsConfig:
    """Put a page per room into the navigation."""
    for section in config.nav or []:
        if isinstance(section, dict) and "API" in section:
            section["API"] = [{room: f"api/{room}.md"} for room in rooms()]
    return config


def on_files(files: Files, config: MkDocsConfig, **kwargs: Any) -> Files:
    """Add results, scripts and API pages."""
    for folder in SHOWN_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SHOWN and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    for room, names in rooms().items():
        files.append(File.generated(config, f"api/{room}.md", content=api_page(room, names)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Point links that leave this folder at their copies within the site."""
    for folder in SHOWN_FOLDERS:
        markdown = markdown.replace(f"](../{folder}/", f"]({folder}/")
    return markdown
