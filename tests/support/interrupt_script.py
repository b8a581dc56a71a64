"""A child process in which Ctrl-C comes at chosen or random moments of a training. Prints one line of JSON.

Run by ``tests/test_interrupts.py``: a hang or a crash is then seen from outside.

Real signals: a timer's handler, or a profiler, sends SIGINT. Its handler raises ``KeyboardInterrupt``, as Python's own
does, now or when a critical section is over. Chosen moments: Python looks for signals where a function is entered and
where a call into C returns (and where a loop jumps back, which is next to one of these in all of our loops). A profiler
is called at these very points, and sends it once at each point of the package's code; at two of each critical section,
since all of its points are left alike. A tracer of lines would not do: it is called before the lock of a ``with`` block
is given back, where Python looks for no signal.
"""

import argparse
import dis
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
import zlib
from pathlib import Path

import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.planning import update_memory
from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO

GUARD = deferring_interrupts.__enter__.__code__.co_filename
SENT_S = [0.0]
"""When the last SIGINT was sent."""
PACKAGE = str(Path(__file__).resolve().parents[2] / "lightning_ssd")
HANG_S = 30.0
GRACE_S = 5.0
WIDTH = 64
KINDS = {
    "offload": {"activations": "offload"},
    "budget": {"activations": "auto", "activation_budget": 160 << 10},
    "states": {"activations": "offload", "optimizer_states": "offload"},
    "everything": {
        "activations": "offload",
        "parameters": "offload",
        "gradients": "offload",
        "optimizer_states": "offload",
    },
    "recompute": {"activations": "recompute"},
    "plan": {"activations": "auto", "activation_budget": 160 << 10, "recompute_modules": "blocks"},
}
REMEMBERING = ("recompute", "plan")


class Remembering(torch.nn.Module):
    """Draws, and changes a buffer and an attribute, in each forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)
        self.dropout = torch.nn.Dropout(0.1)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        factor = (1 + random.random()) * self.num_calls
        return torch.tanh(self.dropout(self.norm(self.linear(x))) * factor)


AFTER_FORWARD = []
"""What :func:`state_of` gave there, while backward runs."""


def state_of(model):
    """What blocks remember, and where random numbers are."""
    remembered = [getattr(block, "num_calls", 0) for block in model.children()]
    buffers = [buffer.tolist() for buffer in model.buffers()]
    return repr((buffers, remembered, zlib.crc32(repr(random.getstate()).encode())))


def make_model(kind="offload"):
    torch.manual_seed(1)
    if kind in REMEMBERING:
        return torch.nn.Sequential(*(Remembering() for _ in range(3)))
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(3)]
    return torch.nn.Sequential(*layers)


def batch():
    torch.manual_seed(2)
    return torch.randn(128, WIDTH)


def gradients(model, offloader):
    """One pass; its bits."""
    model.zero_grad()
    AFTER_FORWARD.clear()
    random.seed(3)
    if offloader is None:
        model(batch()).square().mean().backward()
    else:
        with offloader.saved_tensors():
            loss = model(batch()).square().mean()
        AFTER_FORWARD.append(state_of(model))
        loss.backward()
        AFTER_FORWARD.clear()
        offloader.end_backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


class Trial:
    """One training that is interrupted, and what is left of it."""

    def __init__(self, directory, kind):
        self.directory = directory
        self.kind = kind
        AFTER_FORWARD.clear()
        self.offloader = None
        self.model = make_model(kind)
        self.has_updated = False
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def run(self):
        """Everything that a training does, from opening to closing."""
        hardware = HardwareProfile(paths=[self.directory / "spill"], allow_unsuitable_paths=True, host_memory=0)
        policy = OffloadPolicy(min_tensor_bytes=1024, **KINDS[self.kind])
        self.offloader = Offloader(policy=policy, hardware=hardware)
        self.offloader.open(self.model)
        self.optimizer = self.offloader.offload_optimizer(self.optimizer)
        for _ in range(3):
            gradients(self.model, self.offloader)
            self.has_updated = True
            self.optimizer.step()
            self.offloader.drain_metrics()
        checkpoint = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        StreamedCheckpointIO().save_checkpoint(checkpoint, self.directory / "last.ckpt")
        del checkpoint
        self.offloader.close()

    def go_on(self):
        """After the interrupt: another pass has the bits of plain training, and closing works."""
        offloader = self.offloader
        if not self.has_updated and not all(
            map(torch.equal, self.model.parameters(), make_model(self.kind).parameters())
        ):
            return "weights have changed without an update"
        if offloader is not None and offloader.is_open:
            if AFTER_FORWARD and state_of(self.model) != AFTER_FORWARD[0]:
                return f"backward has left {state_of(self.model)} instead of {AFTER_FORWARD[0]}"
            buffers = [buffer.clone() for buffer in self.model.buffers()]
            expected = gradients(self.model, None)
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            if self.kind in REMEMBERING:
                for block in self.model.children():
                    block.num_calls -= 1
            got = gradients(self.model, offloader)
            if not all(map(torch.equal, expected, got)):
                return "the next pass has other bits"
            try:
                # PyTorch's own, interrupted while it makes its states, has lost some of them.
                if self.kind in ("states", "everything"):
                    self.optimizer.step()
            except RuntimeError as error:
                if "an earlier step of this optimizer is incomplete" not in str(error):
                    raise
            offloader.close()
        self.offloader = self.optimizer = None
        return None


def left(directory, before):
    """Threads, descriptors and files that are there still."""
    found = [f"thread {t.name}" for t in threading.enumerate() if t is not threading.main_thread()]
    for number in set(os.listdir("/proc/self/fd")) - before:
        try:
            found.append(f"descriptor of {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # that of the listing
            continue
    try:
        names = [path.name for path in directory.rglob("*")]
    except FileNotFoundError:  # a directory that goes just now
        return left(directory, before)
    return found + [f"file {name}" for name in names if name not in ("spill", "last.ckpt")]


class Report:
    def __init__(self):
        self.counts = {"trials": 0, "interrupted": 0, "obeyed": 0, "slowest_s": 0.0}
        self.faults = []
        self.run_s = 0.0
        sys.unraisablehook = lambda told: self.faults.append(f"ignored: {told.exc_value!r} in {told.object!r}")

    def fault(self, where, what):
        self.faults.append(f"{where}: {what}")
        print(self.faults[-1], file=sys.stderr, flush=True)  # should the next one hang

    def trial(self, directory, kind, arm, disarm):
        """Returns whether the interrupt came."""
        before = set(os.listdir("/proc/self/fd"))
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        trial, caught, began_s, run_began_s = Trial(directory, kind), None, 0.0, time.perf_counter()
        where = None  # the interrupt may come between the trial and disarm()
        try:
            try:
                arm()
                trial.run()
            finally:
                where = disarm()
                self.run_s = time.perf_counter() - run_began_s
        except KeyboardInterrupt as error:
            began_s = time.perf_counter() - error.args[0] if error.args else 0.0
            caught = error
        except BaseException as error:
            caught = error
        where = disarm() if where is None else where
        self.counts["trials"] += 1
        if where is not None:
            where = f"[{kind}] {where}"
            self.counts["interrupted"] += 1
            if isinstance(caught, KeyboardInterrupt):
                self.counts["obeyed"] += 1
                self.counts["slowest_s"] = max(self.counts["slowest_s"], began_s)
                if began_s > GRACE_S:
                    self.fault(where, f"obeyed after {began_s:.1f} s")
            else:
                self.fault(where, "swallowed" if caught is None else f"became {caught!r}")
        elif caught is not None:
            self.fault("no interrupt", "".join(traceback.format_exception(caught)))
        if caught is not None:
            traceback.clear_frames(caught.__traceback__)
        caught = None
        if where is not None and "/torch/" in where:
            torch.set_grad_enabled(True)  # PyTorch's own decorators, interrupted as they put it back, leave it off
        try:
            what = trial.go_on()
            if what is not None:
                self.fault(where or "no interrupt", what)
        except BaseException as error:
            self.fault(where or "no interrupt", "".join(traceback.format_exception(error)[-6:]))
            traceback.clear_frames(error.__traceback__)
        del trial
        gc.collect()
        deadline_s = time.monotonic() + GRACE_S
        while (rest := left(directory, before)) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if rest:
            self.fault(where or "no interrupt", f"left {rest}")
        faulthandler.cancel_dump_traceback_later()
        return where is not None


def by_timer(report, directory, kinds, num, seed):
    """So many interrupts at random moments."""
    draw = random.Random(seed)
    duration_s = {}
    for kind in kinds:
        for _ in range(3):
            report.trial(directory, kind, lambda: None, lambda: None)
            duration_s[kind] = report.run_s
    fired = []

    def handler(number, frame):
        code = None if frame is None else frame.f_code
        running = [one.f_code for one, _ in traceback.walk_stack(frame)]
        if any(one.co_filename == weakref.__file__ and one.co_name == "remove" for one in running):
            # Python ignores what a weak reference's callback raises. PyTorch's checkpoint has one, without us as well.
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
            return
        fired.append("" if code is None else f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        send_interrupt()

    signal.signal(signal.SIGALRM, handler)

    def disarm():
        signal.setitimer(signal.ITIMER_REAL, 0)
        return fired[-1] if fired else None

    while report.counts["interrupted"] < num and report.counts["trials"] < 3 * num:
        kind = draw.choice(kinds)
        fired.clear()
        delay_s = draw.uniform(1e-5, duration_s[kind])
        report.trial(directory, kind, lambda: signal.setitimer(signal.ITIMER_REAL, delay_s) and None, disarm)  # noqa: B023


def send_interrupt():
    """Press Ctrl-C."""
    SENT_S[0] = time.perf_counter()
    signal.raise_signal(signal.SIGINT)


def obey(number, frame):
    """Handle SIGINT as Python does, and tell when it was sent."""
    raise KeyboardInterrupt(SENT_S[0])


class Points:
    """Sends an interrupt once at each point of our code at which Python would look for signals, one per trial."""

    def __init__(self, share):
        self.seen = set()
        self.share = share
        self.where = None
        self._section = None
        self._num_sections = 0

    def start(self):
        self.where = self._section = None
        self._num_sections = 0
        sys.setprofile(self.look)

    def stop(self):
        sys.setprofile(None)
        return self.where

    def look(self, frame, event, arg):
        if event == "call" or event in ("c_return",):
            self.at(frame, event)

    def key(self, frame, event):
        """What makes two points the same."""
        section = signal.getsignal(signal.SIGINT)
        if isinstance(section, deferring_interrupts) and frame.f_code.co_filename != GUARD:
            self._num_sections += section is not self._section
            self._section = section
            return self._num_sections, event
        return frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lasti, event

    def at(self, frame, event):
        code = frame.f_code
        if self.where is not None or not code.co_filename.startswith(PACKAGE) or may_be_closing(frame):
            return
        point = self.key(frame, event)
        if point in self.seen:
            return
        self.seen.add(point)
        if (
            len(point) > 2
            and zlib.crc32(f"{code.co_qualname} {frame.f_lasti} {event}".encode()) % self.share[1] != self.share[0]
        ):
            return
        self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname} {event}"
        sys.setprofile(None)
        send_interrupt()


def may_be_closing(frame):
    """Whether this is a generator expression that goes on after a value: so it looks while one is dropped halfway, too,
    where Python looks for no signal. An interrupt there would come out of the call around it, as at its begin.
    """
    code = frame.f_code
    return code.co_name == "<genexpr>" and code.co_code[frame.f_lasti] == dis.opmap["YIELD_VALUE"]


def by_tracer(report, directory, kinds, share):
    """At every point once, for each kind of training."""
    for kind in kinds:
        report.trial(directory, kind, lambda: None, lambda: None)
        points = Points(share)
        while report.trial(directory, kind, points.start, points.stop):
            pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["timer", "tracer"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1))
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, obey)
    report, kinds = Report(), args.kinds.split(",")
    update_memory._MIN_SUBGROUP_BYTES = 32 << 10  # so that there are some
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        (Path(directory) / "spill").mkdir()
        if args.how == "timer":
            by_timer(report, Path(directory), kinds, args.num, args.seed)
        else:
            by_tracer(report, Path(directory), kinds, tuple(args.share))
    print(json.dumps({**report.counts, "faults": report.faults}))


if __name__ == "__main__":
    main()
