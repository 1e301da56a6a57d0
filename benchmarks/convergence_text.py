"""Text for ``studies/convergence_gpu.yaml`` without a download: sources and documentation of the installed packages.

A run of 1,500 steps reads 24.6 million tokens once, some eight times what the default text has. Python's standard
library and nine packages that ``constraints.txt`` pins have that many, so that whoever installed them has the same
text, to the byte; :data:`EXPECTED` is its hash::

    python benchmarks/convergence_text.py text/packages
    moelab run studies/convergence_gpu.yaml

Your own text makes another folder of the same kind, of every ``.txt``, ``.md``, ``.rst`` and ``.py`` file in it::

    python benchmarks/convergence_text.py text/mine --of ~/papers ~/code
    moelab run studies/convergence_gpu.yaml --set dataset=text/mine

Packages repeat themselves and each other: licences, vendored copies, generated code. Documents come in a fixed order,
and a paragraph most of whose lines stood in an earlier one is left out, wherever it stands; so is a document of which
little is left, or whose lines are data. Held-out documents are chosen by their names, and went through the same sieve,
so that no paragraph of theirs is trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moelab.titan import corpus

PACKAGES = ("networkx", "numpy", "pandas", "scipy", "statsmodels", "sympy", "torch", "torchao", "torchtitan")
EXPECTED = "cd5ffd9d8423a20052256af2274f90fe5dabf69b608cecda99f4abeaa3f1dad4"
"""Of Python 3.11.7 with the packages of ``constraints.txt`` on Linux, x86-64."""
VOCAB_SIZE = 8192
PASSAGE_CHARACTERS = 8000
"""About 2,000 tokens, a sequence of the study: attention does not go beyond a passage."""
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
LEAST_CHARACTERS, MOST_CHARACTERS = 500, 500_000
MOST_LINE_CHARACTERS = 100  # on average: longer lines are data or minified
LEAST_LETTERS = 0.5  # of all signs but white space
TELLING_CHARACTERS = 20
"""Lines that are shorter (``return None``) stand everywhere, and do not tell a copy."""


def main() -> None:
    """Make the folder, and say whether it is the study's own text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to make; it must not exist")
    parser.add_argument("--of", type=Path, nargs="+", metavar="FOLDER", help="folders of text; default: the packages")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} exists; remove it, or name another folder")
    documents = _in_folders(options.of) if options.of else [*corpus.documents(), *_in_packages()]
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    corpus.build(options.folder, _sieved(documents), vocab_size=VOCAB_SIZE, passage_characters=PASSAGE_CHARACTERS)
    found = digest(options.folder)
    facts: dict[str, Any] = {"sha256": found, **_sizes(options.folder), "vocab_size": VOCAB_SIZE}
    if not options.of:
        facts["versions"] = {"python": sys.version.split()[0], **{name: version(name) for name in PACKAGES}}
    (options.folder / "text.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))
    if not options.of:
        same = "the text of benchmarks/results/convergence_h200.json" if found == EXPECTED else "another text"
        print(f"{same}, whose hash is {EXPECTED}")


def digest(folder: Path) -> str:
    """A hash of both splits and of the tokenizer, whatever wrote them to disk."""
    digest = hashlib.sha256()
    for split in corpus.SPLITS:
        for text in corpus.load(str(folder / f"{split}.arrow"))["text"]:
            digest.update(text.encode() + b"\0")
        digest.update(b"\1")
    digest.update((folder / "tokenizer.json").read_bytes())
    return digest.hexdigest()


def _sizes(folder: Path) -> dict[str, dict[str, int]]:
    """Passages, characters and tokens of each split; a passage has two more tokens, its beginning and end."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = {}
    for split in corpus.SPLITS:
        texts = list(corpus.load(str(folder / f"{split}.arrow"))["text"])
        batches = (texts[at : at + 1000] for at in range(0, len(texts), 1000))
        tokens = sum(len(one) + 2 for batch in batches for one in tokenizer.encode_batch_fast(batch))
        sizes[split] = {"passages": len(texts), "characters": sum(map(len, texts)), "tokens": tokens}
    return sizes


def _in_packages() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        for file in sorted(files(name) or [], key=str):
            # What pip writes itself, and scripts outside of the package's folder, differ from machine to machine.
            if file.suffix in SUFFIXES and ".dist-info/" not in str(file) and not str(file).startswith(".."):
                yield from _read(f"{name}/{file}", Path(str(file.locate())))


def _in_folders(folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
            yield from _read(str(path.relative_to(folder)), path)


def _read(name: str, path: Path) -> Iterator[tuple[str, str]]:
    if path.is_file() and LEAST_CHARACTERS <= path.stat().st_size <= MOST_CHARACTERS:
        yield name, path.read_text(encoding="utf-8", errors="replace")


def _sieved(documents: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Documents without the paragraphs that stood before, and without data."""
    seen: set[bytes] = set()
    kept = []
    for name, text in documents:
        if not _is_prose_or_code(text):
            continue
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", text):
            lines = [" ".join(line.split()) for line in paragraph.splitlines()]
            telling = {
                hashlib.blake2b(line.encode(), digest_size=8).digest()
                for line in lines
                if len(line) >= TELLING_CHARACTERS
            }
            if 2 * len(telling & seen) <= len(telling):
                paragraphs.append(paragraph)
            seen |= telling
        rest = "\n\n".join(paragraphs)
        if len(rest) >= LEAST_CHARACTERS:
            kept.append((name, rest + "\n"))
    return kept


def _is_prose_or_code(text: str) -> bool:
    signs = len("".join(text.split()))
    letters = sum(map(str.isalpha, text))
    return (
        LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS
        and len(text) <= MOST_LINE_CHARACTERS * (text.count("\n") + 1)
        and letters >= LEAST_LETTERS * signs
    )


if __name__ == "__main__":
    main()
