"""``lightning-ssd plan``: what training a model would take, in memory, time and drives, before it is trained."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from lightning_ssd._environment import chosen_paths
from lightning_ssd.cli.conf_files import Described, batch_maker, load_hardware, model_builder
from lightning_ssd.cli.model_trace import ModelTrace, trace_model
from lightning_ssd.cli.output import (
    FAILED,
    CommandError,
    columns_table,
    console,
    facts_table,
    reported_errors,
    show_error,
)
from lightning_ssd.common.formatting import as_setting, escape_control, format_sizes, pluralize
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.validation import parse_size
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.planning.candidates import windows
from lightning_ssd.planning.lifetimes import Lifetimes
from lightning_ssd.planning.machine_profile import MachineProfile
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, PlanObjective, Prediction, TierRates
from lightning_ssd.planning.planner import TOLERANCE, BudgetTooSmall, make_plan
from lightning_ssd.planning.recompute_trace import recomputable, recomputed
from lightning_ssd.planning.simulator import predict
from lightning_ssd.planning.trace import Trace
from lightning_ssd.planning.what_fits import Choice, Fit, ModelSize, choose, fit, largest
from lightning_ssd.scheduling.memory_limits import MIN_RELIEF
from lightning_ssd.storage.factory import open_backend
from lightning_ssd.tiers.bandwidth_meter import measure_rates
from lightning_ssd.wear.endurance import DAY_S, life_days

__all__ = ["plan"]

_GIB, _GB = 1 << 30, 10**9
_HOST_SHARE = 4
"""One part in so many of the host's memory is for host tiers, as in training."""
_OPERATIONS_PER_BYTE, _OPERATIONS_PER_BYTE_OF_A_CPU = 80.0, 10.0
"""Operations per byte of the memory's rate that training reaches:
118, 80 and 66 for an H100, A100 and RTX 4090 by their data sheets
(0.4 of 989, 312 and 165 teraFLOPS; 3.35, 1.56 and 1.01 TB/s). Predictions for a CPU are the same from 5 to 20."""
_TIMED_SIZE = 1024
_NUM_FIXED = 4
"""Modes that come without a planner, where there are blocks."""
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class _Task:
    """The model and machine to predict for."""

    model: ModelTrace
    tiers: Machine
    drives: TierRates
    described: Described
    basis: str
    """Where the compute time comes from."""
    retrace: Callable[[int, int], ModelTrace]
    """Traces another batch and sequence."""


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="An option of conf/model, package.module:name (class or function), or a config.json of Hugging Face.",
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Sequences per device and pass.")],
    sequence: Annotated[int, typer.Option(min=1, help="Tokens in each, as in data.sequence_length.")],
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="For saved activations: 40% of what keeping holds, or a size such as 4GiB."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="An option of conf/hardware, or a YAML file. Default: this machine, timed (CPU only)."
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices that share the drives; default: as in the profile.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="package.module:name of a DataModule: batches are like its first one."),
    ] = None,
    write_rate: Annotated[str | None, typer.Option(metavar="SIZE", help="A drive's per second, such as 5GB.")] = None,
    read_rate: Annotated[str | None, typer.Option(metavar="SIZE", help="A drive's per second, such as 7GB.")] = None,
    find_largest: Annotated[
        bool, typer.Option("--largest", help="Also search the largest batch, and the longest sequence, that fit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for programs.")] = False,
) -> None:
    """Predict peak memory of saved activations, step time, stalls, bytes and drive life, before anything is trained.

    The model runs once with tensors that have sizes and no bytes, so that any size works on any machine. A step is
    forward and backward; what is predicted is what OffloadPolicy(activations=...) of that name would do. A second table
    tells what weights, gradients and optimizer states take and move, by what of them waits. The last lines are the
    fastest policy that fits, to paste.
    """
    with reported_errors(), StatusLine(f"Predicting {model}", delay_s=0):
        make_batch = None if data is None else batch_maker(data)
        build = partial(model_builder, model)
        build(sequence)  # a mistyped name is told before anything is measured
        described = load_hardware(hardware) if hardware else _this_machine()
        given: dict[str, Any] = {} if devices is None else {"num_devices": devices}
        for name, rate in (("write", write_rate), ("read", read_rate)):
            if rate is not None:
                given[f"drive_{name}_gb_per_s"] = parse_size(rate, name=f"--{name}-rate") / _GB
        machine = replace(described.machine, **given)
        task = _make_task(build, make_batch, batch, sequence, replace(described, machine=machine))
        keep_bytes = task.model.trace.saved_peak_bytes
        limit = None if budget is None else _budget_bytes(budget, keep_bytes)
        problems: list[str] = []
        rows = list(_modes(task, limit, problems))
        found = {mode: prediction for mode, prediction, _ in rows}
        sizes = _largest(task, batch, sequence) if find_largest else {}
    within = {mode: one for mode, one in found.items() if limit is None or one.peak_bytes <= limit}
    answer = _answer(task, within, limit) if within else ""
    if as_json:
        typer.echo(json.dumps({**_as_json(task, rows, problems), "answer": answer, "largest": sizes}, indent=2))
    else:
        _show(task, found, f"{model}, batch {batch} x {sequence}")
        others = {"batch": f"of {sequence} tokens each", "sequence": f"in a batch of {batch}"}
        for name, size in sizes.items():
            more = f"{size['beyond']} {size['reason']}"
            answer += f"\nLargest {name} {others[name]}: {size['largest']} ({more})"
            answer += f":\n  {size['policy']}" if size["policy"] else ""
        for line in f"\n{answer}".splitlines() if answer else ():
            console().print(line, soft_wrap=line.startswith("  "), markup=False)  # what is to be pasted stays whole
        for problem in problems:
            show_error(problem)
    if problems:
        raise typer.Exit(FAILED)


# -- the ways to train -------------------------------------------------------------------------------------------------


def _modes(task: _Task, budget_bytes: int | None, problems: list[str]) -> Iterator[tuple[str, Prediction, int]]:
    """Yield each way to treat activations, as the simulator predicts it for one device, and its recomputed blocks.

    Args:
        task: the model and the machine.
        budget_bytes: for the planned ones; ``None``: the lowest peak within the default slowdown.
        problems: gets what no plan can do.
    """
    trace, tiers = task.model.trace, task.tiers
    blocks = frozenset(recomputable(trace))
    yield "keep", _kept(trace, tiers), 0
    yield "offload", _moved(trace, tiers), 0
    if blocks:
        again, _ = recomputed(trace, blocks)
        yield "recompute", _kept(again, tiers), len(blocks)
        yield "recompute_offload", _moved(again, tiers), len(blocks)
    # Without a budget training recomputes nothing with "auto", whatever it may.
    for mode in ("auto", "auto, blocks") if blocks and budget_bytes is not None else ("auto",):
        goal = PlanObjective(
            max_slowdown=OffloadPolicy().max_slowdown,
            min_relief=MIN_RELIEF,
            budget_bytes=budget_bytes,
            recompute=mode != "auto",
        )
        try:
            made = make_plan(trace, tiers, goal)
        except BudgetTooSmall as error:
            least, asked = (f"{nbytes / _GIB:.3f} GiB" for nbytes in (error.smallest_bytes, budget_bytes or 0))
            problems.append(f"expected a budget of at least {least} for {mode}; got {asked}; raise --budget")
        else:
            yield mode, made.prediction, len(made.recompute)


def _kept(trace: Trace, tiers: Machine) -> Prediction:
    kept = [Placement.KEEP] * len(trace.storages)
    return predict(Lifetimes(trace), kept, tiers, limit_bytes=None, ahead_bytes=0)


def _moved(trace: Trace, tiers: Machine) -> Prediction:
    """All that can be, with the least look-ahead that costs no time."""
    placements = [Placement.SSD if storage.movable else Placement.KEEP for storage in trace.storages]
    sizes, lives = [storage.nbytes for storage in trace.storages if storage.movable], Lifetimes(trace)
    played = [predict(lives, placements, tiers, limit_bytes=None, ahead_bytes=ahead) for ahead in windows(sizes)]
    fastest_s = min(prediction.step_s for prediction in played)
    return min((p for p in played if p.step_s <= TOLERANCE * fastest_s), key=lambda p: p.peak_bytes)


# -- what is predicted for ---------------------------------------------------------------------------------------------


def _make_task(
    build: Callable[[int], Callable[[], nn.Module]],
    make_batch: Callable[[int, int], Any] | None,
    batch: int,
    sequence: int,
    described: Described,
) -> _Task:
    """Trace the model for a machine, which need not be here."""
    machine, name = described.machine, escape_control(described.name)
    tiers, is_accelerator = machine.tiers(machine.num_devices), machine.is_accelerator
    drives = None if tiers is None else tiers.ssd
    if tiers is None or drives is None:
        raise CommandError(
            "drive_write_gb_per_s and drive_read_gb_per_s",
            f"hardware {name} leaves them open",
            "give --write-rate 5GB --read-rate 7GB, as `lightning-ssd bench DIR` or the drive's data sheet tells, or "
            "take a profile with drives, such as dgx_h100",
        )

    def trace(flops_per_s: float, batch: int, sequence: int) -> ModelTrace:
        return trace_model(
            build(sequence),
            batch=batch,
            sequence=sequence,
            flops_per_s=flops_per_s,
            precision=machine.precision,
            min_tensor_nbytes=OffloadPolicy().min_tensor_nbytes,
            fused_attention=is_accelerator,
            operations_per_byte=_OPERATIONS_PER_BYTE if is_accelerator else _OPERATIONS_PER_BYTE_OF_A_CPU,
            make_batch=make_batch,
        )

    flops_per_s = machine.flops_per_s
    if flops_per_s is None:
        raise CommandError(
            "device_peak_tflops, for the time of a step",
            f"hardware {name} leaves it open",
            "set it under machine: in the profile; without --hardware this machine is timed",
        )
    basis = (
        f"{flops_per_s / 1e12:.4g} TFLOPS per device, estimated as {machine.compute_efficiency:.0%} of "
        f"{machine.device_peak_tflops:.4g}"
    )
    retrace = partial(trace, flops_per_s)
    if machine.link_gb_per_s is not None and machine.host_memory_gb is not None:  # a CPU's memory is the device's
        rate = machine.link_gb_per_s * _GB
        capacity = int(machine.host_memory_gb * _GB / _HOST_SHARE / machine.num_devices)
        host = TierRates(write_bytes_per_s=rate, read_bytes_per_s=rate, capacity_bytes=capacity)
        tiers = replace(tiers, host=host)
    return _Task(retrace(batch, sequence), tiers, drives, described, basis, retrace)


def _this_machine() -> Described:
    """Describe a machine without an accelerator, by trials of its CPU and its drives."""
    if torch.accelerator.is_available():
        raise CommandError(
            "--hardware on a machine with an accelerator",
            "none",
            "name a profile such as h100 with the rates that `lightning-ssd bench` tells; only CPUs are timed here",
        )
    hardware = HardwareProfile()
    paths = chosen_paths(hardware, Path.cwd())
    device = torch.device("cpu")
    backend, _ = open_backend(hardware.backend, directories=paths, device=device)
    try:
        rates = measure_rates(backend, paths)
    finally:
        backend.close()
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GB
    machine = MachineProfile(
        accelerator="cpu",
        device_memory_gb=memory_gb,
        device_peak_tflops=_timed_tflops(),
        host_memory_gb=memory_gb,
        num_drives=len(paths),
        drive_write_gb_per_s=rates.write_per_s / len(paths) / _GB,
        drive_read_gb_per_s=rates.read_per_s / len(paths) / _GB,
    )
    return Described("this machine (a matrix product was timed)", hardware, machine)


def _timed_tflops() -> float:
    """Time a matrix product on this CPU: the best of some, because other work only makes one slower."""
    one = torch.rand(_TIMED_SIZE, _TIMED_SIZE)
    seconds: list[float] = []
    for _ in range(5):
        begin_s = time.perf_counter()
        torch.mm(one, one)
        seconds.append(time.perf_counter() - begin_s)
    return 2 * _TIMED_SIZE**3 / min(seconds) / 1e12


def _budget_bytes(budget: str, keep_bytes: int) -> int:
    match = _PERCENT.fullmatch(budget)
    try:
        nbytes = parse_size(budget, name="--budget") if match is None else int(float(match[1]) / 100 * keep_bytes)
    except ConfigError as error:
        raise ConfigError(f"{error}, or a part such as 40%") from None
    if not nbytes:
        raise CommandError("a budget above 0", budget, "take a part such as 40%, or a size such as 4GiB")
    return nbytes


def _life(task: _Task, written_bytes: float, step_s: float) -> float | None:
    """Return days until the first drive has been written its ``drive_endurance``; ``None``: that is unknown."""
    machine, endurance = task.described.machine, task.described.hardware.drive_endurance_nbytes
    if endurance is None:
        return None
    return life_days(endurance, written_bytes * machine.num_devices / machine.num_drives / step_s * DAY_S)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _fixed_bytes(size: ModelSize) -> int:
    return round(size.weight_bytes + size.trained_bytes + size.state_bytes)


_ALL = "states, weights, gradients"
_AWAY = {
    "nothing": (),
    "frozen weights": ("parameters",),
    "states": ("optimizer_states",),
    "states, weights": ("parameters", "optimizer_states"),
    _ALL: ("parameters", "gradients", "optimizer_states"),
}
"""Row of the second table -> the settings that offload."""


def _fits(task: _Task) -> Iterator[tuple[str, Fit]]:
    """Yield the memory of weights, gradients and states, by the part that is offloaded."""
    machine = task.described.machine
    is_alone = machine.num_devices == 1
    for part, names in _AWAY.items():
        away: dict[str, Any] = {name: "offload" if name in names else "keep" for name in _AWAY[_ALL]}
        found = fit(task.model.size, num_directories=machine.num_drives, **away)
        if part == "frozen weights":
            is_there = found.waiting_bytes > 0 and (is_alone or not machine.is_accelerator)
        else:
            is_there = is_alone or part in ("nothing", "states")
        if is_there:
            yield part, found


def _choose(task: _Task, modes: Mapping[str, Prediction]) -> Choice | None:
    """Return the fastest way to train that fits, else the smallest; ``None``: the device's memory is unknown."""
    room_gb = task.described.machine.device_memory_gb
    return None if room_gb is None else choose(modes, dict(_fits(task)), room_bytes=room_gb * _GB, drives=task.drives)


def _answer(task: _Task, found: Mapping[str, Prediction], limit: int | None) -> str:
    """Return the fastest policy that fits the device, or why none does; empty where its memory is unknown."""
    room_gb, best = task.described.machine.device_memory_gb, _choose(task, found)
    if room_gb is None or best is None:
        return ""
    held = f"{best.held_bytes / _GIB:.3g}"
    if not best.fits:
        return (
            f"Nothing fits {room_gb * _GB / _GIB:.3g} GiB, because even {_policy(best, limit)} takes {held} GiB "
            "without temporaries: take a smaller batch or sequence, or more devices."
        )
    days = _life(task, best.written_bytes, best.step_s)
    return (
        f"Fits {room_gb * _GB / _GIB:.3g} GiB ({held}, without temporaries), at most {_seconds(best.step_s)} s a step, "
        f"limited by {best.limit}; {best.written_bytes / _GB:.3g} GB written a step, drive life {_life_text(days)}:\n"
        f"  {_policy(best, limit)}"
    )


def _try_size(task: _Task, batch: int, sequence: int) -> tuple[bool, str]:
    """Return whether a batch and sequence fit, with the policy to write or the reason."""
    try:
        tried = replace(task, model=task.retrace(batch, sequence))
    except CommandError as error:
        return False, f"fails: {error}"
    best = _choose(tried, {mode: prediction for mode, prediction, _ in islice(_modes(tried, None, []), _NUM_FIXED)})
    if best is None:
        raise CommandError(
            "machine.device_memory_gb, for --largest",
            f"hardware {escape_control(task.described.name)} leaves it open",
            "set it under machine: in the profile",
        )
    return best.fits, _policy(best, None) if best.fits else f"takes {best.held_bytes / _GIB:.3g} GiB at least"


def _largest(task: _Task, batch: int, sequence: int) -> dict[str, dict[str, Any]]:
    """Return the largest batch and the longest sequence that fit, each with its policy, and what is wrong with more."""
    found = {}
    for name, start in (("batch", batch), ("sequence", sequence)):
        tried: dict[int, tuple[bool, str]] = {}

        def fits(number: int, name: str = name, tried: dict[int, tuple[bool, str]] = tried) -> bool:
            tried[number] = _try_size(task, **{"batch": batch, "sequence": sequence, name: number})
            return tried[number][0]

        number = largest(fits, start)
        beyond = min(more for more in tried if more > number)
        policy = tried[number][1] if number else None
        found[name] = {"largest": number, "policy": policy, "beyond": beyond, "reason": tried[beyond][1]}
    return found


def _policy(choice: Choice, limit: int | None) -> str:
    """Return the line to write."""
    mode, _, blocks = choice.mode.partition(", ")
    settings = [f'activations="{mode}"']
    settings += [f"activation_budget={as_setting(limit)}"] if mode == "auto" and limit is not None else []
    settings += ['recompute_modules="blocks"'] if blocks else []
    settings += [f'{name}="offload"' for name in _AWAY[choice.waits]]
    return f"OffloadPolicy({', '.join(settings)})"


def _show(task: _Task, found: Mapping[str, Prediction], title: str) -> None:
    out = console()
    out.print(facts_table(_facts(task, title)))
    out.print()
    out.print(_table(task, found))
    out.print()
    out.print(_fits_table(task))
    notes = ["Predicted, not measured. A step is forward and backward of one batch on each device."]
    room = task.described.machine.device_memory_gb
    mark = "" if room is None else f"; ! marks more than {room * _GB / _GIB:.3g} GiB"
    notes.append(f"'in all' adds weights, gradients and AdamW's states, not temporaries{mark}.")
    notes.append("'here': weights, gradients and AdamW's states on the device; 'moving': drive time of a step.")
    if task.described.machine.num_devices > 1:
        notes.append(
            "Trained weights and gradients do not wait where several devices have the same model; on CPUs, shards of "
            "them do (SSDOffloadFSDPStrategy): see --devices 1 for what waits of one device."
        )
    if task.described.machine.link_gb_per_s is None:
        notes.append("On a CPU moving also takes time to map memory anew, which is not in these numbers.")
    out.print()
    out.print("\n".join(notes))


def _facts(task: _Task, title: str) -> Iterator[tuple[str, list[str]]]:
    model, size, trace, machine = task.model, task.model.size, task.model.trace, task.described.machine
    yield "Model", [f"{escape_control(title)}, {machine.precision}: {model.num_trained:,} trained parameters"]
    (saved,) = format_sizes(trace.saved_peak_bytes)
    storages = pluralize(len(trace.storages), "storage", "storages")
    blocks = pluralize(len(trace.blocks), "block", "blocks")
    least = OffloadPolicy().min_tensor_bytes
    yield "Pass", [f"{model.flops / 1e12:.3g} TFLOP; {saved} saved in {storages} of {least} or more; {blocks}"]
    weights, gradients, states = format_sizes(*map(round, (size.weight_bytes, size.trained_bytes, size.state_bytes)))
    yield "Besides", [f"weights {weights}, gradients {gradients}, AdamW's states {states} per device"]
    write, read = task.drives.write_bytes_per_s / _GB, task.drives.read_bytes_per_s / _GB
    drives = pluralize(machine.num_drives, "drive", "drives")
    shared = f" shared by {machine.num_devices} devices, for each of them" if machine.num_devices > 1 else ""
    rates = f"{drives}{shared}: {write:.3g} GB/s written, {read:.3g} GB/s read"
    yield "Machine", [f"{escape_control(task.described.name)}: {task.basis}", rates]


def _table(task: _Task, found: Mapping[str, Prediction]) -> Table:
    room = task.described.machine.device_memory_gb
    predictions = list(found.values())
    totals = [prediction.peak_bytes + _fixed_bytes(task.model.size) for prediction in predictions]
    marks = ["!" if room is not None and total > room * _GB else "" for total in totals]
    columns = {
        "activations=": list(found),
        "peak\nGiB": _column([prediction.peak_bytes for prediction in predictions], _GIB, 2),
        "in all\nGiB": [mark + total for mark, total in zip(marks, _column(totals, _GIB, 1), strict=True)],
        "step\ns": [_seconds(prediction.step_s) for prediction in predictions],
        "stalls\ns": [_seconds(prediction.stall_s) for prediction in predictions],
        "to SSD\nGB": _column([prediction.written_bytes for prediction in predictions], _GB, 1),
        "to host\nGB": _column([prediction.host_bytes for prediction in predictions], _GB, 1),
        "drive\nlife": [_life_text(_life(task, one.written_bytes, one.step_s)) for one in predictions],
    }
    return columns_table(columns)


def _fits_table(task: _Task) -> Table:
    rows: dict[Fit, str] = {}
    for name, found in _fits(task):
        rows.setdefault(found, name)  # of a small model nothing more may wait: a row is not repeated
    names, fits = list(rows.values()), list(rows)
    columns = {
        "of the model waits": names,
        "here\nGiB": _column([fit.device_bytes for fit in fits], _GIB, 2),
        "waits\nGiB": _column([fit.waiting_bytes for fit in fits], _GIB, 2),
        "read\nGB": _column([fit.read_bytes for fit in fits], _GB, 1),
        "written\nGB": _column([fit.written_bytes for fit in fits], _GB, 1),
        "moving\ns": [_seconds(fit.io_s(task.drives)) for fit in fits],
    }
    return columns_table(columns)


def _column(sizes: Sequence[float], unit: float, digits: int) -> list[str]:
    """Sizes below each other, with so many digits behind the point, or so many that two of the largest one count."""
    largest = max(sizes, default=0) / unit
    if 0 < largest < 1:
        digits = min(max(digits, 1 - math.floor(math.log10(largest))), 6)
    return [f"{size / unit:.{digits}f}" for size in sizes]


def _seconds(value: float) -> str:
    return "0" if value < 5e-7 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _life_text(days: float | None) -> str:
    if days is None:
        return "unknown"
    if math.isinf(days):
        return "unused"
    if days < 1:
        return "under a day"
    return f"{days:.0f} days" if days < 365 else f"{days / 365:.1f} years"


def _as_json(task: _Task, rows: Sequence[tuple[str, Prediction, int]], problems: Sequence[str]) -> dict[str, object]:
    def life(one: Prediction) -> float | None:
        days = _life(task, one.written_bytes, one.step_s)
        return None if days is None or math.isinf(days) else days

    return {
        "machine": {"name": task.described.name, "basis": task.basis, **asdict(task.described.machine)},
        "model": {
            "flops": task.model.flops,
            "parameter_bytes": round(task.model.size.weight_bytes),
            "fixed_bytes": _fixed_bytes(task.model.size),
            "saved_peak_bytes": task.model.trace.saved_peak_bytes,
            "num_storages": len(task.model.trace.storages),
            "num_blocks": len(task.model.trace.blocks),
        },
        "modes": [
            {"mode": mode, **asdict(one), "num_recomputed": num_recomputed, "life_days": life(one)}
            for mode, one, num_recomputed in rows
        ],
        "waiting": [{"waits": name, **asdict(fits), "moving_s": fits.io_s(task.drives)} for name, fits in _fits(task)],
        "problems": problems,
    }
