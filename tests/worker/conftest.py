from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from specdec.worker.worker import DraftWorker, TargetWorker
from tests.worker.prefix_runner import PrefixRunner

TargetMaker = Callable[[PrefixRunner], TargetWorker]
DraftMaker = Callable[[PrefixRunner], DraftWorker]


@pytest.fixture
def make_target() -> Iterator[TargetMaker]:
    """Target workers over a fake runner, closed at the end."""
    workers: list[TargetWorker] = []

    def make(runner: PrefixRunner) -> TargetWorker:
        workers.append(TargetWorker(runner, 60.0))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def make_draft() -> Iterator[DraftMaker]:
    """Draft workers over a fake runner, closed at the end."""
    workers: list[DraftWorker] = []

    def make(runner: PrefixRunner) -> DraftWorker:
        workers.append(DraftWorker(runner, 60.0))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()
