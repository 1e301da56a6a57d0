"""Real text without a download: the running Python's own documentation and standard library.

About 12 MB of English and code lie on every machine that can run this package. They are split into documents, one
file in twenty is held out by the hash of its name, and a byte-level BPE tokenizer is trained on the training part
once. Files are cut at line ends into passages of about 2,000 characters, the size of a web document in C4: a short run
then sees hundreds of files instead of three. The result is cached under a key of everything that went into it, so that
another Python, vocabulary size or version of ``tokenizers`` gets its own copy and nobody trains on half-written files.

The order of the passages is fixed. A seed changes the initial weights only, as it does when TorchTitan streams C4, so
the spread between seeds is not inflated by an easier or harder piece of text at the end of one of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from moelab.errors import MoelabError

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT_VERSION = 3
VOCAB_SIZE = 2048
TOKENIZERS = {"16B": "assets/hf/deepseek-moe-16b-base", "671B": "assets/hf/DeepSeek-V3.1-Base"}
"""Where TorchTitan's ``download_hf_assets.py`` puts the tokenizers that 16B and 671B need for C4."""
HELD_OUT_ONE_IN = 20
PASSAGE_CHARACTERS = 2000
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
SPLITS = ("train", "held_out")
BOS, EOS = "<|begin|>", "<|end|>"


class CorpusError(MoelabError):
    """The corpus or its tokenizer could not be made."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A prepared corpus on disk.

    Attributes:
        folder: holds ``train.jsonl``, ``held_out.jsonl``, ``tokenizer.json``, ``tokenizer_config.json``.
        passages: number of passages in each split.
        characters: number of characters in each split.
        vocab_size: entries of the tokenizer.
    """

    folder: Path
    passages: dict[str, int]
    characters: dict[str, int]
    vocab_size: int

    def split(self, split: str) -> Path:
        """Path of a split's JSON lines, each ``{"name", "text"}``."""
        return self.folder / f"{split}.jsonl"


def cache_folder() -> Path:
    """``$MOELAB_CACHE``, or ``moelab`` under the user's cache folder."""
    if chosen := os.environ.get("MOELAB_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moelab"


def documents() -> Iterator[tuple[str, str]]:
    """Name and text of every document, in one order on every machine with the same Python."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped,unused-ignore]

    for name in sorted(topics):
        yield f"topics/{name}", topics[name]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            yield f"stdlib/{relative.as_posix()}", path.read_text(encoding="utf-8", errors="replace")


def passages(text: str) -> Iterator[str]:
    """Cut a document at line ends into passages of about ``PASSAGE_CHARACTERS``; joined, they are the document."""
    lines: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= PASSAGE_CHARACTERS:
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


def is_held_out(name: str) -> bool:
    """Whether a document is kept for validation; depends on its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def prepare(vocab_size: int) -> Corpus:
    """Make the corpus and its tokenizer, or find them in the cache. Safe to call from many processes at once.

    Args:
        vocab_size: entries of the tokenizer; at most the model's vocabulary.

    Raises:
        CorpusError: if the standard library has no sources here, or the cache cannot be written.
    """
    texts = list(documents())
    folder = cache_folder() / "corpus" / _key(texts, vocab_size)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "corpus.json").exists():
                _build(folder, texts, vocab_size)
    except OSError as error:
        raise CorpusError(
            f"the corpus cannot be cached: {error.strerror} ({folder.parent}); free space there or set MOELAB_CACHE"
        ) from error
    facts = json.loads((folder / "corpus.json").read_text())
    return Corpus(folder=folder, **facts)


def register(corpus: Corpus) -> None:
    """Make the corpus known to TorchTitan's own loader as the datasets ``python`` and ``python_held_out``."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    for name, split in (("python", "train"), ("python_held_out", "held_out")):
        DATASETS[name] = DatasetConfig(path=str(corpus.split(split)), loader=load, sample_processor=_text)


def load(path: str) -> Dataset:
    """A split as a map-style Hugging Face dataset, held in memory: no cache of its own, so no race between ranks."""
    from datasets import Dataset

    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return Dataset.from_list(rows)


def _text(sample: dict[str, str]) -> str:
    return sample["text"]


def _key(texts: list[tuple[str, str]], vocab_size: int) -> str:
    import tokenizers

    digest = hashlib.sha256(f"{FORMAT_VERSION} {tokenizers.__version__} {vocab_size}".encode())
    for name, text in texts:
        digest.update(f"\0{name}\0".encode())
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _build(folder: Path, texts: list[tuple[str, str]], vocab_size: int) -> None:
    if sum(len(text) for _, text in texts) < 1_000_000:
        raise CorpusError(
            "this Python was installed without its standard library's sources, so there is no text to train on; "
            "use another Python or `dataset: c4`"
        )
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        facts: dict[str, Any] = {"passages": {}, "characters": {}, "vocab_size": vocab_size}
        for split in SPLITS:
            chosen = [(name, text) for name, text in texts if is_held_out(name) == (split == "held_out")]
            rows = [json.dumps({"name": name, "text": part}) for name, text in chosen for part in passages(text)]
            random.Random(0).shuffle(rows)  # noqa: S311 - an order, not a secret
            (work / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
            facts["passages"][split] = len(rows)
            facts["characters"][split] = sum(len(text) for _, text in chosen)
        _train_tokenizer(work, [text for name, text in texts if not is_held_out(name)], vocab_size)
        (work / "corpus.json").write_text(json.dumps(facts))
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _train_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
