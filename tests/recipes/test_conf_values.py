"""Every value of every key in conf/: what is good is taken, what is bad is refused in one clear sentence."""

import sys

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recipes.mistakes import OWNERS, ConfigMistake
from recipes.schema import SCHEMA
from recipes.train import main
from recipes.values import BY_THEIR_TARGET, is_interpolation, mistake_in, rule_of

PARSER = OverridesParser.create()


def value_of(text):
    """As the command line's grammar reads it."""
    return PARSER.parse_override(f"key={text}").value()


def leaves(node, path):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, str(key)))
        elif key not in ("_target_", "defaults"):
            yield ".".join((*path, str(key))), value


def written():
    """File, key and value of all that conf/ says, Hydra's own settings left out."""
    found = []
    for path in sorted(SCHEMA.config_dir.rglob("*.yaml")):
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        is_group = path.parent != SCHEMA.config_dir and "@package _global_" not in path.read_text()
        for key, value in leaves(tree, (path.parent.name,) if is_group else ()):
            if not key.startswith("hydra."):
                found.append((path.name, key, value))
    return found


def test_every_key_has_a_rule_and_its_own_value_is_good():
    keys = set()
    for name, key, value in written():
        known = key.split(".")[0] in OWNERS or any(key == k or key.startswith(f"{k}.") for k in BY_THEIR_TARGET)
        assert known or rule_of(key) is not None, f"{name}: {key} has no rule in recipes/values.py"
        assert mistake_in(key, value) is None
        keys.add(key)
    assert len(keys) > 70


BAD = {
    "trainer.max_steps": "abc 0 -3 1.5 null true [1] nan inf 99999999999999999999999 '' 1e3",
    "trainer.limit_train_batches": "abc -1 1.5 0 true nan",
    "trainer.val_check_interval": "0 x 1.5 nan true",
    "trainer.gradient_clip_val": "x -1 nan inf true",
    "trainer.enable_checkpointing": "maybe 3",
    "trainer.devices": "0 -2 abc 1.5 null [a]",
    "seed": "-1 abc 1.5 null 4294967296 true [1,2] nan",
    "output_dir": "'' null 5",
    "model.lora": "5 x true [8]",
    "model.lora.alpha": "0 -1 x nan",
    "model.lora.target_modules": "5 x [] [5]",
    "model.config.n_layer": "0 -1 x 1.5 null",
    "model.config.resid_pdrop": "2 -0.1 x nan",
    "model.config.bos_token_id": "x -1",
    "logger.csv.version": "[1] null",
    "offload.activation_budget": "-3 abc 1.5 0 true [1] nan inf 1GB1 5G '1☃iB'",
    "offload.parameters": "5 x null true",
    "offload.per_parameter_optimizers": "5 [5]",
    "hardware.paths": "5 [5] null ['']",
    "hardware.host_memory": "x -1 null 1.5",
}
"""Values as on a command line."""

ROWS = [
    (key, text.replace("_", " ")) for key, texts in BAD.items() for text in texts.replace("'1☃iB'", "'1_☃iB'").split()
]


def test_a_bad_value_is_refused_with_what_was_expected_and_what_was_got():
    def is_clear(key, message):
        if message is None or not message.startswith(key) or len(message) >= 300 or "\n" in message:
            return False
        tells = "expected" in message or " Write " in message
        return tells and "OffloadPolicy" not in message and "HardwareProfile" not in message

    told = {(key, text): mistake_in(key, value_of(text)) for key, text in ROWS}
    assert len(told) > 80
    assert {row: message for row, message in told.items() if not is_clear(row[0], message)} == {}


GOOD = {
    "trainer.max_steps": "1 -1 20",
    "trainer.max_epochs": "null -1 3",
    "trainer.limit_train_batches": "1.0 0.1 7 null",
    "trainer.limit_val_batches": "0 0.0 1.0 5",
    "trainer.val_check_interval": "200 0.5 '00:01:00:00' null",
    "trainer.gradient_clip_val": "null 0 1.5 1",
    "trainer.devices": "auto 1 2 -1 [0,1]",
    "seed": "0 4294967295 ${data.seed}",
    "data.path": "null my.txt '☃.txt'",
    "model.learning_rate": "1e-3 0 1",
    "model.lora": "null {rank:4}",
    "model.lora.target_modules": "null [c_attn] [q_proj,v_proj]",
    "offload.parameters": "keep offload auto",
    "offload.gradients": "keep offload auto",
    "model.config.vocab_size": "${data.vocab_size} 512",
    "offload.master_weights": "true false",
    "offload.activation_budget": "null 1.5GiB 12345",
    "hardware.host_memory": "auto 0 2GiB",
    "trainer.max_time": "00:00:01:00",
}


def test_a_good_value_is_taken():
    for key, texts in GOOD.items():
        for text in texts.split():
            assert mistake_in(key, text if is_interpolation(text) else value_of(text)) is None, (key, text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.max_steps=abc"],
            "trainer.max_steps=abc: expected a whole number of at least 1, or -1, got the text",
        ),
        (["seed=-1"], "seed=-1: expected a whole number from 0 to 4294967295, got -1; for example seed=1"),
        (["offload.policy.activation_budget=-3"], "Did you mean offload.activation_budget?"),
        (["trainer.strategy.policy.activation_budget=-3"], "is one value. Did you mean offload.activation_budget?"),
        (["offload.activation_budget=-3"], "offload.activation_budget=-3 is negative. Write bytes as an integer"),
        (["seed=1,-1"], "seed=-1: expected"),
        (["~model"], "~model: every run needs it. Allowed: model=OPTION, of bert"),
        (["model=null"], "model=null: there is no such option"),
        (["+model=gpt"], "write it without the plus sign"),
        (["+seed=5"], "write it without the plus sign"),
        (["seed:1"], "'seed:1': expected KEY=VALUE"),
        (["data.path=☃.txt"], "letters beyond ASCII needs quotes of its own"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_of_the_command_line_is_found_before_any_job(overrides, message):
    with pytest.raises(ConfigMistake) as caught:
        SCHEMA.check_overrides(overrides)
    assert message in str(caught.value)


SMOKE = ["experiment=smoke", "logger=none", "callbacks=none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=-1"], r"^seed=-1: expected a whole number"),
        (["seed=1,2"], r"^seed=1,2: several values; add -m"),
        (["~seed"], r"^seed is missing"),
        (["seed=${nope}"], r"^seed: Interpolation key 'nope' not found"),
        (["trainer.max_steps=-1"], r"^trainer.limit_train_batches=-1: expected"),
        (["output_dir=/dev/null/x"], r"^output_dir=/dev/null/x: cannot be made"),
        (["model=pretrained", "model.path=/", "model.dtype=int8"], r"^model.dtype=int8: there is no such choice"),
        (["trainer.precision=abc"], r"^trainer: Precision 'abc' is invalid"),
        (["trainer.strategy=ddpp"], r"^trainer: You selected an invalid strategy name"),
        (["+trainer.max_time=abc"], r"^trainer: .*'abc'.* is not a valid duration"),
        (["offload=recompute", "offload.memory_budget=1GiB"], r"^offload.memory_budget='1GiB' .* would be ignored"),
        (["offload=recompute", "offload.recompute_modules=[NoSuch]"], r"^offload.recompute_modules=.*NoSuch"),
        (["offload=ssd", "hardware.paths=[/dev/null]"], r"^/dev/null exists and is no directory"),
        (["model.config.n_head=5"], r"^model.config: GPT2Config cannot be built: .*divisible"),
        (["model=llama", "model.config.num_key_value_heads=3"], r"^model.config.num_key_value_heads=3 does not divide"),
        (["data=text", "data.path=/none.txt"], r"^data.path='/none.txt' is no file"),
        (["data.num_batches=1000000000000"], r"do not fit in memory; ask for fewer$"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_ends_with_one_sentence(arguments, message, monkeypatch, tmp_path, capsys):
    """In this process, through the command's own entry."""
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    given = {argument.split("=")[0] for argument in arguments}
    smoke = SMOKE[1:] if "data" in given else SMOKE  # that experiment sets what only synthetic data have
    monkeypatch.setattr(sys, "argv", ["train", *smoke, *arguments])
    with pytest.raises(SystemExit, match=message) as caught:
        main()
    assert isinstance(caught.value.code, str)  # which Python prints, and ends with 1
    assert "Traceback" not in caught.value.code + capsys.readouterr().err
