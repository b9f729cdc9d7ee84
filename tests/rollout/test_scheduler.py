"""The scheduler drives a simulated device whose rows remember how their tokens entered: in pieces, or step by step."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intraskill.rollout.scheduler import CopyCall, DecodeCall, PrefillCall, Request, Scheduler, Shapes, noise_key
from intraskill.types import EngineError, Sampling, Session

SHAPES = Shapes(num_slots=3, max_length=200, num_prompts=2, decode_rows=2, decode_block=3, prefill_buckets=(4, 8), prefill_tokens=16)
STOP = 0


def next_token(seen):
    """Stands for the model: depends on every token so far, and stops now and then."""
    return sum((i + 1) * t for i, t in enumerate(seen)) % 7


class Device:
    """Rows of (how, tokens); completed turns by session."""

    def __init__(self, shapes=SHAPES):
        self.scheduler = Scheduler(shapes)
        self.shapes = shapes
        self.rows = [()] * shapes.num_rows
        self.finished = {}
        self.calls = []

    def ask(self, name, prompt, max_new_tokens=6):
        request = Request(Sampling(max_new_tokens, stop_ids=(STOP,)), len(prompt), name, 0.0)
        self.scheduler.add(Session(name, (1,)), (0, 0), prompt, request)

    def tokens(self, row):
        return [t for _, tokens in self.rows[row] for t in tokens]

    def step(self):
        call = self.scheduler.next_call()
        self.calls.append(call)
        if isinstance(call, CopyCall):
            self._copy(call)
        elif isinstance(call, PrefillCall):
            assert len(call.episodes) <= self.shapes.prefill_rows(call.bucket)
            for e in call.episodes:
                piece = e.pieces[0]
                assert piece.bucket == call.bucket and piece.start == e.fed and piece.stop - piece.start <= call.bucket
                self.rows[e.slot] = (() if e.fresh else self.rows[e.slot]) + ((call.bucket, tuple(e.tokens[piece.start : piece.stop])),)
            copies = self.scheduler.prefilled(call)
            if copies:
                self._copy(copies)
        elif isinstance(call, DecodeCall):
            assert len(call.episodes) <= self.shapes.decode_rows
            for e in call.episodes:
                self._decode(e)
        return call is not None

    def _copy(self, call):
        for source, target in call.pairs:
            self.rows[target] = self.rows[source]

    def _decode(self, e):
        block = self.shapes.decode_block
        assert self.tokens(e.slot) == e.tokens[: e.fed]
        if e.pieces:
            known = e.tokens[e.fed : min(e.pieces[0].stop, e.fed + block)]
            self.rows[e.slot] += tuple((0, (t,)) for t in known)
            self.scheduler.forced(e, len(known))
            return
        assert e.fed == len(e.tokens)
        ids = []
        left = e.request.sampling.max_new_tokens - e.request.num_sampled
        while len(ids) < min(block, left):
            ids.append(next_token([*e.tokens, *ids]))
            if ids[-1] == STOP or len(ids) == left:
                break
            self.rows[e.slot] += ((0, (ids[-1],)),)
        request = e.request
        reason = self.scheduler.sampled(e, ids, [-1.0] * len(ids), 0)
        if reason:
            self.finished[request.done] = (tuple(e.tokens[request.prompt_length :]), reason, request.cached_tokens, self.rows[e.slot])

    def run(self):
        while self.step():
            pass


def play_alone(prompts, results):
    """Each session by itself on a fresh device: its sampled turns and how its tokens entered."""
    alone = {}
    for name, prompt in prompts.items():
        device, tokens, turns = Device(), list(prompt), []
        for result in results:
            device.ask(name, tokens)
            device.run()
            ids, reason, _, row = device.finished.pop(name)
            tokens += [*ids, *result]
            turns.append((ids, reason, row))
        alone[name] = turns
    return alone


@given(seed=st.integers(0, 2**32), num_sessions=st.integers(1, 7))
def test_a_crowd_changes_nothing(seed: int, num_sessions: int):
    rng = random.Random(seed)
    shared = [rng.randrange(7) for _ in range(rng.choice([3, 8, 13]))]
    prompts = {f"s{i}": shared if rng.random() < 0.5 else [rng.randrange(7) for _ in range(rng.randrange(1, 20))] for i in range(num_sessions)}
    results = [[rng.randrange(7) for _ in range(rng.randrange(0, 9))] for _ in range(3)]
    alone = play_alone(prompts, results)
    device = Device()
    state = {name: [list(prompt), 0, False] for name, prompt in prompts.items()}  # tokens, turns done, asked
    while any(turn < len(results) for _, turn, _ in state.values()):
        ready = [n for n, (_, turn, asked) in state.items() if not asked and turn < len(results)]
        for name in rng.sample(ready, rng.randint(0, len(ready))):
            device.ask(name, state[name][0])
            state[name][2] = True
        for _ in range(rng.randrange(4)):
            device.step()
        for name, (ids, reason, _, row) in device.finished.items():
            tokens, turn, _ = state[name]
            assert (ids, reason, row) == alone[name][turn]
            state[name] = [tokens + [*ids, *results[turn]], turn + 1, False]
        device.finished.clear()


def test_a_group_computes_its_first_prompt_once():
    device, prompt = Device(Shapes(8, 200, 2, 8, 3, (4, 8), 16)), [1, 2, 3, 4, 5]
    for i in range(8):
        device.ask(f"s{i}", prompt)
    device.run()
    assert sum(len(c.episodes) for c in device.calls if isinstance(c, PrefillCall)) == 1
    counts = device.scheduler.counts
    assert (counts["new_tokens"], counts["prefilled_tokens"], counts["copied_tokens"]) == (40, 5, 35)
    assert sorted(cached for _, _, cached, _ in device.finished.values()) == [0] + [5] * 7
    device.ask("late", prompt)  # comes when the others are done
    device.run()
    assert counts["prefilled_tokens"] == 5


def test_only_new_tokens_are_prefilled_on_later_turns():
    device, tokens = Device(), [1, 2, 3]
    for turn in range(4):
        device.ask("s", tokens)
        device.run()
        ids, _, cached, _ = device.finished.pop("s")
        assert cached == (0 if turn == 0 else len(tokens) - 3)  # the last sampled token and the two of the result are new
        tokens += [*ids, 5, 6]
    counts = device.scheduler.counts
    assert counts["prefilled_tokens"] == counts["new_tokens"] == 3 + 3 * 3


def test_the_leader_of_a_shared_prompt_may_vanish():
    device, prompt = Device(), list(range(1, 7)) * 3
    for name in ("a", "b", "c"):
        device.ask(name, prompt)
    device.step()  # the first piece of a's prompt
    assert device.scheduler.drop("a").done == "a"
    device.run()
    assert set(device.finished) == {"b", "c"} and device.finished["b"][0] == device.finished["c"][0]


def test_episodes_with_a_slot_do_not_wait_behind_one_without():
    device = Device()
    for i in range(3):
        device.ask(f"s{i}", [i + 1])
    device.run()
    tokens = {n: [int(n[1]) + 1, *ids, 5] for n, (ids, *_) in device.finished.items()}
    device.finished.clear()
    for name in ("s0", "s1", "s2"):
        device.ask(name, tokens[name])
    device.ask("new", [4, 4])
    device.run()
    assert set(device.finished) == {"s0", "s1", "s2", "new"} and device.scheduler.counts["evictions"] == 1


def test_the_longest_idle_episode_loses_its_slot():
    device = Device()
    for name in ("a", "b", "c"):
        device.ask(name, [ord(name) % 7, 1])
        device.run()
    device.ask("a", [ord("a") % 7, 1, *device.finished["a"][0], 5])
    device.run()
    device.ask("d", [3, 3])
    device.run()
    kept = {e.id for e in device.scheduler._episodes.values() if e.slot is not None}
    assert kept == {"a", "c", "d"}


def test_flush_leaves_nothing_stale():
    device = Device()
    device.ask("idle", [1, 2, 3])
    device.run()
    device.ask("busy", [3, 1], max_new_tokens=12)  # samples 5 6 2 5 0
    while not any(isinstance(c, DecodeCall) for c in device.calls[-1:]):
        device.step()
    tokens_before = list(device.scheduler._episodes["busy"].tokens)
    device.rows = [((99, ("stale",)),)] * device.shapes.num_rows
    device.scheduler.flush()
    device.run()
    ids, _, cached, row = device.finished["busy"]
    assert ids == (5, 6, 2, 5, 0) and "stale" not in str(row) and cached == 0
    assert [t for how, tokens in row if how for t in tokens] == tokens_before == [3, 1, 5, 6, 2]  # in one stretch, though 5 6 2 were sampled
    device.ask("idle", [1, 2, 3, *device.finished["idle"][0], 4])
    device.run()
    assert "stale" not in str(device.finished["idle"][3])


def test_refusals_leave_the_session_as_it_was():
    device = Device()
    with pytest.raises(EngineError, match="195 prompt tokens and 6 new ones exceed the engine's max_length, 200"):
        device.ask("s", [1] * 195)
    device.ask("s", [1, 2])
    with pytest.raises(EngineError, match="already has a turn in flight"):
        device.ask("s", [1, 2, 3])
    device.run()
    with pytest.raises(EngineError, match="does not continue its"):
        device.ask("s", [1, 3, 3, 3, 3, 3, 3, 3, 3])
    device.ask("s", [1, 2, *device.finished["s"][0], 5])
    device.run()


def test_sessions_that_nobody_releases_are_bounded():
    device = Device()
    for i in range(40):
        device.ask(f"s{i}", [1, 2])
        device.run()
    assert len(device.scheduler._episodes) == 4 * 3


def test_dropping_a_turn_leaves_the_next_one_of_that_session_alone():
    device = Device()
    device.ask("a", [1, 2, 3])
    old = device.scheduler.drop("a")
    device.ask("a", [1, 2, 3])
    assert device.scheduler.drop("a", old) is None and device.scheduler.busy
    new = device.scheduler.drop("a")
    assert new is not None and new is not old and not device.scheduler.busy


def test_drop_frees_slots_at_any_moment():
    device = Device()
    for i in range(5):
        device.ask(f"s{i}", [i + 1] * 5)
    device.step()
    assert len(device.scheduler.drop_all()) == 5 and not device.scheduler.busy
    assert sorted(device.scheduler._free) == [0, 1, 2] and device.scheduler.drop("s0") is None
    assert not device.step()


def test_pieces_depend_on_the_length_alone():
    assert [(p.start, p.stop, p.bucket) for p in SHAPES.pieces(5, 26)] == [(5, 13, 8), (13, 21, 8), (21, 26, 8)]
    assert [(p.start, p.stop, p.bucket) for p in SHAPES.pieces(0, 3)] == [(0, 3, 4)]


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="ascend"):
        dataclasses.replace(SHAPES, prefill_buckets=(8, 4))
    with pytest.raises(ValueError, match="num_slots"):
        dataclasses.replace(SHAPES, num_slots=0)


def test_noise_depends_on_seed_and_noise_only():
    a = noise_key(1, Session("x", (1, 2)))
    assert a == noise_key(1, Session("y", (1, 2))) and len({a, noise_key(2, Session("x", (1, 2))), noise_key(1, Session("x", (12,)))}) == 3
