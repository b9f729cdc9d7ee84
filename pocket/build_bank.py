"""Writes the initial bank S0 and the analyst's wordings from `skills.json`.

    python -m pocket.build_bank

S0 holds three useful chunks, one stale and one placebo; the other useful mechanisms are left for the analyst to discover. The policy has
read all of these wordings in the warm start, so a discovered chunk works at once or not at all.
"""

import dataclasses
from pathlib import Path

from intraskill.run_directory import write_json
from intraskill.skills.bank import Bank
from intraskill.skills.cards import deployable_of
from pocket.skills import mechanisms

HERE = Path(__file__).parent
INITIAL = ("query_all_attributes", "persona_option", "page_attributes", "skip_advert", "calm_tone")
DISCOVERABLE = ("query_all_attributes", "persona_option", "stated_over_persona", "page_attributes", "option_available", "price_ceiling")


def main() -> None:
    known = mechanisms()
    Bank(tuple(known[name].paraphrases[0] for name in INITIAL)).save(HERE / "bank.json")
    wordings = {name: [dataclasses.asdict(deployable_of(c)) for c in known[name].paraphrases] for name in DISCOVERABLE}
    write_json(HERE / "mechanisms.json", wordings)


if __name__ == "__main__":
    main()
