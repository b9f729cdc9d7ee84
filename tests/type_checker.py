"""The run-time checker that the tests' import hook applies to the annotations of `intraskill` and `shop_env`.

Plain beartype, except that an `int` passes where a `float` is annotated: that is what PEP 484 and pyright say.
"""

import beartype

check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
