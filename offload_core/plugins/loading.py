"""Loads one plugin: imports its module, checks its API version and its hooks, asks for its backend types.

Each module is registered with a pluggy manager of its own, so that an error is always one plugin's. What pluggy lets
pass is refused here with a message: hooks that are coroutines or generators, which nobody would run; names that no hook
has; functions named like a hook and not marked; a registration that returned nothing.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pluggy

from offload_core import __version__
from offload_core.api import hooks as hookspecs
from offload_core.api.backend import Backend, BackendType
from offload_core.api.errors import PluginError, did_you_mean
from offload_core.api.options import BackendOptions

logger = logging.getLogger(__name__)

HOOKS = tuple(name for name in vars(hookspecs.HookSpecs) if name.startswith("offload_"))

FOREIGN_ERRORS = (Exception, SystemExit)
"""What a stranger's code may raise and only its plugin shall pay for; an operator's KeyboardInterrupt goes through."""

_CORE = f"offload-core {__version__}"


@dataclass
class Candidate:
    """An entry point and what has become known of its plugin; ``error`` says why nothing of it is used."""

    point: EntryPoint
    api_version: int | None = None
    hooks: tuple[str, ...] = ()
    backend_types: tuple[BackendType, ...] = ()
    relay: pluggy.HookRelay | None = None
    error: str | None = None

    @property
    def module(self) -> str:
        """The module that the entry point names, without its extras; the whole value when it names none."""
        match = self.point.pattern.match(self.point.value)
        return match["module"] if match else self.point.value

    @cached_property
    def _metadata(self) -> tuple[str, str | None]:
        try:
            if self.point.dist and self.point.dist.name:
                return self.point.dist.name, self.point.dist.version
        except Exception:  # what a half-removed distribution raises differs between versions of Python
            logger.debug("the metadata of entry point %s cannot be read", self.point, exc_info=True)
        return "an unknown distribution", None

    @property
    def distribution(self) -> str:
        """Name of the distribution that declares the entry point."""
        return self._metadata[0]

    @property
    def version(self) -> str | None:
        """The distribution's version."""
        return self._metadata[1]

    @property
    def owner(self) -> str:
        """The distribution with its version, for messages."""
        return " ".join(filter(None, (self.distribution, self.version)))

    def load(self) -> None:
        """Fill in everything; an error of the plugin's ends up in ``error``."""
        try:
            module = _import(self)
            self.api_version = _api_version(self, module)
            manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
            manager.add_hookspecs(hookspecs.HookSpecs)
            self.hooks = _hooks(manager, module)
            manager.register(module)
            if "offload_register_backends" in self.hooks:
                self.backend_types = _registered_types(manager.hook)
            self.relay = manager.hook
        except FOREIGN_ERRORS as error:
            self.error = describe(error)


def describe(error: BaseException) -> str:
    """Return type and text of an error of a plugin's, on one line."""
    text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def call(hook: Callable[..., Any], **arguments: object) -> Any:
    """Call one plugin's hook and return what it returned.

    Raises:
        PluginError: it returned a coroutine; that its function is no ``async def`` was seen when it was loaded.
    """
    results = hook(**arguments)
    result = results[0] if results else None  # pluggy leaves out None
    if inspect.iscoroutine(result):
        result.close()
        raise PluginError("the hook returned a coroutine, which nobody awaits; hooks are plain functions")
    return result


def _import(candidate: Candidate) -> ModuleType:
    point = candidate.point
    if not point.pattern.match(point.value):
        raise PluginError(f"entry point {point.value!r} is not the name of a module; write package.module")
    try:
        module = point.load()
    except ImportError as error:
        raise PluginError(_import_problem(candidate, error)) from error
    if not isinstance(module, ModuleType):
        raise PluginError(f"entry point {point.value!r} is {module!r}; it must name a module that holds hook functions")
    return module


def _import_problem(candidate: Candidate, error: ImportError) -> str:
    name = error.name or ""
    package = name.split(".")[0]
    if package == "offload_core":
        return (
            f"{describe(error)}; {_CORE} does not have what {candidate.owner} was written for: "
            f"upgrade offload-core or {candidate.distribution}"
        )
    if not isinstance(error, ModuleNotFoundError) or not package:
        return describe(error)
    if package == candidate.module.split(".")[0]:
        return f"{describe(error)}; the module belongs to {candidate.owner} itself: reinstall it"
    extras = ",".join(candidate.point.extras)
    cure = f"'{candidate.distribution}[{extras}]'" if extras else f"{package} (or what provides that package)"
    return f"{describe(error)}; {candidate.owner} needs the package {package!r}, which is missing: pip install {cure}"


def _api_version(candidate: Candidate, module: ModuleType) -> int:
    """Return the version that ``module`` states, the first thing of it that is looked at."""
    stated = getattr(module, "OFFLOAD_API_VERSION", None)
    oldest, newest = hookspecs.OLDEST_API_VERSION, hookspecs.API_VERSION
    serves = f"{_CORE} serves API version" + (f" {newest}" if oldest == newest else f"s {oldest} to {newest}")
    if stated is None:
        raise PluginError(
            f"module {module.__name__} of {candidate.owner} states no OFFLOAD_API_VERSION and {serves}; "
            f"add the line OFFLOAD_API_VERSION = {newest} to it, or upgrade {candidate.distribution}"
        )
    if not isinstance(stated, int) or isinstance(stated, bool):
        raise PluginError(
            f"OFFLOAD_API_VERSION of module {module.__name__} is {stated!r}; it must be a whole number, "
            f"such as {newest}"
        )
    candidate.api_version = stated  # for the report, also when it is refused
    if not oldest <= stated <= newest:
        behind = candidate.distribution if stated < oldest else "offload-core"
        raise PluginError(
            f"{candidate.owner} is written for API version {stated} and {serves}; pip install --upgrade {behind}"
        )
    return stated


def _hooks(manager: pluggy.PluginManager, module: ModuleType) -> tuple[str, ...]:
    """Return the hooks that ``module`` implements, after checking how."""
    found: list[str] = []
    for name in dir(module):
        options = manager.parse_hookimpl_opts(module, name)
        if options is None:
            if name in HOOKS and callable(getattr(module, name)):
                raise PluginError(f"{name} has the name of a hook and is not marked; write @hookimpl above it")
            continue
        function = getattr(module, name)
        hook = options["specname"] or name
        if hook not in HOOKS:
            if options["optionalhook"]:
                continue  # of a newer core, and the plugin can do without
            raise PluginError(f"there is no hook {hook}{did_you_mean(hook, HOOKS)}; the hooks are {', '.join(HOOKS)}")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise PluginError(f"hook {hook} is an async def; hooks are plain functions")
        if inspect.isgeneratorfunction(function) or options["wrapper"] or options["hookwrapper"]:
            raise PluginError(f"hook {hook} is a generator or a wrapper of hooks; hooks are plain functions")
        if hook in found:
            raise PluginError(f"hook {hook} is implemented twice; a module has one function for each hook")
        found.append(hook)
    if not found:
        raise PluginError(f"module {module.__name__} has no hook; write @hookimpl above its hook functions")
    return tuple(found)


def _registered_types(relay: pluggy.HookRelay) -> tuple[BackendType, ...]:
    returned = call(relay.offload_register_backends)
    if not isinstance(returned, list | tuple):
        raise PluginError(f"offload_register_backends returned {returned!r}; it must return a list of BackendType")
    for registered in returned:
        _check_type(registered)
    return tuple(returned)


def _check_type(registered: object) -> None:
    if not isinstance(registered, BackendType):
        raise PluginError(f"offload_register_backends returned {registered!r}; it must return BackendType objects")
    if not (isinstance(registered.name, str) and re.fullmatch(r"[a-z][a-z0-9_-]*", registered.name)):
        raise PluginError(
            f"backend type {registered.name!r}: its name must begin with a letter a to z and go on with "
            "letters, digits, - and _"
        )
    if not (isinstance(registered.backend, type) and issubclass(registered.backend, Backend)):
        raise PluginError(f"backend type {registered.name!r}: {registered.backend!r} is not a subclass of Backend")
    if not (isinstance(registered.options, type) and issubclass(registered.options, BackendOptions)):
        raise PluginError(
            f"backend type {registered.name!r}: {registered.options!r} is not a subclass of BackendOptions"
        )
