"""Every position scheme, one paper per file. `SCHEMES` maps the name in a spec string to the class, and `MAPS` the
names of maps, which follow a scheme after @.

A class is imported when it is first used: the names of the schemes are known without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

CLASSES = {
    "nope": "nope.Nope",
    "learned": "learned.Learned",
    "sinusoidal": "sinusoidal.Sinusoidal",
    "first": "first.First",
    "shaw": "shaw.Shaw",
    "xl": "xl.XL",
    "huang1": "huang.Huang1",
    "huang2": "huang.Huang2",
    "huang3": "huang.Huang3",
    "huang4": "huang.Huang4",
    "tisa": "tisa.Tisa",
    "tisa2": "tisa2.Tisa2",
    "t5": "t5.T5",
    "toeplitz": "toeplitz.Toeplitz",
    "alibi": "alibi.Alibi",
    "rope": "rope.Rope",
    "xpos": "xpos.Xpos",
    "kerple": "kerple.Kerple",
    "sandwich": "sandwich.Sandwich",
    "fire": "fire.Fire",
    "cope": "cope.Cope",
    "deberta": "deberta.Deberta",
    "inkling": "inkling.Inkling",
    "fox": "fox.Fox",
    "grape": "grape.Grape",
    "pope": "pope.Pope",
    "fade": "fade.Fade",
    "logn": "logn.Logn",
    "local": "local.Local",
    "fope": "fope.Fope",
    "dape": "dape.Dape",
}
"""Name in a spec string -> file and class. A new scheme is one file in this folder and one line here."""

MAP_CLASSES = {
    "interpolated": "interpolated.Interpolated",
    "grouped": "grouped.Grouped",
    "recurrent": "recurrent.Recurrent",
    "selfextend": "selfextend.SelfExtend",
}
"""The same for maps of positions and offsets, which follow a scheme after @."""

_LOCATIONS = {
    location.partition(".")[2]: location
    for location in ("base.Scheme", "sum.Sum", "map.Map", *CLASSES.values(), *MAP_CLASSES.values())
}

if TYPE_CHECKING:  # what type checkers see; at run time __getattr__ imports the same
    from locant.schemes.alibi import Alibi as Alibi
    from locant.schemes.base import Scheme as Scheme
    from locant.schemes.cope import Cope as Cope
    from locant.schemes.dape import Dape as Dape
    from locant.schemes.deberta import Deberta as Deberta
    from locant.schemes.fade import Fade as Fade
    from locant.schemes.fire import Fire as Fire
    from locant.schemes.first import First as First
    from locant.schemes.fope import Fope as Fope
    from locant.schemes.fox import Fox as Fox
    from locant.schemes.grape import Grape as Grape
    from locant.schemes.grouped import Grouped as Grouped
    from locant.schemes.huang import Huang1 as Huang1
    from locant.schemes.huang import Huang2 as Huang2
    from locant.schemes.huang import Huang3 as Huang3
    from locant.schemes.huang import Huang4 as Huang4
    from locant.schemes.inkling import Inkling as Inkling
    from locant.schemes.interpolated import Interpolated as Interpolated
    from locant.schemes.kerple import Kerple as Kerple
    from locant.schemes.learned import Learned as Learned
    from locant.schemes.local import Local as Local
    from locant.schemes.logn import Logn as Logn
    from locant.schemes.map import Map as Map
    from locant.schemes.nope import Nope as Nope
    from locant.schemes.pope import Pope as Pope
    from locant.schemes.recurrent import Recurrent as Recurrent
    from locant.schemes.rope import Rope as Rope
    from locant.schemes.sandwich import Sandwich as Sandwich
    from locant.schemes.selfextend import SelfExtend as SelfExtend
    from locant.schemes.shaw import Shaw as Shaw
    from locant.schemes.sinusoidal import Sinusoidal as Sinusoidal
    from locant.schemes.sum import Sum as Sum
    from locant.schemes.t5 import T5 as T5
    from locant.schemes.tisa import Tisa as Tisa
    from locant.schemes.tisa2 import Tisa2 as Tisa2
    from locant.schemes.toeplitz import Toeplitz as Toeplitz
    from locant.schemes.xl import XL as XL
    from locant.schemes.xpos import Xpos as Xpos

    SCHEMES: dict[str, type[Scheme]]
    """Name in a spec string -> class. Add your own with `locant.SCHEMES["mine"] = Mine`."""
    MAPS: dict[str, type[Map]]
    """Name after @ in a spec string -> class. Add your own with `locant.schemes.MAPS["mine"] = Mine`."""

__all__ = ["MAPS", "SCHEMES", *_LOCATIONS]


def __getattr__(name: str) -> Any:
    """Returns SCHEMES, MAPS or a class of them, imported now and kept for the next time."""
    if name in ("SCHEMES", "MAPS"):
        value = {each: _load(location) for each, location in (CLASSES if name == "SCHEMES" else MAP_CLASSES).items()}
    elif name in _LOCATIONS:
        value = _load(_LOCATIONS[name])
    else:
        raise AttributeError(f"module 'locant.schemes' has no attribute {name!r}")
    return globals().setdefault(name, value)


def _load(location: str) -> Any:
    module, _, name = location.partition(".")
    return getattr(import_module(f"locant.schemes.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def names() -> list[str]:
    """Returns the names that a spec string can use, schemes added to `SCHEMES` included; imports no torch."""
    return list(globals().get("SCHEMES", CLASSES))


def map_names() -> list[str]:
    """Returns the names of maps that a spec string can use after @; imports no torch."""
    return list(globals().get("MAPS", MAP_CLASSES))


def class_of(name: str) -> Any:
    """Returns the scheme or map of a name; None if there is none."""
    found = __getattr__("SCHEMES").get(name)
    return __getattr__("MAPS").get(name) if found is None else found
