"""Tables of results on pages for readers: README, ``docs/``, REPRODUCIBILITY.

    python -m experiments.shown_tables        # or: make tables

Such a table stands between two comments. The first says which table it is: the first one behind these words of a file,
whose path starts from the repository's root. Until that file is there, what stands between them stays.

    <!-- table: experiments/results/comparison.md, Tasks that remain, at the end -->
    <!-- end of table -->
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "REPRODUCIBILITY.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(r"(<!-- table: ([\w./]+), (.+?) -->\n)(.*?)(<!-- end of table -->)", flags=re.DOTALL)


def first_table(text, words):
    """Lines of the first Markdown table behind some words."""
    if words not in text:
        raise ValueError(f"{words!r} does not stand there")
    found = re.search(r"(?:^\|.*\n?)+", text.split(words, 1)[1], flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"no table behind {words!r}")
    return found[0].strip()


def refreshed(page):
    """The page's text with the tables of results as they are now."""

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
