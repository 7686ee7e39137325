"""CartPole by one agent and several observers, each a process, over torch RPC.

    pip install "functional-optim[examples]"
    python examples/cartpole.py

Each observer plays in its environments by the parameters that the agent sends, and computes
gradients from its observations. The agent has the parameters. DistributedOptimizer steps them by
the mean of the observers' gradients, until the mean return of the last 100 episodes is 475. Then
CartPole-v1 counts as solved. The algorithm is PPO (Schulman et al., "Proximal policy optimization
algorithms", 2017, eq. 7, with the advantages of eq. 11).
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed import rpc
from torch.func import functional_call

from functional_optim import DistributedOptimizer
from hooks.demo.processes import run_processes

SOLVED = 475.0
EPISODES = 100
GAMMA, LAMBDA = 0.98, 0.8
Parameters = Mapping[str, Tensor]


class Settings(NamedTuple):
    """Options of one run."""

    observers: int
    environments: int
    """The environments of each observer."""
    steps: int
    """Steps of each environment for one set of gradients."""
    passes: int
    """Steps of the optimizer with the same observations."""
    rounds: int
    """The maximum number of rounds of observing and learning."""
    lr: float
    seed: int


class ActorCritic(nn.Module):
    """Networks of the agent: log-probabilities of the actions, and the expected return."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = self._layers(2), self._layers(1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Map (n, 4) to the log-probabilities of both actions (n, 2), and to values (n,)."""
        return self.actor(seen).log_softmax(dim=-1), self.critic(seen).squeeze(-1)

    @staticmethod
    def _layers(outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )


class Observations(NamedTuple):
    """Observations of some steps in some environments."""

    seen: Tensor  # (steps, environments, 4)
    actions: Tensor  # (steps, environments), int64
    log_probabilities: Tensor  # of the actions, when they were taken
    advantages: Tensor
    returns: Tensor


class Observer:
    """Player of several environments, in a separate process."""

    def __init__(self, settings: Settings, seed: int) -> None:
        import gymnasium  # noqa: PLC0415  an extra, and main says so

        torch.manual_seed(seed)
        self._model = ActorCritic().to("meta")  # shapes only: the agent sends parameters
        self._settings = settings
        self._envs = [
            gymnasium.make("CartPole-v1", disable_env_checker=True)
            for _ in range(settings.environments)
        ]
        self._seen = [env.reset(seed=1000 * seed + k)[0] for k, env in enumerate(self._envs)]
        self._so_far = [0.0] * len(self._envs)
        self._observed: Observations | None = None

    @torch.no_grad()
    def observe(self, parameters: Parameters) -> list[float]:
        """Play on, and keep the observations for :meth:`gradients`.

        Returns:
            The returns of the episodes that have ended.
        """
        rows, rewards, episodes = [], [], []
        for _ in range(self._settings.steps):
            seen = self._now()
            logs, values = self._run(parameters, seen)
            actions = torch.multinomial(logs.exp(), 1)
            rows.append((seen, actions[:, 0], logs.gather(1, actions)[:, 0], values))
            rewards.append(self._play(parameters, actions[:, 0].tolist(), episodes))
        seen, actions, logs, values = (torch.stack(column) for column in zip(*rows, strict=True))
        last = self._run(parameters, self._now())[1]
        gained, goes_on = (torch.tensor(column) for column in zip(*rewards, strict=True))
        advantages = self._advantages(torch.cat([values, last[None]]), gained, goes_on)
        self._observed = Observations(seen, actions, logs, advantages, advantages + values)
        return episodes

    def gradients(self, parameters: Parameters, clip: float) -> list[Tensor]:
        """Return the gradients of PPO's loss on the last observations.

        Args:
            parameters: the current parameters of the agent.
            clip: the largest relative change of an action's probability.
        """
        leaves = {name: one.detach().requires_grad_() for name, one in parameters.items()}
        assert self._observed is not None
        seen, actions, before, advantages, returns = (one.flatten(0, 1) for one in self._observed)
        logs, values = self._run(leaves, seen)
        ratio = (logs.gather(1, actions[:, None])[:, 0] - before).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.minimum(ratio * scaled, ratio.clamp(1 - clip, 1 + clip) * scaled).mean()
        loss = 0.5 * (values - returns).square().mean() - gain
        return list(torch.autograd.grad(loss, list(leaves.values())))

    def _now(self) -> Tensor:
        """Return the observations of all environments."""
        return torch.stack([torch.from_numpy(one) for one in self._seen])

    def _run(self, parameters: Parameters, seen: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = functional_call(self._model, dict(parameters), (seen,))
        return found

    def _play(
        self, parameters: Parameters, actions: list[int], episodes: list[float]
    ) -> tuple[list[float], list[float]]:
        """Make one step in each environment. Return rewards, and True if the episode goes on."""
        gained, goes_on = [], []
        for k, (env, action) in enumerate(zip(self._envs, actions, strict=True)):
            self._seen[k], reward, fallen, out_of_time, _ = env.step(action)
            self._so_far[k] += float(reward)
            if out_of_time and not fallen:  # the episode would go on, as the critic expects
                expected = self._run(parameters, torch.from_numpy(self._seen[k])[None])[1]
                reward += GAMMA * expected.item()
            if fallen or out_of_time:
                episodes.append(self._so_far[k])
                self._so_far[k], self._seen[k] = 0.0, env.reset()[0]
            gained.append(float(reward))
            goes_on.append(float(not (fallen or out_of_time)))
        return gained, goes_on

    @staticmethod
    def _advantages(values: Tensor, gained: Tensor, goes_on: Tensor) -> Tensor:
        """delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1}."""
        found, after = [], torch.zeros(values.shape[1])
        for t in reversed(range(len(gained))):
            delta = gained[t] + GAMMA * goes_on[t] * values[t + 1] - values[t]
            after = delta + GAMMA * LAMBDA * goes_on[t] * after
            found.append(after)
        return torch.stack(found[::-1])


class Agent:
    """Owner of the parameters, which learns from the observations of the observers."""

    def __init__(self, settings: Settings, observers: list[str]) -> None:
        torch.manual_seed(settings.seed)
        params = ActorCritic().named_parameters()
        self.optimizer = DistributedOptimizer(
            torch.optim.Adam, [(name, rpc.RRef(param)) for name, param in params], lr=settings.lr
        )
        self._settings = settings
        self._observers = [
            rpc.remote(name, Observer, args=(settings, settings.seed * 100 + number))
            for number, name in enumerate(observers)
        ]

    def round(self, share: float) -> list[float]:
        """Let the observers play, then learn.

        Args:
            share: the remaining share of the run. The rate and PPO's bound fall with it.

        Returns:
            The returns of the episodes that have ended.
        """
        self.optimizer.param_groups[0]["lr"] = self._settings.lr * share
        episodes = self._all("observe")
        for _ in range(self._settings.passes):
            given = self._all("gradients", 0.2 * share)
            means = [torch.stack(ones).mean(dim=0) for ones in zip(*given, strict=True)]
            self.optimizer.clip_grad_norm_(means, 0.5)
            self.optimizer.step(means)
        return [one for ones in episodes for one in ones]

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all observers at once, with the current parameters."""
        with self.optimizer.snapshot() as snapshot:
            now = {name: one.detach() for name, one in snapshot.parameters.items()}
            calls = [getattr(one.rpc_async(), method)(now, *args) for one in self._observers]
            return [call.wait() for call in calls]


def train(settings: Settings, observers: list[str], output: Path) -> None:
    """Train in the agent's process until CartPole is solved, and draw the returns."""
    agent, done = Agent(settings, observers), 0
    episodes: list[float] = []
    recent: Sequence[float] = []
    with Progress() as progress:
        bar = progress.add_task("return of an episode", total=SOLVED)
        for done in range(1, settings.rounds + 1):
            episodes += agent.round(1 - (done - 1) / settings.rounds)
            recent = episodes[-EPISODES:]
            progress.update(bar, completed=mean(recent), description=f"round {done}")
            if is_solved(recent):
                break
    steps = done * settings.steps * settings.environments * settings.observers
    verdict = "solved" if is_solved(recent) else f"not solved (that is {SOLVED:.0f})"
    print(
        f"{verdict}: mean return {mean(recent):.1f} over the last {len(recent)} of "
        f"{len(episodes)} episodes, {steps:,} steps of environments, "
        f"{agent.optimizer.counters()['agent'].steps} steps of the optimizer"
    )
    draw(episodes, output)
    print(f"The curve: {output}")


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values; 0 before the first episode has ended."""
    return sum(values) / max(1, len(values))


def is_solved(recent: Sequence[float]) -> bool:
    """Return True if the last episodes reach the mean return that CartPole-v1 asks for."""
    return len(recent) == EPISODES and mean(recent) >= SOLVED


def draw(episodes: list[float], output: Path) -> None:
    """Write the returns as a picture."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(episodes, ".", markersize=3, label="episode")
    means = [mean(episodes[max(0, k - EPISODES) : k]) for k in range(1, len(episodes) + 1)]
    axes.plot(means, label=f"mean of the last {EPISODES}")
    axes.axhline(SOLVED, color="gray", linestyle=":", label=f"solved: {SOLVED:.0f}")
    axes.set(xlabel="episodes", ylabel="return", title="CartPole-v1, one agent and its observers")
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


@click.command(context_settings={"show_default": True})
@click.option("--observers", type=click.IntRange(1, 32), default=2)
@click.option("--environments", type=click.IntRange(min=1), default=8, help="Of each observer.")
@click.option("--steps", type=click.IntRange(min=2), default=64, help="Of each, in a round.")
@click.option("--passes", type=click.IntRange(min=1), default=20, help="Over them.")
@click.option("--rounds", type=click.IntRange(min=1), default=200, help="At most.")
@click.option("--lr", type=click.FloatRange(min=0), default=3e-3)
@click.option("--seed", type=click.IntRange(0, 10_000), default=0)
@click.option("--output", type=Path, default=Path("runs/cartpole.png"))
def main(*, output: Path, **choices: Any) -> None:
    """Solve CartPole by one agent and several observers."""
    try:
        import_module("gymnasium")
    except ModuleNotFoundError as error:
        raise click.UsageError(
            f"CartPole needs {error.name}, which is not installed; run: "
            'pip install "functional-optim[examples]"'
        ) from error
    settings = Settings(**choices)
    names = [f"observer{number}" for number in range(settings.observers)]
    run_processes(["agent", *names], train, settings, names, output)


if __name__ == "__main__":
    main()
