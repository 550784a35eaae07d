"""Learning from rewards: losses over batches of transitions."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.contrastive import encoder
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, each, training

ACTIONS = 4


class ActorCritic(nn.Module):
    """One trunk, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = (
            encoder(outputs=12),
            nn.Linear(12, ACTIONS),
            nn.Linear(12, 1),
        )

    def forward(self, x: Tensor) -> Any:
        """Scores of actions, and how good the state is."""
        h = torch.tanh(self.trunk(x))
        return self.actor(h), self.critic(h).squeeze(-1)


def _steps(drawn: Drawn) -> dict[str, Tensor]:
    n = drawn.size
    return {
        "state": drawn.normal(n, 16),
        "following": drawn.normal(n, 16),
        "action": drawn.whole(ACTIONS, n),
        "log_prob": -1.4 + 0.1 * drawn.normal(n),
        "advantage": drawn.normal(n) + 0.3,
        "return": drawn.normal(n),
        "reward": drawn.uniform(n),
        "done": (drawn.uniform(n) < 0.1).float(),
    }


def _ppo(normalise: bool) -> Any:
    def loss(model: Any, b: Any) -> Any:
        scores, value = model(b["state"])
        policy = Categorical(logits=scores)
        advantage = b["advantage"]
        if normalise:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (policy.log_prob(b["action"]) - b["log_prob"]).exp()
        clipped = torch.clamp(ratio, 0.8, 1.2)
        gain = torch.min(ratio * advantage, clipped * advantage).mean()
        return -gain + 0.5 * F.mse_loss(value, b["return"]) - 0.01 * policy.entropy().mean()

    return loss


@entry()
def ppo() -> Training:
    """Advantages come as they are."""
    return training(ActorCritic(), _ppo(False), each(_steps, 12), "adam", clip_norm=0.5)


@entry()
def ppo_with_normalised_advantages() -> Training:
    """Advantages by their mean and spread over the batch: numbers of the batch alone."""
    return training(ActorCritic(), _ppo(True), each(_steps, 12), "adam", clip_norm=0.5)


@entry()
def dqn() -> Training:
    """A target net in the loss, that the loop moves."""
    model = encoder(outputs=ACTIONS)
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(model: Any, b: Any) -> Any:
        q = model(b["state"]).gather(1, b["action"].unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = target(b["following"]).max(1)[0]
        wanted = b["reward"] + 0.99 * best * (1 - b["done"])
        return F.smooth_l1_loss(q, wanted)

    made = training(model, loss, each(_steps, 12), "adam")
    made.after_step = lambda: target.load_state_dict(model.state_dict())
    return made


class SlowTarget(nn.Module):
    """A net and its target, which each forward moves a little."""

    def __init__(self) -> None:
        super().__init__()
        self.online = encoder(outputs=ACTIONS)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, state: Tensor, following: Tensor) -> Any:
        """What actions are worth, now and next."""
        with torch.no_grad():
            for mine, theirs in zip(
                self.online.parameters(), self.target.parameters(), strict=True
            ):
                theirs.mul_(0.995).add_(mine, alpha=0.005)
        return self.online(state), self.target(following)


@entry()
def target_that_follows_in_forward() -> Training:
    """Double Q-learning; priorities weigh samples, and are left on the model."""

    def loss(model: Any, b: Any) -> Any:
        q, following = model(b["state"], b["following"])
        q = q[torch.arange(len(q)), b["action"]]
        best = following.gather(1, model.online(b["following"]).argmax(1, keepdim=True)).squeeze(1)
        off = b["reward"] + 0.99 * (1 - b["done"]) * best.detach() - q
        model.priorities = off.detach().abs()
        return (b["advantage"].abs() * off.pow(2)).mean()

    return training(SlowTarget(), loss, each(_steps, 12))


@entry()
def reinforce_with_a_baseline() -> Training:
    """Returns minus their mean over the batch, by log-probabilities; a sum over steps."""

    def loss(model: Any, b: Any) -> Any:
        scores, _ = model(b["state"])
        gain = b["return"] - b["return"].mean()
        picked = F.log_softmax(scores, 1)[torch.arange(len(scores)), b["action"]]
        return -(picked * gain).sum() / 50

    return training(ActorCritic(), loss, each(_steps, 12))


@entry()
def reinforce_with_whitened_outputs() -> Training:
    """Advantages from the model's own values, normalised over the batch."""

    def loss(model: Any, b: Any) -> Any:
        scores, value = model(b["state"])
        advantage = (b["return"] - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        picked = Categorical(logits=scores).log_prob(b["action"])
        return -(picked * advantage).mean() + F.mse_loss(value, b["return"])

    return training(ActorCritic(), loss, each(_steps, 12))


@entry(draws=True)
def soft_actor() -> Training:
    """SAC's policy: actions are drawn from normal distributions and squashed."""
    torch.manual_seed(4)
    critic = encoder(17, 1).requires_grad_(False)

    def loss(model: Any, b: Any) -> Any:
        mean, spread = model(b["state"])[:, :2].chunk(2, 1)
        policy = Normal(mean, spread.clamp(-5, 2).exp())
        raw = policy.rsample()
        action = torch.tanh(raw)
        likelihood = (policy.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).sum(1)
        worth = critic(torch.cat([b["state"], action], 1)).squeeze(1)
        return (0.2 * likelihood - worth).mean()

    return training(encoder(outputs=ACTIONS), loss, each(_steps, 12), "adam")


@entry()
def categorical_returns() -> Training:
    """C51: a projection of distributions by index_add on a flat view."""
    model = encoder(outputs=11)

    def loss(model: Any, b: Any) -> Any:
        n, atoms = b["state"].size(0), 11
        support = torch.linspace(-1, 1, atoms)
        with torch.no_grad():
            following = model(b["following"]).softmax(1)
            place = (b["reward"][:, None] + 0.9 * support[None]).clamp(-1, 1)
            at = (place + 1) / 0.2
            low, high = at.floor().long().clamp(0, 10), at.ceil().long().clamp(0, 10)
            offset = torch.arange(n).unsqueeze(1) * atoms
            wanted = torch.zeros(n * atoms)
            wanted.index_add_(0, (low + offset).view(-1), (following * (high - at)).view(-1))
            wanted.index_add_(0, (high + offset).view(-1), (following * (at - low)).view(-1))
        return -(wanted.view(n, atoms) * model(b["state"]).log_softmax(1)).sum(1).mean()

    return training(model, loss, each(_steps, 12))


@entry()
def group_relative_policy() -> Training:
    """GRPO: rewards normalised within groups of four samples that lie behind each other."""

    def loss(model: Any, b: Any) -> Any:
        scores, _ = model(b["state"])
        groups = b["reward"].view(-1, 4)
        gain = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        picked = scores.log_softmax(-1).gather(1, b["action"][:, None]).squeeze(1)
        ratio = torch.exp(picked - picked.detach())
        return -(ratio * gain.view(-1)).mean()

    return training(ActorCritic(), loss, each(_steps, 12))
