"""A made step, with every kind of thing in it."""

from dataclasses import asdict

from lightning_ssd.config import OffloadPolicy
from lightning_ssd.reports.run_report import RunReport
from lightning_ssd.telemetry.step_record import Bytes, Level, Life, Move, Phase, StepRecord, Wait

MIB = 1 << 20


def made_record(**changes):
    """One second of forward, one of backward, half of update; 300 MiB saved, of which 200 leave."""
    values = {
        "step": 4,
        "length_s": 2.5,
        "phases": (Phase("forward", 0.0, 1.0), Phase("backward", 1.0, 2.0), Phase("update", 2.0, 2.5)),
        "activations": (
            Bytes(0.0, 0, 0),
            Bytes(0.2, 100 * MIB, 100 * MIB),
            Bytes(0.5, 200 * MIB, 200 * MIB),
            Bytes(0.8, 100 * MIB, 300 * MIB),
            Bytes(1.5, 200 * MIB, 200 * MIB),
            Bytes(2.0, 0, 0),
        ),
        "levels": tuple(Level(0.1 * i, (500 + (200 if 5 <= i <= 20 else 0)) * MIB) for i in range(25)),
        "moves": (
            Move("write", "ssd 0", 100 * MIB, 0.3, 0.6),
            Move("write", "ssd 1", 100 * MIB, 0.5, 0.8),
            Move("read", "ssd 0", 100 * MIB, 1.0, 1.2),
            Move("read", "ssd 1", 100 * MIB, 1.1, 1.5),
        ),
        "waits": (Wait(1.05, 1.15),),
        "lives": (
            Life(100 * MIB, 0.1, 2.0, (), "kept"),
            Life(100 * MIB, 0.2, 1.9, ((0.6, 1.0),), "ssd", "blocks.3.mlp.1 GELU"),
            Life(100 * MIB, 0.5, 1.5, (), "taken back"),
        ),
        "weight_bytes": 80 * MIB,
        "gradient_bytes": 80 * MIB,
        "state_bytes": 160 * MIB,
    }
    return StepRecord(**{**values, **changes})


def made_report(**changes):
    """A run that has moved, had a plan and nothing to complain of."""
    values = {
        "title": "Net <of tests>",
        "created": "2026-01-01T00:00:00+00:00",
        "summary": "Saved activations: at most 200 MiB resident of 300 MiB & more.",
        "num_steps": 8,
        "step_s": 2.5,
        "backend": "posix",
        "policy": asdict(OffloadPolicy(optimizer_states="offload")),
        "hardware": {"paths": ["/mnt/a"]},
        "versions": {"torch": "2.13.0"},
        "stats": {
            "resident_peak_bytes": 200 * MIB,
            "saved_peak_bytes": 3000 * MIB,
            "bytes_written": 200 * MIB,
            "failures": 0,
        },
        "plan": {
            "predicted_step_s": 2.0,
            "measured_step_s": 2.1,
            "predicted_stall_s": 0.0,
            "measured_stall_s": 0.1,
            "predicted_peak_bytes": 200 * MIB,
            "measured_peak_bytes": 200 * MIB,
            "predicted_written_bytes": 200 * MIB,
            "measured_written_bytes": 200 * MIB,
            "moved_bytes": 200 * MIB,
            "measured_overhead": 0.01,
        },
        "machine": {"write_bytes_per_s": 1e9, "read_bytes_per_s": 1e9},
        "metrics": {
            "io/stall_s": 0.1,
            "io/write_gib": 0.25,
            "io/overlap_ratio": 0.9,
            "memory/host_peak_gib": 1.5,
            "wear/written_tb": 0.002,
            "wear/drive_life_days": 4000.0,
        },
        "rows": tuple(
            {"step": float(step), "memory/activations_resident_peak_gib": 0.2, "memory/activations_saved_peak_gib": 0.3}
            for step in range(4)
        ),
        "record": made_record(waits=()),
    }
    return RunReport(**{**values, **changes})
