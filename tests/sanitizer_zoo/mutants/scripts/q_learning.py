"""Value learning on a corridor: replay, a target network, temporal differences."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

STATES, DISCOUNT = 8, 0.9


class Corridor:
    def __init__(self):
        self.position = 0

    def reset(self):
        self.position = 0
        return self.position

    def step(self, action):
        self.position = max(0, self.position + (1 if action == 1 else -1))
        done = self.position == STATES - 1
        return self.position, float(done), done


class ValueNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(STATES, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, position):
        return self.layers(F.one_hot(position, STATES).float())


class Agent:
    def __init__(self):
        self.online = ValueNet()
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=5e-3)
        self.memory = []
        self.losses = []

    def act(self, position, explore):
        if random.random() < explore:
            return random.randrange(2)
        with torch.no_grad():
            return self.online(torch.tensor(position)).argmax().item()

    def learn(self, batch_size=16):
        batch = random.sample(self.memory, batch_size)
        position, action, reward, following, done = map(torch.tensor, zip(*batch, strict=True))
        value = self.online(position).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_action = self.online(following).argmax(1, keepdim=True)
            next_value = self.target(following).gather(1, next_action).squeeze(1)
            wanted = reward + DISCOUNT * next_value * (1 - done.float())
        loss = F.smooth_l1_loss(value, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.online.parameters(), 0.01)
        self.optimizer.step()
        self.losses.append(loss.item())


def main():
    random.seed(5)
    torch.manual_seed(5)
    world, agent = Corridor(), Agent()
    position, lengths, length = world.reset(), [], 0
    for turn in range(400):
        action = agent.act(position, explore=max(0.1, 1 - turn / 200))
        following, reward, done = world.step(action)
        agent.memory.append((position, action, reward, following, done))
        length += 1
        position = following
        if done or length == 40:
            lengths.append(length)
            position, length = world.reset(), 0
        if len(agent.memory) > 50 and turn % 4 == 0:
            agent.learn()
        if turn % 40 == 0:
            agent.target.load_state_dict(agent.online.state_dict())
    return {"weights": agent.online.state_dict(), "losses": agent.losses, "lengths": lengths}


if __name__ == "__main__":
    outcome = main()
