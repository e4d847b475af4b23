"""The doctor's checks, one file each, found by discovery: every module here that defines CHECK is one."""

import functools
import importlib
import pkgutil

from whet.diagnose.run import Check


@functools.cache
def discover() -> dict[str, Check]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    found = (importlib.import_module(f"{__name__}.{name}").CHECK for name in names)
    return {check.name: check for check in found}
