"""User code by name, `package.module:Name`: imported and called, never evaluated."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.core.errors import RequestError


def import_target(target: str, where: str) -> Any:
    """Imports `package.module:Name`.

    Args:
        where: dotted path of the key with the name, for messages.

    Raises:
        RequestError: the module or the name in it does not exist.
    """
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise RequestError(
                f"{module_name} was found, but imports {error.name}, which does not exist",
                where=where,
                rule="user code is imported with everything that it imports",
                remedy=f"install {error.name}, or correct the import",
            ) from error
        raise RequestError(
            f"there is no module {module_name}",
            where=where,
            rule="user code is imported from the working directory or the environment",
            remedy="start surefoot in the folder of the module, or install its package",
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, dir(found), n=1)
            raise RequestError(
                f"{module_name} has no {path}",
                where=where,
                rule="package.module:Name",
                remedy=f"did you mean {near[0]}?"
                if near
                else "name a class or function of that module",
            )
        found = getattr(found, name)
    return found


def call_target(target: str, arguments: Mapping[str, Any], where: str) -> Any:
    """Imports `package.module:Name` and calls it with the arguments of the recipe.

    Raises:
        RequestError: it does not exist, or does not accept these arguments.
    """
    return call(import_target(target, where), (), arguments, target, where)


def call(
    found: Any, first: Sequence[Any], arguments: Mapping[str, Any], name: str, where: str
) -> Any:
    """`found(*first, **arguments)`.

    Args:
        first: passed by Surefoot, in order.
        arguments: passed by the recipe, by name.
        name: of `found`, for messages.
        where: dotted path of the key that names it.

    Raises:
        RequestError: it does not accept these arguments.
    """
    check_call(found, first, arguments, name, where)
    return found(*first, **arguments)


def bind(found: Any, num_first: int, arguments: Mapping[str, Any], name: str, where: str) -> Any:
    """A function to call later: `found(*first, **arguments)`; a class is instantiated now.

    So a part may be written either way: `def clip(gradients, norm, limit)`, or a class with the
    parameter `limit` whose objects are called with `(gradients, norm)`.

    Args:
        num_first: number of arguments from Surefoot, before those of the recipe.

    Raises:
        RequestError: it does not accept these arguments.
    """
    if isinstance(found, type):
        return call(found, (), arguments, name, where)
    check_call(found, (None,) * num_first, arguments, name, where)
    return functools.partial(found, **arguments) if arguments else found


def check_call(
    found: Any, first: Sequence[Any], arguments: Mapping[str, Any], name: str, where: str
) -> None:
    """Checks the arguments against the signature, if there is one; calls nothing.

    Raises:
        RequestError: it cannot be called, or does not accept these arguments.
    """
    if not callable(found):
        raise RequestError(
            f"{name} is a {type(found).__name__}",
            where=where,
            rule="the name refers to a class or a function",
            remedy="name a class or function",
        )
    try:
        signature = inspect.signature(found)
    except ValueError:
        return  # Some classes written in C have no signature.
    try:
        signature.bind(*first, **arguments)
    except TypeError as error:
        raise RequestError(
            f"{name} cannot be called like this: {error}",
            where=f"{where} with {dict(arguments)}",
            rule="arguments are passed by name",
            remedy=f"its signature is {name.rpartition(':')[2]}{signature}",
        ) from error


def name_of(part: Any) -> str:
    """`package.module:Name` of a class or function, or of the class of any other object.

    >>> from collections import OrderedDict
    >>> name_of(OrderedDict), name_of(OrderedDict()), name_of(functools.partial(OrderedDict))
    ('collections:OrderedDict', 'collections:OrderedDict', 'collections:OrderedDict')
    """
    while isinstance(part, functools.partial):
        part = part.func
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}:{named.__qualname__}"


def takes(found: Any, parameter: str) -> bool:
    """Whether a class or function has a parameter of that name."""
    try:
        return parameter in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False  # Some classes written in C do not tell their signature.
