"""Schedule of averaging: the steps after which ranks average, and the size of their groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AveragingSchedule:
    """Steps after which ranks average their parameters.

    Steps are counted from 0. In the first ``warmup`` steps gradients are averaged over all ranks,
    as in plain data-parallel training. After step ``t >= warmup``, let ``n = t - warmup`` (or
    ``n = t`` if ``raw``). Parameters are averaged if a period divides ``n``. The largest such
    period determines the size of the groups.

    The hook, the averager and the optimizer of post-local SGD (Lin et al. 2018, arXiv 1808.07217)
    and of hierarchical SGD (Wang et al. 2022, arXiv 2010.12998) all take the same schedule, so that
    they agree.

    Args:
        periods: numbers of steps from one averaging to the next, ascending; an int for one period.
        group_sizes: the number of ranks that average together in each period, ascending; None is
            all ranks, and only the last size can be None. By default one period, over all ranks. If
            a size does not divide the number of ranks, the last group is smaller.
        warmup: number of steps before the first possible averaging.
        raw: True to count periods from step 0, not from the end of the warm-up, as torch's
            HierarchicalModelAverager does.

    Raises:
        ValueError: no period, a period below 1, periods or sizes that do not ascend, different
            numbers of sizes and periods, a negative warm-up.

    Example::

        >>> schedule = AveragingSchedule(periods=(2, 6), group_sizes=(2, None), warmup=3)
        >>> [schedule.level(step) for step in range(10)]
        [None, None, None, 1, None, 0, None, 0, None, 1]
        >>> schedule.counts(10)
        [2, 2]
    """

    periods: int | Sequence[int]
    group_sizes: Sequence[int | None] = (None,)
    warmup: int = 0
    raw: bool = False

    def __post_init__(self) -> None:
        periods = (self.periods,) if isinstance(self.periods, int) else tuple(self.periods)
        object.__setattr__(self, "periods", periods)
        object.__setattr__(self, "group_sizes", tuple(self.group_sizes))
        if not periods or periods[0] < 1:
            raise ValueError(f"periods must be numbers of steps from 1 on, got {periods}")
        if list(periods) != sorted(set(periods)):
            raise ValueError(f"periods must ascend, as the largest that is due wins, got {periods}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be a number of steps from 0 on, got {self.warmup}")
        self._check_sizes()

    @classmethod
    def of_groups(
        cls, sizes: Mapping[int, int | None], *, warmup: int = 0, raw: bool = False
    ) -> "AveragingSchedule":
        """Return a schedule from a group size for each period, in ascending order of periods."""
        return cls(tuple(sizes), tuple(sizes.values()), warmup, raw)

    @property
    def levels(self) -> list[tuple[int, int | None]]:
        """Each period with its group size; None is all ranks."""
        return list(zip(self._periods, self.group_sizes, strict=True))

    def level(self, step: int) -> int | None:
        """Return the index of the period that is due after a step; None if no period is due."""
        if step < self.warmup:
            return None
        number = step if self.raw else step - self.warmup
        due = [level for level, (period, _) in enumerate(self.levels) if number % period == 0]
        return due[-1] if due else None

    @property
    def shortest_gap(self) -> int:
        """The smallest number of steps between two averagings."""
        periods = self._periods
        return min(math.gcd(one, other) for one in periods for other in periods)

    def counts(self, steps: int) -> list[int]:
        """Return how often each period is due in the first ``steps`` steps."""
        due = [self.level(step) for step in range(steps)]
        return [due.count(level) for level in range(len(self.levels))]

    @property
    def _periods(self) -> Sequence[int]:
        assert not isinstance(self.periods, int), "__post_init__ converts an int to a tuple"
        return self.periods

    def _check_sizes(self) -> None:
        sizes = self.group_sizes
        if len(sizes) != len(self._periods):
            raise ValueError(
                f"group_sizes must have one size for each of the periods {self._periods}, got "
                f"{sizes}"
            )
        numbers = [size for size in sizes if size is not None]
        if None in sizes[:-1] or numbers != sorted(numbers) or any(size < 1 for size in numbers):
            raise ValueError(
                "group_sizes must ascend from 1 on, with None, for all ranks, at most as the last: "
                f"a longer period averages over at least as many ranks; got {sizes}"
            )
