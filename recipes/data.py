"""Token windows to train on: real text that needs no download, or random numbers.

Every Python carries several megabytes of English and code: the language reference that ``help()`` shows and the
sources of the standard library. A byte-pair vocabulary is trained on it locally.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, DistributedSampler

from recipes.mistakes import ConfigMistake, make_directory

__all__ = ["EOS_TOKEN", "MASK_TOKEN", "PAD_TOKEN", "SyntheticData", "TextData", "TokenData", "python_text", "tokenize"]

PAD_TOKEN, EOS_TOKEN, MASK_TOKEN = range(3)
_SPECIAL_TOKENS = ["<pad>", "<eos>", "<mask>"]
_DOCUMENT_BORDER = "\0"
_MIN_VOCABULARY = 256 + len(_SPECIAL_TOKENS)
# Part of the cache's key: raise it when the way from text to tokens changes.
_FORMAT = 1


def python_text(max_text_bytes: int) -> str:
    """Documentation and sources of this Python, in a fixed order, documents separated by a NUL.

    The text is the same for every run of one Python version; another version has other text.

    Args:
        max_text_bytes: how much to take at most (UTF-8).
    """
    documents = [topics[name] for name in sorted(topics)]
    library = Path(sysconfig.get_path("stdlib"))
    documents += [path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))]
    encoded = _DOCUMENT_BORDER.join(documents).encode()[:max_text_bytes]
    # The cut may have gone through a character; half a character is no text.
    return encoded.decode(errors="ignore")


def tokenize(text: str, vocab_size: int) -> Tensor:
    """Train a byte-pair vocabulary on ``text`` and return the text as int32 token numbers.

    Args:
        text: documents separated by a NUL; each gets an end-of-document token.
        vocab_size: number of tokens, the three special ones and the 256 bytes included.
    """
    # Imported here: only this function needs it, and random tokens work without the package.
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < _MIN_VOCABULARY:
        raise ConfigMistake(
            f"data.vocab_size={vocab_size}; allowed: at least {_MIN_VOCABULARY} (256 bytes and specials)"
        )
    documents = [document for document in text.split(_DOCUMENT_BORDER) if document]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    numbers: list[int] = []
    for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
        numbers += encoding.ids
        numbers.append(EOS_TOKEN)
    return torch.tensor(numbers, dtype=torch.int32)


def _read_tokenizer(folder: str) -> Any:
    # Imported here: it takes seconds, and only this function needs it.
    from transformers import AutoTokenizer

    path = Path(folder).expanduser()
    problem = "is no folder"
    if path.is_dir():
        try:
            return cast(Any, AutoTokenizer).from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            problem = f"has no tokenizer that transformers can read ({next(iter(str(error).splitlines()), '')})"
    raise ConfigMistake(f"data.tokenizer={folder}: {problem}; give a folder with tokenizer.json, or null for our own")


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ssd"


class _Shuffled(DistributedSampler[int]):
    """Each epoch another order, drawn from ``generator``; every process reads its part of it.

    Lightning leaves it alone because of its base class. PyTorch's ``RandomSampler`` would be replaced by another order
    wherever there is a process group, be it of one process; and it draws once more at the end of an epoch, which
    Lightning does not read to, so that a plain loop would have another second epoch.

    Args:
        windows: what is read.
        generator: of the order; equal in all processes.
        num_replicas: processes that read different parts.
        rank: which of these this is.
    """

    def __init__(self, windows: Tensor, generator: torch.Generator, *, num_replicas: int, rank: int) -> None:
        super().__init__(windows, num_replicas=num_replicas, rank=rank, drop_last=True)  # type: ignore[arg-type]
        self._generator = generator

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.dataset), generator=self._generator)  # type: ignore[arg-type]
        return iter(order[self.rank : self.total_size : self.num_replicas].tolist())


class TokenData(pl.LightningDataModule):
    """Windows of tokens, cut and shuffled the same way in every run.

    Args:
        vocab_size: number of different tokens.
        sequence_length: tokens in a window.
        batch_size: windows in a batch.
        num_val_batches: batches set aside at the end for validation.
        seed: of the order of the training windows.
    """

    def __init__(
        self, *, vocab_size: int, sequence_length: int, batch_size: int, num_val_batches: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.num_val_batches = num_val_batches
        self.seed = seed
        self._windows: Tensor | None = None

    @abstractmethod
    def make_tokens(self) -> Tensor:
        """All tokens, in one row."""

    @property
    def windows(self) -> Tensor:
        """(windows, sequence_length), int64, in the order of the text."""
        if self._windows is None:
            tokens = self.make_tokens()
            num_windows = len(tokens) // self.sequence_length
            needed = (self.num_val_batches + 1) * self.batch_size
            if num_windows < needed:
                raise ConfigMistake(
                    f"the text has {len(tokens)} tokens, which is {num_windows} windows of data.sequence_length="
                    f"{self.sequence_length}; one training batch and data.num_val_batches={self.num_val_batches} of "
                    f"data.batch_size={self.batch_size} need {needed}. Give more text or ask for less"
                )
            self._windows = tokens[: num_windows * self.sequence_length].view(num_windows, -1).long()
        return self._windows

    @property
    def _num_val_windows(self) -> int:
        return self.num_val_batches * self.batch_size

    @property
    def _part(self) -> dict[str, int]:
        """Of the data, this process's."""
        if self.trainer is not None:
            # The strategy knows which processes share one batch (tensor parallelism).
            known = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
            return {name: known[name] for name in ("num_replicas", "rank")}
        if distributed.is_available() and distributed.is_initialized():
            return {"num_replicas": distributed.get_world_size(), "rank": distributed.get_rank()}
        return {"num_replicas": 1, "rank": 0}

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled full batches of all but the last windows."""
        windows = self.windows[: len(self.windows) - self._num_val_windows]
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            windows,  # type: ignore[arg-type]  # a tensor is a sequence of its rows
            batch_size=self.batch_size,
            sampler=_Shuffled(windows, generator, **self._part),
            drop_last=True,
            generator=generator,
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The last windows, in order."""
        windows = self.windows[len(self.windows) - self._num_val_windows :]
        return DataLoader(windows, batch_size=self.batch_size)  # type: ignore[arg-type]


class TextData(TokenData):
    """Real text: the user's file, or what this Python carries. Tokens are kept in a cache directory.

    Args:
        path: a UTF-8 text file; ``None`` takes :func:`python_text`.
        tokenizer: a folder with the tokenizer of a pretrained model, which then says ``vocab_size``, and whose tokens
            are not kept; ``None``: a vocabulary is trained on the text.
        max_text_bytes: how much of the text to use.
        cache_dir: where the tokens wait for the next run; ``None``: ``lightning_ssd`` in the user's cache directory.
        vocab_size: see :class:`TokenData`.
        sequence_length: see :class:`TokenData`.
        batch_size: see :class:`TokenData`.
        num_val_batches: see :class:`TokenData`.
        seed: see :class:`TokenData`.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        tokenizer: str | None = None,
        max_text_bytes: int = 4_000_000,
        cache_dir: str | None = None,
        vocab_size: int = 4096,
        sequence_length: int = 256,
        batch_size: int = 8,
        num_val_batches: int = 1,
        seed: int = 0,
    ) -> None:
        self.tokenizer = None if tokenizer is None else _read_tokenizer(tokenizer)
        super().__init__(
            vocab_size=vocab_size if self.tokenizer is None else len(self.tokenizer),
            sequence_length=sequence_length,
            batch_size=batch_size,
            num_val_batches=num_val_batches,
            seed=seed,
        )
        self.path = path
        self.max_text_bytes = max_text_bytes
        self.cache_dir = _default_cache_dir() if cache_dir is None else Path(cache_dir)

    def read_text(self) -> str:
        """The text to train on."""
        if self.path is None:
            return python_text(self.max_text_bytes)
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise ConfigMistake(f"data.path={self.path!r} is no file; give a UTF-8 text file, or null for Python's")
        with file.open("rb") as stream:
            return stream.read(self.max_text_bytes).decode(errors="ignore")

    def make_tokens(self) -> Tensor:
        """Tokens of the text, from the cache when the same text and vocabulary were asked for before."""
        text = self.read_text()
        if self.tokenizer is not None:
            return self._numbered(text)
        digest = hashlib.sha256(f"{_FORMAT} {self.vocab_size}\n{text}".encode()).hexdigest()[:16]
        cached = self.cache_dir / f"tokens-{digest}.pt"
        if cached.is_file():
            found: Tensor = torch.load(cached, weights_only=True)
            return found
        tokens = tokenize(text, self.vocab_size)
        make_directory("data.cache_dir", self.cache_dir)
        # Renamed when complete, so that runs side by side never read half a file.
        with tempfile.NamedTemporaryFile(dir=self.cache_dir, suffix=".tmp", delete=False) as stream:
            torch.save(tokens, stream)
        os.replace(stream.name, cached)
        return tokens

    def _numbered(self, text: str) -> Tensor:
        """As the tokenizer of the pretrained model does it, each document with its end."""
        documents = [document for document in text.split(_DOCUMENT_BORDER) if document]
        assert self.tokenizer is not None
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        encoded = self.tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([number for numbers in encoded for number in (*numbers, *end)], dtype=torch.int32)

    def prepare_data(self) -> None:
        """Fill the cache once, before several processes want it."""
        if self.tokenizer is None:
            self.make_tokens()


class SyntheticData(TokenData):
    """Random tokens: no text is read, the loss means nothing, memory and time are those of real training.

    Args:
        num_batches: training batches in an epoch.
        vocab_size: see :class:`TokenData`.
        sequence_length: see :class:`TokenData`.
        batch_size: see :class:`TokenData`.
        num_val_batches: see :class:`TokenData`.
        seed: of the tokens and of their order.
    """

    def __init__(
        self,
        *,
        num_batches: int = 64,
        vocab_size: int = 4096,
        sequence_length: int = 256,
        batch_size: int = 8,
        num_val_batches: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            batch_size=batch_size,
            num_val_batches=num_val_batches,
            seed=seed,
        )
        self.num_batches = num_batches

    def make_tokens(self) -> Tensor:
        """Uniformly drawn tokens, specials excluded."""
        generator = torch.Generator().manual_seed(self.seed)
        num_tokens = (self.num_batches + self.num_val_batches) * self.batch_size * self.sequence_length
        lowest = len(_SPECIAL_TOKENS)
        try:
            return torch.randint(lowest, self.vocab_size, (num_tokens,), generator=generator, dtype=torch.int32)
        except (RuntimeError, TypeError) as error:  # no memory, or more than a tensor may have
            raise ConfigMistake(
                f"data.num_batches={self.num_batches} and data.num_val_batches={self.num_val_batches} of "
                f"data.batch_size={self.batch_size} windows are {num_tokens} tokens, which do not fit in memory; ask "
                "for fewer"
            ) from error
