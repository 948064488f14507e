"""Load one plugin: import its module, check its API version and its hooks, and ask for its backend types.

Each module has a pluggy manager of its own, so that every error belongs to one plugin. Pluggy accepts several mistakes
that are refused here with a message:

* hooks that are coroutines or generators, which nobody would run;
* marked functions whose name is no hook;
* functions with the name of a hook and without the mark;
* a registration that returns ``None``.
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
from offload_core.api.backend import Backend, BackendType, Requirement
from offload_core.api.errors import PluginError, did_you_mean, text_of
from offload_core.api.options import BackendOptions

logger = logging.getLogger(__name__)

HOOKS = tuple(name for name in vars(hookspecs.HookSpecs) if name.startswith("offload_"))

PLUGIN_ERRORS = (Exception, SystemExit)
"""The errors of a plugin's code that fail only that plugin. An operator's ``KeyboardInterrupt`` passes through."""

_COROUTINES = tuple(name for name, method in vars(Backend).items() if inspect.iscoroutinefunction(method))
"""The methods of a backend that the core awaits."""

_CORE = f"offload-core {__version__}"


@dataclass
class Candidate:
    """An entry point, with the facts that are known about its plugin so far.

    If ``error`` is set, the core uses no part of the plugin.
    """

    point: EntryPoint
    api_version: int | None = None
    hooks: tuple[str, ...] = ()
    backend_types: tuple[BackendType, ...] = ()
    relay: pluggy.HookRelay | None = None
    error: str | None = None

    @property
    def module(self) -> str:
        """The module in the entry point's value, or the whole value if it is not the name of a module."""
        match = self.point.pattern.match(self.point.value)
        return match["module"] if match else self.point.value

    @cached_property
    def _metadata(self) -> tuple[str, str | None]:
        try:
            if self.point.dist and self.point.dist.name:
                return self.point.dist.name, self.point.dist.version
        except Exception:  # the error of a half-removed distribution depends on the version of Python
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
        """Load the plugin and fill in all fields. An error of the plugin is kept in ``error``."""
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
        except PLUGIN_ERRORS as error:
            self.error = describe(error)


def describe(error: BaseException) -> str:
    """Return the type and the text of a plugin's error, on one line."""
    text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {text_of(error)}"
    return " ".join(text.split())


def call(hook: Callable[..., Any], **arguments: object) -> Any:
    """Call one plugin's hook and return its result.

    Raises:
        PluginError: the hook returned a coroutine. Loading refuses an ``async def``, but not such a result.
    """
    results = hook(**arguments)
    result = results[0] if results else None  # pluggy omits None
    if inspect.iscoroutine(result):
        result.close()
        raise PluginError("the hook returned a coroutine, which nobody awaits; hooks are plain functions")
    return result


def _import(candidate: Candidate) -> ModuleType:
    point = candidate.point
    if not point.pattern.match(point.value):
        raise PluginError(
            f"entry point {point.value!r} is not the name of a module; its author must write package.module"
        )
    try:
        module = point.load()
    except ImportError as error:
        raise PluginError(_import_problem(candidate, error)) from error
    if not isinstance(module, ModuleType):
        raise PluginError(f"entry point {point.value!r} is {module!r}; it must name a module with hook functions")
    return module


def _import_problem(candidate: Candidate, error: ImportError) -> str:
    name = error.name or ""
    package = name.split(".")[0]
    if package == "offload_core":
        return (
            f"{describe(error)}; {candidate.owner} was written for another version than {_CORE}: "
            f"upgrade offload-core or {candidate.distribution}"
        )
    if not isinstance(error, ModuleNotFoundError) or not package:
        return describe(error)
    if package == candidate.module.split(".")[0]:
        return f"{describe(error)}; the module belongs to {candidate.owner} itself: reinstall it"
    extras = ",".join(candidate.point.extras)
    cure = f"'{candidate.distribution}[{extras}]'" if extras else f"{package} (or the distribution with that package)"
    return f"{describe(error)}; {candidate.owner} needs the package {package!r}, which is missing: pip install {cure}"


def _api_version(candidate: Candidate, module: ModuleType) -> int:
    """Return the API version that ``module`` states. This check precedes all others."""
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
    candidate.api_version = stated  # for the report, also of a refused plugin
    if not oldest <= stated <= newest:
        behind = candidate.distribution if stated < oldest else "offload-core"
        raise PluginError(
            f"{candidate.owner} is written for API version {stated} and {serves}; pip install --upgrade {behind}"
        )
    return stated


def _hooks(manager: pluggy.PluginManager, module: ModuleType) -> tuple[str, ...]:
    """Check the hooks that ``module`` implements, and return their names."""
    found: list[str] = []
    for name in dir(module):
        options = manager.parse_hookimpl_opts(module, name)
        if options is None:
            if name in HOOKS and callable(getattr(module, name)):
                raise PluginError(f"{name} has the name of a hook, but no mark; write @hookimpl above it")
            continue
        function = getattr(module, name)
        hook = options["specname"] or name
        if hook not in HOOKS:
            if options["optionalhook"]:
                continue  # a hook of a newer core that the plugin does not need
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


def _class_problem(backend: type[Backend[Any]]) -> str | None:
    """Return a mistake in the class of a backend that would show itself only in a call, or ``None``.

    A plain function in place of a coroutine is none, because it may return another coroutine.
    """
    for name in _COROUTINES:
        method = getattr(backend, name)
        generates = inspect.isgeneratorfunction(method) and not method.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE
        if generates or inspect.isasyncgenfunction(method):
            return (
                f"{backend.__name__}.{name} is a generator, which nobody awaits; write async def {name} without yield"
            )
    try:
        inspect.signature(backend).bind(None, None)
    except TypeError as error:
        cure = "write __init__(self, options, context)"
        return f"{backend.__name__} cannot be made from options and a context ({error}); {cure}"
    except ValueError:  # it has no signature that could be read
        pass
    return None


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
    if problem := _class_problem(registered.backend):
        raise PluginError(f"backend type {registered.name!r}: {problem}")
    if not (isinstance(registered.options, type) and issubclass(registered.options, BackendOptions)):
        raise PluginError(
            f"backend type {registered.name!r}: {registered.options!r} is not a subclass of BackendOptions"
        )
    for required in registered.requires:
        if not (isinstance(required, Requirement) and required.module.isidentifier() and required.install.strip()):
            raise PluginError(
                f"backend type {registered.name!r} requires {required!r}; it must be a Requirement with the name of a "
                "top-level module and the command that installs it"
            )
