"""Policy and value networks."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

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
        module.free_noise().copy_(torch.tensor([-9.0, 9.0]))
    module.clamp_std()
    torch.testing.assert_close(module.std(), torch.tensor([0.1, 1.0]))
    (gradient,) = torch.autograd.grad(module.std().sum(), [module.free_noise()])
    assert (gradient > 0).all()


def test_a_start_outside_of_the_bounds_is_clamped() -> None:
    module = ActorCritic({"actor": 3}, 2, PpoSection(init_std=5.0, std_bounds=(0.1, 1.0)))
    torch.testing.assert_close(module.std(), torch.ones(2))


@pytest.mark.parametrize("noise", ["std", "log_std"])
def test_clamped_in_the_forward_pass_the_free_parameter_is_left_alone(
    noise: Literal["std", "log_std"],
) -> None:
    config = PpoSection(init_std=5.0, std_bounds=(0.1, 1.0), noise=noise, std_clamp="forward")
    module = ActorCritic({"actor": 3}, 2, config)
    module.clamp_std()
    free = module.free_noise()
    assert {"std": "noise_std"}.get(noise, noise) in module.state_dict()
    torch.testing.assert_close(free, torch.full((2,), 5.0 if noise == "std" else math.log(5.0)))
    torch.testing.assert_close(module.std(), torch.ones(2))
    (gradient,) = torch.autograd.grad(module.std().sum(), [free])
    assert not gradient.any()


def test_a_free_standard_deviation_is_read_by_value() -> None:
    module = ActorCritic({"actor": 3}, 2, PpoSection(noise="std", init_std=0.5))
    before = module.std().detach()
    with torch.no_grad():
        module.free_noise().add_(1.0)
    torch.testing.assert_close(before, torch.full((2,), 0.5))  # the rollout keeps the old ones


def test_actor_and_critic_have_their_own_widths_and_activation() -> None:
    config = PpoSection(hidden=(8,), critic_hidden=(5, 4), activation="silu")
    module = ActorCritic({"actor": 3}, 2, config)
    widths = {
        name: [layer.out_features for layer in net.modules() if isinstance(layer, nn.Linear)]
        for name, net in (("actor", module.actor), ("critic", module.critic))
    }
    assert widths == {"actor": [8, 2], "critic": [5, 4, 1]}
    assert isinstance(module.critic[1], nn.SiLU)


def test_autocast_computes_in_half_precision_and_returns_the_own() -> None:
    torch.manual_seed(1)
    full = ActorCritic({"actor": 3}, 2, CONFIG)
    half = ActorCritic({"actor": 3}, 2, replace(CONFIG, autocast="bfloat16"))
    half.load_state_dict(full.state_dict())
    obs = torch.randn(64, 3)
    mean, std, value = half(obs, obs)
    assert mean.dtype == std.dtype == value.dtype == torch.float32
    exact = full(obs, obs)
    assert 0 < (mean - exact[0]).abs().max() < 0.02
    assert 0 < (value - exact[2]).abs().max() < 0.02


@pytest.mark.slow
def test_compiled_networks_compute_the_same_under_the_same_names() -> None:
    torch.manual_seed(1)
    plain = ActorCritic({"actor": 3}, 2, CONFIG)
    compiled = ActorCritic({"actor": 3}, 2, replace(CONFIG, compile="aot_eager"))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    compiled.load_state_dict(plain.state_dict())
    for rows in (16, 48):  # other sizes, compiled once
        obs = torch.randn(rows, 3)
        for found, expected in zip(compiled(obs, obs), plain(obs, obs), strict=True):
            torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad(sum(x.sum() for x in net(obs, obs)), list(net.parameters()))
        for net in (plain, compiled)
    ]
    torch.testing.assert_close(gradients[1], gradients[0])
