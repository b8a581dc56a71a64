"""Trains on two CPU processes in Fabric, with its own DDP strategy and with ours, and compares the bits.

    python -m tests.support.fabric_script <directory> <scenario> ...

Ends without closing anything.
"""

import sys
from functools import partial

import pytest
import torch
from lightning.fabric.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from tests.support.helpers import assert_identical, raw_bytes
from tests.support.loops import Conv, Gpt, Loop, batches, loss_of, make_fabric, ours
from tests.support.processes import run_scenarios

NEVER_CLOSED = []


def plain():
    fabric = make_fabric(DDPStrategy(), devices=2)
    fabric.launch()
    return fabric


def offloading(directory, **more):
    fabric = make_fabric(ours(directory / "spill", **more), devices=2)
    fabric.launch()
    NEVER_CLOSED.append(fabric)
    return fabric


def compare(loop, directory):
    """Each process has batches of its own."""
    expected = plain()
    rank = expected.global_rank
    fabric = offloading(directory)
    assert_identical(loop(fabric, seed=rank), loop(expected, seed=rank))
    stats = fabric.strategy.stats
    assert stats.bytes_written > 0
    assert stats.bytes_read > 0
    assert fabric.strategy.offloader.optimizer_stats[0].num_steps == loop.num_steps


def uneven(directory):
    """More micro-batches in one process than in the other; nobody waits for who does not come."""

    def run(fabric):
        torch.manual_seed(3)
        model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
        for step in range(3):
            tokens = batches(4, seed=step)[: 2 + 2 * fabric.global_rank]
            for number, batch in enumerate(tokens):
                with fabric.no_backward_sync(model, enabled=number + 1 < len(tokens)):
                    fabric.backward(loss_of(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    fabric = offloading(directory, activations="auto")
    assert_identical(run(fabric), run(plain()))
    assert fabric.strategy.offloader.trace is not None, "nothing was planned"


def collectives(directory):
    fabric = offloading(directory)
    rank, model = fabric.global_rank, fabric.setup_module(Gpt())
    assert isinstance(model._forward_module, DistributedDataParallel)
    assert fabric.broadcast(f"from {rank}", src=1) == "from 1"
    assert fabric.all_gather(torch.tensor(float(rank))).tolist() == [0.0, 1.0]
    assert fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum") == 1.0
    assert (fabric.world_size, fabric.is_global_zero) == (2, rank == 0)
    # A method of the model, marked as a forward, goes through DDP and so through us.
    model.mark_forward_method("greedy")
    assert model.greedy(batches(1)[0]).shape == batches(1)[0].shape
    assert fabric.strategy.stats.bytes_saved > 0


def checkpoint(directory):
    path = directory / "state.ckpt"
    fabric = offloading(directory)
    torch.manual_seed(3)
    model, optimizer = fabric.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    batch = batches(1, seed=fabric.global_rank)[0]
    fabric.backward(loss_of(model(batch), batch))
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    other = plain()
    twin, adam = other.setup(net := Gpt(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    assert other.load(path, {"model": twin, "optimizer": adam}) == {}
    assert_identical(dict(twin.state_dict()), dict(model.state_dict()))
    assert_identical(adam.state_dict(), optimizer.state_dict())


def refused(directory):
    """Nothing is set up before the processes are there."""
    fabric = make_fabric(ours(directory / "spill"), devices=2)
    with pytest.raises(RuntimeError, match="launch"):
        fabric.setup(Gpt())


def digest(fabric):
    """What a started process hands back has to be small."""
    torch.set_num_threads(1)
    state = Loop(num_steps=2)(fabric)["state"]
    return sum(sum(raw_bytes(value).tolist()) for value in state.values())


def fork(directory):
    """Processes that are started to run a function."""
    got = make_fabric(ours(directory / "spill", start_method="fork"), devices=2).launch(digest)
    assert got == make_fabric(DDPStrategy(start_method="fork"), devices=2).launch(digest) > 0


SCENARIOS = {
    "gpt": lambda directory: compare(Loop(num_micro_batches=2, clip={"max_norm": 0.1}), directory),
    "conv": lambda directory: compare(Loop(Conv), directory),
    "uneven": uneven,
    "collectives": collectives,
    "checkpoint": checkpoint,
    "refused": refused,
    "fork": fork,
}
run = partial(run_scenarios, SCENARIOS)

if __name__ == "__main__":
    run(sys.argv[1:])
