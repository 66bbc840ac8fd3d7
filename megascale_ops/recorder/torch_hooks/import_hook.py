# SPDX-License-Identifier: Apache-2.0
"""Call a function right after a module has been imported for the first time, by whichever import that happens.

One finder at the front of ``sys.meta_path``. A name without a callback costs one dictionary look-up. For the
others it asks the remaining finders, and wraps the loader's ``exec_module`` for that one execution. Modules with a
callback are large (torch), so the garbage collector is off while they are imported (``megascale_ops.garbage_kept``).
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from megascale_ops.garbage_kept import GarbageKept, is_start_of_script
from megascale_ops.recorder.hook_guard import step_aside

_waiting: dict[str, list[Callable[[], None]]] = {}
# Modules whose import was under way when a callback was registered: their own import caused the registration.
_under_way: dict[str, list[Callable[[], None]]] = {}


class _Finder:
    """A meta path finder that finds nothing by itself."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that the other finders have for ``name``, with our callback behind its execution."""
        if _under_way:
            _look_again()
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is _finder else finder.find_spec(name, path, target)
            if spec is not None:
                _wrap(spec)
                return spec
        return None


_finder = _Finder()


def after_import(name: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` once, after module ``name`` has been imported; its exceptions are reported and suppressed."""
    _waiting.setdefault(name, []).append(callback)
    _stand()


def once_imported(name: str, callback: Callable[[], None]) -> None:
    """Do the same, and at once where the module is there already.

    Where it is under way (it imports torch in its first lines, and we are called by that) its end can't be hooked any
    more: the callback is called by the next import of anything new, of which every package has many.
    """
    module = sys.modules.get(name)
    if module is None:
        after_import(name, callback)
    elif _is_under_way(module):
        _under_way.setdefault(name, []).append(callback)
        _stand()
    else:
        _call(name, callback)


def _stand() -> None:
    """Stand before all other finders."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _is_under_way(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _look_again() -> None:
    """Run the callbacks of modules that are imported by now, and wait anew for those whose import failed."""
    for name in list(_under_way):
        module = sys.modules.get(name)
        if module is not None and _is_under_way(module):
            continue
        for callback in _under_way.pop(name, ()):
            if module is not None:
                _call(name, callback)
            else:
                after_import(name, callback)


def _call(name: str, callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception as error:  # noqa: BLE001  the import has succeeded and must stay so; reported once
        step_aside(f"the hook on {name}", error)


def _wrap(spec: ModuleSpec) -> None:
    """Put the callback behind the next execution of this spec's module."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # this one hides the class's only for one call
        # In the midst of the script's work its own garbage must not be left out of later looks.
        with GarbageKept(freezes=is_start_of_script(sys._getframe(1))):  # noqa: SLF001  the importing frame
            execute(module)
            for callback in _waiting.pop(spec.name, ()):
                _call(spec.name, callback)

    try:
        loader.exec_module = exec_module  # type: ignore[method-assign]  # on the instance, for one import
    except AttributeError as error:  # a loader without a dictionary: nothing to hook on to
        step_aside(f"the hook on {spec.name}", error)
