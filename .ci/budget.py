"""Measure the size and the English of the repository, and fail if a figure exceeds its budget.

    python .ci/budget.py [--measure]

Budgets are in ``[tool.amnesia.budget]`` of ``pyproject.toml``. A change that adds to a figure must remove as much
elsewhere. Odd phrases are counted by ten patterns of prose that is hard to read, per 10,000 words.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "avalanche_amnesia"
WINGS = ("contrib", "lab")
ODD_PHRASES = (
    r"\bwhat (?:is|was|are|were|has|had|it|its|they|a|an|the|this|that|these|those|he|she|no|each|every|one|goes|came"
    r"|comes|remains|later|earlier|others|belongs|follows|still|can|may|must|others?|tasks?|would|such|users?|stays?"
    r"|keeps?|holds?|reads?|makes?|learns?)\b",
    r"\b(?:of|in|from|to|by|for|with|through|on|beside|without|behind) (?:which|whose|whom)\b",
    r"\b(?:beside|behind)\b",
    r"\b(?:may go|can go|that go|which go|goes with|go with|is gone|are gone|gone)\b",
    r"\b(?:others|another's|other's|others'|somebody|anybody|nobody)\b",
    r"\b(?:tell whether|told|said|is said|was said|says? so|tells?)\b",
    r"\bthat (?:is|was|are|were) [a-z]+(?:ed|en|t)\b",
    r"\bas (?:it|they) (?:is|was|are|were)\b",
    r"\b(?:has|have|had) to\b",
    r"\b(?:anew|alike|thereby|wherever|whatever|whichever|apart)\b",
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def code_lines(text: str) -> int:
    """Count the lines that hold code: no docstrings, comments or blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    held = {line for t in tokens_of(text) if t.type not in NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    return len(held - docstrings)


def prose_of(path: Path) -> str:
    """Return the docstrings and comments of a Python file, or the text of a page without its code."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    documented = (node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED))
    comments = [token.string[1:] for token in tokens_of(text) if token.type == tokenize.COMMENT]
    return "\n".join([*(ast.get_docstring(node) or "" for node in documented), *comments])


def odd_phrases(files: list[Path]) -> float:
    """Return the number of odd phrases per 10,000 words."""
    text = "\n".join(map(prose_of, files))
    found = sum(len(re.findall(pattern, text, flags=re.IGNORECASE)) for pattern in ODD_PHRASES)
    return 1e4 * found / max(1, len(re.findall(r"\w+", text)))


def import_seconds() -> float:
    """Return the seconds of CPU that ``import avalanche_amnesia`` takes in a new process, the least of three."""
    code = "import time; begun = time.process_time(); import avalanche_amnesia; print(time.process_time() - begun)"
    runs = (subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3))
    return min(float(run.stdout) for run in runs)


def measured() -> dict[str, float]:
    """Return every figure by its name in the budget."""
    wings: dict[str, list[Path]] = {"core": [], "contrib": [], "lab": []}
    for file in sorted(PACKAGE.rglob("*.py")):
        first = file.relative_to(PACKAGE).parts[0]
        wings[first if first in WINGS else "core"].append(file)
    figures: dict[str, float] = {}
    every = [file for files in wings.values() for file in files]
    for name, files in (*wings.items(), ("package", every)):
        texts = [file.read_text() for file in files]
        figures[f"{name}_lines"] = sum(text.count("\n") for text in texts)
        figures[f"{name}_code"] = sum(map(code_lines, texts))
    figures["tests_lines"] = sum(file.read_text().count("\n") for file in (ROOT / "tests").rglob("*.py"))
    stubs = PACKAGE.rglob("__init__.pyi")
    figures["public_names"] = sum(len(re.findall(r" as \w+$", file.read_text(), flags=re.MULTILINE)) for file in stubs)
    pages = sorted((ROOT / "docs").glob("*.md"))
    figures["docs_pages"] = len(pages)
    figures["docs_words"] = sum(len(page.read_text().split()) for page in pages)
    figures["package_odd_phrases"] = round(odd_phrases(every), 1)
    figures["docs_odd_phrases"] = round(odd_phrases(pages), 1)
    figures["readme_odd_phrases"] = round(odd_phrases([ROOT / "README.md"]), 1)
    figures["import_seconds"] = round(import_seconds(), 2)
    return figures


def main() -> int:
    """Print every figure beside its budget; return 1 if one exceeds it."""
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["amnesia"]["budget"]
    figures = measured()
    if unknown := figures.keys() ^ budget.keys():
        raise SystemExit(
            f"pyproject.toml must have a budget of each measured figure and of no other: {sorted(unknown)}"
        )
    exceeded = [name for name, value in figures.items() if value > budget[name]]
    for name, value in figures.items():
        if "--measure" in sys.argv or name in exceeded:
            print(f"{name:22}{value:>9,} of {budget[name]:,}{'  EXCEEDED' if name in exceeded else ''}")
    if exceeded:
        print("a budget is exceeded: remove code or prose elsewhere, see [tool.amnesia.budget] in pyproject.toml")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
