"""Blocks that the program checkpoints by itself under our hooks, with today's PyTorch and with the coming one."""

import inspect
from functools import partial

import lightning as L
import pytest
import torch

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.recompute import checkpointed_call
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from tests.parity import models
from tests.parity.models import TRAININGS
from tests.parity.recomputing import assert_recompute_parity
from tests.support.helpers import (
    DRAINED,
    PLANNED,
    Session,
    Setup,
    assert_identical,
    assert_released,
    open_offloader,
    outcome,
)
from tests.support.pairs import each_once
from tests.support.trainers import LIGHTNING_NOISE, Net, fit, offload_strategy, result

checkpoint = torch.utils.checkpoint.checkpoint
FLAG = "respect_saved_tensors_hooks"
pytestmark = [
    *(pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated"),
]
SETUPS = {"offload": DRAINED, "recompute_offload": Setup(activations="recompute_offload"), "planned": PLANNED}

# -- by the program ----------------------------------------------------------------------------------------------------


class Coming:
    """``checkpoint()`` as pytorch#191236 announces it: hooks around it need the flag."""

    def __call__(self, function, *args, use_reentrant, respect_saved_tensors_hooks=None, **more):
        if use_reentrant and respect_saved_tensors_hooks is not None:
            raise ValueError(f"{FLAG} needs use_reentrant=False")
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        is_around = hooks is not None and hooks[0].__module__ != torch.utils.checkpoint.__name__
        if is_around and respect_saved_tensors_hooks is None and not use_reentrant:
            raise RuntimeError(f"saved tensors hooks are active: pass {FLAG}=True or False")
        # Not given where it is not chosen: a newer PyTorch has a flag of its own.
        given = {} if use_reentrant or FLAG not in inspect.signature(checkpoint).parameters else {FLAG: False}
        return checkpoint(function, *args, use_reentrant=use_reentrant, **given, **more)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("kind", models.CHECKPOINTS)
def test_a_checkpoint_of_the_program_is_exact(kind, setup, tmp_path):
    training = models.checkpointed(kind)
    expected = outcome(training, Session())
    with open_offloader(tmp_path, SETUPS[setup]) as offloader:
        assert_identical(outcome(training, Session.of(offloader, SETUPS[setup])), expected)
        assert_released(offloader)
        assert setup == "planned" or offloader.stats.bytes_read > 0


def test_our_own_checkpoints_give_the_flag(monkeypatch):
    monkeypatch.setattr(checkpointed_call, "checkpoint", Coming())
    assert_recompute_parity(TRAININGS["dropout"]())
    monkeypatch.setattr(checkpointed_call, "_said_of_hooks", lambda function: {})
    with pytest.raises(AssertionError, match=FLAG):
        assert_recompute_parity(TRAININGS["dropout"]())


# -- by transformers, in the Trainer -----------------------------------------------------------------------------------


class Causal(Net):
    """A model of transformers that checkpoints its blocks; sees whether their inputs are in memory before backward."""

    def __init__(self, kind, *, reentrant):
        L.LightningModule.__init__(self)
        self.width, self.batch_size, self.losses = 24, 4, []
        self.model = MAKE[kind]()
        self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        self.given = []
        self.in_memory = []
        for block in self.model.get_submodule(BLOCKS[kind]):
            block.register_forward_pre_hook(self._is_given)

    def _is_given(self, block, args):
        if torch._C._current_autograd_node() is None:
            self.given.append(StorageKey(args[0].untyped_storage()))

    def loss(self, batch):
        words = (batch[0] * 100).long().remainder(models.VOCABULARY)
        loss = self.model(input_ids=words, labels=words).loss
        self.losses.append(loss.detach().clone())
        return loss

    def on_before_backward(self, loss):
        if isinstance(self.trainer.strategy, SSDOffloadStrategy):
            self.trainer.strategy.offloader.flush()
        self.in_memory.append([key.alive() for key in self.given])
        self.given.clear()


MAKE = {
    "gpt2": partial(models.gpt2, hidden=80, dropout=0.1, layers=3),
    "llama": partial(
        models.transformer,
        "LlamaForCausalLM",
        **models.LAYERS | {"hidden_size": 80, "intermediate_size": 120, "num_hidden_layers": 3},
        use_cache=False,
    ),
}
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}


@each_once("kind, reentrant, activations", MAKE, [False, True], ["auto", "offload", "recompute_offload"])
def test_inputs_of_blocks_that_transformers_checkpoints_leave_in_the_trainer(kind, reentrant, activations, spill_dir):
    make = partial(Causal, kind, reentrant=reentrant)
    settings = {"limit_train_batches": 2, "limit_val_batches": 0}
    _, plain = fit(make, "auto", spill_dir / "plain", **settings)
    strategy = offload_strategy(spill_dir, activations=activations)
    _, ours = fit(make, strategy, spill_dir / "ours", **settings)
    assert_identical(result(ours), result(plain))
    assert plain.in_memory == [[True] * 3] * 2
    assert ours.in_memory[0] == [False] * 3, "later passes may be found to be faster with some of them in memory"
    assert strategy.stats.bytes_read > 0
