"""Machine translation that learns a translation memory in minutes, without fine-tuning.

The promised names are resolved on first use, so that importing clknn, and `clknn --help`, never wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clknn.adaptation import ADAPTIVE as ADAPTIVE
    from clknn.adaptation import CKMT_ADAPTIVE as CKMT_ADAPTIVE
    from clknn.adaptation import CLKNN as CLKNN
    from clknn.adaptation import GATED as GATED
    from clknn.adaptation import KNN_MT as KNN_MT
    from clknn.adaptation import KSTER as KSTER
    from clknn.adaptation import Method as Method
    from clknn.adaptation import Verdict as Verdict
    from clknn.adaptation import adapt as adapt
    from clknn.adaptation import verdict as verdict
    from clknn.adapter import PAPER as PAPER
    from clknn.adapter import AdapterSettings as AdapterSettings
    from clknn.corpus import Origin as Origin
    from clknn.corpus import Pair as Pair
    from clknn.corpus import Tally as Tally
    from clknn.datastore import Datastore as Datastore
    from clknn.datastore import open_datastore as open_datastore
    from clknn.errors import DatastoreError as DatastoreError
    from clknn.errors import Error as Error
    from clknn.errors import InputError as InputError
    from clknn.errors import ModelError as ModelError
    from clknn.evaluation import compare as compare
    from clknn.mixing import Mixing as Mixing
    from clknn.model import Decoding as Decoding
    from clknn.model import Model as Model
    from clknn.model import load as load_model  # noqa: F401 (promised under this name)
    from clknn.translator import Translation as Translation
    from clknn.translator import Translator as Translator

__version__ = "0.1.0"

_HOMES = {
    "Method": "adaptation",
    "KSTER": "adaptation",
    "KNN_MT": "adaptation",
    "GATED": "adaptation",
    "CLKNN": "adaptation",
    "CKMT_ADAPTIVE": "adaptation",
    "ADAPTIVE": "adaptation",
    "AdapterSettings": "adapter",
    "PAPER": "adapter",
    "Datastore": "datastore",
    "DatastoreError": "errors",
    "Decoding": "model",
    "Error": "errors",
    "InputError": "errors",
    "Mixing": "mixing",
    "Model": "model",
    "ModelError": "errors",
    "Origin": "corpus",
    "Pair": "corpus",
    "Tally": "corpus",
    "Translation": "translator",
    "Translator": "translator",
    "Verdict": "adaptation",
    "adapt": "adaptation",
    "compare": "evaluation",
    "load_model": "model",
    "open_datastore": "datastore",
    "verdict": "adaptation",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clknn' has no attribute {name!r}")
    home = import_module(f"clknn.{_HOMES[name]}")
    return getattr(home, "load" if name == "load_model" else name)
