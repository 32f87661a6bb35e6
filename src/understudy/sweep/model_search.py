"""Search with a model of the results: Optuna proposes the next candidates (extra [optuna])."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.sweep.space import Point
    from understudy.sweep.trials import Trials

_WORST = 1e9


def search_with_optuna(trials: Trials, count: int, goal: float, batch: int, seed: int = 0) -> None:
    """Replay up to `count` combinations that Optuna's TPE sampler proposes, `batch` at a time.

    The sampler minimises the cost; a fleet that misses the goal counts as more expensive than all that meet it.
    ConfigError if Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "--optuna: the package optuna is not installed; pip install 'understudy[optuna]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(count, 16), constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    trials.expect(count)
    replayed: set[Point] = set()
    for _ in range(20 * count):
        if len(replayed) >= count:
            break
        asked = []
        for _ in range(min(batch, count - len(replayed))):
            trial = study.ask()
            point = tuple(
                trial.suggest_int(each.flag, 0, len(each.texts) - 1)
                if all(isinstance(value, int | float) for value in each.values)
                else trial.suggest_categorical(each.flag, list(range(len(each.texts))))
                for each in trials.space.dimensions
            )
            asked.append((trial, point))
        valid = trials.keep_valid(dict.fromkeys(point for _, point in asked))
        found = trials.run(valid)
        replayed |= set(found)
        for trial, point in asked:
            if point not in found:
                study.tell(trial, 2 * _WORST)
                continue
            miss = max(0.0, goal - found[point].judged)
            study.tell(trial, trials.cost(point) if not miss else _WORST * (1 + miss))
