"""Stand-ins for two modules that SGLang imports and the checks do not use."""

from __future__ import annotations

import importlib.machinery
import sys
import types
import unittest
import warnings
from typing import Any

import transformers.utils.import_utils  # noqa: F401  # it must look for torchvision before the stand-in is there

warnings.simplefilter("ignore")  # SGLang's imports say that there is no accelerator


class _Torchvision(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
    _module = _Torchvision(_name)
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None)
    sys.modules[_name] = _module

_utils: Any = types.ModuleType("sglang.test.test_utils")
_utils.CustomTestCase = unittest.TestCase
sys.modules["sglang.test.test_utils"] = _utils
