"""Every position scheme, one paper per file. `SCHEMES` maps the name in a spec string to the class."""

from locant.schemes.alibi import Alibi
from locant.schemes.base import Scheme
from locant.schemes.cope import Cope
from locant.schemes.deberta import Deberta
from locant.schemes.fire import Fire
from locant.schemes.first import First
from locant.schemes.huang import Huang1, Huang2, Huang3, Huang4
from locant.schemes.kerple import Kerple
from locant.schemes.learned import Learned
from locant.schemes.nope import Nope
from locant.schemes.rope import Rope
from locant.schemes.sandwich import Sandwich
from locant.schemes.shaw import Shaw
from locant.schemes.sinusoidal import Sinusoidal
from locant.schemes.sum import Sum
from locant.schemes.t5 import T5
from locant.schemes.tisa import Tisa
from locant.schemes.tisa2 import Tisa2
from locant.schemes.toeplitz import Toeplitz
from locant.schemes.xl import XL
from locant.schemes.xpos import Xpos

SCHEMES: dict[str, type[Scheme]] = {
    "nope": Nope,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "first": First,
    "shaw": Shaw,
    "xl": XL,
    "huang1": Huang1,
    "huang2": Huang2,
    "huang3": Huang3,
    "huang4": Huang4,
    "tisa": Tisa,
    "tisa2": Tisa2,
    "t5": T5,
    "toeplitz": Toeplitz,
    "alibi": Alibi,
    "rope": Rope,
    "xpos": Xpos,
    "kerple": Kerple,
    "sandwich": Sandwich,
    "fire": Fire,
    "cope": Cope,
    "deberta": Deberta,
}
"""Add your own with `locant.SCHEMES["mine"] = Mine`."""

__all__ = [
    "SCHEMES",
    "T5",
    "XL",
    "Alibi",
    "Cope",
    "Deberta",
    "Fire",
    "First",
    "Huang1",
    "Huang2",
    "Huang3",
    "Huang4",
    "Kerple",
    "Learned",
    "Nope",
    "Rope",
    "Sandwich",
    "Scheme",
    "Shaw",
    "Sinusoidal",
    "Sum",
    "Tisa",
    "Tisa2",
    "Toeplitz",
    "Xpos",
]
