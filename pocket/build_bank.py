"""Writes the initial bank S0 and the analyst's wordings from `skills.json`.

    python -m pocket.build_bank

S0 holds three useful chunks, one stale and one placebo; the other useful mechanisms are left for the analyst to discover. The policy has
read these wordings in the warm start, except those for `no_purchase`: what an analyst proposes for a policy that ran out of actions is new to it,
and the gate is there to find out whether it helps.
"""

import dataclasses
from pathlib import Path

from intraskill.run_directory import write_json
from intraskill.skills.bank import Bank
from intraskill.skills.cards import Deployable, deployable_of
from pocket.skills import mechanisms

HERE = Path(__file__).parent
INITIAL = ("query_all_attributes", "persona_option", "page_attributes", "skip_advert", "calm_tone")
DISCOVERABLE = ("query_all_attributes", "persona_option", "stated_over_persona", "page_attributes", "option_available", "price_ceiling")

UNSEEN = {
    "no_purchase": [
        {"title": "next row", "applies_when": "the open row lacks one", "procedure": "leave and open the next row"},
        {"title": "next page", "applies_when": "each row lacks one", "procedure": "go next and open another row"},
    ]
}


def main() -> None:
    known = mechanisms()
    Bank(tuple(known[name].paraphrases[0] for name in INITIAL)).save(HERE / "bank.json")
    wordings = {name: [dataclasses.asdict(deployable_of(c)) for c in known[name].paraphrases] for name in DISCOVERABLE}
    unseen = {name: [dataclasses.asdict(Deployable(**w)) for w in texts] for name, texts in UNSEEN.items()}
    write_json(HERE / "mechanisms.json", wordings | unseen)


if __name__ == "__main__":
    main()
