"""What docs/shop.md shows runs as it stands there."""

import asyncio
import pathlib
import re

from rollout import fakes

from intraskill.rollout.agent import Limits, run_episode
from intraskill.types import Session, Shop, Status, ToolCall

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "shop.md"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


def the_one_with(word: str) -> str:
    (code,) = (snippet for snippet in snippets() if word in snippet)
    return code


def test_an_own_agent_shops_in_ten_lines(capsys):
    code = the_one_with("ServerThread(")
    main = code[code.index("async def main") : code.index("\n\n\nwith ")]
    assert len(main.splitlines()) + len(code[code.index("\nwith ") :].strip().splitlines()) <= 10
    exec(compile(code, str(DOCS), "exec"), {"__name__": "docs"})
    shown = capsys.readouterr().out
    assert "find a " in shown and "search page" in shown and "results 1-5 of " in shown and "product " in shown


class GuessingChat(fakes.Chat):
    """The turn 9 calls the tool of the example with a wrong name, any other with its number."""

    def parse(self, ids):
        return ToolCall("buy", {}) if ids[0] == 9 else ToolCall("guess", {"number": str(ids[0])})


def test_the_example_of_another_environment_is_one_for_the_agent():
    names: dict = {"__name__": "docs"}
    exec(compile(the_one_with("class Guessing"), str(DOCS), "exec"), names)
    shop = names["Guessing"]()
    assert isinstance(shop, Shop)

    async def play(*turns):
        task = (await shop.tasks("train"))[7]
        engine = fakes.Engine([fakes.completion(turn, fakes.STOP) for turn in turns])
        return await run_episode(engine, shop, GuessingChat(), task, (), Session("s", (1,)), fakes.SAMPLING, Limits(1000, 5))

    right, wrong = asyncio.run(play(9, 7)), asyncio.run(play(3))
    assert (right.status, right.reward, right.success, len(right.turns)) == (Status.PURCHASE, 1.0, True, 2)
    assert right.turns[0].feedback == "invalid_format" and right.error == ""
    assert (wrong.status, wrong.reward, wrong.success) == (Status.PURCHASE, 0.0, False)
    assert asyncio.run(shop.goal("test-3")) == {"number": 3} and not shop._episodes
