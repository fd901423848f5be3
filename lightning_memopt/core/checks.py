"""Checks of arguments: each returns nothing and raises one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any


def check_positive_int(argument: str, value: Any) -> None:
    """Require an `int` of at least one.

    Raises:
        TypeError: `value` is not an `int`.
        ValueError: `value` is below one.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{argument}` must be an `int` of at least 1, got {value!r}.")
    if value < 1:
        raise ValueError(f"`{argument}` must be at least 1, got {value}.")


def check_epoch(argument: str, value: Any) -> None:
    """Require an `int` of at least zero.

    Raises:
        TypeError: `value` is not an `int`.
        ValueError: `value` is below zero.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{argument}` must be an `int` of at least 0, got {value!r}.")
    if value < 0:
        raise ValueError(f"`{argument}` must be at least 0, got {value}.")


def check_bool(argument: str, value: Any) -> None:
    """Require `True` or `False`.

    Raises:
        TypeError: `value` is not a `bool`.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{argument}` must be `True` or `False`, got {value!r}.")


def check_fraction(argument: str, value: Any) -> None:
    """Require a number from 0 to 1.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is outside 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{argument}` must be a number from 0 to 1, got {value!r}.")
    if not 0 <= value <= 1:
        raise ValueError(f"`{argument}` must be from 0 to 1, got {value}.")


def check_word(argument: str, value: Any, words: Iterable[str]) -> None:
    """Require one of a few words.

    Raises:
        ValueError: `value` is none of `words`.
    """
    allowed = list(words)
    if value not in allowed:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(map(repr, allowed))}, got {value!r}."
        )


def check_words(argument: str, value: Any, words: Iterable[str]) -> None:
    """Require one of a few words, or a list of them that isn't empty.

    Raises:
        TypeError: `value` is neither a `str` nor a list.
        ValueError: `value` is empty or holds another word.
    """
    if not isinstance(value, str | list | tuple):
        raise TypeError(f"`{argument}` must be a word or a list of words, got {value!r}.")
    if not value:
        allowed = ", ".join(map(repr, words))
        raise ValueError(f"`{argument}` must hold at least one of {allowed}, got {value!r}.")
    for word in [value] if isinstance(value, str) else value:
        check_word(argument, word, words)


def check_patterns(argument: str, value: Any) -> None:
    """Require a `str` or a list of `str`, none of them empty.

    Raises:
        TypeError: `value` is neither.
        ValueError: `value` is empty or holds an empty `str`.
    """
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise TypeError(f"`{argument}` must be a `str` or a list of `str`, got {value!r}.")
    if not patterns or not all(patterns):
        raise ValueError(f"`{argument}` must name something, got {value!r}.")


def check_steps(argument: str, value: Any) -> None:
    """Require a list or tuple of `int`s of at least zero, not empty.

    Raises:
        TypeError: `value` is no list or tuple, or an item is no `int`.
        ValueError: `value` is empty, or an item is below zero.
    """
    if not isinstance(value, list | tuple):
        raise TypeError(f"`{argument}` must be a list of steps such as `[5, 6]`, got {value!r}.")
    if not value:
        raise ValueError(f"`{argument}` must hold at least one step such as `[5]`, got {value!r}.")
    for step in value:
        check_epoch(f"{argument} (step)", step)


def check_path(argument: str, value: Any) -> None:
    """Require a path on this machine or `None`.

    Raises:
        TypeError: `value` is neither.
        ValueError: `value` is empty, or an address.
    """
    if value is not None and not isinstance(value, str | PathLike):
        raise TypeError(f"`{argument}` must be a path or `None`, got {value!r}.")
    if value == "" or "://" in str(value):
        raise ValueError(f"`{argument}` must be a path on this machine or `None`, got {value!r}.")


def check_schedule(argument: str, value: Any) -> None:
    """Require a positive `int`, or a mapping from epochs to positive `int`s that isn't empty.

    Raises:
        TypeError: `value`, an epoch or an entry is no `int`.
        ValueError: `value` is empty, an epoch is below zero or an entry below one.
    """
    if not isinstance(value, dict):
        check_positive_int(argument, value)
        return
    if not value:
        raise ValueError(f"`{argument}` must have an entry such as `{{0: 4}}`, got an empty dict.")
    for epoch, entry in value.items():
        check_epoch(f"{argument} (epoch)", epoch)
        check_positive_int(f"{argument}[{epoch}]", entry)


def check_weigh_by(argument: str, value: Any) -> None:
    """Require `"samples"`, `"batches"`, a function or the dotted name of one.

    Raises:
        TypeError: `value` is neither a `str` nor callable.
        ValueError: `value` is another word.
    """
    expected = '"samples", "batches", a function or its dotted name'
    if isinstance(value, str):
        if value not in ("samples", "batches") and "." not in value.strip("."):
            raise ValueError(f"`{argument}` must be {expected}, got {value!r}.")
    elif not callable(value):
        raise TypeError(f"`{argument}` must be {expected}, got {value!r}.")
