"""Fine-tuning of a model in a folder: the bits of plain Lightning while the frozen weights wait on a drive."""

import gc
import json
import re
import sys

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from lightning_ssd.parameters.files.weight_files import WeightFiles
from recipes import fabric_loop, plain_loop
from recipes.lora import LoRA, LoRALayer
from recipes.pretrained import PretrainedModel
from recipes.runner import run
from recipes.schema import SCHEMA
from recipes.train import main
from tests.support.pairs import pairwise
from tests.support.pretrained import save_tiny

SMALLEST = 4 << 10
TINY = ["experiment=smoke", "trainer.max_steps=3", "model=pretrained", "model.learning_rate=1e-2", "logger=none"]
OFFLOADED = ["offload=weights", f"offload.min_tensor_bytes={SMALLEST}"]


@pytest.fixture
def folder(spill_dir, request):
    place = spill_dir / "model"
    save_tiny(getattr(request, "param", "gpt2"), place)
    return place


@pytest.fixture
def tune(spill_dir, folder):
    """Train as a job of ``recipes.train`` does, in this process."""

    def tune_once(*overrides):
        config, choices = SCHEMA.compose([*TINY, f"model.path={folder}", f"output_dir={spill_dir / 'run'}", *overrides])
        return run(config, model=choices["model"], offload=choices["offload"])

    return tune_once


def base_bytes(folder):
    """Of the weights that are large enough to move, in the files."""
    sizes = [tensor.nbytes for tensor in load_file(folder / "model.safetensors").values()]
    return sum(nbytes for nbytes in sizes if nbytes >= SMALLEST)


def equal(one, other):
    return (one.losses, one.weights_digest) == (other.losses, other.weights_digest)


# -- the same bits ---------------------------------------------------------------------------------------------------


@pairwise(
    "kind, dtype, shard, offload",
    ["gpt2", "llama"],
    [torch.float32, torch.bfloat16],
    ["60KB", "10GB"],  # many files, and one
    ["weights", "everything"],
)
def test_frozen_weights_are_copied_once_out_of_the_folder(kind, dtype, shard, offload, tune, spill_dir, monkeypatch):
    """The head of "gpt2" is its embedding. Adapters are smaller than what waits, so nothing else is written."""
    folder = spill_dir / "other"
    save_tiny(kind, folder, dtype=dtype, max_shard_size=shard)
    assert (folder / "model.safetensors.index.json").exists() is (shard == "60KB")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    written = []
    close = WeightFiles.close

    def note(files):
        written.append(sum(files.written_bytes()))
        close(files)

    monkeypatch.setattr(WeightFiles, "close", note)
    overrides = [f"model.path={folder}", "model.lora.rank=1"]
    plain = tune("offload=none", *overrides)
    other = tune(f"offload={offload}", f"offload.min_tensor_bytes={SMALLEST}", *overrides)
    assert equal(plain, other)
    sizes = [p.nbytes for p in AutoModelForCausalLM.from_pretrained(folder, dtype="auto").parameters()]
    assert other.weights_bytes == sum(nbytes for nbytes in sizes if nbytes >= SMALLEST)
    assert written == [other.weights_bytes]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("loop", [plain_loop, fabric_loop], ids=["plain_loop", "fabric_loop"])
def test_loops_of_one_s_own_train_the_same(loop, tune, folder, spill_dir):
    other = loop.main([*TINY, *OFFLOADED, f"model.path={folder}", f"output_dir={spill_dir / 'loop'}"])
    assert equal(tune("offload=none"), other)
    assert other.weights_bytes == base_bytes(folder)


# -- what is made ----------------------------------------------------------------------------------------------------


def made(folder, lora=LoRA(), **options):  # noqa: B008
    return PretrainedModel(path=str(folder), lora=lora, **options).make_network()


def in_memory():
    """Parameters that are neither on a drive nor a view of a file."""
    found = (thing for thing in gc.get_objects() if isinstance(thing, nn.Parameter) and not thing.is_meta)
    storages = {id(parameter): parameter.untyped_storage() for parameter in found if parameter.nbytes >= SMALLEST}
    return {number for number, storage in storages.items() if storage.resizable() and not is_mapped(storage)}


@pytest.mark.parametrize(("dtype", "share"), [("auto", 1.0), ("bfloat16", 0.5)])
def test_the_model_is_never_whole_in_memory(dtype, share, folder, spill_dir):
    """No weight is converted before the one before it is on the drive."""
    policy = OffloadPolicy(parameters="offload", activations="keep", min_tensor_bytes=SMALLEST)
    module = PretrainedModel(path=str(folder), lora=LoRA(rank=1), dtype=dtype)
    before, counts = in_memory(), []
    with Offloader(policy=policy, hardware=HardwareProfile(paths=[spill_dir])) as offloader:
        hook = register_module_parameter_registration_hook(lambda *_: counts.append(len(in_memory() - before)))
        try:
            with offloader.streamed_init():
                module.configure_model()
        finally:
            hook.remove()
        assert max(counts) == (dtype != "auto"), "those that need no conversion stay in the files"
        assert not in_memory() - before
        offloader.register_module(module)
        assert offloader.stats.weights_bytes == share * base_bytes(folder)


@pytest.mark.parametrize("folder", ["gpt2", "llama"], indirect=True)
def test_it_begins_as_the_model_in_the_folder(folder):
    ids = torch.arange(64).view(2, 32)
    network, original = made(folder).eval(), AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(network(ids).logits, original(ids).logits)


@pytest.mark.parametrize("base", [nn.Linear(6, 4), Conv1D(4, 6)], ids=lambda base: type(base).__name__)
def test_an_adapter_is_a_change_of_the_weight_of_low_rank(base):
    x = torch.randn(3, 6)
    layer = LoRALayer(base, rank=2, scale=0.5)
    assert torch.equal(layer(x), base(x))
    nn.init.normal_(layer.up)
    change = 0.5 * layer.up @ layer.down
    weight = base.weight if isinstance(base, nn.Linear) else base.weight.T
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight + change, base.bias))
    assert layer.weight is base.weight


@pytest.mark.parametrize(
    ("targets", "count"),
    [(None, 3 * 4), (["c_attn"], 3), (["mlp.c_proj", "c_attn"], 6), (["transformer.h.0.mlp.c_fc"], 1)],
)
def test_the_named_layers_get_adapters_and_nothing_else_is_trained(targets, count, folder):
    network = made(folder, LoRA(rank=2, target_modules=targets))
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, LoRALayer)}
    assert len(layers) == count
    assert not any("lm_head" in name for name in layers)
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.{matrix}" for name in layers for matrix in ("up", "down")}
    assert network.lm_head.weight is network.transformer.wte.weight


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def refusal(folder, spill_dir, monkeypatch, capsys):
    """What the command says before it ends."""

    def refusal_of(*overrides):
        monkeypatch.chdir(spill_dir)
        GlobalHydra.instance().clear()
        named = [] if any("model.path" in override for override in overrides) else [f"model.path={folder}"]
        monkeypatch.setattr(sys, "argv", ["train", *TINY, *named, *overrides])
        with pytest.raises(SystemExit) as caught:
            main()
        said = caught.value.code
        assert "Traceback" not in said + capsys.readouterr().err
        return said

    return refusal_of


def without(pattern):
    def remove(folder):
        for path in folder.glob(pattern):
            path.rename(path.with_suffix(".away"))

    return remove


def with_code(folder):
    config = json.loads((folder / "config.json").read_text())
    code = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps({**config, **code}))


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("*"), r"^model\.path=.*: has no config\.json; give a folder that save_pretrained"),
        (without("*.safetensors"), r"^model\.path=.*: has no weights \(\*\.safetensors\); give a folder"),
        (with_code, r"^model\.path=.*: config\.json cannot be used: .*custom code"),
        (cut_short, r"^model\.path=.*: the weights cannot be read: "),
        (without_a_weight, r": 1 weights of GPT2LMHeadModel are not there, the first is transformer\.h\.1\.mlp\.c_fc"),
    ],
    ids=["no_config", "no_safetensors", "code", "cut_short", "a_weight_is_missing"],
)
def test_a_folder_that_cannot_be_used_is_refused(damage, message, refusal, folder):
    damage(folder)
    assert re.search(message, refusal(*OFFLOADED))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=/none"], r"^model\.path=/none: is no folder; give one that save_pretrained"),
        (["model.path='???'"], r"^model\.path is missing: give model\.path=VALUE"),
        (
            ["model.lora.target_modules=[q_proj]"],
            r"'q_proj' is the name of no linear layer of GPT2LMHeadModel; allowed",
        ),
        (
            ["model.lora.target_modules=[c_attn,attn]"],
            r"'attn' is the name of no .*allowed: c_attn, c_fc, c_proj, lm_he",
        ),
        (["data.sequence_length=128"], r"data\.sequence_length=128 is more than the model takes; allowed: up to 64"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, message, refusal):
    assert re.search(message, refusal("offload=none", *overrides))
