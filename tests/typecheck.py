"""The type checker of the test suite: beartype, with an int allowed where a float is asked for.

Models and batches are not checked: tests hand over stand-ins with the parts that matter, and wrong
ones to see the message that a user gets.
"""

from beartype import BeartypeConf, FrozenDict, beartype

from hc_lens.protocols import BatchesLike, BatchLike, LanguageModel, Model

PROTOCOLS = (BatchLike, BatchesLike, LanguageModel, Model)
STAND_INS = FrozenDict(dict.fromkeys(PROTOCOLS, object))
check = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=STAND_INS))
