r"""Makes world directories for the shop: from public data sets, or out of a seed.

    python -m shop_env import --format shopsimulator products.json.gz --out runs/shopsim
    python -m shop_env import --format webshop items.json attributes.json instructions.json --out runs/webshop
    python -m shop_env synth --language zh --num_products 22726 --seed 0 --out runs/zh

Same arguments, same bytes. What an import leaves out is listed in rejected.jsonl; import.json has the counts that are printed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shop_env import bilingual
from shop_env.errors import InvalidSetting, ShopEnvError
from shop_env.importers import run
from shop_env.tasks import SPLIT_SIZES


def _sizes(text: str) -> dict[str, int]:
    """Reads "train=3726,validation=400"; "none" means no splits."""
    if text == "none":
        return {}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name or not number.isdecimal() or name in sizes:
            raise argparse.ArgumentTypeError(f"{part!r}: give NAME=NUMBER,NAME=NUMBER,... with each name once, or none")
        sizes[name] = int(number)
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shop_env", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    reader = commands.add_parser("import", help="bring a public data set into a world directory")
    reader.add_argument("--format", required=True, choices=sorted(run.READERS))
    reader.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON, plain or compressed by gzip")
    maker = commands.add_parser("synth", help="generate a bilingual synthetic world")
    maker.add_argument("--language", required=True, choices=sorted(bilingual.LANGUAGES))
    maker.add_argument("--num_products", type=int, default=bilingual.NUM_PRODUCTS)
    for command in (reader, maker):
        default = ",".join(f"{name}={size}" for name, size in SPLIT_SIZES.items())
        command.add_argument("--splits", type=_sizes, default=dict(SPLIT_SIZES), metavar="NAME=N,...", help=f"default {default}")
        command.add_argument("--seed", type=int, default=0, help="of the splits, and of everything synthetic")
        command.add_argument("--out", required=True, type=Path, metavar="DIR", help="a directory that is new or empty")
    return parser


def _print(facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if not isinstance(value, dict):
            print(f"{name:36s} {value}")
            continue
        print(f"{name}:" if value else f"{name}: none")
        for key, number in value.items():
            print(f"  {number:9d}  {key}")


def _run(arguments: argparse.Namespace) -> None:
    if arguments.out.exists() and (not arguments.out.is_dir() or any(arguments.out.iterdir())):
        raise InvalidSetting(f"--out {arguments.out}: there is something already; name a new directory, or empty this one")
    if arguments.command == "import":
        imported = run.import_files(arguments.format, arguments.files, arguments.splits, arguments.seed)
        imported.save(arguments.out)
        _print({key: value for key, value in imported.facts.items() if key != "sources"})
    else:
        config = bilingual.Config(arguments.language, arguments.seed, arguments.num_products, tuple(arguments.splits.items()))
        world = bilingual.generate(config)
        world.save(arguments.out)
        _print({"products": len(world.catalog), "tasks": len(world.tasks), "splits": {k: len(v) for k, v in world.splits.items()}})
    print(f"written to {arguments.out}")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        _run(_parser().parse_args(argv))
    except ShopEnvError as e:
        print(f"shop_env: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
