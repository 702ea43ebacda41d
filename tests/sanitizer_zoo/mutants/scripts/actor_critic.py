"""One network, two heads: a policy and a value that bootstraps from itself."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 24), nn.Tanh())
        self.policy = nn.Linear(24, 2)
        self.value = nn.Linear(24, 1)

    def forward(self, state):
        hidden = self.body(state)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def transition(state, action, source):
    push = (action.float() * 2 - 1)[:, None] * torch.tensor([0.3, -0.1, 0.2])
    following = 0.9 * state + push + 0.05 * torch.randn(state.shape, generator=source)
    return following, -following.pow(2).sum(1)


torch.manual_seed(14)
source = torch.Generator().manual_seed(15)
network = ActorCritic()
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
state = torch.randn(16, 3, generator=source)
returns = []
for _ in range(50):
    logits, value = network(state)
    action = Categorical(logits=logits).sample()
    following, reward = transition(state, action, source)
    _, next_value = network(following)
    target = (reward + 0.8 * next_value).detach()
    advantage = (target - value).detach()
    value_loss = F.mse_loss(value, target)
    policy_loss = F.cross_entropy(logits, action, reduction="none").mul(advantage).mean()
    optimizer.zero_grad()
    (policy_loss + 0.5 * value_loss).backward()
    nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    optimizer.step()
    returns.append(reward.mean().item())
    state = following

outcome = {"weights": network.state_dict(), "returns": returns}
