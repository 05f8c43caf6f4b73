"""Policy and value networks."""

import torch

from rallypoint.daemon.shared.config import PpoSection
from rallypoint.trainer.networks import ActorCritic

CONFIG = PpoSection(hidden=(8, 4), init_std=0.5, std_bounds=(0.1, 1.0))


def test_shapes_and_groups() -> None:
    module = ActorCritic({"actor": 3, "critic": 5}, 2, CONFIG)
    mean, std, value = module(torch.randn(7, 3), torch.randn(7, 5))
    assert (mean.shape, std.shape, value.shape) == ((7, 2), (2,), (7,))
    torch.testing.assert_close(std, torch.full((2,), 0.5))


def test_the_critic_sees_the_actors_group_when_there_is_no_other() -> None:
    module = ActorCritic({"actor": 3}, 2, CONFIG)
    assert module(torch.randn(7, 3), torch.randn(7, 3))[2].shape == (7,)


def test_there_are_no_buffers() -> None:
    assert list(ActorCritic({"actor": 3}, 2, CONFIG).buffers()) == []


def test_every_parameter_gets_a_gradient_from_no_samples() -> None:
    module = ActorCritic({"actor": 3}, 2, CONFIG)
    mean, std, value = module(torch.zeros(0, 3), torch.zeros(0, 3))
    loss = mean.sum() + value.sum() + 0 * std.sum()
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    assert not any(gradient.any() for gradient in gradients)


def test_the_standard_deviation_stays_in_its_bounds_and_can_leave_them_again() -> None:
    module = ActorCritic({"actor": 3}, 2, CONFIG)
    with torch.no_grad():
        module.log_std.copy_(torch.tensor([-9.0, 9.0]))
    module.clamp_std()
    torch.testing.assert_close(module.std(), torch.tensor([0.1, 1.0]))
    (gradient,) = torch.autograd.grad(module.std().sum(), [module.log_std])
    assert (gradient > 0).all()


def test_a_start_outside_of_the_bounds_is_clamped() -> None:
    module = ActorCritic({"actor": 3}, 2, PpoSection(init_std=5.0, std_bounds=(0.1, 1.0)))
    torch.testing.assert_close(module.std(), torch.ones(2))
