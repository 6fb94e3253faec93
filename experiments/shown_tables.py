"""Copy tables of results into the pages that show them: README, REPRODUCIBILITY and ``docs/``.

    python -m experiments.shown_tables        # or: make tables

Each table in a page is between two comments. The first comment names a file, relative to the repository's root, and
some words in it; the first table after these words is copied. If the file is missing, the page stays unchanged.

    <!-- table: experiments/results/comparison.md, Tasks that remain, at the end -->
    <!-- end of table -->
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "REPRODUCIBILITY.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(r"(<!-- table: ([\w./]+), (.+?) -->\n)(.*?)(<!-- end of table -->)", flags=re.DOTALL)


def first_table(text, words):
    """Return the first Markdown table after ``words`` in ``text``; raise ValueError if there is none."""
    if words not in text:
        raise ValueError(f"{words!r} does not stand there")
    found = re.search(r"(?:^\|.*\n?)+", text.split(words, 1)[1], flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"no table behind {words!r}")
    return found[0].strip()


def refreshed(page):
    """Return the page's text with the current tables of results."""

    def shown(found):
        begin, name, words, before, end = found.groups()
        file = ROOT / name
        table = f"\n{first_table(file.read_text(), words)}\n\n" if file.is_file() else before
        return f"{begin}{table}{end}"

    return SHOWN.sub(shown, page.read_text())


def main():
    for page in PAGES:
        text = refreshed(page)
        if text != page.read_text():
            page.write_text(text)
            print(f"refreshed {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
