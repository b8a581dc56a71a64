"""Ways of training that are programs of their own, bit for bit."""

import torch

from tests.parity.models import Perceptrons, floats
from tests.support.helpers import SETUPS, assert_same, open_offloader


def test_worker_processes_of_a_data_loader(tmp_path):
    """Forked children copy our threads' locks and file descriptors, and exit while the parent trains."""

    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return floats(index, 17, 40)

    def program(session):
        model = Perceptrons(num_blocks=2)
        session.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")
            for batch in loader:
                with session.saved():
                    loss = model(batch).square().mean()
                session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return losses, [parameter.detach() for parameter in model.parameters()]

    assert_same(program, tmp_path, setups=SETUPS[:2])


def test_optimizer_inside_backward(tmp_path):
    """Each weight is updated as soon as its gradient is there, while backward goes on."""

    def program(session):
        model = Perceptrons(num_blocks=3)
        session.register(model)

        def update(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for step in range(3):
            with session.saved():
                loss = model(floats(step, 60, 40)).square().mean()
            session.backward(loss)
        return [parameter.detach() for parameter in model.parameters()]

    assert_same(program, tmp_path)


def test_two_offloaders_side_by_side(tmp_path):
    """Each with its own directory; the innermost one acts."""

    def program(session):
        model = Perceptrons(num_blocks=3)
        x = floats(0, 60, 40).requires_grad_()
        with open_offloader(tmp_path / "other") as other:
            with session.saved():
                y = model(x)
                with other.saved_tensors():
                    z = y.sin() * y
                loss = z.exp().sum()
            other.flush()
            session.drain()
            loss.backward()
            assert other.stats.bytes_read > 0
        session.end()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    assert_same(program, tmp_path)
