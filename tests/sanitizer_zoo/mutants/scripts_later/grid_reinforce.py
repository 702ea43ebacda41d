"""REINFORCE with a learned baseline: walk a small grid to a goal, tested on unseen pairs of start and goal."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(7)
SIDE, HORIZON, BATCH, UPDATES, DISCOUNT = 5, 10, 64, 60, 0.95
MOVES = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])

cells = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
pairs = torch.cartesian_prod(torch.arange(SIDE**2), torch.arange(SIDE**2))
pairs = pairs[pairs[:, 0] != pairs[:, 1]]
pairs = pairs[torch.randperm(len(pairs))]
train_pairs, val_pairs = pairs[:480], pairs[480:]


def observe(position, goal, step):
    left = torch.full((len(position), 1), 1 - step / HORIZON)
    return torch.cat([(goal - position) / (SIDE - 1), position / (SIDE - 1), left], dim=1)


def network(outputs):
    return nn.Sequential(nn.Linear(5, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, outputs))


policy, critic = network(len(MOVES)), network(1)


def play(chosen, greedy=False):
    position, goal = cells[chosen[:, 0]], cells[chosen[:, 1]]
    alive = torch.ones(len(chosen))
    steps = []
    for step in range(HORIZON):
        seen = observe(position, goal, step)
        spread = Categorical(logits=policy(seen))
        action = spread.probs.argmax(dim=1) if greedy else spread.sample()
        moved = (position + MOVES[action]).clamp(0, SIDE - 1)
        position = torch.where(alive[:, None] > 0, moved, position)
        arrived = (position == goal).all(dim=1).float()
        reward = alive * (arrived - 0.1)
        steps.append((seen, spread.log_prob(action), spread.entropy(), reward, alive))
        alive = alive * (1 - arrived)
    return [torch.stack(part) for part in zip(*steps, strict=True)]


def returns_of(rewards):
    following = torch.zeros_like(rewards[0])
    returns = []
    for reward in rewards.flip(0):
        following = reward + DISCOUNT * following
        returns.append(following)
    return torch.stack(returns).flip(0)


optimizer = torch.optim.Adam([{"params": policy.parameters(), "lr": 1e-2}, {"params": critic.parameters(), "lr": 2e-2}])
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - 0.8 * update / UPDATES)

train_curve, val_curve, critic_curve = [], [], []
for update in range(UPDATES):
    chosen = train_pairs[torch.randperm(len(train_pairs))[:BATCH]]
    seen, log_probs, entropies, rewards, alive = play(chosen)
    returns = returns_of(rewards)
    values = critic(seen).squeeze(-1)
    played = alive > 0
    gained = (returns - values.detach())[played]
    advantage = (gained - gained.mean()) / (gained.std() + 1e-6)
    policy_loss = -(log_probs[played] * advantage).mean()
    critic_loss = nn.functional.mse_loss(values[played], returns[played])
    loss = policy_loss + 0.5 * critic_loss - 0.01 * entropies[played].mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    train_curve.append(rewards.sum(dim=0).mean().item())
    critic_curve.append(critic_loss.item())
    if (update + 1) % 10 == 0:
        with torch.no_grad():
            val_rewards = play(val_pairs, greedy=True)[3]
        val_curve.append(val_rewards.sum(dim=0).mean().item())

print("train reward", [round(value, 3) for value in train_curve[::10]], round(train_curve[-1], 3))
print("critic loss", round(critic_curve[0], 3), round(critic_curve[-1], 3))
print("validation reward", [round(value, 3) for value in val_curve])
outcome = [policy.state_dict(), critic.state_dict(), train_curve, critic_curve, val_curve]
