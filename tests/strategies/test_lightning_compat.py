"""The private parts of Lightning that ``_lightning_compat`` answers are as it tells: red when upstream changes."""

import inspect

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric, wrappers
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.fabric.utilities import distributed, imports
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.overrides import distributed as overrides
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy as TrainerSingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.tuner import batch_size_scaling
from lightning.pytorch.utilities import compile as compiling
from lightning.pytorch.utilities.memory import is_oom_error, is_out_of_cpu_memory
from lightning_utilities.core.overrides import is_overridden

from lightning_ssd import SSDOffloadFabricStrategy, SSDOffloadStrategy
from lightning_ssd.errors import BudgetError
from lightning_ssd.strategies import _lightning_compat as compat


class Plain(ParallelStrategy):
    """One that Lightning does not know."""

    root_device = property(lambda self: torch.device("cpu"))

    def barrier(self, *args, **kwargs): ...

    def broadcast(self, obj, src=0):
        return obj

    def reduce(self, tensor, *args, **kwargs):
        return tensor

    def all_gather(self, tensor, group=None, sync_grads=False):
        return tensor

    def model_to_device(self): ...


def source(place):
    return inspect.getsource(place)


# -- how Lightning recognises a strategy ------------------------------------------------------------------------------


def test_compiled_modules_are_refused_by_the_strategys_class():
    verify = compiling._verify_strategy_supports_compile
    module = L.LightningModule()
    module._compiler_ctx = {}

    class Unknown(Plain): ...

    with pytest.raises(RuntimeError, match="incompatible with the current strategy"):
        verify(module, Unknown())
    compat.allow_compiled_modules(Unknown)
    verify(module, Unknown())
    verify(module, SSDOffloadStrategy())
    assert "supported_strategies = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy)" in source(verify)


def test_nothing_else_in_the_trainer_asks_for_a_single_device():
    from lightning.pytorch.trainer import trainer
    from lightning.pytorch.trainer.connectors import accelerator_connector, data_connector

    for module in (trainer, data_connector):
        assert "SingleDeviceStrategy" not in source(module)
    assert "isinstance(self.strategy, SingleDeviceStrategy" not in source(accelerator_connector)
    assert not isinstance(Plain(), TrainerSingleDeviceStrategy)


def test_fabric_looks_through_wrapped_for_an_overridden_backward():
    assert 'is_overridden("backward", self._strategy, parent=Strategy)' in source(
        wrappers._FabricModule._register_backward_hook
    )

    class Unmarked(FabricDDPStrategy):
        def backward(self, *args, **kwargs): ...

    class Marked(FabricDDPStrategy):
        @compat.stands_for_base_backward
        def backward(self, *args, **kwargs): ...

    assert is_overridden("backward", Unmarked(), parent=FabricStrategy)
    assert not is_overridden("backward", Marked(), parent=FabricStrategy)
    assert not is_overridden("backward", SSDOffloadFabricStrategy(), parent=FabricStrategy)


def test_fabric_knows_one_device_by_the_strategys_class():
    assert "isinstance(self._strategy, (SingleDeviceStrategy," in source(Fabric._validate_launched)
    assert "isinstance(self._strategy, (SingleDeviceStrategy," in source(Fabric.no_backward_sync)


# -- the batch-size finder --------------------------------------------------------------------------------------------


def test_the_finder_knows_memory_that_has_run_out_by_these_words():
    error = BudgetError("no plan keeps it")
    assert not is_oom_error(error)
    translated = compat.as_out_of_memory(error)
    assert is_out_of_cpu_memory(translated)
    assert isinstance(translated, BudgetError)
    assert str(translated).startswith("no plan keeps it (")
    assert source(batch_size_scaling).count("if is_oom_error(exception):") == 2  # in both of its modes


def test_the_finder_takes_all_callbacks_out_while_it_tries():
    finder = BatchSizeFinder()
    trainer = L.Trainer(
        callbacks=[finder], accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    callbacks = trainer.callbacks
    assert finder in callbacks
    assert not compat.is_trying_a_size(trainer, [finder])
    assert not compat.is_trying_a_size(trainer, [])
    trainer.callbacks = []
    assert compat.is_trying_a_size(trainer, [finder])
    reset = vars(batch_size_scaling)["__scale_batch_reset_params"]
    restore = vars(batch_size_scaling)["__scale_batch_restore_params"]
    assert "trainer.callbacks = []" in source(reset)
    assert 'trainer.callbacks = params["callbacks"]' in source(restore)


# -- what Lightning's own strategies use ------------------------------------------------------------------------------


def test_a_compiled_module_notes_its_compilation():
    module = L.LightningModule()
    assert not compat.is_compiled_by_lightning(module)
    assert compat.is_compiled_by_lightning(compiling.from_compiled(torch.compile(module, backend="eager")))


def test_lightning_notes_whether_it_runs_at_a_prompt():
    assert compat.is_interactive is imports._IS_INTERACTIVE
    assert '_IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)' in source(imports)


def test_launchers_are_made_as_lightning_makes_them():
    environment, strategy = LightningEnvironment(), DDPStrategy()
    script = compat.make_launcher(strategy, environment, "popen", 2, 3)
    assert type(script) is _SubprocessScriptLauncher
    assert (script.cluster_environment, script.num_processes, script.num_nodes) == (environment, 2, 3)
    forked = compat.make_launcher(strategy, environment, "fork", 2, 3)
    assert type(forked) is _MultiProcessingLauncher
    assert (forked._strategy, forked._start_method) == (strategy, "fork")
    theirs = " ".join(source(DDPStrategy._configure_launcher).split())
    assert "self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num" in theirs
    assert "self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)" in theirs
    strategy._launcher = script
    assert strategy.launcher is script


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (
            distributed._init_dist_connection,
            "cluster_environment torch_distributed_backend global_rank world_size kwargs",
        ),
        (distributed._sync_ddp_if_available, "result group reduce_op"),
        (overrides._register_ddp_comm_hook, "model ddp_comm_state ddp_comm_hook ddp_comm_wrapper"),
        (overrides._sync_module_states, "module"),
        (overrides.prepare_for_backward, "model output"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_over_processes_take_what_they_are_given(function, parameters):
    assert list(inspect.signature(function).parameters) == parameters.split()


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (DDPStrategy(), "_configure_launcher _setup_model _launcher _layer_sync _forward_redirection"),
        (
            ModelParallelStrategy(),
            "_configure_launcher _data_parallel_size _tensor_parallel_size _save_distributed_checkpoint",
        ),
        (
            FabricDDPStrategy(),
            "_configure_launcher _set_world_ranks _setup_distributed _determine_ddp_device_ids _start_method "
            "_ddp_kwargs _checkpoint_io",
        ),
    ],
    ids=["ddp", "model-parallel", "fabric"],
)
def test_private_names_that_strategies_override_or_read_are_there(strategy, names):
    assert [name for name in names.split() if not hasattr(strategy, name)] == []
