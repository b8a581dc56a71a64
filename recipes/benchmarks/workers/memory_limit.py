"""One training of ``recipes.benchmarks.memory_limit``: its job is the command line, each step a line of JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import GPT2Config

from lightning_ssd import HardwareProfile, OffloadPolicy, SSDOffloadStrategy
from recipes.benchmarks.memory_limit import Job
from recipes.data import SyntheticData
from recipes.meter import weights_digest
from recipes.models import LanguageModel

__all__ = ["main"]


class _Diary(pl.Callback):
    """Tells of each step as soon as it is over: a process that is killed has told all before."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The weights are there, nothing has been trained."""
        _tell(ready=True)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Start of the step."""
        self._begin_s = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        """End of the step."""
        _tell(loss=outputs["loss"].item(), step_s=time.perf_counter() - self._begin_s)


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _strategy(job: Job) -> Any:
    if job.mode == "plain":
        return "auto"
    policy = OffloadPolicy(**job.options)
    return SSDOffloadStrategy(policy=policy, hardware=HardwareProfile(paths=[job.directory]))


def _config(job: Job) -> GPT2Config:
    return GPT2Config(
        vocab_size=job.vocabulary,
        n_positions=job.sequence,
        n_embd=job.width,
        n_layer=job.layers,
        n_head=job.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
    )


def main(text: str) -> None:
    """Train once.

    Args:
        text: the job as JSON.
    """
    job = Job(**json.loads(text))
    torch.set_num_threads(job.threads)
    pl.seed_everything(0, verbose=False)
    module = LanguageModel(config=_config(job), objective="causal")
    data = SyntheticData(
        vocab_size=job.vocabulary,
        sequence_length=job.sequence,
        batch_size=job.batch,
        num_batches=job.steps,
    )
    strategy = _strategy(job)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=job.steps,
        limit_val_batches=0,
        callbacks=[_Diary()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data)
    moved = 0 if job.mode == "plain" else strategy.stats.bytes_written
    if module.network is None:
        raise RuntimeError("nothing was trained; please report this with the command line")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # before the digest, which reads all weights
    _tell(weights_digest=weights_digest(module.network), moved_bytes=moved, resident_peak_bytes=peak)


if __name__ == "__main__":
    main(sys.argv[1])
