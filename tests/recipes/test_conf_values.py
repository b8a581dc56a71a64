"""Settings of lightning_ssd in conf/ and mistakes on a command line: each bad one is refused in one clear sentence."""

import sys

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipes.mistakes import ConfigMistake
from recipes.schema import SCHEMA, _check_value
from recipes.train import main

PARSER = OverridesParser.create()


def value_of(text):
    """As the command line's grammar reads it."""
    return PARSER.parse_override(f"key={text}").value()


def mistake_in(key, value):
    try:
        _check_value(key, value)
    except ConfigMistake as mistake:
        return str(mistake)
    return None


BAD = {
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
        return " Write " in message and "OffloadPolicy" not in message and "HardwareProfile" not in message

    told = {(key, text): mistake_in(key, value_of(text)) for key, text in ROWS}
    assert len(told) > 20
    assert {row: message for row, message in told.items() if not is_clear(row[0], message)} == {}


GOOD = {
    "offload.parameters": "keep offload auto",
    "offload.gradients": "keep offload auto",
    "offload.master_weights": "true false",
    "offload.activation_budget": "null 1.5GiB 12345 ${mine}",
    "hardware.host_memory": "auto 0 2GiB",
}


def test_a_good_value_is_taken():
    for key, texts in GOOD.items():
        for text in texts.split():
            assert mistake_in(key, text if text.startswith("$") else value_of(text)) is None, (key, text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["offload.policy.activation_budget=-3"], "Did you mean offload.activation_budget?"),
        (["trainer.strategy.policy.activation_budget=-3"], "is one value. Did you mean offload.activation_budget?"),
        (["offload.activation_budget=-3"], "offload.activation_budget=-3 is negative. Write bytes as an integer"),
        (["offload.min_tensor_bytes=1MiB,-1"], "offload.min_tensor_bytes=-1 is negative"),
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
        (["seed=1,2"], r"^seed=1,2: several values; add -m"),
        (["~seed"], r"^seed is missing"),
        (["seed=${nope}"], r"^seed: Interpolation key 'nope' not found"),
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
