"""The rules of requests, written a second time to compare the ledger with."""

from collections.abc import Sequence


class LedgerOracle:
    """The ledger's rules, worked out from a list of tasks in order and when each was learned."""

    def __init__(self, deadline: int | None) -> None:
        self.deadline, self.n, self.n_requests = deadline, 0, 0
        self.order: list[int] = []
        self.unlearned: list[int] = []
        self.since: dict[int, int] = {}
        self.declared: set[int] = set()

    def learn(self, task: int) -> None:
        self.n += 1
        self.order.append(task)
        self.since[task] = self.n
        if task in self.unlearned:
            self.unlearned.remove(task)

    def forget(self, tasks: Sequence[int]) -> None:
        self.n_requests += 1
        self.order = [task for task in self.order if task not in tasks]
        self.unlearned += tasks

    @property
    def permanent(self) -> set[int]:
        old = {task for task in self.order if self.deadline is not None and self.n - self.since[task] >= self.deadline}
        return old | self.declared

    @property
    def unlearnable(self) -> list[int]:
        return [task for task in self.order if task not in self.permanent]

    def allows(self, tasks: Sequence[int]) -> bool:
        return bool(tasks) and set(tasks) <= set(self.unlearnable) and len(set(tasks)) == len(tasks)
