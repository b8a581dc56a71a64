"""The private parts of Lightning that ``_lightning_compat`` answers are as it tells: red when upstream changes.

That its answers work is what tests of compiled modules, finders, Fabrics, prompts and several processes show.
"""

import inspect

import pytest
from lightning.fabric import Fabric, wrappers
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.utilities import distributed, imports
from lightning.pytorch.overrides import distributed as overrides
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer import trainer
from lightning.pytorch.trainer.connectors import accelerator_connector, data_connector
from lightning.pytorch.tuner import batch_size_scaling
from lightning.pytorch.utilities import compile as compiling
from lightning.pytorch.utilities.memory import is_out_of_cpu_memory

from lightning_ssd.strategies import _lightning_compat as compat

SINGLE = "isinstance(self._strategy, (SingleDeviceStrategy,"


@pytest.mark.parametrize(
    ("place", "texts"),
    [
        (
            compiling._verify_strategy_supports_compile,
            ["supported_strategies = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy)"],
        ),
        (compiling.from_compiled, ["._compiler_ctx = {"]),
        (
            wrappers._FabricModule._register_backward_hook,
            ['is_overridden("backward", self._strategy, parent=Strategy)'],
        ),
        (Fabric._validate_launched, [SINGLE]),
        (Fabric.no_backward_sync, [SINGLE]),
        (is_out_of_cpu_memory, ["isinstance(exception, RuntimeError)", "DefaultCPUAllocator: can't allocate memory"]),
        (batch_size_scaling, ["if is_oom_error(exception):"] * 2),  # in both modes of the finder
        (vars(batch_size_scaling)["__scale_batch_reset_params"], ["trainer.callbacks = []"]),
        (
            vars(batch_size_scaling)["__scale_batch_restore_params"],
            ['trainer.callbacks = params["callbacks"]'],
        ),
        (imports, ['_IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)']),
        (
            DDPStrategy._configure_launcher,
            [
                "self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num",
                "self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_lightning_reads_as_it_is_answered(place, texts):
    source = " ".join(inspect.getsource(place).split())
    assert {text: source.count(text) for text in texts} == {text: texts.count(text) for text in texts}


def test_nothing_else_in_the_trainer_asks_for_a_single_device():
    for module in (trainer, data_connector):
        assert "SingleDeviceStrategy" not in inspect.getsource(module)
    assert "isinstance(self.strategy, SingleDeviceStrategy" not in inspect.getsource(accelerator_connector)


def test_launchers_are_made_as_lightning_makes_them():
    environment, strategy = LightningEnvironment(), DDPStrategy()
    script = compat.make_launcher(strategy, environment, "popen", 2, 3)
    assert type(script) is _SubprocessScriptLauncher
    assert (script.cluster_environment, script.num_processes, script.num_nodes) == (environment, 2, 3)
    forked = compat.make_launcher(strategy, environment, "fork", 2, 3)
    assert type(forked) is _MultiProcessingLauncher
    assert (forked._strategy, forked._start_method) == (strategy, "fork")
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
