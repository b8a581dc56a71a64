"""Models that are built inside of ``streamed_init()``, several at once: the weights of each, and nothing is left."""

import threading
from functools import partial

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from tests.parameters.test_paged_weights import policy
from tests.support.offloaders import offloaders
from tests.support.patience import PATIENCE_S
from tests.support.weight_loops import built, equal_weights, same, train


@pytest.fixture(params=["cpu", "device"])
def opened(request, spill_dir):
    with offloaders(spill_dir, partial(policy, optimizer_states="offload"), is_late=request.param == "device") as make:
        yield make


def weights_of(offloader):
    return len(offloader._parts.parameters.weights.pager.weights)


def test_threads_build_at_once_and_end_in_any_order(opened):
    torch.manual_seed(0)
    offloader, plain = opened(), built()
    begun, ended, models = threading.Event(), threading.Event(), []
    lock = threading.Lock()  # random numbers are the process' own

    def build_later():
        with offloader.streamed_init():
            begun.set()
            assert ended.wait(PATIENCE_S)
            with lock:
                models.append(built())

    thread = threading.Thread(target=build_later)
    with offloader.streamed_init():
        thread.start()
        assert begun.wait(PATIENCE_S)
        with lock:
            models.append(built())
    num = weights_of(offloader)
    assert num > 0, "of the thread that was the first one inside"
    ended.set()
    thread.join()
    assert weights_of(offloader) == 2 * num
    models.append(built())
    assert weights_of(offloader) == 2 * num, "nobody builds any more"
    for model in models:
        offloader.register_module(model)
        assert equal_weights(model, plain)
    update = lambda parameters, lr: offloader.offload_optimizer(torch.optim.AdamW(parameters, lr=lr))  # noqa: E731
    expected = train(plain)
    for model in models:
        assert same(train(model, offloader, optimizer=update), expected)


@pytest.mark.filterwarnings("ignore:13 weights stay in memory.* it waits for another offloader")  # of a device
@pytest.mark.parametrize("registers", ["inner", "outer"])
def test_two_offloaders_around_one_building(registers, opened):
    plain, expected = built(), train(built())
    inner, outer = opened(), opened()
    with outer.streamed_init(), inner.streamed_init():
        model = built()
    assert equal_weights(model, plain)
    offloader = inner if registers == "inner" else outer
    offloader.register_module(model)
    update = lambda parameters, lr: offloader.offload_optimizer(torch.optim.AdamW(parameters, lr=lr))  # noqa: E731
    assert same(train(model, offloader, optimizer=update), expected)
    train(plain)
    for one in (inner, outer):
        one.close()
        assert equal_weights(model, plain)


def test_again_inside_of_itself(opened):
    offloader = opened()
    with offloader.streamed_init():
        with offloader.streamed_init():
            first = built()
        num = weights_of(offloader)
        second = built()
        assert weights_of(offloader) == 2 * num > 0
    nn.Sequential(nn.Linear(512, 512))
    assert weights_of(offloader) == 2 * num
    assert equal_weights(first, second)
