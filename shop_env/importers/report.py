"""What an import left out or repaired: every rejected row with its reason, and counts."""

import collections
import dataclasses
from typing import Any

from shop_env import storage
from shop_env.text import clean


@dataclasses.dataclass(frozen=True)
class Where:
    """A place in a source: the file's name without its folder, and the number of the row, from 0."""

    file: str
    row: int


class Report:
    """Collects rejected rows in the order of the sources, and counts what was repaired in rows that were kept."""

    def __init__(self):
        self.rejected: list[dict[str, Any]] = []
        self.repaired: collections.Counter[str] = collections.Counter()
        self.num_rows = 0

    def reject(self, where: Where, kind: str, name: str, reason: str, detail: str = "") -> None:
        """Notes a row that is left out.

        Args:
          where: its place.
          kind: "product", "task" or "row" when it cannot be told.
          name: its id as far as it is known.
          reason: one of a few fixed phrases; rows are counted by it.
          detail: what exactly, cut to 200 characters.
        """
        record = {"file": where.file, "row": where.row, "kind": kind, "id": clean(name)[:64], "reason": reason, "detail": clean(detail)[:200]}
        self.rejected.append(record)

    def counts(self) -> dict[str, dict[str, int]]:
        """Reason -> rows, for rejected and for repaired rows, in ascending order of reason."""
        rejected = collections.Counter(f"{r['kind']}: {r['reason']}" for r in self.rejected)
        return {"rejected": dict(sorted(rejected.items())), "repaired": dict(sorted(self.repaired.items()))}

    def to_bytes(self) -> bytes:
        return storage.json_lines(self.rejected)
