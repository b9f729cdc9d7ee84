"""`python -m intraskill.skills show|diff|verify|rehash|refit`: looks at the skill files of a run and checks them."""

import argparse
import pathlib
import sys

from intraskill.skills import bank, records, refit
from intraskill.types import Chunk, InputError


def chunks_of(path: str) -> tuple[Chunk, ...]:
    """The chunks of a bank file or of a candidates file."""
    record = records.read(path)
    if record.schema == "bank":
        return bank.bank_of(path, record).chunks
    if record.schema == "candidates":
        return tuple(bank.decode_chunk(path, c["chunk"]) for c in record.content["candidates"])
    raise InputError(f"{path}: holds schema {record.schema!r}; show and diff read bank and candidates files")


def verify(paths: list[str]) -> int:
    """Checks every file's own hash, and the links between the given files."""
    known: dict[str, list[str]] = {}
    loaded = [(path, records.read(path)) for path in paths]
    for _, record in loaded:
        known.setdefault(record.schema, []).append(record.sha256)
    broken = 0
    for path, record in loaded:
        if record.schema == "bank":
            bank.bank_of(path, record)
        for name, sha256 in record.inputs.items():
            missing = name in known and sha256 not in known[name]
            broken += missing
            print(f"{path}: its {name} {sha256[:12]} is " + ("NOT among the given files" if missing else "given" if name in known else "not given"))
        print(f"{path}: {record.schema} {record.sha256[:12]} ok")
    return int(broken > 0)


def rehash(path: str) -> int:
    """Accepts a file as it is now: writes the hash of its present content into it."""
    record, claimed = records.read_unverified(path)
    if record.schema == "bank":
        bank.bank_of(path, record)  # an invalid bank is not made valid by a hash
    print(f"{path}: {claimed[:12] or 'no hash'} -> {records.write(path, record)[:12]}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 when files differ, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m intraskill.skills", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show", help="a bank or candidates file as Markdown").add_argument("file")
    two = commands.add_parser("diff", help="what changed between two banks")
    two.add_argument("before")
    two.add_argument("after")
    commands.add_parser("verify", help="check hashes and the links between files").add_argument("files", nargs="+")
    commands.add_parser("rehash", help="accept an edited file").add_argument("file")
    commands.add_parser("refit", help="fit a recorded gate again and compare").add_argument("file")
    options = parser.parse_args(arguments)
    try:
        if options.command == "show":
            print(bank.markdown(chunks_of(options.file)), end="")
            return 0
        if options.command == "diff":
            lines = bank.diff(chunks_of(options.before), chunks_of(options.after))
            print("\n".join(lines or ["no difference"]))
            return int(bool(lines))
        if options.command == "verify":
            return verify(options.files)
        if options.command == "rehash":
            return rehash(options.file)
        result = refit.refit(options.file)
        print(refit.table(result))
        print("\n".join(f"DIFFERS {d}" for d in result.differences) or f"{pathlib.Path(options.file).name}: reproduced")
        return int(bool(result.differences))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
