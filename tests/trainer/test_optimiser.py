"""Adam with state of its own, beside torch's."""

import torch
from torch import nn

from rallypoint.trainer.optimiser import Adam


def test_steps_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in ((4, 3), (4,))]
    ours, theirs = [[nn.Parameter(x.clone()) for x in start] for _ in range(2)]
    adam = Adam(zip("ab", ours, strict=True), 1e-2)
    reference = torch.optim.Adam(theirs, 1e-2)
    for step in range(20):
        rate = 1e-2 / (step + 1)
        adam.learning_rate = reference.param_groups[0]["lr"] = rate
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        adam.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-7)
    assert adam.tensors()["steps"].tolist() == [20.0, 20.0]


def test_state_that_is_written_from_outside_is_what_the_next_step_uses() -> None:
    first, second = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    one, other = Adam([("p", first)], 1e-2), Adam([("p", second)], 1e-2)
    for _ in range(3):
        first.grad = torch.tensor([1.0, -2.0, 3.0])
        one.step()
    with torch.no_grad():
        second.copy_(first)
        for name, tensor in other.tensors().items():
            tensor.copy_(one.tensors()[name])
    for adam, parameter in ((one, first), (other, second)):
        parameter.grad = torch.tensor([0.5, 0.5, 0.5])
        adam.step()
    assert torch.equal(first, second)
