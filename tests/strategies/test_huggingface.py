"""The Trainer of transformers with ``OffloadTrainerMixin``: what it trains, and what it refuses."""

import importlib
from collections.abc import Mapping

import pytest
import torch

from lightning_ssd import HardwareProfile, OffloadPolicy, OffloadTrainerMixin
from lightning_ssd.errors import ConfigError, StorageError
from tests.support.helpers import assert_identical
from tests.support.leftovers import open_files

transformers = pytest.importorskip("transformers", reason="the Trainer of transformers is not installed")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate, which is not installed")

# The Trainer itself warns of what PyTorch and it will change.
pytestmark = pytest.mark.filterwarnings("ignore")


class Texts(torch.utils.data.Dataset[Mapping[str, torch.Tensor]]):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        tokens = torch.randint(0, 97, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Ours(OffloadTrainerMixin, transformers.Trainer):
    policy = OffloadPolicy(
        activations="offload",
        optimizer_states="offload",
        min_tensor_bytes=1024,
        per_parameter_optimizers=["Adafactor"],  # that of transformers
    )


def make(kind, directory, **options):
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=97, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    defaults = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = transformers.TrainingArguments(str(directory), **(defaults | options))
    return kind(model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=Texts(), eval_dataset=Texts())


def train(trainer, **options):
    transformers.set_seed(1)  # dropout and the order of the data come from the process's random numbers
    trainer.train(**options)


def everything(trainer):
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses
    states = dict(sorted(trainer.optimizer.state_dict()["state"].items()))
    return {"losses": losses, "weights": dict(trainer.model.named_parameters()), "states": states}


def assert_equal(plain, ours):
    assert_identical(everything(ours), everything(plain))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.1},
        {"eval_strategy": "epoch", "optim": "adafactor"},
    ],
    ids=["plain", "checkpointing", "reentrant", "accumulation", "evaluation"],
)
def test_a_trainer_of_transformers_trains_the_same_bits(spill_dir, options):
    plain, ours = (make(kind, spill_dir / kind.__name__, **options) for kind in (transformers.Trainer, Ours))
    for trainer in (plain, ours):
        train(trainer)
    assert_equal(plain, ours)
    stats = ours.stats
    assert stats.bytes_written > 0
    assert stats.bytes_read > 0
    assert any("io/write_gib" in log for log in ours.state.log_history)
    assert not ours.offloader.is_open
    assert type(ours.optimizer) is type(plain.optimizer)
    assert type(ours.optimizer.optimizer) is type(plain.optimizer.optimizer)


def test_a_second_train_and_a_resumed_one_go_on(spill_dir):
    plain, ours = (
        make(kind, spill_dir / kind.__name__, save_strategy="steps", save_steps=4)
        for kind in (transformers.Trainer, Ours)
    )
    for trainer in (plain, ours):
        train(trainer)
        train(trainer)
    assert_equal(plain, ours)
    resumed = make(Ours, spill_dir / "resumed")
    train(resumed, resume_from_checkpoint=str(spill_dir / "Ours" / "checkpoint-4"))
    once = make(transformers.Trainer, spill_dir / "once")
    train(once, resume_from_checkpoint=str(spill_dir / "Trainer" / "checkpoint-4"))
    assert_equal(once, resumed)


def test_an_error_in_a_step_reaches_the_user_and_closes_files(spill_dir):
    class Failing(Ours):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            if self.state.global_step == 2:
                raise ArithmeticError("the user's own")
            return loss

    trainer = make(Failing, spill_dir)
    with pytest.raises(ArithmeticError, match="the user's own"):
        trainer.train()
    assert not trainer.offloader.is_open
    assert open_files(spill_dir) == []


@pytest.mark.parametrize("name", ["parameters", "gradients"])
def test_weights_and_gradients_are_refused_with_the_line_to_write(spill_dir, name):
    trainer = make(Ours, spill_dir)
    trainer.policy = OffloadPolicy(optimizer_states="offload", **{"parameters": "offload", name: "offload"})
    with pytest.raises(ConfigError, match=r"Write parameters='keep', or train with Trainer"):
        trainer.train()
    assert trainer.offloader is None


@pytest.mark.parametrize("attribute", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_sharded_trainers_are_refused(spill_dir, attribute):
    trainer = make(Ours, spill_dir)
    setattr(trainer, attribute, True)
    with pytest.raises(ConfigError, match="has not been tried"):
        trainer.train()


def test_without_paths_files_lie_in_the_output_directory(spill_dir, monkeypatch):
    monkeypatch.delenv("LIGHTNING_SSD_PATHS", raising=False)
    seen = []

    class Watching(Ours):
        hardware = HardwareProfile()

        def training_step(self, *args, **kwargs):
            seen.append(self.offloader.description)
            return super().training_step(*args, **kwargs)

    make(Watching, spill_dir / "out").train()
    assert str(spill_dir / "out") in seen[0]


# -- optimizers of the user's ------------------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and counts."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.num_steps = 0
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        self.num_steps += 1
        return self.optimizer.step(closure)


def test_a_wrapping_optimizer_is_stepped_itself(spill_dir):
    trainer = make(Ours, spill_dir)
    trainer.policy = OffloadPolicy(activations="offload", min_tensor_bytes=1024)
    trainer.optimizer = lookahead = Lookahead(torch.optim.AdamW(trainer.model.parameters(), lr=1e-3))
    trainer.train()
    assert lookahead.num_steps == 6
    trainer = make(Ours, spill_dir)
    trainer.optimizer = Lookahead(torch.optim.AdamW(trainer.model.parameters(), lr=1e-3))
    with pytest.raises(ConfigError, match="Lookahead, which owns another one"):
        trainer.train()


@pytest.mark.parametrize(("at", "error"), [(3, KeyboardInterrupt), (4, StorageError)])
def test_an_update_that_was_broken_off_is_never_gone_on_with(at, error, spill_dir, monkeypatch):
    """Some weights are new and some are not: neither a checkpoint nor a step may follow."""
    module = importlib.import_module("torch.optim.adam")
    adam, calls = module.adam, []

    def broken(*args, **kwargs):
        adam(*args, **kwargs)
        calls.append(None)
        if len(calls) == at:
            raise error("in the middle")

    monkeypatch.setattr(module, "adam", broken)
    trainer = make(Ours, spill_dir)
    trainer.policy = OffloadPolicy(activations="keep", optimizer_states="offload")
    with pytest.raises(error, match="in the middle"):
        trainer.train()
    assert not trainer.offloader.is_open
    with pytest.raises(RuntimeError, match="incomplete"):
        trainer.optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"Make a new Trainer and call its train\(resume_from_checkpoint"):
        trainer.train()


# -- methods that go past ours -----------------------------------------------------------------------------------------


def test_bases_in_the_other_order_are_refused():
    with pytest.raises(ConfigError, match=r"Write class Reversed\(OffloadTrainerMixin, Trainer\)"):

        class Reversed(transformers.Trainer, OffloadTrainerMixin):
            pass


def test_a_create_optimizer_that_goes_past_ours_is_refused(spill_dir):
    class Own(Ours):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            return self.optimizer

    with pytest.raises(ConfigError, match=r"Own\.create_optimizer does not call super\(\)\.create_optimizer\(\)"):
        make(Own, spill_dir).train()


def test_a_training_step_that_goes_past_ours_is_told(spill_dir):
    class Own(Ours):
        def training_step(self, model, inputs, *_):
            return transformers.Trainer.training_step(self, model, inputs)

    with pytest.warns(UserWarning, match=r"Own\.training_step does not call super\(\)\.training_step\(\)"):
        make(Own, spill_dir).train()
