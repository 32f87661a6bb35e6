"""Searches of a sweep: which one the flags name, and its run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from understudy.sweep.space import Space
    from understudy.sweep.trials import Trials


def choose_search(args: argparse.Namespace, space: Space) -> str:
    """Return the name of the search. ConfigError for a space that is too large for a grid and has no other."""
    from understudy.checks import whole_number
    from understudy.sweep.search import MAX_GRID, find_monotone

    given = {"random": args.random, "optuna": args.optuna, "search": args.search}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"--{named[0]}: contradicts --{named[1]}; give one")
    if named and named[0] != "search":
        whole_number(f"--{named[0]}", given[named[0]], 1, 10**6)
        return named[0]
    if args.search is not None:
        return str(args.search)
    if space.size <= MAX_GRID:
        return "grid"
    if find_monotone(space) is None:
        raise ConfigError(
            f"--vary: {space.size:,} combinations are more than the {MAX_GRID:,} of a full grid; add --random N, "
            "--optuna N or --search halving"
        )
    return "bisect"


def run_search(trials: Trials, search: str, args: argparse.Namespace, jobs: int) -> None:
    """Replay the candidates that the search named `search` asks for."""
    from understudy.sweep.model_search import search_with_optuna
    from understudy.sweep.search import search_by_bisection, search_by_halving, search_grid, search_random

    if search == "grid":
        search_grid(trials)
    elif search == "bisect":
        search_by_bisection(trials, args.goal)
    elif search == "halving":
        search_by_halving(trials, args.goal)
    elif search == "random":
        search_random(trials, args.random)
    else:
        search_with_optuna(trials, args.optuna, args.goal, jobs)
