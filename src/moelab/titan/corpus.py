"""Real text without a download: the running Python's own documentation and standard library; or a folder of your own.

Every machine that can run this package has about 12 MB of English and code. It is split into documents; the hash of
its name decides for one file in twenty that it is held out, and a byte-level BPE tokenizer is trained once on the rest.
Files are cut at line ends into passages of about 2,000 characters, the size of a web document in C4, so that a short
run sees hundreds of files instead of three. The cache key covers everything that went into the result: another Python,
vocabulary size or version of ``tokenizers`` gets its own copy, and nobody trains on half-written files.

Of other text :func:`build` makes a folder of the same kind, which ``dataset`` then names; ``benchmarks/
convergence_text.py`` does so with the sources of the installed packages.

The order of the passages is fixed. As when TorchTitan streams C4, a seed only changes the initial weights, so the
spread between seeds is not inflated by easier or harder text at the end of one of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from moelab.errors import MoelabError, Refused
from moelab.model import shape_of

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT_VERSION = 8
VOCAB_SIZE = shape_of("nano").vocab_size
HELD_OUT_ONE_IN = 20
PASSAGE_CHARACTERS = 2000
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})
"""Not part of the standard library, tests, or a second copy of the documentation's topics."""
SPLITS = ("train", "held_out")
BOS, EOS = "<|begin|>", "<|end|>"


class CorpusError(MoelabError):
    """The corpus or its tokenizer could not be made."""


def cache_folder() -> Path:
    """``$MOELAB_CACHE``, or ``moelab`` under the user's cache folder."""
    if chosen := os.environ.get("MOELAB_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moelab"


def sources() -> Iterator[tuple[str, Path]]:
    """Names and paths of the standard library's files, in the same order on every machine with the same Python."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]  # in place: os.walk skips them then
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    for path in sorted(paths):  # os.walk's order is the file system's
        yield path.relative_to(library).as_posix(), path


def documents() -> Iterator[tuple[str, str]]:
    """Name and text of every document: the documentation's topics, then the standard library's files."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name]
    for name, path in sources():
        yield f"stdlib/{name}", path.read_text(encoding="utf-8", errors="replace")


def passages(text: str, characters: int = PASSAGE_CHARACTERS) -> Iterator[str]:
    """Cut a document at line ends into passages of about so many characters; joined, they are the document."""
    lines: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= characters:
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


def split_passages(texts: Iterable[tuple[str, str]], characters: int = PASSAGE_CHARACTERS) -> dict[str, list[str]]:
    """Passages of each split, shuffled, without duplicates.

    Files share passages (tables of character encodings share whole pages), so a passage that is held out anywhere is
    not trained on.
    """
    parts: dict[str, dict[str, None]] = {split: {} for split in SPLITS}  # a set would forget the order
    for name, text in texts:
        parts["held_out" if is_held_out(name) else "train"].update(dict.fromkeys(passages(text, characters)))
    held_out = parts["held_out"]
    split = {"train": [part for part in parts["train"] if part not in held_out], "held_out": [*held_out]}
    for shuffled in split.values():
        random.Random(0).shuffle(shuffled)  # noqa: S311 - an order, not a secret
    return split


def is_held_out(name: str) -> bool:
    """Whether a document is held out for validation, which depends only on its name."""
    # Not hash(), which differs from one process to the next.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def prepare() -> Path:
    """Make the corpus and its tokenizer, or find them in the cache. Many processes may call this at once.

    Returns:
        A folder with ``tokenizer.json``, ``tokenizer_config.json``, and of each split an Arrow stream with the column
        ``text``: ``train.arrow`` and ``held_out.arrow``.

    Raises:
        CorpusError: if the standard library has no sources here, or the cache cannot be written.
    """
    folder = cache_folder() / "corpus" / _key()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # all ranks come here at once; one builds, the others wait
            if not folder.exists():
                texts = list(documents())
                if sum(len(text) for _, text in texts) < 1_000_000:
                    raise CorpusError(
                        "this Python was installed without the sources of its standard library, so there is no text to "
                        "train on; use another Python, or dataset=c4"
                    )
                build(folder, texts)
    except OSError as error:
        raise CorpusError(
            f"the corpus cannot be cached in {folder.parent}: {error.strerror}; free space there or set MOELAB_CACHE"
        ) from error
    return folder


def folder_of(dataset: str, vocab_size: int) -> Path:
    """The folder of an experiment's text: the default corpus's for ``python`` and ``c4``, or one of your own.

    Raises:
        Refused: if it is not a folder that :func:`build` made, or its tokenizer has more tokens than the vocabulary.
        CorpusError: as :func:`prepare`.
    """
    if dataset in ("python", "c4"):
        return prepare()
    folder = Path(dataset).absolute()
    wanted = [*(f"{split}.arrow" for split in SPLITS), "tokenizer.json", "tokenizer_config.json"]
    if lacking := [name for name in wanted if not (folder / name).is_file()]:
        raise Refused(
            f"dataset is {dataset}, and {folder} has no {' or '.join(lacking)}; moelab.titan.corpus.build makes such a "
            "folder, as in benchmarks/convergence_text.py. Otherwise use dataset=python or dataset=c4"
        )
    tokens = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    if tokens > vocab_size:
        raise Refused(
            f"the tokenizer in {folder} has {tokens} tokens, and vocab_size is {vocab_size}; set "
            f"shape.vocab_size={tokens} or more"
        )
    return folder


def register(folder: Path) -> None:
    """Register a prepared corpus with TorchTitan's own loader, as the datasets ``python`` and ``python_held_out``."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    for name, split in zip(("python", "python_held_out"), SPLITS, strict=True):
        path = str(folder / f"{split}.arrow")
        DATASETS[name] = DatasetConfig(path=path, loader=load, sample_processor=itemgetter("text"))


def load(path: str) -> Dataset:
    """A split as a Hugging Face dataset, memory-mapped: no copy, and no cache for which ranks could race."""
    from datasets import Dataset

    return Dataset.from_file(path)


def _key() -> str:
    """A digest of what the corpus is made from; files count by size and time, because reading them takes a second."""
    import tokenizers

    digest = hashlib.sha256(f"{FORMAT_VERSION} {sys.version} {tokenizers.__version__} {VOCAB_SIZE}".encode())
    for _, path in sources():
        facts = path.stat()
        digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def build(
    folder: Path,
    documents: Iterable[tuple[str, str]],
    *,
    vocab_size: int = VOCAB_SIZE,
    passage_characters: int = PASSAGE_CHARACTERS,
) -> None:
    """Make a folder of text to train on: what :func:`prepare` returns, of any documents.

    Args:
        folder: it must not exist; whole or not there at all, whatever ends this process.
        documents: names, which decide what is held out, and texts.
        vocab_size: most entries of the tokenizer that is trained on the text.
        passage_characters: about where documents are cut. Attention does not cross a cut.

    Raises:
        CorpusError: if no document is held out, or none is trained on.

    Example:
        >>> build(Path("text/mine"), [(path.name, path.read_text()) for path in Path("papers").glob("*.txt")])
        ... # doctest: +SKIP
    """
    import pyarrow as pa

    parts = split_passages(documents, passage_characters)
    if not all(parts.values()):
        raise CorpusError(
            f"there are too few documents: by their names one in {HELD_OUT_ONE_IN} is held out, and each part needs one"
        )
    # Beside the result, for only within a file system is a rename atomic.
    work = folder.with_name(f".building-{secrets.token_hex(4)}")
    work.mkdir()
    try:
        for split in SPLITS:
            table = pa.table({"text": parts[split]})
            with pa.OSFile(f"{work}/{split}.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
        _train_tokenizer(work, parts["train"], vocab_size)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _train_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()  # with the alphabet below, every text can be encoded and decoded
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
